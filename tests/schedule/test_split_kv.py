"""Split rule and its inputs, as properties of pure functions."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cute_attn.schedule.split_kv import MAX_SPLITS, MIN_SAVED_TILES, Split, min_split_tiles, split_kv, visible_tokens

tiles = st.integers(0, 1 << 24)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, int]:
    kv_tiles = draw(tiles)
    return {
        "kv_tiles": kv_tiles,
        "visible_tiles": draw(st.integers(0, kv_tiles)),
        "ctas": draw(st.integers(1, 1 << 20)),
        "resident_ctas": draw(st.integers(1, 2000)),
        "min_tiles": draw(st.integers(1, 16)),
    }


@given(calls())
@example({"kv_tiles": 0, "visible_tiles": 0, "ctas": 1, "resident_ctas": 132, "min_tiles": 2})
def test_every_tile_belongs_to_one_split_and_no_split_is_empty(call: dict[str, int]) -> None:
    split = split_kv(**call)
    assert 1 <= split.num_splits <= MAX_SPLITS
    assert split.tiles_per_split >= 1
    start_of_last = (split.num_splits - 1) * split.tiles_per_split
    assert start_of_last < max(1, call["kv_tiles"]) <= start_of_last + split.tiles_per_split


@given(calls())
def test_splits_fill_one_wave_and_pay_off(call: dict[str, int]) -> None:
    split = split_kv(**call)
    if split.num_splits == 1:
        return
    assert split.tiles_per_split >= call["min_tiles"]
    working = -(-call["visible_tiles"] // split.tiles_per_split)
    assert working >= 2
    assert working * call["ctas"] <= call["resident_ctas"]
    assert call["visible_tiles"] - split.tiles_per_split >= MIN_SAVED_TILES


@given(calls())
def test_nothing_is_split_where_it_cannot_pay(call: dict[str, int]) -> None:
    full = call["ctas"] * 2 > call["resident_ctas"]  # two CTAs for each would not fit
    short = call["visible_tiles"] < call["min_tiles"] + MIN_SAVED_TILES
    if full or short:
        assert split_kv(**call) == Split(1, max(1, call["kv_tiles"]))


def test_one_long_decode_fills_the_gpu() -> None:
    """131072 tokens, 8 kv heads, tiles of 64, two CTAs per SM on 132 SMs."""
    split = split_kv(kv_tiles=2048, visible_tiles=2048, ctas=8, resident_ctas=264, min_tiles=2)
    assert split == Split(33, 63)
    assert 8 * split.num_splits == 264


def test_a_window_splits_what_it_shows() -> None:
    """Splits cover all of kv, but their size follows from the visible tiles, up to 128 splits."""
    assert split_kv(kv_tiles=100, visible_tiles=20, ctas=8, resident_ctas=264, min_tiles=2) == Split(50, 2)
    assert split_kv(kv_tiles=2048, visible_tiles=64, ctas=8, resident_ctas=264, min_tiles=2) == Split(128, 16)
    assert split_kv(kv_tiles=2048, visible_tiles=4, ctas=8, resident_ctas=264, min_tiles=2).num_splits == 1


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 12), st.booleans(), st.integers(-1, 70))
def test_visible_tokens_bound_every_query_tile(
    qo_len: int, kv_len: int, tile_tokens: int, causal: bool, window_left: int
) -> None:
    """Counts token by token: the union over any `tile_tokens` consecutive query tokens."""
    busiest = 0
    for start in range(qo_len):
        seen = set()
        for i in range(start, min(start + tile_tokens, qo_len)):
            position = i + kv_len - qo_len
            last = position if causal else kv_len - 1
            first = 0 if window_left < 0 else position - window_left
            seen |= set(range(max(0, first), min(last, kv_len - 1) + 1))
        busiest = max(busiest, len(seen))
    assert visible_tokens(qo_len, kv_len, tile_tokens, causal, window_left) >= busiest


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 1000, 1, False, -1), 1000),
        ((1, 1000, 1, True, 99), 100),
        ((1, 1000, 1, False, 99), 100),  # decode stands at the last key: nothing lies to its right
        ((100, 1000, 4, False, 50), 150),
        ((100, 1000, 4, True, 50), 54),
        ((100, 1000, 4, True, 5000), 1000),
        ((8, 4, 8, False, 0), 4),
        ((8, 0, 8, True, 3), 0),
    ],
)
def test_visible_tokens(arguments: tuple[int, int, int, bool, int], expected: int) -> None:
    assert visible_tokens(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"), [((128, 64, 128, 128), 4), ((16, 64, 128, 128), 2), ((128, 32, 192, 128), 7)]
)
def test_min_split_tiles(arguments: tuple[int, int, int, int], expected: int) -> None:
    assert min_split_tiles(*arguments) == expected
