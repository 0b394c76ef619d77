"""Runs of single requests on the decode kernel: their keys are one page."""

from __future__ import annotations

import functools

import torch

from cute_attn.errors import ArgumentError
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import block_scale_strides
from cute_attn.kernels.host.prepared import Addresses
from cute_attn.kernels.host.single import MAX_LENGTHS, SingleFire, Tensors, fire_single, launch_nothing
from cute_attn.kernels.xqa.host.grid import launch_config
from cute_attn.kernels.xqa.host.prepared import CHUNK, ONE_PAGE, XqaKernel
from cute_attn.kernels.xqa.host.variant import segments
from cute_attn.kernels.xqa.tiles import Segments
from cute_attn.problem import Problem, Request, Settings
from cute_attn.runtime import capture, counters
from cute_attn.runtime.launch import CPU, current_stream
from cute_attn.runtime.param_block import Values


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
        """Launches the kernel."""
        assert isinstance(problem, Problem)  # `DecodeRun` runs calls with lengths on the device
        fire_single(self.bind(problem), problem)

    def bind(self, problem: Problem) -> SingleFire:
        """Returns a function that runs requests which differ from `problem` in the number of keys and in addresses.
        Partial results are in memory of torch's allocator, counters in those of the stream.
        """
        qo_len, index, request, counters = problem.qo_len, self.gpu.device_index, self.request, self.counters.address
        if qo_len == 0:
            return launch_nothing
        block_scales = block_scale_strides(problem)
        latest: tuple[int, XqaKernel, Values, Addresses] | None = None

        def fire(kv_len: int, q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            work = latest  # once: threads share this
            if work is None or work[0] != kv_len:
                work = latest = kv_len, *self._work(qo_len, kv_len, tensors, block_scales)
            _, kernel, strides, addresses = work
            stream = current_stream(index)
            partials = tensors[0].new_empty(kernel.config.partial_bytes, dtype=torch.uint8)
            numbers = kernel.numbers((*request, kv_len), (counters(stream), partials.data_ptr()), 1)
            values = addresses(q, k, v, out, lse, stream)
            kernel.attention.fire(kernel.config.grid, stream, strides, values, kernel.extras(tensors[5]), numbers)

        return fire

    def _work(
        self, qo_len: int, kv_len: int, tensors: Tensors, block_scales: Values
    ) -> tuple[XqaKernel, Values, Addresses]:
        """Returns the kernel of a number of keys, with strides and addresses of requests like `tensors`."""
        kernel, (q, k, v, out, *_) = self.prepared(qo_len, segments(1, self.settings, qo_len, kv_len)), tensors
        check_span(kernel, k, v)
        return kernel, kernel.strides(q, k, v, out, block_scales), kernel.addresses(q, k, v, out)

    def _prepared(self, qo_len: int, segments: Segments) -> XqaKernel:
        """Returns the kernel for requests of `qo_len` query tokens; `prepared` memoises it."""
        config = launch_config(self.settings, qo_len, segments, self.gpu.arch, self.gpu.sms)
        return XqaKernel(self.settings, config, self.gpu)


def check_span(kernel: XqaKernel, *tensors: torch.Tensor) -> None:
    """Raises an ArgumentError for k or v of more keys than the kernel, which counts chunks in 32 bits, can address in a
    head of these strides.
    """
    steps = [x.stride(kernel.token) * kernel.kv_itemsize for x in tensors]
    if tensors[0].shape[kernel.token] > ((CHUNK << 32) - 1) // max(1, *steps):
        shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
        raise ArgumentError(f"k and v must span less than {CHUNK << 32} bytes each, got {shapes}")
