"""Kernels that the decode kernel's plans take by the number of requests and of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import single_decode_with_kv_cache
from cute_attn.emulator import Schedule, using
from cute_attn.kernels.xqa import tiles
from tests.support import batch_case
from tests.support.batch_case import E4M3, BatchCase, decode, dims, heads
from tests.support.graphs import graph_wrapper
from tests.support.right import assert_planned_right, assert_solved
from tests.support.xqa_rules import move_steps

pytestmark = pytest.mark.emulator

EVEN, UNEVEN, OTHER_EVEN = (130, 150, 141), (40, 300, 77), (90, 81, 85)
PAIRS = 6
NONE_SHORT = {145: 1, 513: 1, 1025: 1, 4097: 1}  # steps of keys: no length is for CTAs and clusters of a segment,
NO_CLUSTERS = {13: 1}  # and of segments: however few
RING_KEYS = ("warps", "stages", "cols", "work", "prefetch")
DTYPES: dict[str, dict[str, Any]] = {"16 bits": {"dtype": "bfloat16"}, "8 bits": {"kv_dtype": E4M3}}


@pytest.fixture(autouse=True)
def few_pairs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator is slow."""
    move_steps(monkeypatch, pairs={tiles.FEW + 1: PAIRS, tiles.EVEN: PAIRS}, keys=NONE_SHORT, segments=NO_CLUSTERS)


def case(kv_lens: tuple[int, ...], num_heads: tuple[int, int] = (8, 2), dim: int = 128, **rest: Any) -> BatchCase:
    return decode(kv_lens, **heads(*num_heads), **dims(dim), **rest)


def work(planned: Any, batch: BatchCase, emulation: Any) -> str:
    """Plans and runs the batch; tells how the kernel divided it."""
    assert_planned_right(batch, planned)
    return str(emulation.records[-1].spec["work"])


@pytest.mark.parametrize("schedule", ["eager", "delayed", "adversarial"])
def test_one_kernel_takes_requests_of_any_lengths(schedule: str) -> None:
    batches = [case(lens, **DTYPES["8 bits"]) for lens in (EVEN, UNEVEN, OTHER_EVEN)]
    with using("sm_90a", kernels="xqa", sms=1, schedule=Schedule(schedule, 1)) as emulation:
        planned = batch_case.wrapper(batches[0], backend="emulator")
        assert [work(planned, batch, emulation) for batch in batches] == ["even"] * 3
    assert len({(str(record.spec), record.grid) for record in emulation.records}) == 1


def test_captured_launches_take_any_lengths() -> None:
    first, second = (case(lens, **DTYPES["8 bits"]) for lens in (EVEN, UNEVEN))
    with using("sm_90a", kernels="xqa", sms=2) as emulation:
        planned, _ = graph_wrapper(first, "cpu", 40, 0, backend="emulator")
        assert [work(planned, batch, emulation) for batch in (first, second)] == ["even"] * 2


@pytest.mark.parametrize(("num_heads", "dim"), [((10, 5), 128), ((8, 2), 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_batches_have_shares_of_a_cta(dtype: str, num_heads: tuple[int, int], dim: int) -> None:
    """Kv heads that the warps of a CTA do not divide, other head dims."""
    batch = case(EVEN, num_heads, dim, **DTYPES[dtype])
    with using("sm_90a", kernels="xqa", sms=1, schedule=Schedule("delayed", 1)) as emulation:
        assert work(batch_case.wrapper(batch, backend="emulator"), batch, emulation) == "shares"


def test_fewer_pairs_have_shares_of_a_cta(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {tiles.FEW + 1: PAIRS, tiles.EVEN: PAIRS + 1}
    move_steps(monkeypatch, pairs=pairs, keys=NONE_SHORT, segments=NO_CLUSTERS)
    batch = case(EVEN, **DTYPES["8 bits"])
    with using("sm_90a", kernels="xqa", sms=1) as emulation:
        assert work(batch_case.wrapper(batch, backend="emulator"), batch, emulation) == "shares"


# Requests, of two kv heads each: warps, stages and tokens of a tile, how CTAs divide the work, what they prefetch.
SHORT_WINDOWS = {
    "8 bits": {
        1: (4, 2, 16, "whole", "smem"),
        2: (2, 2, 32, "whole", "smem"),
        3: (2, 2, 32, "whole", "smem"),
        4: (4, 2, 32, "whole", "none"),
        5: (2, 2, 32, "heads", "none"),
    },
    "16 bits": {
        1: (4, 2, 16, "whole", "smem"),
        2: (4, 2, 16, "whole", "smem"),
        3: (4, 2, 16, "whole", "none"),
        5: (2, 2, 16, "heads", "none"),
    },
}


@pytest.mark.parametrize(("dtype", "requests"), [(dtype, n) for dtype, found in SHORT_WINDOWS.items() for n in found])
def test_kernels_follow_the_number_of_short_windows(dtype: str, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    move_steps(monkeypatch, pairs={tiles.FEW + 1: 3, 257: 5, 513: 7, tiles.EVEN: 10})
    batch = windows(requests, 2, **DTYPES[dtype])
    with using("sm_90a", kernels="xqa", sms=2, schedule=Schedule("adversarial", 2)) as emulation:
        assert_solved(batch, backend="emulator")
    found = {tuple(record.spec[key] for key in RING_KEYS) for record in emulation.records}
    assert found == {SHORT_WINDOWS[dtype][requests]}


@pytest.mark.parametrize(("num_heads", "own"), [(4, True), (3, False)])
def test_short_windows_have_warps_with_a_head_each(num_heads: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two divide the kv heads."""
    move_steps(monkeypatch, pairs={tiles.FEW + 1: 3, 257: 3, 513: 3, tiles.EVEN: PAIRS})
    with using("sm_90a", kernels="xqa", sms=2, schedule=Schedule("delayed", 2)) as emulation:
        assert_solved(windows(5, num_heads, **DTYPES["8 bits"]), backend="emulator")
    (record,) = emulation.records
    assert (record.spec["warps"], record.spec["work"]) == ((2, "heads") if own else (2, "whole"))


@pytest.mark.parametrize(
    ("requests", "ring"),
    [(1, (4, 2, 32, "cluster", "none")), (2, (8, 2, 16, "whole", "l2")), (3, (2, 2, 16, "heads", "none"))],
)
def test_kernels_of_longer_windows(requests: int, ring: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one request and of more segments than have clusters."""
    move_steps(monkeypatch, pairs={tiles.FEW + 1: 5, tiles.EVEN: PAIRS}, segments={9: 3, 13: 1, 25: 1, 33: 1, 65: 1})
    batch = decode((500, 40, 301)[:requests], window_left=299, **heads(8, 2), **dims(128), **DTYPES["8 bits"])
    with using("sm_90a", kernels="xqa", sms=2, schedule=Schedule("adversarial", 3)) as emulation:
        assert_solved(batch, backend="emulator")
    assert {tuple(record.spec[key] for key in RING_KEYS) for record in emulation.records} == {ring}


def windows(requests: int, num_heads: int, **dtype: Any) -> BatchCase:
    """Requests of short windows with sinks, of `num_heads` kv heads."""
    lens = (130, 5, 0, 200, 1)[:requests]
    return decode(lens, window_left=127, sinks=True, **heads(8 * num_heads, num_heads), **dims(64), **dtype)


def test_one_request_of_few_keys_has_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others have smaller ones; so have captured launches, which may grow."""
    move_steps(monkeypatch, keys={513: 1, 4097: 201}, kib={1025: 25})
    batches = [decode((n,), kv_dtype=E4M3, **heads(20, 5), **dims(128)) for n in (150, 201, 40)]
    rings = []
    with using("sm_90a", kernels="xqa", sms=64) as emulation:
        for graph in (False, True):
            planned = batch_case.wrapper(batches[0], backend="emulator")
            if graph:
                planned, _ = graph_wrapper(batches[0], "cpu", 40, 0, backend="emulator")
            for batch in batches:
                work(planned, batch, emulation)
                spec = emulation.records[-1].spec
                rings.append((spec["cluster_size"], spec["stages"]))
    assert rings == [(8, 3), *[(6, 2)] * 5]


@pytest.mark.parametrize(("kv_len", "cluster"), [(150, 8), (201, 6)])
def test_single_decode_of_few_keys_has_clusters(kv_len: int, cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    move_steps(monkeypatch, keys={513: 1, 4097: 201}, kib={1025: 25})
    generator = torch.Generator().manual_seed(kv_len)
    q = torch.randn(10, 128, generator=generator).half()
    k, v = (torch.randn(kv_len, 5, 128, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    with using("sm_90a", kernels="xqa", sms=64) as emulation:
        out = single_decode_with_kv_cache(q, k, v, backend="emulator")
    scores = torch.einsum("hgd,nhd->hgn", q.double().view(5, 2, 128), k.double()) * 128**-0.5
    truth = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v.double()).reshape(10, 128)
    torch.testing.assert_close(out.double(), truth, rtol=2e-2, atol=2e-3)
    assert emulation.records[-1].spec["cluster_size"] == cluster
