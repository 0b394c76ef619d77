"""Batches for tests of kernels: random ones, with NaN in every key, value and output row that no request owns."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cute_attn import packbits, reference
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Features, GraphLimits, Settings

NAN_CODE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F, torch.uint8: 0x77}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Batch:
    """`kv_dtype` "" is q's; page_size 0 means ragged."""

    qo_lens: tuple[int, ...] = (1, 1, 1)
    kv_lens: tuple[int, ...] = (40, 0, 300)
    page_size: int = 0
    kv_layout: str = "NHD"
    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "float16"
    kv_dtype: str = ""
    o_dtype: str = ""
    causal: bool = False
    window_left: int = -1
    custom_mask: bool = False
    soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    sinks: bool = False
    device_scales: bool = False
    sm_scale: float = 0.0  # 0: 1 / sqrt(head_dim_qk)
    v_scale: float = 1.0
    lse_scale: float = 1.0
    return_lse: bool = True
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    graph: bool = False
    seed: int = 0

    @property
    def id(self) -> str:
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in changed)


@dataclass(frozen=True)
class Built:
    problem: BatchProblem
    lengths: BatchLengths
    limits: BatchLimits

    def expected(self) -> BatchProblem:
        """The problem with outputs of its own, solved by the reference in fp64."""
        problem = self.problem
        lse = torch.full(problem.out.shape[:2], math.nan, dtype=torch.float64, device=problem.out.device)
        solved = problem._replace(out=torch.full_like(problem.out, math.nan, dtype=torch.float64), lse=lse)
        reference.run_batch(solved, self.lengths, torch.float64)
        return solved


def build(batch: Batch, device: torch.device | str = "cpu", workspace_bytes: int = 32 << 20) -> Built:
    device = torch.device(device)
    generator = torch.Generator().manual_seed(batch.seed)
    settings = settings_of(batch, device)
    qo_indptr, kv_len = _indptr(batch.qo_lens), np.array(batch.kv_lens, np.int64)
    keys = _paged(batch, generator, device) if batch.page_size else _ragged(batch, generator, device)
    tokens = int(qo_indptr[-1])
    dtype, features = getattr(torch, batch.dtype), settings.features
    q = torch.randn(tokens, batch.heads[0], batch.dims[0], generator=generator).to(device, dtype)
    out = torch.full((tokens, batch.heads[0], batch.dims[1]), math.nan, dtype=features.o_dtype, device=device)
    mask, mask_offset = _mask(batch, generator, device)
    sinks = torch.linspace(-2, 5, batch.heads[0], device=device) if batch.sinks else None
    scales = (torch.tensor([-0.5], device=device), torch.tensor(3.0, device=device)) if batch.device_scales else ()
    problem = BatchProblem(
        settings=settings,
        q=q,
        **keys.tensors,
        out=out,
        lse=torch.full(out.shape[:2], math.nan, device=device) if batch.return_lse else None,
        packed_mask=mask,
        scale_tensors=scales,
        v_scale_tensor=torch.tensor([0.25], device=device) if batch.device_scales else None,
        sinks=sinks,
        workspace=torch.full((workspace_bytes,), 0xFF, dtype=torch.uint8, device=device),  # NaN as floats
    )
    graph = GraphLimits(len(kv_len) + 3, tokens + 5, 2 * int(kv_len.max()) + 100) if batch.graph else None
    limits = BatchLimits(workspace_bytes, batch.fixed_split_size, batch.disable_split_kv, graph)
    return Built(problem, BatchLengths(qo_indptr, keys.start, kv_len, mask_offset), limits)


def settings_of(batch: Batch, device: torch.device) -> Settings:
    dtype = getattr(torch, batch.dtype)
    kv_dtype = torch.uint8 if batch.kv_dtype == "nvfp4" else getattr(torch, batch.kv_dtype or batch.dtype)
    features = Features(
        device,
        dtype,
        kv_dtype,
        getattr(torch, batch.o_dtype or batch.dtype),
        *batch.heads,
        *batch.dims,
        custom_mask=batch.custom_mask,
        soft_cap=batch.soft_cap > 0,
        pos_encoding_mode=batch.pos_encoding_mode,
        positive_scale=batch.sm_scale >= 0 and not batch.device_scales,
        kv_block_scales=batch.kv_dtype == "nvfp4",
        sinks=batch.sinks,
        kv_source="paged" if batch.page_size else "ragged",
    )
    return Settings(
        features,
        batch.kv_layout,
        batch.causal and not batch.custom_mask,
        batch.window_left,
        batch.soft_cap,
        batch.sm_scale or batch.dims[0] ** -0.5,
        batch.v_scale,
        rope_scale=2.0,
        rope_theta=5e4,
        lse_scale=batch.lse_scale,
        page_size=batch.page_size or 1,
    )


@dataclass(frozen=True)
class _Keys:
    tensors: dict[str, Any]
    start: np.ndarray


def _indptr(lens: tuple[int, ...] | list[int]) -> np.ndarray:
    return np.cumsum([0, *lens], dtype=np.int64)


def _ragged(batch: Batch, generator: torch.Generator, device: torch.device) -> _Keys:
    start = _indptr([n + 2 for n in batch.kv_lens])[:-1] + 1  # a row that nobody owns before and after each request
    rows = torch.cat([torch.arange(s, s + n) for s, n in zip(start.tolist(), batch.kv_lens, strict=True)])
    total = int(start[-1]) + batch.kv_lens[-1] + 1
    return _Keys(_tensors(batch, generator, device, (total,), (rows,)), start)


def _paged(batch: Batch, generator: torch.Generator, device: torch.device) -> _Keys:
    size = batch.page_size
    counts = [-(-n // size) for n in batch.kv_lens]
    indptr = _indptr([n + 1 for n in counts])  # after each request a page number that must not be asked for
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages - 1, generator=generator) + 1  # page 0 is nobody's
    indices = torch.zeros(int(indptr[-1]), dtype=torch.int32)
    pages, rows, taken = [], [], 0
    for start, count, kv_len in zip(indptr.tolist(), counts, batch.kv_lens, strict=False):
        mine = order[taken : taken + count]
        indices[start : start + count] = mine.int()
        token = torch.arange(kv_len)
        pages.append(mine[token // size])
        rows.append(token % size)
        taken += count
    tensors = _tensors(batch, generator, device, (num_pages, size), (torch.cat(pages), torch.cat(rows)))
    return _Keys({**tensors, "kv_indices": indices.to(device)}, indptr[:-1])


def _tensors(
    batch: Batch,
    generator: torch.Generator,
    device: torch.device,
    shape: tuple[int, ...],
    owned: tuple[torch.Tensor, ...],
) -> dict[str, Any]:
    """k, v and, for NVFP4, their block scales: random where `owned`, NaN elsewhere."""
    num_heads, count = batch.heads[1], len(owned[0])
    tensors: dict[str, Any] = {}
    scales = []
    for name, dim in zip("kv", batch.dims, strict=True):
        values = torch.randn(count, num_heads, dim, generator=generator)
        if batch.kv_dtype == "nvfp4":
            codes = torch.randint(0, 256, (count, num_heads, dim // 2), generator=generator, dtype=torch.uint8)
            factors = (torch.rand(count, num_heads, dim // 16, generator=generator) + 0.05).to(torch.float8_e4m3fn)
            tensors[name] = _placed(batch, codes, shape, owned, device)
            scales.append(_placed(batch, factors, shape, owned, device))
        else:
            stored = values.to(getattr(torch, batch.kv_dtype or batch.dtype))
            tensors[name] = _placed(batch, stored, shape, owned, device)
    return {**tensors, "block_scales": tuple(scales)} if scales else tensors


def _placed(
    batch: Batch, values: torch.Tensor, shape: tuple[int, ...], owned: tuple[torch.Tensor, ...], device: torch.device
) -> torch.Tensor:
    """Rows `values` at `owned` of a tensor [*shape, heads, width], or with heads before rows under HND; every second
    slice of a larger one, so that strides are not those of a contiguous tensor."""
    heads, width = values.shape[1:]
    hnd = batch.kv_layout == "HND"
    sizes = (*shape[:-1], heads, shape[-1]) if hnd else (*shape, heads)
    whole = torch.empty(sizes[0], 2, *sizes[1:], width, dtype=values.dtype)
    if values.dtype in NAN_CODE:
        whole.view(torch.uint8).fill_(NAN_CODE[values.dtype])
    else:
        whole.fill_(math.nan)
    whole = whole.to(device)
    tensor = whole[:, 1]
    rows = tensor.transpose(-3, -2) if hnd else tensor
    bits = {1: torch.uint8, 2: torch.int16}[values.itemsize]
    rows.view(bits)[tuple(i.to(device) for i in owned)] = values.view(bits).to(device)
    return tensor


def _mask(batch: Batch, generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor | None, np.ndarray]:
    offset = np.zeros(len(batch.kv_lens), np.int64)
    if not batch.custom_mask:
        return None, offset
    parts, at = [], 3  # bytes before the first request's
    parts.append(torch.zeros(3, dtype=torch.uint8))
    for i, (qo_len, kv_len) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
        keep = torch.rand(qo_len, kv_len, generator=generator) < 0.5
        keep[:1] = False
        bits = packbits(keep.flatten(), "little")
        offset[i], at = at, at + len(bits)
        parts.append(bits)
    return torch.cat(parts).to(device), offset


def worst(problem: BatchProblem, expected: BatchProblem) -> str | None:
    """What is wrong with the outputs of a solved problem; None if nothing is."""
    tolerance = TOLERANCE[problem.q.dtype]  # of out in fp32 too: P and rotated K have q's dtype
    error = (problem.out.double() - expected.out).abs()
    unit = expected.out.abs().clamp(min=1.0)
    if not bool((error <= tolerance * unit).all()):  # false for NaN
        bad = ~(error <= tolerance * unit)
        return (
            f"out: {int(bad.sum())} of {bad.numel()} wrong, first at {bad.nonzero()[0].tolist()}, worst {error.max()}"
        )
    if problem.lse is not None and expected.lse is not None:
        same = torch.isclose(problem.lse.double(), expected.lse, rtol=1e-3, atol=2e-3)
        if not bool(same.all()):
            return f"lse: {int((~same).sum())} of {same.numel()} wrong, first at {(~same).nonzero()[0].tolist()}"
    return None


def random_batch(seed: int, kv_dtypes: tuple[str, ...] = ("",), most: int = 700) -> Batch:
    """Any combination of features, lengths up to `most`."""
    pick = random.Random(seed)
    size = pick.choice((1, 2, 4, 7))
    short = pick.random() < 0.5
    qo_lens = [pick.choice((1, 1, 1, 2, 0)) if short else pick.choice((1, 7, 33, 130, 0)) for _ in range(size)]
    kv_lens = [pick.choice((0, 1, 15, 63, 64, 65, 200, most)) for _ in range(size)]
    num_kv_heads, group = pick.choice((1, 2, 3)), pick.choice((1, 2, 3, 4, 5, 8))
    kv_dtype = pick.choice(kv_dtypes)
    dims = ((64, 64), (128, 128), (256, 256), (192, 128))
    dims = dims if kv_dtype == "nvfp4" else (*dims, (80, 80), (96, 96), (112, 112))
    return Batch(
        tuple(qo_lens),
        tuple(max(n, q) if pick.random() < 0.7 else n for n, q in zip(kv_lens, qo_lens, strict=True)),
        page_size=pick.choice((0, 1, 2, 3, 5, 16, 64)),
        kv_layout=pick.choice(("NHD", "HND")),
        heads=(num_kv_heads * group, num_kv_heads),
        dims=pick.choice(dims),
        dtype=pick.choice(("float16", "bfloat16")),
        kv_dtype=kv_dtype,
        o_dtype=pick.choice(("", "", "float32")),
        causal=pick.random() < 0.5,
        window_left=pick.choice((-1, -1, 0, 20, 100)),
        custom_mask=pick.random() < 0.2,
        soft_cap=pick.choice((0.0, 0.0, 5.0)),
        pos_encoding_mode=pick.choice(("NONE", "NONE", "ALIBI", "ROPE_LLAMA")),
        sinks=pick.random() < 0.3,
        device_scales=pick.random() < 0.2,
        v_scale=pick.choice((1.0, 0.5)),
        lse_scale=pick.choice((1.0, math.log(2))),
        return_lse=pick.random() < 0.8,
        fixed_split_size=pick.choice((None, None, 64, 200)),
        disable_split_kv=pick.random() < 0.2,
        graph=pick.random() < 0.2,
        seed=seed,
    )
