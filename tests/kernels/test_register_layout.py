"""Register layouts against the PTX ISA's statement of fragments; every element of a tile in exactly one register."""

from __future__ import annotations

import itertools

import pytest

from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout, RegisterLayout, RowLayout

SHAPES = [(1, 1), (1, 12), (2, 4), (2, 16), (4, 3)]


def accumulator_element(lane: int, i: int) -> tuple[int, int]:
    """Row and column of register c_i of mma.m16n8k16 with fp32 accumulators, as the PTX ISA gives them (groupID and
    threadID_in_group)."""
    group, in_group = lane >> 2, lane % 4
    row = group if i < 2 else group + 8
    return row, in_group * 2 + (i & 0x1)


def wgmma_element(lane: int, i: int) -> tuple[int, int]:
    """Row within the warp's 16, and column, of register d_i of wgmma.m64nNk16: each pair of registers is a pair of
    columns, pairs alternate between two rows, and two such pairs are eight columns."""
    pair, odd = divmod(i, 2)
    step, lower = divmod(pair, 2)
    return lane // 4 + 8 * lower, 8 * step + 2 * (lane % 4) + odd


def elements(layout: MmaFragmentLayout, lane: int) -> dict[int, tuple[int, int]]:
    """Element of the warp's tile by register."""
    found = {}
    for slot in layout.slots:
        row = int(layout.lane_row(lane)) + layout.row(slot)  # type: ignore[arg-type]
        for register, column in layout.places(slot):
            assert register not in found
            found[register] = row, int(layout.lane_col(lane)) + column  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("m_blocks", "n_blocks"), SHAPES)
def test_fragments_of_mma(m_blocks: int, n_blocks: int) -> None:
    layout = MmaFragmentLayout(m_blocks, n_blocks)
    for lane in range(32):
        expected = {}
        for m, n, i in itertools.product(range(m_blocks), range(n_blocks), range(4)):
            row, column = accumulator_element(lane, i)
            expected[layout.block(m, n) + i] = 16 * m + row, 8 * n + column
        assert elements(layout, lane) == expected


@pytest.mark.parametrize("n_blocks", [1, 8, 24, 32])
def test_fragments_of_wgmma(n_blocks: int) -> None:
    layout = MmaFragmentLayout(1, n_blocks)
    for lane in range(32):
        assert elements(layout, lane) == {i: wgmma_element(lane, i) for i in range(4 * n_blocks)}


@pytest.mark.parametrize("layout", [MmaFragmentLayout(*shape) for shape in SHAPES] + [RowLayout(8), RowLayout(32)])
def test_every_register_is_in_one_place(layout: RegisterLayout) -> None:
    by_slot = [[register for register, _ in layout.places(slot)] for slot in layout.slots]
    count = len(layout.slots) * layout.columns_per_thread
    assert sorted(itertools.chain(*by_slot)) == list(range(count))
    assert all(len(registers) == layout.columns_per_thread for registers in by_slot)
    assert all(layout.slot_of(register) == slot for slot in layout.slots for register in by_slot[slot])
    for slot in layout.slots:
        columns = [column for _, column in layout.places(slot)]
        assert columns[0] == 0
        assert columns == sorted(set(columns))
    values = [float(register) for register in range(count)]
    assert layout.of_slot(values, 0) == [values[register] for register in by_slot[0]]  # type: ignore[arg-type]


def test_rows_are_not_reduced() -> None:
    layout = RowLayout(32)
    assert layout.places(0) == [(i, i) for i in range(32)]
    assert layout.reduce(lambda a, b: a + b, 3.0) == 3.0  # type: ignore[arg-type,return-value]
