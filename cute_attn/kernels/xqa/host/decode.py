"""Runs of decode calls whose lengths and page tables are on the device."""

from __future__ import annotations

import functools

import torch

from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.single import MAX_LENGTHS
from cute_attn.kernels.xqa.host.grid import launch_config
from cute_attn.kernels.xqa.host.prepared import PreparedKernel
from cute_attn.kernels.xqa.host.variant import segments
from cute_attn.kernels.xqa.tiles import Segments
from cute_attn.problem import DecodeProblem, Request, Settings
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
        self.kernel = functools.lru_cache(MAX_LENGTHS)(self._kernel)

    def __call__(self, problem: Request) -> None:
        """Launches the kernel."""
        assert isinstance(problem, DecodeProblem)  # `SingleRun` runs single requests
        if problem.q.shape[0] == 0:
            return
        tables, scratch, settings = problem.block_tables, problem.scratch, self.settings
        batch_size = tables.shape[0]
        kernel = self.kernel(problem.qo_len, segments(batch_size, settings, problem.qo_len, problem.max_kv_len))
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

    def _kernel(self, qo_len: int, segments: Segments) -> PreparedKernel:
        """Returns the kernel for at most `qo_len` query tokens per request; `kernel` memoises it."""
        config = launch_config(self.settings, qo_len, segments, self.gpu.arch, self.gpu.sms)
        return PreparedKernel(self.settings, config, self.gpu)
