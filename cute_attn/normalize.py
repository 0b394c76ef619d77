"""Arguments of one call to a `Problem`. Only this looks at user tensors, and it raises every user error."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from cute_attn import checks
from cute_attn.errors import ArgumentError, ArgumentTypeError, RuntimeArgumentError
from cute_attn.problem import Features, Problem
from cute_attn.quantization import packbits

HALF = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Q_DTYPES = (*HALF, *FP8)
KV_DTYPES = (*HALF, *FP8, torch.uint8)
OUT_DTYPES = (*HALF, torch.float32, *FP8)
KV_LAYOUTS = ("NHD", "HND")
POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
DEVICES = ("cpu", "cuda")
KERNEL_DEVICES = ("cuda",)  # where memory is read in aligned chunks
ALIGNMENT = 16  # bytes: kernels move q, k, v and out in chunks of this size
MAX_KV_LEN = 1 << 30  # kernels compute with 32-bit row and column numbers, and 2^30 is their "no bound"
MAX_ROWS = 1 << 30


class Call(NamedTuple):
    """The arguments of a single-request function as the user gave them. `decode`: q, out, lse lack qo_len."""

    q: Any
    k: Any
    v: Any
    decode: bool = False
    kv_layout: Any = "NHD"
    pos_encoding_mode: Any = "NONE"
    causal: Any = False
    custom_mask: Any = None
    packed_custom_mask: Any = None
    window_left: Any = -1
    logits_soft_cap: Any = None
    sm_scale: Any = None
    rope_scale: Any = None
    rope_theta: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    head_scales: tuple[Any, Any, Any] = (None, None, None)  # scale_q, scale_k, scale_v
    kv_cache_sf: Any = None
    o_dtype: Any = None
    out: Any = None
    lse: Any = None
    return_lse: Any = False
    sinks: Any = None
    enable_pdl: Any = None


class Sizes(NamedTuple):
    qo_len: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int


class Scale(NamedTuple):
    """A product of scales: the numbers multiplied, and what is only known on the device."""

    number: float
    tensors: tuple[torch.Tensor, ...] = ()


def problem(call: Call) -> Problem:
    """Check every argument and allocate the outputs that the caller did not bring."""
    q, sizes = _query_and_sizes(call)
    packed_mask = _mask(call, sizes, q.device)
    soft_cap = 0.0 if call.logits_soft_cap is None else checks.real("logits_soft_cap", call.logits_soft_cap)
    scale = _score_scale(call, sizes.head_dim_qk, q.device)
    v_scale = _scale("v_scale", call.v_scale, q.device)
    rope_scale = 1.0 if call.rope_scale is None else checks.positive("rope_scale", call.rope_scale)
    rope_theta = 1e4 if call.rope_theta is None else checks.positive("rope_theta", call.rope_theta)
    if call.enable_pdl is not None:
        checks.boolean("enable_pdl", call.enable_pdl)
    head_scales = _head_scales(call.head_scales, sizes, q.device)
    sinks = None if call.sinks is None else _sinks(call.sinks, sizes.num_qo_heads, q.device)
    out, lse = _outputs(call, sizes, q)
    features = Features(
        q.device,
        q.dtype,
        call.k.dtype,
        out.dtype,
        sizes.num_qo_heads,
        sizes.num_kv_heads,
        sizes.head_dim_qk,
        sizes.head_dim_vo,
        packed_mask is not None,
        soft_cap > 0,
        checks.choice("pos_encoding_mode", call.pos_encoding_mode, POS_ENCODING_MODES),
        scale.number > 0 and not scale.tensors,  # the sign of a scale on the device is unknown here
        head_scales is not None,
        call.kv_cache_sf is not None,
        sinks is not None,
    )
    if features.pos_encoding_mode == "ROPE_LLAMA" and sizes.head_dim_qk % 2:
        raise ArgumentError(f"pos_encoding_mode 'ROPE_LLAMA' needs an even head dimension, got {sizes.head_dim_qk}")
    return Problem(
        features,
        sizes.qo_len,
        sizes.kv_len,
        q,
        call.k,
        call.v,
        out,
        lse,
        call.kv_layout,
        packed_mask,
        checks.boolean("causal", call.causal) and packed_mask is None,
        max(-1, min(checks.integer("window_left", call.window_left), MAX_KV_LEN)),
        soft_cap if soft_cap > 0 else 0.0,
        scale.number,
        v_scale.number,
        scale.tensors,
        v_scale.tensors[0] if v_scale.tensors else None,
        rope_scale,
        rope_theta,
        sinks,
        call.enable_pdl,
        head_scales,
    )


# ---- q, k, v


def _query_and_sizes(call: Call) -> tuple[torch.Tensor, Sizes]:
    """q `[qo_len, num_qo_heads, head_dim_qk]` as kernels can read it, and the sizes of the problem."""
    q, k, v = checks.tensor("q", call.q), checks.tensor("k", call.k), checks.tensor("v", call.v)
    device = q.device
    if device.type not in DEVICES:
        raise ArgumentError(f"q must be on a {' or '.join(DEVICES)} device, got {checks.describe(q)}")
    if k.device != device:
        checks.device("k", k, device)
    if v.device != device:
        checks.device("v", v, device)
    _check_dtypes(call, q.dtype, k.dtype, v.dtype)
    sizes = _sizes(call, q, k, v)
    if torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _without_grad(name, tensor)
    _check_cache_strides("k", k, device)
    _check_cache_strides("v", v, device)
    if call.decode:
        q = q.unsqueeze(0)
    if (q.stride(2) != 1 and sizes.head_dim_qk > 1) or (device.type in KERNEL_DEVICES and not aligned(q)):
        q = q.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps a misaligned address
    return q, sizes


def _check_dtypes(call: Call, q: torch.dtype, k: torch.dtype, v: torch.dtype) -> None:
    if k != v:
        raise ArgumentError(f"k and v must have the same dtype, got {checks.short(k)} and {checks.short(v)}")
    if q == k and q in HALF and call.kv_cache_sf is None:
        return
    checks.dtype("q", q, Q_DTYPES)
    checks.dtype("k", k, KV_DTYPES)
    if k != q and (k in HALF or q in FP8):
        accepted = checks.short(q) if q in FP8 else f"{checks.short(q)}, an fp8 dtype or uint8 (NVFP4)"
        raise ArgumentError(f"k and v must have dtype {accepted} for q of {checks.short(q)}, got {checks.short(k)}")
    if (k == torch.uint8) != (call.kv_cache_sf is not None):
        raise ArgumentError(
            "kv_cache_sf (k_sf, v_sf) must come with uint8 (NVFP4) k and v, and only with them; "
            f"got kv_cache_sf {'None' if call.kv_cache_sf is None else 'given'} and k of {checks.short(k)}"
        )


def _sizes(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sizes:
    if call.decode:
        if q.dim() != 2:
            raise ArgumentError(f"q must have shape [num_qo_heads, head_dim], got {checks.describe(q)}")
        qo_len, (num_qo_heads, head_dim_qk) = 1, q.shape
    else:
        if q.dim() != 3:
            raise ArgumentError(f"q must have shape [qo_len, num_qo_heads, head_dim_qk], got {checks.describe(q)}")
        qo_len, num_qo_heads, head_dim_qk = q.shape
    layout = checks.choice("kv_layout", call.kv_layout, KV_LAYOUTS)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != 3:
            axes = "[kv_len, num_kv_heads, head_dim]" if layout == "NHD" else "[num_kv_heads, kv_len, head_dim]"
            raise ArgumentError(f"{name} must have shape {axes} (kv_layout {layout!r}), got {checks.describe(tensor)}")
    kv_len, num_kv_heads, head_dim_k = k.shape
    if layout == "HND":
        kv_len, num_kv_heads = num_kv_heads, kv_len
    packing = 2 if k.dtype == torch.uint8 else 1  # NVFP4 elements of a byte
    if v.shape[:2] != k.shape[:2]:
        raise ArgumentError(
            f"v must have k's kv_len and num_kv_heads, got {checks.describe(k)} and {checks.describe(v)}"
        )
    if head_dim_k * packing != head_dim_qk:
        raise RuntimeArgumentError(
            f"q and k must have the same head dimension, got {head_dim_qk} and {head_dim_k * packing}"
        )
    sizes = Sizes(qo_len, kv_len, num_qo_heads, num_kv_heads, head_dim_qk, v.shape[2] * packing)
    _check_counts(sizes)
    return sizes


def _check_counts(sizes: Sizes) -> None:
    if min(sizes[2:]) < 1:
        raise ArgumentError(
            "q, k and v must have at least one head and head dimension 1, got "
            + ", ".join(f"{name} {value}" for name, value in zip(Sizes._fields[2:], sizes[2:], strict=True))
        )
    if sizes.num_qo_heads % sizes.num_kv_heads:
        raise RuntimeArgumentError(
            f"num_qo_heads of q must be a multiple of num_kv_heads of k and v, "
            f"got {sizes.num_qo_heads} and {sizes.num_kv_heads}"
        )
    if sizes.kv_len > MAX_KV_LEN:
        raise ArgumentError(f"k and v must have at most {MAX_KV_LEN} tokens, got {sizes.kv_len}")
    if sizes.qo_len * sizes.num_qo_heads > MAX_ROWS:
        raise ArgumentError(
            f"q must have at most {MAX_ROWS} rows (tokens x heads), got {sizes.qo_len} x {sizes.num_qo_heads}"
        )


def aligned(tensor: torch.Tensor) -> bool:
    """Does every row of a 3-D tensor start at a multiple of 16 bytes?"""
    size = tensor.element_size()
    token, head, _ = tensor.stride()
    if (tensor.data_ptr() | token * size | head * size) % ALIGNMENT == 0:
        return True
    tokens, heads, _ = tensor.shape
    steps = token * size * (tokens > 1) | head * size * (heads > 1)  # the stride of an axis of 1 is never used
    return (tensor.data_ptr() | steps) % ALIGNMENT == 0


def _check_cache_strides(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.stride(2) != 1 and tensor.shape[2] > 1:
        raise ArgumentError(
            f"{name} must have stride 1 on its last axis, got strides {tensor.stride()}; "
            f"a copy of a cache is never made silently: pass {name}.contiguous()"
        )
    if device.type in KERNEL_DEVICES and not aligned(tensor):
        _refuse_misaligned(name, tensor)


def _refuse_misaligned(name: str, tensor: torch.Tensor) -> None:
    raise ArgumentError(
        f"{name} must start at a multiple of {ALIGNMENT} bytes and have strides that are multiples of "
        f"{ALIGNMENT // tensor.element_size()} elements on its first two axes; got address % {ALIGNMENT} = "
        f"{tensor.data_ptr() % ALIGNMENT} and strides {tensor.stride()}"
    )


def _without_grad(name: str, tensor: torch.Tensor) -> None:
    """Outputs carry no gradient: say so before a training loop trusts them."""
    if tensor.requires_grad:
        raise ArgumentError(
            f"{name} requires grad, but attention here computes no gradients: "
            f"call it under torch.no_grad() or pass {name}.detach()"
        )


# ---- masks


def _mask(call: Call, sizes: Sizes, device: torch.device) -> torch.Tensor | None:
    """The packed mask, where there is one. A given packed mask wins over a boolean one."""
    packed = None
    if call.custom_mask is not None:
        mask = checks.tensor("custom_mask", call.custom_mask)
        if mask.dtype != torch.bool:
            raise ArgumentError(
                f"custom_mask must be a bool tensor (True: keep), got {checks.describe(mask)}; "
                "packed uint8 bits are packed_custom_mask"
            )
        checks.shape("custom_mask", mask, (sizes.qo_len, sizes.kv_len), "[qo_len, kv_len]")
        checks.device("custom_mask", mask, device)
        if call.packed_custom_mask is None:
            packed = packbits(mask.reshape(-1), bitorder="little")
    if call.packed_custom_mask is not None:
        packed = checks.tensor("packed_custom_mask", call.packed_custom_mask)
        checks.dtype("packed_custom_mask", packed.dtype, (torch.uint8,))
        num_bytes = (sizes.qo_len * sizes.kv_len + 7) // 8
        checks.shape("packed_custom_mask", packed, (num_bytes,), "[ceil(qo_len * kv_len / 8)]")
        checks.device("packed_custom_mask", packed, device)
        packed = packed.contiguous()
    return packed


# ---- scales and sinks


def _score_scale(call: Call, head_dim_qk: int, device: torch.device) -> Scale:
    number = 1.0 / math.sqrt(head_dim_qk) if call.sm_scale is None else checks.real("sm_scale", call.sm_scale)
    if call.q_scale is None and call.k_scale is None:
        return Scale(number)
    by_q, by_k = _scale("q_scale", call.q_scale, device), _scale("k_scale", call.k_scale, device)
    number = checks.real("sm_scale * q_scale * k_scale", number * by_q.number * by_k.number)
    return Scale(number, by_q.tensors + by_k.tensors)


def _scale(name: str, value: Any, device: torch.device) -> Scale:
    """A number, or a one-element tensor: read here from the CPU, but on a GPU by the kernel."""
    if value is None:
        return Scale(1.0)
    if not isinstance(value, torch.Tensor):
        return Scale(checks.real(name, value))
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise ArgumentTypeError(
            f"{name} must be a number or a floating-point tensor of one element, got {checks.describe(value)}"
        )
    if torch.is_grad_enabled():
        _without_grad(name, value)
    if value.device.type == "cpu":
        return Scale(checks.real(name, value.item()))
    checks.device(name, value, device)
    return Scale(1.0, (value.to(torch.float32),))


def _head_scales(
    scales: tuple[Any, Any, Any], sizes: Sizes, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Per-head scales of fp8 attention; those not given are 1."""
    if scales[0] is None and scales[1] is None and scales[2] is None:
        return None
    heads = (sizes.num_qo_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    names = ("scale_q", "scale_k", "scale_v")
    meanings = ("[num_qo_heads]", "[num_kv_heads]", "[num_kv_heads]")
    scale_q, scale_k, scale_v = (
        torch.ones(count, dtype=torch.float32, device=device)
        if value is None
        else _per_head(name, value, count, meaning, device)
        for name, value, count, meaning in zip(names, scales, heads, meanings, strict=True)
    )
    return scale_q, scale_k, scale_v


def _per_head(name: str, value: Any, count: int, meaning: str, device: torch.device) -> torch.Tensor:
    value = checks.tensor(name, value)
    checks.shape(name, value, (count,), meaning)
    checks.device(name, value, device)
    if not value.dtype.is_floating_point:
        raise ArgumentError(f"{name} must have a floating-point dtype, got {checks.describe(value)}")
    if torch.is_grad_enabled():
        _without_grad(name, value)
    return value.to(torch.float32).contiguous()


def _sinks(value: Any, num_qo_heads: int, device: torch.device) -> torch.Tensor:
    return _per_head("sinks", value, num_qo_heads, "[num_qo_heads]", device)


# ---- outputs


def _outputs(call: Call, sizes: Sizes, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`out` [qo_len, num_qo_heads, head_dim_vo] and, if anyone wants it, `lse` [qo_len, num_qo_heads]."""
    rows = (sizes.qo_len, sizes.num_qo_heads)
    dtype = _out_dtype(call.o_dtype, q.dtype)
    if call.out is None:
        out = torch.empty((*rows, sizes.head_dim_vo), dtype=dtype, device=q.device)
    else:
        out = _out_buffer(call, (*rows, sizes.head_dim_vo), dtype, q.device)
    lse = None
    if call.lse is not None:
        lse = _lse_buffer(call, rows, q.device)
        checks.apart("lse", lse, "out", out)
    elif checks.boolean("return_lse", call.return_lse):
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    return out, lse


def _out_dtype(o_dtype: Any, q_dtype: torch.dtype) -> torch.dtype:
    if o_dtype is None:
        return torch.bfloat16 if q_dtype in FP8 else q_dtype
    if not isinstance(o_dtype, torch.dtype):
        raise ArgumentTypeError(f"o_dtype must be a torch.dtype, got {checks.describe(o_dtype)}")
    checks.dtype("o_dtype", o_dtype, OUT_DTYPES)
    return o_dtype


def _out_buffer(call: Call, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    out = checks.tensor("out", call.out)
    if call.decode:
        checks.shape("out", out, shape[1:], "[num_qo_heads, head_dim_vo]")
    else:
        checks.shape("out", out, shape, "[qo_len, num_qo_heads, head_dim_vo]")
    checks.dtype("out", out.dtype, (dtype,))
    _check_buffer("out", out, call, device)
    out = out.unsqueeze(0) if call.decode else out
    if device.type in KERNEL_DEVICES and not aligned(out):
        _refuse_misaligned("out", out)
    return out


def _lse_buffer(call: Call, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    checks.boolean("return_lse", call.return_lse)
    lse = checks.tensor("lse", call.lse)
    if call.decode:
        checks.shape("lse", lse, shape[1:], "[num_qo_heads]")
    else:
        checks.shape("lse", lse, shape, "[qo_len, num_qo_heads]")
    checks.dtype("lse", lse.dtype, (torch.float32,))
    if not lse.is_contiguous():
        raise ArgumentError(f"lse must be contiguous, got strides {lse.stride()} for shape {tuple(lse.shape)}")
    _check_buffer("lse", lse, call, device)
    return lse.unsqueeze(0) if call.decode else lse


def _check_buffer(name: str, buffer: torch.Tensor, call: Call, device: torch.device) -> None:
    checks.device(name, buffer, device)
    checks.dense(name, buffer)
    if torch.is_grad_enabled():
        _without_grad(name, buffer)
    for other_name in ("q", "k", "v", "custom_mask", "packed_custom_mask", "sinks"):
        other = getattr(call, other_name)
        if other is not None:
            checks.apart(name, buffer, other_name, other)
