"""The decode kernel as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.host.family import KernelLaunch
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.xqa.host import batch, single, variant
from cute_attn.problem import BatchLengths, BatchLimits, Features, Request, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule


class XqaFamily:
    """See `KernelFamily`."""

    name = "xqa"

    def specs(self, features: Features, arch: Arch) -> list[KernelSpec]:
        return variant.specs(features, arch)

    def prepare(self, settings: Settings, gpu: Gpu) -> single.Runner:
        return single.Runner(settings, gpu.arch, gpu.device_index, gpu.sms)

    def launches(self, problem: Request, arch: Arch, sms: int) -> list[KernelLaunch]:
        return single.launches(problem, arch, sms)

    def plan(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging, gpu: Gpu
    ) -> batch.Planned:
        schedule = batch.scheduled(settings, lengths, limits, gpu.arch, gpu.sms, staging.reserve)
        return batch.Planned(settings, schedule, staging, gpu.arch, gpu.device_index)

    def workspace(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[int, int]:
        limits = limits._replace(workspace_bytes=batch_schedule.UNLIMITED)
        return batch.sizes(batch.scheduled(settings, lengths, limits, arch, sms))

    def batch_launches(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[None, list[KernelLaunch]]:
        return None, batch.launches(settings, lengths, limits, arch, sms)


FAMILY = XqaFamily()
