"""How a decode problem is cut on one GPU: tokens of a warp's tile, warps, stages, query rows that share a read."""

from __future__ import annotations

from cute_attn.kernels.xqa.spec import KV_BITS, SCALE_BLOCK, XqaSpec
from cute_attn.runtime.arch import Arch

SLOT = 8192  # bytes of K and V that a tile brings, about: 8 warps then have 128 KB in flight while they compute
MAX_ROW_BLOCKS = 2
RESERVED_SMEM = 1024  # bytes of shared memory that the system takes from every CTA


def choose(
    q_dtype: str, kv_dtype: str, out_dtype: str, head_dim: int, packed_rows: int, tree: bool, arch: Arch
) -> XqaSpec:
    """The kernel for `packed_rows` = q_len * group rows."""
    row_blocks = min(MAX_ROW_BLOCKS, -(-packed_rows // 8))
    token = 2 * head_dim * KV_BITS[kv_dtype] // 8 + (2 * head_dim // SCALE_BLOCK if kv_dtype == "nvfp4" else 0)
    wanted = max(SLOT, 8 * row_blocks * head_dim * 4)  # the merge needs a slot, too
    cols = 16
    while cols < 64 and (cols * token < wanted * 3 // 4):
        cols *= 2
    warps, stages = _ring(cols * token, arch)
    return XqaSpec(q_dtype, kv_dtype, out_dtype, head_dim, tree, row_blocks, cols, warps, stages)


def _ring(slot_bytes: int, arch: Arch) -> tuple[int, int]:
    """The most warps, then stages (3 to 5), that shared memory has room for."""
    room = arch.smem_limit - 2048  # row statistics besides
    for warps, stages in ((8, 5), (8, 4), (8, 3), (4, 3), (8, 2), (4, 2)):
        if warps * stages * slot_bytes <= room:
            return warps, stages
    raise ValueError(f"a ring of slots of {slot_bytes} bytes does not fit {arch.smem_limit} bytes of shared memory")


def resident_ctas(spec: XqaSpec, smem_bytes: int, arch: Arch) -> int:
    per_sm = arch.smem_limit + RESERVED_SMEM
    return max(1, min(per_sm // (smem_bytes + RESERVED_SMEM), 65536 // (32 * spec.warps * 128)))
