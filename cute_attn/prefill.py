"""Prefill and append attention of one request, and the batch wrappers under FlashInfer's module name."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.ops import declare, fakes, trace
from cute_attn.request import checks, positional
from cute_attn.request.settings import Call
from cute_attn.wrappers import calls
from cute_attn.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper, fast_prefill_plan
from cute_attn.wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from cute_attn.wrappers.signatures import with_return_lse
from cute_attn.wrappers.trtllm_prefill import (
    trtllm_batch_context_with_kv_cache,
    trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek,
)

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "fast_prefill_plan",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]


@declare.operator("single_prefill", fakes.attention)
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    *,
    allow_fp16_qk_reduction: bool | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    lse_base: str = "log2",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of `qo_len` query tokens over the `kv_len` keys and values of one request.

    For query token i, key j and one head, in the natural-log domain::

        z = scale * q_i.k_j            scale = sm_scale * k_scale; q and k rotated first under ROPE_LLAMA
        z = z + slope * (j - i)        ALIBI
        z = cap * tanh(z / cap)        logits_soft_cap
        z = -inf                       where a mask hides j from i
        out_i = v_scale * sum_j exp(z) v_j / (sum_j exp(z) + exp(sink))
        lse_i = log2(sum_j exp(z) + exp(sink))

    A token that sees no key has out 0 and lse -inf. No gradients are computed.

    GPU kernels subtract logits in fp32, as FlashInfer's do. Promised are results for z up to 1e8 in size; out and lse
    of a row with a larger z may be inaccurate or NaN, other rows are not affected. CPU tensors are computed in fp64,
    without that limit. k of a key that a row does not see may hold anything, NaN included. v must be finite in all
    kv_len tokens, also where a mask, `causal` or the window hides them: otherwise any row of that kv head may be NaN.

    Parameters
    ----------
    q : `[qo_len, num_qo_heads, head_dim_qk]`, float16 or bfloat16 (fp8 where a backend supports it). Any
        strides; a last axis without unit stride, or rows that are not 16-byte aligned, cost a copy.
    k : `[kv_len, num_kv_heads, head_dim_qk]` ("NHD") or `[num_kv_heads, kv_len, head_dim_qk]` ("HND"), of q's
        dtype (or fp8 under a 16-bit q, where a backend supports it). Any strides with unit stride on the last
        axis; on a GPU rows must be 16-byte aligned, of fp8 and NVFP4 under a 16-bit q 8-byte aligned. `num_qo_heads`
        must be a multiple of `num_kv_heads`; query head h reads kv head h // (num_qo_heads // num_kv_heads).
    v : like k, with `head_dim_vo`.
    scale_q, scale_k, scale_v : floating-point `[num_qo_heads]`, `[num_kv_heads]` and `[num_kv_heads]`,
        default 1: per-head factors of fp8 q, k and v.
    o_dtype : dtype of `out`: float16, bfloat16 or float32. Default: q's, and bfloat16 for fp8 q.
    custom_mask : bool `[qo_len, kv_len]`, or that mask flattened; True keeps. Replaces `causal`; the window still
        applies.
    packed_custom_mask : uint8 `[ceil(qo_len * kv_len / 8)]`, bit `qo_idx * kv_len + kv_idx` of the mask in
        **little** bit order: `packbits(mask.flatten(), bitorder="little")`. Replaces `custom_mask`.
    causal : token i sees keys j <= i + kv_len - qo_len (bottom-right). Without effect under a custom mask.
    kv_layout : "NHD" or "HND", of k and v.
    pos_encoding_mode : "NONE", "ROPE_LLAMA" (rotates pairs (d, d + head_dim / 2); key j has position j,
        query token i at i + kv_len - qo_len; rotated values are rounded to q's dtype), or "ALIBI" (slopes of
        Press et al. 2022; i counts from 0).
    use_fp16_qk_reduction : a hint; scores are always accumulated in fp32.
    sm_scale : any finite number. Default `head_dim_qk ** -0.5`.
    window_left : >= 0: token i sees no key before i + kv_len - qo_len - window_left (keys to the right are up
        to `causal`). Negative: no window.
    logits_soft_cap : soft cap of the logits; None, 0 or a negative number: none.
    rope_scale, rope_theta : > 0, default 1 and 1e4. Position p turns pair d by
        p * rope_theta^(-2 d / head_dim) / rope_scale. Read under ROPE_LLAMA only.
    backend : "auto", "fa4", "fa3", "xqa", "fa2", "reference" or "emulator"; `cute_attn.explain` tells which supports
        what.
    return_lse : return `(out, lse)`.
    kv_cache_sf : (k_sf, v_sf) for NVFP4 k and v, which are uint8 with two e2m1 values per byte, the first in
        the low bits: e4m3 (or its bytes as uint8), one scale per 16 values, `[..., head_dim / 16]`. Global scales are
        `k_scale` and `v_scale`.
    k_scale, v_scale : factors of k and v: numbers, or floating-point tensors with one element. A tensor on
        the GPU is read by the kernel, without synchronisation.
    allow_fp16_qk_reduction : the older name of `use_fp16_qk_reduction`.
    out : written and returned instead of a new tensor: `[qo_len, num_qo_heads, head_dim_vo]` of `o_dtype`
        (q's by default), unit stride on the last axis, rows 16-byte aligned, no memory in common with the
        inputs.
    lse : written instead of a new tensor: contiguous float32 `[qo_len, num_qo_heads]`. Returned if
        `return_lse`.
    sinks : floating-point `[num_qo_heads]`, natural-log domain, not scaled: one more term of the denominator. Finite,
        or -inf (none); others are refused on the CPU, and give NaN on a GPU.
    enable_pdl : False: no programmatic dependent launch. None or True: where the GPU has it (9.0 and later).
    lse_base : "log2" (FlashInfer's), or "ln": the lse is `lse_i` above, times ln(2).

    Returns
    -------
    out `[qo_len, num_qo_heads, head_dim_vo]`, or with `return_lse` the pair of it and the float32
    lse `[qo_len, num_qo_heads]`, of base 2 unless `lse_base` says otherwise.

    Raises
    ------
    ArgumentError (a ValueError: shape, dtype, device or value), ArgumentTypeError (a TypeError), LayoutError
    (a KeyError: `kv_layout`, `pos_encoding_mode`, `backend`), NotSupported (a NotImplementedError that lists
    why no backend, or not this one, supports the problem).

    Examples
    --------
    >>> q = torch.randn(128, 32, 128, dtype=torch.bfloat16)
    >>> k, v = torch.randn(2, 512, 8, 128, dtype=torch.bfloat16)
    >>> out, lse = single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([128, 32, 128]), torch.Size([128, 32]))
    """
    if is_dynamo_compiling():
        return trace.operator("single_prefill")(locals())
    mask = custom_mask if packed_custom_mask is None else packed_custom_mask
    of_k, of_v = k_scale, v_scale
    roles, optional, read = calls.NONE
    if not k_scale is v_scale is sinks is mask is scale_q is scale_k is scale_v is kv_cache_sf is None:
        heads = None if scale_q is scale_k is scale_v is None else (scale_q, scale_k, scale_v)
        (_, of_k, of_v), roles, optional, read = calls.operands(
            (None, k_scale, v_scale), sinks, mask, heads, kv_cache_sf
        )
        if packed_custom_mask is not None and custom_mask is not None:  # which is checked and not used
            read = *read, custom_mask
    names = kv_layout, pos_encoding_mode, o_dtype, backend, lse_base, roles, packed_custom_mask is None
    given = q, k, v, out, lse, None, optional, read, None
    numbers = (
        causal, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta, return_lse,
        enable_pdl, allow_fp16_qk_reduction, of_k, of_v,
    )  # fmt: skip
    any_keys = mask is kv_cache_sf is None  # their shapes say how many keys there are
    key, outputs = calls.repeated(calls.UNPLANNED, given, numbers, names, kv_layout == "HND", any_keys)
    if outputs is not None:
        return outputs if return_lse else outputs[0]
    positional.check_scales(scale_q, scale_k, scale_v)
    checks.fp16_hint(use_fp16_qk_reduction, allow_fp16_qk_reduction)
    call = Call(  # by position: keywords would cost 0.7 us
        q, k, v, False,
        custom_mask, packed_custom_mask, (scale_q, scale_k, scale_v), kv_cache_sf, sinks, out, lse,
        kv_layout, pos_encoding_mode, causal, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta,
        None, k_scale, v_scale, o_dtype, return_lse, enable_pdl, lse_base,
    )  # fmt: skip
    return calls.run_single(call, backend, key, given)


single_prefill_with_kv_cache_return_lse = with_return_lse(single_prefill_with_kv_cache)
