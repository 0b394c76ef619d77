"""The command, the timeline, and what the emulator may import."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import ArgumentError, NotSupported, emulator, explain
from cute_attn.cli import main
from cute_attn.dispatch import capabilities, select
from cute_attn.emulator import timeline
from cute_attn.emulator.settings import current
from cute_attn.problem import Features
from tests.emulator.micro import emulate
from tests.emulator.micro.catalogue import cases

pytestmark = pytest.mark.emulator
PACKAGE = Path(emulator.__file__).parent
CPU = Features(torch.device("cpu"), torch.bfloat16, torch.bfloat16, torch.bfloat16, 4, 2, 64, 64)


def test_emulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "t.html", tmp_path / "t.txt"
    argv = ["emulate", "--qo-len", "17", "--kv-len", "33", "--causal"]
    assert main([*argv, "--timeline", str(picture), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "mma.sync.aligned.m16n8k16" in printed
    assert printed.rstrip().endswith("ok")
    assert picture.read_text().count("<rect") >= 4
    assert "griddepcontrol.wait" in trace.read_text() or "ld.param" in trace.read_text()


def test_emulate_checks_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--arch", "sm_70"]) == 2
    assert "sm_70" in capsys.readouterr().err


def test_waits_show_in_the_timeline() -> None:
    case = next(case for case in cases() if case.id == "barriers/mbarrier")
    _, stats = emulate.launched(case, schedule=emulator.Schedule("adversarial", 1), events=True)
    assert any(event.kind == "wait" and event.what.startswith("barrier 0") for event in stats.events)
    for warp in range(2):  # what a warp does follows one another
        own = [event for event in stats.events if event.warps == (warp,)]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    assert "waited for barrier 0" in timeline.picture(stats.events, "title")


def test_a_timeline_names_roles_and_barriers(tmp_path: Path) -> None:
    """Of fa3 on Hopper: the warps that load, the warpgroups that multiply, the rings that they meet at."""
    path = tmp_path / "t.svg"
    argv = ["emulate", "--kernels", "fa3", "--qo-len", "65", "--kv-len", "65", "--schedule", "delayed"]
    assert main([*argv, "--timeline", str(path)]) == 0
    rows = re.findall(r">([^<>]+), warp (\d+)</text>", path.read_text())
    names = {int(warp): name for name, warp in rows}
    assert names[0] == "producer"
    assert names[1] == "idle"
    assert {names[warp] for warp in range(4, 12)} == {"math group 0", "math group 1"}
    assert "waited for q full 0: mbarrier at shared" in path.read_text()


def test_roles_follow_from_instructions() -> None:
    def ran(warp: int, *executed: str) -> timeline.Event:
        return timeline.Event((0, 0, 0), (warp,), 0.0, 1.0, "other", "", 1, frozenset(executed))

    events = [ran(0, "producer"), ran(3, "MMA"), ran(4, "softmax"), ran(8, "softmax"), ran(12, "epilogue")]
    found = timeline.roles([*events, ran(1)])
    assert found == {0: "producer", 1: "idle", 3: "MMA", 4: "softmax 0", 8: "softmax 1", 12: "epilogue"}
    assert timeline.roles([ran(5, "producer", "math warp"), ran(7, "math warp")]) == {
        5: "math warp 0",
        7: "math warp 1",
    }


def test_imports() -> None:
    """The core needs numpy and the package's types of errors alone; the adapter also torch and our own runtime."""
    for path in PACKAGE.rglob("*.py"):
        allowed = {"numpy", "__future__", "cute_attn", *sys.stdlib_module_names}
        if path.name == "adapter.py":
            allowed.add("torch")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, (path.name, name)
                if name.startswith("cute_attn") and path.name != "adapter.py":
                    assert name.startswith(("cute_attn.emulator", "cute_attn.errors")), (path.name, name)


def test_selection() -> None:
    assert select.choose(CPU, "emulator") is capabilities.EMULATOR
    assert 'emulator: able, taken only with backend="emulator"' in explain(CPU)
    with pytest.raises(NotSupported, match="emulator refuses other head dimensions"):
        select.choose(CPU._replace(head_dim_qk=68), "emulator")
    with pytest.raises(NotSupported, match="cuda tensors"):
        select.choose(CPU._replace(device=torch.device("cuda")), "emulator", select.archs.named("sm_90a"))


def test_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_EMULATE_ARCH", "sm_80")
    assert current().arch == "sm_80"
    q = torch.randn(1, 1, 64).half()
    with emulator.using("sm_90a") as emulation:
        cute_attn.single_prefill_with_kv_cache(q, q, q, backend="emulator")
    assert {record.arch for record in emulation.records} == {"sm_90a"}
    assert current().arch == "sm_80"


def test_misaligned_rows_are_refused() -> None:
    """Of k, in calls and in runs of a plan; rows of q are copied (`test_calls.py`)."""
    q, kv = torch.randn(9, 1, 64).half(), torch.randn(9 * 64 + 1).half()[1:].view(9, 1, 64)
    wrapper = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20).byte(), backend="emulator")
    ends = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="k must have rows that start at multiples of 16 bytes"):
        cute_attn.single_prefill_with_kv_cache(q, kv, kv, backend="emulator")
    with emulator.using("sm_90a", kernels="fa2"):
        wrapper.plan(ends, ends, 1, 1, 64)
        with pytest.raises(ArgumentError, match="k must have rows that start at multiples of 16 bytes"):
            wrapper.run(q, kv, q)


@pytest.mark.parametrize("sms", [0, -1, 1.5, True, "132"])
def test_sms_must_be_a_positive_count(sms: Any) -> None:
    with pytest.raises(ArgumentError, match="sms must be None or an int >= 1"), emulator.using("sm_90a", sms=sms):
        pass
