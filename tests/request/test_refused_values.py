"""Values that would change nothing, or would reach torch or Python, are refused by the name of the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_attn as ca
from cute_attn.cli import main

WORKSPACE = torch.zeros(1 << 16, dtype=torch.uint8)
REFUSED = (ca.ArgumentError, ca.ArgumentTypeError, ca.NotSupported)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def prefill(**options: Any) -> None:
    wrapper = ca.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(ints(0, 2), ints(0, 1), ints(0), ints(4), 4, 2, 16, 4, q_data_type="bfloat16", **options)


def block_sparse(**options: Any) -> None:
    ca.BlockSparseAttentionWrapper(WORKSPACE).plan(ints(0, 1), ints(0), 2, 2, 2, 2, 4, 2, 16, **options)


def fmha(**options: Any) -> None:
    qkv, bounds = (halves(3, 4, 16), halves(9, 2, 16), halves(9, 2, 16)), (ints(0, 3), ints(0, 9))
    ca.trtllm_fmha_v2_prefill(qkv, "SEPARATE_Q_K_V", WORKSPACE, ints(9), 3, 9, 0.25, 1.0, 1, *bounds, **options)


CHANGE_NOTHING: list[tuple[str, Callable[[], Any]]] = [
    ("uniform_q_len", lambda: prefill(uniform_q_len="x")),
    ("k_scale", lambda: block_sparse(k_scale=0)),
    ("use_clc", lambda: block_sparse(use_clc=False)),
    ("block_tables", lambda: fmha(block_tables=ints(0)[None])),
    ("rows", lambda: ca.explain(arch="h100", rows=4)),
    ("custom_mask", lambda: ca.explain(arch="h100", custom_mask="no")),  # type: ignore[arg-type]
    ("sinks", lambda: ca.explain(arch="h100", sinks=1)),  # type: ignore[arg-type]
    ("sm_count", lambda: ca.get_trtllm_gen_multi_ctas_kv_counter_bytes(1, 1, -1)),
    ("append_indptr", lambda: ca.get_batch_indices_positions(ints(5, 2, 0), ints(6, 3), 7)),
    ("kv_indptr", lambda: ca.get_seq_lens(ints(5, 2, 0), ints(6, 3), 4)),
]


@pytest.mark.parametrize(("name", "call"), CHANGE_NOTHING, ids=[name for name, _ in CHANGE_NOTHING])
def test_values_that_would_change_nothing(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(REFUSED, match=rf"\b{name}\b"):
        call()


def test_the_command_refuses_integers_beyond_64_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--qo-len", "9" * 20]) != 0
    assert "qo_len must be at most 9223372036854775807" in capsys.readouterr().err
