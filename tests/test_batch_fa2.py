"""The wrappers over fa2's host side: what they hand over, judged by the interpreter of the kernels' contract."""

from __future__ import annotations

import dataclasses
import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_attn import WorkspaceError, select
from cute_attn.backends import batched, fa2_batch, fa2_kernels
from cute_attn.kernels.spec import Tile
from cute_attn.runtime.arch import named
from tests.batch_case import (
    SMALL,
    BatchCase,
    call,
    check,
    decode,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    random_batch_case,
    random_lengths,
    wrapper,
)
from tests.fa2_contract import InterpretedLaunch
from tests.graphs import Captured, Pair
from tests.matrix import poisoned_memory
from tests.test_batch_lifecycle import DECODE, graph_wrapper

ARCH = named("sm_90a")
SMS = 66
TILE = Tile(16, 16, 1, 1, 2)  # small: small batches then have many


@pytest.fixture(autouse=True)
def on_fa2(monkeypatch: pytest.MonkeyPatch) -> None:
    InterpretedLaunch.fired = []
    fa2_kernels.load.cache_clear()
    fa2_batch.ready.cache_clear()
    fa2_batch.tiling.cache_clear()
    monkeypatch.setattr(fa2_kernels, "Launch", InterpretedLaunch)
    monkeypatch.setattr(fa2_kernels, "artifacts", types.SimpleNamespace(get=lambda spec, arch: spec))
    monkeypatch.setattr(batched, "current_stream", lambda index: 77)
    monkeypatch.setattr(
        fa2_batch, "tiles", types.SimpleNamespace(choose=lambda *args: TILE, resident_ctas=lambda *args: 2)
    )
    monkeypatch.setattr(batched, "for_device", lambda index: ARCH)
    monkeypatch.setattr(batched, "multiprocessors", lambda index: SMS)
    monkeypatch.setattr(select, "chosen", lambda features, name, rows: select.BY_NAME["fa2"])
    monkeypatch.setattr(select, "reasons_against", lambda *args: [])


def assert_right(case: BatchCase, made: Any = None) -> None:
    inputs = make(case)
    if made is not None:
        made.plan(**plan_arguments(case, inputs))
    with poisoned_memory():
        out, lse = call(case, inputs, made)
    verdict = check(case, inputs, out, lse)
    assert verdict.ok, f"{case}: {verdict.detail}"


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_small(case: BatchCase) -> None:
    assert_right(case)


@pytest.mark.parametrize("seed", range(60))
def test_random(seed: int) -> None:
    assert_right(random_batch_case(seed, max_len=150, max_batch=4))


# ---- CUDA graphs: launches fired again as they were


def capture(run: Callable[[], Pair]) -> tuple[Pair, Callable[[], None]]:
    held: list[tuple[InterpretedLaunch, Any]] = []
    fire = InterpretedLaunch.fire

    def recording(launch: InterpretedLaunch, *arguments: Any) -> None:
        held.append((launch, arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedLaunch, "fire", recording)
        results = run()

    def replay() -> None:
        for launch, arguments in held:
            fire(launch, *arguments)

    return results, replay


GRAPHED = (
    paged((37, 2, 5, 16), (300,) * 4, page_size=4, mask="causal", **heads(4, 2)),
    paged((9,) * 3, (130,) * 3, page_size=5, fixed_split_size=8, kv_layout="HND"),
    paged((7, 20), (90,) * 2, disable_split_kv=True, sinks=True),
    paged((13, 5, 9), (70,) * 3, mask="custom", window_left=30),
    ragged((30, 20, 5), (150,) * 3, mask="causal"),
    ragged((30, 20), (90,) * 2, kv_layout="HND", mask="packed"),
    decode((400,) * 4, **heads(8, 2)),
    decode((200,) * 3, q_len=3, page_size=1, **heads(4, 1)),
    decode((300,) * 2, fixed_split_size=3, kv_dtype="float8_e4m3fn"),
)


@pytest.mark.parametrize("case", GRAPHED, ids=lambda case: case.id)
def test_replays_with_other_lengths(case: BatchCase) -> None:
    captured = Captured(case, "cpu", capture)
    captured.replay(case)
    for seed in range(5):
        captured.replay(random_lengths(case, seed, max(case.kv_lens)))


def test_replays_after_another_workspace() -> None:
    """A graph captured before sees no later plan, but the records that it reads are still there."""
    case = ragged((30, 20, 5), (150,) * 3, mask="causal")
    captured = Captured(case, "cpu", capture)
    captured.replay(case)
    expected = captured.out.clone()
    held, records = captured.wrapper._workspace, captured.wrapper._planned().launch.records
    size = records.numel()
    del records
    captured.wrapper.reset_workspace_buffer(torch.empty_like(held))
    other = random_lengths(case, 1, 150)
    captured.wrapper.plan(**plan_arguments(other, make(other)))
    gc.collect()
    taken = [torch.full((size,), 0x7F7F7F7F, dtype=torch.int32) for _ in range(100)]
    captured.out.zero_()
    captured.again()
    assert torch.equal(captured.out, expected)
    del taken


@pytest.mark.parametrize("splits", [{}, {"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_workspace_size_is_enough(splits: dict[str, Any], graph: bool) -> None:
    """With exactly that many bytes the schedule is that of a large workspace; with fewer, fixed splits are refused."""
    case = dataclasses.replace(DECODE, kv_lens=(140, 3, 90), **splits)
    made = graph_wrapper(case, pages=60)[0] if graph else wrapper(case)
    arguments = plan_arguments(case, make(case))
    float_bytes, int_bytes = made.workspace_size(**arguments)
    assert (float_bytes > 0) == (splits != {"disable_split_kv": True})
    assert int_bytes > 0
    assert made._plan is None
    made.plan(**arguments)
    records = made._planned().launch.records
    if not graph:  # the room of captured launches follows from the workspace
        assert records.nbytes == int_bytes
    made.reset_workspace_buffer(torch.empty(float_bytes, dtype=torch.uint8))
    made.plan(**arguments)
    if not graph:
        assert torch.equal(made._planned().launch.records, records)
    assert_right(case, made)
    if "fixed_split_size" in splits and not graph:
        made.reset_workspace_buffer(torch.empty(float_bytes - 1, dtype=torch.uint8))
        with pytest.raises(WorkspaceError, match=f"must have {float_bytes} bytes"):
            made.plan(**arguments)


@pytest.mark.parametrize("splits", [{"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
def test_tiles_do_not_depend_on_the_batch(splits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a promise says that bits do not: another tile sums in another order."""
    asked = set()

    def choose(kind: Any, rows: int, arch: Any) -> Tile:
        asked.add((len(made), rows))
        return TILE

    monkeypatch.setattr(fa2_batch.tiles, "choose", choose)
    made: list[Any] = []
    for qo_lens in ((1,), (1, 1), (7, 300), (64, 0, 2)):
        case = paged(qo_lens, (30,) * len(qo_lens), **splits)
        wrapper(case).plan(**plan_arguments(case, make(case)))
    made.append("decode")
    for kv_lens in ((40,), (1, 90, 0)):
        case = decode(kv_lens, q_len=2, **splits)
        wrapper(case).plan(**plan_arguments(case, make(case)))
    assert len(asked) == 2
    assert (1, 2 * 2) in asked  # q_len tokens of a group of two
