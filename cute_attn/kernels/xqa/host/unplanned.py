"""Runs of decode calls without a plan, whose lengths and page tables are on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import (
    Fire,
    block_scale_strides,
    fire_first,
    launch_nothing,
    optional_tensors,
)
from cute_attn.kernels.host.prepared import prepared
from cute_attn.kernels.xqa.host.prepared import XqaKernel
from cute_attn.kernels.xqa.host.variant import launch_config, rule_of, shape_of_call
from cute_attn.problem import UNLIMITED, DecodeProblem, Request, Settings
from cute_attn.runtime import counters
from cute_attn.runtime.launch import current_stream


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
        assert isinstance(problem, DecodeProblem)
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
        config = prepared(launch_config, settings, qo_len, rule, gpu.arch, gpu.sms, UNLIMITED, rows == 1)
        kernel, longest, step = prepared(XqaKernel, settings, config, gpu), problem.max_kv_len, tables.stride(0)
        strides = kernel.strides(problem.q, problem.k, problem.v, problem.out, block_scale_strides(problem))
        numbers = config.request((step, 0, rows), (rows - 1) * step + width)
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
