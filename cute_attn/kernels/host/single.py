"""Runs of single requests: their schedules are memoised by lengths, and a call fires one launch or two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from cute_attn.kernels.host.operands import block_scale_strides, optional_tensors
from cute_attn.kernels.host.prepared import Addresses, Grid, PreparedKernel
from cute_attn.problem import Problem, Request, Settings
from cute_attn.runtime.launch import current_stream
from cute_attn.runtime.param_block import Values

MAX_LENGTHS = 512  # schedules kept: lengths vary without end, and a schedule is cheap to compute again
MAX_TILES = 64  # of one request's settings

Tensors = tuple[Any, ...]  # q, k, v, out, lse, and a tuple of `operands.Optional`
SingleFire = Callable[[int, int, int, int, int, int, Tensors], None]
# ^ from the number of keys, addresses of q, k, v, out and lse (0 for none), and the tensors

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

SingleLaunch = tuple[PreparedKernel, Grid, Values, int]  # a schedule's kernels, grid, numbers and num_splits


class Work(NamedTuple):
    """What a number of keys decides of the launches of a request."""

    kv_len: int
    kernel: PreparedKernel
    grid: Grid
    numbers: Values
    num_splits: int
    strides: Values
    addresses: Addresses
    out_strides: Values  # of the combine launch
    merge_grid: Grid


class SingleRun(Generic[T]):
    """Runs requests of the same settings. Kernels are loaded at first use; later calls only compute parameters."""

    def __init__(
        self,
        settings: Settings,
        device_index: int,
        scheduler: Scheduler[T],
        kernel: Callable[[T, int, bool], PreparedKernel],
    ) -> None:
        """`kernel` loads a kernel for a schedule's tile and heads, and for split keys or not."""
        self.device_index, self.scheduler = device_index, scheduler
        self.num_qo_heads, self.head_dim_vo = settings.features.num_qo_heads, settings.features.head_dim_vo
        self.kernel = functools.lru_cache(MAX_TILES)(kernel)
        self.launch = functools.lru_cache(MAX_LENGTHS)(self._launch)  # the layers of a model repeat lengths

    def __call__(self, problem: Request) -> None:
        """Launches the attention kernel, and the combine kernel where keys are split."""
        assert isinstance(problem, Problem)  # selection refuses lengths on the device
        fire_single(self.bind(problem), problem)

    def bind(self, problem: Problem) -> SingleFire:
        """Returns a function that runs requests which differ from `problem` in the number of keys and in addresses."""
        qo_len, index, block_scales = problem.qo_len, self.device_index, block_scale_strides(problem)
        if qo_len == 0:
            return launch_nothing
        rows = qo_len * self.num_qo_heads
        latest: Work | None = None

        def fire(kv_len: int, q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            work = latest  # once: threads share this
            if work is None or work.kv_len != kv_len:
                work = latest = self._work(qo_len, kv_len, tensors, block_scales)
            kernel, stream = work.kernel, current_stream(index)
            o, lse_at, combine = out, lse, kernel.combine
            if combine is not None:
                size = rows * work.num_splits  # of partials, which the caching allocator keeps with a captured graph
                partials = tensors[0].new_empty(size * (self.head_dim_vo + 1), dtype=torch.float32)
                o = partials.data_ptr()
                lse_at = o + 4 * size * self.head_dim_vo
            values, optional = work.addresses(q, k, v, o, lse_at, stream), tensors[5]
            kernel.attention.fire(work.grid, stream, work.strides, values, kernel.extras(optional), work.numbers)
            if combine is not None:
                numbers = o, lse_at, qo_len, work.num_splits
                merged = work.out_strides, (out, lse), combine.extras(optional), numbers
                combine.launch.fire(work.merge_grid, stream, *merged)

        return fire

    def _work(self, qo_len: int, kv_len: int, tensors: Tensors, block_scales: Values) -> Work:
        """Returns what a number of keys decides for requests with the strides of `tensors`."""
        kernel, grid, numbers, num_splits = self.launch(qo_len, kv_len)
        (q, k, v, out, *_), combine = tensors, kernel.combine
        strides, addresses = kernel.strides(q, k, v, out, block_scales), kernel.addresses(q, k, v, out)
        out_strides = () if combine is None else combine.output.strides(out)
        merge_grid = qo_len * self.num_qo_heads, 1, 1
        return Work(kv_len, kernel, grid, numbers, num_splits, strides, addresses, out_strides, merge_grid)

    def _launch(self, qo_len: int, kv_len: int) -> SingleLaunch:
        """Returns the launch of a request of these lengths; `launch` memoises it."""
        schedule = self.scheduler(qo_len, kv_len)
        kernel = self.kernel(schedule.tile, schedule.heads, schedule.num_splits > 1)
        return kernel, schedule.grid, schedule.numbers, schedule.num_splits


def fire_single(fire: SingleFire, problem: Problem) -> None:
    """Runs `problem` with a function that `bind` returned."""
    tensors = problem.q, problem.k, problem.v, problem.out, problem.lse
    q, k, v, out, lse = (0 if x is None else x.data_ptr() for x in tensors)
    fire(problem.kv_len, q, k, v, out, lse, (*tensors, optional_tensors(problem)))


def launch_nothing(*_: object) -> None:
    """Runs a problem without query tokens."""
