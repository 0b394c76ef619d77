"""Decode calls without a plan: entries of calls, for the layers and the steps of a model call with tensors of the same
layouts.

Where values are looked at, all checks do so in every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_attn.problem import DecodeProblem
from cute_attn.runtime import switches
from cute_attn.wrappers import calls
from cute_attn.wrappers.calls import Fire, Given

Result = Tensor | tuple[Tensor, Tensor]

_entries: calls.Entries = {}


def forget() -> None:
    """Forget all calls."""
    _entries.clear()


def looks_at_values(device: torch.device) -> bool:
    """Tell whether calls look at lengths and page numbers: where that costs nothing or was asked for."""
    return device.type == "cpu" or switches.validates()


def given_of(
    query: Any, kv_cache: Any, out: Any, lse: Any, workspace: Any, optional: Any, read: tuple[Any, ...]
) -> Given | None:
    """Return the tensors of a call; None for a cache that is neither a tensor nor a pair. `read`: block tables,
    lengths, q_cu_seq_lens, the mask of draft tokens, and scales on the CPU.
    """
    if isinstance(kv_cache, Tensor):
        return query, kv_cache, kv_cache, out, lse, workspace, optional, read
    if isinstance(kv_cache, tuple | list) and len(kv_cache) == 2:
        k, v = kv_cache
        return query, k, v, out, lse, workspace, optional, read
    return None


def key_of(given: Given | None, numbers: tuple[Any, ...], names: tuple[Any, ...]) -> Any:
    """Return what equal calls have in common besides addresses; None for a call that all checks must look at.

    `numbers`: options whose values may be equal although their types differ; `names`: all other options.
    """
    if given is None:
        return None
    q, k, v, out, lse, workspace, optional, read = given
    try:
        if looks_at_values(q.device):
            return None
        tensors = q, k, None if k is v else v, out, workspace, *read
        # `layout` of each, without its call
        of = tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])
        key = of, tuple(map(type, numbers)), numbers, names
        return (key, calls.layout(lse), calls.layouts(optional)) if optional or lse is not None else key
    except calls.NOT_TENSORS:
        return None


def try_replay(key: Any, given: Given | None, return_lse: Any) -> Result | None:
    """Launch a call like an earlier one and return its result; None if there is none, or an address does not qualify.

    `return_lse`: part of the key.
    """
    try:
        entry = _entries.get(key)
    except TypeError:  # an option has no hash: all checks say what is wrong with it
        return None
    if entry is None or given is None:
        return None
    found = calls.replay(entry, given, ())
    if found is None:
        return None
    out, lse = found
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # there is an lse


def enter(
    key: Any, given: Given | None, numbers: tuple[Any, ...], problem: DecodeProblem, fire: Fire | None, result: Result
) -> None:
    """Leave the entry of a call that passed every check, if its launch reads its tensors as they are.

    `numbers`: part of `key`; `result`: what the call returned.
    """
    if given is None or key is None or not calls.is_plain(numbers):
        return
    read = problem.block_tables, problem.seq_lens, problem.qo_indptr, problem.draft_mask
    for x, y in zip(given[7][:4], read, strict=True):
        if (x is None) != (y is None) or (x is not None and y is not None and x.data_ptr() != y.data_ptr()):
            return
    out, lse = result if isinstance(result, tuple) else (result, None)
    scratch = problem.scratch
    calls.enter(_entries, key, fire, given, problem, (out, lse), partials_offset=scratch.partials - scratch.counters)
