"""Which instruction forms ptxas takes for which architectures: the emulator must take and refuse the same.

Each row is a line of PTX (registers: `tests/support/ptxas.py`; `R8` stands for a vector of eight) and the architectures
that have it. Rows without architectures exist nowhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
ALL, BLACKWELL, SERVERS, B200, B300 = ARCHS, ARCHS[1:], ("sm_100a", "sm_103a"), ("sm_100a",), ("sm_103a",)


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


_ROWS4 = "[l0, {r1,r2,r3,r4,r5}]"
_GATHER = ".global.tile::gather4.mbarrier::complete_tx::bytes"

TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    # --- TMA
    (
        f"""
        cp.async.bulk.tensor.2d.shared::cta{_GATHER} [r0], {_ROWS4}, [r6];
        cp.async.bulk.tensor.2d.shared::cta{_GATHER}.L2::cache_hint [r0], {_ROWS4}, [r6], l1;
        """,
        BLACKWELL,
    ),
    (
        f"""
        cp.async.bulk.tensor.2d.shared::cta{_GATHER}.cta_group::1 [r0], {_ROWS4}, [r6];
        cp.async.bulk.tensor.2d.shared::cta{_GATHER}.cta_group::2 [r0], {_ROWS4}, [r6];
        cp.async.bulk.tensor.2d.shared::cta{_GATHER}.cta_group::2.L2::cache_hint [r0], {_ROWS4}, [r6], l1;
        cp.async.bulk.tensor.2d.shared::cta{_GATHER}.L2::cache_hint.cta_group::2 [r0], {_ROWS4}, [r6], l1;
        cp.async.bulk.tensor.2d.shared::cluster{_GATHER} [r0], {_ROWS4}, [r6];
        cp.async.bulk.tensor.2d.shared::cluster{_GATHER}.L2::cache_hint [r0], {_ROWS4}, [r6], l1;
        cp.async.bulk.tensor.2d.shared::cluster{_GATHER}.cta_group::2 [r0], {_ROWS4}, [r6];
        cp.async.bulk.tensor.2d.shared::cluster{_GATHER}.multicast::cluster [r0], {_ROWS4}, [r6], h0;
        cp.async.bulk.tensor.2d.shared::cluster{_GATHER}.multicast::cluster.cta_group::2.L2::cache_hint \
            [r0], {_ROWS4}, [r6], h0, l1;
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 {_ROWS4};
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4.L2::cache_hint {_ROWS4}, l1;
        cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group {_ROWS4}, [r6];
        cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group.L2::cache_hint {_ROWS4}, [r6], l1;
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.cta_group::2 \
            [r0], [l0, {{r1,r2}}], [r6];
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::1 \
            [r0], [l0, {{r1,r2}}], [r6];
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint.cta_group::2 \
            [r0], [l0, {{r1,r2}}], [r6], l1;
        """,
        SERVERS,
    ),
    (
        f"""
        cp.async.bulk.tensor.2d.shared::cta{_GATHER}.multicast::cluster [r0], {_ROWS4}, [r6], h0;
        cp.async.bulk.tensor.3d.shared::cta{_GATHER} [r0], {_ROWS4}, [r6];
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.multicast::cluster \
            [r0], [l0, {{r1,r2}}], [r6], h0;
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
        st.global.v4.b64 [l0], {l0,l1,l2,l3};
        st.global.v4.f64 [l0], {l0,l1,l2,l3};
        st.v8.b32 [l0], R8;
        st.weak.global.v8.b32 [l0], R8;
        st.relaxed.gpu.global.v8.u32 [l0], R8;
        st.volatile.global.v8.b32 [l0], R8;
        st.global.cs.v8.b32 [l0], R8;
        st.global.L1::no_allocate.L2::cache_hint.v8.b32 [l0], R8, l1;
        st.global.L1::evict_last.L2::evict_first.v4.u64 [l0], {l0,l1,l2,l3};
        st.global.v8.b32 [l0], {r0,_,r1,r2,r3,r4,_,r5};
        ld.global.v8.b32 R8, [l0];
        ld.global.v8.f32 R8, [l0];
        ld.global.v4.b64 {l1,l2,l3,l4}, [l0];
        ld.v8.b32 R8, [l0];
        ld.v4.b64 {l1,l2,l3,l4}, [l0];
        ld.global.nc.v8.b32 R8, [l0];
        ld.global.nc.L1::no_allocate.L2::evict_last.L2::256B.v4.b64 {l1,l2,l3,l4}, [l0];
        ld.global.L1::no_allocate.v8.f32 R8, [l0];
        ld.global.L2::evict_last.v8.f32 {f0,_,f2,f3,f4,f5,f6,f7}, [l0];
        ld.global.L2::cache_hint.v8.b32 R8, [l0], l1;
        ld.relaxed.gpu.global.v8.b32 R8, [l0];
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
    (
        """
        cvt.rs.f16x2.f32 r1, f0, f1, r2;
        cvt.rs.relu.satfinite.f16x2.f32 r1, f0, f1, r2;
        cvt.rs.satfinite.relu.bf16x2.f32 r1, f0, f1, r2;
        cvt.rs.bf16x2.f32 r1, f0, f1, r2;
        cvt.rs.satfinite.e4m3x4.f32 r1, {f0,f1,f2,f3}, r2;
        cvt.rs.relu.satfinite.e5m2x4.f32 r1, {f0,f1,f2,f3}, r2;
        cvt.rs.satfinite.relu.e2m3x4.f32 r1, {f0,f1,f2,f3}, r2;
        cvt.rs.satfinite.e3m2x4.f32 r1, {f0,f1,f2,f3}, r2;
        cvt.rs.satfinite.e2m1x4.f32 h0, {f0,f1,f2,f3}, r2;
        """,
        SERVERS,
    ),
    (
        """
        cvt.rs.e4m3x4.f32 r1, {f0,f1,f2,f3}, r2;
        cvt.rn.satfinite.e4m3x4.f32 r1, {f0,f1,f2,f3};
        """,
        (),
    ),
    (
        """
        cvt.rn.satfinite.e2m1x2.f16x2 c0, r1;
        cvt.rn.satfinite.relu.e2m1x2.bf16x2 c0, r1;
        cvt.rn.satfinite.e2m3x2.f16x2 h0, r1;
        cvt.rn.satfinite.e3m2x2.bf16x2 h0, r1;
        cvt.rn.satfinite.e4m3x2.bf16x2 h0, r1;
        cvt.rn.satfinite.relu.e5m2x2.bf16x2 h0, r1;
        cvt.rn.satfinite.e2m1x2.f32 c0, f0, f1;
        cvt.rn.satfinite.relu.e2m1x2.f32 c0, f0, f1;
        cvt.rn.satfinite.e2m3x2.f32 h0, f0, f1;
        cvt.rn.f16x2.e2m1x2 r1, c0;
        cvt.rn.f16x2.e2m3x2 r1, h0;
        cvt.rn.bf16x2.e2m1x2 r1, c0;
        cvt.rn.relu.bf16x2.e2m1x2 r1, c0;
        cvt.rn.bf16x2.e4m3x2 r1, h0;
        cvt.rn.relu.bf16x2.e5m2x2 r1, h0;
        cvt.rn.bf16x2.e2m3x2 r1, h0;
        cvt.rn.relu.bf16x2.e3m2x2 r1, h0;
        cvt.rz.satfinite.ue8m0x2.f32 h0, f0, f1;
        cvt.rp.satfinite.ue8m0x2.f32 h0, f0, f1;
        cvt.rn.bf16x2.ue8m0x2 r1, h0;
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
    (
        """
        redux.sync.max.f32 f0, f1, 0xffffffff;
        redux.sync.min.abs.f32 f0, f1, 0xffffffff;
        redux.sync.min.NaN.f32 f0, f1, 0xffffffff;
        redux.sync.max.abs.NaN.f32 f0, f1, 0xffffffff;
        redux.sync.max.NaN.abs.f32 f0, f1, 0xffffffff;
        """,
        SERVERS,
    ),
    # --- tensor memory
    (
        """
        tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 R2, r1, [r0];
        tcgen05.ld.red.sync.aligned.32x32b.x32.min.abs.NaN.f32 R32, r1, [r0];
        tcgen05.ld.red.sync.aligned.32x32b.x32.max.NaN.f32 R32, r1, [r0];
        tcgen05.ld.red.sync.aligned.32x32b.x128.max.abs.f32 R128, r1, [r0];
        tcgen05.ld.red.sync.aligned.16x32bx2.x8.max.f32 R8, r1, [r0], 16;
        tcgen05.ld.red.sync.aligned.32x32b.x2.max.u32 R2, r1, [r0];
        tcgen05.ld.red.sync.aligned.32x32b.x2.s32.min R2, r1, [r0];
        """,
        B300,
    ),
    (
        """
        tcgen05.ld.red.sync.aligned.32x32b.x1.max.f32 {r2}, r1, [r0];
        tcgen05.ld.red.sync.aligned.32x32b.x2.max.abs.s32 R2, r1, [r0];
        tcgen05.ld.red.sync.aligned.16x64b.x2.max.f32 R2, r1, [r0];
        tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32.pack::16b R2, r1, [r0];
        tcgen05.cp.cta_group::1.64x128b [r0], l1;
        """,
        (),
    ),
    (
        """
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r0], 512;
        tcgen05.ld.sync.aligned.32x32b.x32.b32 R32, [r0];
        tcgen05.ld.sync.aligned.16x256b.x8.b32 R32, [r0];
        tcgen05.st.sync.aligned.32x32b.x16.unpack::16b.b32 [r0], R16;
        tcgen05.wait::ld.sync.aligned;
        tcgen05.fence::before_thread_sync;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [r0];
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [l0];
        tcgen05.cp.cta_group::1.128x256b [r0], l1;
        tcgen05.cp.cta_group::1.32x128b.warpx4 [r0], l1;
        tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [r0], l1;
        tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [r0], l1;
        tcgen05.cp.cta_group::2.64x128b.warpx2::01_23.b8x16.b6x16_p32 [r0], l1;
        tcgen05.mma.ws.cta_group::1.kind::f16 [r0], l1, l2, r1, p;
        tcgen05.mma.ws.cta_group::1.kind::f16.collector::b3::lastuse [r0], [r1], l2, r1, p, l3;
        tcgen05.mma.ws.cta_group::1.kind::f8f6f4.collector::b1::use [r0], l1, l2, r1, p;
        tcgen05.mma.cta_group::1.kind::f16 [r0], l1, l2, r1, p;
        tcgen05.mma.cta_group::1.kind::f16.collector::a::fill [r0], [r1], l2, r1, p;
        tcgen05.mma.cta_group::1.kind::f8f6f4 [r0], l1, l2, r1, p;
        tcgen05.mma.cta_group::1.kind::tf32 [r0], l1, l2, r1, p, 3;
        tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [r0], l1, l2, r1, [r2], [r3], p;
        tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [r0], l1, l2, r1, [r2], [r3], p;
        tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [r0], l1, l2, r1, [r2], [r3], p;
        """,
        SERVERS,
    ),
    ("tcgen05.mma.cta_group::1.kind::i8 [r0], l1, l2, r1, p;", B200),
    ("tcgen05.mma.cta_group::2.kind::i8 [r0], [r2], l2, r1, p;", B200),
    ("tcgen05.mma.ws.cta_group::1.kind::i8 [r0], l1, l2, r1, p;", B200),
    ("tcgen05.mma.ws.cta_group::2.kind::f16 [r0], l1, l2, r1, p;", ()),
    ("tcgen05.mma.cta_group::1.kind::mxf8f6f4 [r0], l1, l2, r1, [r2], [r3], p;", ()),
    # --- tensor maps
    (
        """
        tensormap.replace.tile.global_address.global.b1024.b64 [l0], l1;
        tensormap.replace.tile.global_address.b1024.b64 [l0], l1;
        tensormap.replace.tile.global_address.shared::cta.b1024.b64 [r0], l1;
        tensormap.replace.tile.rank.shared::cta.b1024.b32 [r0], r1;
        tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [r0], 0, r1;
        tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [r0], 4, r1;
        tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [r0], 3, l1;
        tensormap.replace.tile.element_stride.global.b1024.b32 [l0], 0, r1;
        tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [r0], 10;
        tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [r0], 0;
        tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [r0], 3;
        tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [r0], 1;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [l0], [r0], 128;
        fence.proxy.tensormap::generic.acquire.gpu [l0], 128;
        fence.proxy.tensormap::generic.release.gpu;
        """,
        ALL,
    ),
    ("tensormap.replace.tile.swizzle_atomicity.shared::cta.b1024.b32 [r0], 0;", BLACKWELL),
    (
        """
        tensormap.replace.tile.global_address.shared.b1024.b64 [r0], l1;
        tensormap.replace.tile.global_stride.shared::cta.b1024.b32 [r0], 0, r1;
        """,
        (),
    ),
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

# Forms that the emulator leaves out: ptxas takes them, the emulator names them as unknown.
LEFT_OUT = """
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
