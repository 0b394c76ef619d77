"""The kernel for latent attention on the emulator: few SMs and small lengths, so that requests are cut and joined."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from cute_attn import NotSupported, emulator
from cute_attn.emulator.errors import EmulatorError
from cute_attn.emulator.machine import Schedule
from tests.support.mla_case import ONE, MlaCase, random_case
from tests.support.schedules import KINDS, all_alike, in_turn

pytestmark = pytest.mark.emulator

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
EDGES = (0, 1, 31, 32, 33, 63, 64, 65, 128, 0)
CASES = {
    "lengths at the edges": MlaCase(heads=8, q_lens=(1,) * 10, kv_lens=EDGES, page_size=16),
    "drafts at the edges": MlaCase(heads=12, q_lens=(2,) * 5, kv_lens=(1, 2, 64, 65, 66), page_size=1),
    "one long request": MlaCase(heads=16, q_lens=(1,), kv_lens=(700,), page_size=64),
    "one head": MlaCase(heads=1, q_lens=(8, 8), kv_lens=(100, 7), page_size=32),
    "32 heads": MlaCase(heads=32, q_lens=(1, 1), kv_lens=(130, 63), page_size=32, dtype=torch.float16),
    "64 heads": MlaCase(heads=64, q_lens=(1, 1), kv_lens=(65, 200), page_size=64),
    "96 heads": MlaCase(heads=96, q_lens=(1, 1), kv_lens=(33, 5), page_size=16),
    "128 heads, two tokens": MlaCase(heads=128, q_lens=(2,), kv_lens=(130,), page_size=64),
    "eight tokens": MlaCase(heads=8, q_lens=(8, 8), kv_lens=(70, 3), page_size=16),
    "equally long": MlaCase(heads=16, q_lens=(1,) * 4, kv_lens=(250, 240, 200, 256), page_size=16),
    "equally long, two blocks of rows": MlaCase(heads=70, q_lens=(1,) * 3, kv_lens=(120, 128, 100), page_size=32),
    "ragged": MlaCase(heads=5, q_lens=(3, 0, 1, 7), kv_lens=(65, 9, 0, 130), page_size=16, dtype=torch.float16),
    "scores that rise": MlaCase(heads=6, q_lens=(2,), kv_lens=(390,), page_size=16, rising=True),
    "sinks": MlaCase(heads=16, q_lens=(1, 1, 1), kv_lens=(0, 40, 65), page_size=1, sinks=True),
    "more requests than lanes": MlaCase(heads=1, q_lens=(1,) * 33, kv_lens=(0, 1, 2) * 11, page_size=16),
    "e4m3": MlaCase(heads=16, q_lens=(1, 1, 1), kv_lens=(65, 0, 200), page_size=32, narrow=True),
    "e4m3, fp16, drafts": MlaCase(
        heads=16, q_lens=(2, 2), kv_lens=(65, 30), page_size=16, dtype=torch.float16, narrow=True
    ),
    "e4m3, 64 heads": MlaCase(heads=64, q_lens=(1,), kv_lens=(200,), page_size=1, narrow=True),
    "no rotated columns": MlaCase(heads=16, q_lens=(1, 2), kv_lens=(65, 130), page_size=16, rope=0),
    "e4m3, no rotated columns": MlaCase(
        heads=32, q_lens=(1, 1), kv_lens=(65, 20), page_size=1, dtype=torch.float16, narrow=True, rope=0
    ),
    "scales of groups": MlaCase(
        heads=16, q_lens=(1, 1, 1), kv_lens=(200, 0, 65), page_size=16, narrow=True, grouped=True
    ),
    "scales of groups alone": MlaCase(
        heads=64, q_lens=(2, 1), kv_lens=(70, 33), page_size=32, narrow=True, rope=0, grouped=True
    ),
    "rows of 656 bytes": MlaCase(
        heads=12, q_lens=(1, 3), kv_lens=(130, 64), page_size=64, narrow=True, grouped=True, wide=True
    ),
    "nothing to see": MlaCase(heads=4, q_lens=(1, 2), kv_lens=(0, 0), page_size=16),
}


SMALL = ("drafts at the edges", "e4m3", "one long request", "96 heads", "sinks", "nothing to see")
PLANNED = [name for name, case in CASES.items() if case.grouped]  # scales of groups come with runs only
# The kernel on wgmma has all cases. Those on mma.sync are one program with other tiles, which share them.
DEALT = [(arch, name) for i, name in enumerate(CASES) for arch in ("sm_90a", ("sm_80", "sm_120a", "sm_100a")[i % 3])]


def solve(case: MlaCase, arch: str, sms: int, schedule: str, *, planned: bool) -> None:
    """Run a case by the wrapper or by the function, and compare it with the formula."""
    with emulator.using(arch, sms=sms, schedule=Schedule(schedule, case.seed)) as emulation:
        planned = planned or case.grouped
        found = case.wrapped("emulator") if planned else case.trtllm(backend="emulator")
    kernel = "mla_wgmma" if arch == "sm_90a" else "mla"
    assert [record.spec["kernel"] for record in emulation.records] == [kernel]  # one launch
    case.check(found, case.scales if planned else ONE)


@pytest.mark.parametrize(("arch", "name"), DEALT)
def test_cases(arch: str, name: str) -> None:
    solve(CASES[name], arch, 3, "eager", planned=arch in ("sm_80", "sm_90a"))


@pytest.mark.parametrize(("name", "schedule"), in_turn((*SMALL, *PLANNED), KINDS[1:], all_alike))
def test_schedules(name: str, schedule: str) -> None:
    solve(CASES[name], "sm_90a", 5, schedule, planned=False)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("seed", range(6))
def test_random(seed: int, arch: str) -> None:
    r = random.Random(seed)
    case = random_case(r, 6, 400, heads=r.choice((1, 4, 8, 12, 16, 32, 64)))
    solve(case, arch, r.choice((1, 2, 3, 7)), r.choice(KINDS), planned=not case.causal or seed % 2 == 0)


@pytest.mark.parametrize("scale", [-0.1, 0.0])
@pytest.mark.parametrize("arch", ARCHS)
def test_scales_on_the_device(arch: str, scale: float) -> None:
    """A negative one turns the order of scores around; under 0 hidden tokens stay hidden."""
    case = CASES["drafts at the edges"]
    with emulator.using(arch, sms=3):
        scales = {"bmm1_scale": torch.tensor([scale]), "bmm2_scale": torch.tensor([0.5])}
        out, lse = case.trtllm(backend="emulator", **scales)
    want, want_lse = case.trtllm(backend="reference", **scales)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("schedule", KINDS)
def test_groups_of_ctas(schedule: str) -> None:
    """More CTAs share a request than merge at once: groups merge, then the last one merges their states."""
    case = MlaCase(heads=3, q_lens=(2,), kv_lens=(1500,), page_size=16, sinks=True)
    solve(case, "sm_90a", 26, schedule, planned=False)


@pytest.mark.parametrize(
    ("tiles", "sms", "states"),
    [
        ((3, 3), 3, set()),  # shares of 4 positions would cut both; two CTAs take a whole one each
        ((6, 6), 6, {(0, 1), (1, 0), (2, 0), (3, 1), (4, 0), (5, 0)}),  # thirds of each
        ((3, 2), 3, set()),  # shares of 3 would cut the first; two CTAs take a whole one each
        ((20, 1), 3, {(0, 1), (1, 0), (2, 0)}),  # shares of 9, wherever they end
        ((8,), 2, {(0, 1), (1, 0)}),
    ],
)
def test_where_requests_are_cut(tiles: tuple[int, ...], sms: int, states: set[tuple[int, int]]) -> None:
    """A segment takes two positions and one per tile. A CTA with a part of one leaves a state in one of its two places:
    that for a segment which it begins is the second."""
    case = MlaCase(heads=4, q_lens=(1,) * len(tiles), kv_lens=[64 * n for n in tiles], page_size=64)
    workspace = torch.full((8 << 20,), 0xFF, dtype=torch.uint8)
    with emulator.using("sm_90a", sms=sms), pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlaCase, "workspace", lambda _: workspace)
        case.check(case.trtllm(backend="emulator"))
    sums = workspace[: sms * 2 * 64 * 8].view(torch.float32).reshape(sms, 2, 64, 2)[..., :4, 1]
    written = ~sums.isnan()
    assert (written.any(-1) == written.all(-1)).all()
    assert {(cta, place) for cta, place in written.any(-1).nonzero().tolist()} == states


def test_strides_of_the_caller() -> None:
    """Rows of queries, caches and outputs with gaps; the workspace is too small for partial results."""
    case = dataclasses.replace(CASES["64 heads"], made={})
    wide = torch.full((*case.q.shape[:2], 1024), torch.nan, dtype=case.dtype)
    wide[..., :576] = case.q
    pages = torch.full((len(case.cache), 2, 64, 640), torch.nan, dtype=case.dtype)
    pages[:, 1, :, :576] = case.cache
    case.made.update(q=wide[..., :576], cache=pages[:, 1, :, :576])
    out = torch.empty(2, 1, 64, 1024, dtype=case.dtype)[..., :512]
    with emulator.using("sm_90a", sms=4):
        found = case.trtllm(backend="emulator", out=out)
        assert found[0] is out
        case.check(found)


def test_rows_of_no_request_are_left_alone() -> None:
    case = CASES["ragged"]
    longer = dataclasses.replace(case, made={})
    longer.made["q"] = torch.cat((case.q, case.q[:2]))
    out = torch.full((13, 5, 512), 7, dtype=case.dtype)
    with emulator.using("sm_90a", sms=3):
        found = longer.trtllm(backend="emulator", out=out)
    assert (out[11:] == 7).all()
    case.check((found[0][:11], found[1][:11]))


def test_a_length_beyond_the_table_is_cut() -> None:
    """No page number behind a row of the table is read, whatever the lengths say."""
    case = dataclasses.replace(CASES["32 heads"], q_lens=(1, 1), kv_lens=(64, 64), made={})
    want = case.trtllm(backend="reference")
    lengths = case.seq_lens.clone()
    with emulator.using("sm_90a", sms=3), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cute_attn.wrappers.mla.check_values", lambda *_: lengths.fill_(1000))
        case.made["seq_lens"] = lengths
        found = case.trtllm(backend="emulator", max_q_len=None)
    torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-2)


def test_a_page_of_no_cache_is_seen() -> None:
    """The emulator reports what a GPU would read, so that the other tests mean something."""
    case = dataclasses.replace(CASES["32 heads"], made={})
    case.table[0, 2] = 1000
    with emulator.using("sm_90a", sms=3), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cute_attn.wrappers.mla.check_values", lambda *_: None)
        with pytest.raises(EmulatorError):
            case.trtllm(backend="emulator")


def test_kinds_of_tensors() -> None:
    with pytest.raises(NotSupported, match=r'mla refuses cpu tensors.*backend="auto"'):
        CASES["one head"].wrapped("mla")
