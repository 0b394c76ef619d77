"""A kernel around a few tcgen05 instructions: fills shared and tensor memory from images, runs them, reads back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cute_attn.emulator import run
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.machine import Schedule
from cute_attn.emulator.memory import SHARED_START, GlobalMemory

BASE = SHARED_START  # where the shared image lies
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
_IN, _OUT, _SMEM, _REGS = 1 << 40, 2 << 40, 3 << 40, 4 << 40


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
        return "\n".join([_HEAD, *self._prologue(), *self._fill(), *self._work(), *self._read(), *self._epilogue()])

    def _prologue(self) -> list[str]:
        slot = self.smem.shape[1]
        group = f"cta_group::{self.group}"
        return [
            "mov.u32 %tid, %tid.x; mov.u32 %rank, %cluster_ctarank; shr.u32 %warp, %tid, 5;",
            "setp.eq.u32 %p0, %warp, 0; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p2, %rank, 0; and.pred %lead, %p1, %p2;",
            f"mov.u32 %base, dynamic; add.u32 %slot, %base, {slot}; add.u32 %bar, %slot, 8;",
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
            "ld.param.u64 %b, [p_in]; add.u64 %a, %a, %b;",
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
                "ld.param.u64 %b, [p_smem]; add.u64 %a, %a, %b; shl.b32 %y, %tid, 2; add.u32 %y, %y, %base;",
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
            "ld.param.u64 %b, [p_out]; add.u64 %a, %a, %b;",
        ]
        for column in range(0, self.columns, 4):
            regs = "{%z0,%z1,%z2,%z3}"
            lines.append(f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {regs}, [%taddr+{self.first + column}];")
            lines.append("tcgen05.wait::ld.sync.aligned;")
            lines.append(f"st.global.v4.b32 [%a+{4 * column}], {regs};")
        lines.append(f"mad.lo.u32 %y, %rank, 128, %tid; mul.wide.u32 %a, %y, {4 * self.results};")
        lines.append("ld.param.u64 %b, [p_regs]; add.u64 %a, %a, %b;")
        return lines + [f"st.global.b32 [%a+{4 * i}], %x{i};" for i in range(self.results)]

    def _epilogue(self) -> list[str]:
        group = f"cta_group::{self.group}"
        lines = [BEFORE, *self._sync(), "@!%p0 bra END;"]
        if self.free:
            lines.append(f"ld.shared.b32 %y, [%slot]; tcgen05.dealloc.{group}.sync.aligned.b32 %y, 512;")
        return [*lines, f"tcgen05.relinquish_alloc_permit.{group}.sync.aligned;", "END: ret;", "}"]

    def run(
        self, schedule: str = "eager", strict: bool = True, rewrite: Callable[[str], str] = str
    ) -> tuple[Array, Array]:
        """(tensor memory [ctas, 128, columns], registers [ctas, 128, results]). `rewrite` changes the text first."""
        memory = GlobalMemory()
        out = np.zeros((self.group, 128, self.columns), np.uint32)
        registers = np.zeros((self.group, 128, self.results), np.uint32)
        images = ((_IN, self.tmem, False), (_SMEM, self.smem, False), (_OUT, out, True), (_REGS, registers, True))
        for address, data, output in images:
            if data.size:
                flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
                memory.add(f"{address >> 40}", address, data.nbytes, writable=output, valid=not output, data=flat)
        description: dict[str, Any] = {
            "symbol": "kernel",
            "grid": (self.group, 1, 1),
            "block": (128, 1, 1),
            "cluster": (self.group, 1, 1),
            "smem_bytes": self.smem.shape[1] + 1024,
            "params": struct.pack("<4Q", _IN, _SMEM, _OUT, _REGS),
        }
        run.launch(rewrite(self.text()), description, memory, schedule=Schedule(schedule, 3), strict=strict)
        return out, registers


_HEAD = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .u64 p_in, .param .u64 p_smem, .param .u64 p_out, .param .u64 p_regs)
{
.reg .pred %p<4>; .reg .pred %lead; .reg .b16 %mask;
.reg .b32 %x<128>; .reg .b32 %z<4>; .reg .b32 %tid; .reg .b32 %rank; .reg .b32 %warp; .reg .b32 %slot;
.reg .b32 %bar; .reg .b32 %base; .reg .b32 %taddr; .reg .b32 %y; .reg .b64 %a; .reg .b64 %b;
"""


def registers(count: int) -> str:
    return "{" + ",".join(f"%x{i}" for i in range(count)) + "}"
