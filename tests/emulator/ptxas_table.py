"""Which instruction forms ptxas takes for which architectures: the emulator must take and refuse the same.

Each row is a line of PTX (registers: `tests/support/ptxas.py`; `R8` stands for a vector of eight) and the architectures
that have it. Rows without architectures exist nowhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
ALL, BLACKWELL, SERVERS = ARCHS, ARCHS[1:], ("sm_100a", "sm_103a")


@dataclass(frozen=True)
class Row:
    line: str
    archs: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return self.line.split()[0].rstrip(";")


def rows() -> list[Row]:
    """All rows."""
    found = []
    for block, archs in TABLE:
        for line in block.strip().splitlines():
            found.append(Row(re.sub(r"\bR(\d+)\b", _vector, line.strip()), archs))
    return found


def _vector(match: re.Match[str]) -> str:
    return "{" + ",".join(f"r{8 + i}" for i in range(int(match[1]))) + "}"


TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    # --- TMA
    (
        """
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::1 \
            [r0], [l0, {r1,r2}], [r6];
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint.cta_group::2 \
            [r0], [l0, {r1,r2}], [r6], l1;
        """,
        SERVERS,
    ),
    (
        """
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.multicast::cluster \
            [r0], [l0, {r1,r2}], [r6], h0;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.multicast::cluster [r0], [l0], 16, [r1], h0;
        """,
        (),
    ),
    (
        """
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [r0], [l0, {r1,r2}], [r6];
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint \
            [r0], [l0, {r1,r2}], [r6], h0, l1;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r0], [l0], 16, [r1];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [r0], [l0], 16, [r1], h0;
        """,
        ALL,
    ),
    # --- 256 bits
    (
        """
        st.global.v8.b32 [l0], R8;
        st.global.v8.f32 [l0], R8;
        """,
        BLACKWELL,
    ),
    (
        """
        st.shared.v8.b32 [r0], R8;
        st.shared.v4.b64 [r0], {l0,l1,l2,l3};
        ld.shared.v8.b32 R8, [r0];
        ld.shared.v4.b64 {l1,l2,l3,l4}, [r0];
        """,
        (),
    ),
    ("ld.global.v4.b32 R4, [l0];\nld.shared.v2.b64 {l1,l2}, [r0];\nst.global.v2.f64 [l0], {l1,l2};", ALL),
    # --- conversions
    ("cvt.rn.satfinite.e4m3x4.f32 r1, {f0,f1,f2,f3};", ()),
    (
        """
        cvt.rn.satfinite.e2m1x2.f32 c0, f0, f1;
        cvt.rn.satfinite.relu.e2m1x2.f32 c0, f0, f1;
        cvt.rn.f16x2.e2m1x2 r1, c0;
        cvt.rn.bf16x2.e2m1x2 r1, c0;
        cvt.rn.relu.bf16x2.e2m1x2 r1, c0;
        cvt.rn.bf16x2.e4m3x2 r1, h0;
        cvt.rn.relu.bf16x2.e5m2x2 r1, h0;
        add.rn.f32x2 l0, l1, l2;
        sub.rz.ftz.f32x2 l0, l1, l2;
        mul.rm.f32x2 l0, l1, l2;
        fma.rn.f32x2 l0, l1, l2, l3;
        """,
        BLACKWELL,
    ),
    (
        """
        cvt.rn.f16x2.e4m3x2 r1, h0;
        cvt.rn.satfinite.e4m3x2.f16x2 h0, r1;
        cvt.rn.satfinite.relu.e5m2x2.f32 h0, f0, f1;
        ex2.approx.ftz.bf16x2 r1, r2;
        tanh.approx.bf16x2 r1, r2;
        ex2.approx.f16x2 r1, r2;
        redux.sync.max.s32 r1, r2, 0xffffffff;
        """,
        ALL,
    ),
    (
        """
        max.f32x2 l0, l1, l2;
        ex2.approx.ftz.f16x2 r1, r2;
        ex2.approx.bf16x2 r1, r2;
        redux.sync.add.f32 f0, f1, 0xffffffff;
        """,
        (),
    ),
    # --- tensor memory
    ("tcgen05.cp.cta_group::1.64x128b [r0], l1;", ()),
    (
        """
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r0], 512;
        tcgen05.ld.sync.aligned.32x32b.x32.b32 R32, [r0];
        tcgen05.st.sync.aligned.32x32b.x16.b32 [r0], R16;
        tcgen05.wait::ld.sync.aligned;
        tcgen05.fence::before_thread_sync;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [r0];
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [l0];
        tcgen05.mma.cta_group::1.kind::f16 [r0], l1, l2, r1, p;
        tcgen05.mma.cta_group::1.kind::f8f6f4 [r0], l1, l2, r1, p;
        """,
        SERVERS,
    ),
    ("tcgen05.mma.ws.cta_group::2.kind::f16 [r0], l1, l2, r1, p;", ()),
    ("tcgen05.mma.cta_group::1.kind::mxf8f6f4 [r0], l1, l2, r1, [r2], [r3], p;", ()),
    # --- matrices
    (
        """
        ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {r1,r2}, [r0];
        ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {r1,r2,r3,r4}, [r0];
        ldmatrix.sync.aligned.m16n16.x2.trans.shared::cta.b8 {r1,r2,r3,r4}, [r0];
        """,
        BLACKWELL,
    ),
    (
        """
        ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8 {r1,r2,r3,r4}, [r0];
        ldmatrix.sync.aligned.m16n16.x2.shared.b8 {r1,r2,r3,r4}, [r0];
        """,
        (),
    ),
    # --- of other architectures
    ("wgmma.fence.sync.aligned;\nwgmma.commit_group.sync.aligned;", ARCHS[:1]),
    (
        """
        clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [r0], [r1];
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, w0;
        """,
        BLACKWELL,
    ),
)

# Forms that the emulator leaves out, because no kernel of ours and no published one of the corpus has them: ptxas takes
# them, the emulator names them as unknown.
LEFT_OUT = """
cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 [l0, {r1,r2,r3,r4,r5}];
cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [l0, {r1,r2,r3,r4,r5}], [r6];
tensormap.replace.tile.global_address.global.b1024.b64 [l0], l1;
ld.global.v4.b64 {l1,l2,l3,l4}, [l0];
st.global.v4.b64 [l0], {l0,l1,l2,l3};
cvt.rs.f16x2.f32 r1, f0, f1, r2;
cvt.rn.satfinite.e2m3x2.f32 h0, f0, f1;
cvt.rn.satfinite.e2m1x2.f16x2 c0, r1;
cvt.rz.satfinite.ue8m0x2.f32 h0, f0, f1;
redux.sync.max.f32 f0, f1, 0xffffffff;
tcgen05.ld.sync.aligned.16x256b.x1.b32 {r8,r9,r10,r11}, [r0];
tcgen05.cp.cta_group::1.128x256b [r0], l1;
tcgen05.mma.ws.cta_group::1.kind::f16 [r0], l1, l2, r1, p;
tcgen05.mma.cta_group::1.kind::f16.collector::a::fill [r0], [r1], l2, r1, p;
tcgen05.mma.cta_group::1.kind::tf32 [r0], l1, l2, r1, p;
tcgen05.mma.cta_group::1.kind::i8 [r0], l1, l2, r1, p;
tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [r0], l1, l2, r1, [r2], [r3], p;
tcgen05.mma.sp.cta_group::1.kind::f16 [r0], l1, l2, [r2], r1, p;
tcgen05.mma.ws.sp.cta_group::1.kind::f16 [r0], l1, l2, [r2], r1, p;
tcgen05.mma.cta_group::1.kind::f16.ashift [r0], [r1], l2, r1, p;
tcgen05.shift.cta_group::1.down [r0];
tcgen05.cp.cta_group::1.4x256b [r0], l1;
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile::scatter4.bulk_group [l0, {r1,r2,r3,r4,r5}], [r6];
cvt.rp.satfinite.ue8m0x2.bf16x2 h0, r1;
cvt.rz.ue8m0x2.f32 h0, f0, f1;
mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32 {f0,f1,f2,f3}, {r0,r1,r2,r3}, {r4,r5}, {f4,f5,f6,f7};
ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8x16.b4x16_p64 {r1,r2,r3,r4}, [r0];
multimem.ld_reduce.relaxed.gpu.global.add.f32 f0, [l0];
ld.shared.b128 w0, [r0];
""".strip().splitlines()
