"""Runs of single requests: their schedules are memoised by lengths, and a call fires one launch or two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from cute_attn.kernels.combine.spec import rows_of_warps
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import (
    Fire,
    Roles,
    Runner,
    block_scale_strides,
    launch_nothing,
    optional_tensors,
)
from cute_attn.kernels.host.prepared import Addresses, Grid, PreparedKernel
from cute_attn.problem import Problem, Settings
from cute_attn.runtime.launch import Bound, Settled, Values, current_stream

MAX_LENGTHS = 512  # schedules kept: lengths vary without end, and a schedule is cheap to compute again

Tensors = tuple[Any, ...]  # q, k, v, out, lse, `operands.Optional`, and the number of keys

T = TypeVar("T")  # a family's tile


@dataclass(slots=True)
class SingleSchedule(Generic[T]):
    """Tile, grid and kernel parameters that follow from the lengths of a request."""

    tile: T
    heads: int  # query heads whose rows share a tile
    num_splits: int
    grid: Grid
    numbers: Values  # of the kernel's length fields
    partial_bytes: int = 0  # of memory for partial results
    kernel: PreparedKernel | None = None  # once a request has run


Scheduler = Callable[[int, int], SingleSchedule[T]]  # from qo_len > 0 and kv_len; needs no GPU
Work = tuple[int, Bound, Addresses, Settled, int, tuple[Bound, Settled, int] | None, SingleSchedule[Any]]
# ^ of a number of keys: the attention launches, addresses, what is settled, and bytes of partial results; of combine
# ^ launches where the partial lse begin in these; and the schedule


class SingleRun(Runner, Generic[T]):
    """Runs requests of the same settings. Kernels are loaded at first use; later calls only compute parameters."""

    def __init__(
        self,
        settings: Settings,
        gpu: Gpu,
        scheduler: Scheduler[T],
        kernel: Callable[[T, int, bool], PreparedKernel],
        records: torch.Tensor | None = None,
    ) -> None:
        """`kernel` loads a kernel for a schedule's tile and heads, and for split keys or not. `records`: memory that
        launches read besides the problem's.
        """
        self.device_index, self.sms, self.scheduler = gpu.device_index, gpu.sms, scheduler
        self.kernel, self.records = kernel, records
        self.num_qo_heads, self.head_dim_vo = settings.features.num_qo_heads, settings.features.head_dim_vo
        self.launch = functools.lru_cache(MAX_LENGTHS)(self._launch)  # the layers of a model repeat lengths

    def bind(self, problem: Problem) -> Fire:
        """Returns a function that launches the attention kernel, and the combine kernel where keys are split."""
        qo_len, index, block_scales = problem.qo_len, self.device_index, block_scale_strides(problem)
        if qo_len == 0:
            return launch_nothing
        roles, _ = optional_tensors(problem)
        strides: dict[PreparedKernel, tuple[Values, Values]] = {}  # of the attention and combine launches
        latest: Work | None = None

        def fire(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            kv_len, work = tensors[6], latest  # once: threads share this
            if work is None or work[0] != kv_len:
                work = latest = self._work((qo_len, kv_len), tensors, roles, block_scales, strides, work)
            _, attention, addresses, settled, partial_bytes, combined, _ = work
            stream, optional, at = current_stream(index), tensors[5], 0
            if partial_bytes:  # the caching allocator keeps them with a captured graph
                partials = tensors[0].new_empty(partial_bytes, dtype=torch.uint8)
                at = partials.data_ptr()
            if combined is None:
                attention.fire(stream, addresses((q, k, v, out, lse, stream, at)), settled, optional)
                return
            combine, to_combine, of_lse = combined
            attention.fire(stream, addresses((q, k, v, at, at + of_lse, stream, at)), settled, optional)
            combine.fire(stream, (out, lse, at, at + of_lse), to_combine, optional)

        return fire

    def _work(
        self,
        lengths: tuple[int, int],
        tensors: Tensors,
        roles: Roles,
        block_scales: Values,
        strides: dict[PreparedKernel, tuple[Values, Values]],
        before: Work | None,
    ) -> Work:
        """Returns what launches of a number of keys have in common, and notes strides of a kernel that comes anew.
        `before`: of another number, which may have the same schedule.
        """
        (qo_len, kv_len), (q, k, v, out, *_) = lengths, tensors
        schedule = self.launch(qo_len, kv_len)
        kernel = schedule.kernel
        assert kernel is not None
        addresses, combine = kernel.addresses(q, k, v, out), kernel.combine
        if before is not None and before[6] is schedule:
            return kv_len, before[1], addresses, *before[3:]
        if kernel not in strides:
            out_strides: Values = () if combine is None else combine.output.strides(out)
            strides[kernel] = kernel.strides(q, k, v, out, block_scales), out_strides
        of_kernel, out_strides = strides[kernel]
        combined = None
        if combine is not None:
            splits = schedule.num_splits
            merge_grid, *rows = rows_of_warps(qo_len * self.num_qo_heads, self.sms)
            settled = merge_grid, out_strides, (*rows, qo_len, splits)
            combined = combine.launches.of(roles), settled, qo_len * self.num_qo_heads * splits * 4 * self.head_dim_vo
        attention, to_attention = kernel.attention.of(roles), (schedule.grid, of_kernel, schedule.numbers)
        return kv_len, attention, addresses, to_attention, schedule.partial_bytes, combined, schedule

    def _launch(self, qo_len: int, kv_len: int) -> SingleSchedule[T]:
        """Returns the schedule of a request of these lengths with its kernel; `launch` memoises it."""
        schedule = self.scheduler(qo_len, kv_len)
        if schedule.kernel is None:
            schedule.kernel = self.kernel(schedule.tile, schedule.heads, schedule.num_splits > 1)
        return schedule
