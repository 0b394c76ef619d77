"""Append kernel: writes rows [nnz, heads, n] of keys and values to slots of paged caches, as they are or quantised.

A thread writes one or two units of a head's row (`units`): 16 bytes of a copy, or 16 elements. Grid y is 0 for keys, 1
for values; x counts (row, head, unit), units fastest, so that neighbouring threads access neighbouring memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.append.slots import SLOTS, Indices
from cute_attn.kernels.append.spec import THREADS, AppendSpec
from cute_attn.kernels.append.units import Operand, Source, unit_of
from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.runtime.arch import named

MIN_CTAS = 8  # per multiprocessor: 64 registers per thread. Without a bound ptxas takes fewer, and spills


class AppendParams(NamedTuple):
    """Kernel parameters, in order. Addresses are Int64, 0 where absent; strides and steps are bytes."""

    k: Operand
    v: Operand  # which may have another head dimension
    # both
    rows: Int32
    heads: Divisor
    page_size: Divisor
    num_pages: Int32
    # slots "pages"
    batch_indices: Indices
    positions: Indices
    kv_indices: Indices
    kv_indptr: Indices
    batch_size: Int32
    num_indices: Int32
    # slots "mapped"
    slot_mapping: Indices
    num_slots: Int32


class AppendProgram(GridProgram):
    params = AppendParams
    min_ctas = MIN_CTAS

    def __init__(self, spec: AppendSpec, arch: str) -> None:
        self.block = (THREADS, 1, 1)
        self.slot_of = SLOTS[spec.slots]
        self.unit = unit_of(spec, arch)
        self.per_thread = spec.per_thread
        self.pdl = named(arch).pdl

    @cute.kernel
    def kernel(self, params: AppendParams) -> None:
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_wait()
            ptx.grid_dependency_launch()
        if cute.arch.block_idx()[1] == 0:
            self.append(params, params.k)
        else:
            self.append(params, params.v)

    @cute.jit
    def append(self, p: AppendParams, operand: cutlass.Constexpr) -> None:
        """Writes this thread's units of keys or values, `operand.units` apart in a head's row."""
        units, heads = operand.units, p.heads
        index = cute.arch.block_idx()[0] * Int32(THREADS) + cute.arch.thread_idx()[0]
        token_head = units.quotient(index)
        unit = index - token_head * units.value
        row = heads.quotient(token_head)
        head = token_head - row * heads.value
        if row < p.rows:
            source = operand.source.of(row, head)
            # First what is at known addresses: the loads of indices depend on each other.
            mine = [unit + Int32(i) * units.value for i in range(self.per_thread)]
            loaded = [self.unit.load(operand, source, u) for u in mine]
            scale = self.unit.scale(operand)
            slot = self.slot_of(p, row)
            if slot.exists:
                for i in cutlass.range_constexpr(self.per_thread):
                    self.unit.store(operand, scale, Source(source, mine[i], loaded[i]), slot, head)
