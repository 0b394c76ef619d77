"""Tile tables of the mma.sync kernel, as data: which tile a problem gets, by head dims, rows and shared memory.

Every row must compile to 0 bytes of stack (`python -m cute_attn kernels --check` compiles them all); "plain" rows may
be wider than "modified" ones, which need registers for mask bits, slopes or rotations. Wider is faster: an earlier form
of the kernel, on an H200, d 128, 32/8 heads, 16384 tokens, made 390 and 382 TFLOP/s (causal and full) with 64 columns,
374 and 366 with 48, 356 and 351 with 32 (short runs; the first two spilled 40 and 64 bytes even so).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from cute_attn.kernels.memory import SharedMemory
from cute_attn.kernels.spec import CombineSpec, Fa2Spec, KernelSpec, Tile
from cute_attn.runtime.arch import Arch, named

HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256))
REGISTERS = 65536  # of an SM, in 4 bytes; a thread has 255 of them at most
RESERVED_SMEM = 1024  # bytes of shared memory that the system takes from every CTA

DECODE_ROWS = 16  # up to so many packed rows, warps divide the kv columns between them
APPEND_ROWS = 64  # up to so many, a tile of 64 rows wastes less than one of 128

# Columns of the prefill tile by head dims: (plain, modified). Rows x warps are in `_prefill`.
_COLS_227K = {
    (64, 64): (112, 64),
    (80, 80): (64, 48),
    (96, 96): (48, 48),
    (112, 112): (64, 32),
    (128, 128): (64, 32),
    (192, 128): (48, 32),
    (256, 256): (64, 32),
}
_COLS_163K = {
    (64, 64): (96, 64),
    (80, 80): (48, 48),
    (96, 96): (48, 32),
    (112, 112): (32, 32),
    (128, 128): (32, 32),
    (192, 128): (32, 32),
    (256, 256): (32, 32),
}
_COLS_99K = {
    (64, 64): (64, 64),
    (80, 80): (64, 64),
    (96, 96): (64, 32),
    (112, 112): (64, 64),
    (128, 128): (64, 64),
    (192, 128): (48, 48),
    (256, 256): (32, 32),
}


class Variant(NamedTuple):
    """What the tile depends on beside the number of rows. `plain`: no custom mask, score modification or rotation."""

    head_dims: tuple[int, int]
    plain: bool = True
    batch: bool = False  # work items: lengths and addresses take registers that parameters do not
    kv_dtype: str = ""  # of `spec.KV_BITS`


def choose(variant: Variant, packed_rows: int, arch: Arch) -> Tile:
    """The tile for `packed_rows` = qo_len * group rows."""
    if packed_rows <= DECODE_ROWS:
        return _decode(variant.head_dims, arch)
    if packed_rows <= APPEND_ROWS:
        return _append(variant.head_dims, arch)
    return _prefill(variant.head_dims, variant.plain and not variant.batch, arch)


def candidates(variant: Variant, arch: Arch) -> list[Tile]:
    """Every tile that `choose` may answer for this variant."""
    rows = (DECODE_ROWS, APPEND_ROWS, APPEND_ROWS + 1)
    return list(dict.fromkeys(choose(variant, n, arch) for n in rows))


def resident_ctas(tile: Tile, variant: Variant, arch: Arch) -> int:
    """CTAs that an SM holds at once. Prefill tiles use all registers of a thread, decode tiles up to 168."""
    smem_bytes = SharedMemory(tile, *variant.head_dims, rope=False).bytes
    by_smem = (arch.smem_limit + RESERVED_SMEM) // (smem_bytes + RESERVED_SMEM)
    by_registers = REGISTERS // (tile.threads * (256 if tile.warps_cols == 1 else 168))
    return max(1, min(by_smem, by_registers))


def _prefill(head_dims: tuple[int, int], plain: bool, arch: Arch) -> Tile:
    small = arch.smem_limit < 128 * 1024
    if small:
        cols = _COLS_99K
    elif arch.smem_limit < 200 * 1024:
        cols = _COLS_163K
    else:
        cols = _COLS_227K
    n = cols[head_dims][0 if plain else 1]
    if small and head_dims[0] > 128:
        return Tile(64, n, 4, 1, 2)
    # Eight warps of 16 rows where 32 rows would need 256 registers for the output alone, and where, with 99 KB, only
    # one CTA fits an SM: one warp's softmax then still runs under another's products.
    return Tile(128, n, 8 if small or head_dims == (256, 256) else 4, 1, 2)


def _append(head_dims: tuple[int, int], arch: Arch) -> Tile:
    """Columns are the widest that no variant spills with; ptxas leaves 8 bytes at some narrower ones."""
    if arch.smem_limit < 128 * 1024:
        return Tile(64, 32 if head_dims[0] in (128, 256) else 48, 4, 1, 2)
    return Tile(64, {192: 48, 256: 32}.get(head_dims[0], 64), 4, 1, 2)


def _decode(head_dims: tuple[int, int], arch: Arch) -> Tile:
    """About 100 KB in flight a CTA, two of them an SM: 4250 of 4420 GB/s at d 128 and 131072 tokens on an H200."""
    line = 64  # elements of a 128-byte line, to which rows are padded
    token_bytes = sum(-(-dim // line) * line * 2 for dim in head_dims)
    if arch.smem_limit < 128 * 1024:
        return Tile(DECODE_ROWS, 32, 1, 2, 3 if token_bytes <= 512 else 2)
    stages = {256: 5, 512: 3}.get(token_bytes, 2)
    return Tile(DECODE_ROWS, 64, 1, 4, stages)


# --- what gets compiled ahead ---------------------------------------------------------------------------------------

VARIANTS: tuple[dict[str, object], ...] = (
    {"mask": "packed"},
    {"scores": ("scale",)},
    {"scores": ("scale", "soft_cap")},
    {"scores": ("scale", "alibi")},
    {"pos_encoding": "rope"},
    {"mask": "packed", "scores": ("scale", "alibi", "soft_cap")},
    {"mask": "packed", "scores": ("scale", "soft_cap"), "pos_encoding": "rope"},
)


def default_specs(arch_name: str) -> list[KernelSpec]:
    """What most programs need, and one of everything else: all head dims and tiles in bf16, fp16 and every variant."""
    arch = named(arch_name)
    specs: list[KernelSpec] = []
    for head_dims in HEAD_DIMS:
        specs += _plain(head_dims, "bfloat16", arch)
        specs += _variants(head_dims, VARIANTS if head_dims == (128, 128) else VARIANTS[-2:], arch)
    for head_dims in ((64, 64), (128, 128)):
        specs += _plain(head_dims, "float16", arch)
    specs += [CombineSpec(dtype, dim) for dtype, dim in product(("float16", "bfloat16"), (64, 128, 256))]
    return list(dict.fromkeys(specs))


def _plain(head_dims: tuple[int, int], dtype: str, arch: Arch) -> list[KernelSpec]:
    return [
        Fa2Spec(dtype, "float32" if split else dtype, *head_dims, split=split, tile=tile)
        for tile in candidates(Variant(head_dims), arch)
        for split in (False, True)
    ]


def _variants(head_dims: tuple[int, int], variants: Sequence[dict], arch: Arch) -> list[KernelSpec]:
    modified = Variant(head_dims, plain=False)
    return [
        Fa2Spec("bfloat16", "float32" if split else "bfloat16", *head_dims, split=split, tile=tile, **variant)
        for variant in variants
        for split, tile in ((False, choose(modified, 1 << 20, arch)), (True, choose(modified, 1, arch)))
    ]
