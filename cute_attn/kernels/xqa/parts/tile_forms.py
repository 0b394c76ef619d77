"""Choice of what a kernel's tiles look like: layout in shared memory, reads, conversion."""

from typing import NamedTuple

from cute_attn.kernels.xqa.parts.block_format import Kv4BitBlocks
from cute_attn.kernels.xqa.parts.e2m1 import HardwareE2m1, SpreadBits
from cute_attn.kernels.xqa.parts.formats import Kv4Bit, Kv8Bit, Kv16Bit
from cute_attn.kernels.xqa.parts.layouts import BlockLayout, TileLayout
from cute_attn.kernels.xqa.parts.reads import BlockReads, MatrixReads
from cute_attn.kernels.xqa.parts.softmax import ColumnSoftmax, PackedColumnSoftmax
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.runtime.arch import Arch

Format = Kv16Bit | Kv8Bit | Kv4Bit | Kv4BitBlocks


class TileForms(NamedTuple):
    layout: TileLayout
    reads: MatrixReads | BlockReads
    format: Format
    softmax: type[ColumnSoftmax]


def tile_forms(spec: XqaSpec, memory: XqaMemory, arch: Arch) -> TileForms:
    if spec.reads_blocks(arch):
        blocks = BlockLayout(memory.row_bytes)
        return TileForms(
            blocks, BlockReads(memory, blocks), Kv4BitBlocks(memory, blocks, HardwareE2m1()), PackedColumnSoftmax
        )
    form = _format(spec, memory, arch)
    layout = TileLayout(memory.row_bytes)
    packed = spec.kv_bits == 4 and arch.converts_e2m1
    softmax = PackedColumnSoftmax if packed else ColumnSoftmax
    return TileForms(layout, MatrixReads(memory, layout, form.transposed_pairs), form, softmax)


def _format(spec: XqaSpec, memory: XqaMemory, arch: Arch) -> Kv16Bit | Kv8Bit | Kv4Bit:
    if spec.kv_bits == 16:
        return Kv16Bit()
    if spec.kv_bits == 8:
        return Kv8Bit(spec.kv_dtype, arch.converts_e4m3)
    e2m1 = HardwareE2m1() if arch.converts_e2m1 else SpreadBits()
    return Kv4Bit(memory, e2m1, arch.converts_e4m3, spec.paired)
