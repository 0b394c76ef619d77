"""Loaded kernels with all parameters that settings and tile decide: a family's, which runs of every kind launch, and
the combine kernel, which merges split-KV partials.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from cute_attn.kernels.combine.spec import RowsOfWarps
from cute_attn.kernels.host.features import batched, combine_spec
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import OptionalBounds, plain_strides
from cute_attn.kernels.host.params import PARTIAL_FIELDS, UNBOUNDED, Fields
from cute_attn.problem import Settings
from cute_attn.runtime.launch import Launch, Values

MAX_PREPARED = 1024  # of the layers of a model: what runs their calls, kernels, tilings and layouts of tensor maps

Grid = tuple[int, int, int]
Places = tuple[int, int, int, int, int, int, int, int]
# ^ addresses of q, k, v, out, lse, counters and memory for partial results, 0 where there are none; the number of keys
Addresses = Callable[[Places], Values]
PLAIN: Addresses = operator.itemgetter(0, 1, 2, 3, 4)  # of kernels without tensor maps, counters and partial results

OUTPUT_FIELDS = ("o_stride_n", "o_stride_h")  # bytes
FINAL_ROLES = ("v_scale_ptr", "sinks")  # of `operands.ROLES`, those that final results alone need
ROW_FIELDS = RowsOfWarps._fields[1:]
MERGE_ONE_FIELDS = (*ROW_FIELDS, "qo_len", "num_splits")  # of a single request
MERGE_FIELDS = (*ROW_FIELDS, "merges", "rows_per_merge", "slot_rows")  # of a batch: records, and counts of rows
NO_LENGTHS: Fields = {"qo_len": 0, "num_splits": 0}
NO_MERGES: Fields = {"merges": 0, "rows_per_merge": 1, "slot_rows": 1}

K = TypeVar("K")


class PreparedKernel:
    """Launches of one kernel: addresses move, and a grid, strides, numbers of the schedule and scales are settled for
    longer. Subclasses define strides and addresses.
    """

    counter: Callable[[int], int] | None = None  # from a stream to the address of the counters for a launch on it

    def __init__(
        self,
        settings: Settings,
        launch: Launch,
        static: Fields,
        groups: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]],
        combine: OptionalBounds | None = None,
        scale_unit: float = 1.0,
    ) -> None:
        """`groups`: fields of addresses, of strides (but for the output's), and of numbers. `combine`: launches that
        merge the partials; None for a kernel that leaves none. `scale_unit`: what the kernel's scale includes.
        """
        features, (addresses, strides, numbers) = settings.features, groups
        self.settings, self.combine, self.scale_unit = settings, combine, scale_unit
        self.partial_strides: Values = ()
        if combine is not None and not batched(features):  # fp32 o [num_splits, qo_len, num_qo_heads, head_dim_vo]
            row_bytes = 4 * features.head_dim_vo
            self.partial_strides = features.num_qo_heads * row_bytes, row_bytes
            static |= dict.fromkeys(FINAL_ROLES, 0)
        bound = addresses, strides + OUTPUT_FIELDS, numbers, ("scale", "v_scale")
        self.attention = OptionalBounds(launch, static, bound)

    def scales(self, settings: Settings) -> Values:
        """Returns the values of the scales' fields."""
        return settings.sm_scale * self.scale_unit, 1.0 if self.partial_strides else settings.v_scale

    def strides(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, block_scales: Values
    ) -> Values:
        """Returns the values of the strides' fields. `block_scales`: result of `operands.block_scale_strides`."""
        return *self.read_strides(q, k, v, block_scales), *(self.partial_strides or output_strides(out))

    def read_strides(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_scales: Values) -> Values:
        """Returns those of what is read."""
        return *plain_strides(self.settings, q, k, v), *block_scales

    def addresses(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Addresses:
        """Returns a function that computes the values of the addresses' fields for tensors of these layouts; of single
        requests with any number of keys.
        """
        return PLAIN

    def most_keys(self, kv_len: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """Returns the most keys that the kernel can address with these strides; an ArgumentError if there are more."""
        return UNBOUNDED


def output_strides(out: torch.Tensor) -> Values:
    """Returns the values of OUTPUT_FIELDS for an output."""
    strides, size = out.stride(), out.itemsize
    return strides[0] * size, strides[-2] * size


def combine_launches(settings: Settings, heads: int, gpu: Gpu) -> OptionalBounds:
    """Returns launches of the combine kernel: addresses of o, lse and partials move; a grid, the output's strides,
    values of MERGE_ONE_FIELDS, or of MERGE_FIELDS for a batch, and the output's scale are settled for longer. `heads`:
    query heads whose rows share a tile of the partials.
    """
    features = settings.features
    numbers, absent = (MERGE_FIELDS, NO_LENGTHS) if batched(features) else (MERGE_ONE_FIELDS, NO_MERGES)
    static = {
        "num_qo_heads": features.num_qo_heads,
        "num_kv_heads": features.num_qo_heads // heads,
        "group": heads,
        "lse_scale": settings.lse_scale,
        **absent,
    }
    groups = ("o", "lse", *PARTIAL_FIELDS), OUTPUT_FIELDS, numbers, ("v_scale",)
    return OptionalBounds(gpu.loaded(combine_spec(features), settings.enable_pdl), static, groups)


@functools.lru_cache(MAX_PREPARED)
def prepared(make: Callable[..., K], *arguments: Any) -> K:
    """Returns `make(*arguments)`, kept for the layers of a model and for later plans: the one memo of what launches are
    prepared of.
    """
    return make(*arguments)
