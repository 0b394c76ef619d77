"""Parameters of the mma.sync kernels: from tensors and settings to numbers in the kernels' order."""

from __future__ import annotations

import math

import torch

from cute_attn.kernels.fa2.host import variant as fa2_variant
from cute_attn.kernels.host import fastdiv
from cute_attn.kernels.host.params import LOG2E, Batch, Target, Values, two_addresses
from cute_attn.problem import BatchProblem, Problem, Settings

ONE_REQUEST = (0, 0, 0, 0)
NO_PAGES = (0, 0, 1, 0, 0)  # strides of a page of k and v; page_size with the numbers that divide by it
NO_BLOCK_SCALES = (0,) * 8
PLAIN = (*ONE_REQUEST, *NO_PAGES, *NO_BLOCK_SCALES)


class Parameters:
    """Of launches whose problems have the same settings: what these decide is computed once."""

    def __init__(self, settings: Settings) -> None:
        features = settings.features
        self.settings = settings
        self.group, self.num_qo_heads = features.num_qo_heads // features.num_kv_heads, features.num_qo_heads
        self.num_kv_heads, self.head_dim_vo = features.num_kv_heads, features.head_dim_vo
        self.paged = features.kv_source == "paged"
        axes = (1, 0) if settings.kv_layout == "HND" else (0, 1)
        self.token, self.head = (axis + int(self.paged) for axis in axes)  # of k and v
        self.itemsize, self.out_itemsize = features.q_dtype.itemsize, features.o_dtype.itemsize
        self.kv_itemsize = features.kv_dtype.itemsize
        num_kv_heads = features.num_kv_heads
        self.heads = (
            *(self.group, *fastdiv.magic(self.group), features.num_qo_heads),
            *(num_kv_heads, *fastdiv.magic(num_kv_heads)),
        )
        self.page_size = settings.page_size, *fastdiv.magic(settings.page_size)
        self.score_numbers = (
            settings.sm_scale * (1.0 if fa2_variant.scores(features) else LOG2E),
            settings.logits_soft_cap,
        )
        self.rope_numbers = (
            1.0 / (2.0 * math.pi * settings.rope_scale),
            settings.rope_theta ** (-2.0 / features.head_dim_qk),
        )

    def target(self, problem: Problem | BatchProblem) -> Target:
        out, lse, sinks, v_scale = problem.out, problem.lse, problem.sinks, problem.v_scale_tensor
        strides = out.stride()
        return (
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            strides[0] * self.out_itemsize,
            strides[-2] * self.out_itemsize,
            self.settings.v_scale,
            0 if v_scale is None else v_scale.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
        )

    def partial_target(self, workspace: torch.Tensor, rows: int) -> Target:
        """o [num_splits, qo_len, num_qo_heads, head_dim_vo], then lse [num_splits, qo_len, num_qo_heads]."""
        o, row_bytes = workspace.data_ptr(), 4 * self.head_dim_vo
        return o, o + rows * row_bytes, self.num_qo_heads * row_bytes, row_bytes, 1.0, 0, 0

    def attention(
        self,
        problem: Problem | BatchProblem,
        target: Target,
        lengths: tuple[int, int, int, int, int],
        batch: Batch | None = None,
    ) -> Values:
        """In the order of `Fa2Params`; `lengths`: qo_len, kv_len, right, left, tiles_per_split."""
        q, k, v, mask, scales = problem.q, problem.k, problem.v, problem.packed_mask, problem.scale_tensors
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        itemsize, kv_itemsize, token, head = self.itemsize, self.kv_itemsize, self.token, self.head
        o, lse, o_stride_n, o_stride_h, v_scale, v_scale_ptr, sinks = target
        scale0, scale1 = two_addresses(scales) if scales else (0, 0)
        qo_len, kv_len, right, left, tiles_per_split = lengths
        return (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            o,
            lse,
            0 if mask is None else mask.data_ptr(),
            0 if mask is None else mask.numel(),
            scale0,
            scale1,
            v_scale_ptr,
            sinks,
            q_strides[0] * itemsize,
            q_strides[-2] * itemsize,
            k_strides[token] * kv_itemsize,
            k_strides[head] * kv_itemsize,
            v_strides[token] * kv_itemsize,
            v_strides[head] * kv_itemsize,
            o_stride_n,
            o_stride_h,
            qo_len,
            kv_len,
            *self.heads,
            right,
            left,
            tiles_per_split,
            *self.score_numbers,
            v_scale,
            *self.rope_numbers,
            self.settings.lse_scale,
            *(PLAIN if batch is None and problem.block_scales is None else self.extras(problem, batch or ONE_REQUEST)),
        )

    def extras(self, problem: Problem | BatchProblem, batch: Batch) -> Values:
        """What a single request with 16-bit keys does not need."""
        pages: Values = NO_PAGES
        if self.paged:
            strides = problem.k.stride(0) * self.kv_itemsize, problem.v.stride(0) * self.kv_itemsize
            pages = *strides, *self.page_size
        scales = problem.block_scales
        return (*batch, *pages, *(NO_BLOCK_SCALES if scales is None else self.block_scales(*scales)))

    def block_scales(self, k: torch.Tensor, v: torch.Tensor) -> Values:
        """Addresses, then strides of a page, a token and a head; an element is a byte."""
        numbers: list[int] = [k.data_ptr(), v.data_ptr()]
        for strides in (k.stride(), v.stride()):
            numbers += (strides[0] if self.paged else 0, strides[self.token], strides[self.head])
        return tuple(numbers)

    def combine(
        self,
        target: Target,
        partials: tuple[int, int],
        lengths: tuple[int, int],
        merges: tuple[int, int, int, int] = (0, 1, 1, 0),
    ) -> Values:
        """In the order of `CombineParams`; `partials`: addresses of o and lse, `lengths`: qo_len, num_splits, `merges`:
        address of the records, rows of a merge, rows of a slot, rows of all merges and kv heads."""
        o, lse, stride_n, stride_h, v_scale, v_scale_ptr, sinks = target
        qo_len, num_splits = lengths
        records, rows_per_merge, slot_rows, num_rows = merges
        return (
            *partials,
            o,
            lse,
            v_scale_ptr,
            sinks,
            stride_n,
            stride_h,
            qo_len,
            self.num_qo_heads,
            num_splits,
            v_scale,
            self.settings.lse_scale,
            records,
            self.num_kv_heads,
            self.group,
            rows_per_merge,
            slot_rows,
            num_rows,
        )
