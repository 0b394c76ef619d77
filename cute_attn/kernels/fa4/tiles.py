"""Tile tables of the tcgen05 kernel: the tile of a problem by head dims and dtypes.

Every row must compile to 0 bytes of stack and fit 227 KB of shared memory and 512 columns of tensor memory. Query tiles
of 128 rows take 2 * 128 * head dim bytes each, kv tiles as many per 128 keys, in lines of 128 bytes.
"""

from __future__ import annotations

import dataclasses

from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS, HEAD_DIMS, Operands, TileProblem, pages_in_boxes, tile_dims
from cute_attn.kernels.fa4.spec import BlackwellTile

ARCHS = ("sm_100a", "sm_103a")
FAST_EXP2 = ("sm_103a",)  # whose MUFU has twice the rate: no exponential goes to the FMA units

# `polynomial` as on sm_100a. It pays where the MUFU needs longer than the tensor cores: 1024 clocks per tile of 128 x
# 128 against 8 per head dimension, qk and vo together half each (of fp8, half as many). A query tile of head dimension
# 256 has 256 columns of output and two stages of scores: there is no room for a second one.
_16_BIT = {
    (64, 64): BlackwellTile(k_stages=4, v_stages=4, polynomial=6),
    (96, 96): BlackwellTile(k_stages=2, v_stages=2, polynomial=4),
    (128, 128): BlackwellTile(k_stages=2, v_stages=2, polynomial=3),
    (192, 128): BlackwellTile(k_stages=2, v_stages=1, polynomial=2),
    (256, 256): BlackwellTile(query_tiles=1, cols=64, k_stages=3, v_stages=2),
}
# Of pairs of CTAs, where K and V are loaded by TMA. At head dimension 256 a CTA alone would wait for shared memory: the
# products of 128 rows read more of it than the tensor cores take time for. That holds for all masks and lengths.
_16_BIT_PAIRS = {
    (256, 256): BlackwellTile(query_tiles=1, k_stages=2, v_stages=2, ctas=2),
}
# The same where all rows see all keys: under a causal mask both CTAs of a pair wait for the rows that see most, 3 % of
# the work at 4096 tokens. At (192, 128) shared memory takes 1344 clocks per tile of 128 x 128 in a CTA alone, 784 in a
# pair, the tensor cores 1280. At (128, 128) both take 1024 in a CTA alone, shared memory 576 in a pair, whose leader
# also starts the products of both: half the issue slots.
_FULL_PAIRS = {
    (128, 128): BlackwellTile(k_stages=4, v_stages=4, polynomial=3, ctas=2),
    (192, 128): BlackwellTile(k_stages=3, v_stages=3, polynomial=2, ctas=2),
}
_FP8 = {
    (64, 64): BlackwellTile(k_stages=4, v_stages=4, polynomial=6),
    (128, 128): BlackwellTile(k_stages=4, v_stages=4, polynomial=6),
    (256, 256): BlackwellTile(query_tiles=1, k_stages=3, v_stages=2, polynomial=2),
}
# fp8 K and V under 16-bit q.
_FP8_KV = {
    (64, 64): BlackwellTile(k_stages=3, v_stages=3, polynomial=6, staged=2),
    (96, 96): BlackwellTile(k_stages=2, v_stages=2, polynomial=4, staged=1),
    (128, 128): BlackwellTile(k_stages=2, v_stages=2, polynomial=3, staged=1),
    (192, 128): BlackwellTile(k_stages=1, v_stages=1, polynomial=2, staged=1),
    (256, 256): BlackwellTile(query_tiles=1, cols=64, k_stages=2, v_stages=2, staged=1),
}


def page_source(head_dims: tuple[int, int], page_size: int, operands: Operands = "") -> str:
    """Returns how pages of `page_size` tokens are loaded: `kv` of `Fa4Spec`, "gathered" by cp.async."""
    return "paged" if pages_in_boxes(head_dims, page_size, operands) else "gathered"


def choose(arch: str, problem: TileProblem) -> BlackwellTile:
    """Return the tile of a problem on an architecture. Windows, groups and launches of all sizes have the same. So have
    modified scores: a row's lie in one thread, which has registers for any modification.
    """
    fp8 = problem.operands == "fp8"
    dims = tile_dims(problem.head_dims, FP8_HEAD_DIMS if fp8 else HEAD_DIMS)
    tile = (_FP8 if fp8 else _FP8_KV if problem.operands == "fp8_kv" else _16_BIT)[dims]
    if not (problem.operands or problem.kv == "gathered"):
        tile = _16_BIT_PAIRS.get(dims, tile)
        tile = _FULL_PAIRS.get(dims, tile) if problem.full else tile
    return dataclasses.replace(tile, polynomial=0) if arch in FAST_EXP2 else tile
