"""Runs of single requests on the decode kernel: their keys are one page."""

from __future__ import annotations

import functools

import torch

from cute_attn.errors import ArgumentError
from cute_attn.kernels.host.batch import Repeat, Tensors
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.params import ADDRESS_FIELDS
from cute_attn.kernels.host.single import MAX_LENGTHS
from cute_attn.kernels.xqa.host.grid import launch_config
from cute_attn.kernels.xqa.host.prepared import CHUNK, ONE_PAGE, SCRATCH_FIELDS, PreparedKernel
from cute_attn.kernels.xqa.host.variant import segments
from cute_attn.kernels.xqa.tiles import Segments
from cute_attn.problem import Problem, Request, Settings
from cute_attn.runtime import capture, counters
from cute_attn.runtime.launch import CPU, current_stream


@functools.cache
def one_page(device_index: int) -> torch.Tensor:
    """Returns a page table of one row, which holds page 0, and a length that the kernel limits to that of the call.
    They stay allocated, because captured graphs read them after their `SingleRun` is dropped from its cache.
    """
    table = torch.tensor([[0], [ONE_PAGE]], dtype=torch.int32)
    if device_index == CPU:
        return table
    return capture.outside(device_index, functools.partial(table.to, f"cuda:{device_index}"))


class SingleRun:
    """Runs single requests of the same settings."""

    def __init__(self, settings: Settings, gpu: Gpu) -> None:
        self.settings, self.gpu = settings, gpu
        self.prepared = functools.lru_cache(MAX_LENGTHS)(self._prepared)
        self.counters = counters.of_device(gpu.device_index, counters.SEMAPHORES)
        self.records = one_page(gpu.device_index)
        table, length = self.records[:1], self.records[1]
        self.request = table.data_ptr(), 1, 0, length.data_ptr(), 0, 0, 1  # values of REQUEST_FIELDS but for `capacity`

    def __call__(self, problem: Request) -> None:
        """Launches the kernel. Partial results are in memory of torch's allocator, counters in those of the stream."""
        assert isinstance(problem, Problem)  # `DecodeRun` runs calls with lengths on the device
        if problem.qo_len == 0:
            return
        kernel, stream = self.kernel(problem), current_stream(self.gpu.device_index)
        check_span(kernel, problem.k, problem.v)
        partials = problem.q.new_empty(kernel.config.partial_bytes, dtype=torch.uint8)
        numbers = *self.request, problem.kv_len, self.counters.address(stream), partials.data_ptr()
        values = kernel.values(problem, kernel.output.of(problem), numbers, stream)
        kernel.attention.fire(values, kernel.config.grid, stream)

    def repeat(self, problem: Problem) -> Repeat | None:
        """Returns a function that repeats the run of `problem` with other addresses; None without query tokens."""
        if problem.qo_len == 0:
            return None
        kernel, index, counters = self.kernel(problem), self.gpu.device_index, self.counters.address
        numbers = *self.request, problem.kv_len, 0, 0  # SCRATCH_FIELDS: of each launch
        first = kernel.values(problem, kernel.output.of(problem), numbers, 0)
        fire = kernel.attention.bound(first, kernel.config.grid, (*ADDRESS_FIELDS, *SCRATCH_FIELDS))
        num_bytes = kernel.config.partial_bytes

        def run(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            stream = current_stream(index)
            partials = tensors[0].new_empty(num_bytes, dtype=torch.uint8)
            fire(stream, q, k, v, out, lse, counters(stream), partials.data_ptr())

        return run

    def kernel(self, problem: Problem) -> PreparedKernel:
        """Returns the kernel of a request."""
        return self.prepared(problem.qo_len, segments(1, self.settings, problem.qo_len, problem.kv_len))

    def _prepared(self, qo_len: int, segments: Segments) -> PreparedKernel:
        """Returns the kernel for requests of `qo_len` query tokens; `prepared` memoises it."""
        config = launch_config(self.settings, qo_len, segments, self.gpu.arch, self.gpu.sms)
        return PreparedKernel(self.settings, config, self.gpu)


def check_span(kernel: PreparedKernel, *tensors: torch.Tensor) -> None:
    """Raises an ArgumentError for k or v in which the kernel, which counts chunks in 32 bits, cannot address a head."""
    token, size = kernel.token, kernel.kv_itemsize
    if any(x.shape[token] * x.stride(token) * size >= CHUNK << 32 for x in tensors):
        shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
        raise ArgumentError(f"k and v must span less than {CHUNK << 32} bytes each, got {shapes}")
