"""`trtllm_batch_decode_with_kv_cache`: XQA decode under the name and with the keywords that serving engines use."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.dispatch import backends, select
from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.ops import declare, fakes, trace
from cute_attn.problem import DecodeProblem
from cute_attn.request import checks, decode_values, kv_tables, trtllm_options
from cute_attn.request.decode import (
    DecodeOptions,
    DecodeScales,
    DecodeTensors,
    block_scale_pair,
    cache_pair,
    decode_problem,
    partials_scratch,
    positive_or_one,
)
from cute_attn.request.decode_values import Said
from cute_attn.request.fp4_tensor import FP4Tensor
from cute_attn.request.names import rename
from cute_attn.wrappers import calls
from cute_attn.wrappers.calls import Fire, Given
from cute_attn.xqa import replays
from cute_attn.xqa.decode import Cache, longest

SAME = ("auto", "xqa", "trtllm-gen")  # FlashInfer's implementations of this function; one here stands for both
RAGGED_NAMES = {"q_cu_seq_lens": "cum_seq_lens_q", "q_len_per_req": "max_q_len"}
LSE_LAYOUTS = ("NH", "HN")

Call = namedtuple(  # the arguments of `trtllm_batch_decode_with_kv_cache`
    "Call",
    "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out out_dtype "
    "o_sf_scale o_sf_vec_size sinks kv_layout enable_pdl backend q_len_per_req o_scale mask max_q_len cum_seq_lens_q "
    "skip_softmax_threshold_scale_factor kv_cache_sf uses_shared_paged_kv_idx lse return_lse bmm1_scale_log2 "
    "multi_ctas_kv_counter_buffer enable_block_sparse_attention cp_world cp_rank causal_seqlens_kv_global "
    "bf16q_fp8kv_transform_mode request_order request_order_plan lse_layout uniform_q_len",
)


@declare.operator("trtllm_batch_decode", fakes.trtllm)
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Cache | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: Any = None,
    *,
    lse_layout: str = "NH",
    uniform_q_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute what `xqa_batch_decode_with_kv_cache` computes, under the name that serving engines call.

    Formulas, shapes, dtypes, units and what is checked when are in its docstring; the differences are below.

    Parameters
    ----------
    query, kv_cache, seq_lens, max_seq_len, bmm2_scale, window_left, enable_pdl, q_len_per_req, o_scale, mask,
        return_lse : arguments of `xqa_batch_decode_with_kv_cache`, with the same defaults.
    workspace_buffer : as there, but all of it has partial results and need not be zero: semaphores are always the
        launch's own.
    block_tables : int32 `[batch_size, max_pages]`; with `uses_shared_paged_kv_idx=False` `[batch_size, 2, max_pages]`.
    bmm1_scale : as there. `bmm1_scale_log2` replaces it.
    out : written and returned, as there. Default: a new tensor of query's shape, also for several query tokens per
        request. An `FP4Tensor` is refused.
    out_dtype : dtype of a new out, or its name: float16, bfloat16 or float8_e4m3fn; a given out must have it. Default:
        query's. "nvfp4" is refused.
    o_sf_scale, o_sf_vec_size : arguments of NVFP4 output; refused unless None.
    sinks : as there, or a list of one such tensor. Default: none.
    kv_layout : "HND" (default) or "NHD", of kv_cache and kv_cache_sf.
    backend : "auto" (default), "xqa" or "trtllm-gen", which mean the same here: XQA on a GPU, the reference on the CPU;
        or "reference" or "emulator".
    max_q_len, cum_seq_lens_q : q_len_per_req and q_cu_seq_lens of `xqa_batch_decode_with_kv_cache`, for ragged queries:
        an int, and int32 or uint32 `[batch_size + 1]`. Given together; max_q_len replaces q_len_per_req.
    skip_softmax_threshold_scale_factor : refused unless None (default) or 0.
    kv_cache_sf : as there. With `backend="trtllm-gen"` refused: FlashInfer interleaves its scales of v there.
    uses_shared_paged_kv_idx : True (default): keys and values are at the same pages. False: `block_tables[:, 0]` has
        the pages of keys, `block_tables[:, 1]` those of values. The values of all requests must be the same number of
        pages away from their keys (the same pages, or two parts of one pool); on a GPU this is read, with a
        synchronisation, unless both are the same memory (`tables[:, None].expand(-1, 2, -1)`), and cannot be captured
        otherwise.
    lse : written instead of a new tensor: contiguous float32 of the shape that lse_layout says. Written also without
        `return_lse`.
    bmm1_scale_log2 : floating-point tensor of one element, bmm1_scale times log2(e). Read by the kernel.
    multi_ctas_kv_counter_buffer : a tensor, not used and not written: semaphores are the launch's own.
    enable_block_sparse_attention : True is refused: a page table per kv head.
    cp_world, cp_rank, causal_seqlens_kv_global, request_order, request_order_plan : refused unless they have their
        defaults, 1, 0 and None.
    bf16q_fp8kv_transform_mode : "k_only", "separate_kv" or None (default): a hint. An fp8 cache under a 16-bit query is
        converted in registers in either case.
    lse_layout : "NH" (default): lse is `[num_tokens, num_qo_heads]`. "HN": `[num_qo_heads, num_tokens]`, a copy.
    uniform_q_len : None (default), or q_len_per_req again.

    Returns
    -------
    The given out, or a new one: `[num_tokens, num_qo_heads, head_dim]`. With `return_lse` the pair of it and the
    **base-2** lse, float32 of the shape that lse_layout says.

    Raises
    ------
    The errors of `xqa_batch_decode_with_kv_cache`; ArgumentError also for one of max_q_len and cum_seq_lens_q without
    the other, an out whose dtype is not out_dtype, and a list of several sinks; ArgumentTypeError for an out_dtype that
    is no dtype; LayoutError for an unknown `backend`; NotSupported for everything that is refused above, and for
    FlashInfer's other backends.
    """
    if is_dynamo_compiling():
        return trace.operator("trtllm_batch_decode")(locals())
    call = Call(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale,
        window_left, out, out_dtype, o_sf_scale, o_sf_vec_size, sinks, kv_layout, enable_pdl, backend,
        q_len_per_req, o_scale, mask, max_q_len, cum_seq_lens_q, skip_softmax_threshold_scale_factor, kv_cache_sf,
        uses_shared_paged_kv_idx, lse, return_lse, bmm1_scale_log2, multi_ctas_kv_counter_buffer,
        enable_block_sparse_attention, cp_world, cp_rank, causal_seqlens_kv_global, bf16q_fp8kv_transform_mode,
        request_order, request_order_plan, lse_layout, uniform_q_len,
    )  # fmt: skip
    if type(max_seq_len) is not int or not 0 <= max_seq_len <= checks.LARGEST_INT:
        longest(max_seq_len)
    key, given, numbers = _key_of(call)
    if (replayed := replays.try_replay(key, given, return_lse)) is not None:
        return replayed
    try:
        problem, fire, results = _run(call)
    except (ArgumentError, ArgumentTypeError) as error:
        rename(error, _names(call))
        raise
    replays.enter(key, given, numbers, problem, fire, results)
    return results


def _key_of(call: Call) -> tuple[Any, Given | None, tuple[Any, ...]]:
    """Return the key of calls like this one, None if they have no entry; its tensors; and the key's numbers."""
    c = call
    factors = c.bmm1_scale, None, c.bmm2_scale
    scales, roles, optional, read = calls.operands(factors, c.sinks, None, None, c.kv_cache_sf)
    numbers = (
        *(*scales, c.window_left, c.o_sf_scale, c.o_sf_vec_size, c.enable_pdl, c.q_len_per_req),
        *(c.o_scale, c.max_q_len, c.skip_softmax_threshold_scale_factor, c.return_lse, c.enable_block_sparse_attention),
        *(c.cp_world, c.cp_rank, c.uniform_q_len),
    )
    if (
        c.uses_shared_paged_kv_idx is not True
        or not (isinstance(c.lse_layout, str) and c.lse_layout == "NH")
        or not c.bmm1_scale_log2 is c.causal_seqlens_kv_global is c.request_order is c.request_order_plan is None
        or not (c.multi_ctas_kv_counter_buffer is None or isinstance(c.multi_ctas_kv_counter_buffer, torch.Tensor))
    ):
        return None, None, numbers
    read = c.block_tables, c.seq_lens, c.cum_seq_lens_q, c.mask, *read
    given = replays.given_of(c.query, c.kv_cache, c.out, c.lse, c.workspace_buffer, optional, read)
    names = "trtllm", c.out_dtype, c.kv_layout, c.backend, c.bf16q_fp8kv_transform_mode, roles
    return replays.key_of(given, numbers, names), given, numbers


def _names(call: Call) -> dict[str, str]:
    """Return names that shared checks have for arguments of a call, and the call's own."""
    found = {} if call.max_q_len is None else dict(RAGGED_NAMES)
    if call.bmm1_scale_log2 is not None:
        found["bmm1_scale"] = "bmm1_scale_log2"
    if call.out is None:
        found["out must have dtype"] = "out_dtype must be"
    return {**found, "q_cu_seq_lens": "cum_seq_lens_q"}


def _run(call: Call) -> tuple[DecodeProblem, Fire | None, replays.Result]:
    """Check a call in full and run it. Return also what runs calls like it."""
    c, backend = call, _backend_here(call.backend)
    given = trtllm_options.refuse_nvfp4_output(c.out, c.out_dtype, c.o_sf_scale, c.o_sf_vec_size)
    _refuse_other_masks(c.enable_block_sparse_attention, c.cp_world, c.cp_rank, c.causal_seqlens_kv_global)
    _refuse_request_order(c.request_order, c.request_order_plan)
    _check_hints(c.skip_softmax_threshold_scale_factor, c.bf16q_fp8kv_transform_mode, c.multi_ctas_kv_counter_buffer)
    ragged = _ragged(c.q_len_per_req, c.max_q_len, c.cum_seq_lens_q, c.uniform_q_len)
    dtype = trtllm_options.output_dtype(given, c.out_dtype)
    (k, v), block_tables = cache_pair(c.kv_cache, c.kv_layout), c.block_tables
    if not checks.boolean("uses_shared_paged_kv_idx", c.uses_shared_paged_kv_idx):
        k, v, block_tables = _joined(kv_tables.Paged(k, v, block_tables), c.seq_lens, c.kv_cache_sf)
    block_scales = None if c.kv_cache_sf is None else _block_scales(c.kv_cache_sf, c.kv_layout, (k, v), c.backend)
    in_rows = checks.choice("lse_layout", c.lse_layout, LSE_LAYOUTS) == "NH"
    return_lse = checks.boolean("return_lse", c.return_lse)
    wants_lse = return_lse or not (in_rows or c.lse is None)
    problem = decode_problem(
        DecodeTensors(
            *(c.query, k, v, block_scales, block_tables, c.seq_lens, c.cum_seq_lens_q, c.mask),
            *(trtllm_options.one_sink(c.sinks), given, c.lse if in_rows else None),
        ),
        _scales(c.bmm1_scale, c.bmm1_scale_log2, c.bmm2_scale, c.o_scale),
        DecodeOptions(c.window_left, c.max_q_len if ragged else c.q_len_per_req, c.enable_pdl, wants_lse, dtype),
        partials_scratch(c.workspace_buffer),
    )
    columns = None if in_rows else _columns(c.lse, problem)
    scales = tuple((name, getattr(c, name)) for name in ("bmm1_scale", "bmm2_scale", "bmm1_scale_log2"))
    said = Said(c.max_seq_len, c.out is not None, scales, RAGGED_NAMES if ragged else {}, columns)
    decode_values.before_launch(problem, said, replays.looks_at_values(problem.q.device))
    fire = backends.run(problem, backend)
    return problem, fire, _results(problem, given, columns, c.return_lse)


def _results(
    problem: DecodeProblem, out: torch.Tensor | None, columns: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return what the caller asked for. `columns` receive the lse where the caller wants it by heads."""
    lse = problem.lse
    if columns is not None:
        assert lse is not None
        lse = columns.copy_(lse.t())
    result = problem.out if out is None else out
    if return_lse:
        assert lse is not None
        return result, lse
    return result


def _backend_here(backend: Any) -> str:
    """Return the backend that stands for one of FlashInfer's, or the caller's own choice of ours."""
    if isinstance(backend, str) and backend in SAME:
        return "auto"
    return select.checked_name(backend)


def _joined(paged: kv_tables.Paged, seq_lens: Any, kv_cache_sf: Any) -> kv_tables.Paged:
    """Return keys and values of separate page tables under one."""
    if kv_cache_sf is not None:
        trtllm_options.refuse("pages of their own for NVFP4 values", "scales have one table", "one table")
    return kv_tables.joined(paged, seq_lens, paged.k.shape[1])


def _check_hints(skip_softmax: Any, bf16q_fp8kv_transform_mode: Any, multi_ctas_kv_counter_buffer: Any) -> None:
    """Check arguments that change nothing here."""
    trtllm_options.refuse_skipped_softmax(skip_softmax)
    if bf16q_fp8kv_transform_mode is not None:
        checks.choice("bf16q_fp8kv_transform_mode", bf16q_fp8kv_transform_mode, ("k_only", "separate_kv"))
    trtllm_options.check_counters(multi_ctas_kv_counter_buffer)


def _refuse_request_order(order: Any, plan: Any) -> None:
    """Refuse an order in which requests are launched."""
    if not (order is plan is None):
        reason = "requests share the CTAs by their lengths, in any order"
        trtllm_options.refuse_given(reason, request_order=order, request_order_plan=plan)


def _refuse_other_masks(block_sparse: Any, cp_world: Any, cp_rank: Any, global_lengths: Any) -> None:
    """Refuse the arguments that say which keys a row sees, other than masks and windows."""
    if checks.boolean("enable_block_sparse_attention", block_sparse):
        instead = "a call per kv head with its own block_tables and seq_lens"
        trtllm_options.refuse("enable_block_sparse_attention", "kv heads share their page table", instead)
    world = checks.integer("cp_world", cp_world), checks.integer("cp_rank", cp_rank)
    if world != (1, 0) or global_lengths is not None:
        feature = "decode context parallelism (cp_world, cp_rank, causal_seqlens_kv_global)"
        instead = "q_len_per_req=1, or mask, with return_lse=True on every rank, and merge_states"
        trtllm_options.refuse(feature, "positions follow from the keys of this rank", instead)


def _ragged(q_len_per_req: Any, max_q_len: Any, cum_seq_lens_q: Any, uniform_q_len: Any) -> bool:
    """Check the arguments about numbers of query tokens, and tell whether requests differ in them."""
    if (max_q_len is None) != (cum_seq_lens_q is None):
        raise ArgumentError("max_q_len and cum_seq_lens_q must be given together")
    ragged = max_q_len is not None
    if uniform_q_len is not None:
        expected = 1 if q_len_per_req is None else q_len_per_req
        if checks.integer("uniform_q_len", uniform_q_len) != expected or ragged:
            said = "None for ragged queries" if ragged else f"None or q_len_per_req, {expected}"
            raise ArgumentError(f"uniform_q_len must be {said}, got {uniform_q_len}")
    return ragged


def _scales(bmm1_scale: Any, bmm1_scale_log2: Any, bmm2_scale: Any, o_scale: Any) -> DecodeScales:
    o_scale = positive_or_one("o_scale", o_scale)
    if bmm1_scale_log2 is None:
        return DecodeScales(bmm1_scale, bmm2_scale, o_scale)
    if not isinstance(bmm1_scale_log2, torch.Tensor) or bmm1_scale_log2.numel() != 1:
        raise ArgumentTypeError(
            f"bmm1_scale_log2 must be a floating-point tensor of one element, got {checks.describe(bmm1_scale_log2)}"
        )
    return DecodeScales(bmm1_scale_log2, bmm2_scale, o_scale, math.log(2.0))


def _block_scales(
    kv_cache_sf: Any, kv_layout: Any, kv: tuple[torch.Tensor, torch.Tensor], backend: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(backend, str) and backend == "trtllm-gen":
        reason = "FlashInfer interleaves scales of v over 4 tokens there, and kernels here read them in order"
        trtllm_options.refuse('kv_cache_sf with backend="trtllm-gen"', reason, 'backend="xqa" and scales in order')
    return block_scale_pair(kv_cache_sf, kv_layout, *kv)


def _columns(lse: Any, problem: DecodeProblem) -> torch.Tensor | None:
    """Return memory for the lse as `[num_qo_heads, num_tokens]`: the caller's, or new, or None if it is not wanted."""
    rows = problem.lse
    if lse is None:
        return None if rows is None else rows.new_empty(rows.shape[::-1])
    assert rows is not None
    checks.shape("lse", checks.tensor("lse", lse), tuple(rows.shape[::-1]), "[num_qo_heads, num_tokens]")
    checks.dtype("lse", lse.dtype, (torch.float32,))
    checks.device("lse", lse, rows.device)
    checks.check_grad("lse", lse)
    checks.dense("lse", lse)
    return lse
