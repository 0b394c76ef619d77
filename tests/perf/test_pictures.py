"""Pictures and tables of documents: those that are committed are those that the records give. Tables, byte by byte:
`tests/docs/test_generated.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from perf import pictures, tables
from perf.rows import ANCHORS, CURVE_HEADS

ROOT = Path(__file__).parents[2]
PINNED = re.search(r"matplotlib==([\d.]+)", (ROOT / "pyproject.toml").read_text())
matplotlib = pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
DTYPES = ("bfloat16", "e4m3")
H200 = "2026-11-24_h200_anchors.json"
COLD = {
    "cute_attn, cold": {"import_s": 0.25, "prefill_s": 3.0, "decode_s": 0.875, "processes": 3},
    "cute_attn, warm": {"import_s": 0.25, "prefill_s": 0.0625, "decode_s": 0.01, "processes": 3},
    "FlashInfer, cold": {"import_s": 5.5, "prefill_s": 200.0, "decode_s": 60.0, "processes": 1},
    "flash-attn-4, cold": {"reason": "ModuleNotFoundError: flash_attn"},
}


def record(program: str, environment: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"command": f"python -m perf.{program}", "environment": environment, **more}


def curve(section: str, key: str, values: list[tuple[int, float, float]]) -> list[dict[str, Any]]:
    """Rows of a curve: (length or batch size, our speed, FA4's)."""
    found = []
    for at, own, peer in values:
        lengths = [at] if key == "length" else [4096] * at
        w = {"qo_lens": lengths if key == "length" else [1] * at, "kv_lens": lengths, "causal": key == "length"}
        entries = {"cute_attn": {"speed": own}, "cute_attn xqa": {"speed": own - 1}, "flash-attn-4": {"speed": peer}}
        found.append({"name": str(at), "section": section, "workload": w, "candidates": entries, "ratio": own / peer})
    return found


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Records of two GPUs, as one run each leaves them."""
    environment = json.loads((tables.RESULTS / H200).read_text())["environment"]
    sections = [
        *(row for d in CURVE_HEADS for row in curve(f"curve-d{d}", "length", [(512, 300, 200), (1024, 400, 410)])),
        *(
            row
            for t in ("bfloat16", "e4m3")
            for row in curve(f"curve-decode-{t}", "batch", [(1, 900, 800), (2, 950, 9)])
        ),
    ]
    ceilings = {"read": 3000.0, "gemm": 700.0}
    for gpu in ("h100", "h200"):
        for program, more in {
            "curves": {"rows": sections, "ceilings": ceilings},
            "coldstart": {"coldstart": COLD, "install": {"cute_attn": {"bytes": 2_000_000}}},
        }.items():
            path = tmp_path / f"2026-11-25_{gpu}_{program}.json"
            path.write_text(json.dumps(record(program, environment, **more)))
        (tmp_path / f"2026-11-24_{gpu}_anchors.json").write_text((tables.RESULTS / H200).read_text())
    return tmp_path


@pytest.mark.skipif(
    PINNED is None or matplotlib.__version__ != PINNED[1], reason="other releases of matplotlib draw other bytes"
)
def test_committed_pictures_are_those_of_the_records(tmp_path: Path) -> None:
    drawn = {path.name: path.read_bytes() for path in pictures.draw(tmp_path)}
    names = {f"{name}_{theme}.svg" for name in pictures.PICTURES_OF for theme in pictures.THEMES}
    committed = {path.name: path.read_bytes() for path in pictures.PICTURES.glob("*.svg") if path.name in names}
    assert committed.keys() == drawn.keys(), "run `python -m perf.pictures`"
    assert [name for name in drawn if drawn[name] != committed[name]] == [], "run `python -m perf.pictures`"


def test_every_picture_has_both_gpus(results: Path, tmp_path: Path) -> None:
    files = pictures.draw(tmp_path / "out", results)
    assert len(files) == 2 * len(pictures.PICTURES_OF)
    for path in files:
        text = path.read_text()
        for gpu in ("H100", "H200"):
            assert f"<!-- {gpu}" in text, f"{path.name} has no panel of {gpu}"  # matplotlib names texts drawn as paths
    cold = (tmp_path / "out/cold_start_light.svg").read_text()
    assert "<!-- 0.31 s -->" in cold  # warm: 0.25 + 0.0625
    assert "flash-attn-4" not in cold


def test_a_picture_without_a_record_is_not_drawn(results: Path, tmp_path: Path) -> None:
    for path in results.glob("*"):
        if "h100" in path.name or "coldstart" in path.name:
            path.unlink()
    drawn = pictures.draw(tmp_path / "out", results)
    assert {path.stem for path in drawn} == {
        f"{n}_{t}" for n in ("prefill", "decode", "roofline") for t in ("light", "dark")
    }
    assert all("H100" not in path.read_text() for path in drawn)


def test_lines_are_the_fastest_kernel_of_each_library(results: Path) -> None:
    assert pictures.PREFILL.lines("h100", 64, results) == {
        "cute_attn": [(512.0, 300), (1024.0, 400)],
        "FA4": [(512.0, 200), (1024.0, 410)],
    }
    assert pictures.DECODE.lines("h200", "e4m3", results)["cute_attn"] == [(1.0, 900), (2.0, 950)]


def test_anchors_stand_in_for_curves() -> None:
    """From the newest committed record of each row, by looking the numbers up there."""
    records = [json.loads(path.read_text()) for path in sorted(tables.RESULTS.glob("*_h200_anchors.json"))]
    rows = {row["name"]: row for record in records for row in record["rows"]}
    names = {n: f"d64 h32/32 ragged b{16384 // n} q{n} kv{n} causal bfloat16" for n in (1024, 4096, 16384)}
    found = [(float(n), rows[name]["candidates"]["cute_attn"]["speed"]) for n, name in names.items()]
    assert pictures.PREFILL.lines("h200", 64, tables.RESULTS)["cute_attn"] == found


def test_tables_show_the_numbers_of_their_records(results: Path) -> None:
    rows = {row["name"]: row for row in json.loads((tables.RESULTS / H200).read_text())["rows"]}
    row = rows["d128 h32/8 ragged b4 q4096 kv4096 causal bfloat16"]
    own, peer = (row["candidates"][name]["speed"] for name in ("cute_attn", "flash-attn-4"))
    line = next(line for line in tables.readme_table(results).splitlines() if "4 x 4096, 32/8" in line)
    cells = f"- | {own:.0f} | {peer:.0f} (FA4) | {row['ratio']:.2f}"  # a record of lengths on the host
    assert line == f"| Prefill, bf16, 4 x 4096, 32/8 heads, d 128, causal, TFLOP/s | {cells} | {cells} |"
    now = json.loads((results / "2026-11-24_h200_anchors.json").read_text())
    for row in now["rows"]:
        row["candidates"][tables.HOST_LENGTHS] = {"speed": 77.0}
    (results / "2026-11-25_h200_anchors.json").write_text(json.dumps(now))
    assert f"| {cells} | {cells.replace('- | ', '').replace(' | ', ' | 77 | ', 1)} |" in tables.readme_table(results)
    for row in now["rows"]:
        row["candidates"]["cute_attn"] = {"reason": "it failed"}
    (results / "2026-11-25_h200_anchors.json").write_text(json.dumps(now))
    assert f"| {cells} | - | 77 | {peer:.0f} (FA4) | - |" in tables.readme_table(results)
    (results / "2026-11-25_h200_anchors.json").unlink()
    assert tables.readme_table(results).count("\n") == 10
    prefill = tables.section_table("prefill", results=results)
    assert prefill is not None
    assert prefill.count("\n| bf16") == 24
    assert f"| bf16, 4 x 4096, 32/8 heads, d 128, causal, TFLOP/s | {cells} | {cells} |" in prefill
    assert tables.section_table("qwen", results=results) is None
    names = [name for name in ANCHORS if "-" in name]
    others = sum(len(tables.rows("h200", name, results)[1]) for name in names)
    assert (tables.section_table(*names, results=results) or "").count("heads, d ") == others
    assert "| cute_attn, cold | 0.25 | 3.00 | 0.88 |" in (tables.cold_start_table("h100", results) or "")


def test_the_newest_record_counts(results: Path) -> None:
    path = results / "2026-12-01_h100_curves.json"
    path.write_text(json.dumps({"rows": [], "environment": {}, "command": "x"}))
    assert tables.find("h100", "curves", results) == json.loads(path.read_text())
    assert tables.find("h100", "absent", results) is None
    assert tables.host_table(results) is None


def test_labels_say_what_a_row_is() -> None:
    w = {"qo_lens": [5, 5], "kv_lens": [90, 70], "num_qo_heads": 8, "num_kv_heads": 1, "head_dim": 64, "page_size": 16}
    more = {"causal": True, "dtype": "bfloat16", "kv_dtype": "e4m3", "window_left": 127, "sinks": True}
    expected = "bf16 q, fp8 cache, 2 x 5 over 70 to 90, 8/1 heads, d 64, causal, window 128, sinks, page 16"
    assert tables.label({"workload": w | more}) == expected
