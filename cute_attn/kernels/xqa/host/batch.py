"""Host side of the decode kernel for batches. There is no schedule: the kernel cuts the work itself, from lengths and
places of pages that a plan takes to the device. The numbers lie where the next plan's will, for captured launches.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cute_attn.kernels.host.batch import MAX_SETTINGS, Repeat, Tensors, launch_nothing
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.kernels.host.prepared import Grid
from cute_attn.kernels.xqa.host import prepared
from cute_attn.kernels.xqa.host.params import RERUN_FIELDS, Requests
from cute_attn.kernels.xqa.host.prepared import PreparedKernel
from cute_attn.kernels.xqa.host.variant import choose_spec, is_few
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import CPU, current_stream
from cute_attn.runtime.spec import KernelSpec
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule


def launches(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> list[tuple[KernelSpec, Grid]]:
    """The kernel and grid of a batch on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    plan = scheduled(settings, lengths, limits, arch, sms)
    kernel = prepared_kernel(settings, plan.qo_len, plan.spec, arch, sms, CPU, plan.room)
    return [(kernel.spec, kernel.grid)] if plan.batch_size else []


class Scheduled(NamedTuple):
    """What a plan fixes for its runs."""

    spec: XqaSpec
    ctas: int
    room: int  # bytes for partial results
    qo_len: int
    batch_size: int
    sms: int
    ints: np.ndarray  # keys of every request, place of its first page, and a zero for every CTA
    fixed: bool  # in memory that later plans use too


def scheduled(
    settings: Settings,
    lengths: BatchLengths,
    limits: BatchLimits,
    arch: Arch,
    sms: int,
    memory: batch_schedule.Memory = batch_schedule.new_ints,
) -> Scheduled:
    qo_len, batch_size = limits.max_qo_len, len(lengths.kv_len)
    assert qo_len is not None  # a decode wrapper says so
    spec = choose_spec(settings.features, qo_len, is_few(batch_size, settings.features), arch)
    ctas = prepared.ctas(spec, sms, limits.workspace_bytes)
    ints = memory(2 * batch_size + ctas)
    ints[:batch_size] = lengths.kv_len
    ints[batch_size : 2 * batch_size] = lengths.kv_start
    ints[2 * batch_size :] = 0
    return Scheduled(spec, ctas, limits.workspace_bytes, qo_len, batch_size, sms, ints, limits.graph is not None)


def sizes(plan: Scheduled) -> tuple[int, int]:
    """Bytes of the workspace that a plan uses, and bytes of its numbers."""
    return plan.ctas * prepared.partial_bytes(plan.spec), plan.ints.nbytes


@functools.lru_cache(MAX_SETTINGS)
def prepared_kernel(
    settings: Settings, qo_len: int, spec: XqaSpec, arch: Arch, sms: int, device_index: int, room: int
) -> PreparedKernel:
    return PreparedKernel(settings, qo_len, spec, arch, sms, device_index, room)


class Planned:
    """Runs batches of one plan. `settings` of a run may differ from the planned ones in numbers and in what these
    make of the scores.
    """

    def __init__(self, settings: Settings, plan: Scheduled, staging: Staging, arch: Arch, device_index: int) -> None:
        self.plan, self.arch, self.device_index = plan, arch, device_index
        self.settings, self.kernel = settings, self.prepared(settings)  # first, as in `kernels.host.batch`
        if plan.fixed:
            staging.fixed_capacity(plan.ints.size)
        numbers, batch_size = staging.upload(plan.ints), plan.batch_size
        self.records = numbers[: 2 * batch_size]
        self.counters = numbers[2 * batch_size :]
        self.requests: Requests = {
            "seq_lens": self.records.data_ptr(),
            "page_starts": self.records[batch_size:].data_ptr(),
            "batch": batch_size,
            "capacity": UNBOUNDED,
        }

    def prepared(self, settings: Settings) -> PreparedKernel:
        plan = self.plan
        found = prepared_kernel(settings, plan.qo_len, plan.spec, self.arch, plan.sms, self.device_index, plan.room)
        _ = found.launch  # loaded now: the first run may be one that is captured
        return found

    def __call__(self, problem: BatchProblem) -> None:
        if not self.plan.batch_size:
            return
        if problem.settings is not self.settings:
            self.settings, self.kernel = problem.settings, self.prepared(problem.settings)
        self.kernel(problem, *self.memory(problem))

    def repeat(self, problem: BatchProblem) -> Repeat:
        """Runs like that of `problem`, but for addresses."""
        if not self.plan.batch_size:
            return launch_nothing
        kernel = self.prepared(problem.settings)
        block = kernel.parameters.of(problem, *self.memory(problem))
        rest = [value for name, value in block.items() if name not in RERUN_FIELDS]
        fire, grid, index = kernel.launch.fire, kernel.grid, self.device_index

        def run(q: int, k: int, v: int, out: int, lse: int, _: Tensors) -> None:
            fire((q, k, v, out, lse, *rest), grid, current_stream(index))

        return run

    def memory(self, problem: BatchProblem) -> tuple[Requests, int, int]:
        """Where the requests are, and addresses of counters and partial results."""
        assert problem.workspace is not None
        assert problem.kv_indices is not None
        requests: Requests = {**self.requests, "table": problem.kv_indices.data_ptr()}
        return requests, self.counters.data_ptr(), problem.workspace.data_ptr()
