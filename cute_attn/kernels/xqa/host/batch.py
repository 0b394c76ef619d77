"""Runs of batches on the decode kernel. The CTAs split the keys themselves, from lengths and page indices that a plan
copies to the device; for captured launches, each plan writes them to the same address.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cute_attn.kernels.host.batch import BatchRun, Launched, Memory, uploaded
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.kernels.host.prepared import Grid, prepared
from cute_attn.kernels.rules import Rule
from cute_attn.kernels.xqa.host.grid import LaunchConfig, launch_config, partial_bytes_per_cta
from cute_attn.kernels.xqa.host.prepared import XqaKernel
from cute_attn.kernels.xqa.host.variant import rule_of, shape_of
from cute_attn.kernels.xqa.lengths.spec import THREADS, LengthsSpec
from cute_attn.kernels.xqa.tiles import Rings
from cute_attn.problem import BatchLengths, BatchLimits, DeviceLengths, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import Bound, current_stream
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.batch import AllocateInts, allocate_ints

LENGTHS_FIELDS = ("indptr", "last_page_len", "seq_lens", "page_starts", "batch", "page_size", "num_indices")


class XqaBatchSchedule(NamedTuple):
    """Kernel, grid and records of a plan."""

    rule: Rule[Rings]
    config: LaunchConfig
    batch_size: int
    records: np.ndarray  # keys of every request, index of its first page, and a counter of zero for every CTA

    @property
    def grid(self) -> Grid:
        """Grid of the launch; (0, 1, 1) where there are no requests."""
        return self.config.grid_of(self.batch_size) if self.batch_size else (0, 1, 1)

    def workspace(self) -> tuple[int, int]:
        """Returns the bytes of the workspace in use, and the bytes of the records."""
        return self.config.ctas * partial_bytes_per_cta(self.config.spec), self.records.nbytes


def schedule(
    settings: Settings,
    lengths: BatchLengths | DeviceLengths,
    limits: BatchLimits,
    arch: Arch,
    sms: int,
    allocate: AllocateInts = allocate_ints,
) -> XqaBatchSchedule:
    """Returns the schedule of a batch on a GPU of `arch` with `sms` multiprocessors, with records from `allocate`."""
    qo_len = limits.max_qo_len
    batch_size = lengths.batch_size
    assert qo_len is not None  # given by decode wrappers
    rule = rule_of_batch(settings, lengths, limits, arch)
    config = prepared(launch_config, settings, qo_len, rule, arch, sms, limits.workspace_bytes, batch_size == 1)
    records = allocate(2 * batch_size + config.ctas)
    records[2 * batch_size :] = 0
    if isinstance(lengths, DeviceLengths):
        records[: 2 * batch_size] = 0  # until `XqaBatchRun.again`
    else:
        records[batch_size : 2 * batch_size], records[:batch_size] = lengths.kv_start, lengths.kv_len
    return XqaBatchSchedule(rule, config, batch_size, records)


def rule_of_batch(
    settings: Settings, lengths: BatchLengths | DeviceLengths, limits: BatchLimits, arch: Arch
) -> Rule[Rings]:
    """Return the rule that a batch follows. It depends on lengths only where launches are not captured; lengths on the
    device have the bound that kv_indices has room for.
    """
    qo_len, batch_size, features = limits.max_qo_len, lengths.batch_size, settings.features
    assert qo_len is not None  # given by decode wrappers
    if limits.keeps_address:
        return rule_of(features, arch, shape_of(batch_size, settings, qo_len))
    longest = lengths.kv_end * settings.page_size if isinstance(lengths, DeviceLengths) else lengths.longest_kv
    return rule_of(features, arch, shape_of(batch_size, settings, qo_len, longest))


class XqaBatchRun(BatchRun):
    """Runs batches of one plan."""

    def __init__(
        self,
        settings: Settings,
        lengths: BatchLengths | DeviceLengths,
        limits: BatchLimits,
        staging: Staging,
        gpu: Gpu,
    ) -> None:
        planned = schedule(settings, lengths, limits, gpu.arch, gpu.sms, staging.reserve)

        def kernel(settings: Settings) -> XqaKernel:
            return prepared(XqaKernel, settings, planned.config, gpu)

        self.planned = kernel(settings)
        super().__init__(settings, kernel, gpu.device_index)
        self.staging, self.batch_size, self.gpu = staging, planned.batch_size, gpu
        self.settings, self.limits, self.rule = settings, limits, planned.rule
        self.page_size, self.grid = settings.page_size, planned.grid
        memory, size = uploaded(planned.records, limits, staging), planned.batch_size
        self.records, self.counters = memory[: 2 * size], memory[2 * size : 2 * size + planned.config.ctas]
        seq_lens, page_starts = self.records.data_ptr(), self.records[size:].data_ptr()
        self.request, self.seq_lens = (0, page_starts, size), seq_lens  # values of REQUEST_FIELDS
        if isinstance(lengths, DeviceLengths):  # the records do not have them
            self.again(lengths)

    def again(self, lengths: BatchLengths | DeviceLengths) -> bool | None:
        """Replaces the lengths of the requests, whose number stays. Returns True, as launches are the same otherwise;
        None, and nothing is replaced, if another kernel is to run them.
        """
        if rule_of_batch(self.settings, lengths, self.limits, self.gpu.arch) is not self.rule:
            return None
        if isinstance(lengths, DeviceLengths):
            addresses = self.seq_lens, self.request[1]
            self.staging.write(functools.partial(write_lengths, lengths, self.page_size, addresses, self.gpu))
            return True
        size = self.batch_size
        records = self.staging.reserve(2 * size)  # every launch leaves its counters at zero
        records[size:], records[:size] = lengths.kv_start, lengths.kv_len
        self.staging.upload(records)
        return True

    def decided(self, memory: Memory) -> Launched:
        """Returns the grid, values of `XqaKernel.request`, and the last ones of ADDRESS_FIELDS."""
        pages, entries, workspace = memory
        numbers = self.planned.request(self.request, entries, (pages, self.seq_lens, 0, 0))
        more = self.counters.data_ptr(), workspace, UNBOUNDED
        return Launched(self.version, memory, self.grid, numbers, (0, 1, 1), (), (), more)


def write_lengths(lengths: DeviceLengths, page_size: int, addresses: tuple[int, int], gpu: Gpu) -> None:
    """Launches the lengths kernel. `addresses`: of keys and first pages, an int32 number per request."""
    batch, last = lengths.batch_size, lengths.last_page_len
    assert last is not None  # of paged requests
    if not batch:
        return
    values = lengths.kv_indptr.data_ptr(), last.data_ptr(), *addresses, batch, page_size, lengths.kv_end
    prepared(_lengths_kernel, gpu).fire(current_stream(gpu.device_index), values, ((-(-batch // THREADS), 1, 1),))


def _lengths_kernel(gpu: Gpu) -> Bound:
    """Returns launches of the kernel by values of LENGTHS_FIELDS."""
    return load(LengthsSpec(), gpu.arch.name, gpu.device_index, gpu.arch.pdl).bind({}, LENGTHS_FIELDS)
