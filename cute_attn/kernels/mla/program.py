"""What the kernels for latent attention share: their parameters, and how they are launched."""

from typing import Any, ClassVar, NamedTuple

from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.mla.spec import AnyMlaSpec
from cute_attn.runtime.arch import named


class MlaParams(NamedTuple):
    """Kernel parameters, in order. Addresses are Int64, 0 where absent; strides count bytes. Partition and merge read
    those that they share with XqaParams by name."""

    q_nope: Int64
    q_pe: Int64
    ckv: Int64
    kpe: Int64
    ckv_scales: Int64  # of groups of latent columns
    o: Int64
    lse: Int64
    table: Int64
    page_starts: Int64
    seq_lens: Int64
    q_indptr: Int64
    sinks: Int64
    scale0: Int64
    v_scale_ptr: Int64
    partials: Int64
    counters: Int64
    q_nope_stride_n: Int64
    q_nope_stride_h: Int64
    q_pe_stride_n: Int64
    q_pe_stride_h: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    ckv_stride_page: Int32
    ckv_stride_n: Int32
    kpe_stride_page: Int32
    kpe_stride_n: Int32
    ckv_scales_stride_page: Int32
    ckv_scales_stride_n: Int32
    batch: Int32
    capacity: Int32
    table_stride: Int32  # elements, unlike the others
    q_len: Int32
    right: Int32  # keys behind its own that a query token sees
    window_left: Int32
    num_kv_heads: Int32
    row_blocks: Divisor
    units_per_cta_group: Int32
    shares_multiplier: Int32
    shares_shift: Int32
    group: Divisor
    page_size: Divisor
    overhead: Int32
    min_share: Int32
    scale: Float32  # of products of latent columns
    rope_scale: Float32  # of those of rotated ones
    v_scale: Float32
    lse_scale: Float32


class LatentProgram(GridProgram):
    """Base of the kernels. A subclass has `kernel` and the type of its map of shared memory."""

    params = MlaParams
    memory_type: ClassVar[Any]

    def __init__(self, spec: AnyMlaSpec, arch: str) -> None:
        self.spec = spec
        self.memory = self.memory_type(spec)
        self.block = (spec.threads, 1, 1)
        self.smem_bytes = self.memory.bytes
        self.arch = named(arch)
