"""How a decode problem is cut on one GPU: tokens of a warp's tile, warps, stages, query rows that share a read."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.xqa.spec import HEAD_DIMS, PAIRED_ROWS, SCALE_BLOCK, XqaMemory, XqaSpec
from cute_attn.runtime.arch import Arch

REGISTER_DIMS = 256  # row blocks x head_dim: more outputs and queries do not fit a thread's registers
RESERVED_SMEM = 1024  # bytes of shared memory that the system takes from every CTA
FEW = 128  # (request, kv head) pairs, about an SM each


class Ring(NamedTuple):
    warps: int
    stages: int
    ctas: int  # an SM
    slot: int  # bytes of K and V that a tile brings, about
    guests: int = 0  # see `XqaSpec`


# In order of preference, the first that shared memory and registers have room for; measured on an H200. Few pairs are
# cut into many parts: one CTA an SM leaves least to merge, many warps have least to do after their last bytes came, and
# with room for a guest the next launch starts up meanwhile. Of many pairs CTAs hide each other's beginnings and ends,
# the more so the less a warp has to read.
FEW_RINGS = {
    16: (Ring(8, 2, 1, 8192),),
    8: (Ring(8, 3, 1, 4096, guests=1), Ring(8, 3, 1, 4096)),
    4: (Ring(8, 6, 1, 2048, guests=1), Ring(8, 3, 1, 4096)),
}
MANY_RINGS = {16: (Ring(4, 3, 2, 8192),), 8: (Ring(4, 2, 3, 8192),), 4: (Ring(4, 3, 2, 4096),)}
OTHER_RINGS = (
    Ring(4, 3, 2, 8192),
    Ring(4, 2, 2, 8192),
    Ring(4, 3, 1, 8192),
    Ring(4, 2, 1, 8192),
    Ring(2, 2, 1, 8192),
)


def choose(
    q_dtype: str, kv_dtype: str, out_dtype: str, head_dim: int, packed_rows: int, tree: bool, few: bool, arch: Arch
) -> XqaSpec:
    """The kernel for `packed_rows` = q_len * group rows, and for at most FEW pairs of a request and a kv head."""
    software = KV_BITS[kv_dtype] == 4 and arch.capability < (8, 9)  # conversions that take registers, too
    row_blocks = max(1, min(2, REGISTER_DIMS // (2 if software else 1) // head_dim, -(-packed_rows // 8)))
    paired = kv_dtype == "nvfp4" and packed_rows <= PAIRED_ROWS
    preferred = (FEW_RINGS if few else MANY_RINGS)[KV_BITS[kv_dtype]]
    specs = [
        XqaSpec(
            q_dtype, kv_dtype, out_dtype, head_dim, tree, row_blocks,
            _cols(kv_dtype, head_dim, row_blocks, r), r.warps, r.stages, r.ctas, paired, r.guests,
        )
        for r in (*preferred, *OTHER_RINGS)
    ]  # fmt: skip
    return next(spec for spec in specs if _fits(spec, arch))


def _cols(kv_dtype: str, head_dim: int, row_blocks: int, ring: Ring) -> int:
    """Tokens of a tile. Outputs take slots, too, when they are merged: two are to be left, or one of two."""
    token = 2 * head_dim * KV_BITS[kv_dtype] // 8 + (2 * head_dim // SCALE_BLOCK if kv_dtype == "nvfp4" else 0)
    outputs = 8 * row_blocks * head_dim * 4
    wanted = max(ring.slot * 3 // 4, outputs // max(1, ring.stages - 2))
    cols = 16
    while cols < 64 and cols * token < wanted:
        cols *= 2
    return cols


def _fits(spec: XqaSpec, arch: Arch) -> bool:
    """All CTAs of an SM together may take as much as the largest single one, and what the system takes from each. In
    the 128 registers that 16 warps an SM leave a thread, scores of more than 32 tokens spill; in 168, tree masks and
    twice as many outputs or scores as usual."""
    ctas = spec.ctas + spec.guests
    warps = spec.warps * ctas
    wide = spec.tree or spec.row_blocks * spec.cols > 32 or spec.row_blocks * spec.head_dim >= REGISTER_DIMS
    if (warps >= 16 and spec.cols > 32) or (warps >= 12 and wide):
        return False
    return ctas * (XqaMemory.of(spec).bytes + RESERVED_SMEM) <= arch.smem_limit + RESERVED_SMEM


def default_specs(arch: Arch) -> list[XqaSpec]:
    """What most programs need: bf16 queries over every cache dtype, without a tree."""
    keys = itertools.product(HEAD_DIMS, KV_BITS, (8, 16), (True, False))
    specs = (choose("bfloat16", kv, "bfloat16", head_dim, rows, False, few, arch) for head_dim, kv, rows, few in keys)
    return list(dict.fromkeys(specs))
