"""Runs of the decode kernel without a plan: of single requests, whose keys are one page, and of calls whose lengths and
page tables are on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError
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
from cute_attn.kernels.host.prepared import prepared
from cute_attn.kernels.host.single import Tensors
from cute_attn.kernels.rules import Rule
from cute_attn.kernels.xqa.host.prepared import CHUNK, ONE_PAGE, XqaKernel
from cute_attn.kernels.xqa.host.variant import launch_config, rule_of, shape_of, shape_of_call
from cute_attn.kernels.xqa.tiles import Rings
from cute_attn.problem import UNLIMITED, DecodeProblem, Problem, Request, Settings
from cute_attn.runtime import capture, counters
from cute_attn.runtime.arch import MAX_DEVICES
from cute_attn.runtime.launch import CPU, Bound, Settled, Values, current_stream


def _kernel(settings: Settings, qo_len: int, rule: Rule[Rings], gpu: Gpu, alone: bool = True) -> XqaKernel:
    """Returns the kernel of one request, or several, with `qo_len` query tokens."""
    config = prepared(launch_config, settings, qo_len, rule, gpu.arch, gpu.sms, UNLIMITED, alone)
    return prepared(XqaKernel, settings, config, gpu)


@functools.lru_cache(MAX_DEVICES)
def one_page(device_index: int) -> torch.Tensor:
    """Returns a page table of one row, which holds page 0, and a length that the kernel limits to that of the call.
    They stay allocated, because captured graphs read them after their `SingleRun` is dropped from its cache.
    """
    table = torch.tensor([[0], [ONE_PAGE]], dtype=torch.int32, device="cpu")
    if device_index == CPU:
        return table
    return capture.outside(device_index, functools.partial(table.to, f"cuda:{device_index}"))


class SingleLaunches(NamedTuple):
    """Launches of requests with the same strides, as long as their keys are cut in the same way."""

    launches: tuple[Bound, Pick]
    settled: Settled
    partial_bytes: int
    longest: int  # most keys; see `longest_kv`


class SingleRun:
    """Runs single requests of the same settings."""

    def __init__(self, settings: Settings, gpu: Gpu) -> None:
        self.settings, self.gpu = settings, gpu
        self.counters = counters.of_device(gpu.device_index, counters.SEMAPHORES)
        self.records = one_page(gpu.device_index)
        table, length = self.records[:1], self.records[1]
        self.tables = table.data_ptr(), length.data_ptr(), 0, 0  # values of TABLE_FIELDS

    def __call__(self, problem: Request) -> Fire:
        """Launches the kernel."""
        assert isinstance(problem, Problem)  # `DecodeRun` runs calls with lengths on the device
        return fire_first(self.bind(problem), problem, (problem.kv_len,))

    def bind(self, problem: Problem) -> Fire:
        """Returns a function that runs requests which differ from `problem` in the number of keys and in addresses.
        Partial results are in memory of torch's allocator, counters in those of the stream.
        """
        qo_len, gpu, index, tables = problem.qo_len, self.gpu, self.gpu.device_index, self.tables
        counters, uint8 = self.counters.address, torch.uint8
        if qo_len == 0:
            return launch_nothing
        settings, block_scales = self.settings, block_scale_strides(problem)
        roles, _ = optional_tensors(problem)
        bound: dict[Rule[Rings], SingleLaunches] = {}
        latest: tuple[int, SingleLaunches] | None = None

        def fire(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            kv_len, work = tensors[6], latest  # once: threads share this
            if work is None or work[0] != kv_len:
                rule = rule_of(settings.features, gpu.arch, shape_of(1, settings, qo_len, kv_len))
                if rule not in bound:
                    kernel = _kernel(settings, qo_len, rule, gpu)
                    bound[rule] = _bound(kernel, tensors, roles, block_scales, tables)
                if kv_len > bound[rule].longest:
                    k_shape, v_shape = (tuple(x.shape) for x in tensors[1:3])
                    raise ArgumentError(
                        f"k and v must span less than {CHUNK << 32} bytes each, got {k_shape} and {v_shape}"
                    )
                work = latest = kv_len, bound[rule]
            (attention, pick), settled, num_bytes, _ = work[1]
            stream = current_stream(index)
            partials = tensors[0].new_empty(num_bytes, dtype=uint8)
            moving = q, k, v, out, lse, counters(stream), partials.data_ptr(), kv_len
            attention.fire(stream, moving + pick(tensors[5]) if tensors[5] else moving, settled)

        return fire


def _bound(kernel: XqaKernel, tensors: Tensors, roles: Roles, block_scales: Values, tables: Values) -> SingleLaunches:
    """Returns the launches of requests with the strides of `tensors` and these optional tensors."""
    q, k, v, out, *_ = tensors
    strides, numbers = kernel.strides(q, k, v, out, block_scales), kernel.request((1, 0, 1), 1, tables)
    settled, config = (kernel.config.grid, strides, numbers), kernel.config
    return SingleLaunches(kernel.attention.of(roles), settled, config.partial_bytes, longest_kv(kernel, k, v))


def longest_kv(kernel: XqaKernel, *tensors: torch.Tensor) -> int:
    """Returns the most keys in which the kernel, which counts chunks in 32 bits, can address a head of k and v with the
    strides of these.
    """
    of = kernel.plain_strides
    steps = [x.stride(of.token) * of.kv_itemsize for x in tensors]
    return ((CHUNK << 32) - 1) // max(1, *steps)


class DecodeRun:
    """Runs decode calls of the same settings in the scratch memory of their callers. Nothing is copied to the device:
    the first call may be one that is captured.

    Where the caller's scratch is too small, counters are those of the stream, or of the captured launch, and partial
    results in memory of torch's allocator, which a graph keeps. The first call that needs such counters allocates them,
    and must not be one that is captured.
    """

    def __init__(self, settings: Settings, gpu: Gpu) -> None:
        self.settings, self.gpu = settings, gpu

    def __call__(self, problem: Request) -> Fire:
        """Launches the kernel."""
        assert isinstance(problem, DecodeProblem)  # `SingleRun` runs single requests
        lengths = problem.block_tables, problem.seq_lens, problem.qo_indptr, problem.draft_mask
        read = [0 if x is None else x.data_ptr() for x in lengths]
        return fire_first(self.bind(problem), problem, (problem.scratch.counters, problem.scratch.partials, *read))

    def bind(self, problem: DecodeProblem) -> Fire:
        """Returns a function that runs calls which differ from `problem` in addresses."""
        if problem.q.shape[0] == 0:
            return launch_nothing
        settings, gpu, qo_len = self.settings, self.gpu, problem.qo_len
        tables, scratch, index = problem.block_tables, problem.scratch, gpu.device_index
        rows, width = tables.shape
        rule = rule_of(settings.features, gpu.arch, shape_of_call(problem))
        kernel = _kernel(settings, qo_len, rule, gpu, rows == 1)
        config, longest, step = kernel.config, problem.max_kv_len, tables.stride(0)
        strides = kernel.strides(problem.q, problem.k, problem.v, problem.out, block_scale_strides(problem))
        numbers = kernel.request((step, 0, rows), (rows - 1) * step + width)
        settled = config.grid_of(rows), strides, numbers
        attention, pick = kernel.attention.of(optional_tensors(problem)[0])
        own_partials = scratch.partial_bytes < config.partial_bytes
        of_stream: Callable[[int], int] | None = None
        if scratch.counter_bytes < config.counter_bytes:
            of_stream = counters.of_device(index, counters.SEMAPHORES).address

        def fire(q: int, k: int, v: int, out: int, lse: int, tensors: tuple[Any, ...]) -> None:
            # query, k, v, out, lse, `operands.Optional`; addresses of counters, partial results, and so on
            query, _, _, _, _, optional, counted_at, partials_at, table, seq_lens, q_indptr, mask = tensors
            stream = current_stream(index)
            if of_stream is not None:
                counted_at = of_stream(stream)
            if own_partials:
                partials = query.new_empty(config.partial_bytes, dtype=torch.uint8)  # until the launch is in its stream
                partials_at = partials.data_ptr()
            moving = q, k, v, out, lse, counted_at, partials_at, longest, table, seq_lens, q_indptr, mask
            attention.fire(stream, moving + pick(optional) if optional else moving, settled)

        return fire
