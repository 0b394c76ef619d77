"""What the fa2 and combine kernels do with their parameter blocks, interpreted on CPU memory with numpy.

It reads and writes through the addresses, strides and scalars of a launch and nothing else, so that the host
side is judged by what it hands over.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cute_attn.kernels.combine.spec import WARPS, CombineSpec
from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.host import batch as host_batch
from cute_attn.kernels.host import load as loading
from cute_attn.kernels.host import single as host_single
from cute_attn.kernels.host.prepared import prepared as prepared_kernel
from cute_attn.reference.attention import alibi_slopes
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item, Merge

LOG2E = math.log2(math.e)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4}


class Fa2Params(NamedTuple):
    q: int
    k: int
    v: int
    o: int
    lse: int
    mask: int
    mask_bytes: int
    scale0: int
    scale1: int
    v_scale_ptr: int
    sinks: int
    q_stride_n: int
    q_stride_h: int
    k_stride_n: int
    k_stride_h: int
    v_stride_n: int
    v_stride_h: int
    o_stride_n: int
    o_stride_h: int
    qo_len: int
    kv_len: int
    group: int
    group_multiplier: int
    group_shift: int
    num_qo_heads: int
    num_kv_heads: int
    kv_heads_multiplier: int
    kv_heads_shift: int
    right: int
    left: int
    full_tiles: int
    range_left: int
    tiles_per_split: int
    scale: float
    soft_cap: float
    v_scale: float
    rope_base: float
    rope_ratio: float
    lse_scale: float
    items: int
    o_partial: int
    lse_partial: int
    kv_indices: int
    k_stride_page: int
    v_stride_page: int
    page_size: int
    page_multiplier: int
    page_shift: int
    k_scales: int
    v_scales: int
    k_scales_stride_page: int
    k_scales_stride_n: int
    k_scales_stride_h: int
    v_scales_stride_page: int
    v_scales_stride_n: int
    v_scales_stride_h: int
    scale_q: int
    scale_k: int
    scale_v: int


class CombineParams(NamedTuple):
    o_partial: int
    lse_partial: int
    o: int
    lse: int
    v_scale_ptr: int
    sinks: int
    o_stride_n: int
    o_stride_h: int
    qo_len: int
    num_qo_heads: int
    num_splits: int
    num_rows: int
    warps_per_row: int
    v_scale: float
    lse_scale: float
    merges: int
    num_kv_heads: int
    group: int
    rows_per_merge: int
    slot_rows: int


class SpecAlone:
    """Takes the place of an `Artifact`: a spec, and the names of its kernel's parameters."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        params = Fa2Params if isinstance(spec, Fa2Spec) else CombineParams
        self.params = [types.SimpleNamespace(name=name) for name in params._fields]


class InterpretedLaunch:
    """Takes the place of `Launch`. `fired` collects the launches of a test."""

    fired: list[InterpretedLaunch]
    static: dict[str, Any]
    groups: tuple[Sequence[str], ...]

    def __init__(self, artifact: SpecAlone, device_index: int, *, pdl: bool) -> None:
        self.artifact, self.spec, self.device_index, self.pdl = artifact, artifact.spec, device_index, pdl

    def bind(self, static: dict[str, Any], *groups: Sequence[str]) -> InterpretedLaunch:
        bound = copy.copy(self)
        bound.static, bound.groups = static, groups
        return bound

    def fire(self, stream: int, moving: tuple[int | float, ...], settled: tuple[Any, ...]) -> None:
        grid, *rest = settled
        self.grid, self.stream = grid, stream
        values = dict(self.static)
        for fields, given in zip(self.groups, (moving, *rest), strict=True):
            values |= zip(fields, given, strict=True)
        if isinstance(self.spec, Fa2Spec):
            self.params: Fa2Params | CombineParams = Fa2Params(**values)
            (run_items if self.spec.schedule == "items" else run_fa2)(self.spec, self.params, grid)
        else:
            assert isinstance(self.spec, CombineSpec)
            self.params = CombineParams(**values)
            (run_merges if self.spec.schedule == "items" else run_combine)(self.spec, self.params, grid)
        InterpretedLaunch.fired.append(self)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter in place of a GPU, on stream 77."""
    InterpretedLaunch.fired = []
    forget_kernels()
    monkeypatch.setattr(loading, "Launch", InterpretedLaunch)
    monkeypatch.setattr(loading, "artifacts", types.SimpleNamespace(get=lambda spec, arch, program_of: SpecAlone(spec)))
    for host in (host_single, host_batch):
        monkeypatch.setattr(host, "current_stream", lambda index: 77)


def forget_kernels() -> None:
    """Clear the caches of loaded and prepared kernels, which hold those of other tests."""
    loading.load.cache_clear()
    prepared_kernel.cache_clear()


def memory(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray:
    """A numpy view of raw memory; 16-bit floats appear as uint16."""
    code = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.float32, "uint8": np.uint8, "int32": np.int32}[
        dtype
    ]
    if 0 in shape:
        return np.empty(shape, code)
    last = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    buffer = (ctypes.c_char * (last + code().itemsize)).from_address(address)
    return np.ndarray(shape, code, buffer, strides=strides)


def load(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray:
    raw = memory(address, shape, strides, dtype)
    if dtype in ("float16", "bfloat16"):
        bits = torch.from_numpy(raw.copy().view(np.int16))
        return bits.view(getattr(torch, dtype)).double().numpy()
    return raw.astype(np.float64)


def store(address: int, strides: tuple[int, ...], dtype: str, values: np.ndarray) -> None:
    where = memory(address, values.shape, strides, dtype)
    if 0 in values.shape:
        return
    tensor = torch.from_numpy(values).to(getattr(torch, dtype))
    where[...] = tensor.numpy() if dtype == "float32" else tensor.view(torch.int16).numpy().view(np.uint16)


def scalar(address: int, absent: float) -> float:
    return float(load(address, (1,), (4,), "float32")[0]) if address else absent


class Request(NamedTuple):
    """What the kernel knows of a request. `tokens`: where its keys are: rows of k and v, or (page, row) of each."""

    qo_start: int
    qo_len: int
    kv_len: int
    right: int
    left: int
    mask: int
    pages: np.ndarray
    rows: np.ndarray


def rotate(x: np.ndarray, positions: np.ndarray, p: Fa2Params, dtype: str) -> np.ndarray:
    pairs = x.shape[-1] // 2
    turns = positions[:, None] * p.rope_base * p.rope_ratio ** np.arange(pairs)
    cos, sin = np.cos(2 * math.pi * turns), np.sin(2 * math.pi * turns)
    low, high = x[:, :pairs], x[:, pairs:]
    rotated = np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=1)
    return torch.from_numpy(rotated).to(getattr(torch, dtype)).double().numpy()


def run_fa2(spec: Fa2Spec, p: Fa2Params, grid: tuple[int, int, int]) -> None:
    ctas, one, num_splits = grid
    kv_tiles = -(-p.kv_len // spec.tile.cols)
    assert one == 1
    assert ctas == -(-p.qo_len * p.group // spec.tile.rows) * p.num_kv_heads
    assert p.tiles_per_split >= 1
    assert (num_splits - 1) * p.tiles_per_split < max(kv_tiles, 1) <= num_splits * p.tiles_per_split
    assert spec.split or num_splits == 1
    check_heads(p, p.qo_len)
    zeros, rows = np.zeros(p.kv_len, np.int64), np.arange(p.kv_len)
    request = Request(0, p.qo_len, p.kv_len, p.right, p.left, p.mask, zeros, rows)
    slab = p.qo_len * p.o_stride_n, 4 * p.qo_len * p.num_qo_heads
    for split in range(num_splits):
        first = split * p.tiles_per_split * spec.tile.cols
        cols = np.arange(first, min(p.kv_len, first + p.tiles_per_split * spec.tile.cols))
        for head in range(p.num_qo_heads):
            o, lse = attend(spec, p, request, head, np.arange(p.qo_len), cols, finish=not spec.split)
            o_at = p.o + head * p.o_stride_h + split * slab[0]
            store(o_at, (p.o_stride_n, SIZES[spec.out_dtype]), spec.out_dtype, o)
            if p.lse:
                store(p.lse + 4 * head + split * slab[1], (4 * p.num_qo_heads,), "float32", lse)


def check_heads(p: Fa2Params, qo_len: int) -> None:
    assert p.num_kv_heads * p.group == p.num_qo_heads
    for row in (0, p.group - 1, p.group, qo_len * p.group - 1):
        assert quotient(row, p.group, p.group_multiplier, p.group_shift) == row // p.group


def quotient(n: int, divisor: int, multiplier: int, shift: int) -> int:
    """The device's division."""
    return n if divisor == 1 else (n * (multiplier % (1 << 32)) >> 32) >> shift


def records(address: int, count: int, ints: int, kind: type) -> list:
    raw = memory(address, (count, ints), (4 * ints, 4), "int32")
    return [kind(*map(int, row[: len(kind._fields)])) for row in raw]


def run_items(spec: Fa2Spec, p: Fa2Params, grid: tuple[int, int, int]) -> None:
    """Every item for every kv head, in any order: each writes rows of its own."""
    count, rest = divmod(grid[0], p.num_kv_heads)
    assert (rest, *grid[1:]) == (0, 1, 1)
    assert not spec.split
    for item in records(p.items, count, ITEM_INTS, Item):
        if item.qo_len == 0:
            continue
        check_heads(p, item.qo_len)
        assert item.kv_begin % spec.tile.cols == 0
        assert 0 <= item.kv_begin <= item.kv_end <= item.kv_len
        request = request_of(spec, p, item)
        for kv_head in range(p.num_kv_heads):
            run_item(spec, p, item, request, kv_head)


def request_of(spec: Fa2Spec, p: Fa2Params, item: Item) -> Request:
    tokens, position = np.arange(item.kv_len), item.kv_len - item.qo_len
    pages, rows = np.zeros_like(tokens), item.kv_start + tokens
    if spec.kv == "paged":
        for n in (0, p.page_size - 1, p.page_size, item.kv_len):
            assert quotient(n, p.page_size, p.page_multiplier, p.page_shift) == n // p.page_size
        places, rows = tokens // p.page_size, tokens % p.page_size
        last = item.kv_start + int(places.max(initial=-1)) + 1
        pages = memory(p.kv_indices, (last,), (4,), "int32")[item.kv_start + places].astype(np.int64)
    mask = p.mask + (item.mask_high << 32 | item.mask_low % (1 << 32))
    for bound in (p.right, p.left):  # 32-bit arithmetic
        assert -(1 << 31) <= position + bound < 1 << 31
        assert position + bound + item.qo_len < 1 << 31
    return Request(item.qo_start, item.qo_len, item.kv_len, position + p.right, position + p.left, mask, pages, rows)


def run_item(spec: Fa2Spec, p: Fa2Params, item: Item, request: Request, kv_head: int) -> None:
    cols, final = np.arange(item.kv_begin, item.kv_end), item.partial == NO_PARTIAL
    packed = np.arange(item.first_row, min(item.first_row + spec.tile.rows, item.qo_len * p.group))
    for lane in range(p.group):
        mine = packed[packed % p.group == lane]
        head, tokens = kv_head * p.group + lane, mine // p.group
        o, lse = attend(spec, p, request, head, tokens, cols, finish=final)
        if final:
            for i, token in enumerate(item.qo_start + tokens):
                o_at = p.o + int(token) * p.o_stride_n + head * p.o_stride_h
                store(o_at, (SIZES[spec.out_dtype],), spec.out_dtype, o[i])
                if p.lse:
                    store(p.lse + 4 * (int(token) * p.num_qo_heads + head), (4,), "float32", lse[i : i + 1])
            continue
        slot = (item.partial * p.num_kv_heads + kv_head) * spec.tile.rows - item.first_row
        for i, row in enumerate(slot + mine):
            store(p.o_partial + 4 * int(row) * spec.head_dim_vo, (4,), "float32", o[i])
            store(p.lse_partial + 4 * int(row), (4,), "float32", lse[i : i + 1])


def keys(spec: Fa2Spec, p: Fa2Params, request: Request, kv_head: int, name: str) -> np.ndarray:
    """All K or V of one head, in the order of tokens, as the kernel computes with them: 16-bit numbers."""
    dim = spec.head_dim_qk if name == "k" else spec.head_dim_vo
    if request.kv_len == 0:
        return np.empty((0, dim))
    raw = token_bytes(p, request, kv_head, name, dim * KV_BITS[spec.kv_dtype] // 8)
    if spec.kv_dtype == "nvfp4":
        codes = np.stack((raw & 15, raw >> 4), axis=-1).reshape(len(raw), dim)
        scales = token_bytes(p, request, kv_head, f"{name}_scales", dim // 16)
        factors = torch.from_numpy(scales).view(torch.float8_e4m3fn).double().numpy()
        values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7] * factors.repeat(16, axis=1)
        return torch.from_numpy(values).to(getattr(torch, spec.dtype)).double().numpy()
    return torch.from_numpy(raw).view(getattr(torch, spec.kv_dtype or spec.dtype)).double().numpy()


def token_bytes(p: Fa2Params, request: Request, kv_head: int, name: str, size: int) -> np.ndarray:
    stride_n, stride_h = getattr(p, f"{name}_stride_n"), getattr(p, f"{name}_stride_h")
    stride_page, base = getattr(p, f"{name}_stride_page"), getattr(p, name) + kv_head * stride_h
    shape = int(request.pages.max(initial=-1)) + 1, int(request.rows.max(initial=-1)) + 1, size
    return memory(base, shape, (stride_page, stride_n, 1), "uint8")[request.pages, request.rows]


def attend(
    spec: Fa2Spec, p: Fa2Params, request: Request, head: int, rows: np.ndarray, cols: np.ndarray, finish: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Query tokens `rows` of one head over the kv tokens `cols`."""
    kv_head, kv_len = head // p.group, request.kv_len
    q_at = p.q + head * p.q_stride_h + request.qo_start * p.q_stride_n
    q = load(q_at, (request.qo_len, spec.head_dim_qk), (p.q_stride_n, 2), spec.dtype)[rows]
    k, v = (keys(spec, p, request, kv_head, name) for name in "kv")
    if spec.pos_encoding == "rope":
        q = rotate(q, rows + kv_len - request.qo_len, p, spec.dtype)
        k = rotate(k, np.arange(kv_len), p, spec.dtype)
    z = score(spec, p, head, q @ k[cols].T, rows, cols)
    visible = (cols <= rows[:, None] + request.right) & (cols >= rows[:, None] + request.left)
    if spec.mask == "packed":
        bits = memory(request.mask, (p.mask + p.mask_bytes - request.mask,), (1,), "uint8")
        at = rows[:, None] * kv_len + cols
        visible &= (bits[at // 8] >> (at % 8).astype(np.uint8)) & 1 == 1
    if spec.mask == "multi_item":
        bounds = memory(p.mask + 8 * request.qo_start, (request.qo_len, 2), (8, 4), "int32")[rows]
        visible &= (cols < bounds[:, :1]) | (cols >= bounds[:, 1:])
    if spec.mask == "ranges":
        first, last = memory(p.mask + 8 * request.qo_start, (request.qo_len, 2), (8, 4), "int32")[rows].T[..., None]
        position = rows[:, None] + request.right
        visible |= (cols >= first) & (cols <= last) & (cols >= position + p.range_left)
    weights = np.where(visible, np.exp2(z), 0.0)
    total = weights.sum(axis=1)
    v_scale = lse_scale = 1.0
    if finish:
        total = total + math.exp(scalar(p.sinks + 4 * head if p.sinks else 0, -math.inf))
        v_scale, lse_scale = p.v_scale * scalar(p.v_scale_ptr, 1.0), p.lse_scale
    o = v_scale * (weights @ v[cols]) / np.where(total == 0, 1.0, total)[:, None]
    with np.errstate(divide="ignore"):
        return o, np.log2(total) * lse_scale


def score(spec: Fa2Spec, p: Fa2Params, head: int, raw: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Base-2 logits."""
    z = raw * p.scale * scalar(p.scale0, 1.0) * scalar(p.scale1, 1.0)
    if not spec.scores:
        assert p.scale > 0  # the maximum is taken before the scale
        return z
    assert spec.scores[0] == "scale"
    for step in spec.scores[1:]:
        if step == "alibi":
            z = z + float(alibi_slopes(p.num_qo_heads)[head]) * (cols - rows[:, None])
        else:
            assert step == "soft_cap"
            z = p.soft_cap * np.tanh(z / p.soft_cap)
    return z * LOG2E


def run_combine(spec: CombineSpec, p: CombineParams, grid: tuple[int, int, int]) -> None:
    rows, heads, dim = p.qo_len, p.num_qo_heads, spec.head_dim_vo
    assert grid == (rows * heads, 1, 1)
    splits = [load_partial(p, split, dim) for split in range(p.num_splits)]
    o = np.stack([o for o, _ in splits])
    lse = np.stack([lse for _, lse in splits])
    sinks = load(p.sinks, (heads,), (4,), "float32") if p.sinks else np.full(heads, -np.inf)
    weights = np.exp2(lse)
    total = weights.sum(axis=0) + np.exp(sinks)
    merged = (o * weights[..., None]).sum(axis=0) / np.where(total == 0, 1.0, total)[..., None]
    merged *= p.v_scale * scalar(p.v_scale_ptr, 1.0)
    store(p.o, (p.o_stride_n, p.o_stride_h, SIZES[spec.out_dtype]), spec.out_dtype, merged)
    if p.lse:
        with np.errstate(divide="ignore"):
            store(p.lse, (4 * heads, 4), "float32", np.log2(total) * p.lse_scale)


def load_partial(p: CombineParams, split: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rows = p.qo_len * p.num_qo_heads
    shape = (p.qo_len, p.num_qo_heads)
    o = load(
        p.o_partial + 4 * split * rows * dim,
        (*shape, dim),
        (4 * p.num_qo_heads * dim, 4 * dim, 4),
        "float32",
    )
    return o, load(p.lse_partial + 4 * split * rows, shape, (4 * p.num_qo_heads, 4), "float32")


def run_merges(spec: CombineSpec, p: CombineParams, grid: tuple[int, int, int]) -> None:
    """Every row of every merge item, however few CTAs there are. The first empty record is the end."""
    count, rest = divmod(p.num_rows, p.num_kv_heads * p.rows_per_merge)
    assert (rest, *grid[1:]) == (0, 1, 1)
    assert 0 < grid[0] <= p.num_rows
    assert p.warps_per_row in (1, WARPS)
    assert p.rows_per_merge <= p.slot_rows
    for merge in itertools.takewhile(lambda merge: merge.qo_len > 0, records(p.merges, count, MERGE_INTS, Merge)):
        assert merge.num_splits <= spec.max_splits
        for kv_head in range(p.num_kv_heads):
            for row in range(min(p.rows_per_merge, merge.qo_len * p.group - merge.first_row)):
                merge_row(spec, p, merge, kv_head, row)


def merge_row(spec: CombineSpec, p: CombineParams, merge: Merge, kv_head: int, row: int) -> None:
    token, lane = divmod(merge.first_row + row, p.group)
    token, head = merge.qo_start + token, kv_head * p.group + lane
    step = p.num_kv_heads * p.slot_rows
    first = merge.first_partial * step + kv_head * p.slot_rows + row
    dim, count = spec.head_dim_vo, merge.num_splits
    o = load(p.o_partial + 4 * first * dim, (count, dim), (4 * step * dim, 4), "float32")
    weights = np.exp2(load(p.lse_partial + 4 * first, (count,), (4 * step,), "float32"))
    total = weights.sum() + math.exp(scalar(p.sinks + 4 * head if p.sinks else 0, -math.inf))
    merged = p.v_scale * scalar(p.v_scale_ptr, 1.0) * (weights @ o) / (total or 1.0)
    store(p.o + token * p.o_stride_n + head * p.o_stride_h, (SIZES[spec.out_dtype],), spec.out_dtype, merged)
    if p.lse:
        with np.errstate(divide="ignore"):
            store(p.lse + 4 * (token * p.num_qo_heads + head), (4,), "float32", np.log2([total]) * p.lse_scale)
