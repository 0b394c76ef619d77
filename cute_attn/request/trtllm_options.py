"""Options of FlashInfer's TRT-LLM functions: what changes nothing is accepted, what has no meaning here is refused,
as is its container of NVFP4 outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.request import checks

INTERLEAVED = "FlashInfer interleaves scales of v over 4 tokens there, and kernels here read them in order"
EXACT = "softmax is exact and in fp32"
SCALE_ROWS = 128  # rows of scales come in tiles of so many


class FP4Tensor:
    """NVFP4 numbers, two per byte, with their block scales. Attention here does not write them: functions that take one
    as `out` refuse it with a reason, so that code which can make one still imports and runs.

    Parameters
    ----------
    data : uint8 `[..., ceil(n / 2)]`.
    scale : float8_e4m3fn, its rows a multiple of 128.
    scale_start_index : row of `scale` that belongs to row 0 of `data`. Default 0.
    original_shape : shape before packing, `[..., n]`. Default None: not known.

    Raises
    ------
    ArgumentError (a ValueError: dtype, rows of `scale`, `scale_start_index` or `original_shape`), ArgumentTypeError.
    """

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        scale_start_index: int = 0,
        original_shape: tuple[int, ...] | None = None,
    ) -> None:
        checks.dtype("data", checks.tensor("data", data).dtype, (torch.uint8,))
        checks.dtype("scale", checks.tensor("scale", scale).dtype, (torch.float8_e4m3fn,))
        start, rows = checks.integer("scale_start_index", scale_start_index), scale.shape[0]
        if rows % SCALE_ROWS:
            raise checks.wrong(f"scale must have a multiple of {SCALE_ROWS} rows", scale)
        if not 0 <= start < rows or start + data.shape[0] > rows:
            raise ArgumentError(
                f"scale_start_index must be in 0..{rows - 1} and leave {data.shape[0]} rows of scale, got {start}"
            )
        packed = None if original_shape is None else (*original_shape[:-1], (original_shape[-1] + 1) // 2)
        if packed is not None and tuple(data.shape) != packed:
            raise checks.wrong(f"data must have shape {packed} for original_shape", data)
        self.data, self.scale = data, scale
        self.scale_start_index, self.original_shape = start, original_shape
        self.dtype: Any = "nvfp4"


def refuse_skipped_softmax(factor: Any) -> None:
    """Refuse a threshold below which weights are dropped. None and 0 drop nothing."""
    if factor is not None and checks.real("skip_softmax_threshold_scale_factor", factor) != 0:
        feature = f"skip_softmax_threshold_scale_factor={factor!r}"
        checks.refuse(feature, "no weight is dropped from the softmax", "skip_softmax_threshold_scale_factor=None")


def refuse_sage_attention(sage_attn_sfs: Any, num_elts_per_sage_attn_blk: Any) -> None:
    """Refuse scales of blocks of queries and keys, each with the number of its elements."""
    for name, values in (
        ("sage_attn_sfs", sage_attn_sfs),
        ("num_elts_per_sage_attn_blk", num_elts_per_sage_attn_blk),
    ):
        if not isinstance(values, tuple | list) or len(values) != 4:
            raise checks.wrong(f"{name} must be a tuple of 4", values, ArgumentTypeError)
        if any(x is not None and (isinstance(x, torch.Tensor) or x != 0) for x in values):
            checks.refuse(
                f"{name} (SageAttention)", "q.k is exact", f"{name} of its default, and one scale in bmm1_scale"
            )


def refuse_context_parallelism(world: Any, rank: Any, lengths: Any, one_token: str, enabled: Any = None) -> None:
    """Refuse keys that are shared out among ranks. `one_token`: how the function is told that no row depends on its
    position. `enabled`: None for functions without `enable_dcp`.
    """
    ranks = checks.integer("cp_world", world), checks.integer("cp_rank", rank)
    asked = enabled is not None and checks.boolean("enable_dcp", enabled)
    if asked or ranks != (1, 0) or lengths is not None:
        names = "cp_world, cp_rank, causal_seqlens_kv_global"
        names = names if enabled is None else f"enable_dcp, {names}"
        instead = f"{one_token}, with return_lse=True on every rank, and merge_states"
        checks.refuse(f"decode context parallelism ({names})", "positions follow from the keys of this rank", instead)


def refuse_nvfp4_output(out: Any, out_dtype: Any, o_sf_scale: Any, o_sf_vec_size: Any) -> None:
    """Refuse NVFP4 output, under all the names that ask for it."""
    asked = isinstance(out, FP4Tensor) or (isinstance(out_dtype, str) and out_dtype == "nvfp4")
    if asked or o_sf_scale is not None or o_sf_vec_size is not None:
        reason = "outputs have 16 bits, or 8 on XQA"
        checks.refuse("NVFP4 output (out_dtype, o_sf_scale, o_sf_vec_size)", reason, "out_dtype=None and quantize out")


def output_dtype(out: Any, out_dtype: Any) -> torch.dtype | None:
    """Return the dtype of out, from a given out or `out_dtype`, which must agree; None where neither is given."""
    out_dtype = None if out_dtype is None else checks.dtype_of("out_dtype", out_dtype)
    if out is None:
        return out_dtype
    given = checks.tensor("out", out).dtype
    if out_dtype is not None and given != out_dtype:
        raise checks.wrong(f"out must have out_dtype {out_dtype}", out)
    return given


def one_sink(sinks: Any) -> Any:
    """Return the sinks of a call that may have them in a list of one tensor."""
    if not isinstance(sinks, list | tuple):
        return sinks
    if len(sinks) != 1:
        raise ArgumentError(f"sinks must be a tensor or a list of one tensor, got a list of {len(sinks)}")
    return sinks[0]


def check_counters(buffer: Any) -> None:
    """Check `multi_ctas_kv_counter_buffer`, which is not used: counters are elsewhere."""
    if buffer is not None:
        checks.tensor("multi_ctas_kv_counter_buffer", buffer)
