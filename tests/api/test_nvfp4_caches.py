"""NVFP4 caches: slots and scales of appends, and tokens back in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import page
from cute_attn.errors import ArgumentError
from tests.support.append_case import good_append
from tests.support.executors import needs_gpu

ONE = torch.ones(1)


# ---- NVFP4 appends: scales and slots


def append_by_slot(slots: list[int], **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Append rows of ones to a cache of 8 slots, and return data and block scales."""
    arguments = good_append() | {
        "append_key": torch.ones(len(slots), 3, 32),
        "append_value": torch.ones(len(slots), 3, 32),
    }
    arguments |= {"slot_mapping": torch.tensor(slots), **changed}
    cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(**arguments)
    return arguments["paged_kv_cache"], arguments["kv_cache_sf"]


def test_slots_outside_the_cache_are_ignored() -> None:
    expected = append_by_slot([3, -1, -1, 5])
    assert any(x.any() for x in expected)
    for got, want in zip(append_by_slot([3, 8, -7, 5]), expected, strict=True):
        assert torch.equal(got, want)
    assert not append_by_slot([8, 1 << 40, -1])[0].any()


def test_a_scale_in_a_tensor_is_its_number() -> None:
    assert all(
        map(torch.equal, append_by_slot([1, 2], k_scale=torch.tensor([0.25])), append_by_slot([1, 2], k_scale=0.25))
    )


@pytest.mark.parametrize("scale", [1.0, torch.ones(1)])
def test_temporary_scales_are_refused_during_capture(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "is_capturing", lambda device: True)
    meta = torch.zeros(5, 2, 32, device="meta")
    cache = torch.zeros(3, 2, 4, 2, 16, dtype=torch.uint8, device="meta")
    sf = torch.zeros(3, 2, 4, 2, 2, dtype=torch.uint8, device="meta")
    slots, one = torch.zeros(5, dtype=torch.int32, device="meta"), torch.ones(1, device="meta")
    append = cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    append(meta, meta, slots, cache, sf, one, one)
    with pytest.raises(ValueError, match="v_scale must be a float32 tensor on meta during CUDA graph capture"):
        append(meta, meta, slots, cache, sf, one, scale)


@needs_gpu
def test_capture_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in good_append().items()}
    arguments |= {"append_key": torch.ones(2, 3, 32).cuda(), "k_scale": torch.ones(1), "v_scale": 0.5}
    append = cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    append(**arguments)
    eager = arguments["paged_kv_cache"].clone()
    scales = {"k_scale": torch.ones(1).cuda(), "v_scale": torch.full((1,), 0.5).cuda()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="during CUDA graph capture"):
            append(**arguments)
        append(**{**arguments, **scales})
    arguments["paged_kv_cache"].zero_()
    graph.replay()
    assert torch.equal(arguments["paged_kv_cache"], eager)
    monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match="k_scale must be > 0"):
        append(**{**arguments, "k_scale": torch.zeros(1).cuda()})


# ---- NVFP4 caches back in 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "stacked", "strided"])
def test_nvfp4_dequantize_paged(form: str, layout: str, dtype: torch.dtype) -> None:
    """Tokens against the rows that `nvfp4_kv_dequantize` makes of the same bytes; the rest of the outputs stays."""
    pages, page_size, heads, k_dim, v_dim = 7, 4, 2, 64, 64 if form == "stacked" else 128
    order = (page_size, heads) if layout == "NHD" else (heads, page_size)
    sizes = [(k_dim, 0.5), (v_dim, 0.25)]
    data = [torch.randint(0, 256, (pages, *order, dim // 2), dtype=torch.uint8) for dim, _ in sizes]
    sf = [torch.randint(1, 120, (pages, *order, dim // 16), dtype=torch.uint8) for dim, _ in sizes]
    caches: Any = tuple(data), tuple(sf)
    if form == "stacked":
        caches = torch.stack(data, 1), torch.stack(sf, 1).view(torch.float8_e4m3fn)
    elif form == "strided":
        caches = tuple(tuple(torch.cat((x, x.flip(-1)), -1)[..., : x.shape[-1]] for x in pair) for pair in caches)
    tables = torch.tensor([[2, 5, 1], [6, 3, 0], [4, -1, 99]])
    lens = torch.tensor([7, 4, 9], dtype=torch.int32)
    outputs = [torch.full((3, 10, heads, dim), 123.0, dtype=dtype) for dim, _ in sizes]
    scales = [torch.tensor([scale]) for _, scale in sizes]
    cute_attn.nvfp4_kv_dequantize_paged(*caches, tables, lens, *scales, *outputs, kv_layout=layout)
    for x, block_scales, (_, scale), output in zip(data, sf, sizes, outputs, strict=True):
        if layout == "HND":
            x, block_scales = x.transpose(1, 2), block_scales.transpose(1, 2)
        for request in range(3):
            for token in range(10):
                page_number = int(tables[request, token // page_size]) if token < int(lens[request]) else -1
                want = torch.full_like(output[request, token], 123.0)
                if 0 <= page_number < pages:
                    where = page_number, token % page_size
                    want = cute_attn.nvfp4_kv_dequantize(x[where], block_scales[where], torch.tensor(scale), dtype)
                assert torch.equal(output[request, token], want)


@pytest.mark.parametrize(("batch_size", "tokens", "heads", "pages"), [(0, 3, 2, 1), (2, 0, 2, 0), (2, 3, 0, 1)])
def test_nvfp4_dequantize_of_nothing(batch_size: int, tokens: int, heads: int, pages: int) -> None:
    cache, sf = (torch.zeros(1, 2, 4, heads, n, dtype=torch.uint8) for n in (16, 2))
    outputs = [torch.ones(batch_size, tokens, heads, 32).half() for _ in range(2)]
    tables, lens = torch.zeros(batch_size, pages, dtype=torch.int32), torch.zeros(batch_size, dtype=torch.int32)
    cute_attn.nvfp4_kv_dequantize_paged(cache, sf, tables, lens, ONE, ONE, *outputs)
    assert all(bool((x == 1).all()) for x in outputs)


def test_block_scales_of_a_run_lie_side_by_side() -> None:
    """Wording that callers match on. K and V, and their scales, may differ in all other strides."""
    wrapper = cute_attn.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1 << 16))
    arrays = torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([1, 0]), torch.tensor([3])
    wrapper.plan(*arrays, 2, 1, 64, 4, kv_data_type=torch.uint8)
    q, cache = torch.randn(1, 2, 64).half(), torch.randint(0, 256, (2, 2, 4, 1, 32), dtype=torch.uint8)
    sf = torch.randint(1, 100, (2, 2, 4, 1, 4), dtype=torch.uint8)
    expected = wrapper.run(q, cache, kv_cache_sf=sf)
    wide = torch.cat((cache[:, 1], cache[:, 1]), -1)[..., :32]
    assert torch.equal(wrapper.run(q, (cache[:, 0].contiguous(), wide), kv_cache_sf=tuple(sf.unbind(1))), expected)
    strided = tuple(x.repeat_interleave(2, -1)[..., ::2] for x in sf.unbind(1))
    with pytest.raises(ArgumentError, match=r"k_sf of kv_cache_sf: its innermost stride must be 1, got strides"):
        wrapper.run(q, cache, kv_cache_sf=strided)
