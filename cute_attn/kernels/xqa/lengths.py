"""Lengths kernel: keys and first page of every paged request, from `indptr` and `last_page_len` in device memory, and
the rows of its query tokens, from `qo_indptr`.

A thread computes one request. Whatever the numbers are, a request gets no more pages than there are entries of page
numbers, no more keys than its pages hold, and no rows past those of q.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.xqa.spec import CTA_REQUESTS, LengthsSpec
from cute_attn.runtime.arch import named


class LengthsParams(NamedTuple):
    """Kernel parameters, in order. Addresses are those of contiguous int32."""

    indptr: Int64
    last_page_len: Int64
    qo_indptr: Int64
    seq_lens: Int64  # written
    page_starts: Int64  # written
    q_indptr: Int64  # written; 0: not, all requests have as many query tokens
    batch: Int32
    page_size: Int32
    num_indices: Int32
    rows: Int32  # of q


class LengthsProgram(GridProgram):
    params = LengthsParams

    def __init__(self, spec: LengthsSpec, arch: str) -> None:
        self.block = (CTA_REQUESTS, 1, 1)
        self.pdl = named(arch).pdl

    @cute.kernel
    def kernel(self, p: LengthsParams) -> None:
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_wait()  # also for the launch before that reads what is written here
            ptx.grid_dependency_launch()
        request = cute.arch.block_idx()[0] * Int32(CTA_REQUESTS) + cute.arch.thread_idx()[0]
        if request < p.batch:
            place = Int64(request) * Int64(4)
            begin, end = (ptx.ld_global_u32(p.indptr + place + Int64(offset)) for offset in (0, 4))
            last = ptx.ld_global_u32(p.last_page_len + place)
            last = ptx.select(last < Int32(1), Int32(1), ptx.select(last > p.page_size, p.page_size, last))
            has_pages = cutlass.and_(cutlass.and_(begin >= 0, begin < end), end <= p.num_indices)
            keys = (end - begin - 1) * p.page_size + last
            ptx.st_global_b32(p.seq_lens + place, 0, ptx.select(has_pages, keys, Int32(0)))
            ptx.st_global_b32(p.page_starts + place, 0, ptx.select(has_pages, begin, Int32(0)))
            if p.q_indptr != Int64(0):
                if request == 0:
                    self.copy_bound(p, Int64(0))
                self.copy_bound(p, place + Int64(4))

    @cute.jit
    def copy_bound(self, p: LengthsParams, place: Int64) -> None:
        """Copy a bound of query tokens."""
        row = ptx.ld_global_u32(p.qo_indptr + place)
        ptx.st_global_b32(p.q_indptr + place, 0, ptx.maximum(ptx.minimum(row, p.rows), Int32(0)))
