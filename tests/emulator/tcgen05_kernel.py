"""A kernel around a few tcgen05 instructions: fills shared and tensor memory from images, runs them, reads back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cute_attn.emulator import Schedule
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.memory import SHARED_START
from tests.emulator.micro import blackwell, emulate
from tests.emulator.micro.case import Case

BASE = SHARED_START  # where the shared image lies
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
_REGISTERS = (
    ".reg .pred %lead; .reg .b16 %mask; .reg .b32 %x<128>; .reg .b32 %z<4>; .reg .b64 %a, %b;",
    ".reg .b32 %tid, %rank, %warp, %slot, %bar, %base, %taddr, %y;",
)


@dataclass
class Kernel:
    """`body` is what one thread of the first CTA does, `warps` what all warps do after it (with their own lanes'
    address in %taddr). Images: tensor memory [ctas, 128, columns], shared memory [ctas, bytes]. `results` words a
    thread are stored from %x0..."""

    body: Sequence[str] = ()
    warps: Sequence[str] = ()
    tmem: Array = field(default_factory=lambda: np.zeros((1, 128, 0), np.uint32))
    smem: Array = field(default_factory=lambda: np.zeros((1, 0), np.uint8))
    columns: int = 0  # read back, from column `first`
    first: int = 0
    results: int = 0
    commit: bool = True
    waits: bool = True  # for tcgen05.st
    fence: bool = True  # proxy fence after filling shared memory
    free: bool = True

    @property
    def group(self) -> int:
        return len(self.tmem)

    def text(self) -> str:
        lines = [*_REGISTERS, *self._prologue(), *self._fill(), *self._work(), *self._read(), *self._epilogue()]
        smem = self.smem.shape[1] + 1024
        return blackwell.text(threads=128, smem=smem, cluster=self.group).add(*lines).ptx()

    def _prologue(self) -> list[str]:
        slot = self.smem.shape[1]
        group = f"cta_group::{self.group}"
        return [
            "mov.u32 %tid, %tid.x; mov.u32 %rank, %cluster_ctarank; shr.u32 %warp, %tid, 5;",
            "setp.eq.u32 %p0, %warp, 0; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p2, %rank, 0; and.pred %lead, %p1, %p2;",
            f"mov.u32 %base, sm; add.u32 %slot, %base, {slot}; add.u32 %bar, %slot, 8;",
            "@!%p0 bra ALLOCATED;",
            f"tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%slot], 512;",
            "ALLOCATED:",
            "@%p1 mbarrier.init.shared.b64 [%bar], 1;",
            "fence.mbarrier_init.release.cluster;",
            *self._sync(),
            "ld.shared.b32 %taddr, [%slot]; shl.b32 %y, %warp, 21; add.u32 %taddr, %taddr, %y;",
        ]

    def _sync(self) -> list[str]:
        return ["bar.sync 0;", *(["barrier.cluster.arrive;", "barrier.cluster.wait;"] if self.group == 2 else [])]

    def _fill(self) -> list[str]:
        columns, nbytes = self.tmem.shape[2], self.smem.shape[1]
        lines = [
            f"mad.lo.u32 %y, %rank, 128, %tid; mul.wide.u32 %a, %y, {4 * columns};",
            "add.u64 %a, %a, %src;",
        ]
        for column in range(0, columns, 4):
            regs = "{%x0,%x1,%x2,%x3}"
            lines.append(f"ld.global.v4.b32 {regs}, [%a+{4 * column}];")
            lines.append(f"tcgen05.st.sync.aligned.32x32b.x4.b32 [%taddr+{column}], {regs};")
        if self.waits:
            lines.append("tcgen05.wait::st.sync.aligned;")
        if nbytes:
            lines += [
                f"mul.wide.u32 %a, %rank, {nbytes}; mul.wide.u32 %b, %tid, 4; add.u64 %a, %a, %b;",
                f"add.u64 %a, %a, %src; add.u64 %a, %a, {self.tmem.nbytes};",
                "shl.b32 %y, %tid, 2; add.u32 %y, %y, %base;",
                "COPY:",
                "ld.global.b32 %x0, [%a]; st.shared.b32 [%y], %x0; add.u64 %a, %a, 512; add.u32 %y, %y, 512;",
                "setp.lt.u32 %p1, %y, %slot; @%p1 bra COPY;",
            ]
        return [*lines, *(["fence.proxy.async;"] if self.fence else []), BEFORE, *self._sync(), AFTER]

    def _work(self) -> list[str]:
        mechanism = f"tcgen05.commit.cta_group::{self.group}.mbarrier::arrive::one.shared::cluster"
        lines = ["@!%lead bra ISSUED;", *self.body]
        if self.commit:
            multicast = ".multicast::cluster.b64 [%bar], %mask;" if self.group == 2 else ".b64 [%bar];"
            lines.append(("mov.b16 %mask, 3; " if self.group == 2 else "") + mechanism + multicast)
        lines += ["ISSUED:", "bar.warp.sync 0xffffffff;"]
        if self.commit:
            lines += ["WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%bar], 0;", "@!%p1 bra WAIT;", AFTER]
        return [*lines, *self.warps]

    def _read(self) -> list[str]:
        lines = [
            *(["tcgen05.wait::ld.sync.aligned;"] if self.results else []),
            f"mad.lo.u32 %y, %rank, 128, %tid; mul.wide.u32 %a, %y, {4 * self.columns};",
            "add.u64 %a, %a, %dst;",
        ]
        for column in range(0, self.columns, 4):
            regs = "{%z0,%z1,%z2,%z3}"
            lines.append(f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {regs}, [%taddr+{self.first + column}];")
            lines.append("tcgen05.wait::ld.sync.aligned;")
            lines.append(f"st.global.v4.b32 [%a+{4 * column}], {regs};")
        lines.append(f"mad.lo.u32 %y, %rank, 128, %tid; mul.wide.u32 %a, %y, {4 * self.results};")
        lines.append(f"add.u64 %a, %a, %dst; add.u64 %a, %a, {self.group * 128 * 4 * self.columns};")
        return lines + [f"st.global.b32 [%a+{4 * i}], %x{i};" for i in range(self.results)]

    def _epilogue(self) -> list[str]:
        group = f"cta_group::{self.group}"
        lines = [BEFORE, *self._sync(), "@!%p0 bra END;"]
        if self.free:
            lines.append(f"ld.shared.b32 %y, [%slot]; tcgen05.dealloc.{group}.sync.aligned.b32 %y, 512;")
        return [*lines, f"tcgen05.relinquish_alloc_permit.{group}.sync.aligned;", "END:"]

    def run(
        self, schedule: str = "eager", strict: bool = True, rewrite: Callable[[str], str] = str
    ) -> tuple[Array, Array]:
        """(tensor memory [ctas, 128, columns], registers [ctas, 128, results]). `rewrite` changes the text first."""
        threads, data = self.group * 128, self.tmem.tobytes() + self.smem.tobytes()
        out_bytes = 4 * threads * (self.columns + self.results)
        shape = {"threads": 128, "grid": self.group, "cluster": self.group}
        case = Case("tcgen05", "kernel", rewrite(self.text()), data or bytes(16), out_bytes or 16, **shape)  # type: ignore[arg-type]
        out = emulate.run(case, schedule=Schedule(schedule, 3), strict=strict, valid=False)
        words = np.frombuffer(out, np.uint32)[: threads * (self.columns + self.results)]
        parts = np.split(words, [threads * self.columns])
        image, registers = (part.reshape(self.group, 128, -1) for part in parts)
        return image, registers


def registers(count: int) -> str:
    return "{" + ",".join(f"%x{i}" for i in range(count)) + "}"
