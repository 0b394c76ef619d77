"""Batch decode over a paged cache in one call, without a plan: lengths and page tables stay on the device.

The signatures are those of FlashInfer's functions of the same names; the formulas are in the docstrings here, and
`cute_attn/reference/attention.py` computes them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_attn.dispatch import backends, select
from cute_attn.errors import ArgumentError
from cute_attn.ops import declare, fakes, trace
from cute_attn.request import checks
from cute_attn.request.caches import cache_views
from cute_attn.request.decode import DecodeCall, Form, before_launch, decode_problem
from cute_attn.request.operands import flat_tokens, number_or_tensor
from cute_attn.runtime.arch import multiprocessors
from cute_attn.wrappers import calls
from cute_attn.wrappers.calls import Given

LOW_LEVEL_NAMES = {  # arguments of `xqa` and what they are called here
    "query": "q",
    "out": "output",
    "block_tables": "page_table",
    "q_len_per_req": "q_seq_len",
    "k of kv_cache": "k_cache",
    "v of kv_cache": "v_cache",
    "k and v of kv_cache": "k_cache and v_cache",
    "kv_cache": "(k_cache, v_cache)",
    "k of kv_cache_sf": "k_sf_cache",
    "v of kv_cache_sf": "v_sf_cache",
    "k_sf of kv_cache_sf": "k_sf_cache",
    "v_sf of kv_cache_sf": "v_sf_cache",
    "kv_cache_sf": "(k_sf_cache, v_sf_cache)",
    "window_left": "sliding_win_size",
    "bmm1_scale": "q_scale * kv_scale",
    "bmm2_scale": "kv_scale * rcp_out_scale",
}

FORM = Form(out_by_request=True)

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Result = Tensor | tuple[Tensor, Tensor]


@declare.operator("xqa_batch_decode", fakes.xqa)
def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: Cache | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
    *,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of the newest token or tokens of every request over its paged cache.

    The keys of a request include those of its query tokens. Row r of a request with q_len query tokens has position
    seq_len - q_len + r. For key j and one head, in the natural-log domain::

        z = bmm1_scale * q.k_j
        z = -inf                       where row r does not see key j
        out = bmm2_scale * o_scale * sum_j exp(z) v_j / (sum_j exp(z) + exp(sink))       (float8_e4m3fn out: no o_scale)
        lse = log2(sum_j exp(z) + exp(sink))

    for every dtype of the cache. A row sees the keys up to its own position, or what `mask` says, and of those only
    the keys inside the window. A row that sees no key has out 0 and lse -inf (with a sink: lse = sink * log2(e)).
    Query head h reads kv head h // (num_qo_heads // num_kv_heads).

    On a GPU one launch computes all requests. It reads on the device what may change between replays of a CUDA graph:
    query, cache, block_tables, seq_lens, scale tensors, sinks, mask, q_cu_seq_lens. CPU tensors run on the torch
    reference, which reads lengths on the host. No gradients are computed.

    Every call refuses out, lse and workspace_buffer that have memory in common with each other or another argument.
    What is in block_tables, seq_lens and q_cu_seq_lens (page numbers beyond the cache, lengths beyond the pages, bounds
    that decrease) is checked for CPU tensors in every call, and on a GPU with `CUTE_ATTN_VALIDATE=1` in the
    environment, which costs synchronisations. Without it a GPU reads no key past max_pages * page_size, and trusts the
    rest.

    Semaphores of a launch's own belong to its stream, or to the captured launch, and its partial results to torch's
    allocator, so that calls on several streams and in CUDA graphs do not meet. The first such call on a GPU allocates
    them and cannot be one that is captured: make it once before.

    Parameters
    ----------
    query : `[num_tokens, num_qo_heads, head_dim]`, float16 or bfloat16; num_tokens = batch_size * q_len_per_req, or
        what q_cu_seq_lens says. `num_qo_heads` must be a multiple of `num_kv_heads`. Any strides; a last axis without
        unit stride, or rows that are not 16-byte aligned on a GPU, cost a copy. head_dim on a GPU: a
        multiple of 8 (of 16 with fp8 caches) from 16 to 256, of twice that to 512; with NVFP4 64, 128, 256 or 512.
    kv_cache : a pair of `[num_pages, page_size, num_kv_heads, head_dim]` ("NHD") or `[num_pages, num_kv_heads,
        page_size, head_dim]` ("HND"), or one tensor with an axis of 2 (keys, values), or 1 (both are the same), after
        the first. Any page size; any strides with 1 on the last axis; on a GPU rows must be 16-byte aligned. Of query's
        dtype, float8_e4m3fn, float8_e5m2, or uint8: NVFP4, two e2m1 numbers per byte, low bits first, head_dim / 2
        bytes.
    workspace_buffer : of any dtype, contiguous, on query's device; 8 MiB for semaphores, which must be 0 before the
        first use and are left 0, and a few MiB for partial results. Two streams must not use it at once. Where it is
        smaller than a launch needs, or not 16-byte aligned, the launch uses semaphores and partial results of its own
        (see below). Neither CPU tensors nor `backend="reference"` use it.
    block_tables : int32 `[batch_size, max_pages]`, the page numbers of each request in order. Entries past a request's
        last page are not read.
    seq_lens : int32 or uint32 `[batch_size]` or `[batch_size, 1]`, keys of each request in tokens, those of the query
        tokens included; at most max_pages * page_size.
    max_seq_len : int >= 0, an upper bound of seq_lens, in tokens. No size depends on it.
    bmm1_scale, bmm2_scale : finite numbers, or floating-point tensors of one element; a tensor on the GPU is read by
        the kernel, without synchronisation. Default 1. bmm1_scale must include 1 / sqrt(head_dim).
    window_left : >= 0: a row sees that many keys before its position, and its own. Negative (default): no window.
    out : written and returned: query's shape, or `[batch_size, q_len_per_req, num_qo_heads, head_dim]`; float16,
        bfloat16 or float8_e4m3fn (saturated; on a GPU from compute capability 9.0). Unit stride on the last axis, rows
        16-byte aligned on a GPU, no memory in common with query and cache. Default: a new tensor of query's dtype.
    sinks : floating-point, num_qo_heads elements, natural-log domain, not scaled: one more term of the denominator.
    kv_layout : "NHD" (default) or "HND", of kv_cache and kv_cache_sf.
    enable_pdl : False: no programmatic dependent launch. None (default) or True: where the GPU has it (9.0 and later).
    q_len_per_req : query tokens per request; with q_cu_seq_lens, the most that any request has. Default, and None: 1.
    o_scale : number > 0, a factor of out unless out is float8_e4m3fn. Default, and None: 1.
    mask : bits in words of 16 or 32 bits (uint16, int16, uint32, int32), for each query token a row of
        32 * ceil(q_len_per_req / 32): bit j (least significant first) is set if it sees key seq_len - q_len + j. Keys
        before those are visible. Default: causal.
    kv_cache_sf : block scales of an NVFP4 cache, required with it and refused otherwise: like kv_cache with
        head_dim / 16 on the last axis, e4m3, or its bytes as uint8, one scale per 16 values, not interleaved.
    q_cu_seq_lens : int32 or uint32 `[batch_size + 1]`, from 0 to num_tokens, not decreasing: query tokens of request i
        are rows q_cu_seq_lens[i] to q_cu_seq_lens[i + 1], at most q_len_per_req of them. With `out` of the caller it
        may end before num_tokens: rows past it are not written. Default: q_len_per_req tokens of every request.
    lse : written instead of a new tensor: contiguous float32 `[num_tokens, num_qo_heads]`. Written also without
        `return_lse`.
    return_lse : return `(out, lse)`. Default False.
    backend : "auto" (default: XQA on a GPU, the reference on the CPU), "xqa", "reference" or "emulator" (CPU tensors
        on a GPU's kernel). `cute_attn.explain` tells why other backends refuse.

    Returns
    -------
    The given out, or a new one: `[num_tokens, num_qo_heads, head_dim]`; for q_len_per_req > 1 without q_cu_seq_lens
    `[batch_size, q_len_per_req, num_qo_heads, head_dim]`. With `return_lse` the pair of it and the **base-2** lse,
    float32 `[num_tokens, num_qo_heads]`.

    Raises
    ------
    ArgumentError (a ValueError: shape, dtype, device or value; also a RuntimeError where head counts or head dimensions
    do not match), ArgumentTypeError (a TypeError), LayoutError (a KeyError: `kv_layout`, `backend`), NotSupported (a
    NotImplementedError that lists why no backend takes the problem: on a GPU other head_dims, float8_e4m3fn out before
    compute capability 9.0, caches that span 64 GiB or more, block scales of a token that do not start at a multiple of
    their size).

    Examples
    --------
    >>> query = torch.randn(2, 32, 128, dtype=torch.bfloat16)
    >>> kv_cache = torch.randn(10, 2, 16, 8, 128).to(torch.float8_e4m3fn)
    >>> tables = torch.tensor([[3, 1, 0], [5, 0, 0]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([40, 7], dtype=torch.int32)
    >>> workspace = torch.zeros(16 << 20, dtype=torch.uint8)
    >>> xqa_batch_decode_with_kv_cache(query, kv_cache, workspace, tables, seq_lens, 48, 128**-0.5).shape
    torch.Size([2, 32, 128])
    """
    if is_dynamo_compiling():
        return trace.operator("xqa_batch_decode")(locals())
    return run(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, q_cu_seq_lens, mask, sinks, bmm1_scale, bmm2_scale,
        kv_cache_sf, out, lse, max_seq_len, window_left, enable_pdl, q_len_per_req, o_scale, return_lse, kv_layout,
        backend, FORM,
    )  # fmt: skip


def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Compute decode attention over a paged cache into `output`: FlashInfer's low-level form.

    For key j and one head, in the natural-log domain::

        z = q_scale * kv_scale / sqrt(head_dim) * q.k_j
        z = -inf                       where the row does not see key j
        output = kv_scale * rcp_out_scale * sum_j exp(z) v_j / (sum_j exp(z) + exp(sink))

    for every dtype of the caches, so that scales of 1 give ordinary attention. Positions, visibility, and what may
    change between replays of a CUDA graph: see `xqa_batch_decode_with_kv_cache`.

    Parameters
    ----------
    q : `[batch_size, 1, num_qo_heads, head_dim]`, `[batch_size, 1, q_seq_len, num_qo_heads, head_dim]`, or either
        without the beam axis of 1; with q_cu_seq_lens `[num_tokens, num_qo_heads, head_dim]`. float16 or bfloat16.
        Head dimensions are those of `xqa_batch_decode_with_kv_cache`.
    k_cache, v_cache : `[num_pages, page_size, num_kv_heads, head_dim]` ("NHD") or `[num_pages, num_kv_heads, page_size,
        head_dim]` ("HND"); dtypes and strides as for kv_cache of `xqa_batch_decode_with_kv_cache`.
    page_table, seq_lens : block_tables and seq_lens of `xqa_batch_decode_with_kv_cache`, and checked where those are.
    output : written: as many elements as q in the same order, tokens at equal distances; dtypes as of out of
        `xqa_batch_decode_with_kv_cache`, and no memory in common with q and the caches.
    workspace_buffer : of any dtype and size, contiguous: partial results.
    semaphores : of any dtype and size, contiguous; 0 before the first use, and left 0. Two streams must not use either
        buffer at once. FlashInfer needs a word per request, kv head and block of query rows; a launch here needs up to
        4 KiB, and partial results of a few MiB. Where either buffer is smaller, or not 16-byte aligned, the launch uses
        memory of its own instead, as `xqa_batch_decode_with_kv_cache` says.
    num_kv_heads, page_size : int, those of k_cache; page_size in tokens.
    sinks, enable_pdl, mask, q_cu_seq_lens, backend : as for `xqa_batch_decode_with_kv_cache`.
    q_scale, kv_scale : numbers or tensors, as bmm1_scale of it. Default 1.
    sliding_win_size : number of keys that a row sees, its own included; 0 (default): no window.
    kv_layout : "NHD" (default) or "HND".
    sm_count : None (default), or the number of multiprocessors of the device, all of which the grid uses.
    rcp_out_scale : number > 0, the reciprocal of the output's scale. Default 1.
    q_seq_len : query tokens per request; with q_cu_seq_lens, the most that any request has. Default 1.
    k_sf_cache, v_sf_cache : block scales of NVFP4 caches, given together: the two of kv_cache_sf there. Default: none.

    Returns
    -------
    None; `output` is overwritten.

    Raises
    ------
    The errors of `xqa_batch_decode_with_kv_cache`.
    """
    sf_cache = None if k_sf_cache is None and v_sf_cache is None else (k_sf_cache, v_sf_cache)
    scales, roles, optional, on_cpu = calls.operands((q_scale, kv_scale, None), sinks, None, None, sf_cache)
    given: Given = (
        q, k_cache, v_cache, output, None, workspace_buffer, optional,
        (page_table, seq_lens, q_cu_seq_lens, mask, *on_cpu), semaphores,
    )  # fmt: skip
    numbers = *scales, num_kv_heads, page_size, sliding_win_size, sm_count, enable_pdl, rcp_out_scale, q_seq_len
    key, found = calls.repeated(calls.UNPLANNED, given, numbers, ("low level", kv_layout, backend, roles))
    if found is not None:
        return
    with checks.renamed(LOW_LEVEL_NAMES):
        k, _ = cache_views("kv_cache", (k_cache, v_cache), kv_layout)
        expected = checks.integer("num_kv_heads", num_kv_heads), checks.integer("page_size", page_size)
        if (k.shape[2], k.shape[1]) != expected:
            raise ArgumentError(
                f"num_kv_heads and page_size must be those of k_cache, {k.shape[2]} and {k.shape[1]}, "
                f"got {num_kv_heads} and {page_size}"
            )
        device = checks.tensor("q", q).device
        if sm_count is not None:
            count, sms = checks.integer("sm_count", sm_count), multiprocessors(device.index) if q.is_cuda else None
            if sms not in (None, count):
                raise ArgumentError(f"sm_count must be None or the device's {sms}, got {sm_count}")
        window = checks.whole("sliding_win_size", sliding_win_size)
        if q.dim() < 3 or 0 in q.shape[-2:]:
            raise checks.wrong("q must have shape [..., num_qo_heads, head_dim]", q)
        rows = (-1, *q.shape[-2:])
        out = flat_tokens("output", checks.tensor("output", output), rows)
        factors = ("q_scale", q_scale), ("kv_scale", kv_scale)
        kv_scale = number_or_tensor("kv_scale", kv_scale, q.device)
        q_scale = number_or_tensor("q_scale", q_scale, q.device)
        constants = q.shape[-1] ** -0.5, checks.positive("rcp_out_scale", rcp_out_scale, 1.0)
        bmm1_scale, bmm2_scale = _products(q_scale, kv_scale, *constants)
        form = Form(checks.tensor("semaphores", semaphores), factors=factors)
        call = DecodeCall(
            q.reshape(rows), (k_cache, v_cache), workspace_buffer, page_table, seq_lens, q_cu_seq_lens, mask, sinks,
            bmm1_scale, bmm2_scale, sf_cache, out, None, None, window - 1 if window > 0 else -1, enable_pdl, q_seq_len,
            1.0, False, kv_layout, backend, form,
        )  # fmt: skip
        run_in_full(call, key, given, functools.partial(_with_products, scales[:2], constants))


def _products(q_scale: Any, kv_scale: Any, of_scores: float, of_out: float) -> tuple[Any, Any]:
    """Return the factors of scores and of outputs from scales, which are numbers or fp32 tensors, and constants."""
    return q_scale * kv_scale * of_scores, kv_scale * of_out


def _with_products(
    scales: tuple[Any, ...], constants: tuple[float, float], q: Any, optional: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the tensors of a launch, which reads products of scales. `scales`: None for one that is a tensor."""
    rest = iter(optional)
    q_scale, kv_scale = (next(rest).float() if x is None else x for x in scales)
    products = _products(q_scale, kv_scale, *constants)
    return q, (*[x for x in products if isinstance(x, Tensor)], *rest)


# ---- run


def run(*arguments: Any) -> Result:
    """Launch a call like an earlier one; check others in full, launch them and leave their entries.

    `arguments`: the fields of a `DecodeCall`, a record that only full checks need: making it takes 0.4 us.
    """
    (query, cache, workspace, tables, lengths, bounds, mask, sinks, scale, v_scale, block_scales, out, lse, bound,
     window_left, enable_pdl, q_len, o_scale, return_lse, kv_layout, backend, form) = arguments  # fmt: skip
    if type(bound) is not int or not 0 <= bound <= checks.LARGEST_INT:
        checks.at_least("max_seq_len", bound, 0)
    scales, roles, optional, on_cpu = calls.operands((scale, None, v_scale), sinks, None, None, block_scales)
    k, v = cache if isinstance(cache, tuple | list) and len(cache) == 2 else (cache, cache)
    numbers = *scales, window_left, enable_pdl, q_len, o_scale, return_lse
    given: Given = query, k, v, out, lse, workspace, optional, (tables, lengths, bounds, mask, *on_cpu), None
    key, found = calls.repeated(calls.UNPLANNED, given, numbers, (kv_layout, backend, form, roles, k is cache))
    if found is None:
        found = run_in_full(DecodeCall(*arguments), key, given)
    return found if return_lse else found[0]


def run_in_full(call: DecodeCall, key: Any, given: Given, before: calls.Before | None = None) -> calls.Outputs:
    """Check a call in full, run it, and leave its entry. Return out, and lse or None."""
    checks.choice("lse_layout", call.form.lse_layout, ("NH", "HN"))
    problem = decode_problem(call)
    before_launch(problem, call, calls.looks_at_values(problem.q.device))
    fire = backends.run(problem, select.checked_name(call.backend, same=call.form.same_backends))
    out, lse = call.out, problem.lse
    if out is None:
        by_request = call.form.out_by_request and problem.qo_len > 1 and problem.qo_indptr is None
        out = problem.out.unflatten(0, (-1, problem.qo_len)) if by_request else problem.out
    by_heads = lse is not None and call.form.lse_layout == "HN"
    convert = functools.partial(calls.lse_in_form, 1.0, True) if by_heads else None
    read = problem.block_tables, problem.seq_lens, problem.qo_indptr, problem.draft_mask
    calls.enter(
        calls.UNPLANNED, key, fire, given, problem, (out, lse), launched_read=read, before=before, convert=convert,
        partials_offset=problem.scratch.partials - problem.scratch.partial_buffer.data_ptr(),
    )  # fmt: skip
    return out, lse if lse is None or convert is None else convert(lse, call.lse)
