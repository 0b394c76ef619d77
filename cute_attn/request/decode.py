"""Check the arguments of a decode call without a plan and make a `DecodeProblem` of them.

Lengths and page tables stay on the device: `decode_problem` checks their dtypes, shapes and strides. `before_launch`
compares memory in every call. It looks at lengths and page numbers on the CPU, and on a GPU, where that costs
synchronisations, with `CUTE_ATTN_VALIDATE=1`: kernels trust them, and a wrong one is an illegal access.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import DecodeProblem, Features, Scratch, Settings, draft_mask_bytes
from cute_attn.request import caches, checks, operands
from cute_attn.request.caches import cache_views, is_large
from cute_attn.request.operands import ALIGNMENT, BLOCK_SCALES, Placement, Scales
from cute_attn.request.settings import HALF, MAX_INDEX, MAX_KV_LEN, NOT_OPTIONS, Call, call_settings

COUNTER_BYTES = 8 << 20  # of the workspace: zero before its first use, and left zero
INDEX_DTYPES = (torch.int32, torch.uint32)
MASK_DTYPES = (torch.uint16, torch.int16, torch.uint32, torch.int32)
FP8_OUT = torch.float8_e4m3fn
OUT_DTYPES = (*HALF, FP8_OUT)
NAMES = ("query", "k of kv_cache", "v of kv_cache")
SCALES = ("bmm1_scale", "", "bmm2_scale")
IN_WORKSPACE = "in workspace_buffer"


class Form(NamedTuple):
    """What public functions differ in besides the names of their arguments."""

    semaphores: Any = IN_WORKSPACE  # that, None for the launch's own, or a tensor
    out_by_request: bool = False  # a new out has an axis of query tokens where all requests have several
    out_dtype: torch.dtype | None = None  # of a new out; default query's
    lse_layout: str = "NH"  # "HN": lse is `[num_qo_heads, num_tokens]`, a copy
    bmm1_factor: float = 1.0  # of bmm1_scale: ln(2) where the caller gave the base-2 form
    factors: tuple[checks.Named, ...] = ()  # of the scales, where these are products
    same_backends: tuple[str, ...] = ()  # FlashInfer's names of what is one implementation here


class DecodeCall(NamedTuple):
    """The arguments of a decode call under the names of `xqa_batch_decode_with_kv_cache`, not checked yet."""

    query: Any
    kv_cache: Any
    workspace_buffer: Any
    block_tables: Any  # from here on what a launch reads
    seq_lens: Any
    q_cu_seq_lens: Any
    mask: Any
    sinks: Any
    bmm1_scale: Any
    bmm2_scale: Any
    kv_cache_sf: Any
    out: Any
    lse: Any
    max_seq_len: Any  # None: no bound
    window_left: Any
    enable_pdl: Any
    q_len_per_req: Any
    o_scale: Any
    return_lse: Any
    kv_layout: Any
    backend: Any
    form: Form

    @property
    def lse_copy(self) -> Any:
        """Return the caller's memory for an lse by heads, which is written after the launch."""
        return self.lse if self.form.lse_layout == "HN" else None


OF_LAUNCH = slice(DecodeCall._fields.index("block_tables"), DecodeCall._fields.index("kv_cache_sf"))
READ = (*NAMES, *BLOCK_SCALES, *DecodeCall._fields[OF_LAUNCH])


def decode_problem(call: DecodeCall) -> DecodeProblem:
    """Check every argument and allocate the outputs that the caller did not pass."""
    k, v = cache_views("kv_cache", call.kv_cache, call.kv_layout, may_be_one=True)
    block_scales = None
    if call.kv_cache_sf is not None:
        block_scales = operands.check_block_scales(cache_views("kv_cache_sf", call.kv_cache_sf, call.kv_layout), k, v)
    scratch, query = _scratch(call.form.semaphores, call.workspace_buffer), checks.tensor("query", call.query)
    if query.dim() != 3:
        raise checks.wrong("query must have shape [num_tokens, num_qo_heads, head_dim]", query)
    device, num_tokens = query.device, query.shape[0]
    qo_len = 1 if call.q_len_per_req is None else checks.at_least("q_len_per_req", call.q_len_per_req, 1)
    block_tables, seq_lens, qo_indptr = _lengths(call, qo_len, num_tokens, device)
    checks.dtype("query", query.dtype, HALF)
    for name, x in zip(NAMES[1:], (k, v), strict=True):
        checks.device(name, x, device)
    if k.shape[3] != v.shape[3]:
        raise ArgumentError(
            f"k and v of kv_cache must have the same last axis, got {checks.describe(k)} and {checks.describe(v)}"
        )
    placed = operands.placement(query, k, v)
    found = operands.split_scales(device, call.bmm1_scale, None, call.bmm2_scale, SCALES)
    settings = _settings(call, (query, k, v), block_scales, placed, found)
    query = operands.readable(query, k, v, placed, NAMES, ALIGNMENT)
    checks.device("workspace_buffer", scratch.partial_buffer, device)
    checks.device("semaphores", scratch.counter_buffer, device)
    out, lse = _outputs(call, settings.features, qo_len)
    sinks = call.sinks
    if sinks is not None:
        if checks.tensor("sinks", sinks).dim() != 1 and sinks.numel() == settings.features.num_qo_heads:
            sinks = sinks.reshape(-1)  # given in any shape
        sinks = operands.per_head("sinks", sinks, settings.features.num_qo_heads, device)
    draft_mask = None if call.mask is None else _draft_mask(call.mask, num_tokens, qo_len, device)
    extras = operands.extras(found, None, sinks, None, block_scales)
    lengths = block_tables, seq_lens, min(block_tables.shape[1] * settings.page_size, MAX_KV_LEN)
    return DecodeProblem(settings, qo_len, query, k, v, out, lse, *lengths, scratch, qo_indptr, draft_mask, extras)


# ---- settings


def _settings(
    call: DecodeCall,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block_scales: tuple[torch.Tensor, torch.Tensor] | None,
    placed: Placement,
    found: Scales,
) -> Settings:
    """Return the settings. `found`: the numbers among the scales."""
    query, k, v = qkv
    sm_scale = checks.real("bmm1_scale", found.q, 1.0) * call.form.bmm1_factor
    v_scale, o_scale = checks.real("bmm2_scale", found.v, 1.0), checks.positive("o_scale", call.o_scale, 1.0)
    o_dtype = (call.form.out_dtype or query.dtype) if call.out is None else checks.tensor("out", call.out).dtype
    if o_dtype != FP8_OUT:
        v_scale = checks.real("bmm2_scale * o_scale", v_scale * o_scale)
    checks.dtype("out", o_dtype, OUT_DTYPES)
    given = Features(
        *(query.device, query.dtype, k.dtype, query.dtype),
        *(query.shape[1], k.shape[2], query.shape[2], v.shape[3]),
        positive_scale=not found.of_scores,
        kv_block_scales=block_scales is not None,
        sinks=call.sinks is not None,
        expanded=placed.expanded,
        decode=True,
        kv_source="paged",
        large_cache=is_large(k) or is_large(v),
        loose_scales=block_scales is not None and operands.has_loose_scales(*block_scales),
        device_lengths=True,
        draft_mask=call.mask is not None,
    )
    options = Call(
        *(None, None, None),
        causal=True,
        window_left=call.window_left,
        sm_scale=sm_scale,
        v_scale=v_scale,
        o_dtype=o_dtype,
        enable_pdl=call.enable_pdl,
    )
    return call_settings(given, v.dtype, k.shape[3], k.shape[1], *options[len(NOT_OPTIONS) :])


# ---- lengths, tables, masks


def _lengths(
    call: DecodeCall, qo_len: int, num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Check that block_tables, seq_lens and q_cu_seq_lens have one batch size, and return them."""
    seq_lens = checks.tensor("seq_lens", call.seq_lens)
    if seq_lens.dim() == 2 and seq_lens.shape[1] == 1:
        seq_lens = seq_lens[:, 0]
    tables = "block_tables", call.block_tables
    block_tables, seq_lens = caches.tables_with_lengths(tables, ("seq_lens", seq_lens), device, INDEX_DTYPES)
    if block_tables.shape[1] > 1 and block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    if block_tables.shape[0] * block_tables.stride(0) > MAX_INDEX:
        raise ArgumentError(
            f"block_tables must span at most {MAX_INDEX} elements, "
            f"got {block_tables.shape[0]} rows of stride {block_tables.stride(0)}"
        )
    seq_lens, batch_size = seq_lens.contiguous(), block_tables.shape[0]
    if call.q_cu_seq_lens is None:
        if num_tokens != batch_size * qo_len:
            raise checks.wrong(f"query must have batch_size * q_len_per_req = {batch_size} * {qo_len} rows", call.query)
        return block_tables, seq_lens, None
    shape = (batch_size + 1,), "[batch_size + 1]"
    bounds = checks.operand("q_cu_seq_lens", call.q_cu_seq_lens, INDEX_DTYPES, *shape, device)
    return block_tables, seq_lens, bounds.contiguous()


def _draft_mask(value: Any, num_tokens: int, qo_len: int, device: torch.device) -> torch.Tensor:
    """Return rows of mask bits, one per query token, in whole 32-bit words."""
    value = checks.tensor("mask", value)
    checks.dtype("mask", value.dtype, MASK_DTYPES)
    checks.device("mask", value, device)
    words = draft_mask_bytes(qo_len) // value.element_size()
    if value.dim() < 2 or value.shape[-1] != words or value.numel() != num_tokens * words:
        row = f"{words} words of {checks.short(value.dtype)} (32 * ceil(q_len_per_req / 32) bits)"
        raise checks.wrong(f"mask must have {num_tokens} rows of {row}", value)
    return value.reshape(num_tokens, words).contiguous()


# ---- workspaces and outputs


def _scratch(semaphores: Any, workspace_buffer: Any) -> Scratch:
    """Return the memory of a launch. Semaphores in the workspace are in its first 8 MiB, as FlashInfer's are, and
    partial results behind them; a workspace for partial results alone need not be zero.
    """
    scratch = operands.partials_in("workspace_buffer", workspace_buffer)
    if semaphores is None:
        return scratch
    if isinstance(semaphores, str):
        size, counter_bytes = scratch.partial_bytes, min(scratch.partial_bytes, COUNTER_BYTES)
        partials = scratch.partials + COUNTER_BYTES
        return scratch._replace(partials=partials, counter_bytes=counter_bytes, partial_bytes=size - counter_bytes)
    buffer, counter_bytes = operands.scratch_memory("semaphores", semaphores)
    return scratch._replace(counter_buffer=buffer, counters=buffer.data_ptr(), counter_bytes=counter_bytes)


def _outputs(call: DecodeCall, features: Features, qo_len: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out as `[num_tokens, num_qo_heads, head_dim]`, and lse as `[num_tokens, num_qo_heads]` if it is wanted."""
    query, out, lse, wants_lse = call.query, call.out, call.lse, checks.boolean("return_lse", call.return_lse)
    rows = (query.shape[0], features.num_qo_heads)
    if out is not None and out.dim() == 4 and call.q_cu_seq_lens is None:
        flat = *rows, features.head_dim_vo
        shape = rows[0] // qo_len, qo_len, *flat[1:]
        checks.shape("out", out, shape, "[batch_size, q_len_per_req, num_qo_heads, head_dim]")
        out = operands.flat_tokens("out", out, flat)
    if call.lse_copy is not None:
        checks.operand("lse", lse, (torch.float32,), rows[::-1], "[num_qo_heads, num_tokens]", query.device)
        checks.dense("lse", lse)
        lse, wants_lse = None, True
    # `before_launch` compares them with all that the call reads.
    element = features.head_dim_vo, features.o_dtype
    return operands.outputs(query, (out, lse, wants_lse), element, rows, "num_tokens, num_qo_heads")


# ---- memory and values


def before_launch(problem: DecodeProblem, call: DecodeCall, values: bool) -> None:
    """Refuse buffers, and where `values` says so lengths and page numbers, that the problem must not have."""
    scratch = problem.scratch
    written = [("workspace_buffer", scratch.partial_buffer), ("out", problem.out), ("lse", problem.lse)]
    if scratch.counter_buffer is not scratch.partial_buffer:
        written.insert(0, ("semaphores", scratch.counter_buffer))
    scales = problem.extras.k_scales, problem.extras.v_scales
    read = zip(READ, (call.query, problem.k, problem.v, *scales, *call[OF_LAUNCH]), strict=True)
    checks.apart((*written, ("lse", call.lse_copy)), (*read, *call.form.factors))
    if values:
        if problem.qo_indptr is not None:
            bounds, rows = problem.qo_indptr.tolist(), problem.q.shape[0]
            operands.check_bounds("q_cu_seq_lens", bounds, problem.qo_len)
            if bounds[-1] > rows or (bounds[-1] < rows and call.out is None):  # rows of no request are of a given out
                raise ArgumentError(f"q_cu_seq_lens must end at {rows}, the rows of query, got {bounds[-1]}")
        kv_len = problem.seq_lens.cpu().numpy().astype(np.int64)
        checks.each_within("seq_lens", kv_len, MAX_KV_LEN)
        if call.max_seq_len is not None:
            checks.each_within("seq_lens", kv_len, int(call.max_seq_len), ", max_seq_len")
        page_size, tables, unseen = problem.settings.page_size, problem.block_tables, None
        used = caches.in_table(tables, kv_len, page_size)
        if (window_left := problem.settings.window_left) >= 0:  # pages before the window are not read
            unseen = used.before(kv_len - problem.qo_len - window_left, page_size, tables.device)
        used.check(used.take(tables), problem.k.shape[0], caches.TABLE_ENTRY, unseen)
