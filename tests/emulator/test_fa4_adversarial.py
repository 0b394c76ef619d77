"""What is hard on the Blackwell kernel: edges of tiles and rings, rows that see nothing, scores that rise, items of
unequal length that overlap on one CTA, pages by every source of keys, outputs by both ways to global memory. Against
the reference, on every schedule.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch

from cute_attn import single_prefill_with_kv_cache
from cute_attn.emulator import Schedule
from cute_attn.emulator.settings import Emulation
from tests.support.batch_case import BatchCase, dims, heads, paged, ragged
from tests.support.matrix import BF16, CAUSAL, prefill
from tests.support.persistent_emulated import FA4, name, solve_on
from tests.support.right import emulate_call, executed, launched
from tests.support.schedules import SCHEDULES, all_alike, in_turn

pytestmark = pytest.mark.emulator

TILE, CHUNK = 128, 32  # keys of a kv tile, and of what softmax processes at a time
ROWS = 128  # of a query tile
HEAD_DIMS = (64, 128, (192, 128), 256)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def normal(qo_len: int, kv_len: int, head_dim: int = 64, num_heads: int = 1, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, num_heads, head_dim, generator=generator) for n in (qo_len, kv_len, kv_len))
    return q, k, v


def solve(*qkv: torch.Tensor, schedule: Schedule | None = None, **options: Any) -> Emulation:
    """Solves a request in bf16 on one multiprocessor."""
    options |= {"on": FA4.on, "schedule": schedule, "sms": 1, "near": 2e-2, "lse_near": 2e-3}
    return emulate_call(single_prefill_with_kv_cache, *(x.bfloat16() for x in qkv), **options)


def loads(emulation: Emulation) -> int:
    """Loads from tensor memory: a tile whose scores rise takes more."""
    return executed(emulation, FA4.recomputes)


@functools.cache
def flat(tiles: int) -> int:
    """Loads where no score rises, on any schedule."""
    return loads(solve(*with_scores(200, torch.zeros(tiles * TILE))))


# ---- problems of a matrix, on one multiprocessor


ITEMS: tuple[BatchCase, ...] = (
    ragged((150, 0, 37, 0, 1), (300, 20, 64, 0, 90), mask="causal", **heads(2, 1)),  # no queries between others
    ragged((150, 20, 37, 130, 1), (300, 0, 64, 0, 90), **dims(128), **BF16),  # no keys between others
    ragged((200, 150), (900, 40), **BF16, **dims(128)),  # short after long
    ragged((150, 200), (40, 900), mask="causal", **dims(128)),  # long after short
    ragged((130,) * 4, (1,) * 4, **heads(2, 1)),
    ragged((60,) * 3, (129, 130, 257), slack=True, **dims(192, 128)),  # keys that end within a tile
    paged((150, 0, 37, 260), (300, 20, 0, 515), 64, mask="causal", **BF16, **dims(128), **heads(2, 1)),
    paged((150, 0, 37, 260), (300, 20, 0, 515), 64, **BF16, **dims(128), **heads(4, 1)),  # pages of a pair
    ragged((150, 0, 37), (200, 20, 64), mask="causal", **BF16, **dims(256)),
)
BEFORE_THE_FIRST_KEY = ((256, 128), (256, 100), (300, 20), (512, 300))
HARD: dict[str, list[tuple[BatchCase, Schedule]]] = {
    "few kv tiles": [
        (prefill(200, kv_len, (1, 1), 128, **BF16, mask=mask), schedule)
        for mask in ("none", "causal")
        for kv_len, schedule in in_turn((1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 384))
    ],
    "query tiles": [(prefill(n, 200, (1, 1), 64, **CAUSAL), SCHEDULES[1]) for n in (1, 127, 128, 129, 255, 256, 257)],
    # Every ring wraps twice and by odd numbers of tiles: three heads of 7 kv tiles.
    "rings": in_turn([prefill(130, 7 * TILE - 5, (3, 1), n, **BF16) for n in HEAD_DIMS], structure=all_alike),
    # A query tile of which no row, or only the last rows, see a key, beside a full one.
    "nothing seen": in_turn([prefill(*n, (2, 1), 128, **BF16, **CAUSAL) for n in BEFORE_THE_FIRST_KEY]),
    # Query tiles of one item begin and end at different kv tiles.
    "windows": in_turn([prefill(256, 700, (1, 1), 64, **CAUSAL, window_left=n) for n in (0, 1, 31, 127, 128, 300)]),
    # Items of one and two kv tiles, whose outputs are stored under the products of the next.
    "epilogues": [
        (prefill(200, TILE + 1, (4, 2), n, **BF16, **CAUSAL), Schedule("adversarial", seed))
        for n, seed in itertools.product(HEAD_DIMS, (3, 4))
    ],
    "items": in_turn(ITEMS, structure=all_alike),
}


@pytest.mark.parametrize(
    ("problem", "schedule"),
    [pytest.param(*x, id=f"{what}-{x[0].id}-{x[1].kind}-{x[1].seed}") for what, cases in HARD.items() for x in cases],
)
def test_hard_problems(problem: BatchCase, schedule: Schedule) -> None:
    solve_on(FA4, problem, schedule, sms=1)


# ---- rows that see nothing


def keeping(hidden_rows: slice, hidden_keys: slice, qo_len: int, kv_len: int) -> torch.Tensor:
    keep = torch.ones(qo_len, kv_len, dtype=torch.bool)
    keep[hidden_rows, hidden_keys] = False
    return keep


HIDDEN = {
    "first query tile, all keys": (slice(0, ROWS), slice(None)),
    "second query tile, all keys": (slice(ROWS, None), slice(None)),
    "everything": (slice(None), slice(None)),
    "first kv tile": (slice(None), slice(0, TILE)),
    "last kv tile": (slice(None), slice(2 * TILE, None)),
    "last kv tile, one query tile": (slice(0, ROWS), slice(2 * TILE, None)),
    "last kv tile, one row": (slice(70, 71), slice(2 * TILE, None)),
    "two of three kv tiles, one row": (slice(200, 201), slice(TILE, None)),
    "all but a chunk": (slice(30, 60), slice(CHUNK, None)),
}


@pytest.mark.parametrize(("hidden", "schedule"), in_turn(HIDDEN, structure=all_alike), ids=name)
def test_hidden_tiles(hidden: str, schedule: Schedule) -> None:
    q, k, v = normal(256, 3 * TILE)
    solve(q, k, v, schedule=schedule, custom_mask=keeping(*HIDDEN[hidden], 256, 3 * TILE))


# ---- scores


def levels(kv_len: int, every: int) -> torch.Tensor:
    """A number per key that grows by one every `every` keys, in the order of tiles: the last one comes first."""
    key = torch.arange(kv_len)
    tiles = -(-kv_len // TILE)
    within = key % TILE // every
    return ((tiles - 1 - key // TILE) * (TILE // every) + within).float()


def with_scores(qo_len: int, scores: torch.Tensor, rows: slice = slice(None), seed: int = 0) -> Tensors:
    """Queries and keys whose products are small but for `rows`, which see `scores` (in powers of two) beside them."""
    q, k, v = normal(qo_len, len(scores), seed=seed)
    q *= 0.1
    q[..., 0], k[..., 0] = 0.0, scores[:, None] * math.log(2)
    q[rows, :, 0] = 8.0  # 1 / sqrt(64) of it
    return q, k, v


def of_one(chunk: int) -> torch.Tensor:
    """Levels of the tiles in one of their chunks, zeros in the others."""
    return levels(4 * TILE, TILE) * (torch.arange(4 * TILE) % TILE // CHUNK == chunk)


RISING: dict[str, tuple[torch.Tensor, slice]] = {  # scores, and the rows that see them
    **{f"by {n} in every chunk": (n * levels(4 * TILE, CHUNK), slice(None)) for n in (40, 3, 9, 14, 200)},
    # What the tile stored of P before is stored again.
    **{f"by {n} in chunk {i}": (n * of_one(i), slice(None)) for n in (10, 100) for i in range(4)},
    # Before and after tiles that do not: outputs of the one are forgotten, those of the other count for nothing.
    **{f"in tile {i}": (300 * (torch.arange(4 * TILE) == i * TILE + 5).float(), slice(None)) for i in range(4)},
    # Of one warp, which rescales all its rows, by 1 but for this one.
    **{
        f"in row {row} by {n}": (n * levels(3 * TILE, CHUNK), slice(row, row + 1))
        for row, n in ((0, 12), (31, 1000), (37, 60), (127, 12), (128, 1000), (199, 60))
    },
}


@pytest.mark.parametrize(("rising", "schedule"), in_turn(RISING, SCHEDULES, all_alike), ids=name)
def test_scores_that_rise(rising: str, schedule: Schedule) -> None:
    scores, rows = RISING[rising]
    more = loads(solve(*with_scores(200, scores, rows), schedule=schedule)) > flat(len(scores) // TILE)
    assert more == (rising != "in tile 3")  # which comes first


@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("value", "schedule"), in_turn((torch.nan, torch.inf, -torch.inf)), ids=name)
def test_numbers_that_are_none_stay_in_their_row(value: float, masked: bool, schedule: Schedule) -> None:
    q, k, v = normal(200, 300)
    q[77] = value
    solve(q, k, v, schedule=schedule, causal=masked)


@pytest.mark.parametrize(("key", "schedule"), in_turn((3, 40, 130, 299)), ids=name)
def test_keys_of_infinite_score(key: int, schedule: Schedule) -> None:
    """+inf for some rows and -inf for the others, seen first, in the middle, or last."""
    q, k, v = normal(200, 300)
    q[:, :, 0] = torch.where(torch.arange(200) % 3 == 0, 1.0, -1.0)[:, None]
    k[key, :, 0] = torch.inf
    solve(q, k, v, schedule=schedule)


@pytest.mark.parametrize(("tile", "schedule"), in_turn((0, 1, 2)), ids=name)
@pytest.mark.parametrize("anchor", [False, True], ids=["one tile", "all tiles but one"])
def test_scores_of_minus_infinity(anchor: bool, tile: int, schedule: Schedule) -> None:
    """In a whole tile, without a mask; or in all others, below one score of +inf."""
    q, k, v = normal(200, 3 * TILE)
    q[:, :, 0] = 1.0
    within = torch.arange(3 * TILE) // TILE == tile
    k[within != anchor, :, 0] = -torch.inf
    if anchor:
        k[within, :, 0] = 0.0
        k[tile * TILE + 9, :, 0] = torch.inf
    solve(q, k, v, schedule=schedule)


# ---- pages, and ways of outputs to global memory

UNEVEN = ((130, 0, 9, 70), (270, 33, 129, 0))  # whole query tiles, ragged ends, a request without keys
# NaN in the rest of pages, and behind rows and heads; what the batches of all persistent kernels do not have.
PAGES: tuple[BatchCase, ...] = (
    paged(*UNEVEN, 3, kv_layout="HND", cache="strided", slack=True, **heads(4, 2), **dims(128)),
    paged(*UNEVEN, 4, mask="custom", cache="strided", dtype="bfloat16", **heads(2, 2), **dims(128)),
    paged((60, 9), (270, 129), 1, mask="causal", kv_layout="HND", **heads(6, 2), **dims(192, 128)),
    paged((60, 9), (270, 129), 5, window_left=100, **heads(3, 3), **dims(80)),
    paged((60, 9), (270, 129), 5, kv_layout="HND", cache="strided", **heads(3, 3), **dims(72)),
)
BOXES: tuple[BatchCase, ...] = (  # ends of requests within V tiles, which are cleared
    paged(*UNEVEN, 64, kv_layout="HND", cache="one", slack=True, **heads(2, 1), **dims(128)),
    paged(*UNEVEN, 128, mask="custom", cache="strided", dtype="bfloat16", **heads(2, 2), **dims(80)),
    paged((60, 9), (270, 129), 32, mask="causal", cache="strided", **heads(6, 2), **dims(192, 128)),  # one stage of V
)
OUTPUTS: tuple[tuple[BatchCase, bool], ...] = (  # and whether query tiles are stored by TMA
    (ragged((300, 0, 129, 128), (270, 33, 400, 0), mask="causal", slack=True, **heads(2, 1), **dims(128)), True),
    (ragged((40, 63, 16), (70, 33, 130), mask="causal", slack=True, **heads(8, 1), **dims(96)), True),  # packed heads
    (ragged((130, 9), (200, 60), o_dtype="float32", **heads(2, 2)), False),
    (ragged((130, 9), (200, 60), **heads(2, 2), **dims(192, 128)), False),  # no room for staging
)


@pytest.mark.parametrize(("batch", "schedule"), in_turn((*PAGES, *BOXES)), ids=name)
def test_pages(batch: BatchCase, schedule: Schedule) -> None:
    emulation = solve_on(FA4, batch, schedule, 2)
    assert launched(emulation)[0].spec["kv"] == ("paged" if batch in BOXES else "gathered")


@pytest.mark.parametrize(("case", "schedule"), in_turn(OUTPUTS, structure=lambda case: case[1]), ids=name)
def test_ways_of_outputs(case: tuple[BatchCase, bool], schedule: Schedule) -> None:
    """Outputs of two work items per CTA; rows beside those of the requests are not written (`slack`)."""
    batch, staged = case
    emulation = solve_on(FA4, batch, schedule, 1)
    assert (executed(emulation, "cp.async.bulk.tensor.4d.global") > 0) == staged
