"""Tiles and rings that `perf.tune` tries, on a CPU: their names, what fits, that plans take them, what is printed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from cute_attn.kernels.fa3.host.family import FAMILY
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.xqa.host import variant
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.tiles import RESERVED_SMEM
from cute_attn.problem import Features
from cute_attn.runtime import arch as archs
from cute_attn.schedule.batch import Size
from perf import rings, run, tiles, tune
from perf.rows import SECTIONS, Section
from perf.tiles import Trial
from perf.workloads import BatchWorkload, equal
from tests.support.batch_case import dims, heads, ragged
from tests.support.right import build

tile = functools.partial(HopperTile, ping_pong=False)
HOPPER = archs.named("sm_90a")
FEATURES = Features(
    "cuda", torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16, 32, 8, 128, 128, kv_source="paged", device_lengths=True
)


def decode(batch_size: int, kv_dtype: str) -> BatchWorkload:
    return equal(batch_size, 1, 2048, (32, 8), 128, 16, kv_dtype=kv_dtype)


# ---- tiles


@pytest.mark.parametrize(
    ("text", "trial"),
    [
        (
            "rows=128,cols=48,stages=4,q_stages=2,ping_pong=0,per_sm=2,from_first_key=1,packed=1",
            Trial(tile(128, 48, 4, 2, per_sm=2, from_first_key=True), packed=True),
        ),
        ("rows=192,cols=80,stages=3", Trial(HopperTile(192, 80, 3))),
        ("rows=128,cols=64,q_registers=96", Trial(HopperTile(128, 64, q_registers=96))),
        ("packed=0,section_mib=16", Trial(None, False, 16)),
        ("packed=1", Trial(packed=True)),
    ],
)
def test_tiles_by_text(text: str, trial: Trial) -> None:
    assert Trial.parse(text) == trial
    assert trial.name == text
    assert not trial.tile or type(trial.tile.ping_pong) is type(trial.tile.from_first_key) is bool  # as specs have it


@pytest.mark.parametrize("text", ["", "128x64", "rows=128", "rows=128,cols=64,fast=1", "packed", "8x2x16x1"])
def test_other_text_is_no_tile(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="a tile is NAME=NUMBER"):
        Trial.parse(text)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_neighbours_differ_in_one_field_and_fit(head_dim: int) -> None:
    start = tiles.of_table(equal(1, 8, 8, (8, 8), head_dim))
    assert tiles.fits_registers(head_dim, start)
    found = tiles.neighbours(head_dim, start)
    assert len(found) > 2
    for other in found:
        pairs = zip(dataclasses.astuple(start), dataclasses.astuple(other), strict=True)
        assert sum(a != b for a, b in pairs) == 1
        assert HopperMemory(other, head_dim, head_dim).bytes <= tiles.SMEM_LIMIT


def test_tiles_that_do_not_fit() -> None:
    assert not tiles.fits_registers(64, HopperTile(192, 160))  # 80 + 40 + 32 registers of 160
    assert tiles.fits_registers(64, HopperTile(128, 160))
    assert not tiles.fits_registers(256, HopperTile(128, 96))  # 64 KB of Q and 192 KB of K and V
    assert tiles.fits(tile(64, 64, 3, 2, per_sm=3), 75 << 10)
    assert not tiles.fits(tile(64, 64, 3, 2, per_sm=3), (75 << 10) + 1)
    assert not tiles.fits(tile(128, 64, 3, 2), (227 << 10) + 1)


def test_plans_take_a_trial() -> None:
    settings = build(ragged((70,), (90,), mask="causal", window_left=40, **heads(8, 1), **dims(64))).problem.settings

    def planned() -> tuple[Any, int, int]:
        found = FAMILY.tiling(settings, Size(64, None, 64, 1 << 20), archs.named("sm_90a"), 132)
        return found.tile, found.params.num_kv_heads, found.params.l2_kv_tokens

    own = planned()
    narrow = tile(128, 48, 4, 2, per_sm=2, from_first_key=True)
    with tiles.force(Trial(narrow, packed=True, section_mib=8)):
        assert planned() == (narrow, 1, own[2] // 4)
    with tiles.force(Trial(packed=False)):
        assert planned() == (own[0], 8, own[2])
    assert planned() == own


# ---- rings


@pytest.mark.parametrize("kv_dtype", rings.SPEC_DTYPES)
@pytest.mark.parametrize("batch_size", [1, 64])
def test_rings_around_that_of_the_table_fit(batch_size: int, kv_dtype: str) -> None:
    w = decode(batch_size, kv_dtype)
    start = rings.start_of(w, HOPPER)
    found = rings.around(start, w, HOPPER)
    assert start in found
    assert len({rings.title(spec) for spec in found}) == len(found) > 10
    for spec in found:
        bytes_of_ctas = (spec.ctas + spec.guests) * (XqaMemory(spec).bytes + RESERVED_SMEM)
        assert bytes_of_ctas <= HOPPER.smem_limit + RESERVED_SMEM
        assert (spec.kv_dtype, spec.head_dim, spec.row_blocks) == (start.kv_dtype, start.head_dim, start.row_blocks)


def test_a_forced_ring_is_launched() -> None:
    w = decode(20, "e4m3")
    start = rings.start_of(w, HOPPER)
    other = next(spec for spec in rings.around(start, w, HOPPER) if spec.warps != start.warps)

    def launched() -> object:
        return variant.choose_spec(FEATURES, 1, rings.rule_of(w, HOPPER), HOPPER)

    assert launched() == start
    with rings.force_spec(other):
        assert launched() == other
    assert launched() == start


def test_rings_by_text() -> None:
    start = rings.start_of(decode(64, "e4m3"), HOPPER)
    fields = "warps", "stages", "cols", "ctas", "guests", "work", "cluster_size", "prefetch"
    for text, values in {
        "6x2x16x1+1c6": (6, 2, 16, 1, 1, "cluster", 6, 0),
        "2x2x32x8wa2": (2, 2, 32, 8, 0, "whole", 1, 2),
        "8x2x16x2h": (8, 2, 16, 2, 0, "heads", 1, 0),
    }.items():
        assert rings.ring(text, start) == dataclasses.replace(start, **dict(zip(fields, values, strict=True)))
    for text in ("4x2x32x3", "6x2x16x1+1c6", "2x2x32x8wa2", "4x3x16x1c8a1", "8x2x16x2h", "2x2x16x8e"):
        assert rings.title(rings.ring(text, start)) == text
    for text in ("4x2x32", "4x2x32x3c", "4x2x32x3a8w", "4x2x32x3wh", "4x2x32x3c2w", "4x2x32x3a", ""):
        with pytest.raises(ValueError, match="WARPSxSTAGESxTOKENSxCTAS"):
            rings.ring(text, start)


# ---- the program


def test_every_row_has_the_candidates_of_its_kind() -> None:
    options = tune.parse(["prefill", "--try", "rows=128,cols=64", "8x2x16x1", "64x64x64x64", "packed=1"])
    prefill, step = SECTIONS["prefill"].workloads[0], decode(64, "e4m3")
    assert list(tune.candidates(prefill, options, HOPPER)) == ["cute_attn rows=128,cols=64", "cute_attn packed=1"]
    assert list(tune.candidates(step, options, HOPPER)) == ["cute_attn 8x2x16x1"], "the other ring fits no SM"
    around = tune.parse(["prefill", "--around"])
    neighbours = tiles.neighbours(prefill.head_dim, tiles.of_table(prefill))
    assert len(tune.candidates(prefill, around, HOPPER)) == len(neighbours)
    start = rings.start_of(step, HOPPER)
    assert len(tune.candidates(step, around, HOPPER)) == len(rings.around(start, step, HOPPER)) - 1
    found = tune.candidates(step, around, HOPPER)
    assert all(f"cute_attn {rings.title(candidate.spec)}" == name for name, candidate in found.items())


def test_what_is_neither_tile_nor_ring_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune.parse(["prefill", "--try", "128 by 64"])
    assert "a tile is NAME=NUMBER" in capsys.readouterr().err


def test_a_run_measures_the_candidates_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside "auto" and the peers, kernels compiled first; the fastest is printed first."""
    compiled: list[object] = []
    slow, fast = "cute_attn rows=128,cols=64", "cute_attn packed=1"

    def measured(program: str, sections: dict[str, Section], options: Any, more: Any) -> dict[str, Any]:
        assert (program, list(sections)) == ("tune", ["prefill"])
        (w,) = sections["prefill"].workloads
        assert list(more(w)) == [slow, fast]
        assert [spec.tile for spec in compiled] == [HopperTile(128, 64)]  # type: ignore[attr-defined]
        speeds = {"cute_attn": 174.0, slow: 150.0, fast: 208.8, "flash-attn-4": 124.0}
        entries: dict[str, Any] = {name: {"speed": speed} for name, speed in speeds.items()}
        entries["torch cuDNN"] = {"reason": "no windows"}
        row = {"name": w.name, "unit": "TFLOP/s", "sm_clock_mhz": 1800, "best_peer": "flash-attn-4"}
        return {"rows": [{**row, "candidates": entries}], "failed_rows": {"d256: x": "out of memory"}}

    def get_many(wanted: dict[str, list[object]], program: object) -> None:
        compiled.extend(wanted["sm_90a"])

    def chosen(options: Any) -> dict[str, Section]:
        one: list[BatchWorkload] = [SECTIONS["prefill"].workloads[0]]
        return {"prefill": Section(one)}

    monkeypatch.setattr(run, "measured_sections", chosen)
    monkeypatch.setattr(run, "run", measured)
    monkeypatch.setattr(tune.artifacts, "get_many", get_many)
    monkeypatch.setattr(tune.archs, "for_device", lambda index: HOPPER)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tune.main(["prefill", "--try", "rows=128,cols=64", "packed=1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == f"208.8 1.200 of auto 1.684 of the best peer {fast}".split()
    assert [line.split()[0] for line in lines[2:5]] == ["174.0", "150.0", "124.0"]
    assert lines[5:] == ["        -  torch cuDNN: no windows", "d256: x: out of memory"]
