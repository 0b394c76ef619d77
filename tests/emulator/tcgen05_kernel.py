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
        tmem, nbytes, group = self.tmem.shape[2], self.smem.shape[1], f"cta_group::{self.group}"
        pair = self.group == 2
        sync = "bar.sync 0; " + "barrier.cluster.arrive; barrier.cluster.wait;" * pair
        commit = f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster"
        commit = (
            f"mov.b16 %mask, 3; {commit}.multicast::cluster.b64 [%bar], %mask;" if pair else f"{commit}.b64 [%bar];"
        )
        done = f"WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%bar], 0; @!%p1 bra WAIT; {AFTER}"
        x, z = ("{" + ",".join(f"%{bank}{i}" for i in range(4)) + "}" for bank in "xz")
        lines = [
            *_REGISTERS,
            "mov.u32 %tid, %tid.x; mov.u32 %rank, %cluster_ctarank; shr.u32 %warp, %tid, 5;",
            "setp.eq.u32 %p0, %warp, 0; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p2, %rank, 0; and.pred %lead, %p1, %p2;",
            f"mov.u32 %base, sm; add.u32 %slot, %base, {nbytes}; add.u32 %bar, %slot, 8;",
            f"@!%p0 bra ALLOCATED; tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%slot], 512; ALLOCATED:",
            "@%p1 mbarrier.init.shared.b64 [%bar], 1;",
            f"fence.mbarrier_init.release.cluster; {sync}",
            "ld.shared.b32 %taddr, [%slot]; shl.b32 %y, %warp, 21; add.u32 %taddr, %taddr, %y;",
            # Tensor memory and shared memory are filled.
            _row("%src", tmem),
            *(
                f"ld.global.v4.b32 {x}, [%a+{4 * i}]; tcgen05.st.sync.aligned.32x32b.x4.b32 [%taddr+{i}], {x};"
                for i in range(0, tmem, 4)
            ),
            "tcgen05.wait::st.sync.aligned;" * self.waits,
            f"mul.wide.u32 %a, %rank, {nbytes}; mul.wide.u32 %b, %tid, 4; add.u64 %a, %a, %b;",
            f"add.u64 %a, %a, %src; add.u64 %a, %a, {self.tmem.nbytes}; shl.b32 %y, %tid, 2; add.u32 %y, %y, %base;",
            "COPY: setp.ge.u32 %p1, %y, %slot; @%p1 bra COPIED;",
            "ld.global.b32 %x0, [%a]; st.shared.b32 [%y], %x0; add.u64 %a, %a, 512; add.u32 %y, %y, 512; bra COPY;",
            "COPIED: " + "fence.proxy.async;" * self.fence,
            f"{BEFORE} {sync} {AFTER}",
            # One thread works, then all warps do.
            *("@!%lead bra ISSUED;", *self.body, commit * self.commit, "ISSUED: bar.warp.sync 0xffffffff;"),
            *(done * self.commit, *self.warps),
            # Results are stored: columns, then registers.
            "tcgen05.wait::ld.sync.aligned;" * (self.results > 0),
            _row("%dst", self.columns),
            *(
                f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {z}, [%taddr+{self.first + i}]; tcgen05.wait::ld.sync.aligned; "
                f"st.global.v4.b32 [%a+{4 * i}], {z};"
                for i in range(0, self.columns, 4)
            ),
            f"{_row('%dst', self.results)} add.u64 %a, %a, {self.group * 128 * 4 * self.columns};",
            *(f"st.global.b32 [%a+{4 * i}], %x{i};" for i in range(self.results)),
            f"{BEFORE} {sync} @!%p0 bra END;",
            f"ld.shared.b32 %y, [%slot]; tcgen05.dealloc.{group}.sync.aligned.b32 %y, 512;" * self.free,
            f"tcgen05.relinquish_alloc_permit.{group}.sync.aligned; END:",
        ]
        return blackwell.text(threads=128, smem=nbytes + 1024, cluster=self.group).add(*lines).ptx()

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


def _row(base: str, words: int) -> str:
    """Put the address of a thread's row of so many words into %a."""
    return f"mad.lo.u32 %y, %rank, 128, %tid; mul.wide.u32 %a, %y, {4 * words}; add.u64 %a, %a, {base};"


def registers(count: int) -> str:
    return "{" + ",".join(f"%x{i}" for i in range(count)) + "}"
