"""Host side of the decode kernel for single requests: keys that lie in one piece are one page of it."""

from __future__ import annotations

import functools

import torch

from cute_attn.kernels.xqa.host import runner as xqa_runner
from cute_attn.kernels.xqa.host.variant import ONE_PIECE, xqa_features
from cute_attn.problem import Problem, Scratch, Settings, XqaProblem
from cute_attn.runtime import counters
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import CPU, current_stream
from cute_attn.runtime.spec import KernelSpec


def launches(problem: Problem, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """The kernel and grid of `problem` on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    runner = Runner(problem.settings, arch, CPU, sms).runner(problem.qo_len)
    return [(runner.spec, runner.grid)] if problem.qo_len else []


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
        self.runner = functools.cache(self._runner)
        self.records = one_piece(device_index)
        self.table, self.length = self.records[:1], self.records[1]

    def _runner(self, q_len: int) -> xqa_runner.Runner:
        features = xqa_features(self.settings, q_len)
        return xqa_runner.Runner(
            features, self.arch, self.sms, xqa_runner.choose_spec(features, xqa_runner.few(1, features), self.arch)
        )

    def __call__(self, problem: Problem) -> None:
        if problem.qo_len == 0:
            return
        runner, settings, q = self.runner(problem.qo_len), self.settings, problem.q
        partials = q.new_empty(runner.partial_bytes, dtype=torch.uint8)
        arrivals = counters.of_device(self.device_index, counters.ARRIVALS)
        address = arrivals.address(current_stream(self.device_index))
        scratch = Scratch((), address, runner.counter_bytes, partials.data_ptr(), runner.partial_bytes)
        runner(
            XqaProblem(
                runner.features,
                q,
                problem.k,
                problem.v,
                self.table,
                self.length,
                problem.kv_len,
                problem.out,
                scratch,
                settings.sm_scale,
                settings.v_scale,
                problem.scale_tensors,
                problem.v_scale_tensor,
                problem.block_scales,
                problem.sinks,
                lse=problem.lse,
            )
        )
