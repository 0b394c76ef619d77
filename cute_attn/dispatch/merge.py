"""Merging of partial results that callers hold, by the kernel that merges split-KV partials."""

from __future__ import annotations

import functools

import torch

from cute_attn.kernels.combine.spec import CombineSpec, rows_of_warps
from cute_attn.kernels.host.gpu import Gpu, on_gpu
from cute_attn.kernels.host.prepared import FINAL_ROLES, NO_MERGES, OUTPUT_FIELDS, ROW_FIELDS, prepared
from cute_attn.problem import short
from cute_attn.request.settings import HALF
from cute_attn.runtime.launch import Bound, current_stream

OUT_DTYPES = (*HALF, torch.float32)
FIELDS = ("o_partial", "lse_partial", "o", "lse", *ROW_FIELDS)


def run(o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, merged: torch.Tensor | None, lse_scale: float) -> bool:
    """Merges states of the same rows over disjoint keys in one launch; tells False, having done nothing, where there
    is no kernel for them.

    `o`: fp32 `[num_states, rows, head_dim]`, `lse`: fp32 base 2 `[num_states, rows]`; rows of each are contiguous, and
    states of both as many rows apart. `out`: contiguous `[rows, head_dim]` of 16 or 32 bits. `merged`: contiguous fp32
    `[rows]`, written as base-2 lse times `lse_scale`, or None.
    """
    return fits(o, lse, out) and bool(on_gpu(out.device, functools.partial(launch, o, lse, out, merged, lse_scale)))


def fits(o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> bool:
    """Tells whether the kernel can merge these states: at most 128 of them, rows of whole chunks of 16 bytes."""
    num_states, _, head_dim = o.shape
    step = lse.stride(0)
    return (
        1 <= num_states <= CombineSpec.max_splits
        and head_dim % 8 == 0
        and out.dtype in OUT_DTYPES
        and o.stride() == (step * head_dim, head_dim, 1)
        and lse.stride(1) == 1
        and out.is_contiguous()
        and (o.data_ptr() | out.data_ptr()) % 16 == 0
    )


def launch(
    o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, merged: torch.Tensor | None, lse_scale: float, gpu: Gpu
) -> bool:
    """Merges states that fit, on a GPU or on the emulator in its place. Returns True."""
    num_states, rows, head_dim = o.shape
    if rows == 0:
        return True
    layout = (num_states, lse.stride(0), head_dim, lse_scale)
    grid, *dealt = rows_of_warps(rows, gpu.sms)
    moving = (*[0 if x is None else x.data_ptr() for x in (o, lse, out, merged)], *dealt)
    prepared(_bound, layout, short(out.dtype), gpu).fire(current_stream(gpu.device_index), moving, (grid,))
    return True


def _bound(layout: tuple[int, int, int, float], out_dtype: str, gpu: Gpu) -> Bound:
    """Returns launches of the kernel by values of FIELDS. Every row counts as a token with one head: rows of `out` are
    contiguous, and nothing depends on the head.
    """
    num_states, step, head_dim, lse_scale = layout
    loaded = gpu.loaded(CombineSpec(out_dtype, head_dim))
    row_bytes = head_dim * getattr(torch, out_dtype).itemsize
    static = {
        "qo_len": step,
        "num_splits": num_states,
        "lse_scale": lse_scale,
        **dict.fromkeys(("num_qo_heads", "num_kv_heads", "group"), 1),
        **dict.fromkeys(OUTPUT_FIELDS, row_bytes),
        "v_scale": 1.0,
        **dict.fromkeys(FINAL_ROLES, 0),
        **NO_MERGES,
    }
    return loaded.bind(static, FIELDS)
