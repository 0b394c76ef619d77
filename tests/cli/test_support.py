"""The support table: rows exclude each other, and cells are what selection says."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from cute_attn.cli import support, support_rows
from cute_attn.dispatch.capabilities import BACKENDS, CAPABILITIES
from tests.support.commands import printed

Output = pytest.CaptureFixture[str]
GROUPS = support.groups()
DIMS = "Head dimensions (qk, vo) of fp16 and bf16"


def test_every_backend_has_a_column() -> None:
    assert set(support.ORDER) == {backend.name for backend in BACKENDS}
    for rows in GROUPS.values():
        assert len(rows) > 1
        for cells in rows.values():
            assert tuple(cells) == support.ORDER
            assert all(bool(cell.reason) == (cell.verdict == "no") for cell in cells.values())
            assert cells["reference"].verdict == "yes"


def test_every_capability_that_a_backend_lacks_shows_in_a_cell() -> None:
    """So that a new row of the table of capabilities needs one here."""
    reasons = {cell.reason for rows in GROUPS.values() for cells in rows.values() for cell in cells.values()}
    for capability in CAPABILITIES:
        for backend, why in capability.unsupported.items():
            shown = any(f"{why.reason}; instead: {why.instead}" in reason for reason in reasons)
            assert shown or capability.feature in AFTER_OTHERS, (backend, capability.feature)


# A cell has the first refusal; draft tokens come only with lengths on the device.
AFTER_OTHERS = ("tree masks of draft tokens",)


def test_a_row_that_is_too_coarse_is_an_error() -> None:
    division = next(each for each in support_rows.DIVISIONS if each.title == DIMS)
    coarse = dataclasses.replace(division, samples=[x._replace(row="any head dimensions") for x in division.samples])
    with pytest.raises(ValueError, match="row 'any head dimensions' is too coarse: fa4 supports some"):
        support.rows_of(coarse)


def test_markdown_and_json(capsys: Output) -> None:
    text = printed(capsys, ["support"])
    assert text == support.markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    forms = support.latent()
    assert len(lines) == sum(len(rows) + 2 for rows in GROUPS.values()) + 3
    assert {row["sm_90a"] for row in forms.values()} == {"wgmma"}
    assert {kernel for row in forms.values() for arch, kernel in row.items() if arch != "sm_90a"} == {"mma.sync"}
    document = json.loads(printed(capsys, ["support", "--json"]))
    assert [group["title"] for group in document] == [*GROUPS, "Latent attention (MLA)"]
    row = next(row for row in document[1]["rows"] if "NVFP4" in row["feature"])
    assert row["backends"]["fa4"]["verdict"] == "no"
    assert row["backends"]["fa4"]["reason"].startswith("it widens keys and values of 8 bits")
    assert torch.float8_e4m3fn in support_rows.FP8
