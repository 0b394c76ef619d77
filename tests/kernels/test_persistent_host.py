"""Host code of persistent kernels, fa3 and fa4: launches, heads of a tile and the order of tiles. Tensor maps of usual
calls: `tests/api/test_launch_corpus.py`; others: numbers of the kernels, `tests/emulator`. No GPU, no kernel.
"""

from __future__ import annotations

from typing import Any

import pytest

from cute_attn import ArgumentError
from cute_attn.dispatch import backends
from cute_attn.dispatch.families import FAMILIES
from cute_attn.emulator import using
from cute_attn.emulator.tensormap import TensorMap, decode
from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.kernels.host.persistent import family as persistent_family
from cute_attn.kernels.host.persistent import prepared
from cute_attn.kernels.host.persistent.family import launch_of
from cute_attn.kernels.host.persistent.prepared import TensorMaps
from cute_attn.kernels.host.prepared import prepared as prepared_kernel
from cute_attn.kernels.host.single import Scheduler
from cute_attn.problem import Problem
from cute_attn.runtime import counters, tensormap
from cute_attn.runtime.launch import CPU
from cute_attn.schedule.batch import Size
from tests.support.batch_case import heads, make, paged, plan_arguments, ragged, wrapper
from tests.support.named_launches import recorded
from tests.support.persistent_host import TARGETS, Target, single
from tests.support.right import build


@pytest.fixture(params=TARGETS, ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


def scheduler(target: Target, problem: Problem, sms: int = 132) -> Scheduler[Any]:
    return target.family.scheduler(problem.settings, target.arch, sms)


def tile_of(target: Target, problem: Problem) -> Any:
    rows = problem.qo_len * problem.settings.features.num_qo_heads
    launch = launch_of(rows, 132, problem.qo_len, problem.kv_len)
    return target.family.rule(problem.settings, target.arch.name, launch).value


def maps(target: Target, problem: Problem, heads: int) -> tuple[TensorMap, TensorMap]:
    made, q, k = TensorMaps(problem.settings, tile_of(target, problem), heads), problem.q, problem.k
    of_k = made.kv(k, made.box_rows)(problem.kv_len, k.data_ptr())
    return decode(made.q(q)(problem.qo_len, q.data_ptr())), decode(of_k)


def test_empty_and_single_axes(target: Target) -> None:
    """Strides of axes of size 1 are arbitrary, and a tensor without tokens is not read."""
    problem = single(qo_len=1, kv_len=0, heads=(1, 1))
    k = problem.k.as_strided((0, 1, 64), (64, 3, 1))
    q, decoded = maps(target, problem._replace(k=k), 1)
    assert q.dims == decoded.dims == (64, 1, 1, 1)
    assert decoded.strides == (16, 16, 16)


@pytest.mark.parametrize(
    ("address", "strides"), [(8, (128,)), (16, (24,)), (16, (-16,)), (16, (1 << 40,))], ids=lambda value: str(value)
)
def test_what_tensor_maps_cannot_hold(monkeypatch: pytest.MonkeyPatch, address: int, strides: tuple[int, ...]) -> None:
    monkeypatch.setattr(tensormap, "_encoder", lambda: None)  # the driver's function, which is not reached
    with pytest.raises(ArgumentError, match="TMA needs"):
        tensormap.Encoder("float16", (64, 0), strides, (64, 8), tensormap.SWIZZLE_128B, 1)(8, address)


@pytest.mark.parametrize(
    ("qo_len", "heads", "shared"), [(1, (8, 2), 4), (5000, (8, 2), 4), (1, (6, 2), 3), (1, (9, 1), 9)]
)
def test_heads_of_a_tile(target: Target, qo_len: int, heads: tuple[int, int], shared: int) -> None:
    """A group shares a tile. In fa4 one that does not divide its rows (128 or 256; 6 / 2 = 3, 9) has a tile a head."""
    problem = single(qo_len, heads=heads, dim=128)
    alone = target.name == "fa4" and 128 % shared
    assert scheduler(target, problem)(qo_len, 300).heads == (1 if alone else shared)


@pytest.mark.parametrize("heads", [(8, 2), (12, 4), (7, 1)])
@pytest.mark.parametrize("kv_len", [1, 300, 200_000])
def test_the_grid_covers_every_tile_once(target: Target, kv_len: int, heads: tuple[int, int]) -> None:
    problem = single(100, 1, heads, 128)
    schedule = scheduler(target, problem)(100, kv_len)
    numbers = dict(zip(prepared.ORDER_FIELDS + prepared.LENGTH_FIELDS, map(int, schedule.numbers), strict=True))
    blocks, head_blocks = -(-100 * schedule.heads // schedule.tile.rows), heads[0] // schedule.heads
    assert numbers["total_tiles"] == blocks * head_blocks * schedule.num_splits
    assert schedule.grid == ((ctas := schedule.tile.ctas) * min(132 // ctas, numbers["total_tiles"]), 1, 1)
    split_tokens, split_tiles = numbers["split_tokens"], numbers["split_tiles"]
    section_tiles, section = numbers["section_tiles"], numbers["section_heads"]
    assert split_tokens * schedule.num_splits >= kv_len > split_tokens * (schedule.num_splits - 1)
    assert (split_tiles, section_tiles) == (blocks * head_blocks, blocks * section)
    assert head_blocks % section == 0


def test_launches(target: Target) -> None:
    (main, grid), (merge, rows) = target.family.launches(single(3, 20_000), target.arch, 132)
    assert isinstance(main, target.family.spec_type)
    assert (main.split, main.out_dtype) == (True, "float32")
    assert 2 < grid[0] <= 132
    assert (merge, rows) == (CombineSpec("float16", 64), (24, 1, 1))
    assert target.family.launches(single(0), target.arch, 132) == []
    ((alone, _),) = target.family.launches(single(3000, 300, window_left=5), target.arch, 132)
    assert isinstance(alone, target.family.spec_type)
    assert (alone.mask, alone.split, alone.out_dtype) == ("band", False, "float16")


@pytest.mark.parametrize("page_size", [0, 16])
def test_launches_of_batches(target: Target, page_size: int) -> None:
    lengths = (3, 2), (5000, 7000)
    built = build(paged(*lengths, page_size, **heads(8, 2)) if page_size else ragged(*lengths, **heads(8, 2)))
    settings = built.problem.settings
    _, ((main, grid), (merge, _)) = target.family.batch_launches(
        settings, built.lengths, built.limits, target.arch, 132
    )
    assert isinstance(main, target.family.spec_type)
    assert (main.schedule, main.kv) == ("items", "paged" if page_size else "dense")
    assert grid[0] <= 132
    assert merge == CombineSpec("float16", 64, "items")
    with using(target.arch.name, kernels=target.name, sms=132):
        partials, records = backends.workspace("emulator", settings, built.lengths, built.limits)
        small = built.limits._replace(workspace_bytes=0)
        assert backends.workspace("emulator", settings, built.lengths, small) == (partials, records)
    assert partials > 0
    for family in (target.family, FAMILIES["fa2"]):  # equal tilings are one object: plans keep their launches
        sizes = Size(6, 6000, 12, 7000), Size(7, 6000, 14, 9000)
        assert len({family.tiling(settings, size, target.arch, 132) for size in sizes}) == 1


@pytest.mark.parametrize(("sms", "kv_len", "resident"), [(4, 6000, 1), (4, 900, 5), (132, 6000, 16), (4, 0, 16)])
def test_sections_of_a_batch(
    target: Target, sms: int, kv_len: int, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many heads as L2 holds the keys of, where there are waves enough; every tile belongs to one."""
    for name in ("SECTION_BYTES", "SHORT_SECTION_BYTES"):
        monkeypatch.setattr(persistent_family, name, 5 * 1024 * 2 * 64 * 2)
    prepared_kernel.cache_clear()
    built = build(ragged((700, 300), (kv_len, min(kv_len, 20)), **heads(16, 16)))
    plan = target.family.schedule(built.problem.settings, built.lengths, built.limits, target.arch, sms)
    prepared_kernel.cache_clear()
    order = persistent_family.batch_order(plan.tiling.params, *plan.room.capacity[:2])
    tiles, found = order[1], order[4]
    assert found == {1: 1, 5: 4, 16: 16}[resident]
    places = set()
    for index in range(plan.room.capacity.items * plan.tiling.params.num_kv_heads):
        section, within = divmod(index, tiles)
        item, head = divmod(within, found)
        places.add((item, section * found + head))
    assert places == {(item, head) for item in range(plan.room.capacity.items) for head in range(16)}


def test_a_plan_makes_its_counters(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run may be captured in a CUDA graph, where memory cannot be made."""
    made: list[int] = []
    monkeypatch.setattr(counters, "of_device", lambda index: made.append(index) or counters.Counters)
    batch = paged((70, 3), (90, 33), page_size=4, **heads(4, 2))
    inputs = make(batch)
    with recorded(), using(target.arch.name, kernels=target.name, sms=2):
        wrapper(batch, inputs.q.device, backend="emulator").plan(**plan_arguments(batch, inputs))
    assert made == [CPU]
