"""Append kernel: writes rows [nnz, heads, n] of keys and values to slots of paged caches, as they are or quantised.

A thread writes one or two units of a head's row (`units`): 16 bytes of a copy, or 16 elements. Grid y is 0 for keys, 1
for values; x counts (row, head, unit), units fastest, so that neighbouring threads access neighbouring memory.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.append.slots import SLOTS
from cute_attn.kernels.append.spec import THREADS, AppendSpec
from cute_attn.kernels.append.units import Operand, Place, Source, unit_of
from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.runtime.arch import named

MIN_CTAS = 8  # per multiprocessor: 64 registers per thread. Without a bound ptxas takes fewer, and spills


def index_fields(*names: str) -> dict[str, type]:
    """Returns the parameters of tensors of indices: address, step, and whether they are of int64."""
    return {name + part: kind for name in names for part, kind in (("", Int64), ("_step", Int64), ("_wide", Int32))}


OPERAND_FIELDS = {
    "source": Int64,
    "source_row": Int64,
    "source_head": Int64,
    "source_step": Int64,
    "cache": Int64,
    "cache_page": Int64,
    "cache_token": Int64,
    "cache_head": Int64,
    "sf": Int64,
    "sf_page": Int64,
    "sf_token": Int64,
    "sf_head": Int64,
    "scale": Float32,
    "scale_address": Int64,
    "units": Divisor,  # of a head's row, for each thread's first: half of them where a thread has two
}
FIELDS = {
    # keys, and values, which may have another head dimension
    **{f"{side}_{name}": kind for side in "kv" for name, kind in OPERAND_FIELDS.items()},
    # both
    "rows": Int32,
    "heads": Divisor,
    "page_size": Divisor,
    "num_pages": Int32,
    # slots "pages"
    **index_fields("batch_indices", "positions", "kv_indices", "kv_indptr"),
    "batch_size": Int32,
    "num_indices": Int32,
    # slots "mapped"
    **index_fields("slot_mapping"),
    "num_slots": Int32,
}
# Kernel parameters, in order. Addresses are Int64, 0 where absent; strides and steps are bytes.
AppendParams: Any = NamedTuple("AppendParams", [*FIELDS.items()])  # type: ignore[misc]


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
    def kernel(self, params: Any) -> None:
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_wait()
            ptx.grid_dependency_launch()
        if cute.arch.block_idx()[1] == 0:
            self.append(params, "k_")
        else:
            self.append(params, "v_")

    @cute.jit
    def append(self, p: Any, side: cutlass.Constexpr) -> None:
        """Writes this thread's units of keys ("k_") or values ("v_"), `k_units` or `v_units` apart in a head's row."""
        units, heads = getattr(p, f"{side}units"), p.heads
        operand = operand_of(p, side)
        index = cute.arch.block_idx()[0] * Int32(THREADS) + cute.arch.thread_idx()[0]
        token_head = units.quotient(index)
        unit = index - token_head * units.value
        row = heads.quotient(token_head)
        head = token_head - row * heads.value
        if row < p.rows:
            source = operand.row(row, head)
            # First what is at known addresses: the loads of indices depend on each other.
            mine = [unit + Int32(i) * units.value for i in range(self.per_thread)]
            loaded = [self.unit.load(operand, source, u) for u in mine]
            scale = self.unit.scale(operand)
            slot = self.slot_of(p, row)
            if slot.exists:
                for i in cutlass.range_constexpr(self.per_thread):
                    self.unit.store(operand, scale, Source(source, mine[i], loaded[i]), slot, head)


def operand_of(p: Any, side: str) -> Operand:
    """Returns keys or values."""
    source, row, head, step = fields(p, f"{side}source", ("", "_row", "_head", "_step"))
    cache, block_scales = (Place(*fields(p, side + name, ("", "_page", "_token", "_head"))) for name in ("cache", "sf"))
    return Operand(source, row, head, step, cache, block_scales, *fields(p, f"{side}scale", ("", "_address")))


def fields(p: Any, stem: str, suffixes: tuple[str, ...]) -> list[Any]:
    return [getattr(p, stem + suffix) for suffix in suffixes]
