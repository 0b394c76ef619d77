"""Tile table of the decode kernel on tcgen05: rows of a CTA, and slots of K and V."""

from __future__ import annotations

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.xqa.umma.smem import UmmaMemory
from cute_attn.kernels.xqa.umma.spec import HEAD_DIMS, ROWS, XqaUmmaSpec
from cute_attn.runtime.arch import Arch

ARCHS = ("sm_100a", "sm_103a")
KV_DTYPES = ("", "float8_e4m3fn", "float8_e5m2")
# Packed rows with which the kernel on mma.sync reads the keys once. Beyond, it reads them again for every block of as
# many rows: at head dim 128 it takes 14 issue slots per token and block, this kernel 10 to 17 in all; HBM takes 70.
ONE_READ_ROWS = {64: 16, 128: 16, 256: 8}
# Reads up to which that kernel is the better one. Keys of 8 bits pass through shared memory four times here, which
# takes 12 clocks per token, 4.4 per read there; HBM takes 9 (head dim 128, `python -m perf.decode_model`).
FEW_READS = {16: 1, 8: 2}
MAX_ROWS = {64: 64, 128: 64, 256: 32}  # by head dim: more rows leave fewer slots
MAX_STAGES = 8


def supports(kv_dtype: str, head_dim: int, packed_rows: int, arch: Arch) -> bool:
    """Whether the kernel is taken for `packed_rows` = q_len * group rows."""
    if arch.name not in ARCHS or kv_dtype not in KV_DTYPES or head_dim not in HEAD_DIMS:
        return False
    return packed_rows > FEW_READS[KV_BITS[kv_dtype]] * ONE_READ_ROWS[head_dim]


def choose(
    q_dtype: str, kv_dtype: str, out_dtype: str, head_dim: int, packed_rows: int, tree: bool, arch: Arch
) -> XqaUmmaSpec:
    """Choose the kernel: the fewest rows that hold all, or blocks of the most, and all slots that fit."""
    most = MAX_ROWS[head_dim]
    rows = next((rows for rows in ROWS if packed_rows <= rows <= most), most)
    counts = range(MAX_STAGES, 0, -1)
    slots = [(2, staged) for staged in counts] if kv_dtype else [(stages, 0) for stages in counts[:-1]]
    specs = [XqaUmmaSpec(q_dtype, kv_dtype, out_dtype, head_dim, tree, rows, *numbers) for numbers in slots]
    return next(spec for spec in specs if UmmaMemory(spec).bytes <= arch.smem_limit)
