"""Arguments of a decode call to an `XqaProblem`: every user error is raised here."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError, NotSupported, Refusal, RuntimeArgumentError
from cute_attn.kernels.xqa.host.runner import UNBOUNDED, mask_row_bytes
from cute_attn.kernels.xqa.spec import HEAD_DIMS
from cute_attn.problem import Scratch, XqaFeatures, XqaProblem
from cute_attn.request import checks
from cute_attn.request import single as single_request
from cute_attn.request.caches import cache_views
from cute_attn.request.settings import HALF, check_device

COUNTER_BYTES = 8 << 20  # of the workspace: zero before its first use, and left zero
MAX_PLACES = (1 << 31) - 1  # kernels count elements of the page table in 32 bits
INDEX_DTYPES = (torch.int32, torch.uint32)
MASK_DTYPES = (torch.uint16, torch.int16, torch.uint32, torch.int32)
OUT_DTYPES = (*HALF, torch.float8_e4m3fn)


class Call(NamedTuple):
    """The arguments as the user gave them, but the cache: keys and values `[pages, page_size, heads, width]`."""

    query: Any
    k: torch.Tensor
    v: torch.Tensor
    block_scales: tuple[torch.Tensor, torch.Tensor] | None
    block_tables: Any
    seq_lens: Any
    scratch: Scratch
    bmm1_scale: Any
    bmm2_scale: Any
    window_left: Any
    out: Any
    sinks: Any
    enable_pdl: Any
    q_len_per_req: Any
    mask: Any
    q_cu_seq_lens: Any
    lse: Any
    return_lse: Any


def problem(call: Call) -> XqaProblem:
    query, k, v = checks.tensor("query", call.query), call.k, call.v
    if query.dim() != 3:
        raise ArgumentError(f"query must have shape [num_tokens, num_qo_heads, head_dim], got {checks.describe(query)}")
    device, q_len = query.device, _q_len(call)
    tables, seq_lens = _tables(call.block_tables, device), _lengths(call.seq_lens, device)
    batch = tables.shape[0]
    if seq_lens.shape[0] != batch:
        raise ArgumentError(
            f"seq_lens must have one length for each of the {batch} rows of block_tables, got {seq_lens.shape[0]}"
        )
    q_indptr = _q_indptr(call.q_cu_seq_lens, q_len, batch, device)
    num_tokens, num_qo_heads, head_dim = query.shape
    if q_indptr is None and num_tokens != batch * q_len:
        raise ArgumentError(
            f"query must have batch_size * q_len_per_req = {batch} * {q_len} rows, got {checks.describe(query)}"
        )
    if call.enable_pdl is not None:
        checks.boolean("enable_pdl", call.enable_pdl)  # before it is a key, for which 1 is True
    features = _features(
        device,
        query.dtype,
        (k.dtype, v.dtype),
        call.out.dtype if isinstance(call.out, torch.Tensor) else query.dtype,
        (num_qo_heads, k.shape[2], head_dim),
        (k.shape[3], v.shape[3]),
        k.shape[1],
        q_len,
        call.mask is not None,
        max(-1, min(checks.integer("window_left", call.window_left), UNBOUNDED)),
        call.enable_pdl,
        call.block_scales is not None,
    )
    _check_cache(k, v, call.block_scales, device)
    for name, buffer in zip(("workspace_buffer", "semaphores"), call.scratch.buffers, strict=False):
        checks.device(name, buffer, device)
    single_request.refuse_grad(query=query, k=k, v=v)
    scale, scale_tensors = single_request.scale("bmm1_scale", call.bmm1_scale, device)
    v_scale, v_scale_tensors = single_request.scale("bmm2_scale", call.bmm2_scale, device)
    out, lse = _outputs(call, features, num_tokens)
    return XqaProblem(
        features,
        single_request.readable(query),
        k,
        v,
        tables,
        seq_lens,
        min(tables.shape[1] * features.page_size, UNBOUNDED),
        out,
        call.scratch,
        1.0 if scale is None else checks.real("bmm1_scale", scale),
        1.0 if v_scale is None else checks.real("bmm2_scale", v_scale),
        scale_tensors,
        v_scale_tensors[0] if v_scale_tensors else None,
        call.block_scales,
        _sinks(call.sinks, num_qo_heads, device),
        q_indptr,
        _mask(call.mask, num_tokens, q_len, device),
        lse,
    )


@functools.lru_cache(256)
def _features(
    device: torch.device,
    q_dtype: torch.dtype,
    kv_dtypes: tuple[torch.dtype, torch.dtype],
    o_dtype: torch.dtype,
    heads: tuple[int, int, int],
    widths: tuple[int, int],
    page_size: int,
    q_len: int,
    tree: bool,
    window_left: int,
    enable_pdl: bool | None,
    block_scales: bool,
) -> XqaFeatures:
    """What dtypes, shapes and options decide: checked once, then remembered."""
    check_device(device)
    checks.dtype("query", q_dtype, HALF)
    checks.dtype("out", o_dtype, OUT_DTYPES)
    if kv_dtypes[0] != kv_dtypes[1]:
        raise ArgumentError(f"k and v must have the same dtype, got {kv_dtypes[0]} and {kv_dtypes[1]}")
    accepted = (q_dtype, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
    checks.dtype("kv_cache", kv_dtypes[0], accepted)
    packed = kv_dtypes[0] == torch.uint8
    if packed != block_scales:
        raise ArgumentError(
            "kv_cache_sf (k_sf, v_sf) must come with a uint8 (NVFP4) kv_cache, and only with it; "
            f"got kv_cache_sf {'given' if block_scales else 'None'} and kv_cache of {checks.short(kv_dtypes[0])}"
        )
    num_qo_heads, num_kv_heads, head_dim = heads
    if widths[0] != widths[1] or widths[0] * (2 if packed else 1) != head_dim:
        raise ArgumentError(
            f"kv_cache must have query's head_dim {head_dim}"
            f"{', two elements a byte,' if packed else ''} on its last axis, got {widths[0]} and {widths[1]}"
        )
    if min(heads) < 1 or num_qo_heads % num_kv_heads:
        raise RuntimeArgumentError(
            "num_qo_heads of query must be a multiple of num_kv_heads of kv_cache, "
            f"got {num_qo_heads} and {num_kv_heads}"
        )
    if device.type == "cuda" and o_dtype not in HALF and torch.cuda.get_device_capability(device) < (9, 0):
        reason, instead = "GPUs before compute capability 9.0 run a kernel without that conversion", "a 16-bit out"
        raise NotSupported([Refusal("xqa", "fp8 output", reason, instead)])
    if device.type == "cuda" and head_dim not in HEAD_DIMS:
        instead = "BatchDecodeWithPagedKVCacheWrapper, or tensors on the CPU"
        raise NotSupported([Refusal("xqa", f"head_dim {head_dim}", f"its kernels have {HEAD_DIMS}", instead)])
    narrow = "nvfp4" if packed else checks.short(kv_dtypes[0])
    index = device.index if device.index is not None or device.type == "cpu" else torch.cuda.current_device()
    return XqaFeatures(
        torch.device(device.type, index),
        q_dtype,
        "" if kv_dtypes[0] == q_dtype else narrow,
        o_dtype,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        q_len,
        tree,
        window_left,
        enable_pdl,
    )


# --- the cache --------------------------------------------------------------------------------------------------------


def cache(kv_cache: Any, kv_layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as `[pages, page_size, heads, width]` views. One tensor with 1 on axis 1 is both."""
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        kv_cache = (kv_cache[:, 0], kv_cache[:, 0])
    return cache_views("kv_cache", kv_cache, kv_layout)


def block_scales(given: Any, kv_layout: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of an NVFP4 cache, in any of the forms of a cache."""
    if isinstance(given, torch.Tensor):
        if given.dim() != 5 or given.shape[1] != 2:
            raise ArgumentError(
                f"kv_cache_sf as one tensor must have shape [num_pages, 2, ...], got {checks.describe(given)}"
            )
        given = given.unbind(1)
    if isinstance(given, tuple | list) and kv_layout == "HND":
        given = tuple(checks.tensor("kv_cache_sf", x).transpose(1, 2) for x in given)
    return single_request.block_scales(given, k, v)


def _check_cache(
    k: torch.Tensor, v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None, device: torch.device
) -> None:
    for name, x in (("k of kv_cache", k), ("v of kv_cache", v)):
        checks.device(name, x, device)
        single_request.check_alignment(name, x)
    if scales is not None and device.type == "cuda":
        for name, x in zip(("k_sf", "v_sf"), scales, strict=True):
            whole = x.shape[3]  # bytes of a token: the kernel copies them as one
            if any(offset % whole for offset in (x.data_ptr(), *x.stride()[:3])):
                raise ArgumentError(
                    f"{name} of kv_cache_sf must have an address and strides that are multiples of {whole} bytes, "
                    f"got strides {x.stride()}"
                )


def workspace(value: Any) -> Scratch:
    """Counters in the first 8 MiB, where FlashInfer has its semaphores; partials after them."""
    value = checks.tensor("workspace_buffer", value)
    if not value.is_contiguous() or value.data_ptr() % 16:
        raise ArgumentError(
            f"workspace_buffer must be contiguous and start at a multiple of 16 bytes, got {checks.describe(value)}"
        )
    base, size = value.data_ptr(), value.nbytes
    return Scratch((value,), base, min(size, COUNTER_BYTES), base + COUNTER_BYTES, max(0, size - COUNTER_BYTES))


# --- lengths and tables -----------------------------------------------------------------------------------------------


def _q_len(call: Call) -> int:
    """None is 1, as FlashInfer's annotation has it."""
    q_len = 1 if call.q_len_per_req is None else checks.integer("q_len_per_req", call.q_len_per_req)
    if q_len < 1:
        raise ArgumentError(f"q_len_per_req must be >= 1, got {q_len}")
    return q_len


def _tables(value: Any, device: torch.device) -> torch.Tensor:
    value = checks.tensor("block_tables", value)
    if value.dim() != 2:
        raise ArgumentError(f"block_tables must have shape [batch_size, max_pages], got {checks.describe(value)}")
    checks.dtype("block_tables", value.dtype, (torch.int32,))
    checks.device("block_tables", value, device)
    value = value if value.shape[1] < 2 or value.stride(1) == 1 else value.contiguous()
    if value.shape[0] * value.stride(0) > MAX_PLACES:
        raise ArgumentError(
            f"block_tables must span at most {MAX_PLACES} elements, "
            f"got {value.shape[0]} rows of stride {value.stride(0)}"
        )
    return value


def _lengths(value: Any, device: torch.device) -> torch.Tensor:
    value = checks.tensor("seq_lens", value)
    if value.dim() == 2 and value.shape[1] == 1:
        value = value[:, 0]
    if value.dim() != 1:
        raise ArgumentError(f"seq_lens must have shape [batch_size], got {checks.describe(value)}")
    checks.dtype("seq_lens", value.dtype, INDEX_DTYPES)
    checks.device("seq_lens", value, device)
    return value.contiguous()


def _q_indptr(value: Any, q_len: int, batch: int, device: torch.device) -> torch.Tensor | None:
    if value is None:
        return None
    value = checks.tensor("q_cu_seq_lens", value)
    checks.dtype("q_cu_seq_lens", value.dtype, INDEX_DTYPES)
    checks.shape("q_cu_seq_lens", value, (batch + 1,), "[batch_size + 1]")
    checks.device("q_cu_seq_lens", value, device)
    return value.contiguous()


def _mask(value: Any, num_tokens: int, q_len: int, device: torch.device) -> torch.Tensor | None:
    """Rows of mask bits, one row a query token, in whole 32-bit words."""
    if value is None:
        return None
    value = checks.tensor("mask", value)
    checks.dtype("mask", value.dtype, MASK_DTYPES)
    checks.device("mask", value, device)
    words = mask_row_bytes(q_len) // value.element_size()
    if value.dim() < 2 or value.shape[-1] != words or value.numel() != num_tokens * words:
        raise ArgumentError(
            f"mask must have {num_tokens} rows of {words} words of {checks.short(value.dtype)} "
            f"(32 * ceil(q_len_per_req / 32) bits), got {checks.describe(value)}"
        )
    return value.reshape(num_tokens, words).contiguous()


def _sinks(value: Any, num_qo_heads: int, device: torch.device) -> torch.Tensor | None:
    if value is None:
        return None
    value = checks.tensor("sinks", value)
    if value.numel() != num_qo_heads or not value.dtype.is_floating_point:
        raise ArgumentError(
            f"sinks must be a floating-point tensor of num_qo_heads = {num_qo_heads} elements, "
            f"got {checks.describe(value)}"
        )
    checks.device("sinks", value, device)
    return value.reshape(num_qo_heads).to(torch.float32).contiguous()


# --- outputs ----------------------------------------------------------------------------------------------------------


def _outputs(call: Call, features: XqaFeatures, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out as `[num_tokens, num_qo_heads, head_dim]`, and lse if it is wanted."""
    checks.boolean("return_lse", call.return_lse)
    shape = num_tokens, features.num_qo_heads, features.head_dim
    lse = call.lse
    if lse is not None:
        checks.tensor("lse", lse)
        checks.dtype("lse", lse.dtype, (torch.float32,))
        checks.shape("lse", lse, shape[:2], "[num_tokens, num_qo_heads]")
        checks.device("lse", lse, features.device)
        if not lse.is_contiguous():
            raise ArgumentError(f"lse must be contiguous, got strides {lse.stride()}")
    elif call.return_lse:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=features.device)
    if call.out is None:
        return torch.empty(shape, dtype=features.o_dtype, device=features.device), lse
    return _given_output(call, features, shape), lse


def _given_output(call: Call, features: XqaFeatures, shape: tuple[int, int, int]) -> torch.Tensor:
    out = checks.tensor("out", call.out)
    checks.device("out", out, features.device)
    checks.dense("out", out)
    per_request = (shape[0] // features.q_len, features.q_len, *shape[1:])
    if out.shape == per_request and call.q_cu_seq_lens is None:
        try:
            out = out.view(shape)
        except RuntimeError as error:
            raise ArgumentError(
                f"out must have tokens at equal distances, got strides {out.stride()} for {tuple(out.shape)}"
            ) from error
    checks.shape("out", out, shape, "[num_tokens, num_qo_heads, head_dim]")
    single_request.check_alignment("out", out)
    if call.lse is not None:
        checks.apart("out", checks.extent(out), "lse", checks.extent(call.lse))
    written = checks.extent(out)
    for name, tensor in (("query", call.query), ("k of kv_cache", call.k), ("v of kv_cache", call.v)):
        checks.apart("out", written, name, checks.extent(tensor))
    return out


def factor(name: str, value: Any) -> float | torch.Tensor:
    """A number, or a tensor that `single_request.scale` looks at."""
    return value if isinstance(value, torch.Tensor) else checks.real(name, value)


def number(name: str, value: Any) -> float:
    """A number > 0; None is 1."""
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a number, got {checks.describe(value)}")
    return checks.positive(name, value)
