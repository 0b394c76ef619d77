"""Pages of the Blackwell kernel by every source of keys, and outputs by both ways to global memory, on the emulator."""

from __future__ import annotations

import pytest

from cute_attn.emulator import Schedule
from tests.support.batch_case import BatchCase, dims, heads, paged, ragged
from tests.support.persistent_emulated import FA4, name, solve_on
from tests.support.right import executed
from tests.support.schedules import in_turn

pytestmark = pytest.mark.emulator

LENGTHS = ((130, 0, 9, 70), (270, 33, 129, 0))  # whole query tiles, ragged ends, a request without keys
# NaN in the rest of pages, and behind rows and heads; what the batches of all persistent kernels do not have.
PAGES: tuple[BatchCase, ...] = (
    paged(*LENGTHS, 3, kv_layout="HND", cache="strided", slack=True, **heads(4, 2), **dims(128)),
    paged(*LENGTHS, 4, mask="custom", cache="strided", dtype="bfloat16", **heads(2, 2), **dims(128)),
    paged((60, 9), (270, 129), 1, mask="causal", kv_layout="HND", **heads(6, 2), **dims(192, 128)),
    paged((60, 9), (270, 129), 5, window_left=100, **heads(3, 3), **dims(80)),
    paged((60, 9), (270, 129), 5, kv_layout="HND", cache="strided", **heads(3, 3), **dims(72)),
)
BOXES: tuple[BatchCase, ...] = (  # ends of requests within V tiles, which are cleared
    paged(*LENGTHS, 64, kv_layout="HND", cache="one", slack=True, **heads(2, 1), **dims(128)),
    paged(*LENGTHS, 128, mask="custom", cache="strided", dtype="bfloat16", **heads(2, 2), **dims(80)),
    paged((60, 9), (270, 129), 32, mask="causal", cache="strided", **heads(6, 2), **dims(192, 128)),  # one stage of V
)
OUTPUTS: tuple[tuple[BatchCase, bool], ...] = (  # and whether query tiles are stored by TMA
    (ragged((300, 0, 129, 128), (270, 33, 400, 0), mask="causal", slack=True, **heads(2, 1), **dims(128)), True),
    (ragged((40, 63, 16), (70, 33, 130), mask="causal", slack=True, **heads(8, 1), **dims(96)), True),  # packed heads
    (ragged((130, 9), (200, 60), o_dtype="float32", **heads(2, 2)), False),
    (ragged((130, 9), (200, 60), **heads(2, 2), **dims(192, 128)), False),  # no room for staging
)


@pytest.mark.parametrize(("batch", "schedule"), in_turn((*PAGES, *BOXES)), ids=name)
def test_pages(batch: BatchCase, schedule: Schedule) -> None:
    emulation = solve_on(FA4, batch, schedule, 2)
    assert emulation.records[0].spec["kv"] == ("paged" if batch in BOXES else "gathered")


@pytest.mark.parametrize(("case", "schedule"), in_turn(OUTPUTS, structure=lambda case: case[1]), ids=name)
def test_ways_of_outputs(case: tuple[BatchCase, bool], schedule: Schedule) -> None:
    """Outputs of two work items per CTA; rows beside those of the requests are not written (`slack`)."""
    batch, staged = case
    emulation = solve_on(FA4, batch, schedule, 1)
    assert (executed(emulation, "cp.async.bulk.tensor.4d.global") > 0) == staged
