"""Tile tables of the mma.sync kernel: the tile of a problem by head dims, rows and shared memory.

Every row must compile to 0 bytes of stack (`python -m cute_attn kernels --check` compiles them all); "plain" rows may
be wider than "modified" ones, which need registers for mask bits, slopes or rotations. Wider is faster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from cute_attn.kernels.fa2.smem import SharedMemory
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.rules import Rule, first, up_to
from cute_attn.runtime.arch import Arch

HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256))
WIDE_HEAD_DIMS = (512, 512)  # whose outputs exceed the registers of a warp
REGISTERS = 65536  # per SM, of 4 bytes; a thread has 255 at most
RESERVED_SMEM = 1024  # bytes of shared memory per CTA that the system takes

DECODE_ROWS = 16  # up to this many packed rows, warps divide the kv columns between them
IN_FLIGHT = 32 * 1024  # bytes of K and V per SM: 1 us of latency at its share of an H200's 4.8 TB/s
APPEND_ROWS = 64  # up to this many, a tile of 64 rows wastes less than one of 128

# Columns of the prefill tile by head dims, (plain, modified), in 99, 163 and 227 KB of shared memory. Rows x warps: see
# `_prefill`.
_SMEM = (128 * 1024, 200 * 1024)  # from which the second and the third apply
_COLS = {
    (64, 64): ((64, 64), (96, 64), (112, 64)),
    (80, 80): ((64, 64), (48, 48), (48, 48)),
    (96, 96): ((64, 32), (48, 32), (48, 48)),
    (112, 112): ((64, 64), (32, 32), (64, 32)),
    (128, 128): ((64, 64), (32, 32), (64, 32)),
    (192, 128): ((48, 48), (32, 32), (48, 32)),
    (256, 256): ((32, 32), (32, 32), (64, 32)),
}
# Batches, where lengths and addresses take registers that parameters do not; 0: the tile of 64 rows.
_BATCH_COLS = _COLS | {
    (64, 64): ((64, 32), (96, 64), (112, 64)),
    (96, 96): ((64, 64), (48, 32), (48, 32)),
    (128, 128): ((64, 64), (32, 0), (48, 0)),
    (192, 128): ((48, 32), (0, 0), (48, 32)),
    (256, 256): ((32, 32), (32, 32), (64, 0)),
}


class Variant(NamedTuple):
    """Properties that choose the tile besides the number of rows. `plain`: no custom mask, score modification or
    rotation.
    """

    head_dims: tuple[int, int]
    plain: bool = True
    batch: bool = False
    kv_dtype: str = ""  # of `spec.KV_BITS`
    fp8: bool = False  # q, k and v are

    @property
    def tile_dims(self) -> tuple[int, int]:
        """The head dims of the tables."""
        dims = tile_dims(self.head_dims)
        assert dims is not None
        return dims

    def memory(self, tile: Tile, rope: bool) -> SharedMemory:
        """Returns the shared memory of this variant's kernels with a tile."""
        return SharedMemory(tile, *self.head_dims, rope=rope, kv_dtype=self.kv_dtype, fp8=self.fp8)


def tile_dims(head_dims: tuple[int, int]) -> tuple[int, int] | None:
    """Returns the head dims whose tile these have: the smallest of the tables that contain them; None if there are
    none. A kernel copies, multiplies and stores its own head dims, to whole 16 columns; the rest is zero.
    """
    qk, vo = head_dims
    if qk % 8 or vo % 8 or min(qk, vo) < 8:
        return None
    fitting = [dims for dims in HEAD_DIMS if qk <= dims[0] and vo <= dims[1]]
    if head_dims == WIDE_HEAD_DIMS:
        return WIDE_HEAD_DIMS
    return fitting[0] if fitting else None


def rule_of(variant: Variant, packed_rows: int) -> Rule[Callable[[Variant, int, Arch], Tile]]:
    """Return the rule of the tile for `packed_rows` = qo_len * group rows."""
    return first(RULES, {"packed_rows": packed_rows, **variant._asdict()})


def choose(variant: Variant, packed_rows: int, arch: Arch) -> Tile:
    """Returns the tile for `packed_rows` = qo_len * group rows."""
    return rule_of(variant, packed_rows).value(variant, packed_rows, arch)


def candidates(variant: Variant, arch: Arch) -> list[Tile]:
    """Lists every tile that `choose` may return for this variant."""
    rows = (DECODE_ROWS, APPEND_ROWS, APPEND_ROWS + 1)
    return list(dict.fromkeys(choose(variant, n, arch) for n in rows))


def resident_ctas(tile: Tile, variant: Variant, arch: Arch) -> int:
    """Returns the CTAs resident per SM. Prefill tiles use all registers of a thread, decode tiles up to 168."""
    memory = variant.memory(tile, rope=False)
    by_smem = (arch.smem_limit + RESERVED_SMEM) // (memory.bytes + RESERVED_SMEM)
    by_registers = REGISTERS // (tile.threads * (256 if tile.warps_cols == 1 else 168))
    return max(1, min(by_smem, by_registers))


def _prefill(variant: Variant, packed_rows: int, arch: Arch) -> Tile:
    small, dims = arch.smem_limit < _SMEM[0], variant.tile_dims
    plain, modified = (_BATCH_COLS if variant.batch else _COLS)[dims][bisect_right(_SMEM, arch.smem_limit)]
    n = plain if variant.plain else modified
    if n == 0:
        return _append(variant, packed_rows, arch)
    if small and dims[0] > 128:
        return Tile(64, n, 4, 1, 2)
    # Eight warps of 16 rows where 32 rows would need 256 registers for the output alone, and where, with 99 KB, only
    # one CTA fits an SM: one warp's softmax then still overlaps another's products.
    return Tile(128, n, 8 if small or dims == (256, 256) else 4, 1, 2)


def _append(variant: Variant, packed_rows: int, arch: Arch) -> Tile:
    """Returns the tile of 64 rows with the most columns that spill in no variant; ptxas leaves 8 bytes at some
    narrower.
    """
    dim, _ = variant.tile_dims
    if arch.smem_limit >= _SMEM[0]:
        return Tile(64, {192: 48, 256: 32}.get(dim, 64), 4, 1, 2)
    if variant.kv_dtype and dim == 128:
        return Tile(64, 64, 4, 1, 2)
    narrow = dim in (128, 256) or (dim == 192 and variant.batch and not variant.plain)
    return Tile(64, 32 if narrow else 48, 4, 1, 2)


def _decode(variant: Variant, packed_rows: int, arch: Arch) -> Tile:
    """Returns a tile with about 100 KB in flight per CTA and two CTAs per SM."""
    line = 64  # elements of a 128-byte line, to which rows are padded
    token_bytes = sum(-(-dim // line) * line * 2 for dim in variant.head_dims)
    if arch.smem_limit < _SMEM[0]:
        return Tile(DECODE_ROWS, 32, 1, 2, 3 if token_bytes <= 512 else 2)
    stages = {256: 5, 512: 3}.get(token_bytes, 2)
    return Tile(DECODE_ROWS, 64, 1, 4, stages)


def _decode_converted(variant: Variant, packed_rows: int, arch: Arch) -> Tile:
    """Returns a tile for two CTAs per SM if their rings then keep enough in flight beside the 16-bit tile; with four
    warps if possible.
    """
    for ctas in (2, 1):
        room = (arch.smem_limit + RESERVED_SMEM) // ctas - RESERVED_SMEM
        for cols, warps in ((64, 4), (32, 2)):
            stages = 5
            while stages > 1:
                tile = Tile(DECODE_ROWS, cols, 1, warps, stages)
                memory = variant.memory(tile, rope=True)
                if memory.bytes <= room and ctas * (stages - 1) * memory.slot_bytes >= IN_FLIGHT:
                    return tile
                stages -= 1
    raise AssertionError(f"no decode tile for {variant} on {arch}")


def _fp8(variant: Variant, packed_rows: int, arch: Arch) -> Tile:
    """Returns a tile of 8-bit operands. A product with V takes 32 tokens, so every warp of a decode tile has as many;
    two CTAs per SM then have a tile of 16 KB each in flight at d 128: three times what GDDR7 needs (1.8 TB/s for 170
    SMs, 1 us).
    """
    if packed_rows <= DECODE_ROWS:
        tiles = [Tile(DECODE_ROWS, 64, 1, 2, stages) for stages in (3, 2)]
        room = (arch.smem_limit + RESERVED_SMEM) // 2 - RESERVED_SMEM
        fitting = [tile for tile in tiles if variant.memory(tile, rope=False).bytes <= room]
        return [*fitting, tiles[-1]][0]
    cols = {64: 128, 256: 32}.get(variant.tile_dims[0], 64)
    return Tile(APPEND_ROWS, cols, 4, 1, 2) if packed_rows <= APPEND_ROWS else Tile(128, cols, 8, 1, 2)


def _wide(variant: Variant, packed_rows: int, arch: Arch) -> Tile:
    """Returns a tile of warps that exchange P. More rows per CTA read K and V less often: 64 rows are what the outputs
    of eight warps leave room for in registers, 32 what two kv tiles leave of 163 and of 99 KB.
    """
    small = arch.smem_limit < _SMEM[0]
    cols = 16 if small else 32
    decode = [Tile(DECODE_ROWS, cols, 1, 2 if small else 4, stages, exchange=True) for stages in (4, 3, 2)]
    prefill = [Tile(32 * n, cols, 2 * n, 2, 2, exchange=True) for n in ((1,) if small else (2, 1))]
    for tile in decode if packed_rows <= DECODE_ROWS else prefill + decode:
        memory = variant.memory(tile, rope=not variant.plain)
        if memory.bytes <= arch.smem_limit:
            return tile
    raise AssertionError(f"no tile for {variant} on {arch}")


RULES: tuple[Rule[Callable[[Variant, int, Arch], Tile]], ...] = (
    Rule(_fp8, {"fp8": (True,)}),
    Rule(_wide, {"head_dims": (WIDE_HEAD_DIMS,)}),
    Rule(_decode, {"packed_rows": up_to(DECODE_ROWS), "kv_dtype": ("",)}, "4250 of 4420 GB/s at 131072 keys (H200)"),
    Rule(_decode_converted, {"packed_rows": up_to(DECODE_ROWS)}),
    Rule(_append, {"packed_rows": up_to(APPEND_ROWS)}),
    Rule(_prefill, {"kv_dtype": ("",)}, "390 TFLOP/s with 64 columns, 374 with 48, 356 with 32 (earlier form, H200)"),
    Rule(_append, {}, "conversion needs registers: 128 rows leave none"),
)
