"""Where a thread is: the rows of its warp, the warp's slice of tokens and output columns, and the lane."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import FragmentPosition, MmaFragmentLayout
from cute_attn.kernels.blocks.scalars import warp_index
from cute_attn.kernels.blocks.tma import named_sync
from cute_attn.kernels.mla.spec import LATENT, MlaSpec

FIRST_BARRIER = 1  # of the row groups; barrier 0 is that of the CTA


@dataclass(frozen=True)
class Place(FragmentPosition):
    """Adjacent warps have other rows, warps `row_groups` apart the same rows and other tokens and columns."""

    spec: MlaSpec
    warp: Int32
    lane: Int32

    @classmethod
    def of_thread(cls, spec: MlaSpec) -> "Place":
        return cls(spec, warp_index(), cute.arch.thread_idx()[0] & 31)

    @property
    def group_rows(self) -> int:
        """Rows of a warp."""
        return self.spec.rows // self.spec.row_groups

    @property
    def slice_cols(self) -> int:
        """Tokens of a warp's scores."""
        return self.spec.cols // self.spec.slices

    @property
    def slice_dim(self) -> int:
        """Columns of a warp's outputs."""
        return LATENT // self.spec.slices

    @property
    def scores(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(self.group_rows // 16, self.slice_cols // 8)

    @property
    def outputs(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(self.group_rows // 16, self.slice_dim // 8)

    @property
    def row_group(self) -> Int32:
        return self.warp % self.spec.row_groups

    @property
    def slice(self) -> Int32:
        return self.warp // self.spec.row_groups

    @property
    def first_row(self) -> Int32:
        """First row of the warp in the CTA's tile."""
        return self.row_group * self.group_rows

    def first_warp_col(self) -> Int32:
        return self.slice * self.slice_cols

    def sync_group(self) -> None:
        """Barrier of the warps that have the same rows."""
        if self.spec.row_groups == 1:
            ptx.sync_threads()
        else:
            named_sync(FIRST_BARRIER + self.row_group, self.spec.threads // self.spec.row_groups)
