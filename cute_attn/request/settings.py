"""Settings of a call: what dtypes, head counts and options decide, checked once and then cached.

A repeated call differs from the one before in its tensors, and often in its lengths; dtypes, head counts and options
stay. `call_settings` is a pure function of those, so that its results are cached; the functions named `problem`
compute the rest in every call. Errors are not cached: they are raised again each time.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError, RuntimeArgumentError
from cute_attn.problem import Features, Settings
from cute_attn.request import checks

HALF = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Q_DTYPES = (*HALF, *FP8)
KV_DTYPES = (*HALF, *FP8, torch.uint8)
OUT_DTYPES = (*HALF, torch.float32, *FP8)
KV_LAYOUTS = ("NHD", "HND")
LSE_BASES = {"log2": 1.0, "ln": math.log(2.0)}  # and the factors of a base-2 lse
NVFP4_BLOCK = 16  # elements per block scale
POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
DEVICES = ("cpu", "cuda")
MAX_KV_LEN = 1 << 30  # kernels count rows and columns in 32 bits, and 2^30 is their "no bound"
MAX_ROWS = 1 << 30  # tokens x heads of q
MIN_SCALE = torch.finfo(torch.float32).tiny  # factor of the scores in the exponent: with 0, 0 * -inf is NaN
MAX_SOFT_CAP = 2.0**100  # soft caps are clamped to [2^-100, 2^100]: beyond, 1 / cap is 0 or infinite in fp32
MAX_INDEX = (1 << 31) - 1  # kernels count rows of q, of ragged k and v, and entries of page tables in 32 bits
IMMUTABLE = (numbers.Number, str, torch.dtype, type(None), Features)
CACHE_SIZE = 256  # results that are kept: more than the layers of a model have

T = TypeVar("T")


def once(check: Callable[..., T]) -> Callable[..., T]:
    """Decorate a pure function of positional arguments to be computed once for equal arguments of equal types: 1, 1.0
    and True are equal, but no option takes all three. Errors are not kept, nor results of arguments that have no hash,
    may change their value or are large. The memo is `kept` of the result.
    """

    @functools.lru_cache(CACHE_SIZE, typed=True)
    def kept(*arguments: Any) -> T:
        if not all(isinstance(argument, IMMUTABLE) for argument in arguments):
            raise TypeError("an argument may change its value, or is large: a tensor, an array, any object")
        return check(*arguments)

    @functools.wraps(check)
    def checked(*arguments: Any) -> T:
        try:
            return kept(*arguments)
        except TypeError:  # an argument has no hash, is wrong, or must not be kept
            pass
        return check(*arguments)

    checked.__dict__["kept"] = kept
    return checked


class Call(NamedTuple):
    """The arguments of a single-request function as the user gave them. `decode`: q, out, lse have no qo_len axis."""

    q: Any
    k: Any
    v: Any
    decode: bool = False
    custom_mask: Any = None
    packed_custom_mask: Any = None
    head_scales: tuple[Any, Any, Any] = (None, None, None)  # scale_q, scale_k, scale_v
    kv_cache_sf: Any = None
    sinks: Any = None
    out: Any = None
    lse: Any = None
    kv_layout: Any = "NHD"  # from here on options, which are not tensors
    pos_encoding_mode: Any = "NONE"
    causal: Any = False
    window_left: Any = -1
    logits_soft_cap: Any = None
    sm_scale: Any = None
    rope_scale: Any = None
    rope_theta: Any = None
    q_scale: Any = None  # except scales: `problem` replaces tensors by numbers
    k_scale: Any = None
    v_scale: Any = None
    o_dtype: Any = None
    return_lse: Any = False
    enable_pdl: Any = None
    lse_base: Any = "log2"


NOT_OPTIONS = (None,) * Call._fields.index("kv_layout")


@once
def call_settings(given: Features, v_dtype: torch.dtype, head_dim_k: int, page_size: int, *options: Any) -> Settings:
    """Check what tensors decide, and the options of a `Call`, in order, and return the settings they decide. `given`:
    the features that tensors decide, its scale positive unless a factor is a tensor on the device; options decide the
    others. Head dimensions of k and v count elements, of which one of NVFP4 holds two values.
    """
    call = Call._make((*NOT_OPTIONS, *options))
    _check_structure(given, v_dtype)
    cap = checks.real("logits_soft_cap", call.logits_soft_cap, 0.0)
    soft_cap = min(max(cap, 1 / MAX_SOFT_CAP), MAX_SOFT_CAP) if cap > 0 else 0.0  # 0: none
    sm_scale = checks.real("sm_scale", call.sm_scale, given.head_dim_qk**-0.5)
    q_scale, k_scale = checks.real("q_scale", call.q_scale, 1.0), checks.real("k_scale", call.k_scale, 1.0)
    sm_scale = checks.real("sm_scale * q_scale * k_scale", sm_scale * q_scale * k_scale)
    checks.boolean("return_lse", call.return_lse)
    if call.enable_pdl is not None:
        checks.boolean("enable_pdl", call.enable_pdl)
    return Settings(
        _features(given, head_dim_k, call, soft_cap > 0, given.positive_scale and sm_scale >= MIN_SCALE),
        checks.choice("kv_layout", call.kv_layout, KV_LAYOUTS),
        (checks.boolean("causal", call.causal) and not given.custom_mask) or given.multi_item,
        max(-1, min(checks.whole("window_left", call.window_left), MAX_KV_LEN)),
        soft_cap,
        sm_scale,
        checks.real("v_scale", call.v_scale, 1.0),
        checks.positive("rope_scale", call.rope_scale, 1.0),
        checks.positive("rope_theta", call.rope_theta, 1e4),
        call.enable_pdl,
        LSE_BASES[checks.choice("lse_base", call.lse_base, tuple(LSE_BASES))],
        page_size,
    )


def _features(given: Features, head_dim_k: int, call: Call, soft_cap: bool, positive_scale: bool) -> Features:
    packing = 2 if given.kv_dtype == torch.uint8 else 1  # values per element of storage
    head_dim_qk, head_dim_vo = given.head_dim_qk, given.head_dim_vo * packing
    if head_dim_k * packing != head_dim_qk:
        raise RuntimeArgumentError(
            f"q and k must have the same head dimension, got {head_dim_qk} and {head_dim_k * packing}"
        )
    if packing == 2 and (head_dim_qk % NVFP4_BLOCK or head_dim_vo % NVFP4_BLOCK):
        raise ArgumentError(
            f"NVFP4 (uint8) k and v need head dimensions that are multiples of {NVFP4_BLOCK}, "
            f"got {head_dim_qk} and {head_dim_vo}"
        )
    pos_encoding_mode = checks.choice("pos_encoding_mode", call.pos_encoding_mode, POS_ENCODING_MODES)
    if pos_encoding_mode == "ROPE_LLAMA" and head_dim_qk % 2:
        raise ArgumentError(f"pos_encoding_mode 'ROPE_LLAMA' needs an even head dimension, got {head_dim_qk}")
    return given._replace(
        o_dtype=_out_dtype(call.o_dtype, given.q_dtype),
        head_dim_vo=head_dim_vo,
        soft_cap=soft_cap,
        pos_encoding_mode=pos_encoding_mode,
        positive_scale=positive_scale,
    )


def check_device(device: torch.device) -> None:
    """Refuse devices on which no backend runs."""
    if device.type not in DEVICES:
        raise ArgumentError(f"q must be on a {' or '.join(DEVICES)} device, got {device}")


def _check_structure(given: Features, v: torch.dtype) -> None:
    check_device(given.device)
    q, k = given.q_dtype, given.kv_dtype
    if k != v:
        raise ArgumentError(f"k and v must have the same dtype, got {checks.short(k)} and {checks.short(v)}")
    checks.dtype("q", q, Q_DTYPES)
    checks.dtype("k", k, KV_DTYPES)
    if k != q and (k in HALF or q in FP8):
        accepted = checks.short(q) if q in FP8 else f"{checks.short(q)}, an fp8 dtype or uint8 (NVFP4)"
        raise ArgumentError(f"k and v must have dtype {accepted} for q of {checks.short(q)}, got {checks.short(k)}")
    if (k == torch.uint8) != given.kv_block_scales:
        raise ArgumentError(
            "kv_cache_sf (k_sf, v_sf) must come with uint8 (NVFP4) k and v, and only with them; "
            f"got kv_cache_sf {'given' if given.kv_block_scales else 'None'} and k of {checks.short(k)}"
        )
    counts = {name: getattr(given, name) for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")}
    if min(counts.values()) < 1:
        raise ArgumentError(
            "q, k and v must have at least one head and head dimension 1, got "
            + ", ".join(f"{name} {value}" for name, value in counts.items())
        )
    if given.num_qo_heads % given.num_kv_heads:
        raise RuntimeArgumentError(
            f"num_qo_heads of q must be a multiple of num_kv_heads of k and v, "
            f"got {given.num_qo_heads} and {given.num_kv_heads}"
        )


def _out_dtype(o_dtype: Any, q_dtype: torch.dtype) -> torch.dtype:
    if o_dtype is None:
        return torch.bfloat16 if q_dtype in FP8 else q_dtype
    if not isinstance(o_dtype, torch.dtype):
        raise checks.wrong("o_dtype must be a torch.dtype", o_dtype, ArgumentTypeError)
    checks.dtype("o_dtype", o_dtype, OUT_DTYPES)
    return o_dtype
