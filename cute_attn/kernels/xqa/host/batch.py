"""Host side of the decode kernel for batches. There is no schedule: the kernel cuts the work itself, from lengths and
places of pages that a plan takes to the device. The numbers lie where the next plan's will, for captured launches.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cute_attn.kernels.host.batch import MAX_SETTINGS, Repeat, Tensors, launch_nothing
from cute_attn.kernels.host.prepared import Grid
from cute_attn.kernels.xqa.host import runner as xqa_runner
from cute_attn.kernels.xqa.host.variant import xqa_features
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Scratch, Settings, XqaFeatures, XqaProblem
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import current_stream
from cute_attn.runtime.spec import KernelSpec
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule


def launches(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> list[tuple[KernelSpec, Grid]]:
    """The kernel and grid of a batch on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    plan = scheduled(settings, lengths, limits, arch, sms)
    features = xqa_features(settings, plan.q_len)
    return [(plan.spec, runner(features, arch, sms, plan.spec, plan.room).grid)] if plan.batch_size else []


class Scheduled(NamedTuple):
    """What a plan fixes for its runs."""

    spec: XqaSpec
    ctas: int
    room: int  # bytes for partial results
    q_len: int
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
    q_len, batch_size = limits.max_qo_len, len(lengths.kv_len)
    assert q_len is not None  # a decode wrapper says so
    features = xqa_features(settings, q_len)
    spec = xqa_runner.choose_spec(features, xqa_runner.few(batch_size, features), arch)
    ctas = xqa_runner.ctas(spec, sms, limits.workspace_bytes)
    ints = memory(2 * batch_size + ctas)
    ints[:batch_size] = lengths.kv_len
    ints[batch_size : 2 * batch_size] = lengths.kv_start
    ints[2 * batch_size :] = 0
    return Scheduled(spec, ctas, limits.workspace_bytes, q_len, batch_size, sms, ints, limits.graph is not None)


def sizes(plan: Scheduled) -> tuple[int, int]:
    """Bytes of the workspace that a plan uses, and bytes of its numbers."""
    return plan.ctas * xqa_runner.partial_bytes(plan.spec), plan.ints.nbytes


@functools.lru_cache(MAX_SETTINGS)
def runner(features: XqaFeatures, arch: Arch, sms: int, spec: XqaSpec, room: int) -> xqa_runner.Runner:
    return xqa_runner.Runner(features, arch, sms, spec, room)


class Planned:
    """Runs batches of one plan. `settings` of a run may differ from the planned ones in numbers and in what these
    make of the scores.
    """

    def __init__(self, settings: Settings, plan: Scheduled, staging: Staging, arch: Arch, device_index: int) -> None:
        self.plan, self.arch = plan, arch
        self.settings, self.runner = settings, self.prepared(settings)  # first, as in `batched`
        if plan.fixed:
            staging.fixed_capacity(plan.ints.size)
        numbers, batch_size = staging.upload(plan.ints), plan.batch_size
        self.records = numbers[: 2 * batch_size]
        self.seq_lens, self.page_starts = self.records[:batch_size], self.records[batch_size:]
        self.counters = numbers[2 * batch_size :]

    def prepared(self, settings: Settings) -> xqa_runner.Runner:
        plan = self.plan
        found = runner(xqa_features(settings, plan.q_len), self.arch, plan.sms, plan.spec, plan.room)
        _ = found.launch  # loaded now: the first run may be one that is captured
        return found

    def __call__(self, problem: BatchProblem) -> None:
        if not self.plan.batch_size:
            return
        if problem.settings is not self.settings:
            self.settings, self.runner = problem.settings, self.prepared(problem.settings)
        self.runner(self.problem(self.runner, problem))

    def repeat(self, problem: BatchProblem) -> Repeat:
        """Runs like that of `problem`, but for addresses."""
        runner = self.prepared(problem.settings)
        _, _, _, _, _, *rest = runner.values(self.problem(runner, problem))
        fire, grid, index = runner.launch.fire, runner.grid, runner.device_index

        def run(q: int, k: int, v: int, out: int, lse: int, _: Tensors) -> None:
            fire((q, k, v, out, lse, *rest), grid, current_stream(index))

        return run if self.plan.batch_size else launch_nothing

    def problem(self, runner: xqa_runner.Runner, problem: BatchProblem) -> XqaProblem:
        settings, workspace, counters = problem.settings, problem.workspace, self.counters
        assert workspace is not None
        assert problem.kv_indices is not None
        return XqaProblem(
            runner.features,
            problem.q,
            problem.k,
            problem.v,
            problem.kv_indices,
            self.seq_lens,
            xqa_runner.UNBOUNDED,
            problem.out,
            Scratch((), counters.data_ptr(), 4 * self.plan.ctas, workspace.data_ptr(), self.plan.room),
            settings.sm_scale,
            settings.v_scale,
            problem.scale_tensors,
            problem.v_scale_tensor,
            problem.block_scales,
            problem.sinks,
            lse=problem.lse,
            page_starts=self.page_starts,
        )
