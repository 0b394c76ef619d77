"""The decode kernel as a kernel family, with runs of decode calls without a plan, and of batches.

The CTAs split the keys themselves, from lengths and page indices that a plan copies to the device; for captured
launches, each plan writes them to the same address.
"""

from __future__ import annotations

import functools
from bisect import bisect
from typing import NamedTuple

import numpy as np

from cute_attn.kernels.host.batch import BatchRun, Launched, Memory
from cute_attn.kernels.host.family import KernelLaunch
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import Fire, Runner, block_scale_strides, launch_nothing, optional_tensors
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.kernels.host.prepared import Grid, prepared
from cute_attn.kernels.host.single import Scheduler, SingleRun, SingleSchedule
from cute_attn.kernels.rules import Rule
from cute_attn.kernels.xqa.host.prepared import XqaKernel, fire_in_scratch, one_page
from cute_attn.kernels.xqa.host.variant import LaunchConfig, launch_config, rule_of, same_keys, specs
from cute_attn.kernels.xqa.spec import CTA_REQUESTS, LengthsSpec
from cute_attn.kernels.xqa.tiles import STEPS, Rings
from cute_attn.problem import BatchLengths, BatchLimits, DecodeProblem, DeviceLengths, Lengths, Problem, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import Bound, current_stream
from cute_attn.runtime.staging import Staging

LENGTHS_FIELDS = (
    *("indptr", "last_page_len", "qo_indptr", "seq_lens", "page_starts", "q_indptr"),
    *("batch", "page_size", "num_indices", "rows"),
)


class DecodeRun(Runner):
    """Runs decode calls of the same settings in the scratch memory of their callers. Nothing is copied to the device:
    the first call may be one that is captured.

    Where the caller's scratch is too small, counters are those of the stream, or of the captured launch, and partial
    results in memory of torch's allocator, which a graph keeps. The first call that needs such counters allocates them,
    and must not be one that is captured.
    """

    def __init__(self, settings: Settings, gpu: Gpu) -> None:
        self.settings, self.gpu = settings, gpu

    def bind(self, problem: DecodeProblem) -> Fire:
        """Returns a function that runs calls which differ from `problem` in addresses."""
        if problem.q.shape[0] == 0:
            return launch_nothing
        settings, gpu, qo_len = self.settings, self.gpu, problem.qo_len
        tables, scratch, index = problem.block_tables, problem.scratch, gpu.device_index
        rows, width = tables.shape
        rule = rule_of(settings, gpu.arch, rows, qo_len, problem.max_kv_len)
        config = prepared(launch_config, settings.features, qo_len, rule, gpu.arch, gpu.sms)
        kernel, longest, step = prepared(XqaKernel, settings, config, gpu), problem.max_kv_len, tables.stride(0)
        strides = kernel.strides(problem.q, problem.k, problem.v, problem.out, block_scale_strides(problem))
        numbers = step, 0, rows, (rows - 1) * step + width
        settled = config.grid_of(rows), strides, numbers, kernel.scales(problem.settings)
        bound = kernel.attention.of(optional_tensors(problem)[0])
        return fire_in_scratch(bound, config, scratch, longest, settled, index)


class XqaBatchSchedule(NamedTuple):
    """Kernel and records of a plan."""

    rule: Rule[Rings]
    config: LaunchConfig
    grid: Grid  # (0, 1, 1) where there are no requests
    records: np.ndarray  # of the lengths, and a counter of zero for every CTA

    def workspace(self) -> tuple[int, int]:
        """Returns the bytes of the workspace in use, and the bytes of the records."""
        return self.config.partial_bytes, self.records.nbytes


def schedule(settings: Settings, lengths: Lengths, limits: BatchLimits, arch: Arch, sms: int) -> XqaBatchSchedule:
    """Returns the schedule of a batch on a GPU of `arch` with `sms` multiprocessors."""
    qo_len, batch_size = limits.max_qo_len, lengths.batch_size
    assert qo_len is not None  # given by decode wrappers
    rule = rule_of_batch(settings, lengths, limits, arch)
    config = prepared(launch_config, settings.features, qo_len, rule, arch, sms, limits.workspace_bytes)
    records = np.concatenate((*records_of(lengths), np.zeros(config.ctas, np.int32)), dtype=np.int32)
    return XqaBatchSchedule(rule, config, config.grid_of(batch_size) if batch_size else (0, 1, 1), records)


def records_of(lengths: Lengths) -> tuple[np.ndarray, ...]:
    """Return the keys of every request, the index of its first page and, unless all have as many query tokens,
    qo_indptr. Of lengths on the device zeros, which `XqaBatchRun.again` replaces.
    """
    several = lengths.q_len is None
    if isinstance(lengths, DeviceLengths):
        return (np.zeros(lengths.batch_size * (2 + several) + several, np.int32),)
    uniform = lengths.kv_len, lengths.kv_start
    return (*uniform, lengths.qo_indptr) if several else uniform


def rule_of_batch(settings: Settings, lengths: Lengths, limits: BatchLimits, arch: Arch, _: int = 0) -> Rule[Rings]:
    """Return the rule that a batch follows, on any number of multiprocessors."""
    assert limits.max_qo_len is not None  # given by decode wrappers
    longest = known_keys(settings, lengths, limits)
    return rule_of(settings, arch, lengths.batch_size, limits.max_qo_len, longest)


def known_keys(settings: Settings, lengths: Lengths, limits: BatchLimits) -> int | None:
    """Return what a rule knows of the keys of a batch. It depends on lengths only where launches are not captured;
    lengths on the device have the bound that the caller knows, and that kv_indices has room for.
    """
    if limits.keeps_address:
        return None
    longest = lengths.longest_kv
    if isinstance(lengths, DeviceLengths):
        room = lengths.kv_end * settings.page_size
        longest = room if longest is None else min(longest, room)
    assert longest is not None
    return same_keys(longest)


class XqaBatchRun(BatchRun):
    """Runs batches of one plan."""

    def __init__(self, settings: Settings, lengths: Lengths, limits: BatchLimits, staging: Staging, gpu: Gpu) -> None:
        planned = schedule(settings, lengths, limits, gpu.arch, gpu.sms)
        super().__init__(settings, gpu)
        self.config, self.rule, self.grid = planned.config, planned.rule, planned.grid
        self.staging, self.limits, self.keys = staging, limits, known_keys(settings, lengths, limits)
        self.kernel(settings)
        memory, size = staging.upload(planned.records, fixed=limits.keeps_address), lengths.batch_size
        end = len(planned.records)
        counters = end - planned.config.ctas
        records, self.counters = memory[:counters], memory[counters:end]
        self.records = (records,)
        self.seq_lens, page_starts, q_indptr = (records[n * size :].data_ptr() for n in range(3))
        self.q_indptr = q_indptr if lengths.q_len is None else 0  # 0: all requests have as many query tokens
        self.request = 0, page_starts, size  # the first values of REQUEST_FIELDS
        if isinstance(lengths, DeviceLengths):  # the records do not have them
            self.again(lengths)

    def kernel(self, settings: Settings) -> XqaKernel:
        return prepared(XqaKernel, settings.unscaled, self.config, self.gpu)

    def again(self, lengths: Lengths) -> bool | None:
        """Replaces the lengths of the requests, whose number stays. Returns True, as launches are the same otherwise;
        None, and nothing is replaced, if another kernel is to run them.
        """
        keys = known_keys(self.settings, lengths, self.limits)
        if keys != self.keys and rule_of_batch(self.settings, lengths, self.limits, self.gpu.arch) is not self.rule:
            return None
        self.keys = keys
        if isinstance(lengths, DeviceLengths):
            addresses = self.seq_lens, self.request[1], self.q_indptr
            self.staging.write(functools.partial(write_lengths, lengths, self.settings.page_size, addresses, self.gpu))
            return True
        self.staging.upload(*records_of(lengths))  # every launch leaves its counters at zero
        return True

    def decided(self, memory: Memory) -> Launched:
        """Returns the grid, values of REQUEST_FIELDS and TABLE_FIELDS, and the last ones of ADDRESS_FIELDS."""
        pages, entries, workspace = memory
        numbers = *self.request, entries, pages, self.seq_lens, self.q_indptr, 0
        scratch = self.counters.data_ptr(), workspace, UNBOUNDED
        return Launched(self.version, memory, self.grid, numbers, (0, 1, 1), (), (), scratch)


def write_lengths(lengths: DeviceLengths, page_size: int, addresses: tuple[int, int, int], gpu: Gpu) -> None:
    """Launches the lengths kernel. `addresses`: where the three arrays of `records_of` are; the last 0: not."""
    batch, last = lengths.batch_size, lengths.last_page_len
    assert last is not None  # of paged requests
    if not batch:
        return
    arrays = lengths.kv_indptr, last, lengths.qo_indptr
    read = (0 if x is None else x.data_ptr() for x in arrays)
    values = *read, *addresses, batch, page_size, lengths.kv_end, lengths.rows or 0
    prepared(_lengths_kernel, gpu).fire(current_stream(gpu.device_index), values, ((-(-batch // CTA_REQUESTS), 1, 1),))


def _lengths_kernel(gpu: Gpu) -> Bound:
    """Returns launches of the kernel by values of LENGTHS_FIELDS."""
    return gpu.loaded(LengthsSpec()).bind({}, LENGTHS_FIELDS)


class XqaFamily:
    """The decode kernel with the methods of a `TiledFamily`."""

    name = "xqa"
    specs, schedule = staticmethod(specs), staticmethod(schedule)
    rule_of, plan = staticmethod(rule_of_batch), XqaBatchRun

    def scheduler(self, settings: Settings, arch: Arch, sms: int) -> Scheduler[LaunchConfig]:
        """Returns what schedules single requests of these settings."""
        alike: dict[tuple[int, int], SingleSchedule[LaunchConfig]] = {}

        def scheduled(qo_len: int, kv_len: int) -> SingleSchedule[LaunchConfig]:
            key = qo_len, bisect(STEPS["keys"], kv_len)
            if key not in alike:
                rule = rule_of(settings, arch, 1, qo_len, kv_len)
                config = prepared(launch_config, settings.features, qo_len, rule, arch, sms)
                alike[key] = SingleSchedule(config, 1, 1, config.grid_of(1), (1, 0, 1, 1), config.partial_bytes)
            return alike[key]

        return scheduled

    def prepare(self, settings: Settings, gpu: Gpu) -> Runner:
        if settings.features.device_lengths:
            return DecodeRun(settings, gpu)
        scheduler, table = self.scheduler(settings, gpu.arch, gpu.sms), one_page(gpu.device_index)
        return SingleRun(settings, gpu, scheduler, lambda config, *_: prepared(XqaKernel, settings, config, gpu), table)

    def launches(self, problem: Problem, arch: Arch, sms: int) -> list[KernelLaunch]:
        if problem.qo_len == 0:
            return []
        schedule = self.scheduler(problem.settings, arch, sms)(problem.qo_len, problem.kv_len)
        return [(schedule.tile.spec, schedule.grid)]

    def batch_launches(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[None, list[KernelLaunch]]:
        """Returns None, because the kernel shares the keys among its CTAs itself, and the kernel and grid."""
        planned = schedule(settings, lengths, limits, arch, sms)
        return None, [(planned.config.spec, planned.grid)] if lengths.batch_size else []


FAMILY = XqaFamily()
