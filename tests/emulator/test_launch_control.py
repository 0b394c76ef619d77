"""clusterlaunchcontrol: clusters take over the work of others that have not started."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cute_attn.emulator import Schedule
from tests.emulator.micro import blackwell, emulate
from tests.emulator.micro.case import Case, Text

pytestmark = pytest.mark.emulator


def _kernel(cells: int, ctas: int) -> Text:
    """Every warp adds 1 to the cell of its own CTA, then to those of the CTAs whose launch it cancels, which it counts
    in the last cell. Of a pair, both CTAs get the answer to the question of the first.
    """
    return blackwell.text(threads=32, smem=32, cluster=ctas).add(
        ".reg .b128 %answer;",
        "mov.u32 %r0, sm; add.u32 %r1, %r0, 16; setp.eq.u32 %p0, %me, 0;",
        "@%p0 mbarrier.init.shared.b64 [%r1], 1;",
        "fence.mbarrier_init.release.cluster;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %cluster_ctarank;",
        "setp.eq.u32 %p1, %r6, 0; and.pred %p1, %p1, %p0; mov.u32 %r8, 0;",
        "WORK:",
        "mad.lo.u32 %r9, %r4, %r5, %r3; mad.wide.u32 %rd1, %r9, 4, %dst;",
        "@%p0 red.global.add.u32 [%rd1], 1;",
        "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        ".multicast::cluster::all.b128 [%r0], [%r1];",
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r8; @!%p2 bra WAIT;",
        "xor.b32 %r8, %r8, 1;",
        "ld.shared.v2.b64 {%rd2, %rd3}, [%r0]; mov.b128 %answer, {%rd2, %rd3};",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %answer;",
        "@!%p3 bra END;",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r3, %r4, %r10, %r11}, %answer;",
        "add.u32 %r3, %r3, %r6;",
        f"@%p0 red.global.add.u32 [%dst+{4 * cells}], 1;",
        "bra WORK;",
        "END:",
    )


@pytest.mark.parametrize("kind", ["eager", "delayed", "adversarial"])
@pytest.mark.parametrize(("grid", "ctas"), [((5, 2, 1), 1), ((6, 3, 1), 2), ((1, 1, 1), 1)])
def test_every_tile_is_done_once(grid: tuple[int, int, int], ctas: int, kind: str) -> None:
    cells = math.prod(grid)
    case = Case("launch", "control", _kernel(cells, ctas).ptx(), bytes(16), 4 * cells + 4, cluster=ctas)
    out = np.frombuffer(emulate.run(case, schedule=Schedule(kind, 1), grid=grid), np.uint32)
    np.testing.assert_array_equal(out[:-1], 1)
    if kind == "eager":
        assert (out[-1] > 0) == (cells > ctas)  # some were taken over
