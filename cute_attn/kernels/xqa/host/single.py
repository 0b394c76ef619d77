"""Runs of single requests on the decode kernel: their keys are one page."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from cute_attn.errors import ArgumentError
from cute_attn.kernels.host.batch import Tensors
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.params import ADDRESS_FIELDS
from cute_attn.kernels.host.single import MAX_LENGTHS, NO_TENSORS, SingleRepeat
from cute_attn.kernels.xqa.host.grid import launch_config
from cute_attn.kernels.xqa.host.prepared import CHUNK, ONE_PAGE, SCRATCH_FIELDS, PreparedKernel
from cute_attn.kernels.xqa.host.variant import segments
from cute_attn.kernels.xqa.tiles import Segments
from cute_attn.problem import Problem, Request, Settings
from cute_attn.runtime import capture, counters
from cute_attn.runtime.launch import CPU, Lengths, current_stream

REPEATED_FIELDS = (*ADDRESS_FIELDS, *SCRATCH_FIELDS)
LENGTH_FIELDS = ("capacity",)


@functools.cache
def one_page(device_index: int) -> torch.Tensor:
    """Returns a page table of one row, which holds page 0, and a length that the kernel limits to that of the call.
    They stay allocated, because captured graphs read them after their `SingleRun` is dropped from its cache.
    """
    table = torch.tensor([[0], [ONE_PAGE]], dtype=torch.int32, device="cpu")
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

    def repeat(self, problem: Problem) -> SingleRepeat | None:
        """Returns a function that repeats the run of `problem` with another number of keys, 2 or more, and other
        addresses; None without query tokens.
        """
        if problem.qo_len == 0:
            return None
        qo_len, settings, index, counters = problem.qo_len, self.settings, self.gpu.device_index, self.counters.address
        others, longest = problem._replace(**NO_TENSORS), longest_kv(self.kernel(problem), problem.k, problem.v)
        bound: dict[PreparedKernel, tuple[Callable[..., None], int]] = {}  # and the bytes of partial results

        def of_length(kv_len: int, tensors: Tensors) -> tuple[Lengths, Callable[..., None], int]:
            kernel = self.prepared(qo_len, segments(1, settings, qo_len, kv_len))
            if kv_len > longest:
                check_span(kernel, *tensors[1:3])
            if kernel not in bound:
                now = others._replace(kv_len=kv_len, **dict(zip(NO_TENSORS, tensors, strict=True)))
                bound[kernel] = self._bound(kernel, now), kernel.config.partial_bytes
            return (kernel.config.grid, (kv_len,)), *bound[kernel]

        latest = of_length(problem.kv_len, (problem.q, problem.k, problem.v, problem.out, problem.lse))

        def run(kv_len: int, q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            lengths, fire, num_bytes = latest
            if kv_len != lengths[1][0]:
                lengths, fire, num_bytes = latest = of_length(kv_len, tensors)
            stream = current_stream(index)
            partials = tensors[0].new_empty(num_bytes, dtype=torch.uint8)
            fire(lengths, stream, q, k, v, out, lse, counters(stream), partials.data_ptr())

        return run

    def _bound(self, kernel: PreparedKernel, problem: Problem) -> Callable[..., None]:
        """Returns a function that launches `kernel` for problems that differ from this one in addresses and in the
        number of keys: see `Launch.bound_to_lengths`.
        """
        numbers = *self.request, 0, 0, 0  # the length and SCRATCH_FIELDS: of each launch
        first = kernel.values(problem, kernel.output.of(problem), numbers, 0)
        return kernel.attention.bound_to_lengths(first, REPEATED_FIELDS, LENGTH_FIELDS)

    def kernel(self, problem: Problem) -> PreparedKernel:
        """Returns the kernel of a request."""
        return self.prepared(problem.qo_len, segments(1, self.settings, problem.qo_len, problem.kv_len))

    def _prepared(self, qo_len: int, segments: Segments) -> PreparedKernel:
        """Returns the kernel for requests of `qo_len` query tokens; `prepared` memoises it."""
        config = launch_config(self.settings, qo_len, segments, self.gpu.arch, self.gpu.sms)
        return PreparedKernel(self.settings, config, self.gpu)


def longest_kv(kernel: PreparedKernel, *tensors: torch.Tensor) -> int:
    """Returns the most keys in which the kernel, which counts chunks in 32 bits, can address a head of k and v with the
    strides of these.
    """
    steps = [x.stride(kernel.token) * kernel.kv_itemsize for x in tensors]
    return ((CHUNK << 32) - 1) // max(1, *steps)


def check_span(kernel: PreparedKernel, *tensors: torch.Tensor) -> None:
    """Raises an ArgumentError for k or v of more keys than `longest_kv`."""
    if tensors[0].shape[kernel.token] > longest_kv(kernel, *tensors):
        shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
        raise ArgumentError(f"k and v must span less than {CHUNK << 32} bytes each, got {shapes}")
