"""What the first plan of a wrapper fixes with `use_cuda_graph=True`: captured launches contain it."""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_attn.errors import ArgumentError, RuntimeArgumentError
from cute_attn.problem import DeviceTokens, Features, GraphLimits, Settings, Tokens
from cute_attn.request.batch_plan import Splits


class GraphInvariants(NamedTuple):
    """What a captured graph has fixed, so that later plans must not change it."""

    settings: Settings
    splits: Splits
    graph: GraphLimits
    first_row: int  # `run` fills the rows of out and lse before it with torch


def check_sizes(graph: GraphLimits, tokens: Tokens | DeviceTokens, q_len: int | None) -> None:
    """Refuse a plan for which captured launches have no room."""
    assert tokens.rows is not None
    if graph.max_qo_len != q_len:
        name = "uniform_q_len" if tokens.q_len is None else "q_len_per_req"
        raise RuntimeArgumentError(
            f"{name} must stay {graph.max_qo_len} with use_cuda_graph=True, got {q_len}: use another wrapper"
        )
    if tokens.rows > graph.max_rows:
        raise ArgumentError(
            f"qo_indptr[-1] must not exceed {graph.max_rows}, that of the first plan, with "
            f"use_cuda_graph=True: captured launches have no room for more; got {tokens.rows}"
        )
    if tokens.kv_indices is None and tokens.kv_end > graph.max_kv_tokens:
        raise ArgumentError(
            f"kv_indptr[-1] must not exceed {graph.max_kv_tokens}, that of the first plan, with "
            f"use_cuda_graph=True: captured launches have no room for more; got {tokens.kv_end}"
        )


def check_unchanged(invariants: GraphInvariants, now: GraphInvariants) -> None:
    """Refuse a plan that changes more than lengths: captured launches contain all other numbers."""
    before, after = _by_name(invariants), _by_name(now)
    for name, value in after.items():
        if before[name] != value:
            raise RuntimeArgumentError(
                f"{name} must stay {before[name]!r} with use_cuda_graph=True: a captured graph would not see the "
                f"change to {value!r}; use another wrapper, or call reset_workspace_buffer() and capture again"
            )


def _by_name(invariants: GraphInvariants) -> dict[str, Any]:
    settings = invariants.settings._asdict()
    features: Features = settings.pop("features")
    named = features._asdict()
    del named["own_splits"]  # follows from the splits, which are compared too
    return {
        **named,
        **settings,
        **invariants.splits._asdict(),
        "qo_indptr[0]": invariants.first_row,
    }
