"""Runs of decode calls whose lengths and page tables are on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.params import ADDRESS_FIELDS
from cute_attn.kernels.host.single import MAX_LENGTHS
from cute_attn.kernels.xqa.host.grid import launch_config
from cute_attn.kernels.xqa.host.prepared import SCRATCH_FIELDS, PreparedKernel
from cute_attn.kernels.xqa.host.variant import segments
from cute_attn.kernels.xqa.tiles import Segments
from cute_attn.problem import DecodeProblem, Request, Settings
from cute_attn.runtime import counters
from cute_attn.runtime.launch import current_stream

REPEATED_FIELDS = (*ADDRESS_FIELDS, "sinks", "table", "seq_lens", *SCRATCH_FIELDS)


class DecodeRun:
    """Runs decode calls of the same settings in the scratch memory of their callers. Nothing is copied to the device:
    the first call may be one that is captured.

    Where the caller's scratch is too small, counters are those of the stream, or of the captured launch, and partial
    results in memory of torch's allocator, which a graph keeps. The first call that needs such counters allocates them,
    and must not be one that is captured.
    """

    def __init__(self, settings: Settings, gpu: Gpu) -> None:
        self.settings, self.gpu = settings, gpu
        self.kernel = functools.lru_cache(MAX_LENGTHS)(self._kernel)

    def __call__(self, problem: Request) -> None:
        """Launches the kernel."""
        assert isinstance(problem, DecodeProblem)  # `SingleRun` runs single requests
        if problem.q.shape[0] == 0:
            return
        tables, scratch = problem.block_tables, problem.scratch
        batch_size, kernel = tables.shape[0], self.kernel_of(problem)
        config, stream = kernel.config, current_stream(self.gpu.device_index)
        counted_at, partials_at = scratch.counters, scratch.partials
        if scratch.counter_bytes < config.counter_bytes:
            counted_at = counters.of_device(self.gpu.device_index, counters.SEMAPHORES).address(stream)
        if scratch.partial_bytes < config.partial_bytes:
            partials = problem.q.new_empty(config.partial_bytes, dtype=torch.uint8)  # until the launch is in its stream
            partials_at = partials.data_ptr()
        numbers = (
            tables.data_ptr(),
            tables.stride(0),
            0,
            problem.seq_lens.data_ptr(),
            0 if problem.qo_indptr is None else problem.qo_indptr.data_ptr(),
            0 if problem.draft_mask is None else problem.draft_mask.data_ptr(),
            batch_size,
            problem.max_kv_len,
            counted_at,
            partials_at,
        )
        values = kernel.values(problem, kernel.output.of(problem), numbers, stream)
        kernel.attention.fire(values, config.grid_of(batch_size), stream)

    def repeat_decode(self, problem: DecodeProblem) -> Callable[..., None] | None:
        """Returns `dispatch.backends.DecodeRepeat` of `problem`, whose counters and partial results have one buffer;
        None without query tokens.
        """
        if problem.q.shape[0] == 0:
            return None
        tables, scratch, index = problem.block_tables, problem.scratch, self.gpu.device_index
        kernel = self.kernel_of(problem)
        config, batch_size = kernel.config, tables.shape[0]
        own_partials = scratch.partial_bytes < config.partial_bytes
        of_stream: Callable[[int], int] | None = None
        if scratch.counter_bytes < config.counter_bytes:
            of_stream = counters.of_device(index, counters.SEMAPHORES).address
        partials_offset, num_bytes = scratch.partials - scratch.counters, config.partial_bytes
        numbers = 0, tables.stride(0), 0, 0, 0, 0, batch_size, problem.max_kv_len, 0, 0
        first = kernel.values(problem, kernel.output.of(problem), numbers, 0)
        fire = kernel.attention.bound(first, config.grid_of(batch_size), REPEATED_FIELDS)

        def run(query: torch.Tensor, memory: int, *addresses: int) -> None:
            stream, partials_at = current_stream(index), memory + partials_offset
            if own_partials:
                partials = query.new_empty(num_bytes, dtype=torch.uint8)
                partials_at = partials.data_ptr()
            fire(stream, *addresses, memory if of_stream is None else of_stream(stream), partials_at)

        return run

    def kernel_of(self, problem: DecodeProblem) -> PreparedKernel:
        """Returns the kernel of a call."""
        of = segments(problem.block_tables.shape[0], self.settings, problem.qo_len, problem.max_kv_len)
        return self.kernel(problem.qo_len, of)

    def _kernel(self, qo_len: int, segments: Segments) -> PreparedKernel:
        """Returns the kernel for at most `qo_len` query tokens per request; `kernel` memoises it."""
        config = launch_config(self.settings, qo_len, segments, self.gpu.arch, self.gpu.sms)
        return PreparedKernel(self.settings, config, self.gpu)
