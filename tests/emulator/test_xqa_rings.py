"""Rings of the decode kernel that `perf.decode_rows` proposes: they are launched, and right, on the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from cute_attn import emulator
from cute_attn.emulator.machine import Schedule
from cute_attn.runtime.arch import named
from perf import batch_peers, bench, decode_rows
from perf.batch_workloads import BatchWorkload
from perf.decode_rows import ROWS, TABLE, Row
from perf.peers import Bind

pytestmark = pytest.mark.emulator
HOPPER = named("sm_90a")
# A proposed row, its problem's (query, kv) heads and lengths here, SMs, and rings that differ in structure.
CASES: dict[str, tuple[str, tuple[int, int], tuple[int, ...], int, tuple[str, ...]]] = {
    "more warps per SM": ("window-64", (8, 1), (300, 1, 33), 2, ("4x2x32x6w", "2x2x32x8w")),
    "a CTA for every segment": ("e4m3-256x1024", (8, 1), (150, 1, 33), 2, ("2x3x16x8w",)),
    "a warp for every head": ("e4m3-256x1024", (32, 8), (150, 1, 33), 2, ("8x3x16x2h", "4x2x16x4h")),
    "six warps": ("bf16-uneven", (7, 1), (150, 1, 33), 2, ("6x2x16x1+1",)),
    "clusters, two CTAs per SM": ("bf16-1x8192", (8, 2), (300,), 22, ("6x2x16x2c6",)),
}


def checked(w: BatchWorkload, binds: Mapping[str, Bind], rounds: int) -> dict[str, Any]:
    """What a run records, without times."""
    _, entries = bench.prepare(w, binds, [w.inputs(torch.device("cpu"))])
    return {"name": w.name, "candidates": entries}


@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(CASES, ("adversarial", "delayed", "delayed", "eager", "delayed"), strict=True))
)
def test_proposed_rings(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_peers, "WORKSPACE_BYTES", 1 << 20)  # the emulator follows every word of it
    row, heads, lengths, sms, texts = CASES[name]
    large = ROWS[row].workload
    shape = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "kv_lens": lengths, "qo_lens": (1,) * len(lengths)}
    proposed = Row(dataclasses.replace(large, **shape), texts)
    specs = decode_rows.specs_of(proposed, HOPPER)
    refused = dict.fromkeys(specs.values(), "") | {specs[TABLE]: "not here"}
    with emulator.using("sm_90a", kernels="xqa", sms=sms, schedule=Schedule(schedule, 1)) as emulation:
        record = decode_rows.time_row(proposed, HOPPER, refused, 1, checked, backend="emulator")
    entries = record["candidates"]
    assert [r.spec for r in emulation.records] == [specs[f"cute_attn {text}"].asdict() for text in texts]
    assert all(entries[f"cute_attn {text}"]["error"] < 5e-3 for text in texts)
    assert entries[TABLE]["reason"] == "not here"
