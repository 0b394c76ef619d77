"""Arguments of a decode call without a plan to a `DecodeProblem`.

Lengths and page tables stay on the device: only their dtypes, shapes and strides are checked here. What dtypes, shapes,
strides and options decide is checked once and remembered, as for single requests and batches.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import DecodeProblem, Features, Scratch, Settings, draft_mask_bytes
from cute_attn.request import checks
from cute_attn.request import settings as request_settings
from cute_attn.request import single as single_request
from cute_attn.request.caches import cache_views, is_large
from cute_attn.request.settings import HALF, MAX_KV_LEN

COUNTER_BYTES = 8 << 20  # of the workspace: zero before its first use, and left zero
MAX_PLACES = (1 << 31) - 1  # kernels count elements of the page table in 32 bits
INDEX_DTYPES = (torch.int32, torch.uint32)
MASK_DTYPES = (torch.uint16, torch.int16, torch.uint32, torch.int32)
FP8_OUT = torch.float8_e4m3fn
OUT_DTYPES = (*HALF, FP8_OUT)
CACHE_SIZE = 256  # layers of a model differ in scales, batches in shapes


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
    o_scale: float
    window_left: Any
    out: Any
    sinks: Any
    enable_pdl: Any
    q_len_per_req: Any
    mask: Any
    q_cu_seq_lens: Any
    lse: Any
    return_lse: Any


def problem(call: Call) -> DecodeProblem:
    """Check every argument and allocate the outputs that the caller did not bring."""
    query, k, v = checks.tensor("query", call.query), call.k, call.v
    if query.dim() != 3:
        raise ArgumentError(f"query must have shape [num_tokens, num_qo_heads, head_dim], got {checks.describe(query)}")
    device, qo_len = query.device, _qo_len(call.q_len_per_req)
    num_tokens = query.shape[0]
    tables, seq_lens, qo_indptr = _lengths(call, qo_len, num_tokens, device)
    form = _form(query, k, v, call.block_scales)
    settings, scale_tensors, v_scale_tensors = _settings_of(call, form)
    if not form.aligned or (query.data_ptr() | k.data_ptr() | v.data_ptr()) % single_request.ALIGNMENT:
        query = _readable(query, k, v)
    if torch.is_grad_enabled() and (query.requires_grad or k.requires_grad or v.requires_grad):
        single_request.refuse_grad(query=query, k=k, v=v)
    checks.device("workspace_buffer", call.scratch.partial_buffer, device)
    checks.device("semaphores", call.scratch.counter_buffer, device)
    out, lse = _outputs(call, settings.features, form, num_tokens, qo_len)
    return DecodeProblem(
        settings,
        qo_len,
        query,
        k,
        v,
        out,
        lse,
        tables,
        seq_lens,
        min(tables.shape[1] * settings.page_size, MAX_KV_LEN),
        call.scratch,
        qo_indptr,
        None if call.mask is None else _draft_mask(call.mask, num_tokens, qo_len, device),
        scale_tensors,
        v_scale_tensors[0] if v_scale_tensors else None,
        None if call.sinks is None else _sinks(call.sinks, settings.features),
        call.block_scales,
    )


# ---- query and cache


class Form(NamedTuple):
    """What dtypes, shapes and strides of query, k and v decide."""

    structure: tuple[Any, ...]  # the first fields of a `request.settings.Structure`, up to the head dimensions
    page_size: int
    aligned: bool  # rows are 16-byte aligned where query, k and v start so
    expanded: bool
    large_cache: bool
    loose_scales: bool
    spans: tuple[int, int, int]  # bytes from the first element to past the last


_forms: dict[Any, Form] = {}


def _form(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_scales: tuple[torch.Tensor, torch.Tensor] | None
) -> Form:
    key = (
        *(query.shape, query.stride(), query.dtype, query.device),
        *(k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device),
        block_scales and tuple((x.stride(), x.data_ptr() % single_request.ALIGNMENT) for x in block_scales),
    )
    found = _forms.get(key)
    if found is None:
        if len(_forms) >= CACHE_SIZE:
            _forms.clear()
        found = _forms[key] = _checked_form(query, k, v, block_scales)
    return found


def _checked_form(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_scales: tuple[torch.Tensor, torch.Tensor] | None
) -> Form:
    """Everything about query, k and v but their addresses. Other checks of dtypes and head counts: `settings`."""
    checks.dtype("query", query.dtype, HALF)
    for name, x in (("k of kv_cache", k), ("v of kv_cache", v)):
        checks.device(name, x, query.device)
    if k.shape[3] != v.shape[3]:
        raise ArgumentError(
            f"k and v of kv_cache must have the same last axis, got {checks.describe(k)} and {checks.describe(v)}"
        )
    steps = (stride * x.element_size() for x in (query, k, v) for stride in single_request.outer_strides(x))
    aligned = not any(step % single_request.ALIGNMENT for step in steps)
    of_q, of_k, of_v = (stop - start for start, stop in map(checks.extent, (query, k, v)))
    num_qo_heads, head_dim = query.shape[1:]
    return Form(
        (query.device, query.dtype, k.dtype, v.dtype, num_qo_heads, k.shape[2], head_dim, k.shape[3], v.shape[3]),
        k.shape[1],
        aligned and (query.stride(-1) == 1 or head_dim == 1),
        single_request.expanded(query, k, v),
        is_large(k) or is_large(v),
        any(_is_loose(x) for x in block_scales or ()),
        (of_q, of_k, of_v),
    )


def _is_loose(scales: torch.Tensor) -> bool:
    """Do the block scales of some token not start at a multiple of their size?"""
    size = max(1, scales.shape[-1])
    return any(number % size for number in (scales.data_ptr(), *single_request.outer_strides(scales)))


def _readable(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """query as kernels can read it, copied if need be; a cache is refused: it is not copied silently."""
    for name, x in (("k of kv_cache", k), ("v of kv_cache", v)):
        single_request.check_alignment(name, x)
    return single_request.readable(query)


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


# ---- settings


def _settings_of(call: Call, form: Form) -> tuple[Settings, single_request.Scales, single_request.Scales]:
    """Settings, and the factors of the scores and of v that only the device knows."""
    device = form.structure[0]
    scale, scale_tensors = single_request.scale("bmm1_scale", call.bmm1_scale, device)
    v_scale, v_scale_tensors = single_request.scale("bmm2_scale", call.bmm2_scale, device)
    scale = 1.0 if scale is None else checks.real("bmm1_scale", scale)
    v_scale = 1.0 if v_scale is None else checks.real("bmm2_scale", v_scale)
    o_dtype = form.structure[1] if call.out is None else checks.tensor("out", call.out).dtype
    if o_dtype != FP8_OUT:
        v_scale = checks.real("bmm2_scale * o_scale", v_scale * call.o_scale)
    if call.enable_pdl is not None:
        checks.boolean("enable_pdl", call.enable_pdl)
    settings = _settings(
        *(form.structure, form.page_size, form.expanded, form.large_cache, form.loose_scales, o_dtype),
        *(checks.integer("window_left", call.window_left), call.enable_pdl, scale, v_scale, bool(scale_tensors)),
        *(call.block_scales is not None, call.sinks is not None, call.mask is not None),
    )
    return settings, scale_tensors, v_scale_tensors


@functools.lru_cache(CACHE_SIZE)
def _settings(
    structure: tuple[Any, ...],
    page_size: int,
    expanded: bool,
    large_cache: bool,
    loose_scales: bool,
    o_dtype: torch.dtype,
    *options: Any,
) -> Settings:
    """The settings of calls whose options have been checked."""
    window_left, enable_pdl, scale, v_scale, device_scale, has_block_scales, has_sinks, has_mask = options
    checks.dtype("out", o_dtype, OUT_DTYPES)
    custom_mask, head_scales, decode = False, False, True
    made = request_settings.call_settings(
        (*structure, custom_mask, head_scales, has_block_scales, has_sinks, device_scale, expanded, decode),
        request_settings.Call(
            *(None, None, None),
            causal=True,
            window_left=window_left,
            sm_scale=scale,
            v_scale=v_scale,
            o_dtype=o_dtype,
            enable_pdl=enable_pdl,
        )[len(request_settings.NOT_OPTIONS) :],
    )
    features = made.features._replace(
        kv_source="paged",
        large_cache=large_cache,
        loose_scales=loose_scales,
        device_lengths=True,
        draft_mask=has_mask,
    )
    return made._replace(features=features, page_size=page_size)


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


def _sinks(value: Any, features: Features) -> torch.Tensor:
    """One number per query head, in any shape."""
    value = checks.tensor("sinks", value)
    if value.dim() != 1 and value.numel() == features.num_qo_heads:
        value = value.reshape(-1)
    return single_request.per_head("sinks", value, features)


# ---- lengths, tables, masks


def _qo_len(value: Any) -> int:
    """None is 1, as FlashInfer's annotation has it."""
    qo_len = 1 if value is None else checks.integer("q_len_per_req", value)
    if qo_len < 1:
        raise ArgumentError(f"q_len_per_req must be >= 1, got {qo_len}")
    return qo_len


def _lengths(
    call: Call, qo_len: int, num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """block_tables, seq_lens and q_cu_seq_lens, of one batch size."""
    tables, seq_lens = _tables(call.block_tables, device), _seq_lens(call.seq_lens, device)
    batch = tables.shape[0]
    if seq_lens.shape[0] != batch:
        raise ArgumentError(
            f"seq_lens must have one length for each of the {batch} rows of block_tables, got {seq_lens.shape[0]}"
        )
    if call.q_cu_seq_lens is None:
        if num_tokens != batch * qo_len:
            raise ArgumentError(
                f"query must have batch_size * q_len_per_req = {batch} * {qo_len} rows, "
                f"got {checks.describe(call.query)}"
            )
        return tables, seq_lens, None
    bounds = checks.tensor("q_cu_seq_lens", call.q_cu_seq_lens)
    checks.dtype("q_cu_seq_lens", bounds.dtype, INDEX_DTYPES)
    checks.shape("q_cu_seq_lens", bounds, (batch + 1,), "[batch_size + 1]")
    checks.device("q_cu_seq_lens", bounds, device)
    return tables, seq_lens, bounds.contiguous()


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


def _seq_lens(value: Any, device: torch.device) -> torch.Tensor:
    value = checks.tensor("seq_lens", value)
    if value.dim() == 2 and value.shape[1] == 1:
        value = value[:, 0]
    if value.dim() != 1:
        raise ArgumentError(f"seq_lens must have shape [batch_size], got {checks.describe(value)}")
    checks.dtype("seq_lens", value.dtype, INDEX_DTYPES)
    checks.device("seq_lens", value, device)
    return value.contiguous()


def _draft_mask(value: Any, num_tokens: int, qo_len: int, device: torch.device) -> torch.Tensor:
    """Rows of mask bits, one per query token, in whole 32-bit words."""
    value = checks.tensor("mask", value)
    checks.dtype("mask", value.dtype, MASK_DTYPES)
    checks.device("mask", value, device)
    words = draft_mask_bytes(qo_len) // value.element_size()
    if value.dim() < 2 or value.shape[-1] != words or value.numel() != num_tokens * words:
        raise ArgumentError(
            f"mask must have {num_tokens} rows of {words} words of {checks.short(value.dtype)} "
            f"(32 * ceil(q_len_per_req / 32) bits), got {checks.describe(value)}"
        )
    return value.reshape(num_tokens, words).contiguous()


# ---- workspace and outputs


def workspace(value: Any) -> Scratch:
    """Counters in the first 8 MiB, where FlashInfer has its semaphores; partial results after them."""
    value = checks.tensor("workspace_buffer", value)
    _check_buffer("workspace_buffer", value)
    base, size = value.data_ptr(), value.nbytes
    return Scratch(value, value, base, base + COUNTER_BYTES, min(size, COUNTER_BYTES), max(0, size - COUNTER_BYTES))


def two_buffers(semaphores: Any, scratch: Any) -> Scratch:
    """Counters and partial results in a buffer each."""
    semaphores, scratch = checks.tensor("semaphores", semaphores), checks.tensor("workspace_buffer", scratch)
    _check_buffer("semaphores", semaphores)
    _check_buffer("workspace_buffer", scratch)
    return Scratch(semaphores, scratch, semaphores.data_ptr(), scratch.data_ptr(), semaphores.nbytes, scratch.nbytes)


def _check_buffer(name: str, value: torch.Tensor) -> None:
    if not value.is_contiguous() or value.data_ptr() % single_request.ALIGNMENT:
        raise ArgumentError(
            f"{name} must be contiguous and start at a multiple of {single_request.ALIGNMENT} bytes, "
            f"got {checks.describe(value)}"
        )


def _outputs(
    call: Call, features: Features, form: Form, num_tokens: int, qo_len: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out as `[num_tokens, num_qo_heads, head_dim]`, and lse if it is wanted."""
    if call.return_lse is not False:
        checks.boolean("return_lse", call.return_lse)
    out, lse, rows = call.out, call.lse, (num_tokens, features.num_qo_heads)
    if out is not None or lse is not None:
        if out is not None and out.dim() == 4 and call.q_cu_seq_lens is None:
            out = _rows_of_requests(out, (*rows, features.head_dim_vo), qo_len)
        starts = call.query.data_ptr(), call.k.data_ptr(), call.v.data_ptr()
        inputs = zip(("query", "k of kv_cache", "v of kv_cache"), starts, form.spans, strict=True)
        taken = [(name, (start, start + span)) for name, start, span in inputs]
        single_request.check_outputs(out, lse, features, rows, "num_tokens", taken)
    if out is None:
        out = call.query.new_empty(*rows, features.head_dim_vo, dtype=features.o_dtype)
    if lse is None and call.return_lse:
        lse = call.query.new_empty(*rows, dtype=torch.float32)
    return out, lse


def _rows_of_requests(out: torch.Tensor, shape: tuple[int, int, int], qo_len: int) -> torch.Tensor:
    """A view of out with an axis for the tokens of a request, without that axis."""
    checks.shape(
        "out", out, (shape[0] // qo_len, qo_len, *shape[1:]), "[batch_size, q_len_per_req, num_qo_heads, head_dim]"
    )
    try:
        return out.view(shape)
    except RuntimeError as error:
        raise ArgumentError(
            f"out must have tokens at equal distances, got strides {out.stride()} for {tuple(out.shape)}"
        ) from error
