"""The decode kernel on the emulator: few SMs and small lengths, so that segments are cut, joined and shared."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from cute_attn import emulator, xqa_batch_decode_with_kv_cache
from cute_attn.emulator import EmulatorError, adapter
from cute_attn.emulator.machine import Schedule
from cute_attn.kernels.xqa.host import runner as xqa_runner
from cute_attn.problem import XqaProblem
from cute_attn.runtime.arch import named
from cute_attn.xqa import decode as xqa_decode
from tests.support.xqa_case import XqaCase, build, random_case
from tests.support.xqa_producer import Producer

WORKSPACE_BYTES = 10 << 20
SCHEDULES = ("eager", "delayed", "adversarial")


def solve(case: XqaCase, arch: str, sms: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """ "" if the kernel of `arch` solves the case on a GPU of so many SMs, else what is wrong."""

    def run(problem: XqaProblem) -> None:
        inputs = {n: t for n, t in problem._asdict().items() if isinstance(t, torch.Tensor)}
        outputs = {n: inputs.pop(n) for n in ("out", "lse") if n in inputs}
        pairs = {f"scales {i}": t for i, t in enumerate((*(problem.block_scales or ()), *problem.scale_tensors))}
        scratch = {f"buffer {i}": t for i, t in enumerate(problem.scratch.buffers)}
        with adapter.visible(inputs | pairs | scratch, outputs | scratch):
            spec = xqa_runner.choose_spec(problem.features, case.seed % 2 == 0, named(arch))
            xqa_runner.Runner(problem.features, named(arch), sms, spec)(problem)

    monkeypatch.setattr(xqa_decode, "run", run)
    built = build(case)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8)
    workspace[8 << 20 :] = 0xFF
    with emulator.using(arch, schedule=Schedule(schedule, case.seed)):
        out, lse = xqa_batch_decode_with_kv_cache(**(built.arguments | {"workspace_buffer": workspace}))
    dirty = bool(workspace[: 8 << 20].any())
    return "semaphores are not zero again" if dirty else built.check(out, lse)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("seed", range(6))
def test_random(arch: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    r = random.Random(seed)
    sms, schedule = r.choice([1, 2, 3, 5, 11]), r.choice(SCHEDULES)
    case = random_case(seed, longest=400)
    if arch == "sm_80":
        case = dataclasses.replace(case, out=None)  # fp8 is not written there
    assert solve(case, arch, sms, schedule, monkeypatch) == ""


CASES = {
    "lengths at the edges": XqaCase(
        (0, 1, 15, 16, 17, 31, 32, 33, 0), kv="e4m3", heads=(4, 1), seed=1
    ),  # page 0 belongs to no request
    "one long request": XqaCase((1500,), kv="e4m3", heads=(4, 1)),
    "a long one among short ones": XqaCase((3, 900, 0, 5), heads=(2, 1), head_dim=64),
    "more rows than a block": XqaCase((40, 90), heads=(40, 2), q_len=2),
    "more requests than lanes": XqaCase(tuple(range(40)), kv="nvfp4", heads=(2, 1), head_dim=64, bmm1_scale=0.001),
    "shares that begin with a request": XqaCase((40,) * 33, heads=(2, 2), head_dim=64),
    "no requests": XqaCase((), heads=(2, 1)),
    "nothing to see": XqaCase((0, 0, 0), heads=(2, 1), sinks=True),
    "a tree that hides its first token at the end of a tile": XqaCase(
        (16, 16, 32, 32, 33, 34), q="fp16", kv="fp16", heads=(2, 2), q_len=16, q_lens=(2, 1, 1, 1, 2, 3), mask=True
    ),
    "a window inside a tile": XqaCase((500, 30), kv="e4m3", heads=(4, 2), window_left=5),
    "a window beyond 32 bits": XqaCase((0, 40), heads=(2, 2), q_len=3, window_left=1 << 31),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve(CASES[name], "sm_90a", 3, "adversarial", monkeypatch) == ""


@pytest.mark.emulator
def test_shares_past_the_last_of_as_many_requests_as_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two units in one CTA group of 17 shares, of which 16 have work: the last reads nothing, not even a row of q."""
    assert solve(XqaCase((0,) * 32, heads=(2, 2)), "sm_90a", 17, "eager", monkeypatch) == ""


def produced(kv: str, lengths: tuple[int, ...], broken: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel as a dependent launch of one that writes what it reads; `broken`: it does not wait."""
    scale = 0.002 if kv == "nvfp4" else None
    built = build(XqaCase(lengths, kv=kv, heads=(2, 1), head_dim=64, device_scales=True, bmm1_scale=scale))

    def run(problem: XqaProblem) -> None:
        named_tensors = {str(i): t for i, t in enumerate(flat(problem))}
        with adapter.visible(named_tensors, named_tensors):
            producer = Producer(built, "sm_90a", 2)
            producer.spoil()
            producer.write()
            producer.check()
            spec = xqa_runner.choose_spec(problem.features, True, named("sm_90a"))
            xqa_runner.Runner(problem.features, named("sm_90a"), 2, spec)(problem)

    def rewrite(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if broken else ptx

    monkeypatch.setattr(xqa_decode, "run", run)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8)
    with emulator.using("sm_90a", rewrite=rewrite):
        out, lse = xqa_batch_decode_with_kv_cache(**(built.arguments | {"workspace_buffer": workspace}))
    return built.check(out, lse)


def flat(problem: XqaProblem) -> list[torch.Tensor]:
    parts = [x if isinstance(x, tuple) else (x,) for x in (*problem[1:], problem.scratch.buffers)]
    return [x for part in parts for x in part if isinstance(x, torch.Tensor)]


@pytest.mark.emulator
@pytest.mark.parametrize("kv", ["bf16", "e4m3", "nvfp4"])
def test_waits_for_the_launch_before(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert produced(kv, (40, 1), False, monkeypatch) == ""
    with pytest.raises(EmulatorError, match=r"before griddepcontrol\.wait"):
        produced(kv, (40, 1), True, monkeypatch)
