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


@declare.operator("single_decode", fakes.attention)
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

    Without any key, out is 0 and lse -inf. No gradients are computed. How large z may be, what k and v of hidden keys
    may hold, and arguments "as there": `single_prefill_with_kv_cache`.

    Parameters
    ----------
    q : `[num_qo_heads, head_dim_qk]`; dtypes and strides as there.
    k, v, kv_layout : `[kv_len, num_kv_heads, head_dim]` ("NHD", the default) or `[num_kv_heads, kv_len, head_dim]`
        ("HND"), as there.
    pos_encoding_mode : as there; key j has position j, the query kv_len - 1.
    use_tensor_cores : a hint; tensor cores are always used.
    q_scale, k_scale, v_scale : factors of q, k and v: numbers or tensors, as there.
    window_left : >= 0: only the last window_left + 1 keys are seen. Negative: no window.
    logits_soft_cap, sm_scale, rope_scale, rope_theta, return_lse, enable_pdl, sinks, lse_base, backend : as there.
    out, lse : written instead of new tensors, as there: `[num_qo_heads, head_dim_vo]` of q's dtype, `[num_qo_heads]`.

    Returns
    -------
    out `[num_qo_heads, head_dim_vo]` of q's dtype (bfloat16 for fp8 q), or with `return_lse` the pair of it
    and the float32 lse `[num_qo_heads]`, of base 2 unless `lse_base` says otherwise.

    Raises
    ------
    The errors of `single_prefill_with_kv_cache`.

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
    given = q, k, v, out, lse, None, optional, read, None
    numbers = (
        use_tensor_cores, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta, return_lse, enable_pdl,
        scale_q, scale_k, scale_v,
    )  # fmt: skip
    key, outputs = calls.repeated(calls.UNPLANNED, given, numbers, names, kv_layout == "HND")
    if outputs is not None:
        return outputs if return_lse else outputs[0]
    checks.boolean("use_tensor_cores", use_tensor_cores)
    call = Call(  # by position: keywords would cost 0.7 us
        q, k, v, True,
        None, None, (None, None, None), None, sinks, out, lse,
        kv_layout, pos_encoding_mode, False, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta,
        q_scale, k_scale, v_scale, None, return_lse, enable_pdl, lse_base,
    )  # fmt: skip
    return calls.run_single(call, backend, key, given)
