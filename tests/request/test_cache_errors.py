"""Bad arguments of functions of caches and states: an error that names them. What is wrong with any tensor of a call:
`test_stored`, and `tests/api/test_shared_memory.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, ArgumentTypeError, LayoutError
from tests.support.entry_points import CACHES, NEW_RESULTS, NEW_ROWS, OTHERS, STATES, TWO_CACHES, ints, randn, without

META, FLOATS = torch.device("meta"), torch.zeros(4, 2, 16, 2, 32)
K, V, S, ROWS = CACHES["k of paged_kv_cache"], STATES["v"], STATES["s"], NEW_ROWS["append_value"][:2]
K_CACHE, OUTPUT = TWO_CACHES["k_cache"], OTHERS["dequantise pages"].tensors["output_v"]

BAD: dict[str, list[tuple[Any, ...]]] = {  # by entry: what changes, the message, and the error if no ArgumentError
    "append": [
        ({"kv_layout": "HDN"}, "kv_layout must be one of 'NHD', 'HND'", LayoutError),
        ({"append_value": ROWS}, "append_value must have as many rows as append_key, 3"),
        ({"batch_indices": ints(0, 0, 2)}, "batch_indices .* the 2 requests, got 2 for row 2"),
        ({"positions": ints(0, 16, 2)}, "positions .* the 16 tokens .*, got 16 for row 1"),
        ({"positions": ints(0, -1, 2)}, "positions .* got -1 for row 1"),
        ({"paged_kv_cache": K}, r"paged_kv_cache as one tensor must have shape \[num_pages, 2, ...\]"),
        ({"paged_kv_cache": (K,)}, "paged_kv_cache must be a tensor or a pair", ArgumentTypeError),
        ({"paged_kv_cache": (K, K[:2])}, "paged_kv_cache must have keys and values of the same pages"),
        ({"paged_kv_cache": (K.mT.contiguous().mT, K)}, "must have stride 1 on its last axis"),
        ({"paged_kv_cache": (K[:, :0], K[:, :0])}, "must have a page_size >= 1"),
        ({"kv_indices": ints(0, 9)}, "kv_indices .* the 4 pages of the cache, got 9"),
        ({"kv_indices": ints(0)}, "kv_indptr must stay within the 1 kv_indices, got 1"),
        ({"kv_indptr": ints()}, r"kv_indptr must have batch_size \+ 1 elements, got none"),
    ],
    "append NVFP4 to slots": [
        ({"append_value": ROWS}, "append_value must have as many rows"),
        ({"slot_mapping": ints(0, 1, 2, 3)}, "append_key must have a row for each of 4 slots"),
        ({"paged_kv_cache": FLOATS}, "k of paged_kv_cache must have dtype uint8"),
        ({"paged_kv_cache": None}, "paged_kv_cache must be a tensor or a pair", ArgumentTypeError),
        ({"k_scale": 0.0}, "k_scale must be > 0, got 0.0"),
        ({"k_scale": 1e-60}, "k_scale must be > 0"),
        ({"k_scale": torch.tensor([-1.0])}, "k_scale must be > 0"),
        ({"v_scale": float("nan")}, "v_scale must be finite"),
        ({"v_scale": 1e39}, "v_scale must be finite"),
        ({"v_scale": torch.ones(2)}, "v_scale must have one element"),
        ({"kv_layout": 0}, "kv_layout must be one of", LayoutError),
    ],
    "dequantise pages": [
        ({"paged_kv_cache": FLOATS}, "k of paged_kv_cache must have dtype uint8"),
        ({"block_tables": ints().view(2, 0)}, "block_tables column count insufficient", RuntimeError),
        ({"block_tables": ints().view(2, 0)}, r"max_pages \* page_size must be >= 16, .* is 16, got"),
        ({"seq_lens": ints(17, 0)}, "seq_lens must be within 0..16, .* max_seq_len; request 0 has 17"),
        ({"v_scale": torch.zeros(1)}, "v_scale must be > 0"),
        ({"output_v": OUTPUT.float()}, "output_v must have dtype bfloat16, got float32"),
        ({"output_v": OUTPUT[:, :5]}, r"output_v must have shape .* = \(2, 16, 2, 64\)"),
        ({"output_v": OUTPUT[:1].expand(2, -1, -1, -1)}, "output_v must not overlap itself"),
        ({"kv_layout": "NH"}, "kv_layout must be one of", LayoutError),
    ],
    "positions": [
        ({"nnz": 2.0}, "nnz must be an int", ArgumentTypeError),
        ({"nnz": -1}, "nnz must be at least 0, got -1"),
        ({"append_indptr": ints()}, "append_indptr must have batch_size"),
        ({"batch_indices": torch.zeros(3, dtype=torch.int64)}, "batch_indices must have dtype int32"),
    ],
    "lengths": [
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"page_size": "16"}, "page_size must be an int", ArgumentTypeError),
        ({"kv_last_page_len": ints(1, 2, 3)}, r"kv_last_page_len must have shape \[n\] = \(2,\)"),
        ({"kv_indptr": ints()}, "kv_indptr must have batch_size"),
        ({"kv_last_page_len": torch.ones(2)}, "kv_last_page_len must have dtype int32 or int64"),
    ],
    "quantise": [
        ({"input": randn(4, 8)}, "K % 16 == 0"),
        ({"global_scale": torch.ones(2)}, "global_scale must have one element"),
        ({"global_scale": torch.zeros(1)}, "global_scale must be > 0"),
        ({"global_scale": torch.tensor([torch.nan])}, "global_scale must be finite"),
        ({"global_scale": torch.ones(1, device=META)}, "global_scale must be on device cpu"),
    ],
    "dequantise": [
        ({"fp4_data": torch.zeros(4, 7, dtype=torch.uint8)}, "fp4_data must have shape"),
        (
            {"block_scales": torch.zeros(4, 4, dtype=torch.uint8, device=META)},
            "block_scales must be on device cpu",
        ),
        ({"output_dtype": torch.int8}, "output_dtype must have dtype"),
    ],
    "quantise pages": [
        ({"kv_layout": "ND"}, "kv_layout must be one of", LayoutError),
        ({"v_cache": K_CACHE[..., :8]}, "v_cache must have head_dim % 16"),
        ({"k_global_sf": -torch.ones(1)}, "k_global_sf must be > 0"),
        ({"k_cache": K_CACHE / 0}, "k_cache without a scale must be finite"),
    ],
    "quantise pages to fp8": [
        ({"dtype": torch.int8}, "dtype must have dtype"),
        ({"dtype": torch.float8_e5m2, "k_scale": 0.0}, "k_scale must be > 0"),
        ({"v_cache": K_CACHE / 0}, "v_cache without a scale must be finite"),
    ],
    "merge two": [
        ({"v_b": V.to(META)}, "v_b must be on v_a's device"),
        ({"s_a": S.to(META)}, "s_a must be on v_a's device"),
    ],
    "merge": [
        ({"s": S.half()}, "s must have dtype float32"),
        ({"v": V[:1].expand(V.shape)}, "v must not overlap itself"),
        ({"s": S[:1].expand(S.shape)}, "s must not overlap itself"),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_argument(name: str) -> None:
    entry = (OTHERS | NEW_RESULTS)[name]
    call, given = entry.begin(entry.tensors), {name: x.clone() for name, x in entry.tensors.items()}
    call(given)
    for changes, message, *error in BAD[name]:
        others = {name: x for name, x in given.items() if name.partition(" of ")[2] not in changes}  # parts of a pair
        with pytest.raises(error[0] if error else ArgumentError, match=message):
            call({**others, **changes})


@pytest.mark.parametrize("axis", range(4))
def test_caches_whose_slots_share_memory_are_refused(axis: int) -> None:
    """A row written to an expanded cache would appear in other slots, or overwrite its own neighbours."""
    call, others = OTHERS["append"].begin({}), without(OTHERS["append"].tensors, *CACHES)
    narrow = torch.zeros_like(K.narrow(axis, 0, 1)).expand(K.shape)
    for cache in ((K.clone(), narrow), (narrow, K.clone())):
        with pytest.raises(ArgumentError, match=r"[kv] of paged_kv_cache must (not overlap itself|have stride 1)"):
            call({**others, "paged_kv_cache": cache})
    assert not narrow.any()
