"""The comparison of the forms of softmax: kinds of scores, the rules of rescales, and its record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn.kernels.fa4 import tiles
from cute_attn.kernels.fa4.spec import SOFTMAX_FORMS
from perf import model, softmax_forms
from perf.sass import ours, rescales
from perf.sass.clocks import binds
from perf.sass.count import CountError
from perf.sass.executed import tally
from perf.sass.form_tables import comparison_lines, longest
from perf.sass.score_kinds import KINDS, LANES, RECENCY, SINK, exponents

RECORDS = sorted((Path(__file__).parents[2] / "perf/results").glob("*_softmax_forms_*.json"))
ROWS = [row for path in RECORDS for row in json.loads(path.read_text())["softmax_forms"]]
ROWS_OF_Q, KEYS = 64, 2048
LOG2_E = math.log2(math.e)


def _exponents(kind: str, keys: int = KEYS, head_dim: int = 64) -> torch.Tensor:
    q, k, v = KINDS[kind].operands(ROWS_OF_Q, KEYS, (head_dim, 64), 1, keys)
    assert (q.shape, k.shape, v.shape) == ((ROWS_OF_Q, 1, head_dim), (keys, 1, head_dim), (keys, 1, 64))
    return exponents(q, k)


@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize(("kind", "deviation"), [("normal", 1), ("wide", 3), ("wider", 10)])
def test_deviations(kind: str, deviation: float, head_dim: int) -> None:
    found = _exponents(kind, head_dim=head_dim)
    assert float(found.std()) == pytest.approx(deviation * LOG2_E, rel=0.1)
    assert float(found.mean()) == pytest.approx(0, abs=0.1 * deviation)


@pytest.mark.parametrize(
    ("kind", "rise"),
    [("rising1", 1), ("rising4", 4), ("rising9", 9), ("leaps", 10), ("falling4", -4), ("recency", -128 * RECENCY)],
)
def test_slopes_in_the_order_of_processing(kind: str, rise: float) -> None:
    """The kernel's order is tested by what it executes: `test_rows_follow_the_rules`."""
    means = _exponents(kind).view(ROWS_OF_Q, -1, 128).mean((0, 2))
    assert means.diff() == pytest.approx([rise] * 15, abs=0.7)  # levels have 8 bits


def test_peaks() -> None:
    outliers = _exponents("outliers") - _exponents("normal")
    needles = _exponents("needles") > 12 - 4.5 * LOG2_E  # less than any deviation
    sink = _exponents("sink")
    assert float(_exponents("outliers").amax(1).mean()) == pytest.approx(12, abs=2)
    assert outliers.shape == (ROWS_OF_Q, KEYS)
    levels = KINDS["outliers"].levels(torch.arange(KEYS).float(), torch.Generator().manual_seed(3))
    assert float((levels > 0).double().mean()) == pytest.approx(0.01, rel=0.2)
    assert float(levels[levels > 0].min()) >= 4
    assert float(levels.max()) <= 12
    assert not torch.equal(levels[0] > 0, levels[1] > 0)  # lanes differ
    assert float(needles.double().mean()) < 0.01
    assert float(sink[:, -1].mean()) == pytest.approx(SINK, abs=1)  # the first token comes last
    assert float(sink[:, :-1].mean()) == pytest.approx(0, abs=0.1)


def test_a_shorter_request_is_the_beginning() -> None:
    for kind in KINDS:
        assert torch.equal(_exponents(kind, 128), _exponents(kind)[:, :128])


def test_rules_of_rescales() -> None:
    """One row of two warps rises once: by more than the slack of row maxima, then by more than that of sums."""
    scores = torch.full((2 * LANES, 5 * 128), -20.0, dtype=torch.float64)
    scores[:, 0] = 0
    scores[3, 200] = 10
    assert rescales.row_max(scores, 128) == (1 / 8, 1 / 64 / 4)
    assert rescales.anchored(scores, 128) == (0, 0)
    scores[3, 400] = 16
    scores[4, 401] = 9
    assert rescales.anchored(scores, 128) == (1 / 8, 2 / 64 / 4)
    assert rescales.anchored(scores, 64) == (1 / 8, 2 / 64 / 4)


def test_kernels_of_the_table() -> None:
    found = dict(softmax_forms.kernels("sm_100a", (128, 128), SOFTMAX_FORMS))
    rows = [(kernel.row, kernel.tile.softmax) for kernel in found if not isinstance(kernel, str)]
    assert rows == [("d128", "anchored"), ("d128", "row_max")] * 2 + [("d128, 2 CTA", "anchored")] * 2
    refused = {name: why for name, why in softmax_forms.kernels("sm_100a", (256, 256), SOFTMAX_FORMS) if why}
    assert refused == {
        "d256, 2 CTA row_max 0/16": "row_max needs two query tiles of one CTA",
        "d256, 64 keys row_max 0/16": "row_max needs two query tiles of one CTA",
    }


@pytest.mark.parametrize("options", [["--head-dim", "80"], ["--kv-len", "200"], ["--seeds", "0"]])
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        softmax_forms.parse(options)
    assert f"{options[0]} must be" in capsys.readouterr().err


def test_fields_of_tiles() -> None:
    assert model.parse(["--tile", "softmax=row_max,polynomial=0"]).tile == {"softmax": "row_max", "polynomial": 0}
    with pytest.raises(CountError, match=r"\['stage'\] must be fields of BlackwellTile: query_tiles, cols"):
        ours.subject("fa4", "sm_100a", (64, 64), causal=False, tile_fields={"stage": 3})


@pytest.mark.emulator
@pytest.mark.parametrize("form", SOFTMAX_FORMS)
def test_a_subject_runs_the_form_that_its_tile_names(form: str) -> None:
    """As many rescales as the rule says: none if keys were processed in another order, or O rescaled elsewhere."""
    tile, dims, kv_len = {"softmax": form}, (64, 64), 4 * 128
    subject = ours.subject("fa4", "sm_100a", dims, causal=False, tile_fields=tile)
    q, k, v = KINDS["leaps"].operands(256, kv_len, dims, 1, kv_len)
    with tally() as counts:
        assert ours.emulate("fa4", "sm_100a", (q, k, v), False, tile) < 0.02
    lines = counts.lines(subject.ptx, subject.symbol, subject.ctas, subject.warps)
    warps = subject.roles.warps[{"anchored": "softmax", "row_max": "epilogue"}[form]]
    steps = 2 * 3  # of two query tiles, beyond the first
    wanted = rescales.RULES[form](exponents(q, k), 128).warps * steps
    assert rescales.executed(subject.ptx, subject.symbol, lines, warps, dims[1]) == pytest.approx(wanted)
    assert wanted > 0.5 * steps


# ---- the record


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['kernel']} {row['scores']}")
def test_rows_follow_the_rules(row: Mapping[str, Any]) -> None:
    """Kernels rescale as often as their rule says of the scores, and compute as many exponentials in SASS as in PTX."""
    assert row["rescales"] == pytest.approx(row["rescales_by_rule"], abs=1e-3)
    assert row["moved_rows"] <= row["rescales"] + 1e-9
    assert row["checks"]["ex2"][0] == row["checks"]["ex2"][1]
    assert row["checks"]["matrix"][0] == row["checks"]["matrix"][1]
    assert row["checks"]["agreement"] > 0.98
    assert row["error"] < 0.02
    assert row["binds"] == binds(row["clocks"])


def test_record_has_every_row_of_the_table() -> None:
    wanted = {
        (softmax_forms.Kernel(dims, tile).row, tile.polynomial)
        for dims, found in tiles.candidates("sm_100a").items()
        for tile in found
    }
    for kind in ("normal", "wide", "needles", "realistic", "leaps"):
        assert wanted <= {
            (row["row"], row["polynomial"]) for row in ROWS if (row["form"], row["scores"]) == ("anchored", kind)
        }


def test_tables() -> None:
    rows = [row for row in ROWS if row["row"].startswith("d192/128")]
    lines = comparison_lines(rows, SOFTMAX_FORMS)
    first = rows[0]
    assert lines[1][0] == f"{first['row']} {first['polynomial']}/16 {first['scores']}"
    assert float(lines[1][2]) == pytest.approx(longest(first), abs=0.06)
    assert any(line[3:] == ["-", "-"] for line in lines)  # a pair has one form
