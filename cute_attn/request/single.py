"""Check the arguments of a single-request call and make a `Problem` of them.

Only this module looks at the tensors of such a call; with the settings module it raises every user error. `problem` is
on the critical path of the host in every call: its checks are inline comparisons, and error messages are made in
functions of their own. Checks of operands, scales and outputs that batches and decode calls need too are public here.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch.autograd import forward_ad

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import Features, Problem
from cute_attn.request import checks
from cute_attn.request.bit_packing import packbits
from cute_attn.request.settings import KV_LAYOUTS, MAX_KV_LEN, NVFP4_BLOCK, Call, call_settings, check_device

KERNEL_DEVICES = ("cuda",)  # devices whose kernels read memory in aligned chunks
ALIGNMENT = 16  # bytes: kernels move q, k, v and out in chunks of this size
NARROW_ALIGNMENT = 8  # bytes: some move k and v of fp8 dtypes and NVFP4 in halves of a chunk
SCALES_ALIGNMENT = 4  # bytes, likewise for the block scales of NVFP4
MAX_ROWS = 1 << 30
SCALES = ("q_scale", "k_scale", "v_scale")
HEAD_SCALES = ("scale_q", "scale_k", "scale_v")
BLOCK_SCALES = ("k_sf of kv_cache_sf", "v_sf of kv_cache_sf")

Scales = tuple[torch.Tensor, ...]  # one-element fp32 tensors on the device


def problem(call: Call) -> Problem:
    """Check every argument and allocate the outputs that the caller did not pass."""
    given = call
    score_scales: Scales = ()
    v_scales: Scales = ()
    if call.k_scale is not None or call.v_scale is not None or call.q_scale is not None:
        call, score_scales, v_scales = _without_tensors(call)
    q, k, v, decode, mask, packed_mask, (scale_q, scale_k, scale_v), kv_cache_sf, sinks, out, lse, *options = call
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        _refuse_operands(call)

    if q.is_nested or k.is_nested or v.is_nested or q.is_neg() or k.is_neg() or v.is_neg():
        _refuse_operands(call)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) + decode == len(k_shape) == len(v_shape) == 3:
        _refuse_ranks(call)
    qo_len, num_qo_heads, head_dim_q = (1, *q_shape) if decode else q_shape
    kv_len, num_kv_heads, head_dim_k = k_shape
    v_len, v_heads, head_dim_v = v_shape
    device = q.device
    if v_len != kv_len or v_heads != num_kv_heads or k.device != device or v.device != device:
        _refuse_mismatch(call)
    if _layout(call) == "HND":
        kv_len, num_kv_heads = num_kv_heads, kv_len
    if kv_len > MAX_KV_LEN or qo_len * num_qo_heads > MAX_ROWS:
        _refuse_lengths(qo_len, num_qo_heads, kv_len)
    try:
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    except RuntimeError:  # sparse tensors have none
        _refuse_operands(call)
        raise
    joined = q_strides[0] | q_strides[-2] | k_strides[0] | k_strides[1] | v_strides[0] | v_strides[1]
    # 16 elements are a multiple of 16 bytes in any dtype: common strides need no further check.
    uncommon = (addresses | joined) % ALIGNMENT or not q_strides[-1] == k_strides[2] == v_strides[2] == 1
    structure = (
        device,
        q.dtype,
        k.dtype,
        v.dtype,
        num_qo_heads,
        num_kv_heads,
        head_dim_q,
        head_dim_k,
        head_dim_v,
        mask is not None or packed_mask is not None,
        not (scale_q is scale_k is scale_v is None),
        kv_cache_sf is not None,
        sinks is not None,
        bool(score_scales),
        (0 in q_strides or 0 in k_strides or 0 in v_strides) and is_expanded(q, k, v),
        decode,
        bool(uncommon) and is_half_aligned(k, v),
    )
    settings = call_settings(structure, *options)
    features = settings.features

    if q.requires_grad or k.requires_grad or v.requires_grad or forward_ad._current_level >= 0:
        checks.refuse_grad(q=q, k=k, v=v)
    if uncommon:
        q = readable_query(q, ("k", k), ("v", v), alignment=kv_alignment(k))

    rows = (num_qo_heads,) if decode else (qo_len, num_qo_heads)
    if out is not None or lse is not None:
        _check_outputs(given, features, rows)
    return Problem(
        settings,
        qo_len,
        kv_len,
        q,
        k,
        v,
        q.new_empty(*rows, features.head_dim_vo, dtype=features.o_dtype) if out is None else out,
        q.new_empty(*rows, dtype=torch.float32) if lse is None and call.return_lse else lse,
        _mask(call, (qo_len, kv_len)) if features.custom_mask else None,
        score_scales,
        v_scales[0] if v_scales else None,
        check_per_head("sinks", sinks, features) if features.sinks else None,
        check_head_scales(call.head_scales, features) if features.per_head_scales else None,
        check_block_scales(kv_cache_sf, k, v) if features.kv_block_scales else None,
    )


# ---- q, k, v


def _refuse_operands(call: Call) -> None:
    for name in ("q", "k", "v"):
        checks.plain(name, getattr(call, name))


def _layout(call: Call) -> str:
    return call.kv_layout if type(call.kv_layout) is str else checks.choice("kv_layout", call.kv_layout, KV_LAYOUTS)


def _refuse_ranks(call: Call) -> None:
    layout = checks.choice("kv_layout", call.kv_layout, KV_LAYOUTS)
    if call.q.dim() != 3 - call.decode:
        axes = "[num_qo_heads, head_dim]" if call.decode else "[qo_len, num_qo_heads, head_dim_qk]"
        raise ArgumentError(f"q must have shape {axes}, got {checks.describe(call.q)}")
    axes = "[kv_len, num_kv_heads, head_dim]" if layout == "NHD" else "[num_kv_heads, kv_len, head_dim]"
    for name, tensor in (("k", call.k), ("v", call.v)):
        if tensor.dim() != 3:
            raise ArgumentError(f"{name} must have shape {axes} (kv_layout {layout!r}), got {checks.describe(tensor)}")


def _refuse_mismatch(call: Call) -> None:
    check_device(call.q.device)
    checks.device("k", call.k, call.q.device)
    checks.device("v", call.v, call.q.device)
    raise ArgumentError(
        f"v must have k's kv_len and num_kv_heads, got {checks.describe(call.k)} and {checks.describe(call.v)}"
    )


def _refuse_lengths(qo_len: int, num_qo_heads: int, kv_len: int) -> None:
    if kv_len > MAX_KV_LEN:
        raise ArgumentError(f"k and v must have at most {MAX_KV_LEN} tokens, got {kv_len}")
    raise ArgumentError(f"q must have at most {MAX_ROWS} rows (tokens x heads), got {qo_len} x {num_qo_heads}")


def has_readable_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Tell whether rows are 16-byte aligned if q, k and v start at multiples of 16 bytes; k and v have unit stride on
    their last axis.
    """
    steps = (stride * x.element_size() for x in (q, k, v) for stride in outer_strides(x))
    return not any(step % ALIGNMENT for step in steps) and (q.stride(-1) == 1 or q.shape[-1] == 1)


def readable_query(q: torch.Tensor, *caches: tuple[str, torch.Tensor], alignment: int = ALIGNMENT) -> torch.Tensor:
    """Return q as kernels can read it, copied where needed. `caches` (k and v, by name) are refused instead of copied,
    if their rows do not start at multiples of `alignment` bytes.

    A copy is needed if kernels cannot read q's strides or address.
    """
    for name, cache in caches:
        check_unit_stride(name, cache)
        check_alignment(name, cache, alignment)
    if (q.stride(-1) != 1 and q.shape[-1] > 1) or (q.device.type in KERNEL_DEVICES and not aligned(q)):
        return q.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps a misaligned address
    return q


def aligned(tensor: torch.Tensor, alignment: int = ALIGNMENT) -> bool:
    """Tell whether every row (along the last axis) starts at a multiple of `alignment` bytes."""
    joined = functools.reduce(operator.or_, outer_strides(tensor), 0)
    return (tensor.data_ptr() | joined * tensor.element_size()) % alignment == 0


def kv_alignment(k: torch.Tensor) -> int:
    """Return the bytes at whose multiples rows of k and v must start for some backend to read them."""
    return NARROW_ALIGNMENT if k.itemsize == 1 else ALIGNMENT


def is_half_aligned(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Tell `Features.half_aligned_kv`."""
    return k.itemsize == 1 and not (aligned(k) and aligned(v))


def outer_strides(x: torch.Tensor) -> list[int]:
    """Return the strides of all axes but the last, without axes of size 1, whose strides are never used."""
    return [stride for stride, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1]


def is_expanded(*tensors: torch.Tensor) -> bool:
    """Tell whether an axis longer than 1 has a stride of 0."""
    return any(stride == 0 and count > 1 for x in tensors for stride, count in zip(x.stride(), x.shape, strict=True))


def check_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Refuse k or v whose last axis does not have unit stride."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ArgumentError(
            f"{name} must have stride 1 on its last axis, got strides {tensor.stride()}; "
            f"a copy of a cache is never made silently: pass {name}.contiguous()"
        )


def check_alignment(name: str, tensor: torch.Tensor, alignment: int = ALIGNMENT) -> None:
    """Refuse a GPU tensor whose rows do not start at multiples of `alignment` bytes."""
    if tensor.device.type in KERNEL_DEVICES and not aligned(tensor, alignment):
        raise ArgumentError(
            f"{name} must start at a multiple of {alignment} bytes and have strides that are multiples of "
            f"{alignment // tensor.element_size()} elements on all but its last axis; got address % {alignment} = "
            f"{tensor.data_ptr() % alignment} and strides {tensor.stride()}"
        )


# ---- masks


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
            packed = packbits(mask.reshape(-1), bitorder="little")
    if call.packed_custom_mask is not None:
        packed = checks.tensor("packed_custom_mask", call.packed_custom_mask)
        checks.dtype("packed_custom_mask", packed.dtype, (torch.uint8,))
        num_bytes = (lengths[0] * lengths[1] + 7) // 8
        checks.shape("packed_custom_mask", packed, (num_bytes,), "[ceil(qo_len * kv_len / 8)]")
        checks.device("packed_custom_mask", packed, call.q.device)
        packed = packed.contiguous()
    return packed


# ---- scales and sinks


def _without_tensors(call: Call) -> tuple[Call, Scales, Scales]:
    """Return the call with numbers for scales, and the device tensors that are factors of the scores and of v."""
    device = checks.tensor("q", call.q).device
    q_scale, of_q = split_scale("q_scale", call.q_scale, device)
    k_scale, of_k = split_scale("k_scale", call.k_scale, device)
    v_scale, of_v = split_scale("v_scale", call.v_scale, device)
    return call._replace(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale), of_q + of_k, of_v


def split_scale(name: str, value: Any, device: torch.device) -> tuple[Any, Scales]:
    """Return (number, device tensors) of a scale: a CPU tensor is read here, a GPU tensor by the kernel."""
    if not isinstance(value, torch.Tensor):
        return value, ()
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise ArgumentTypeError(
            f"{name} must be a number or a floating-point tensor of one element, got {checks.describe(value)}"
        )
    checks.check_grad(name, checks.stored(name, value))
    if value.device.type == "cpu":
        return value.item(), ()
    checks.device(name, checks.stored(name, value), device)
    return None, (value.to(torch.float32),)


def check_block_scales(scales: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the block scales of NVFP4 k and v: one e4m3 number per 16 values, which take 8 bytes."""
    if not isinstance(scales, tuple | list) or len(scales) != 2:
        raise ArgumentTypeError(f"kv_cache_sf must be a pair (k_sf, v_sf), got {checks.describe(scales)}")
    k_sf, v_sf = (_block_scale(name, sf, x) for name, sf, x in zip(("k_sf", "v_sf"), scales, (k, v), strict=True))
    return k_sf, v_sf


def _block_scale(name: str, value: Any, cache: torch.Tensor) -> torch.Tensor:
    name = f"{name} of kv_cache_sf"
    value = checks.tensor(name, value)
    checks.dtype(name, value.dtype, (torch.float8_e4m3fn, torch.uint8))
    expected = (*cache.shape[:-1], 2 * cache.shape[-1] // NVFP4_BLOCK)
    checks.shape(name, value, expected, "[..., head_dim / 16], the leading axes of k and v,")
    checks.device(name, value, cache.device)
    checks.check_grad(name, value)
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        raise ArgumentError(f"{name}: its innermost stride must be 1, got strides {value.stride()}")
    if value.device.type in KERNEL_DEVICES and value.shape[-1] % SCALES_ALIGNMENT == 0:
        _check_scales_alignment(name, value)
    return value.view(torch.float8_e4m3fn)


def has_loose_scales(*scales: torch.Tensor) -> bool:
    """Tell whether the block scales of some token do not start at a multiple of their size, or of 16 bytes."""
    return any(
        number % min(max(1, x.shape[-1]), ALIGNMENT) for x in scales for number in (x.data_ptr(), *outer_strides(x))
    )


def _check_scales_alignment(name: str, value: torch.Tensor) -> None:
    if any(number % SCALES_ALIGNMENT for number in (value.data_ptr(), *outer_strides(value))):
        raise ArgumentError(
            f"{name} must start at a multiple of {SCALES_ALIGNMENT} bytes and have strides that are multiples of it, "
            f"got address % {SCALES_ALIGNMENT} = {value.data_ptr() % SCALES_ALIGNMENT} and strides {value.stride()}"
        )


def check_head_scales(
    scales: tuple[Any, Any, Any], features: Features
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the per-head scales of fp8 attention; None stands for ones."""
    counts = features.num_qo_heads, features.num_kv_heads, features.num_kv_heads
    scale_q, scale_k, scale_v = (
        torch.ones(count, dtype=torch.float32, device=features.device)
        if value is None
        else check_per_head(name, value, features)
        for name, value, count in zip(("scale_q", "scale_k", "scale_v"), scales, counts, strict=True)
    )
    return scale_q, scale_k, scale_v


def check_per_head(name: str, value: Any, features: Features) -> torch.Tensor:
    """Check one number per kv head (scale_k, scale_v) or per query head (all others). Return contiguous fp32."""
    value = checks.tensor(name, value)
    if name in ("scale_k", "scale_v"):
        checks.shape(name, value, (features.num_kv_heads,), "[num_kv_heads]")
    else:
        checks.shape(name, value, (features.num_qo_heads,), "[num_qo_heads]")
    checks.device(name, value, features.device)
    checks.check_grad(name, value)
    if not value.dtype.is_floating_point:
        raise ArgumentError(f"{name} must have a floating-point dtype, got {checks.describe(value)}")
    if name == "sinks" and value.device.type == "cpu":
        _check_sinks(value)
    if value.dtype == torch.float32 and value.is_contiguous():
        return value
    return value.to(torch.float32).contiguous()


def _check_sinks(sinks: torch.Tensor) -> None:
    """Refuse sinks that would turn every row of their head to NaN."""
    for head, sink in enumerate(sinks.tolist()):
        if not sink < math.inf:
            raise ArgumentError(f"sinks must be finite or -inf (no sink), got {sink} for head {head}")


# ---- outputs and workspaces


def _check_outputs(call: Call, features: Features, rows: tuple[int, ...]) -> None:
    names = "q", "k", "v", "custom_mask", "packed_custom_mask", "sinks", *SCALES
    read = [(name, getattr(call, name)) for name in names]
    read += checks.named(HEAD_SCALES, call.head_scales) + checks.named(BLOCK_SCALES, call.kv_cache_sf)
    check_outputs(call.out, call.lse, features, rows, "" if call.decode else "qo_len")
    checks.apart((("out", call.out), ("lse", call.lse)), read)


def check_outputs(out: Any, lse: Any, features: Features, rows: tuple[int, ...], first_axis: str) -> None:
    """Check shape, dtype, device and strides of the caller's `out` and `lse`."""
    heads = f"{first_axis}, num_qo_heads" if first_axis else "num_qo_heads"
    if out is not None:
        shape = (*rows, features.head_dim_vo)
        _check_output("out", out, shape, f"[{heads}, head_dim_vo]", features.o_dtype, features.device)
        checks.dense("out", out)
        strides = out.stride()
        if (out.data_ptr() | strides[0] | strides[-2]) % ALIGNMENT:
            check_alignment("out", out)
    if lse is not None:
        _check_output("lse", lse, rows, f"[{heads}]", torch.float32, features.device)
        checks.writable("lse", lse)
        if not lse.is_contiguous():
            raise ArgumentError(f"lse must be contiguous, got strides {lse.stride()} for shape {tuple(lse.shape)}")


def _check_output(
    name: str, buffer: Any, shape: tuple[int, ...], axes: str, dtype: torch.dtype, device: torch.device
) -> None:
    checks.tensor(name, buffer)
    if buffer.shape != shape or buffer.dtype != dtype or buffer.device != device:
        checks.shape(name, buffer, shape, axes)
        checks.dtype(name, buffer.dtype, (dtype,))
        checks.device(name, buffer, device)
    checks.check_grad(name, buffer)


def check_workspace(name: str, value: torch.Tensor) -> None:
    """Check memory for partial results and counters."""
    if not value.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, got strides {value.stride()} for shape {tuple(value.shape)}")
    if value.data_ptr() % ALIGNMENT:
        raise ArgumentError(
            f"{name} must start at a multiple of {ALIGNMENT} bytes, "
            f"got address % {ALIGNMENT} = {value.data_ptr() % ALIGNMENT}"
        )
