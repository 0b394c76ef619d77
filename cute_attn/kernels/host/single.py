"""Runs of single requests: their schedules are memoised by lengths, and a call fires one launch or two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from cute_attn.kernels.host.batch import Tensors
from cute_attn.kernels.host.combine import LENGTH_FIELDS
from cute_attn.kernels.host.params import PARTIAL_FIELDS, Values
from cute_attn.kernels.host.prepared import Grid, PreparedKernel
from cute_attn.problem import Problem, Request, Settings
from cute_attn.runtime.launch import current_stream

MAX_LENGTHS = 512  # schedules kept: lengths vary without end, and a schedule is cheap to compute again
MAX_TILES = 64  # of one request's settings

NO_TENSORS: Any = dict.fromkeys(("q", "k", "v", "out", "lse"))  # of a Problem that keeps none alive

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

SingleRepeat = Callable[[int, int, int, int, int, int, Tensors], None]
# ^ a run with another number of keys, and other addresses of q, k, v, out and lse
SameLengthRepeat = Callable[[int, int, int, int, int, Tensors], None]  # with other addresses alone

SingleLaunch = tuple[PreparedKernel, Grid, Values, int]  # a schedule's kernels, grid, numbers and num_splits
Bound = tuple[Callable[..., None], Callable[..., None] | None]  # launches of attention, and of combine if it merges


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
        qo_len = problem.qo_len
        if qo_len == 0:
            return
        kernel, grid, numbers, num_splits = self.launch(qo_len, problem.kv_len)
        stream, combine = current_stream(self.device_index), kernel.combine
        target = kernel.output.of(problem)
        if combine is None:
            kernel.attention.fire(kernel.values(problem, target, numbers, stream), grid, stream)
            return
        rows = qo_len * self.num_qo_heads
        workspace = self._workspace(problem.q, rows * num_splits)
        partial = kernel.output.partials(workspace, rows * num_splits)
        kernel.attention.fire(kernel.values(problem, partial, numbers, stream), grid, stream)
        combine.launch.fire(combine.values(target, partial[:2], (qo_len, num_splits)), (rows, 1, 1), stream)

    def repeat(self, problem: Problem) -> SingleRepeat | None:
        """Returns a function that repeats the run of `problem` with another number of keys, 2 or more, and other
        addresses; None without query tokens.
        """
        if problem.qo_len == 0:
            return None
        others = problem._replace(**NO_TENSORS)
        bound: dict[PreparedKernel, Bound] = {}

        def of_length(kv_len: int, tensors: Tensors) -> SameLengthRepeat:
            now = others._replace(kv_len=kv_len, **dict(zip(NO_TENSORS, tensors, strict=True)))
            kernel, *_ = launch = self.launch(now.qo_len, kv_len)
            if kernel not in bound:
                bound[kernel] = self._bind(now, launch)
            return self._repeat(now, launch, *bound[kernel])

        latest = problem.kv_len, of_length(problem.kv_len, (problem.q, problem.k, problem.v, problem.out, problem.lse))

        def run(kv_len: int, q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            length, repeat = latest
            if kv_len != length:
                _, repeat = latest = kv_len, of_length(kv_len, tensors)
            repeat(q, k, v, out, lse, tensors)

        return run

    def _bind(self, problem: Problem, launch: SingleLaunch) -> Bound:
        """Returns functions that launch the kernels of `launch` for problems that differ from this one in addresses and
        in the number of keys.
        """
        kernel, _, numbers, num_splits = launch
        stream, combine, target = current_stream(self.device_index), kernel.combine, kernel.output.of(problem)
        fields = kernel.replay_fields, kernel.number_fields
        if combine is None:
            return kernel.attention.bound_to_lengths(kernel.values(problem, target, numbers, stream), *fields), None
        rows = problem.qo_len * self.num_qo_heads * num_splits
        partial = kernel.output.partials(self._workspace(problem.q, rows), rows)
        merged = combine.values(target, partial[:2], (problem.qo_len, num_splits))
        return (
            kernel.attention.bound_to_lengths(kernel.values(problem, partial, numbers, stream), *fields),
            combine.launch.bound_to_lengths(merged, ("o", "lse", *PARTIAL_FIELDS), LENGTH_FIELDS),
        )

    def _repeat(
        self, problem: Problem, launch: SingleLaunch, attend: Callable[..., None], merge: Callable[..., None] | None
    ) -> SameLengthRepeat:
        """Returns a function that repeats the run of `problem` with other addresses, by the functions of `_bind`."""
        kernel, grid, numbers, num_splits = launch
        lengths, values, index, stream_of = (grid, numbers), kernel.replay(problem), self.device_index, current_stream
        if merge is None:

            def run(q: int, k: int, v: int, out: int, lse: int, _: Tensors) -> None:
                stream = stream_of(index)
                attend(lengths, stream, *values(q, k, v, out, lse, stream))

            return run
        rows, workspace = problem.qo_len * self.num_qo_heads, self._workspace
        partial_rows, lse_offset = rows * num_splits, 4 * rows * num_splits * self.head_dim_vo
        of_merge = (rows, 1, 1), (problem.qo_len, num_splits)

        def run_and_combine(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            stream, memory = stream_of(index), workspace(tensors[0], partial_rows)
            o = memory.data_ptr()
            attend(lengths, stream, *values(q, k, v, o, o + lse_offset, stream))
            merge(of_merge, stream, out, lse, o, o + lse_offset)

        return run_and_combine

    def _launch(self, qo_len: int, kv_len: int) -> SingleLaunch:
        """Returns the launch of a request of these lengths; `launch` memoises it."""
        schedule = self.scheduler(qo_len, kv_len)
        kernel = self.kernel(schedule.tile, schedule.heads, schedule.num_splits > 1)
        return kernel, schedule.grid, schedule.numbers, schedule.num_splits

    def _workspace(self, q: torch.Tensor, rows: int) -> torch.Tensor:
        """Allocates the partials of a split launch. The caching allocator keeps them with a captured graph."""
        return q.new_empty(rows * (self.head_dim_vo + 1), dtype=torch.float32)
