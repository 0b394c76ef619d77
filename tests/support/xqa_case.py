"""Decode problems over paged caches: arguments of a call, with garbage where nothing may be read, and an fp64 oracle.

Cache slots that belong to no token hold NaN, and the page table holds numbers far outside the cache past a request's
last page: who reads either is found out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests.support.dense_attention import attention, nvfp4_values, seen

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "nvfp4": torch.uint8,
}
NAN_BITS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F}
NO_PAGE = 0x3FFFFFFF
WORKSPACE_BYTES = 48 << 20

# Relative to the norm of the output: rounding of the output itself, and of P to 16 bits.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float8_e4m3fn: 4e-2}
FLOOR = {torch.float8_e4m3fn: 2.0**-10}  # half the distance of its smallest numbers
LSE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class XqaCase:
    seq_lens: tuple[int, ...]
    kv: str = "bf16"
    q: str = "bf16"
    heads: tuple[int, int] = (8, 2)  # query, kv
    head_dim: int = 128
    page_size: int = 16
    kv_layout: str = "NHD"
    form: str = "pair"  # "pair", or "tensor" with K and V on axis 1
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None  # ragged queries
    mask: bool = False
    window_left: int = -1
    sinks: bool = False
    bmm1_scale: float | None = None  # default 1 / sqrt(head_dim)
    bmm2_scale: float = 1.0
    o_scale: float = 1.0
    device_scales: bool = False
    out: str | None = None
    return_lse: bool = True
    enable_pdl: bool | None = None
    seed: int = 0

    @property
    def qo_lens(self) -> tuple[int, ...]:
        return self.q_lens or (self.q_len,) * len(self.seq_lens)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.bmm1_scale is None else self.bmm1_scale


@dataclass
class Built:
    """A case's tensors: `arguments` of `xqa_batch_decode_with_kv_cache`, and what the oracle needs."""

    case: XqaCase
    arguments: dict[str, Any]
    keys: list[torch.Tensor]  # per request [kv_len, num_kv_heads, head_dim], fp64
    values: list[torch.Tensor]
    query: torch.Tensor
    mask_bits: torch.Tensor | None  # [num_tokens, q_len] bool
    sinks: torch.Tensor | None

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and base-2 lse in fp64, request by request."""
        case, row = self.case, 0
        o = torch.zeros(sum(case.qo_lens), case.heads[0], case.head_dim, dtype=torch.float64)
        lse = o.new_zeros(o.shape[:2])
        for qo_len, keys, values in zip(case.qo_lens, self.keys, self.values, strict=True):
            rows, row = slice(row, row + qo_len), row + qo_len
            visible = self._visible(rows, qo_len, len(keys))
            o[rows], lse[rows] = attention(self.query[rows], keys, values, visible, case.scale, sinks=self.sinks)
        o *= case.bmm2_scale * case.o_scale
        return ((o / case.o_scale).clamp(-448, 448) if case.out == "e4m3" else o), lse

    def _visible(self, rows: slice, qo_len: int, kv_len: int) -> torch.Tensor:
        """A mask says which draft tokens are seen; a window restricts both."""
        kept = seen(qo_len, kv_len, self.mask_bits is None, self.case.window_left)
        if self.mask_bits is not None:
            kept[:, max(kv_len - qo_len, 0) :] &= self.mask_bits[rows][:, max(qo_len - kv_len, 0) : qo_len]
        return kept

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> str:
        """ "" if out and lse are right, else what is wrong."""
        o, z = self.oracle()
        found = out.detach().cpu().double().reshape(o.shape)
        if found.isnan().any():
            return f"{int(found.isnan().sum())} NaN"
        error, size = float((found - o).norm()), float(o.norm())
        if error > TOLERANCE[out.dtype] * size + FLOOR.get(out.dtype, 0.0) * o.numel() ** 0.5:
            return f"relative error {error / max(size, 1e-30):.2e}"
        if lse is None:
            return ""
        got = lse.detach().cpu().double().reshape(z.shape)
        finite = z.isfinite()
        if not torch.equal(got.isfinite(), finite):
            return "lse is finite elsewhere"
        wrong = float((got - z)[finite].abs().max()) if finite.any() else 0.0
        return "" if wrong <= LSE_TOLERANCE else f"lse is off by {wrong:.2e}"


def build(case: XqaCase, device: str = "cpu") -> Built:
    generator = torch.Generator().manual_seed(case.seed)
    counts = [-(-n // case.page_size) for n in case.seq_lens]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=generator)
    pages = [order[start : start + count] for start, count in zip(np.cumsum([0, *counts]), counts, strict=False)]
    table = torch.full((len(counts), max([*counts, 1]) + 2), NO_PAGE, dtype=torch.int32)
    for i, own in enumerate(pages):
        table[i, : len(own)] = own.int()
    dead = _unused(case, pages, num_pages)
    k, k_sf, keys = _cache(case, pages, dead, generator)
    v, v_sf, values = _cache(case, pages, dead, generator)

    num_tokens, q_dtype = sum(case.qo_lens), DTYPES[case.q]
    query = torch.randn(num_tokens, case.heads[0], case.head_dim, generator=generator).to(q_dtype)
    sinks = torch.randn(case.heads[0], generator=generator) * 2 if case.sinks else None
    mask_bits = (torch.rand(num_tokens, case.q_len, generator=generator) < 0.6) if case.mask else None
    arguments: dict[str, Any] = {
        "query": query,
        "kv_cache": _joined(case, k, v),
        "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8),
        "block_tables": table,
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32),
        "max_seq_len": max([*case.seq_lens, 0]),
        "bmm1_scale": torch.tensor([case.scale]) if case.device_scales else case.scale,
        "bmm2_scale": torch.tensor([case.bmm2_scale]) if case.device_scales else case.bmm2_scale,
        "window_left": case.window_left,
        "sinks": sinks,
        "kv_layout": case.kv_layout,
        "enable_pdl": case.enable_pdl,
        "q_len_per_req": case.q_len,
        "o_scale": case.o_scale,
        "mask": None if mask_bits is None else words(mask_bits),
        "kv_cache_sf": None if k_sf is None else _joined(case, k_sf, v_sf),
        "q_cu_seq_lens": None if case.q_lens is None else _bounds(case.q_lens),
        "out": None if case.out is None else torch.empty(query.shape, dtype=DTYPES[case.out]),
        "return_lse": case.return_lse,
    }
    moved = {name: _to(value, device) for name, value in arguments.items()}
    return Built(case, moved, keys, values, query.double(), mask_bits, sinks)


def _to(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(x.to(device) for x in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _bounds(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def words(bits: torch.Tensor) -> torch.Tensor:
    """Rows of bool as 16-bit words, little end first, an even number of them."""
    rows, count = bits.shape
    padded = torch.zeros(rows, -(-count // 32) * 32, dtype=torch.bool)
    padded[:, :count] = bits
    octets = np.packbits(padded.numpy(), axis=1, bitorder="little")
    return torch.from_numpy(octets.view(np.uint16).copy())


def _unused(case: XqaCase, pages: list[torch.Tensor], num_pages: int) -> torch.Tensor:
    dead = torch.ones(num_pages, case.page_size, dtype=torch.bool)
    for own, kv_len in zip(pages, case.seq_lens, strict=True):
        live = torch.arange(len(own) * case.page_size) < kv_len
        dead[own] = ~live.reshape(len(own), case.page_size)
    return dead


def _cache(
    case: XqaCase, pages: list[torch.Tensor], dead: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """K or V in the layout of the case, its block scales, and every request's rows in fp64."""
    shape = (*dead.shape, case.heads[1])
    scales = None
    if case.kv == "nvfp4":
        cache = torch.randint(0, 256, (*shape, case.head_dim // 2), generator=generator, dtype=torch.uint8)
        codes = torch.randint(0x18, 0x40, (*shape, case.head_dim // 16), generator=generator, dtype=torch.uint8)
        codes[torch.rand(codes.shape, generator=generator) < 0.05] = 0
        codes[torch.rand(codes.shape, generator=generator) < 0.01] = 1
        exact = nvfp4_values(cache, codes.view(torch.float8_e4m3fn))
        codes[dead] = NAN_BITS[torch.float8_e4m3fn]
        scales = codes.view(torch.float8_e4m3fn)
    else:
        dtype = DTYPES[case.kv]
        cache = torch.randn(*shape, case.head_dim, generator=generator).to(dtype)
        exact = cache.double()
        bits = cache.view(torch.int16 if dtype.itemsize == 2 else torch.uint8)
        bits[dead] = NAN_BITS[dtype]
    rows = [exact[own].reshape(-1, *exact.shape[2:])[:n] for own, n in zip(pages, case.seq_lens, strict=True)]
    return cache, scales, rows


def _joined(case: XqaCase, k: torch.Tensor, v: torch.Tensor) -> Any:
    """The two caches in the form and layout of the case."""
    if case.kv_layout == "HND":
        k, v = (_bits(x).transpose(1, 2).contiguous().view(x.dtype) for x in (k, v))
    if case.form == "tensor":
        return torch.stack((_bits(k), _bits(v)), dim=1).view(k.dtype)
    return k, v


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def random_case(seed: int, *, longest: int = 900) -> XqaCase:
    """Small problems that mix everything."""
    r = random.Random(seed)
    kv = r.choice(["bf16", "fp16", "e4m3", "e5m2", "nvfp4"])
    batch = r.choice([1, 1, 2, 3, 5, 34])
    longest = longest if batch < 4 else longest // 4
    q_len = r.choice([1, 1, 1, 2, 3, 5, 16, 33])
    lengths = [r.choice([0, 1, r.randrange(100), r.randrange(longest)]) for _ in range(batch)]
    ragged = q_len > 1 and r.random() < 0.3
    case = XqaCase(
        tuple(n if r.random() < 0.1 else max(n, q_len) for n in lengths),
        kv=kv,
        q=kv if kv in ("bf16", "fp16") else r.choice(["bf16", "fp16"]),
        heads=r.choice([(4, 1), (2, 2), (8, 2), (3, 1), (8, 1), (16, 2), (12, 1), (5, 1)]),
        head_dim=r.choice([64, 128, 128, 256]),
        page_size=r.choice([1, 3, 16, 32, 64, 100]),
        kv_layout=r.choice(["NHD", "HND"]),
        form=r.choice(["pair", "tensor"]),
        q_len=q_len,
        q_lens=tuple(r.randrange(q_len + 1) for _ in range(batch)) if ragged else None,
        mask=q_len > 1 and r.random() < 0.4,
        window_left=r.choice([-1, -1, -1, r.randrange(400), 0]),
        sinks=r.random() < 0.3,
        bmm1_scale=r.choice([None, None, -0.07, 0.0, 0.5]),
        bmm2_scale=r.choice([1.0, -3.0]),
        o_scale=r.choice([1.0, 0.25]),
        device_scales=r.random() < 0.3,
        out=r.choice([None, None, "e4m3"]),
        seed=seed,
    )
    return replace(case, bmm1_scale=case.bmm1_scale if kv != "nvfp4" else (case.bmm1_scale or 0.01) * 0.1)
