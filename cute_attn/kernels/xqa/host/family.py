"""The decode kernel as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.host.family import KernelLaunch, RequestRunner
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.xqa.host.batch import XqaBatchRun, schedule
from cute_attn.kernels.xqa.host.grid import launch_config
from cute_attn.kernels.xqa.host.unplanned import DecodeRun, SingleRun
from cute_attn.kernels.xqa.host.variant import rule_of, shape_of_call, specs
from cute_attn.problem import BatchLengths, BatchLimits, DecodeProblem, DeviceLengths, Request, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.staging import Staging


class XqaFamily:
    """The decode kernel with the methods of a `TiledFamily`."""

    name = "xqa"
    specs, schedule = staticmethod(specs), staticmethod(schedule)

    def prepare(self, settings: Settings, gpu: Gpu) -> RequestRunner:
        return DecodeRun(settings, gpu) if settings.features.device_lengths else SingleRun(settings, gpu)

    def launches(self, problem: Request, arch: Arch, sms: int) -> list[KernelLaunch]:
        batch_size = len(problem.seq_lens) if isinstance(problem, DecodeProblem) else 1
        if not problem.qo_len or not batch_size:
            return []
        rule = rule_of(problem.settings.features, arch, shape_of_call(problem))
        config = launch_config(problem.settings, problem.qo_len, rule, arch, sms, alone=batch_size == 1)
        return [(config.spec, config.grid_of(batch_size))]

    def plan(
        self,
        settings: Settings,
        lengths: BatchLengths | DeviceLengths,
        limits: BatchLimits,
        staging: Staging,
        gpu: Gpu,
    ) -> XqaBatchRun:
        return XqaBatchRun(settings, lengths, limits, staging, gpu)

    def batch_launches(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[None, list[KernelLaunch]]:
        """Returns None, because the kernel shares the keys among its CTAs itself, and the kernel and grid."""
        planned = schedule(settings, lengths, limits, arch, sms)
        return None, [(planned.config.spec, planned.grid)] if planned.batch_size else []


FAMILY = XqaFamily()
