"""clusterlaunchcontrol: clusters take over the work of others that have not started."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cute_attn.emulator import run
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.machine import Schedule
from cute_attn.emulator.memory import GlobalMemory

pytestmark = pytest.mark.emulator

# Every warp adds 1 to the cell of its own CTA, then to those of the CTAs whose launch it cancels, and counts them in
# the last cell. Of a pair, both CTAs get the answer to the question of the first.
TEXT = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry kernel(.param .u64 p_out, .param .u32 p_cells)
{
.reg .pred %p<4>; .reg .b32 %r<20>; .reg .b64 %d<8>; .reg .b128 %h;
mov.u32 %r0, dynamic; add.u32 %r1, %r0, 16;
mov.u32 %r2, %tid.x; setp.eq.u32 %p0, %r2, 0;
@%p0 mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %cluster_ctarank;
setp.eq.u32 %p1, %r6, 0; and.pred %p1, %p1, %p0;
ld.param.u64 %d0, [p_out]; ld.param.u32 %r7, [p_cells]; mov.u32 %r8, 0;
WORK:
mad.lo.u32 %r9, %r4, %r5, %r3; mul.wide.u32 %d1, %r9, 4; add.u64 %d1, %d0, %d1;
@%p0 red.global.add.u32 [%d1], 1;
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
barrier.cluster.arrive; barrier.cluster.wait;
@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128
  [%r0], [%r1];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r8;
@!%p2 bra WAIT;
xor.b32 %r8, %r8, 1;
ld.shared.v2.b64 {%d2, %d3}, [%r0]; mov.b128 %h, {%d2, %d3};
barrier.cluster.arrive; barrier.cluster.wait;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %h;
@!%p3 bra END;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r3, %r4, %r10, %r11}, %h;
add.u32 %r3, %r3, %r6;
mul.wide.u32 %d1, %r7, 4; add.u64 %d1, %d0, %d1;
@%p0 red.global.add.u32 [%d1], 1;
bra WORK;
END: ret;
}
"""


def _launch(grid: tuple[int, int, int], ctas: int, kind: str) -> Array:
    cells = int(np.prod(grid))
    out = np.zeros(cells + 1, np.uint32)
    memory = GlobalMemory()
    memory.add("out", 1 << 40, out.nbytes, data=out.view(np.uint8))
    description = {
        "symbol": "kernel",
        "grid": grid,
        "block": (32, 1, 1),
        "cluster": (ctas, 1, 1),
        "smem_bytes": 32,
        "params": struct.pack("<QI", 1 << 40, cells),
    }
    run.launch(TEXT, description, memory, schedule=Schedule(kind, 1))
    return out


@pytest.mark.parametrize("kind", ["eager", "delayed", "adversarial"])
@pytest.mark.parametrize(("grid", "ctas"), [((5, 2, 1), 1), ((6, 3, 1), 2), ((1, 1, 1), 1)])
def test_every_tile_is_done_once(grid: tuple[int, int, int], ctas: int, kind: str) -> None:
    out = _launch(grid, ctas, kind)
    np.testing.assert_array_equal(out[:-1], 1)
    if kind == "eager":
        assert (out[-1] > 0) == (len(out) - 1 > ctas)  # some were taken over
