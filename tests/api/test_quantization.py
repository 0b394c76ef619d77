"""Quantised caches against exact rational arithmetic and plain loops."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import cute_attn
from cute_attn import page
from cute_attn.errors import ArgumentError
from tests.support.dense_attention import nvfp4_values
from tests.support.entry_points import ENTRIES
from tests.support.executors import needs_gpu

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction((8 + c % 8) << (c // 8), 1 << 10) if c >= 8 else Fraction(c, 1 << 9) for c in range(0x7F)]
E5M2 = [Fraction((4 + c % 4) << (c // 4), 1 << 17) if c >= 4 else Fraction(c, 1 << 16) for c in range(0x7C)]


APPEND = ENTRIES["append NVFP4 to slots"]


def nearest(x: Fraction, numbers: list[Fraction]) -> int:
    """Code of the number nearest to |x|, the even one of two."""
    return min(range(len(numbers)), key=lambda code: (abs(numbers[code] - abs(x)), code % 2))


def quantised(row: np.ndarray, scale: float) -> tuple[list[int], list[int]]:
    """NVFP4 of one row: codes of its elements, and of its blocks' scales."""
    codes, scales = [], []
    for block in row.reshape(-1, 16):
        values = [Fraction(float(x)) for x in block]
        scales.append(nearest(max(map(abs, values)) / (6 * Fraction(scale)), E4M3))
        step = E4M3[scales[-1]] * Fraction(scale)
        for x, value in zip(values, block, strict=True):
            sign = 8 if np.signbit(value) else 0
            codes.append(sign | (nearest(x / step, E2M1) if step else 0))
    return codes, scales


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low nibble first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def fp32(x: float) -> float:
    return float(np.float32(x))


def ties() -> torch.Tensor:
    """Midpoints of e2m1 under a block scale of 1, with neighbours on both sides; of e4m3 under one, and beyond it."""
    rows = torch.zeros(3, 48)
    half = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[None] + torch.tensor([0.0, -1e-4, 1e-4])[:, None]
    rows[0] = torch.nn.functional.pad(torch.stack((half, -half), 1), (0, 1), value=6.0).flatten()
    rows[1:, ::16] = 6 * torch.tensor([[1.0625, 1.1875, 448.0], [470.0, 1e4, 1.0]])
    return rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-5, 300.0])
def test_nvfp4_rounds_exactly(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 48, generator=generator) * torch.logspace(-6, 3, 6)[:, None] * scale
    x[0, :16] = 0
    x[1, 3] = -0.0
    x = torch.cat((x, ties() * scale)).clamp(-6e4, 6e4).to(dtype)
    packed, scales = cute_attn.nvfp4_kv_quantize(x, torch.tensor([scale]))
    assert (packed.dtype, packed.shape, scales.dtype, scales.shape) == (torch.uint8, (9, 24), torch.uint8, (9, 3))
    for row in range(9):
        codes, want_scales = quantised(x[row].double().numpy(), fp32(scale))
        assert nibbles(packed[row]).tolist() == codes
        assert scales[row].tolist() == want_scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nvfp4_dequantize(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(0, 256, (3, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 0x60, (3, 4, 2), generator=generator, dtype=torch.uint8)
    want = (nvfp4_values(packed, scales.view(torch.float8_e4m3fn)) * fp32(0.3)).float().to(dtype)
    for given in (scales, scales.view(torch.float8_e4m3fn)):
        result = cute_attn.nvfp4_kv_dequantize(packed, given, torch.tensor([0.3]), dtype)
        assert result.dtype == dtype
        assert torch.equal(result, want)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("sf", [None, (torch.tensor([7.0]), torch.tensor([0.5]))])
def test_nvfp4_paged_cache(layout: str, sf: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    shape = (3, 2, 5, 32) if layout == "HND" else (3, 5, 2, 32)
    k, v = torch.randn(shape, dtype=torch.bfloat16), 3 * torch.randn(shape, dtype=torch.bfloat16)
    data, scales, *numbers = cute_attn.nvfp4_quantize_paged_kv_cache(k, v, layout, *(sf or (None, None)))
    for x, packed, block_scales, number, given in zip((k, v), data, scales, numbers, sf or (None, None), strict=True):
        inverse = 448 / float(x.abs().max()) if given is None else float(given)
        assert isinstance(number, float)
        assert number == pytest.approx(1 / inverse, rel=2e-7)
        assert packed.shape == (*shape[:3], 16)
        assert (block_scales.shape, block_scales.dtype) == ((*shape[:3], 2), torch.float8_e4m3fn)
        rows, row_scales = packed.flatten(0, 2), block_scales.view(torch.uint8).flatten(0, 2)
        for i in (0, 7, 29):  # linear: a row's scales stand where the row stands, V's too
            codes, want = quantised(x.flatten(0, 2)[i].double().numpy(), number)
            assert nibbles(rows[i]).tolist() == codes
            assert row_scales[i].tolist() == want


def test_a_cache_of_zeros_chooses_a_scale() -> None:
    zeros = torch.zeros(1, 2, 4, 16, dtype=torch.float16)
    data, scales, *numbers = cute_attn.nvfp4_quantize_paged_kv_cache(zeros, zeros)
    assert not data[0].any()
    assert not scales[0].float().any()
    assert all(number > 0 for number in numbers)
    (k, _), *fp8_numbers = cute_attn.fp8_quantize_paged_kv_cache(zeros, zeros)
    assert not k.float().any()
    assert all(number > 0 for number in fp8_numbers)


@pytest.mark.parametrize("scale_dtype", [torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("by_slot", [False, True])
def test_nvfp4_append(by_slot: bool, stacked: bool, layout: str, scale_dtype: torch.dtype) -> None:
    """Rows that are read back are those that `nvfp4_kv_quantize` makes; every other slot is unchanged."""
    pages, page_size, heads, dim, nnz = 4, 3, 2, 32, 6
    order = (page_size, heads) if layout == "NHD" else (heads, page_size)
    cache = torch.full((pages, 2, *order, dim // 2), 0xAB, dtype=torch.uint8)
    sf = torch.full((pages, 2, *order, dim // 16), 0x11, dtype=torch.uint8).view(scale_dtype)
    given = (cache, sf) if stacked else (tuple(cache.unbind(1)), tuple(sf.unbind(1)))
    rows = torch.randn(2, nnz, heads, dim, dtype=torch.float16)
    scales: tuple[Any, Any] = (0.01, torch.tensor([0.02]))
    slots = [4, 5, -1, 0, 11, 10]
    if by_slot:
        slot_mapping = torch.tensor(slots)
        padded = torch.cat((rows, torch.full((2, 2, heads, dim), 9, dtype=torch.float16)), 1)
        cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *padded, slot_mapping, *given, *scales, kv_layout=layout
        )
    else:  # request 0 has pages 1 and 0, request 1 has page 3
        requests, positions = torch.tensor([0, 0, -1, 0, 1, 1]), torch.tensor([1, 2, 0, 3, 2, 1])
        table = torch.tensor([1, 0, 3]), torch.tensor([0, 2, 3]), torch.tensor([1, 3])
        cute_attn.nvfp4_quantize_append_paged_kv_cache(
            *rows, requests, positions, *given, *table, *scales, kv_layout=layout
        )
    for i, scale in enumerate((0.01, 0.02)):
        data, block_scales = cute_attn.nvfp4_kv_quantize(rows[i].flatten(0, 1), torch.tensor([scale]))
        for view, new, fill in ((cache, data, 0xAB), (sf.view(torch.uint8), block_scales, 0x11)):
            found = view[:, i] if layout == "NHD" else view[:, i].transpose(1, 2)
            want = torch.full_like(found.contiguous(), fill).flatten(0, 1)
            for t, slot in enumerate(slots):
                if slot >= 0:
                    want[slot] = new.unflatten(0, (nnz, heads))[t]
            assert torch.equal(found.flatten(0, 1), want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("given", [None, (0.37, torch.tensor([2.0]))])
def test_fp8_paged_cache(dtype: torch.dtype, given: tuple[Any, Any] | None) -> None:
    numbers = E4M3 if dtype == torch.float8_e4m3fn else E5M2
    x = torch.randn(2, 2, 3, 16, dtype=torch.float16) * torch.logspace(-4, 3, 16)
    k, v = x.half(), (x * 2).bfloat16()
    caches, *scales = cute_attn.fp8_quantize_paged_kv_cache(k, v, dtype, *(given or (None, None)))
    for source, cache, scale, user in zip((k, v), caches, scales, given or (None, None), strict=True):
        want = float(source.abs().max()) / float(numbers[-1]) if user is None else float(user)
        assert scale == pytest.approx(want, rel=1e-6)
        assert (cache.dtype, cache.shape) == (dtype, source.shape)
        for value, code in zip(source.flatten().tolist(), cache.view(torch.uint8).flatten().tolist(), strict=True):
            magnitude = nearest(Fraction(value) / Fraction(scale), numbers)
            assert code == magnitude + (128 if np.signbit(value) else 0)


def test_fp8_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([1.0625, 1.1875, -1.0625, 464.0, 1e4, 2**-10, 3 * 2**-10]).reshape(1, 1, 1, 7)
    (k, _), *_ = cute_attn.fp8_quantize_paged_kv_cache(ties, ties, k_scale=1.0, v_scale=1.0)
    assert k.view(torch.uint8).flatten().tolist() == [0x38, 0x3A, 0xB8, 0x7E, 0x7E, 0, 2]


# ---- NVFP4 appends: scales and slots


def appended(slots: list[int], **changed: Any) -> list[torch.Tensor]:
    """Append rows of ones to a cache of 64 slots, and return what is written."""
    given, ones = APPEND.on("cpu"), torch.ones(len(slots), 2, 64)
    rows = {"append_key": ones, "append_value": ones, "slot_mapping": torch.tensor(slots)}
    APPEND.begin({})({**given, **rows, **changed})
    return [given[name] for name in APPEND.written]


def test_slots_outside_the_cache_are_ignored() -> None:
    expected = appended([3, -1, -1, 5])
    assert any(x.any() for x in expected)
    assert all(map(torch.equal, appended([3, 64, -7, 5]), expected))
    assert not any(x.any() for x in appended([64, 1 << 40, -1]))


def test_a_scale_in_a_tensor_is_its_number() -> None:
    assert all(map(torch.equal, appended([1, 2], k_scale=torch.tensor([0.25])), appended([1, 2], k_scale=0.25)))


@pytest.mark.parametrize("scale", [1.0, torch.ones(1)])
def test_temporary_scales_are_refused_during_capture(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "is_capturing", lambda device: True)
    append, given = APPEND.begin({}), APPEND.on("meta")
    append(given)
    with pytest.raises(ValueError, match="v_scale must be a float32 tensor on meta during CUDA graph capture"):
        append({**given, "v_scale": scale})


@needs_gpu
def test_capture_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    append, given = APPEND.begin({}), APPEND.on("cuda")
    numbers = {**given, "k_scale": torch.ones(1), "v_scale": 0.5}
    append(numbers)
    written = [given[name] for name in APPEND.written]
    eager = [x.clone() for x in written]
    given["v_scale"].fill_(0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="during CUDA graph capture"):
            append(numbers)
        append(given)
    for x in written:
        x.zero_()
    graph.replay()
    assert all(map(torch.equal, written, eager))
    monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match="k_scale must be > 0"):
        append({**given, "k_scale": torch.zeros(1).cuda()})


# ---- NVFP4 caches back in 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "stacked", "strided"])
def test_nvfp4_dequantize_paged(form: str, layout: str, dtype: torch.dtype) -> None:
    """Tokens against what their bytes mean; the rest of the outputs stays."""
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
        values = (nvfp4_values(x, block_scales.view(torch.float8_e4m3fn)) * scale).to(dtype)
        want = torch.full_like(output, 123.0)
        for request, token in itertools.product(range(3), range(10)):
            page_number = int(tables[request, token // page_size]) if token < int(lens[request]) else -1
            if 0 <= page_number < pages:
                of_page = values[page_number] if layout == "NHD" else values[page_number].transpose(0, 1)
                want[request, token] = of_page[token % page_size]
        assert torch.equal(output, want)


@pytest.mark.parametrize(("batch_size", "tokens", "heads", "pages"), [(0, 3, 2, 1), (2, 0, 2, 0), (2, 3, 0, 1)])
def test_nvfp4_dequantize_of_nothing(batch_size: int, tokens: int, heads: int, pages: int) -> None:
    cache, sf = (torch.zeros(1, 2, 4, heads, n, dtype=torch.uint8) for n in (16, 2))
    outputs = [torch.ones(batch_size, tokens, heads, 32).half() for _ in range(2)]
    tables, lens = torch.zeros(batch_size, pages, dtype=torch.int32), torch.zeros(batch_size, dtype=torch.int32)
    cute_attn.nvfp4_kv_dequantize_paged(cache, sf, tables, lens, torch.ones(1), torch.ones(1), *outputs)
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
