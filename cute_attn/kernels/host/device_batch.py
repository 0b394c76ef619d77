"""Batches whose schedule the planner kernel makes: launches of a fixed size, as in CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from cute_attn.kernels.host.batch import BatchSchedule, Schedule, SplitKvBatchRun, T_co, Tiling
from cute_attn.kernels.host.planner import Planner
from cute_attn.kernels.host.prepared import PreparedKernel
from cute_attn.problem import BatchLengths, BatchLimits, DeviceLengths, Settings
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.batch import WorkList, record_capacity

_NONE = np.zeros(0, np.int64)
NO_LENGTHS = BatchLengths(np.zeros(1, np.int64), _NONE, _NONE, _NONE)  # where `BatchLimits.graph` decides


def schedule_on_device(tiling: Tiling[T_co], limits: BatchLimits, sms: int) -> BatchSchedule[T_co]:
    """Returns the launches of any batch within `limits.graph`; its records are made on the device."""
    capacity = record_capacity(tiling.params, limits)
    work = WorkList(0, capacity.items, capacity.merges, np.empty(0, np.int32))
    return BatchSchedule.of(tiling, work, NO_LENGTHS, limits, sms)


class DevicePlannedRun(SplitKvBatchRun):
    """Runs batches of one plan, whose records the planner kernel writes."""

    def __init__(
        self,
        settings: Settings,
        schedule: BatchSchedule[object],
        kernel: Callable[[Settings], PreparedKernel],
        staging: Staging,
        device_index: int,
        planner: Planner,
        lengths: DeviceLengths,
    ) -> None:
        self.planner, self.lengths = planner, lengths  # kept as long as a captured graph may read them
        super().__init__(settings, schedule, kernel, staging, device_index)

    def placed(self, schedule: Schedule, staging: Staging) -> torch.Tensor:
        """Prepares the planner's launch, and returns the records in device memory."""
        layout = self.planner.layout
        if schedule.keeps_address:
            staging.fix_capacity(layout.records)
        records, scratch = staging.written_on_device(layout.records, layout.end, layout)
        staging.write(functools.partial(self.planner, self.lengths, records, scratch))
        return records
