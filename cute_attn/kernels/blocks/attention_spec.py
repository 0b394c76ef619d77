"""What compile keys of the attention kernels share."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import PersistentTile
from cute_attn.kernels.formats import FP8_DTYPES, Ruled
from cute_attn.runtime.spec import KernelSpec

OPERAND = "float16"  # of products with K and V of fewer bits than q: `blocks.kv_dequant`


@dataclass(frozen=True)
class AttentionSpec(Ruled, KernelSpec):
    """Spec of an attention kernel; a family adds its `tile`. Causal and window bounds, GQA group, strides, lengths,
    page size and scales are run-time values.
    """

    dtype: str
    out_dtype: str
    head_dim_qk: int
    head_dim_vo: int
    mask: str = "stop"  # "stop": length and causal bounds; "band": the window's too; "packed": custom bits and the band
    # ^ "multi_item": the band without the keys between a prefix and the row's own item; "ranges": the band, and a range
    # ^ of each token
    scores: tuple[str, ...] = ()  # in order of application, of "scale", "alibi", "soft_cap"
    split: bool = False  # schedule "grid": fp32 partials for the combine kernel instead of the output
    schedule: str = "grid"  # "grid": one request, tiles by arithmetic; "items": work items of a batch
    kv: str = "dense"  # "dense": tokens at a stride; "paged": pages in any order; "gathered": those, by row
    kv_dtype: str = ""  # of `KV_BITS`

    @property
    def fp8(self) -> bool:
        """Whether q, k and v are fp8, multiplied as they are."""
        return self.dtype in FP8_DTYPES

    @property
    def operands(self) -> str:
        """What the operands are, where the family has several kernels and this is not the plain one."""
        return "fp8" if self.fp8 else ""


class PersistentSpec(AttentionSpec):
    """Spec of a persistent kernel with TMA and specialised warps."""

    @property
    def tile(self) -> PersistentTile:
        raise NotImplementedError

    @property
    def operands(self) -> str:
        narrow = "nvfp4" if self.kv_dtype == "nvfp4" else "fp8_kv" if self.kv_dtype else ""
        return super().operands or narrow

    @property
    def operand_dtype(self) -> str:
        """The dtype that the products multiply."""
        return OPERAND if self.kv_dtype else self.dtype

    @property
    def normalizes_q(self) -> bool:
        """Whether rows of q are converted to the dtype of converted keys and values."""
        return self.operand_dtype != self.dtype
