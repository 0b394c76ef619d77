"""One plan renews the schedules of all layers in a captured graph, whose heads and options differ."""

from __future__ import annotations

import dataclasses

import pytest

from cute_attn.emulator.settings import using
from tests.support.batch_case import BatchCase, decode, heads, make, paged, plan_arguments, ragged
from tests.support.engine_case import workspace
from tests.support.engine_graphs import LAYERS, CapturedLayers
from tests.support.graphs import Captured, emulated_graph

pytestmark = pytest.mark.emulator

CASES = [
    paged((2, 3), (20, 9), page_size=4, **heads(4, 2)),
    ragged((2, 3), (20, 9), **heads(4, 2)),
    decode((20, 9), page_size=4, **heads(4, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=["paged", "ragged", "decode"])
def test_layers_of_one_plan(case: BatchCase) -> None:
    with using("sm_90a", kernels="fa2", sms=1):
        captured = CapturedLayers(case, "cpu", emulated_graph, LAYERS[1:3], backend="emulator")
        captured.replay(dataclasses.replace(case, kv_lens=(7, 18), seed=3))


@pytest.mark.parametrize("kernels", ["fa2", "xqa"])
def test_a_plan_of_padding_alone_is_captured(kernels: str) -> None:
    """Engines capture decode before there is a request: no request of the first plan has keys."""
    case = decode((37, 9, 20), page_size=4, **heads(4, 2))
    nobody = dataclasses.replace(case, kv_lens=(0, 0, 0))
    with using("sm_90a", kernels=kernels, sms=2):
        captured = Captured(case, "cpu", emulated_graph, backend="emulator")
        captured.wrapper.reset_workspace_buffer(workspace("cpu"))  # the next plan is a first one
        captured.wrapper.plan(**plan_arguments(nobody, make(nobody)))
        captured.run()
        (captured.out, captured.lse), captured.again = emulated_graph(captured.run)
        for kv_lens in (case.kv_lens, (0, 36, 1)):
            captured.replay(dataclasses.replace(case, kv_lens=kv_lens, seed=sum(kv_lens)))
