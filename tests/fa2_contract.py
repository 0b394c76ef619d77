"""What the fa2 and combine kernels do with their parameter blocks, interpreted on CPU memory with numpy.

It reads and writes through the addresses, strides and scalars of a launch and nothing else, so that the host
side is judged by what it hands over.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import numpy as np
import torch

from cute_attn.kernels.spec import CombineSpec, Fa2Spec, KernelSpec
from cute_attn.reference import alibi_slopes

LOG2E = math.log2(math.e)
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
    tiles_per_split: int
    scale: float
    soft_cap: float
    v_scale: float
    rope_base: float
    rope_ratio: float


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
    v_scale: float


class InterpretedLaunch:
    """Takes the place of `Launch`: the "artifact" is the spec. `fired` collects the launches of a test."""

    fired: list[InterpretedLaunch]

    def __init__(self, artifact: KernelSpec, device_index: int, *, pdl: bool) -> None:
        self.spec, self.device_index, self.pdl = artifact, device_index, pdl

    def fire(self, values: tuple[int | float, ...], grid: tuple[int, int, int], stream: int) -> None:
        self.grid, self.stream = grid, stream
        if isinstance(self.spec, Fa2Spec):
            self.params: Fa2Params | CombineParams = Fa2Params(*values)
            run_fa2(self.spec, self.params, grid)
        else:
            assert isinstance(self.spec, CombineSpec)
            self.params = CombineParams(*values)
            run_combine(self.spec, self.params, grid)
        InterpretedLaunch.fired.append(self)


def memory(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray:
    """A numpy view of raw memory; 16-bit floats appear as uint16."""
    code = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.float32, "uint8": np.uint8}[dtype]
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
    assert p.num_kv_heads * p.group == p.num_qo_heads
    for row in (0, p.group - 1, p.group, p.qo_len * p.group - 1):
        assert quotient(row, p) == row // p.group
    assert p.tiles_per_split >= 1
    assert (num_splits - 1) * p.tiles_per_split < max(kv_tiles, 1) <= num_splits * p.tiles_per_split
    assert spec.split or num_splits == 1
    slab = p.qo_len * p.o_stride_n, 4 * p.qo_len * p.num_qo_heads
    for split in range(num_splits):
        first = split * p.tiles_per_split * spec.tile.cols
        cols = np.arange(first, min(p.kv_len, first + p.tiles_per_split * spec.tile.cols))
        for head in range(p.num_qo_heads):
            o, lse = attend(spec, p, head, cols)
            o_at = p.o + head * p.o_stride_h + split * slab[0]
            store(o_at, (p.o_stride_n, SIZES[spec.out_dtype]), spec.out_dtype, o)
            if p.lse:
                store(p.lse + 4 * head + split * slab[1], (4 * p.num_qo_heads,), "float32", lse)


def quotient(row: int, p: Fa2Params) -> int:
    """The device's division by the group size."""
    return row if p.group == 1 else (row * (p.group_multiplier % (1 << 32)) >> 32) >> p.group_shift


def attend(spec: Fa2Spec, p: Fa2Params, head: int, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All rows of one query head over the kv tokens `cols`."""
    kv_head, rows = head // p.group, np.arange(p.qo_len)
    q = load(p.q + head * p.q_stride_h, (p.qo_len, spec.head_dim_qk), (p.q_stride_n, 2), spec.dtype)
    k = load(p.k + kv_head * p.k_stride_h, (p.kv_len, spec.head_dim_qk), (p.k_stride_n, 2), spec.dtype)
    v = load(p.v + kv_head * p.v_stride_h, (p.kv_len, spec.head_dim_vo), (p.v_stride_n, 2), spec.dtype)
    if spec.pos_encoding == "rope":
        q = rotate(q, rows + p.kv_len - p.qo_len, p, spec.dtype)
        k = rotate(k, np.arange(p.kv_len), p, spec.dtype)
    z = score(spec, p, head, q @ k[cols].T, rows, cols)
    visible = (cols <= rows[:, None] + p.right) & (cols >= rows[:, None] + p.left)
    if spec.mask == "packed":
        bits = memory(p.mask, (p.mask_bytes,), (1,), "uint8")
        at = rows[:, None] * p.kv_len + cols
        visible &= (bits[at // 8] >> (at % 8).astype(np.uint8)) & 1 == 1
    weights = np.where(visible, np.exp2(z), 0.0)
    total = weights.sum(axis=1) + math.exp(scalar(p.sinks + 4 * head if p.sinks else 0, -math.inf))
    v_scale = p.v_scale * scalar(p.v_scale_ptr, 1.0)
    o = v_scale * (weights @ v[cols]) / np.where(total == 0, 1.0, total)[:, None]
    with np.errstate(divide="ignore"):
        return o, np.log2(total)


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
            store(p.lse, (4 * heads, 4), "float32", np.log2(total))


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
