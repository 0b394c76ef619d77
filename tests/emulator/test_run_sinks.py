"""Repeated runs of one plan with other sinks in each: kernels read those of the run, whole or split keys."""

from __future__ import annotations

import dataclasses

import pytest

from cute_attn.emulator import using
from cute_attn.request import batch_run
from tests.support import batch_case
from tests.support.batch_case import BatchCase, decode, dims, heads, paged
from tests.support.right import assert_right

pytestmark = pytest.mark.emulator

CASES = {
    "fa2": paged((5, 17), (300, 33), page_size=4, mask="causal", sinks=True, **heads(4, 2)),
    "fa3": paged((70, 3), (300, 33), page_size=16, mask="causal", sinks=True, **heads(4, 2), **dims(64)),
    "xqa": decode((300, 3, 90), sinks=True, **heads(8, 2), **dims(64)),
}


@pytest.mark.parametrize("kernels", CASES)
def test_each_run_has_its_sinks(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case: BatchCase = CASES[kernels]
    inputs, full, problem = batch_case.make(case), [], batch_run.problem
    monkeypatch.setattr(batch_run, "problem", lambda *given: full.append(given) or problem(*given))
    with using("sm_90a", kernels=kernels, sms=8) as emulation:
        planned = batch_case.wrapper(case, backend="emulator")
        planned.plan(**batch_case.plan_arguments(case, inputs))
        for _ in range(3):
            now = dataclasses.replace(inputs, sinks=inputs.sinks + len(full))
            inputs = dataclasses.replace(inputs, sinks=inputs.sinks.flip(0).clone())
            assert_right(case, now, *batch_case.call(case, now, planned))
    assert len(full) == 1
    assert {record.spec["kernel"] for record in emulation.records} >= {kernels}
