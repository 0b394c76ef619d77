"""Values that would change nothing, or would reach torch or Python, are refused by the name of the argument, as the
function that was called has it, not those that it calls. Most such values of calls without a plan: `test_call_errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_attn as ca
from cute_attn.cli import main
from cute_attn.request import checks
from tests.support.entry_points import ints
from tests.support.flashinfer_calls import calls

WORKSPACE = torch.zeros(1 << 16, dtype=torch.uint8)
CALLS = calls("cpu")
REFUSED = (ca.ArgumentError, ca.ArgumentTypeError, ca.NotSupported)


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def of(name: str, **changes: Any) -> None:
    """A good call of a function or a method, but for what changes."""
    owner, _, method = name.partition(".")
    CALLS[owner](method, changes)


def single(**changes: Any) -> None:
    of("single_prefill_with_kv_cache", **changes)


def variable(**changes: Any) -> None:
    of("VariableBlockSparseAttentionWrapper.plan", **changes)


def inference(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with torch.inference_mode():
        return torch.empty(*shape, dtype=dtype)


BIG, META = 1 << 70, torch.device("meta")
VALUES: list[tuple[str, Callable[[], Any]]] = [
    ("k_scale", lambda: of("BlockSparseAttentionWrapper.plan", k_scale=0)),
    ("use_clc", lambda: of("BlockSparseAttentionWrapper.plan", use_clc=False)),
    ("rows", lambda: ca.explain(arch="h100", rows=4)),
    ("custom_mask", lambda: ca.explain(arch="h100", custom_mask="no")),  # type: ignore[arg-type]
    ("out", lambda: single(out=inference(8, 4, 64))),
    ("lse", lambda: single(lse=inference(8, 4, dtype=torch.float32), return_lse=True)),
    ("q", lambda: torch.vmap(lambda q: single(q=q))(halves(2, 8, 4, 64))),
    ("q", lambda: torch.func.grad(lambda q: single(q=q))(halves(8, 4, 64))),
    ("q", lambda: single(q=torch.nested.nested_tensor([halves(8, 4, 64), halves(2, 4, 64)]))),
    ("device", lambda: ca.BatchAttention(device=b"?")),  # type: ignore[arg-type]
    ("x", lambda: ca.packbits(torch.ones(9).to_sparse())),
    ("indptr", lambda: ca.segment_packbits(torch.ones(9), ints(0, 9).to_sparse())),
    ("num_levels", lambda: ca.MultiLevelCascadeAttentionWrapper(BIG, WORKSPACE)),
    ("num_levels", lambda: ca.MultiLevelCascadeAttentionWrapper(0, WORKSPACE)),
    ("num_levels", lambda: ca.MultiLevelCascadeAttentionWrapper(2.0, WORKSPACE)),  # type: ignore[arg-type]
    ("block_mask_map", lambda: variable(block_mask_map=torch.ones(4, 2, 2, device=META))),
    ("block_row_sz", lambda: variable(block_row_sz=ints(3, 5).repeat(4, 1).to(META))),
    (
        "kv_len_arr",
        lambda: ca.BatchAttention("NHD", "cpu").plan(*[ints(0, 1)] * 2, ints(0), ints(3).to(META), 4, 2, 16, 16, 4),
    ),
    ("head_dim_vo", lambda: ca.explain(arch="h100", head_dim_vo="x")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "call"), VALUES, ids=[name for name, _ in VALUES])
def test_values_are_refused(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(REFUSED, match=rf"\b{name}\b"):
        call()


def test_the_command_refuses_integers_beyond_64_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--qo-len", "9" * 20]) != 0
    assert "qo_len must be at most 9223372036854775807" in capsys.readouterr().err


# ---- names


def test_names_are_those_of_the_call() -> None:
    wrapper = ca.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(ca.ArgumentError, match=r"^unique_kv_last_page_len must"):
        wrapper.begin_forward(ints(0, 1, 2), ints(0, 1), ints(16, 99), 4, 2, 64, 16)


def test_words_inside_of_a_message_stay() -> None:
    error = ca.ArgumentError("out must not run out of q_len; q_len_per_req and x.q_len are others")
    checks.rename(error, {"out": "output", "q_len": "rows"})
    assert str(error) == "output must not run out of rows; q_len_per_req and x.q_len are others"
