"""Host side of the decode kernel: which kernel and grid, and the parameter block of a launch."""

from __future__ import annotations

import functools

import torch

from cute_attn.errors import ArgumentError, WorkspaceError
from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.host import fastdiv
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.params import two_addresses
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.problem import XqaFeatures, XqaProblem, short
from cute_attn.runtime.arch import Arch, for_device, multiprocessors
from cute_attn.runtime.launch import CPU, Launch, current_stream

UNBOUNDED = 1 << 30  # no window: beyond any kv index, and position - UNBOUNDED fits 32 bits
UNLIMITED = 1 << 62
CHUNK = 16  # bytes, in which the kernel counts K and V
IDLE = 1 / 32  # of all CTAs, at most
OVERHEAD = 4  # what starting and finishing a segment costs, in tiles

Values = tuple[int | float, ...]


class Runner:
    """Runs problems of the same features. What does not change between calls is computed once. `room`: bytes that
    partial results may take; fewer CTAs, down to one, need less.
    """

    def __init__(self, features: XqaFeatures, arch: Arch, sms: int, spec: XqaSpec, room: int = UNLIMITED) -> None:
        f = features
        self.features, self.arch, self.q_len, self.spec = f, arch, f.q_len, spec
        self.device_index = CPU if f.device.type == "cpu" else f.device.index
        group = f.num_qo_heads // f.num_kv_heads
        rows = f.q_len * group
        row_blocks = -(-rows // self.spec.rows)
        units, most = f.num_kv_heads * row_blocks, ctas(spec, sms, room)
        lines = line_count(units, most)
        self.grid = (lines, most // lines, 1)
        self.counter_bytes = 4 * most
        self.partial_bytes = 0 if most == 1 else partial_bytes(spec) * most
        self.pdl = arch.pdl and f.enable_pdl is not False
        self.q_itemsize, self.o_itemsize = f.q_dtype.itemsize, f.o_dtype.itemsize
        self.kv_itemsize = max(1, KV_BITS[f.kv_dtype] // 8)
        axes = (1, 0) if f.kv_layout == "HND" else (0, 1)
        self.paged, (self.token, self.head) = f.paged, (axis + int(f.paged) for axis in axes)  # axes of k and v
        self.constants = (
            f.q_len,
            UNBOUNDED if f.window_left < 0 else min(f.window_left, UNBOUNDED),
            f.num_kv_heads,
            *(row_blocks, *fastdiv.magic(row_blocks)),
            *(units // lines, *fastdiv.magic(self.grid[1])),
            *(group, *fastdiv.magic(group)),
            *(f.page_size, *fastdiv.magic(f.page_size)),
            OVERHEAD,
            self.spec.warps,  # at least: a tile for every warp
        )
        self.lse_scale = f.lse_scale

    def __call__(self, problem: XqaProblem) -> None:
        self.launch.fire(self.values(problem), self.grid, current_stream(self.device_index))

    @functools.cached_property
    def launch(self) -> Launch:
        return load(self.spec, self.arch.name, self.device_index, self.pdl)

    def values(self, problem: XqaProblem) -> Values:
        """Kernel parameters in the order of `XqaParams`."""
        _, q, k, v, table, seq_lens, capacity, out, scratch, scale, v_scale, scale_tensors, *tensors = problem
        v_scale_ptr, _, sinks, q_indptr, mask, lse, page_starts = map(_address, tensors)
        if scratch.partial_bytes < self.partial_bytes or scratch.counter_bytes < self.counter_bytes:
            self._refuse(scratch.counter_bytes, scratch.partial_bytes)
        q_strides, o_strides = q.stride(), out.stride()
        size, q_size, o_size = self.kv_itemsize, self.q_itemsize, self.o_itemsize
        k_page, k_token, k_head = self.strides(k)
        v_page, v_token, v_head = self.strides(v)
        if max(self.span(k), self.span(v)) * size >= CHUNK << 32:
            raise ArgumentError(f"k and v must span less than {CHUNK << 32} bytes each, got {tuple(k.shape)}")
        k_sf, v_sf, sf_heads, sf_steps = self._block_scales(problem.block_scales)
        return (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            lse,
            k_sf,
            v_sf,
            table.data_ptr(),
            page_starts,
            seq_lens.data_ptr(),
            q_indptr,
            mask,
            sinks,
            *(two_addresses(scale_tensors) if scale_tensors else (0, 0)),
            v_scale_ptr,
            scratch.partials,
            scratch.counters,
            q_strides[0] * q_size,
            q_strides[-2] * q_size,
            o_strides[0] * o_size,
            o_strides[-2] * o_size,
            k_head * size,
            v_head * size,
            *sf_heads,
            k_page * size // CHUNK,
            k_token * size // CHUNK,
            v_page * size // CHUNK,
            v_token * size // CHUNK,
            *sf_steps,
            mask_row_bytes(self.q_len),
            seq_lens.shape[0],
            capacity,
            0 if page_starts else table.stride(0),
            *self.constants,
            scale,
            v_scale,
            self.lse_scale,
        )

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Elements to the next page, token and head of k or v, or of their block scales."""
        strides = x.stride()
        return strides[0] if self.paged else 0, strides[self.token], strides[self.head]

    def span(self, x: torch.Tensor) -> int:
        """Elements from one head's first token to past its last."""
        axis = 0 if self.paged else self.token
        return x.shape[axis] * x.stride(axis)

    def _block_scales(
        self, block_scales: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[int, int, tuple[int, int], tuple[int, int, int, int]]:
        """Addresses, head strides, and page and token strides of K's and V's block scales (a byte each)."""
        if block_scales is None:
            return 0, 0, (0, 0), (0, 0, 0, 0)
        k, v = block_scales
        (k_page, k_token, k_head), (v_page, v_token, v_head) = self.strides(k), self.strides(v)
        return k.data_ptr(), v.data_ptr(), (k_head, v_head), (k_page, k_token, v_page, v_token)

    def _refuse(self, counter_bytes: int, partial_bytes: int) -> None:
        raise WorkspaceError(
            f"this call needs {self.counter_bytes} bytes of semaphores and {self.partial_bytes} bytes of scratch, "
            f"the buffers have {counter_bytes} and {partial_bytes}"
        )


def run(problem: XqaProblem) -> None:
    f = problem.features
    runner(f, few(problem.seq_lens.shape[0], f))(problem)


def few(batch_size: int, features: XqaFeatures) -> bool:
    return batch_size * features.num_kv_heads <= tiles.FEW


def ctas(spec: XqaSpec, sms: int, room: int = UNLIMITED) -> int:
    """Of a launch that may use `room` bytes for partial results. One CTA alone has none."""
    return max(1, min(sms * spec.ctas, room // partial_bytes(spec)))


def partial_bytes(spec: XqaSpec) -> int:
    """Of one CTA: it may end one segment and begin another."""
    return 2 * spec.rows * (spec.head_dim + 2) * 4


def choose_spec(features: XqaFeatures, few: bool, arch: Arch) -> XqaSpec:
    f = features
    rows = f.q_len * (f.num_qo_heads // f.num_kv_heads)
    return tiles.choose(short(f.q_dtype), f.kv_dtype, short(f.o_dtype), f.head_dim, rows, f.tree, few, arch)


def line_count(units: int, ctas: int) -> int:
    """Lines that the units are spread over: as many as leave only few CTAs without a share."""
    return max(n for n in range(1, units + 1) if units % n == 0 and ctas % n <= ctas * IDLE)


def mask_row_bytes(q_len: int) -> int:
    """Mask bits of one row, in whole words."""
    return -(-q_len // 32) * 4


@functools.lru_cache(256)
def runner(features: XqaFeatures, is_few: bool) -> Runner:
    index = features.device.index
    arch = for_device(index)
    return Runner(features, arch, multiprocessors(index), choose_spec(features, is_few, arch))


def _address(value: torch.Tensor | tuple[torch.Tensor, ...] | None) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0
