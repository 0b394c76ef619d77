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
from cute_attn.kernels.host.prepared import Addresses, Grid, PreparedKernel, output_strides, prepared
from cute_attn.problem import Problem, Settings
from cute_attn.runtime.launch import Bound, Settled, Values, current_stream

MAX_LENGTHS = 512  # schedules kept: lengths vary without end, and a schedule is cheap to compute again

Tensors = tuple[Any, ...]  # q, k, v, out, lse, `operands.Optional`, and the number of keys
Layouts = dict[PreparedKernel, tuple[Addresses, Values]]  # by kernel, for tensors of one layout: addresses, strides

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


Scheduler = Callable[[int, int], SingleSchedule[T]]  # from qo_len > 0 and kv_len; needs no GPU


@dataclass(slots=True)
class Work:
    """Launches of all numbers of keys that have one schedule."""

    kernel: PreparedKernel
    attention: Bound
    addresses: Addresses
    settled: Settled
    partials: int  # memory for partial results, in elements of q
    combined: tuple[Bound, Settled, int] | None  # combine launches, and bytes to where the partial lse begin
    schedule: SingleSchedule[Any]
    most_keys: int  # that the kernel can address


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
        self.device_index, self.sms, self.kernel, self.records = gpu.device_index, gpu.sms, kernel, records
        self.num_qo_heads, self.head_dim_vo = settings.features.num_qo_heads, settings.features.head_dim_vo
        self.schedule = functools.lru_cache(MAX_LENGTHS)(scheduler)  # the layers of a model repeat lengths

    def bind(self, problem: Problem) -> Fire:
        """Returns a function that launches the attention kernel, and the combine kernel where keys are split."""
        qo_len, index = problem.qo_len, self.device_index
        if qo_len == 0:
            return launch_nothing
        layouts: Layouts = {}
        like = problem.settings, qo_len, optional_tensors(problem)[0], block_scale_strides(problem), layouts
        latest: tuple[int, Work | None] = 0, None  # a number of keys, and its work

        def fire(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            kv_len, (known, work) = tensors[6], latest  # once: threads share this
            if work is None or known != kv_len:
                schedule = self.schedule(qo_len, kv_len)
                if work is None or schedule is not work.schedule or kv_len > work.most_keys:
                    work = self._work(schedule, tensors, *like)
                latest = kv_len, work
            attention, counter = work.attention, work.kernel.counter
            stream, optional, at = current_stream(index), tensors[5], 0
            counters = 0 if counter is None else counter(stream)
            if work.partials:  # the caching allocator keeps them with a captured graph
                partials = tensors[0].new_empty(work.partials)  # naming a dtype would take 0.2 us
                at = partials.data_ptr()
            if work.combined is None:
                moving = work.addresses((q, k, v, out, lse, counters, at, kv_len))
                attention.fire(stream, moving, work.settled, optional)
                return
            combine, to_combine, of_lse = work.combined
            moving = work.addresses((q, k, v, at, at + of_lse, counters, at, kv_len))
            attention.fire(stream, moving, work.settled, optional)
            combine.fire(stream, (out, lse, at, at + of_lse), to_combine, optional)

        return fire

    def _work(
        self,
        schedule: SingleSchedule[T],
        tensors: Tensors,
        settings: Settings,
        qo_len: int,
        roles: Roles,
        block_scales: Values,
        layouts: Layouts,
    ) -> Work:
        """Returns the launches of a schedule. `layouts`: what is known of such problems."""
        q, k, v, out, _, _, kv_len = tensors
        kernel = self.kernel(schedule.tile, schedule.heads, schedule.num_splits > 1)
        if kernel not in layouts:
            strides = kernel.strides(q, k, v, out, block_scales)
            layouts[kernel] = kernel.addresses(q, k, v, out), prepared(tuple, strides)  # the same for other scales
        (addresses, strides), most_keys = layouts[kernel], kernel.most_keys(kv_len, k, v)
        settled, combined = (schedule.grid, strides, schedule.numbers, kernel.scales(settings)), None
        if (combine := kernel.combine) is not None:
            splits, to_merge = schedule.num_splits, qo_len * self.num_qo_heads
            merge_grid, *rows = rows_of_warps(to_merge, self.sms)
            numbers, v_scale = (*rows, qo_len, splits), (settings.v_scale,)
            to_combine = prepared(tuple, (merge_grid, output_strides(out), numbers, v_scale))
            combined = combine.of(roles), to_combine, to_merge * splits * 4 * self.head_dim_vo
        attention, partials = kernel.attention.of(roles), schedule.partial_bytes // q.element_size()
        return Work(kernel, attention, addresses, settled, partials, combined, schedule, most_keys)
