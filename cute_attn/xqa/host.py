"""Host side of the decode kernel: which kernel and grid, and the parameter block of a launch."""

from __future__ import annotations

import functools

import torch

from cute_attn.backends.fa2_kernels import load
from cute_attn.errors import ArgumentError, WorkspaceError
from cute_attn.kernels import divisor
from cute_attn.kernels.spec import KV_BITS
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.runtime.arch import Arch, for_device
from cute_attn.runtime.launch import CPU, Launch, current_stream
from cute_attn.xqa.problem import XqaFeatures, XqaProblem

UNBOUNDED = 1 << 30  # no window: beyond any kv index
CHUNK = 16  # bytes, in which the kernel counts K and V
IDLE = 1 / 32  # of all CTAs, at most
OVERHEAD = 4  # what starting and finishing a segment costs, in tiles

Values = tuple[int | float, ...]


class Runner:
    """Runs problems of the same features. What does not change between calls is computed once."""

    def __init__(self, features: XqaFeatures, arch: Arch, sms: int, spec: XqaSpec) -> None:
        f = features
        self.arch, self.q_len, self.page_size = arch, f.q_len, f.page_size
        self.device_index = CPU if f.device.type == "cpu" else f.device.index
        group = f.num_qo_heads // f.num_kv_heads
        rows = f.q_len * group
        self.spec = spec
        row_blocks = -(-rows // self.spec.rows)
        units, ctas = f.num_kv_heads * row_blocks, sms * self.spec.ctas
        lines = line_count(units, ctas)
        self.grid = (lines, ctas // lines, 1)
        self.counter_bytes = 4 * ctas
        self.partial_bytes = 2 * ctas * self.spec.rows * (f.head_dim + 2) * 4
        self.pdl = arch.pdl and f.enable_pdl is not False
        self.q_itemsize, self.o_itemsize = f.q_dtype.itemsize, f.o_dtype.itemsize
        self.kv_itemsize = max(1, KV_BITS[f.kv_dtype] // 8)
        self.constants = (
            f.q_len,
            UNBOUNDED if f.window_left < 0 else f.window_left,
            f.num_kv_heads,
            *(row_blocks, *divisor.magic(row_blocks)),
            *(units // lines, *divisor.magic(self.grid[1])),
            *(group, *divisor.magic(group)),
            *(f.page_size, *divisor.magic(f.page_size)),
            OVERHEAD,
            self.spec.warps,  # at least: a tile for every warp
        )

    def __call__(self, problem: XqaProblem) -> None:
        self.launch.fire(self.values(problem), self.grid, current_stream(self.device_index))

    @functools.cached_property
    def launch(self) -> Launch:
        return load(self.spec, self.arch.name, self.device_index, self.pdl)

    def values(self, problem: XqaProblem) -> Values:
        """Kernel parameters in the order of `XqaParams`."""
        _, q, k, v, tables, seq_lens, out, scratch, scale, v_scale, *tensors = problem
        scale_ptr, v_scale_ptr, _, sinks, q_indptr, mask, lse = map(_address, tensors)
        if scratch.partial_bytes < self.partial_bytes or scratch.counter_bytes < self.counter_bytes:
            self._refuse(scratch.counter_bytes, scratch.partial_bytes)
        q_strides, o_strides, k_strides, v_strides = q.stride(), out.stride(), k.stride(), v.stride()
        size, q_size, o_size = self.kv_itemsize, self.q_itemsize, self.o_itemsize
        if max(k.shape[0] * k_strides[0], v.shape[0] * v_strides[0]) * size >= CHUNK << 32:
            raise ArgumentError(f"k and v must span less than {CHUNK << 32} bytes each, got {tuple(k.shape)}")
        k_sf, v_sf, sf_heads, sf_steps = _block_scales(problem.block_scales)
        batch, max_pages = tables.shape
        return (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            k_sf,
            v_sf,
            out.data_ptr(),
            lse,
            tables.data_ptr(),
            seq_lens.data_ptr(),
            q_indptr,
            mask,
            sinks,
            scale_ptr,
            v_scale_ptr,
            scratch.partials,
            scratch.counters,
            q_strides[0] * q_size,
            q_strides[1] * q_size,
            o_strides[0] * o_size,
            o_strides[1] * o_size,
            k_strides[2] * size,
            v_strides[2] * size,
            *sf_heads,
            tables.stride(0) * 4,
            k_strides[0] * size // CHUNK,
            k_strides[1] * size // CHUNK,
            v_strides[0] * size // CHUNK,
            v_strides[1] * size // CHUNK,
            *sf_steps,
            mask_row_bytes(self.q_len),
            batch,
            min(max_pages * self.page_size, UNBOUNDED),
            *self.constants,
            scale,
            v_scale,
        )

    def _refuse(self, counter_bytes: int, partial_bytes: int) -> None:
        raise WorkspaceError(
            f"this call needs {self.counter_bytes} bytes of semaphores and {self.partial_bytes} bytes of scratch, "
            f"the buffers have {counter_bytes} and {partial_bytes}"
        )


def run(problem: XqaProblem) -> None:
    f = problem.features
    runner(f, problem.block_tables.shape[0] * f.num_kv_heads <= tiles.FEW)(problem)


def choose_spec(features: XqaFeatures, few: bool, arch: Arch) -> XqaSpec:
    f = features
    rows = f.q_len * (f.num_qo_heads // f.num_kv_heads)
    return tiles.choose(_name(f.q_dtype), f.kv_dtype, _name(f.o_dtype), f.head_dim, rows, f.tree, few, arch)


def line_count(units: int, ctas: int) -> int:
    """Lines that the units are spread over: as many as leave only few CTAs without a share."""
    return max(n for n in range(1, units + 1) if units % n == 0 and ctas % n <= ctas * IDLE)


def mask_row_bytes(q_len: int) -> int:
    """Mask bits of one row, in whole words."""
    return -(-q_len // 32) * 4


@functools.lru_cache(256)
def runner(features: XqaFeatures, few: bool) -> Runner:
    index = features.device.index
    sms, arch = torch.cuda.get_device_properties(index).multi_processor_count, for_device(index)
    return Runner(features, arch, sms, choose_spec(features, few, arch))


def _block_scales(
    block_scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[int, int, tuple[int, int], tuple[int, int, int, int]]:
    """Addresses, head strides, and page and token strides of K's and V's block scales (a byte each)."""
    if block_scales is None:
        return 0, 0, (0, 0), (0, 0, 0, 0)
    k, v = block_scales
    ks, vs = k.stride(), v.stride()
    return k.data_ptr(), v.data_ptr(), (ks[2], vs[2]), (ks[0], ks[1], vs[0], vs[1])


def _address(value: torch.Tensor | tuple[torch.Tensor, ...] | None) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
