"""Decode attention of one request, and the batch wrappers under FlashInfer's module name."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.mla import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from cute_attn.ops import declare, fakes, trace
from cute_attn.request import checks
from cute_attn.request.settings import Call
from cute_attn.wrappers import calls
from cute_attn.wrappers.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from cute_attn.xqa import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]


@declare.operator("single_decode", fakes.single)
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    lse_base: str = "log2",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of one query token over the `kv_len` keys and values of one request.

    For key j and one head, in the natural-log domain::

        z = scale * q.k_j              scale = sm_scale * q_scale * k_scale; q and k rotated first under ROPE_LLAMA
        z = z + slope * j              ALIBI
        z = cap * tanh(z / cap)        logits_soft_cap
        z = -inf                       where the window hides j
        out = v_scale * sum_j exp(z) v_j / (sum_j exp(z) + exp(sink))
        lse = log2(sum_j exp(z) + exp(sink))

    Without any key, out is 0 and lse -inf. No gradients are computed. How large z may
    be, and what k and v of hidden keys may hold: `single_prefill_with_kv_cache`.

    Parameters
    ----------
    q : `[num_qo_heads, head_dim_qk]`, float16 or bfloat16 (fp8 where a backend supports it). Any strides; a last
        axis without unit stride, or rows that are not 16-byte aligned, cost a copy.
    k : `[kv_len, num_kv_heads, head_dim_qk]` ("NHD") or `[num_kv_heads, kv_len, head_dim_qk]` ("HND"), of q's
        dtype (or fp8 under a 16-bit q, where a backend supports it). Any strides with unit stride on the last
        axis; on a GPU rows must be 16-byte aligned, of fp8 and NVFP4 under a 16-bit q 8-byte aligned. `num_qo_heads`
        must be a multiple of `num_kv_heads`; query head h reads kv head h // (num_qo_heads // num_kv_heads).
    v : like k, with `head_dim_vo`.
    kv_layout : "NHD" or "HND", of k and v.
    pos_encoding_mode : "NONE", "ROPE_LLAMA" (rotates pairs (d, d + head_dim / 2); key j has position j,
        the query at kv_len - 1; rotated values are rounded to q's dtype), or "ALIBI" (slopes of Press et al.
        2022).
    use_tensor_cores : a hint; tensor cores are always used.
    q_scale, k_scale, v_scale : factors of q, k and v: numbers, or floating-point tensors with one element. A
        tensor on the GPU is read by the kernel, without synchronisation.
    window_left : >= 0: only the last window_left + 1 keys are seen. Negative: no window.
    logits_soft_cap : soft cap of the logits; None, 0 or a negative number: none.
    sm_scale : any finite number. Default `head_dim_qk ** -0.5`.
    rope_scale, rope_theta : > 0, default 1 and 1e4. Position p turns pair d by
        p * rope_theta^(-2 d / head_dim) / rope_scale. Read under ROPE_LLAMA only.
    return_lse : return `(out, lse)`.
    out : written and returned instead of a new tensor: `[num_qo_heads, head_dim_vo]` of q's dtype, unit
        stride on the last axis, rows 16-byte aligned, no memory in common with the inputs.
    lse : written instead of a new tensor: contiguous float32 `[num_qo_heads]`. Returned if `return_lse`.
    enable_pdl : False: no programmatic dependent launch. None or True: where the GPU has it (9.0 and later).
    sinks : floating-point `[num_qo_heads]`, natural-log domain, not scaled: one more term of the denominator. Finite,
        or -inf (none).
    lse_base : "log2" (FlashInfer's), or "ln": the lse is that above, times ln(2).
    backend : "auto", "fa4", "fa3", "xqa", "fa2", "reference" or "emulator"; `cute_attn.explain` tells which supports
        what.

    Returns
    -------
    out `[num_qo_heads, head_dim_vo]` of q's dtype (bfloat16 for fp8 q), or with `return_lse` the pair of it
    and the float32 lse `[num_qo_heads]`, of base 2 unless `lse_base` says otherwise.

    Raises
    ------
    ArgumentError (a ValueError: shape, dtype, device or value), ArgumentTypeError (a TypeError), LayoutError
    (a KeyError: `kv_layout`, `pos_encoding_mode`, `backend`), NotSupported (a NotImplementedError that lists
    why no backend, or not this one, supports the problem).

    Examples
    --------
    >>> q = torch.randn(32, 128, dtype=torch.bfloat16)
    >>> k, v = torch.randn(2, 512, 8, 128, dtype=torch.bfloat16)
    >>> single_decode_with_kv_cache(q, k, v).shape
    torch.Size([32, 128])
    """
    if is_dynamo_compiling():
        return trace.operator("single_decode")(locals())
    scale_q, scale_k, scale_v = q_scale, k_scale, v_scale
    roles, optional, read = calls.NONE
    if not q_scale is k_scale is v_scale is sinks is None:
        scales = q_scale, k_scale, v_scale
        (scale_q, scale_k, scale_v), roles, optional, read = calls.operands(scales, sinks, None, None, None)
    names = kv_layout, pos_encoding_mode, None, backend, lse_base, roles
    given = q, k, v, out, lse, None, optional, read
    numbers = (
        use_tensor_cores, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta, return_lse, enable_pdl,
        scale_q, scale_k, scale_v,
    )  # fmt: skip
    key, kv_len, entry = calls.find(calls.UNPLANNED, given, numbers, names, kv_layout == "HND")
    if entry is not None and (outputs := calls.replay(entry, given, (kv_len,), kv_len)) is not None:
        return outputs if return_lse else outputs[0]
    checks.boolean("use_tensor_cores", use_tensor_cores)
    call = Call(  # by position: keywords would cost 0.7 us
        q, k, v, True,
        None, None, (None, None, None), None, sinks, out, lse,
        kv_layout, pos_encoding_mode, False, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta,
        q_scale, k_scale, v_scale, None, return_lse, enable_pdl, lse_base,
    )  # fmt: skip
    return calls.run_single(call, backend, key, given, numbers)
