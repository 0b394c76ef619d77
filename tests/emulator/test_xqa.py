"""The decode kernel on the emulator: few SMs and small lengths, so that segments are cut, joined and shared."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from cute_attn import NotSupported, emulator, xqa_batch_decode_with_kv_cache
from cute_attn.emulator import EmulatorError, adapter
from cute_attn.emulator.errors import LaunchFault
from cute_attn.emulator.machine import Schedule
from cute_attn.emulator.settings import Record
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.host.family import DecodeRun
from cute_attn.problem import DecodeProblem
from cute_attn.request.decode import COUNTER_BYTES
from cute_attn.xqa import xqa
from tests.support.schedules import KINDS, all_alike, in_turn
from tests.support.xqa_case import Built, XqaCase, build, random_case
from tests.support.xqa_producer import Producer
from tests.support.xqa_rules import NO_CLUSTERS, forced_ring, move_steps

WORKSPACE_BYTES = 10 << 20
MANY = 1 << 30


def decode(built: Built, workspace: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The public call on the emulator, with NaN where partial results will be."""
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8) if workspace is None else workspace
    workspace[:COUNTER_BYTES], workspace[COUNTER_BYTES:] = 0, 0xFF
    arguments = built.arguments | {"workspace_buffer": workspace, "backend": "emulator"}
    out, lse = xqa_batch_decode_with_kv_cache(**arguments)
    assert not workspace[:COUNTER_BYTES].any()
    return out, lse


def launches(case: XqaCase, sms: int, schedule: str, workspace: torch.Tensor | None = None) -> list[Record]:
    """Those of the public call on an emulated Hopper GPU, the results of which are compared with the reference."""
    built = build(case)
    with emulator.using("sm_90a", sms=sms, schedule=Schedule(schedule, 1)) as emulation:
        found = decode(built, workspace)
    assert built.check(*found) == ""
    return emulation.records


def solve(case: XqaCase, arch: str, sms: int, schedule: str, monkeypatch: pytest.MonkeyPatch, dealt: int = 0) -> str:
    """ "" if the kernel of `arch` solves the case on a GPU of so many SMs, else what is wrong. Kernels for few and for
    many requests take turns, and those that cut the keys of short windows with those that do not. CTAs take segments of
    `dealt` positions whole, as they become free: none, so that small problems are cut as large ones are."""
    monkeypatch.setattr(tiles, "DEALT", dealt)
    short = case.window_left >= 0 and case.seed % 3 != 2  # may be
    steps = NO_CLUSTERS if short else {**NO_CLUSTERS, "keys": {145: 1, 513: 1, 1025: 1}}
    move_steps(monkeypatch, pairs={tiles.FEW + 1: MANY if case.seed % 2 == 0 else 1}, **steps)
    built = build(case)
    with emulator.using(arch, sms=sms, schedule=Schedule(schedule, case.seed)) as emulation:
        out, lse = decode(built)
    assert [record.spec["kernel"] for record in emulation.records] == ["xqa"] * bool(out.shape[0])  # one launch
    return built.check(out, lse)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("seed", range(6))
def test_random(arch: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    r = random.Random(seed)
    sms, schedule = r.choice([1, 2, 3, 5, 11]), r.choice(KINDS)
    case = random_case(seed, longest=400)
    if arch == "sm_80":
        case = dataclasses.replace(case, out=None)  # fp8 is not written there
    assert solve(case, arch, sms, schedule, monkeypatch, tiles.DEALT if seed % 3 == 0 else 0) == ""


CASES = {
    "lengths at the edges": XqaCase(
        (0, 1, 15, 16, 17, 31, 32, 33, 0), kv="e4m3", heads=(4, 1), seed=1
    ),  # page 0 belongs to no request
    "one long request": XqaCase((1500,), kv="e4m3", heads=(4, 1)),
    "two long requests of rows for several warps": XqaCase((700, 900), kv="e4m3", heads=(8, 1)),
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
    "short windows": XqaCase(
        (500, 0, 1, 40, 33), q="fp16", kv="e4m3", heads=(16, 2), head_dim=64, window_left=40, sinks=True
    ),
    "short windows of drafts": XqaCase(
        (700, 5, 90), kv="nvfp4", heads=(24, 2), q_len=5, window_left=30, mask=True, bmm1_scale=0.001
    ),
    "a window beyond 32 bits": XqaCase((0, 40), heads=(2, 2), q_len=3, window_left=1 << 31),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve(CASES[name], "sm_90a", 3, "adversarial", monkeypatch) == ""


GROUPS = {  # SMs, and requests of which one has more than `MOST_TOGETHER` splits; the first, groups of groups
    "one request": (72, "2x2x16x4", XqaCase((8700,), heads=(2, 1), head_dim=64)),
    "between others": (16, "2x2x16x3", XqaCase((9, 3600, 70), heads=(3, 1), head_dim=256, q_len=2, q_lens=(1, 2, 2))),
    "warps with a head each": (12, "2x2x16x4e", XqaCase((5, 1500, 7), heads=(4, 2), head_dim=64, sinks=True)),
}


@pytest.mark.emulator
@pytest.mark.parametrize(("name", "schedule"), in_turn(GROUPS, KINDS, lambda name: name == "warps with a head each"))
def test_groups_of_splits(name: str, schedule: str) -> None:
    sms, text, case = GROUPS[name]
    with forced_ring(text, case, tiles.Shape(len(case.seq_lens), case.heads[1])):
        launches(case, sms, schedule)


HEAD_DIMS = {
    "two warps, 16 bits": XqaCase((300, 7, 0, 33), heads=(8, 1), head_dim=512, window_left=60, sinks=True),
    "two warps, 8 bits, drafts": XqaCase((90, 41), kv="e4m3", heads=(8, 2), head_dim=512, q_len=3, mask=True, seed=1),
    "two warps, 4 bits": XqaCase((200, 35), kv="nvfp4", heads=(4, 1), head_dim=512, bmm1_scale=0.001),
    "two warps, padded": XqaCase((100,), kv="fp16", q="fp16", heads=(3, 1), head_dim=304, page_size=3),
    "narrow": XqaCase((300, 70), kv="e5m2", q="fp16", heads=(12, 1), head_dim=32, form="tensor"),
    "half a load": XqaCase((90, 70, 1), heads=(4, 2), head_dim=72, kv_layout="HND", seed=1),
    "half a load of 8 bits": XqaCase((290, 7), kv="e4m3", heads=(8, 1), head_dim=80, q_len=2, out="e4m3"),
}


ON_HOPPER = [("sm_90a", *case) for case in in_turn(HEAD_DIMS, KINDS, all_alike)]
IN_LESS_SHARED_MEMORY = [(arch, "two warps, 16 bits", "adversarial") for arch in ("sm_80", "sm_120a")]


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "name", "schedule"), [*ON_HOPPER, *IN_LESS_SHARED_MEMORY])
def test_head_dims(arch: str, name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a row that two warps share, and columns that pad it; beyond a row's end is another head's, or NaN."""
    assert solve(HEAD_DIMS[name], arch, 3, schedule, monkeypatch) == ""


@pytest.mark.emulator
def test_warps_that_scale_their_columns_of_a_query_differently() -> None:
    """Over 8-bit caches q becomes fp16, scaled by the largest number among a warp's columns of a row."""
    built = build(XqaCase((90,), kv="e4m3", heads=(4, 1), head_dim=512, bmm1_scale=0.002))
    factors = torch.ones(1, 4, 512)
    factors[:, ::2, :256] = 16
    factors[:, 1, 256:] = 64
    built.arguments["query"].mul_(factors)
    built.query *= factors
    with emulator.using("sm_90a", sms=2):
        assert built.check(*decode(built)) == ""


def produced(kv: str, lengths: tuple[int, ...], broken: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel as a dependent launch of one that writes what it reads; `broken`: it does not wait."""
    scale = 0.002 if kv == "nvfp4" else None
    built = build(XqaCase(lengths, kv=kv, heads=(2, 1), head_dim=64, device_scales=True, bmm1_scale=scale))
    solve_problem, visible = DecodeRun.__call__, adapter.visible

    def after_producer(runner: DecodeRun, problem: DecodeProblem) -> None:
        producer = Producer(built, "sm_90a", 2)
        producer.spoil()
        producer.write()
        producer.check()
        solve_problem(runner, problem)

    def rewrite(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if broken else ptx

    monkeypatch.setattr(DecodeRun, "__call__", after_producer)
    monkeypatch.setattr(adapter, "visible", lambda inputs, outputs: visible(inputs | outputs, inputs | outputs))
    with emulator.using("sm_90a", sms=2, rewrite=rewrite):
        return built.check(*decode(built))


@pytest.mark.emulator
@pytest.mark.parametrize("kv", ["bf16", "e4m3", "nvfp4"])
def test_waits_for_the_launch_before(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert produced(kv, (40, 1), False, monkeypatch) == ""
    monkeypatch.undo()
    with pytest.raises(EmulatorError, match=r"before griddepcontrol\.wait"):
        produced(kv, (40, 1), True, monkeypatch)


@pytest.mark.emulator
@pytest.mark.parametrize("head_dim", [64, 512])
def test_the_low_level_form(head_dim: int) -> None:
    """Counters and partial results in a buffer each, and a window that counts the row's own key."""
    built = build(XqaCase((900, 7), kv="e4m3", heads=(2, 1), head_dim=head_dim, window_left=700))
    given = built.low_level(1 << 16, num_kv_heads=1, sliding_win_size=701, backend="emulator")
    given["workspace_buffer"].fill_(math.nan)
    with emulator.using("sm_90a", sms=3) as emulation:
        xqa(**given)
    assert len(emulation.records) == 1
    assert not given["semaphores"].view(torch.int32).any()
    assert given["workspace_buffer"].isnan().all() == (head_dim == 64)  # clusters merge in shared memory
    assert built.check(given["output"], None) == ""


@pytest.mark.emulator
@pytest.mark.parametrize("words", [0, 3])
def test_the_low_level_form_with_buffers_that_are_too_small(words: int) -> None:
    """It uses memory of its own, and leaves its counters at zero (the emulator looks)."""
    built = build(XqaCase((900, 7), kv="e4m3", heads=(2, 1), head_dim=512))
    given = built.low_level(words, num_kv_heads=1, backend="emulator")
    for _ in range(2):
        given["output"].zero_()
        with emulator.using("sm_90a", sms=3):
            xqa(**given)
        assert built.check(given["output"], None) == ""


@pytest.mark.emulator
def test_counters_that_do_not_start_at_zero() -> None:
    built = build(XqaCase((900,), kv="e4m3", heads=(2, 1), head_dim=64))
    dirty = torch.ones(WORKSPACE_BYTES, dtype=torch.uint8)
    with emulator.using("sm_90a", sms=3), pytest.raises(LaunchFault, match="left counter 0 of"):
        xqa_batch_decode_with_kv_cache(**built.arguments | {"workspace_buffer": dirty, "backend": "emulator"})


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("changes", "kernels", "arch", "feature"),
    [
        ({}, "fa2", "sm_90a", "lengths and page tables on the device"),
        ({}, "fa3", "sm_90a", "lengths and page tables on the device"),
        ({"q_len": 2, "mask": True}, "fa2", "sm_90a", "tree masks"),
        ({"kv": "nvfp4", "head_dim": 32}, "auto", "sm_90a", "head dimensions"),
        ({"out": "e4m3"}, "auto", "sm_80", "before compute capability 9.0"),
    ],
)
def test_what_a_gpu_refuses(changes: dict[str, Any], kernels: str, arch: str, feature: str) -> None:
    built = build(dataclasses.replace(XqaCase((9,), heads=(2, 1), head_dim=64), **changes))
    with emulator.using(arch, kernels=kernels), pytest.raises(NotSupported, match=feature):
        decode(built)
