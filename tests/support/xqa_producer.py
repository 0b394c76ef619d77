"""Inputs of a decode call that the preceding kernel writes: queries, scales, and every request's newest token."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from cute_attn.emulator.adapter import EmulatedLaunch
from cute_attn.runtime import artifacts
from cute_attn.runtime.launch import CPU, Bound, Launch, current_stream
from cute_attn.runtime.spec import KernelSpec, Program
from tests.support.xqa_case import Built

STALE = 0xFF  # every float of such bytes is NaN


@dataclass(frozen=True)
class ProducerSpec(KernelSpec):
    kernel: ClassVar[str] = "producer"
    needs_mma: ClassVar[bool] = False


def program(spec: KernelSpec, arch: str) -> Program:
    from tests.support.producer_kernel import ProducerProgram

    return ProducerProgram()


@functools.cache
def load(arch: str, device_index: int, pdl: bool) -> Bound:
    artifact = artifacts.get(ProducerSpec(), arch, program)
    launch = EmulatedLaunch(artifact, pdl=pdl) if device_index == CPU else Launch(artifact, device_index, pdl=pdl)
    return launch.bind({}, [param.name for param in artifact.params])


class Producer:
    """Keeps what the arguments of `built` hold now; NHD caches in pairs, requests of at least one token.

    `write` restores it after `spoil` has overwritten it. The kernel that does so lets the next launch start at once,
    pauses, then writes: a launch that does not wait for it reads stale bytes.
    """

    def __init__(self, built: Built, arch: str, pauses: int) -> None:
        a, case = built.arguments, built.case
        self.arch, self.pauses = arch, pauses
        caches = [*a["kv_cache"], *(a["kv_cache_sf"] or ())]
        last = [(i, *divmod(n - 1, case.page_size)) for i, n in enumerate(case.seq_lens)]
        newest = [x[int(a["block_tables"][i, page]), slot] for x in caches for i, page, slot in last]
        self.targets = [x.view(torch.uint8) for x in (a["query"], a["bmm1_scale"], a["bmm2_scale"], *newest)]
        self.sources = [x.clone() for x in self.targets]
        pairs = zip(self.targets, self.sources, strict=True)
        rows = [(x.data_ptr(), source.data_ptr(), x.nbytes // 4) for x, source in pairs]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=a["query"].device)

    def spoil(self) -> None:
        for x in self.targets:
            x.fill_(STALE)

    def write(self) -> None:
        self._fire(self.rows, self.pauses, dependent=False)

    def write_and_read_at_once(self) -> torch.Tensor:
        """What a dependent launch reads in place of the first target if it does not wait."""
        target = self.targets[0]
        found = torch.empty_like(target)
        row = [[found.data_ptr(), target.data_ptr(), target.nbytes // 4]]
        reader = torch.tensor(row, dtype=torch.int64, device=self.rows.device)
        self.write()
        self._fire(reader, 0, dependent=True)
        return found

    def check(self) -> None:
        """Was everything brought back?"""
        assert all(torch.equal(x, source) for x, source in zip(self.targets, self.sources, strict=True))

    def _fire(self, rows: torch.Tensor, pauses: int, dependent: bool) -> None:
        index = CPU if rows.device.type == "cpu" else rows.device.index
        launch = load(self.arch, index, dependent)
        launch.fire(current_stream(index), (rows.data_ptr(), pauses), ((len(rows), 1, 1),))
