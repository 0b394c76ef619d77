"""The Blackwell kernel with row maxima and correction warps (`softmax` of its tiles), which no tile of the table has:
against the reference, on every schedule, two query tiles of several work items on one CTA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from cute_attn.emulator import Schedule
from cute_attn.emulator.settings import Emulation
from cute_attn.kernels.fa4 import tiles
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.kernels.host.prepared import prepared
from cute_attn.wrappers import calls
from tests.emulator.test_fa4_adversarial import HIDDEN, TILE, keeping, levels, loads, normal, solve, with_scores
from tests.support.batch_case import dims, heads, paged, ragged
from tests.support.case import Case
from tests.support.matrix import BF16, CAUSAL, CUSTOM, PACKED, prefill
from tests.support.persistent_emulated import FA4, name, solve_on
from tests.support.schedules import ALL_SCHEDULES, SCHEDULES, all_alike, in_turn

pytestmark = pytest.mark.emulator

REQUESTS: tuple[Case, ...] = (
    prefill(200, 11 * TILE - 5, (3, 1), 64, **BF16),
    prefill(300, 700, (2, 1), 128, **CAUSAL, **BF16),
    prefill(300, 100, (2, 2), 128, **CAUSAL),
    prefill(256, 700, (1, 1), 64, **CAUSAL, window_left=127),
    prefill(300, 300, (1, 1), 128, **CAUSAL, window_left=40, **BF16),
    prefill(150, 400, (2, 1), 128, **CUSTOM),
    prefill(70, 500, (2, 1), 64, **PACKED, logits_soft_cap=3.0, pos_encoding_mode="ALIBI"),
    prefill(200, TILE + 1, (4, 2), 128, **BF16, **CAUSAL),
)


@pytest.fixture(autouse=True)
def row_max(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the form into the table. What is remembered of settings holds tiles: it is forgotten before and after."""
    for head_dims in ((64, 64), (128, 128)):
        tile = dataclasses.replace(tiles._16_BIT[head_dims], softmax="row_max")
        monkeypatch.setitem(tiles._16_BIT, head_dims, tile)
    forget_tiles()
    yield
    forget_tiles()


def forget_tiles() -> None:
    prepared.cache_clear()
    calls.forget()


def assert_row_max(emulation: Emulation) -> None:
    ran = [record.spec["tile"]["softmax"] for record in emulation.records if record.spec["kernel"] == "fa4"]
    assert set(ran) == {"row_max"}


@pytest.mark.parametrize(("request_", "schedule"), in_turn(REQUESTS, structure=all_alike), ids=name)
def test_requests(request_: Case, schedule: Schedule) -> None:
    assert_row_max(solve_on(FA4, request_, schedule, sms=1))


@pytest.mark.parametrize("schedule", ALL_SCHEDULES, ids=name)
def test_items_on_one_cta(schedule: Schedule) -> None:
    requests = ragged((150, 0, 37, 0, 1), (300, 20, 64, 0, 90), mask="causal", **heads(2, 1))
    assert_row_max(solve_on(FA4, requests, schedule, sms=1))
    pages = paged((150, 0, 37, 260), (300, 20, 0, 515), 64, mask="causal", **BF16, **dims(128), **heads(4, 2))
    assert_row_max(solve_on(FA4, pages, schedule, sms=1))


@pytest.mark.parametrize(("hidden", "schedule"), in_turn(HIDDEN, structure=all_alike), ids=name)
def test_rows_that_see_nothing(hidden: str, schedule: Schedule) -> None:
    q, k, v = normal(256, 3 * TILE)
    assert_row_max(solve(q, k, v, schedule, custom_mask=keeping(*HIDDEN[hidden], 256, 3 * TILE)))


@pytest.mark.parametrize(("rise", "schedule"), in_turn((40, 3, 9, 200), structure=all_alike), ids=name)
def test_scores_that_leap(rise: int, schedule: Schedule) -> None:
    """O is loaded in the steps after a leap only: those of less than the slack move no anchor."""
    flat = loads(solve(*with_scores(200, torch.zeros(4 * TILE)), schedule))
    risen = loads(solve(*with_scores(200, rise * levels(4 * TILE, TILE)), schedule))
    assert (risen > flat) == (3 * rise > 8)


@pytest.mark.parametrize("row", [0, 37, 128, 199])
def test_a_leap_in_one_lane(row: int) -> None:
    scores, rows = 60 * levels(3 * TILE, TILE), slice(row, row + 1)
    assert_row_max(solve(*with_scores(200, scores, rows), SCHEDULES[1]))


@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("value", "schedule"), in_turn((torch.nan, torch.inf, -torch.inf)), ids=name)
def test_numbers_that_are_none_stay_in_their_row(value: float, masked: bool, schedule: Schedule) -> None:
    q, k, v = normal(200, 300)
    q[77] = value
    assert_row_max(solve(q, k, v, schedule, causal=masked))


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("tile", [0, 1, 2])
def test_infinite_scores_of_a_tile(tile: int, infinity: float) -> None:
    q, k, v = normal(200, 3 * TILE)
    q[:, :, 0] = 1.0
    k[tile * TILE : (tile + 1) * TILE, :, 0] = infinity
    assert_row_max(solve(q, k, v, SCHEDULES[1]))


@pytest.mark.parametrize(
    "tile", [{"query_tiles": 1}, {"query_tiles": 1, "ctas": 2}, {"ctas": 2}], ids=lambda tile: str(tile)
)
def test_other_tiles_are_refused(tile: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="row_max needs two query tiles of one CTA"):
        BlackwellTile(softmax="row_max", **tile)


@pytest.mark.parametrize("dtypes", [{"dtype": "float8_e4m3fn"}, {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}])
def test_8_bit_operands_are_refused(dtypes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="16-bit"):
        Fa4Spec(out_dtype="bfloat16", head_dim_qk=128, head_dim_vo=128, tile=BlackwellTile(softmax="row_max"), **dtypes)
