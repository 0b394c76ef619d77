"""`perf.distributed` on a CPU: every case small, on one rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from perf import bench, distributed, program, report
from perf.harness import Call
from perf.workloads import equal, one_request

CPU = torch.device("cpu")


class HostStopwatch(distributed.Stopwatch):
    """The host's clock; nothing is captured."""

    def capture(self, calls: Sequence[Call], launches: int) -> Any:
        return lambda: [calls[i % len(calls)]() for i in range(launches)]

    def microseconds(self, call: Call) -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_cases_are_measured_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "GRAPH_LAUNCHES", 2)
    cases = [equal(2, 1, 64, (4, 2), 64, distributed.PAGE_SIZE), one_request(64, 64, 4, 2, 64, 64, causal=True)]
    assert [w.phase for w in cases] == [distributed.CASES[i].phase for i in (1, -1)]
    rows = [distributed.measured(case, CPU, HostStopwatch(), 2) for case in cases]
    assert [row["name"] for row in rows] == [w.name for w in cases]
    for row, name in zip(rows, ("sharded", "ring"), strict=True):
        entry, one = row["candidates"][name], row["candidates"]["one GPU"]
        assert entry["speedup"] == one["median_us"] / entry["median_us"]
        assert 0 < entry["error"] < 1e-2
        assert "speedup" not in one
        assert name in program.line(row)
    record = {**program.head("distributed", gpus="1"), "distributed": rows}
    bench.save(record, tmp_path / "record.json")
    shown = report.markdown(json.loads((tmp_path / "record.json").read_text()))
    assert "| us on 1 GPUs | one GPU | sharded | sharded, no graph | ring | ulysses | merge |" in shown
    assert "x) |" in shown


@pytest.mark.usefixtures("one_rank")
def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_request(8, 8, 2, 2, 64, 64, causal=True)
    monkeypatch.setattr(distributed.distributed, "ring_prefill", lambda q, k, v: v)
    with pytest.raises(RuntimeError, match=r"errors against the reference above 1\.6e-02: {'ring'"):
        distributed.measured(case, CPU, HostStopwatch(), 1)
