"""Check the arguments of a decode call without a plan and make a `DecodeProblem` of them.

Lengths and page tables stay on the device: only their dtypes, shapes and strides are checked here, their values in
`decode_values.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import DecodeProblem, Features, Scratch, Settings, draft_mask_bytes
from cute_attn.request import checks, operands
from cute_attn.request.caches import cache_views, is_large
from cute_attn.request.operands import ALIGNMENT, BLOCK_SCALES, Placement, Scales, split_scale
from cute_attn.request.settings import HALF, MAX_INDEX, MAX_KV_LEN, NOT_OPTIONS, Call, Structure, call_settings

COUNTER_BYTES = 8 << 20  # of the workspace: zero before its first use, and left zero
INDEX_DTYPES = (torch.int32, torch.uint32)
MASK_DTYPES = (torch.uint16, torch.int16, torch.uint32, torch.int32)
FP8_OUT = torch.float8_e4m3fn
OUT_DTYPES = (*HALF, FP8_OUT)
NAMES = ("query", "k of kv_cache", "v of kv_cache")
SCALES = ("bmm1_scale", "", "bmm2_scale")


class DecodeTensors(NamedTuple):
    """The tensors of a call as the user gave them, except k, v and block_scales, which `cache_pair` and
    `block_scale_pair` return.
    """

    query: Any
    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, width]
    v: torch.Tensor
    block_scales: tuple[torch.Tensor, torch.Tensor] | None
    block_tables: Any
    seq_lens: Any
    q_cu_seq_lens: Any
    mask: Any
    sinks: Any
    out: Any
    lse: Any

    def read(self) -> tuple[checks.Named, ...]:
        """Return what a call reads, by name."""
        names = *NAMES, *BLOCK_SCALES, "block_tables", "seq_lens", "q_cu_seq_lens", "mask", "sinks"
        scales = self.block_scales or (None, None)
        return tuple(zip(names, (self.query, self.k, self.v, *scales, *self[4:9]), strict=True))


class DecodeScales(NamedTuple):
    """The scales of a call."""

    bmm1_scale: Any
    bmm2_scale: Any
    o_scale: float
    bmm1_factor: float = 1.0  # of bmm1_scale: ln(2) where the caller gave the base-2 form


class DecodeOptions(NamedTuple):
    """The other options of a call as the user gave them."""

    window_left: Any
    q_len_per_req: Any
    enable_pdl: Any
    return_lse: Any
    out_dtype: torch.dtype | None = None  # of a new out; default query's


def decode_problem(
    tensors: DecodeTensors, scales: DecodeScales, options: DecodeOptions, scratch: Scratch
) -> DecodeProblem:
    """Check every argument and allocate the outputs that the caller did not pass."""
    try:
        return _problem(tensors, scales, options, scratch)
    except ArgumentError:
        raise
    except (RuntimeError, NotImplementedError):
        _refuse_without_memory(tensors)  # the usual reason why torch gives no address or strides
        raise


def _refuse_without_memory(tensors: DecodeTensors) -> None:
    for name, value in zip(DecodeTensors._fields, tensors, strict=True):
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, torch.Tensor):
                checks.stored(name, x)


def _problem(tensors: DecodeTensors, scales: DecodeScales, options: DecodeOptions, scratch: Scratch) -> DecodeProblem:
    query, k, v = checks.tensor("query", tensors.query), tensors.k, tensors.v
    if query.dim() != 3:
        raise ArgumentError(f"query must have shape [num_tokens, num_qo_heads, head_dim], got {checks.describe(query)}")
    device, qo_len = query.device, _qo_len(options.q_len_per_req)
    num_tokens = query.shape[0]
    block_tables, seq_lens, qo_indptr = _lengths(tensors, qo_len, num_tokens, device)
    _check_operands(query, k, v)
    placed = operands.placement(query, k, v)
    found = operands.split_scales(device, scales.bmm1_scale, None, scales.bmm2_scale, SCALES)
    settings = _settings(tensors, scales, options, placed, found)
    query = operands.readable(query, k, v, placed, NAMES, ALIGNMENT)
    checks.device("workspace_buffer", scratch.partial_buffer, device)
    checks.device("semaphores", scratch.counter_buffer, device)
    out, lse = _outputs(tensors, options.return_lse, settings.features, qo_len)
    return DecodeProblem(
        settings,
        qo_len,
        query,
        k,
        v,
        out,
        lse,
        block_tables,
        seq_lens,
        min(block_tables.shape[1] * settings.page_size, MAX_KV_LEN),
        scratch,
        qo_indptr,
        None if tensors.mask is None else _draft_mask(tensors.mask, num_tokens, qo_len, device),
        found.of_scores,
        found.of_v,
        None if tensors.sinks is None else _sinks(tensors.sinks, settings.features),
        tensors.block_scales,
        tensors.read(),
    )


# ---- query and cache


def _check_operands(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check what `call_settings` leaves: it checks other dtypes and head counts."""
    checks.dtype("query", query.dtype, HALF)
    for name, x in zip(NAMES[1:], (k, v), strict=True):
        checks.device(name, x, query.device)
    if k.shape[3] != v.shape[3]:
        raise ArgumentError(
            f"k and v of kv_cache must have the same last axis, got {checks.describe(k)} and {checks.describe(v)}"
        )


def cache_pair(kv_cache: Any, kv_layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as `[num_pages, page_size, num_kv_heads, width]` views.

    In one tensor with 1 on axis 1, keys and values are the same.
    """
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        kv_cache = (kv_cache[:, 0], kv_cache[:, 0])
    return cache_views("kv_cache", kv_cache, kv_layout)


def block_scale_pair(
    kv_cache_sf: Any, kv_layout: Any, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the block scales of an NVFP4 cache, a tensor or a pair like the cache, and return them in k's layout."""
    if isinstance(kv_cache_sf, torch.Tensor):
        if kv_cache_sf.dim() != 5 or kv_cache_sf.shape[1] != 2:
            raise ArgumentError(
                f"kv_cache_sf as one tensor must have shape [num_pages, 2, ...], got {checks.describe(kv_cache_sf)}"
            )
        kv_cache_sf = kv_cache_sf.unbind(1)
    if isinstance(kv_cache_sf, tuple | list) and kv_layout == "HND":
        for x in kv_cache_sf:
            if checks.tensor("kv_cache_sf", x).dim() != 4:
                raise ArgumentError(f"kv_cache_sf must be a pair of 4-D tensors, got {checks.describe(x)}")
        kv_cache_sf = tuple(x.transpose(1, 2) for x in kv_cache_sf)
    return operands.check_block_scales(kv_cache_sf, k, v)


# ---- settings


def _settings(
    tensors: DecodeTensors, scales: DecodeScales, options: DecodeOptions, placed: Placement, found: Scales
) -> Settings:
    """Return the settings. `found`: the numbers among the scales."""
    query, k, v, block_scales = tensors[:4]
    sm_scale = checks.real_or("bmm1_scale", found.q, 1.0) * scales.bmm1_factor
    v_scale = checks.real_or("bmm2_scale", found.v, 1.0)
    o_dtype = (options.out_dtype or query.dtype) if tensors.out is None else checks.tensor("out", tensors.out).dtype
    if o_dtype != FP8_OUT:
        v_scale = checks.real("bmm2_scale * o_scale", v_scale * scales.o_scale)
    if options.enable_pdl is not None:
        checks.boolean("enable_pdl", options.enable_pdl)
    window_left = checks.whole("window_left", options.window_left)
    checks.dtype("out", o_dtype, OUT_DTYPES)
    structure = Structure(
        query.device,
        query.dtype,
        k.dtype,
        v.dtype,
        query.shape[1],
        k.shape[2],
        query.shape[2],
        k.shape[3],
        v.shape[3],
        custom_mask=False,
        head_scales=False,
        kv_block_scales=block_scales is not None,
        sinks=tensors.sinks is not None,
        device_scale=bool(found.of_scores),
        expanded=placed.expanded,
        decode=True,
        kv_source="paged",
        page_size=k.shape[1],
        large_cache=is_large(k) or is_large(v),
        loose_scales=block_scales is not None and operands.has_loose_scales(*block_scales),
        device_lengths=True,
        draft_mask=tensors.mask is not None,
    )
    call = Call(
        *(None, None, None),
        causal=True,
        window_left=window_left,
        sm_scale=sm_scale,
        v_scale=v_scale,
        o_dtype=o_dtype,
        enable_pdl=options.enable_pdl,
    )
    return call_settings(structure, *call[len(NOT_OPTIONS) :])


def number_or_tensor(name: str, value: Any, device: torch.device) -> float | torch.Tensor:
    """Check a scale that is multiplied by others, and return a number or an fp32 tensor on the device: the product of
    narrower ones would be rounded, and might overflow.
    """
    number, tensors = split_scale(name, value, device)
    return tensors[0] if tensors else checks.real(name, number)


def positive_or_one(name: str, value: Any) -> float:
    """Check for a number > 0; None stands for 1."""
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a number, got {checks.describe(value)}")
    return checks.positive(name, value)


def _sinks(value: Any, features: Features) -> torch.Tensor:
    """Return one number per query head, given in any shape."""
    value = checks.tensor("sinks", value)
    if value.dim() != 1 and value.numel() == features.num_qo_heads:
        value = value.reshape(-1)
    return operands.check_per_head("sinks", value, features)


# ---- lengths, tables, masks


def _qo_len(value: Any) -> int:
    """Check the number of query tokens of a request. None stands for 1: FlashInfer annotates it as optional."""
    qo_len = 1 if value is None else checks.integer("q_len_per_req", value)
    if qo_len < 1:
        raise ArgumentError(f"q_len_per_req must be >= 1, got {qo_len}")
    return qo_len


def _lengths(
    tensors: DecodeTensors, qo_len: int, num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Check that block_tables, seq_lens and q_cu_seq_lens have one batch size, and return them."""
    block_tables, seq_lens = _block_tables(tensors.block_tables, device), _seq_lens(tensors.seq_lens, device)
    batch_size = block_tables.shape[0]
    if seq_lens.shape[0] != batch_size:
        raise ArgumentError(
            f"seq_lens must have one length for each of the {batch_size} rows of block_tables, got {seq_lens.shape[0]}"
        )
    if tensors.q_cu_seq_lens is None:
        if num_tokens != batch_size * qo_len:
            raise ArgumentError(
                f"query must have batch_size * q_len_per_req = {batch_size} * {qo_len} rows, "
                f"got {checks.describe(tensors.query)}"
            )
        return block_tables, seq_lens, None
    qo_indptr = checks.tensor("q_cu_seq_lens", tensors.q_cu_seq_lens)
    checks.dtype("q_cu_seq_lens", qo_indptr.dtype, INDEX_DTYPES)
    checks.shape("q_cu_seq_lens", qo_indptr, (batch_size + 1,), "[batch_size + 1]")
    checks.device("q_cu_seq_lens", qo_indptr, device)
    return block_tables, seq_lens, qo_indptr.contiguous()


def _block_tables(value: Any, device: torch.device) -> torch.Tensor:
    value = checks.tensor("block_tables", value)
    if value.dim() != 2:
        raise ArgumentError(f"block_tables must have shape [batch_size, max_pages], got {checks.describe(value)}")
    checks.dtype("block_tables", value.dtype, (torch.int32,))
    checks.device("block_tables", value, device)
    value = value if value.shape[1] < 2 or value.stride(1) == 1 else value.contiguous()
    if value.shape[0] * value.stride(0) > MAX_INDEX:
        raise ArgumentError(
            f"block_tables must span at most {MAX_INDEX} elements, "
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
    """Return rows of mask bits, one per query token, in whole 32-bit words."""
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


# ---- workspaces and outputs


def shared_scratch(workspace_buffer: Any) -> Scratch:
    """Return a workspace with counters in the first 8 MiB, where FlashInfer has its semaphores, and partial results
    after them.
    """
    buffer, size = _memory("workspace_buffer", workspace_buffer)
    start = buffer.data_ptr()
    return Scratch(buffer, buffer, start, start + COUNTER_BYTES, min(size, COUNTER_BYTES), max(0, size - COUNTER_BYTES))


def partials_scratch(workspace_buffer: Any) -> Scratch:
    """Return a workspace for partial results alone, which need not be zero: counters are the launch's own."""
    buffer, size = _memory("workspace_buffer", workspace_buffer)
    start = buffer.data_ptr()
    return Scratch(buffer, buffer, start, start, 0, size)


def separate_scratch(semaphores: Any, workspace_buffer: Any) -> Scratch:
    """Return a workspace with counters in `semaphores` and partial results in `workspace_buffer`."""
    counters, counter_bytes = _memory("semaphores", semaphores)
    partials, partial_bytes = _memory("workspace_buffer", workspace_buffer)
    return Scratch(counters, partials, counters.data_ptr(), partials.data_ptr(), counter_bytes, partial_bytes)


def _memory(name: str, value: Any) -> tuple[torch.Tensor, int]:
    """Return a buffer and the bytes of it that a launch may use: none if they are not aligned."""
    buffer = checks.tensor(name, value)
    checks.stored(name, buffer)
    if not buffer.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, got strides {buffer.stride()} for shape {tuple(buffer.shape)}")
    return buffer, 0 if buffer.data_ptr() % ALIGNMENT else buffer.nbytes


def _outputs(
    tensors: DecodeTensors, return_lse: Any, features: Features, qo_len: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out as `[num_tokens, num_qo_heads, head_dim]`, and lse if it is wanted."""
    if return_lse is not False:
        checks.boolean("return_lse", return_lse)
    query, out = tensors.query, tensors.out
    rows = (query.shape[0], features.num_qo_heads)
    if out is not None and out.dim() == 4 and tensors.q_cu_seq_lens is None:
        out = _flatten_requests(out, (*rows, features.head_dim_vo), qo_len)
    # `decode_values` compares them with all that the call reads.
    return operands.outputs(query, (out, tensors.lse, return_lse), features, rows, "num_tokens")


def _flatten_requests(out: torch.Tensor, shape: tuple[int, int, int], qo_len: int) -> torch.Tensor:
    """Return a view of `[batch_size, q_len_per_req, ...]` with the first two axes in one."""
    checks.shape(
        "out", out, (shape[0] // qo_len, qo_len, *shape[1:]), "[batch_size, q_len_per_req, num_qo_heads, head_dim]"
    )
    try:
        return out.view(shape)
    except RuntimeError as error:
        raise ArgumentError(
            f"out must have tokens at equal distances, got strides {out.stride()} for {tuple(out.shape)}"
        ) from error
