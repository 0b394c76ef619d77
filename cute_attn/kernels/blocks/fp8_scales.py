"""Scales of fp8 q, k and v, of any sign: those of scores, per row, and that of outputs."""

from dataclasses import dataclass

from cutlass import Float32, Int32

from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.scalars import device_scale, head_scale
from cute_attn.kernels.blocks.tile_scheduler import QueryTile

MIN_SCALE = 1e-30  # of scores: 0 would turn hidden ones into NaN


def kv_head(p: PersistentParams, work: QueryTile) -> Int32:
    return Divisor(p.kv_group, p.kv_group_multiplier, p.kv_group_shift).quotient(work.head_block)


def row_scale(p: PersistentParams, work: QueryTile, head: Int32) -> Float32:
    """Loads and multiplies the scales of a query head's scores, for every query tile anew: registers are scarce."""
    scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
    return scale * head_scale(p.scale_k, kv_head(p, work)) * head_scale(p.scale_q, head)


@dataclass(frozen=True)
class ScaledPartialEpilogue(PartialEpilogue):
    """Row epilogue of partial outputs that applies the head's v scale, which the combine kernel does not know."""

    v_scale: Float32

    def row(self, maximum: Float32, total: Float32, head: Int32) -> tuple[Float32, Float32]:
        factor, lse = super().row(maximum, total, head)
        return factor * self.v_scale, lse


def scaled_epilogues(p: PersistentParams, work: QueryTile) -> tuple[FinalEpilogue, ScaledPartialEpilogue]:
    """Returns the row epilogues of final and of partial outputs, with v's scales."""
    head = head_scale(p.scale_v, kv_head(p, work))
    whole = FinalEpilogue(p.sinks, p.v_scale * device_scale(p.v_scale_ptr) * head, p.lse_scale)
    return whole, ScaledPartialEpilogue(head)
