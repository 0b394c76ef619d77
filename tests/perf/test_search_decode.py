"""Search of decode rings on a CPU: what it tries, and that a plan takes the ring that it forces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn.kernels.xqa.host import grid
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.kernels.xqa.tiles import RESERVED_SMEM
from cute_attn.problem import Features
from cute_attn.runtime.arch import Arch, named
from perf import decode_rows, rings, search_decode
from perf.batch_workloads import BatchWorkload, equal
from perf.harness import Timing
from perf.peers import Bind

HOPPER = named("sm_90a")


FEATURES = Features(
    "cuda", torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16, 32, 8, 128, 128, kv_source="paged", device_lengths=True
)


def workload(batch_size: int, kv_dtype: str) -> BatchWorkload:
    return equal(batch_size, 1, 2048, (32, 8), 128, 16, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", search_decode.SPEC_DTYPES)
@pytest.mark.parametrize("batch_size", [1, 64])
def test_rings_contain_that_of_the_table_and_fit(batch_size: int, kv_dtype: str) -> None:
    w = workload(batch_size, kv_dtype)
    start = search_decode.start_of(w, HOPPER)
    found = search_decode.rings(start, w, HOPPER)
    assert start in found
    assert len({rings.title(spec) for spec in found}) == len(found) > 10
    for spec in found:
        bytes_of_ctas = (spec.ctas + spec.guests) * (XqaMemory.of(spec).bytes + RESERVED_SMEM)
        assert bytes_of_ctas <= HOPPER.smem_limit + RESERVED_SMEM
        assert (spec.kv_dtype, spec.head_dim, spec.row_blocks) == (start.kv_dtype, start.head_dim, start.row_blocks)


def test_a_forced_ring_is_launched() -> None:
    w = workload(20, "e4m3")
    start = search_decode.start_of(w, HOPPER)
    other = next(spec for spec in search_decode.rings(start, w, HOPPER) if spec.warps != start.warps)

    def launched() -> object:
        return grid.choose_spec(FEATURES, 1, rings.rule_of(w, HOPPER), HOPPER)

    assert launched() == start
    with rings.force_spec(other):
        assert launched() == other
    assert launched() == start


def test_rings_by_text() -> None:
    start = search_decode.start_of(workload(64, "e4m3"), HOPPER)
    spec = rings.ring("6x2x16x1+1c6", start)
    assert (spec.warps, spec.stages, spec.cols, spec.ctas, spec.guests, spec.cluster_size) == (6, 2, 16, 1, 1, 6)
    assert (spec.work, spec.prefetch) == ("cluster", "none")
    assert rings.ring("2x2x32x8wa512", start) == dataclasses.replace(
        start, warps=2, stages=2, cols=32, ctas=8, work="whole", prefetch="l2", prefetch_keys=512
    )
    assert rings.ring("4x3x16x1c8a16e", start).prefetch == "smem"
    assert rings.ring("8x2x16x2h", start) == dataclasses.replace(
        start, warps=8, stages=2, cols=16, ctas=2, work="heads", prefetch="none", prefetch_keys=0
    )
    for text in ("4x2x32", "4x2x32x3c", "4x2x32x3a8w", "4x2x32x3wh", "4x2x32x3c2w", "4x2x32x3a", ""):
        with pytest.raises(ValueError, match="WARPSxSTAGESxTOKENSxCTAS"):
            rings.ring(text, start)


@pytest.mark.parametrize("name", decode_rows.ROWS)
def test_every_candidate_of_a_row_fits_an_sm(name: str) -> None:
    row = decode_rows.ROWS[name]
    specs = decode_rows.specs_of(row, HOPPER)
    own = specs[decode_rows.TABLE]
    assert [*specs] == [decode_rows.TABLE, *(f"cute_attn {text}" for text in row.rings if rings.ring(text, own) != own)]
    assert len(set(specs.values())) == len(specs)


SPEEDS = {decode_rows.TABLE: 100.0, decode_rows.PEER: 80.0}  # GB/s; of all others 120


def measured(w: BatchWorkload, binds: Mapping[str, Bind], rounds: int) -> dict[str, Any]:
    """A run that measures nothing."""
    entries = {}
    for name in binds:
        speed = SPEEDS.get(name, 120.0)
        entries[name] = {
            **Timing(1e3 / speed, 1.0, 1.0, 20, rounds)._asdict(),
            "speed": speed,
            "share": speed / 200,
            "error": 1e-3,
        }
    return {"name": w.name, "candidates": entries}


def test_rows_are_recorded_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(specs: Sequence[XqaSpec], arch: Arch) -> dict[XqaSpec, str]:
        return {spec: "8 bytes of stack" if spec.stages == 3 else "" for spec in specs}

    monkeypatch.setattr(rings, "compiled", compiled)
    record: dict[str, Any] = {}
    row = decode_rows.Row(workload(256, "e4m3"), ("4x2x16x2w", "4x3x16x4w"), 1.03, backends=("fa2",))
    decode_rows.run({"many": row}, HOPPER, 9, None, measured, record, tmp_path / "rows.json")
    candidates = record["rows"]["many"]["candidates"]
    assert {*candidates} == {
        *("cute_attn table", "cute_attn 4x2x16x2w", "cute_attn 4x3x16x4w", "cute_attn fa2", "FlashInfer XQA")
    }
    fast, slow = candidates["cute_attn 4x2x16x2w"], candidates["cute_attn 4x3x16x4w"]
    assert (fast["ratio"], fast["to_table"], fast["rounds"]) == (1.5, 1.2, 9)
    assert (fast["spec"]["warps"], fast["spec"]["work"]) == (4, "whole")
    assert slow == {"reason": "8 bytes of stack", "spec": slow["spec"]}
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == record["rows"]
    title, first, *_, last = capsys.readouterr().out.splitlines()
    assert title == f"many: {row.workload.name} target 1.03"
    assert "cute_attn 4x2x16x2w: 0.600 of the ceiling, peer 1.500, table 1.200, error 0.0010" in first
    assert last.endswith("-    cute_attn 4x3x16x4w: 8 bytes of stack")


def test_rows_stop_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "compiled", lambda specs, arch: dict.fromkeys(specs, ""))
    record: dict[str, Any] = {}
    decode_rows.run(decode_rows.chosen(["window-8"]), HOPPER, 9, -1.0, measured, record, None)
    assert (record["rows"], record["left_out"]) == ({}, {"window-8": "the budget was spent"})


def test_a_row_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "compiled", lambda specs, arch: dict.fromkeys(specs, ""))

    def fails_once(w: BatchWorkload, binds: Mapping[str, Bind], rounds: int) -> dict[str, Any]:
        if len(w.kv_lens) == 8:
            raise RuntimeError("out of memory")
        return measured(w, binds, rounds)

    record: dict[str, Any] = {}
    decode_rows.run(decode_rows.chosen(["window-8", "window-64"]), HOPPER, 9, 60.0, fails_once, record, None)
    assert [*record["rows"]] == ["window-64"]
    assert record["left_out"] == {"window-8": "RuntimeError: out of memory"}


def test_rows_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*decode_rows.chosen([])] == [*decode_rows.ROWS]
    assert [*decode_rows.chosen(["bf16-1x2048", "window-8"])] == ["window-8", "bf16-1x2048"]
    assert search_decode.main(["--rows", "window-9"]) == 2
    assert "window-64" in capsys.readouterr().err
