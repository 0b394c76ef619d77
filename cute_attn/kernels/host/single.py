"""Runs of single requests: their schedules are memoised by lengths, and a call fires one launch or two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from cute_attn.kernels.combine.spec import rows_of_warps
from cute_attn.kernels.host.batch import Tiling
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import (
    Fire,
    Pick,
    Roles,
    block_scale_strides,
    fire_first,
    launch_nothing,
    optional_tensors,
)
from cute_attn.kernels.host.prepared import Addresses, Grid, PreparedKernel
from cute_attn.problem import Problem, Request, Settings
from cute_attn.runtime.launch import Bound, Settled, current_stream
from cute_attn.runtime.param_block import Values
from cute_attn.schedule.split_kv import Split, ceil_div, split_kv, visible_tokens

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


Scheduler = Callable[[int, int], SingleSchedule[T]]  # from qo_len > 0 and kv_len; needs no GPU
RequestLaunch = Callable[[Settings, Tiling[T], Split, int, int], tuple[Grid, Values]]
# ^ from settings, tiling, split, qo_len and kv_len to a grid and the numbers of a kernel


def schedule_request(
    settings: Settings, tiling: Tiling[T], launch: RequestLaunch[T], qo_len: int, kv_len: int
) -> SingleSchedule[T]:
    """Returns the schedule of a request with these lengths: the split of its keys, and the launch."""
    rows, cols, heads, head_blocks, causal, window_left, resident_ctas, min_split_tiles, *_ = tiling.params
    tokens = (rows - 1) // heads + 2  # that one query tile can touch
    visible = visible_tokens(qo_len, kv_len, tokens, causal, window_left)
    query_tiles, kv_tiles = ceil_div(qo_len * heads, rows) * head_blocks, ceil_div(kv_len, cols)
    split = split_kv(kv_tiles, ceil_div(visible, cols), query_tiles, resident_ctas, min_split_tiles)
    return SingleSchedule(tiling.tile, heads, split.num_splits, *launch(settings, tiling, split, qo_len, kv_len))


SingleLaunch = tuple[PreparedKernel, Grid, Values, int]  # a schedule's kernels, grid, numbers and num_splits
Launches = tuple[Bound, Pick]
Work = tuple[int, Launches, Addresses, Settled, tuple[Launches, Settled, int] | None]
# ^ of a number of keys: the attention launches, addresses, what is settled; and of combine launches num_splits too


class SingleRun(Generic[T]):
    """Runs requests of the same settings. Kernels are loaded at first use; later calls only compute parameters."""

    def __init__(
        self,
        settings: Settings,
        gpu: Gpu,
        scheduler: Scheduler[T],
        kernel: Callable[[T, int, bool], PreparedKernel],
    ) -> None:
        """`kernel` loads a kernel for a schedule's tile and heads, and for split keys or not."""
        self.device_index, self.sms, self.scheduler = gpu.device_index, gpu.sms, scheduler
        self.num_qo_heads, self.head_dim_vo = settings.features.num_qo_heads, settings.features.head_dim_vo
        self.kernel = kernel
        self.launch = functools.lru_cache(MAX_LENGTHS)(self._launch)  # the layers of a model repeat lengths

    def __call__(self, problem: Request) -> Fire:
        """Launches the attention kernel, and the combine kernel where keys are split."""
        assert isinstance(problem, Problem)  # selection refuses lengths on the device
        return fire_first(self.bind(problem), problem, (problem.kv_len,))

    def bind(self, problem: Problem) -> Fire:
        """Returns a function that runs requests which differ from `problem` in the number of keys and in addresses."""
        qo_len, index, block_scales = problem.qo_len, self.device_index, block_scale_strides(problem)
        if qo_len == 0:
            return launch_nothing
        rows, partial_bytes = qo_len * self.num_qo_heads, 4 * self.head_dim_vo
        roles, _ = optional_tensors(problem)
        strides: dict[PreparedKernel, tuple[Values, Values]] = {}  # of the attention and combine launches
        latest: Work | None = None

        def fire(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            kv_len, work = tensors[6], latest  # once: threads share this
            if work is None or work[0] != kv_len:
                work = latest = self._work((qo_len, kv_len), tensors, roles, block_scales, strides)
            _, (attention, pick), addresses, settled, combined = work
            stream, optional = current_stream(index), tensors[5]
            if combined is None:
                moving = addresses((q, k, v, out, lse, stream))
                attention.fire(stream, moving + pick(optional) if optional else moving, settled)
                return
            (combine, pick_final), to_combine, num_splits = combined
            # The caching allocator keeps partials with a captured graph.
            partials = tensors[0].new_empty(rows * num_splits * (partial_bytes + 4), dtype=torch.uint8)
            o = partials.data_ptr()
            of_lse = o + rows * num_splits * partial_bytes
            attention.fire(stream, addresses((q, k, v, o, of_lse, stream)) + pick(optional), settled)
            combine.fire(stream, (out, lse, o, of_lse, *pick_final(optional)), to_combine)

        return fire

    def _work(
        self,
        lengths: tuple[int, int],
        tensors: Tensors,
        roles: Roles,
        block_scales: Values,
        strides: dict[PreparedKernel, tuple[Values, Values]],
    ) -> Work:
        """Returns what launches of a number of keys have in common, and notes strides of a kernel that comes anew."""
        (qo_len, kv_len), (q, k, v, out, *_) = lengths, tensors
        kernel, grid, numbers, num_splits = self.launch(qo_len, kv_len)
        combine = kernel.combine
        if kernel not in strides:
            out_strides: Values = () if combine is None else combine.output.strides(out)
            strides[kernel] = kernel.strides(q, k, v, out, block_scales), out_strides
        of_kernel, out_strides = strides[kernel]
        combined = None
        if combine is not None:
            merge_grid, *rows = rows_of_warps(qo_len * self.num_qo_heads, self.sms)
            settled = merge_grid, out_strides, (*rows, qo_len, num_splits)
            combined = combine.launches.of(roles), settled, num_splits
        addresses = kernel.addresses(q, k, v, out)
        return kv_len, kernel.attention.of(roles), addresses, (grid, of_kernel, numbers), combined

    def _launch(self, qo_len: int, kv_len: int) -> SingleLaunch:
        """Returns the launch of a request of these lengths; `launch` memoises it."""
        schedule = self.scheduler(qo_len, kv_len)
        kernel = self.kernel(schedule.tile, schedule.heads, schedule.num_splits > 1)
        return kernel, schedule.grid, schedule.numbers, schedule.num_splits
