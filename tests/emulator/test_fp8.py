"""q, k and v in fp8, from PTX: every element within what the rounding of probabilities explains. Outputs in fp8, which
are rounded once.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_attn import single_prefill_with_kv_cache
from cute_attn.emulator import Schedule, narrow_sums, using
from cute_attn.emulator.isa import mma
from cute_attn.emulator.warp_batch import WarpBatch
from tests.support import narrow_outputs
from tests.support.batch_case import E5M2, BatchCase, features
from tests.support.cover import needed
from tests.support.fp8_case import CUT, LONG, SIGNED, SMALL, VARIED, fp8, single
from tests.support.matrix import CAUSAL
from tests.support.persistent_emulated import TARGETS, Target, assert_cut, name, solve_on
from tests.support.right import emulate, families
from tests.support.schedules import ALL_SCHEDULES, all_alike, in_turn

pytestmark = pytest.mark.emulator

FA2 = Target("fa2", "sm_120a", ALL_SCHEDULES, "")
# Decode tiles, whose warps merge; a key far above all others in every tile of a row
DECODE: tuple[BatchCase, ...] = (
    fp8((1,) * 4, (300, 20, 64, 129), (8, 2), 16, **SIGNED),
    fp8((1, 1, 0), (130, 70, 9), (4, 1), head_dim=64, dtype=E5M2, sinks=True),
    single(3, 200, (2, 1), head_dim=256, **CAUSAL, o_dtype="float32"),
    fp8((70,), (400,), (4, 4), spike=100.0, **CAUSAL, sm_scale=1.0),
)
NEEDED = {target: needed((*SMALL, *VARIED), features, (*LONG, *CUT)) for target in TARGETS}
NEEDED[FA2] = needed((*DECODE, *SMALL, *VARIED), features, (*LONG, *CUT))


@pytest.mark.parametrize(
    ("target", "case", "schedule"), [(on, *turn) for on, cases in NEEDED.items() for turn in in_turn(cases)], ids=name
)
def test_fp8(target: Target, case: BatchCase, schedule: Schedule) -> None:
    """fa2's products are those of 8 bits."""
    emulation = solve_on(target, case, schedule, sms=3)
    assert families(emulation) in ([target.kernels], ["fa2", "combine"])
    forms = {form for record in emulation.records for form in record.stats.instructions if form.startswith("mma.sync")}
    assert bool(forms) == (target is FA2)
    assert all(".m16n8k32." in form for form in forms)


@pytest.mark.parametrize("case", LONG, ids=name)
@pytest.mark.parametrize("target", NEEDED, ids=name)
def test_many_tiles(target: Target, case: BatchCase) -> None:
    assert families(solve_on(target, case, Schedule(), sms=1))[0] == target.kernels


@pytest.mark.parametrize(("case", "schedule"), in_turn(CUT), ids=name)
@pytest.mark.parametrize("target", NEEDED, ids=name)
def test_cut_keys(target: Target, case: BatchCase, schedule: Schedule) -> None:
    """Partial outputs hold the scale of their head; their merge applies what is left."""
    assert_cut(target, solve_on(target, case, schedule, sms=16))


@pytest.mark.parametrize(("problem", "schedule"), in_turn(narrow_outputs.PROBLEMS, structure=all_alike), ids=name)
def test_narrow_outputs_are_rounded_once(problem: BatchCase, schedule: Schedule) -> None:
    """On the wgmma kernels, and by the merge of their partials."""
    with using("sm_90a", kernels="fa3", schedule=schedule, sms=8):
        narrow_outputs.assert_rounded(problem, "cpu", "emulator")


# --- fa2 on GPUs of sm_120a, for which "auto" takes it ----------------------------------------------------------------


def test_sums_of_14_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these chips' sums of fp8 products lose is not known; with as few bits as Hopper's, the bounds hold."""

    def multiply_add(w: WarpBatch, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        warps = len(w.warps)
        old = c.reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8)
        sums = [narrow_sums.multiply_add(a[i : i + 1], b[i], old[i : i + 1]) for i in range(warps)]
        calls.append(warps)
        return np.concatenate(sums).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, w.size)

    calls: list[int] = []
    monkeypatch.setattr(mma, "_multiply_add", multiply_add)
    emulate(LONG[0], FA2.arch, sms=1)
    assert calls


@pytest.mark.parametrize("schedule", ALL_SCHEDULES, ids=name)
def test_hidden_and_misaligned_keys(schedule: Schedule) -> None:
    """Hidden keys of K may be NaN; rows of k and v may start at multiples of 8 bytes."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(70, 2, 64, generator=generator).to(torch.float8_e4m3fn)
    k, v = (torch.randn(200, 2, 72, generator=generator).to(torch.float8_e4m3fn)[..., :64] for _ in range(2))
    expected = single_prefill_with_kv_cache(q, k, v, causal=True, window_left=50, backend="reference")
    k[:79] = torch.nan  # the first row sees the keys from 80 on
    with using(FA2.arch, schedule=schedule, sms=3) as emulation:
        out = single_prefill_with_kv_cache(q, k, v, causal=True, window_left=50, backend="emulator")
    assert {record.spec.get("kv_copy_bytes", 8) for record in emulation.records} == {8}
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.07, atol=0.07)
