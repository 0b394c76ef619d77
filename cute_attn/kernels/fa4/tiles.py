"""Tile tables of the tcgen05 kernel: the tile of a problem by head dims and dtypes.

Every row must compile to 0 bytes of stack and fit 227 KB of shared memory and 512 columns of tensor memory. Query tiles
of 128 rows take 2 * 128 * head dim bytes each, kv tiles as many per 128 keys, in lines of 128 bytes.
"""

from __future__ import annotations

from dataclasses import replace

from cute_attn.kernels.blocks.tiles import HEAD_DIMS, Operands, TileProblem, first_rule, pages_in_boxes, tile_rule
from cute_attn.kernels.fa4.spec import BlackwellTile
from cute_attn.kernels.rules import Rule

ARCHS = ("sm_100a", "sm_103a")

# Pairs of CTAs, where K and V are loaded by TMA. Under a causal mask both CTAs of a pair wait for the rows that see
# most, 3 % of the work at 4096 tokens. The leader of a pair also starts the products of both: half the issue slots.
# Notes: per tile of 128 x 128.
_PAIRS = {"kv": ("dense", "paged")}
# `polynomial` as on sm_100a. It pays where the MUFU needs longer than the tensor cores: 1024 clocks per tile of 128 x
# 128 against 8 per head dimension, qk and vo together half each (of fp8, half as many). A query tile of head dimension
# 256 has 256 columns of output and two stages of scores: there is no room for a second one.
_OF_SM_100A = (
    tile_rule(
        (128, 128), BlackwellTile(k_stages=4, v_stages=4, polynomial=3, ctas=2), **_PAIRS, full=(True,),
        note="shared memory takes 576 clocks, in a CTA alone 1024 as the tensor cores (computed, not measured)",
    ),
    tile_rule(
        (192, 128), BlackwellTile(k_stages=3, v_stages=3, polynomial=2, ctas=2), **_PAIRS, full=(True,),
        note="shared memory takes 784 clocks, in a CTA alone 1344, the tensor cores 1280 (computed, not measured)",
    ),
    tile_rule(
        (256, 256), BlackwellTile(query_tiles=1, k_stages=2, v_stages=2, ctas=2), **_PAIRS,
        note="products of 128 rows in a CTA alone would wait for shared memory (computed, not measured)",
    ),
    tile_rule((64, 64), BlackwellTile(k_stages=4, v_stages=4, polynomial=6)),
    tile_rule((96, 96), BlackwellTile(k_stages=2, v_stages=2, polynomial=4)),
    tile_rule((128, 128), BlackwellTile(k_stages=2, v_stages=2, polynomial=3)),
    tile_rule((192, 128), BlackwellTile(k_stages=2, v_stages=1, polynomial=2)),
    tile_rule((256, 256), BlackwellTile(query_tiles=1, cols=64, k_stages=3, v_stages=2)),
    # fp8 q, k and v.
    tile_rule((64, 64), BlackwellTile(k_stages=4, v_stages=4, polynomial=6), "fp8"),
    tile_rule((128, 128), BlackwellTile(k_stages=4, v_stages=4, polynomial=6), "fp8"),
    tile_rule((256, 256), BlackwellTile(query_tiles=1, k_stages=3, v_stages=2, polynomial=2), "fp8"),
    # fp8 K and V under 16-bit q.
    tile_rule((64, 64), BlackwellTile(k_stages=3, v_stages=3, polynomial=6, staged=2), "fp8_kv"),
    tile_rule((96, 96), BlackwellTile(k_stages=2, v_stages=2, polynomial=4, staged=1), "fp8_kv"),
    tile_rule((128, 128), BlackwellTile(k_stages=2, v_stages=2, polynomial=3, staged=1), "fp8_kv"),
    tile_rule((192, 128), BlackwellTile(k_stages=1, v_stages=1, polynomial=2, staged=1), "fp8_kv"),
    tile_rule((256, 256), BlackwellTile(query_tiles=1, cols=64, k_stages=2, v_stages=2, staged=1), "fp8_kv"),
)  # fmt: skip
_OF_SM_103A = tuple(replace(rule, value=replace(rule.value, polynomial=0)) for rule in _OF_SM_100A)
RULES = {"sm_100a": _OF_SM_100A, "sm_103a": _OF_SM_103A}  # whose MUFU has twice the rate: none goes to the FMA units


def page_source(head_dims: tuple[int, int], page_size: int, operands: Operands = "") -> str:
    """Returns how pages of `page_size` tokens are loaded: `kv` of `Fa4Spec`, "gathered" by cp.async."""
    return "paged" if pages_in_boxes(head_dims, page_size, operands) else "gathered"


def rule_of(arch: str, problem: TileProblem) -> Rule[BlackwellTile]:
    """Return the rule of a problem's tile. Windows, groups and launches of all sizes have the same. So have modified
    scores: a row's lie in one thread, which has registers for any modification.
    """
    return first_rule(RULES[arch], problem, HEAD_DIMS)
