"""Host side of the decode kernel for requests without a plan: single requests, whose keys are one page of it, and
decode calls whose lengths and page tables are on the device.
"""

from __future__ import annotations

import functools

import torch

from cute_attn.errors import ArgumentError, WorkspaceError
from cute_attn.kernels.xqa.host.params import CHUNK, ONE_PIECE, Requests
from cute_attn.kernels.xqa.host.prepared import PreparedKernel
from cute_attn.kernels.xqa.host.variant import choose_spec, is_few
from cute_attn.problem import DecodeProblem, Problem, Request, Settings
from cute_attn.runtime import counters
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import CPU, current_stream
from cute_attn.runtime.spec import KernelSpec


def launches(problem: Request, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """The kernel and grid of `problem` on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    batch_size = len(problem.seq_lens) if isinstance(problem, DecodeProblem) else 1
    kernel = Runner(problem.settings, arch, CPU, sms).kernel(problem.qo_len, is_few(batch_size, problem.features))
    return [(kernel.spec, kernel.grid)] if problem.qo_len and batch_size else []


@functools.cache
def one_piece(device_index: int) -> torch.Tensor:
    """A page table of one row, which holds page 0, and a length that the kernel cuts to that of the call. Kept for
    good: captured graphs read it when the runner that they come from is forgotten."""
    device = "cpu" if device_index == CPU else f"cuda:{device_index}"
    return torch.tensor([[0], [ONE_PIECE]], dtype=torch.int32, device=device)


class Runner:
    """Runs problems of the same settings."""

    def __init__(self, settings: Settings, arch: Arch, device_index: int, sms: int) -> None:
        self.settings, self.arch, self.device_index, self.sms = settings, arch, device_index, sms
        self.kernel = functools.cache(self._kernel)
        self.is_few = functools.partial(is_few, features=settings.features)

    @functools.cached_property
    def records(self) -> torch.Tensor:
        """Read by launches of single requests. Decode calls do without: their first may be one that is captured, when
        nothing can be copied to the device.
        """
        return one_piece(self.device_index)

    @functools.cached_property
    def one_request(self) -> Requests:
        table, length = self.records[:1], self.records[1]
        return {"table": table.data_ptr(), "table_stride": 1, "seq_lens": length.data_ptr(), "batch": 1}

    def _kernel(self, qo_len: int, few: bool) -> PreparedKernel:
        spec = choose_spec(self.settings.features, qo_len, few, self.arch)
        return PreparedKernel(self.settings, qo_len, spec, self.arch, self.sms, self.device_index)

    def __call__(self, problem: Request) -> None:
        if isinstance(problem, DecodeProblem):
            self.decode(problem)
        elif problem.qo_len:
            self.single(problem)

    def decode(self, problem: DecodeProblem) -> None:
        """A batch whose lengths are on the device, in the scratch memory of its caller."""
        if problem.q.shape[0] == 0:
            return
        tables, scratch = problem.block_tables, problem.scratch
        batch_size = tables.shape[0]
        kernel = self.kernel(problem.qo_len, self.is_few(batch_size))
        if scratch.partial_bytes < kernel.partial_bytes or scratch.counter_bytes < kernel.counter_bytes:
            raise WorkspaceError(
                f"this call needs {kernel.counter_bytes} bytes of semaphores and {kernel.partial_bytes} bytes of "
                f"scratch, the buffers have {scratch.counter_bytes} and {scratch.partial_bytes}"
            )
        requests: Requests = {
            "table": tables.data_ptr(),
            "table_stride": tables.stride(0),
            "seq_lens": problem.seq_lens.data_ptr(),
            "batch": batch_size,
            "capacity": problem.max_kv_len,
        }
        if problem.qo_indptr is not None:
            requests["q_indptr"] = problem.qo_indptr.data_ptr()
        if problem.draft_mask is not None:
            requests["mask"] = problem.draft_mask.data_ptr()
        kernel(problem, requests, scratch.counters, scratch.partials)

    def single(self, problem: Problem) -> None:
        """One request, in memory of torch's and counters of the stream's."""
        kernel = self.kernel(problem.qo_len, self.is_few(1))
        self._check_span(kernel, problem.k, problem.v)
        partials = problem.q.new_empty(kernel.partial_bytes, dtype=torch.uint8)
        arrivals = counters.of_device(self.device_index, counters.ARRIVALS)
        address = arrivals.address(current_stream(self.device_index))
        requests: Requests = {**self.one_request, "capacity": problem.kv_len}
        kernel(problem, requests, address, partials.data_ptr())

    def _check_span(self, kernel: PreparedKernel, *tensors: torch.Tensor) -> None:
        """The kernel counts chunks of a kv head in 32 bits."""
        token, size = kernel.parameters.token, kernel.parameters.kv_itemsize
        if any(x.shape[token] * x.stride(token) * size >= CHUNK << 32 for x in tensors):
            shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
            raise ArgumentError(f"k and v must span less than {CHUNK << 32} bytes each, got {shapes}")
