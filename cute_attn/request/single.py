"""Check the arguments of a single-request call and make a `Problem` of them.

Only this module looks at the tensors of such a call, with `operands`; with the settings module they raise every user
error. `problem` is on the critical path of the host in every call that is no repetition: its checks are inline
comparisons, and error messages are made in functions of their own.
"""

from __future__ import annotations

import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import Features, Problem
from cute_attn.request import checks, operands
from cute_attn.request.bit_packing import mask_bits
from cute_attn.request.operands import BLOCK_SCALES, HEAD_SCALES, LAYOUTS, NAMES, NO_SCALES, SCALES
from cute_attn.request.settings import KV_LAYOUTS, MAX_KV_LEN, MAX_ROWS, Call, call_settings, check_device


def problem(call: Call) -> Problem:
    """Check every argument and allocate the outputs that the caller did not pass."""
    given, scales = call, NO_SCALES
    if call.k_scale is not None or call.v_scale is not None or call.q_scale is not None:
        device = checks.tensor("q", call.q).device
        scales = operands.split_scales(device, call.q_scale, call.k_scale, call.v_scale)
        call = call._replace(q_scale=scales.q, k_scale=scales.k, v_scale=scales.v)
    q, k, v, decode, mask, packed_mask, head_scales, kv_cache_sf, sinks, out, lse, *options = call
    scale_q, scale_k, scale_v = head_scales
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        _refuse_operands(call)

    if q.is_nested or k.is_nested or v.is_nested or q.is_neg() or k.is_neg() or v.is_neg():
        _refuse_operands(call)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) + decode == len(k_shape) == len(v_shape) == 3:
        _refuse_ranks(call)
    qo_len, num_qo_heads, head_dim_q = (1, *q_shape) if decode else q_shape
    device = q.device
    if k_shape[:2] != v_shape[:2] or k.device != device or v.device != device:
        check_device(device)
        checks.device("k", k, device)
        checks.device("v", v, device)
        shapes = f"{checks.describe(k)} and {checks.describe(v)}"
        raise ArgumentError(f"v must have k's kv_len and num_kv_heads, got {shapes}")
    tokens, heads = LAYOUTS[checks.choice("kv_layout", call.kv_layout, KV_LAYOUTS)]
    kv_len, num_kv_heads = k_shape[tokens], k_shape[heads]
    if kv_len > MAX_KV_LEN:
        raise ArgumentError(f"k and v must have at most {MAX_KV_LEN} tokens, got {kv_len}")
    if qo_len * num_qo_heads > MAX_ROWS:
        raise ArgumentError(f"q must have at most {MAX_ROWS} rows (tokens x heads), got {qo_len} x {num_qo_heads}")
    try:
        placed = operands.placement(q, k, v)
    except RuntimeError:  # sparse tensors have no memory
        _refuse_operands(call)
        raise
    features = Features(
        *(device, q.dtype, k.dtype, q.dtype),
        *(num_qo_heads, num_kv_heads, head_dim_q, v_shape[2]),
        custom_mask=mask is not None or packed_mask is not None,
        positive_scale=not scales.of_scores,
        per_head_scales=not (scale_q is scale_k is scale_v is None),
        kv_block_scales=kv_cache_sf is not None,
        sinks=sinks is not None,
        expanded=placed.expanded,
        decode=decode,
        half_aligned_kv=placed.half_aligned,
    )
    settings = call_settings(features, v.dtype, k_shape[2], 1, *options)
    features = settings.features
    q = operands.readable(q, k, v, placed)
    rows = (num_qo_heads,) if decode else (qo_len, num_qo_heads)
    buffers, axes = (out, lse, call.return_lse), "num_qo_heads" if decode else "qo_len, num_qo_heads"
    out, lse = operands.outputs(q, buffers, (features.head_dim_vo, features.o_dtype), rows, axes)
    if call.out is not None or call.lse is not None:
        _keep_apart(given)
    extras = operands.extras(
        scales,
        _mask(call, (qo_len, kv_len)) if features.custom_mask else None,
        operands.per_head("sinks", sinks, num_qo_heads, device) if features.sinks else None,
        operands.check_head_scales(head_scales, features) if features.per_head_scales else None,
        operands.check_block_scales(kv_cache_sf, k, v) if features.kv_block_scales else None,
    )
    return Problem(settings, qo_len, kv_len, q, k, v, out, lse, extras)


def _refuse_operands(call: Call) -> None:
    for name, value in zip(NAMES, call, strict=False):
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise ArgumentError(f"{name} must not be a nested tensor: pass its parts as requests of a batch wrapper")
        if isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise ArgumentError(
                f"{name} must be a tensor outside of torch.func transforms and vmap, which have no rule"
            )
        checks.tensor(name, value)


def _refuse_ranks(call: Call) -> None:
    layout = checks.choice("kv_layout", call.kv_layout, KV_LAYOUTS)
    if call.q.dim() != 3 - call.decode:
        axes = "[num_qo_heads, head_dim]" if call.decode else "[qo_len, num_qo_heads, head_dim_qk]"
        raise checks.wrong(f"q must have shape {axes}", call.q)
    axes = ", ".join(LAYOUTS[layout].axes("kv_len", "num_kv_heads", "head_dim"))
    for name, tensor in (("k", call.k), ("v", call.v)):
        if tensor.dim() != 3:
            raise checks.wrong(f"{name} must have shape [{axes}] (kv_layout {layout!r})", tensor)


def _keep_apart(call: Call) -> None:
    """Refuse `out` and `lse` that share memory with what the call reads, or with each other."""
    names = *NAMES, "custom_mask", "packed_custom_mask", "sinks", *SCALES
    read = [(name, getattr(call, name)) for name in names]
    read += checks.named(HEAD_SCALES, call.head_scales) + checks.named(BLOCK_SCALES, call.kv_cache_sf)
    checks.apart((("out", call.out), ("lse", call.lse)), read)


def _mask(call: Call, lengths: tuple[int, int]) -> torch.Tensor:
    """Return the packed mask. `packed_custom_mask` takes precedence over `custom_mask`."""
    if call.custom_mask is not None:
        mask = checks.tensor("custom_mask", call.custom_mask)
        if mask.dtype != torch.bool:
            raise ArgumentError(
                f"custom_mask must be a bool tensor (True: keep), got {checks.describe(mask)}; "
                "packed uint8 bits are packed_custom_mask"
            )
        if mask.shape != (lengths[0] * lengths[1],):
            checks.shape("custom_mask", mask, lengths, "[qo_len, kv_len], or flat")
        checks.device("custom_mask", mask, call.q.device)
        if call.packed_custom_mask is None:
            packed = mask_bits(mask)
    if call.packed_custom_mask is not None:
        given, size = call.packed_custom_mask, (lengths[0] * lengths[1] + 7) // 8
        meaning, device = "[ceil(qo_len * kv_len / 8)]", call.q.device
        packed = checks.operand("packed_custom_mask", given, (torch.uint8,), (size,), meaning, device).contiguous()
    return packed
