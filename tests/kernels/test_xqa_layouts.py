"""Layouts of the decode kernel's tiles: every chunk and token has its place, and what a warp reads at once differs in
bank."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("cutlass.cute", reason="needs the DSL", exc_type=ImportError)

from cute_attn.kernels.xqa.parts.layouts import LINE, BlockLayout, TileLayout

LAYOUTS = [TileLayout(32), TileLayout(64), TileLayout(128), TileLayout(512), BlockLayout(64), BlockLayout(128)]
BLOCKS = [layout for layout in LAYOUTS if isinstance(layout, BlockLayout)]


@pytest.mark.parametrize("layout", BLOCKS, ids=str)
def test_reads_differ_in_bank(layout: BlockLayout) -> None:
    """Of K, 8 lanes at a time read 16 bytes; of V, 16 lanes 8 bytes."""
    groups = layout.row_bytes // 64
    for m, half, group, lanes in itertools.product(range(4), (0, 1), range(groups), range(0, 32, 8)):
        tokens = [(layout.lane_token(x >> 2) + layout.token(m, half), x & 3) for x in range(lanes, lanes + 8)]
        places = [layout.offset(token, t * groups + group) for token, t in tokens]
        assert len({place % LINE for place in places}) == 8
    for m, r, group, lanes in itertools.product(range(4), range(4), range(groups), (0, 16)):
        tokens = [(2 * (x & 3) + layout.p_token(m, r), x >> 2) for x in range(lanes, lanes + 16)]
        places = [layout.offset(token, (g >> 1) + 4 * group) + g % 2 * 8 for token, g in tokens]
        assert len({place % LINE for place in places}) == 16
