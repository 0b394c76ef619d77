"""How a decode problem is cut on one GPU: tokens of a warp's tile, warps, stages, query rows that share a read."""

from __future__ import annotations

from cute_attn.kernels.spec import KV_BITS
from cute_attn.kernels.xqa.spec import HEAD_DIMS, SCALE_BLOCK, XqaMemory, XqaSpec
from cute_attn.runtime.arch import Arch

SLOT = 8192  # bytes of K and V that a tile brings, about
REGISTER_DIMS = 256  # row blocks x head_dim: more outputs and queries do not fit a thread's registers
RESERVED_SMEM = 1024  # bytes of shared memory that the system takes from every CTA
RINGS = (  # (warps, stages, CTAs an SM) in order of preference: the first that shared memory has room for
    (4, 3, 2),
    (4, 2, 2),
    (4, 3, 1),
    (4, 2, 1),
    (2, 2, 1),
)


def choose(
    q_dtype: str, kv_dtype: str, out_dtype: str, head_dim: int, packed_rows: int, tree: bool, arch: Arch
) -> XqaSpec:
    """The kernel for `packed_rows` = q_len * group rows."""
    row_blocks = min(2, REGISTER_DIMS // head_dim, max(1, -(-packed_rows // 8)))
    token = 2 * head_dim * KV_BITS[kv_dtype] // 8 + (2 * head_dim // SCALE_BLOCK if kv_dtype == "nvfp4" else 0)
    wanted = max(SLOT * 3 // 4, 8 * row_blocks * head_dim * 4)  # the merge needs a slot, too
    cols = 16
    while cols < 64 and cols * token < wanted:
        cols *= 2
    specs = [
        XqaSpec(q_dtype, kv_dtype, out_dtype, head_dim, tree, row_blocks, cols, warps, stages, ctas)
        for warps, stages, ctas in RINGS
    ]
    return next(spec for spec in specs if _fits(spec, arch))


def _fits(spec: XqaSpec, arch: Arch) -> bool:
    """All CTAs of an SM together may take as much as the largest single one, and what the system takes from each."""
    return spec.ctas * (XqaMemory.of(spec).bytes + RESERVED_SMEM) <= arch.smem_limit + RESERVED_SMEM


def default_specs(arch: Arch) -> list[XqaSpec]:
    """What most programs need: bf16 queries over every cache dtype, without a tree."""
    return [
        choose("bfloat16", kv_dtype, "bfloat16", head_dim, rows, False, arch)
        for head_dim in HEAD_DIMS
        for kv_dtype in KV_BITS
        for rows in (8, 16)
    ]
