"""Host side of the decode kernel: which kernel and grid, and the parameter block of a launch."""

from __future__ import annotations

import functools

import torch

from cute_attn.errors import ArgumentError
from cute_attn.kernels import divisor
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.spec import KV_BITS, XqaMemory, XqaSpec
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch, for_device
from cute_attn.runtime.launch import Launch, current_stream
from cute_attn.xqa.problem import XqaFeatures, XqaProblem

COUNTER_BYTES = 8 << 20  # of the workspace: zero before its first use, and left zero
UNBOUNDED = 1 << 30  # no window: beyond any kv index
OVERHEAD = 2  # what starting and finishing a segment costs, in tiles
MIN_SHARE_TILES = 1  # of a warp: a CTA with less is not worth its part of the merge

Values = tuple[int | float, ...]


class Runner:
    """Runs problems of the same features. What does not change between calls is computed once."""

    def __init__(self, features: XqaFeatures, arch: Arch, sms: int, spec: XqaSpec | None = None) -> None:
        f = features
        self.features, self.arch = features, arch
        group = f.num_qo_heads // f.num_kv_heads
        rows = f.q_len * group
        self.spec = spec or tiles.choose(_name(f.q_dtype), f.kv_dtype, _name(f.o_dtype), f.head_dim, rows, f.tree, arch)
        self.memory = XqaMemory.of(self.spec)
        self.grid = (sms * tiles.resident_ctas(self.spec, self.memory.bytes, arch), 1, 1)
        row_bytes = (f.head_dim + 2) * 4
        self.workspace_bytes = COUNTER_BYTES + 2 * self.grid[0] * self.spec.rows * row_bytes
        self.pdl = arch.pdl and f.enable_pdl is not False
        self.q_itemsize, self.o_itemsize = f.q_dtype.itemsize, f.o_dtype.itemsize
        self.kv_itemsize = max(1, KV_BITS[f.kv_dtype] // 8)
        self.mask_row_bytes = -(-f.q_len // 32) * 4
        self.token, self.head = (2, 1) if f.kv_layout == "HND" else (1, 2)  # axes of the cache
        self.constants = (
            f.q_len,
            UNBOUNDED if f.window_left < 0 else f.window_left,
            f.num_kv_heads,
            -(-rows // self.spec.rows),
            *(group, *divisor.magic(group)),
            *(f.page_size, *divisor.magic(f.page_size)),
            OVERHEAD,
            MIN_SHARE_TILES * self.spec.warps,
        )

    def __call__(self, problem: XqaProblem) -> None:
        if problem.q.shape[0]:
            index = self.features.device.index
            self.launch().fire(self.values(problem), self.grid, current_stream(index))

    @functools.cache  # noqa: B019 - runners live as long as the process
    def launch(self) -> Launch:
        return Launch(artifacts.get(self.spec, self.arch.name), self.features.device.index, pdl=self.pdl)

    def values(self, problem: XqaProblem) -> Values:
        """Kernel parameters in the order of `XqaParams`."""
        _, q, k, v, tables, seq_lens, out, workspace, scale, v_scale, *tensors = problem
        kv_scales = problem.kv_scales
        scale_ptr, v_scale_ptr, _, sinks, q_indptr, mask, lse = map(_address, tensors)
        if workspace.nbytes < self.workspace_bytes:
            raise ArgumentError(f"workspace_buffer must have {self.workspace_bytes} bytes, got {workspace.nbytes}")
        base = workspace.data_ptr()
        q_strides, o_strides, k_strides, v_strides = q.stride(), out.stride(), k.stride(), v.stride()
        token, head, size = self.token, self.head, self.kv_itemsize
        k_sf, v_sf, sf_heads, sf_steps = self._block_scales(kv_scales)
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
            base + COUNTER_BYTES,
            base,
            q_strides[0] * self.q_itemsize,
            q_strides[1] * self.q_itemsize,
            o_strides[0] * self.o_itemsize,
            o_strides[1] * self.o_itemsize,
            k_strides[head] * size,
            v_strides[head] * size,
            *sf_heads,
            tables.stride(0) * 4,
            k_strides[0] * size,
            k_strides[token] * size,
            v_strides[0] * size,
            v_strides[token] * size,
            *sf_steps,
            self.mask_row_bytes,
            tables.shape[0],
            *self.constants,
            scale,
            v_scale,
        )

    def _block_scales(
        self, kv_scales: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[int, int, tuple[int, int], tuple[int, int, int, int]]:
        """Addresses, head strides, and page and token strides of K's and V's block scales (bytes each)."""
        if kv_scales is None:
            return 0, 0, (0, 0), (0, 0, 0, 0)
        k, v = kv_scales
        ks, vs, token, head = k.stride(), v.stride(), self.token, self.head
        return k.data_ptr(), v.data_ptr(), (ks[head], vs[head]), (ks[0], ks[token], vs[0], vs[token])


@functools.lru_cache(256)
def runner(features: XqaFeatures) -> Runner:
    index = features.device.index
    sms = torch.cuda.get_device_properties(index).multi_processor_count
    return Runner(features, for_device(index), sms)


def _address(value: torch.Tensor | tuple[torch.Tensor, ...] | None) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
