"""An lse by heads (`lse_layout="HN"`) changes no error of the other arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    BatchPrefillWithPagedKVCacheWrapper,
    trtllm_batch_decode_with_kv_cache,
)

Q, CACHE = torch.randn(3, 4, 16).bfloat16(), torch.randn(6, 2, 4, 2, 16).bfloat16()


def ints(*values: int) -> torch.Tensor:
    """Returns int32."""
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paged_kv_cache": None}, "paged_kv_cache must be a tensor or a pair"),
        ({"paged_kv_cache": 7}, "paged_kv_cache must be a tensor or a pair"),
        ({"paged_kv_cache": CACHE.to_sparse()}, "paged_kv_cache must be a strided tensor"),
        ({"out": Q.float().to_sparse()}, "out must be a strided tensor"),
        ({"sinks": torch.ones(4).to_sparse()}, "sinks must be a strided tensor"),
        ({"lse": torch.ones(4, 3).to_sparse()}, "lse must be a strided tensor"),
    ],
)
def test_other_arguments_of_a_run(changes: dict[str, Any], message: str) -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    wrapper.plan(ints(0, 2, 3), ints(0, 2, 3), ints(3, 1, 5), ints(2, 3), 4, 2, 16, 4, q_data_type="bfloat16")
    given = {"q": Q, "paged_kv_cache": CACHE, "lse": torch.empty(4, 3), "lse_layout": "HN", "return_lse": True}
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        wrapper.run(**{**given, **changes})
    with pytest.raises(KeyError, match="lse_layout must be one of"):
        wrapper.run(**{**given, "lse_layout": np.zeros(3)})


def test_trtllm_decode() -> None:
    out = torch.zeros(2, 4, 16, dtype=torch.bfloat16)
    given: dict[str, Any] = {"query": Q[:2], "kv_cache": CACHE, "block_tables": ints(3, 1, 5, 0).view(2, 2)}
    given |= {"seq_lens": ints(6, 3), "max_seq_len": 8, "bmm1_scale": 0.25, "kv_layout": "NHD", "out": out}
    given |= {"workspace_buffer": torch.zeros(1 << 20, dtype=torch.uint8), "lse_layout": "HN"}
    for changes, kind, message in (
        ({"lse": torch.empty(4, 2, requires_grad=True)}, ArgumentError, "lse requires grad"),
        ({"lse": torch.empty(4, 2), "return_lse": "no"}, ArgumentTypeError, "return_lse must be True or False"),
        ({"lse_layout": np.zeros(3)}, KeyError, "lse_layout must be one of"),
    ):
        with pytest.raises(kind, match=message):
            trtllm_batch_decode_with_kv_cache(**{**given, **changes})
        assert not out.any()
