"""Rows that are appended to paged caches: adversarial values, places that go nowhere, and the caches they go to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import cute_attn
from cute_attn.request.append import Append, OwnRows

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E2M1_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
# Powers of two give ties in every format. The others leave fp32's normal range where they meet block scales.
SCALES = (1.0, 2.0**-9, 0.0371, 1 / 2688, 3.3e-38, 2.0**-149, 1e-41, 1.7e30, 2.0**-63, 2.0**64)

Run = Callable[[Append], None]
Codes = tuple[torch.Tensor, ...]


def fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def near(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of `dtype` nearest to fp64 values, their neighbours, and all of these with either sign."""
    nearest = values.to(dtype)
    bits = nearest.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    around = torch.cat([(bits + i).clamp(min=0).view(dtype) for i in (-1, 0, 1)])
    around = around[torch.isfinite(around)]
    return torch.cat([around, -around])


def adversarial_blocks(dtype: torch.dtype, scale: float, count: int, seed: int) -> torch.Tensor:
    """Blocks [count, 16] whose elements are on and beside the midpoints of e2m1, and whose largest magnitudes are on
    and beside the midpoints of e4m3; with zeros of both signs, subnormal numbers and random ones.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, 16, generator=generator, dtype=torch.float64)
    spread = 2.0 ** torch.randint(-12, 12, (count, 1), generator=generator)
    blocks = (normal * spread * scale).to(dtype)
    tops = near((E4M3[1:] + E4M3[:-1]) / 2 * 6 * scale, dtype)
    steps = near((E4M3[1:, None] * E2M1_MIDPOINTS * scale).flatten(), dtype)
    third = count // 3
    if len(tops):
        blocks[:third, 5] = tops[torch.randint(len(tops), (third,), generator=generator)]
        blocks[:third].clamp_(-blocks[:third, 5:6].abs(), blocks[:third, 5:6].abs())
    for i in range(third, 2 * third):
        code = 1 + i % 126
        top = (E4M3[code] * 6 * scale).to(dtype)  # this block scale, or one beside it
        mine = near(E4M3[code] * E2M1_MIDPOINTS * scale, dtype)
        blocks[i] = mine[torch.randint(len(mine), (16,), generator=generator)] if len(mine) else 0
        if torch.isfinite(top):
            blocks[i, 3] = top
    if len(steps):
        anywhere = steps[torch.randint(len(steps), (third, 3), generator=generator)]
        blocks[2 * third : 3 * third, :3] = anywhere
    blocks[0], blocks[1], blocks[2, ::2] = 0.0, -0.0, 0.0
    blocks[3] = torch.finfo(dtype).smallest_normal / 4
    blocks[4, 7], blocks[5, 2] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    return blocks.where(torch.isfinite(blocks), 0)


def special_blocks(dtype: torch.dtype) -> torch.Tensor:
    """Blocks with infinities of both signs and NaN, which loses its sign where the GPU converts it from fp16."""
    blocks = torch.linspace(-7, 7, 6 * 16).reshape(6, 16).to(dtype)
    blocks[0, 3], blocks[1, 4], blocks[2, 0] = math.inf, -math.inf, math.nan
    blocks[3, 15], blocks[4, 1], blocks[4, 2] = math.nan, math.nan, math.inf
    return blocks


def adversarial_rows(stored: str, dtype: torch.dtype, scale: float, blocks: int, seed: int) -> torch.Tensor:
    """Rows [n, 2, 64] of special blocks and adversarial ones, for fp8 with ties between its numbers."""
    found = [special_blocks(dtype), adversarial_blocks(dtype, scale, blocks, seed)]
    if stored != "nvfp4":
        numbers = torch.arange(E4M3.numel() - 1, dtype=torch.uint8).view(getattr(torch, stored)).double()
        ties = near((numbers[1:] + numbers[:-1]) / 2 * scale, dtype)
        found.insert(0, ties[: len(ties) // 16 * 16].view(-1, 16))
    rows = torch.cat(found)
    return rows[: len(rows) // 8 * 8].view(-1, 2, 64)


def quantised(rows: torch.Tensor, stored: str, scale: Any, run: Run) -> Codes:
    """Rows [n, heads, d] in a format, as bytes: data and block scales, or data."""
    n, heads, dim = rows.shape
    if stored == "nvfp4":
        data = torch.full((n, heads, dim // 2), 99, dtype=torch.uint8, device=rows.device)
        scales = torch.full((n, heads, dim // 16), 99, dtype=torch.uint8, device=rows.device)
        run(Append((rows,), (data[:, None],), OwnRows(), stored, (scales[:, None],), (scale,)))
        return data, scales
    output = torch.empty(rows.shape, dtype=getattr(torch, stored), device=rows.device)
    run(Append((rows,), (output[:, None],), OwnRows(), stored, (), (scale,)))
    return (output.view(torch.uint8),)


@dataclass(frozen=True)
class AppendCase:
    """A call of an append function. `kind`: "copy", "nvfp4" or "mapped". `gap`: between rows and slots."""

    kind: str
    dtype: str
    head_dim: int
    layout: str = "NHD"
    page_size: int = 16
    heads: int = 2
    nnz: int = 9
    gap: int = 0
    step: int = 1  # of the rows' last axis
    index: torch.dtype = torch.int32
    device_scales: bool = False

    @property
    def id(self) -> str:
        words = [self.kind, self.dtype, f"d{self.head_dim}", self.layout, f"page{self.page_size}"]
        extra = {"gap": self.gap, "step": self.step - 1, "scales": self.device_scales}
        return "-".join([*words, str(self.index).removeprefix("torch."), *(name for name, on in extra.items() if on)])


CASES = [
    AppendCase("copy", "bf16", 128),
    AppendCase("copy", "fp16", 72, "HND", 3, gap=8, index=torch.int64),
    AppendCase("copy", "fp32", 20, "HND", 1, heads=3, step=2),
    AppendCase("copy", "bf16", 33, gap=1, index=torch.int16),
    AppendCase("nvfp4", "bf16", 128, device_scales=True),
    AppendCase("nvfp4", "fp16", 16, "HND", 1, index=torch.int64),
    AppendCase("nvfp4", "bf16", 512, "HND", 5, heads=1, nnz=3),
    AppendCase("nvfp4", "fp32", 48, gap=16, heads=3),
    AppendCase("nvfp4", "bf16", 80, "NHD", 7, gap=3, index=torch.uint8),
    AppendCase("mapped", "bf16", 64, "HND", index=torch.int64, device_scales=True),
    AppendCase("mapped", "fp16", 192, gap=5, step=2, nnz=5),
    AppendCase("mapped", "fp32", 272, "HND", 3, heads=1, nnz=5, index=torch.int64),
]


def strided(values: torch.Tensor, gap: int, device: str, step: int = 1) -> torch.Tensor:
    """A copy whose rows are `gap` elements apart, inside a larger tensor, with `step` between elements."""
    *outer, last = values.shape
    wide = torch.zeros(*outer, gap + step * last, device=device).to(values.dtype)
    view = wide[..., gap::step]
    view.copy_(values)
    return view


def arguments(case: AppendCase, device: str = "cpu") -> tuple[Any, dict[str, Any], list[torch.Tensor]]:
    """The function, its arguments, and the tensors that it writes, filled with noise."""
    torch.manual_seed(case.head_dim + case.nnz)
    dtype, batch, pages_each = DTYPES[case.dtype], 3, 2 if case.page_size > 1 else 4
    num_pages = batch * pages_each + 1
    in_page = (case.page_size, case.heads) if case.layout == "NHD" else (case.heads, case.page_size)
    # Values that are copied may have another head dimension than keys.
    dims = (case.head_dim, case.head_dim + (8 if case.kind == "copy" and not case.gap else 0))
    shapes = [(case.nnz, case.heads, d) for d in dims]
    values = [(torch.randn(shape) * torch.randn(shape).exp()).to(dtype) for shape in shapes]
    rows = [strided(x, case.gap, device, case.step) for x in values]
    written: list[torch.Tensor] = []

    def cache(last: int, kind: torch.dtype) -> torch.Tensor:
        written.append(strided(torch.randint(0, 100, (num_pages, *in_page, last)).to(kind), case.gap, device))
        return written[-1]

    given: dict[str, Any] = {"append_key": rows[0], "append_value": rows[1], "kv_layout": case.layout}
    if case.kind == "copy":
        given["paged_kv_cache"] = tuple(cache(d, dtype) for d in dims)
    else:
        given["paged_kv_cache"] = tuple(cache(d // 2, torch.uint8) for d in dims)
        given["kv_cache_sf"] = tuple(cache(d // 16, torch.uint8) for d in dims)
        given |= {"k_scale": 0.013, "v_scale": 1.0}
        if case.device_scales:
            given |= {"k_scale": torch.tensor(0.013), "v_scale": torch.tensor([2.0])}
    if case.kind == "mapped":
        slots = torch.randperm(num_pages * case.page_size)[: case.nnz]
        slots[1], slots[2] = -1, num_pages * case.page_size
        if case.index == torch.int64:
            slots[3] = -(1 << 32)  # its low word is that of slot 0
        given["slot_mapping"] = slots.to(case.index)
    else:
        given |= _page_table(case, batch, pages_each)
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return FUNCTIONS[case.kind], moved, written


def _page_table(case: AppendCase, batch: int, pages_each: int) -> dict[str, torch.Tensor]:
    places = torch.randperm(batch * pages_each * case.page_size)[: case.nnz]
    request, position = places // (pages_each * case.page_size), places % (pages_each * case.page_size)
    if case.index != torch.uint8:
        request[min(1, len(request) - 1)] = -1
    table = {
        "batch_indices": request,
        "positions": position,
        "kv_indices": torch.randperm(batch * pages_each) + 1,
        "kv_indptr": torch.arange(batch + 1) * pages_each,
        "kv_last_page_len": torch.full((batch,), case.page_size),
    }
    return {name: x.to(case.index) for name, x in table.items()}


FUNCTIONS = {
    "copy": cute_attn.append_paged_kv_cache,
    "nvfp4": cute_attn.nvfp4_quantize_append_paged_kv_cache,
    "mapped": cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
}
