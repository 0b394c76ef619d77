"""Tile table of the decode kernel on tcgen05: rows of a CTA, and slots of K and V."""

from __future__ import annotations

from cute_attn.kernels.xqa.umma.smem import UmmaMemory
from cute_attn.kernels.xqa.umma.spec import ROWS, XqaUmmaSpec
from cute_attn.runtime.arch import Arch

ARCHS = ("sm_100a", "sm_103a")
# Packed rows with which the kernel on mma.sync reads the keys once. Beyond, it reads them again for every block of as
# many rows, which takes more of shared memory and issue slots than HBM leaves (docs/kernels/decode_model.md).
ONE_READ_ROWS = {64: 16, 128: 16, 256: 8}
MAX_ROWS = {64: 64, 128: 64, 256: 32}  # by head dim: more rows leave fewer slots
MAX_STAGES = 16


def choose(
    q_dtype: str, kv_dtype: str, out_dtype: str, head_dim: int, packed_rows: int, tree: bool, arch: Arch
) -> XqaUmmaSpec:
    """Choose the kernel: the fewest rows that hold `packed_rows`, or blocks of the most, and all slots that fit."""
    most = max_rows(q_dtype, kv_dtype, head_dim, tree)
    rows = next((rows for rows in ROWS if packed_rows <= rows <= most), most)
    counts = range(MAX_STAGES, 1, -1)
    specs = [XqaUmmaSpec(q_dtype, kv_dtype, out_dtype, head_dim, tree, rows, stages) for stages in counts]
    return next(spec for spec in specs if UmmaMemory(spec).bytes <= arch.smem_limit)


def max_rows(q_dtype: str, kv_dtype: str, head_dim: int, tree: bool) -> int:
    """Most rows of a CTA. Over keys of 8 bits fp16 q has three terms, whose scores of 64 rows exceed tensor memory; and
    ptxas spills registers of 64 rows under a tree.
    """
    most = MAX_ROWS[head_dim]
    return min(most, 32) if kv_dtype and (q_dtype == "float16" or tree) else most
