"""Latent attention of planned batches: `BatchMLAPagedAttentionWrapper`. A plan is where lengths and pages are."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.dispatch import mla as dispatch
from cute_attn.errors import ArgumentError, NotPlannedError
from cute_attn.ops import declare, fakes, handles, trace
from cute_attn.problem import Scratch, short
from cute_attn.request import batch_plan, checks, trtllm_options
from cute_attn.request.mla import (
    LATENT,
    NARROW,
    ROPE,
    MlaLengths,
    MlaOptions,
    MlaProblem,
    Names,
    Part,
    Parts,
    check_apart,
    check_bounds,
    check_values,
    mla_problem,
    partials_in,
    split_rows,
    whole_part,
)
from cute_attn.request.settings import HALF
from cute_attn.runtime import switches
from cute_attn.wrappers.not_copied import NotCopied

SAME = ("auto", "fa2", "fa3", "xqa", "trtllm-gen")  # FlashInfer's backends; one implementation here stands for all
ARRAYS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
NAMES = Names("float_workspace_buffer", "kv_len_arr", "kv_indices", "kv_indptr", "qo_indptr")
LAYOUTS = ("packed", "split")
NO_PROFILER = "no kernel records a profile"


def refuse_dims(names: tuple[str, str], dims: tuple[int, int]) -> None:
    """Refuse head dimensions that no kernel has."""
    if dims != (LATENT, ROPE):
        feature = f"{names[0]}={dims[0]}, {names[1]}={dims[1]}"
        reason = f"rows of the cache have {LATENT} latent and {ROPE} rotated columns"
        trtllm_options.refuse(feature, reason, "zeros in the columns that a model does not have")


def run(parts: Parts, lengths: MlaLengths, scratch: Scratch, options: MlaOptions, backend: str) -> MlaProblem:
    """Check a call, and run it on a backend. Return it with its outputs."""
    problem = mla_problem(parts, lengths, scratch, options)
    check_apart(problem, parts, options)
    if looks_at_values(problem.q_nope):
        check_values(problem, options.names)
    dispatch.run(problem, backend)
    return problem


def looks_at_values(q: torch.Tensor) -> bool:
    """Tell whether a call looks at lengths and page numbers: where that costs nothing, or was asked for."""
    return q.is_cpu or (switches.validates() and not torch.cuda.is_current_stream_capturing())


class Planned(NamedTuple):
    """A plan: lengths on the device, and what `run` must agree with."""

    lengths: MlaLengths
    rows: int | None  # of q; None: not known on the host
    num_heads: int
    page_size: int
    dtypes: tuple[torch.dtype, torch.dtype]  # of queries and of the cache
    causal: bool
    sm_scale: float
    layouts: tuple[str | None, str | None]  # of queries and of the cache, where the plan says
    enable_pdl: bool | None
    use_sinks: bool


class BatchMLAPagedAttentionWrapper(NotCopied):
    """Latent attention of a batch over a paged latent cache, with absorbed queries; for decode and short prefills.

    `plan` keeps lengths and pages on the device; `run` computes. Formulas: `trtllm_batch_decode_with_kv_cache_mla`.

    Parameters
    ----------
    float_workspace_buffer : contiguous tensor of any dtype for partial results; its device is that of all tensors.
    use_cuda_graph : default False. True: plans copy their arrays to the four buffers below, which captured launches
        read, and have the same batch size and no longer queries than the first one.
    qo_indptr, kv_indptr : int32 `[batch_size + 1]`.
    kv_indices : int32, as many pages as any plan has.
    kv_len_arr : int32 `[batch_size]`.
    backend : "auto" (default), "fa2", "fa3", "xqa" or "trtllm-gen", which mean the same here, or "reference".

    Raises
    ------
    ArgumentError, ArgumentTypeError, LayoutError (`backend`), NotSupported (other backends of FlashInfer).
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._scratch = partials_in("float_workspace_buffer", float_workspace_buffer)
        self._float_workspace_buffer = float_workspace_buffer  # serving engines read it
        self._backend = dispatch.checked_name(backend, SAME)
        self._use_cuda_graph = checks.boolean("use_cuda_graph", use_cuda_graph)
        buffers = dict(zip(ARRAYS, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True))
        self._buffers: dict[str, torch.Tensor] = {}
        if self._use_cuda_graph:
            named = {name: batch_plan.graph_buffer(name, x, torch.int32, self.device) for name, x in buffers.items()}
            checks.apart(named.items(), (("float_workspace_buffer", float_workspace_buffer),))
            self._buffers = named
        self._planned: Planned | None = None
        self._handle = handles.new(self)

    @property
    def device(self) -> torch.device:
        """The workspace's device."""
        return self._float_workspace_buffer.device

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans copy their arrays to buffers of the caller."""
        return self._use_cuda_graph

    @property
    def _o_dtype(self) -> torch.dtype | None:
        """The dtype of outputs of the latest plan, for traced runs."""
        return None if self._planned is None else self._planned.dtypes[0]

    # ---- plan

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Keep where the tokens of a batch are. Request i has the query tokens `qo_indptr[i]:qo_indptr[i + 1]`.

        Index arrays are int32, on the wrapper's device or on the CPU. `qo_indptr` on a GPU costs a synchronisation.

        Parameters
        ----------
        qo_indptr, kv_indptr : `[batch_size + 1]`, from 0, not decreasing.
        kv_indices : 1-D, page numbers; those of request i start at `kv_indptr[i]`. An int32 tensor on the wrapper's
            device is not copied without CUDA graphs: it must not change until the last run. So it is for `kv_len_arr`.
        kv_len_arr : `[batch_size]`, tokens of each request, at most those of its pages.
        num_heads : at least 1.
        head_dim_ckv, head_dim_kpe : 512 and 64; others are refused.
        page_size : tokens per page, at least 1.
        causal : True: query token r of a request sees keys j <= r + kv_len - qo_len. False: all keys.
        sm_scale : any finite number.
        q_data_type, kv_data_type : float16 or bfloat16; the cache's the same, or float8_e4m3fn.
        use_profiler, skip_softmax : refused unless False.
        metadata, cum_seq_lens_q, block_tables, seq_lens, max_q_len : refused unless None: pass the arrays above.
        query_layout, kv_cache_layout : "packed" or "split": the form that `run` must get. None (default): either.
        lse_mode : refused unless "none" (default): `run` has return_lse.
        output_dtype : None (default) or q_data_type; others are refused.
        output_scale, scale_mode : refused unless "none" and "default".
        enable_pdl : as for `trtllm_batch_decode_with_kv_cache_mla`.
        use_sinks : default False. True: `run` must get sinks.

        Raises
        ------
        ArgumentError, ArgumentTypeError, LayoutError, NotSupported. After an error the previous plan is in force.
        """
        instead = "qo_indptr, kv_indptr, kv_indices and kv_len_arr, or trtllm_batch_decode_with_kv_cache_mla"
        for name, value in (
            *(("metadata", metadata), ("cum_seq_lens_q", cum_seq_lens_q), ("block_tables", block_tables)),
            *(("seq_lens", seq_lens), ("max_q_len", max_q_len)),
        ):
            if value is not None:
                trtllm_options.refuse(f"{name} in plan", "plans take arrays of all requests", instead)
        _refuse_results(lse_mode, output_scale, scale_mode, skip_softmax, use_profiler)
        dims = checks.whole("head_dim_ckv", head_dim_ckv), checks.whole("head_dim_kpe", head_dim_kpe)
        refuse_dims(("head_dim_ckv", "head_dim_kpe"), dims)
        dtypes = _dtypes(q_data_type, kv_data_type, output_dtype)
        arrays = dict(zip(ARRAYS, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True))
        page_size = checks.at_least("page_size", page_size, 1)
        options = (
            checks.at_least("num_heads", num_heads, 1),
            page_size,
            dtypes,
            checks.boolean("causal", causal),
            checks.real("sm_scale", sm_scale),
            (_layout("query_layout", query_layout), _layout("kv_cache_layout", kv_cache_layout)),
            None if enable_pdl is None else checks.boolean("enable_pdl", enable_pdl),
            checks.boolean("use_sinks", use_sinks),
        )
        lengths, rows = self._lengths({name: _index_array(name, x) for name, x in arrays.items()}, page_size)
        self._planned = Planned(lengths, rows, *options)

    def _lengths(self, arrays: dict[str, torch.Tensor], page_size: int) -> tuple[MlaLengths, int]:
        """Return lengths on the device, and the rows of q. Nothing is written before all is checked."""
        bounds, size = arrays["qo_indptr"], arrays["kv_len_arr"].shape[0]
        for name in ARRAYS[:2]:
            if arrays[name].shape[0] != size + 1:
                raise ArgumentError(f"{name} must have {size + 1} elements (batch_size + 1), got {len(arrays[name])}")
        ends = bounds.tolist()
        most = max((end - begin for begin, end in itertools.pairwise(ends)), default=0)
        check_bounds("qo_indptr", ends, most, ends[-1])
        _check_room(arrays, page_size)
        if self._use_cuda_graph:
            most = self._most_queries(most)
            for name, x in arrays.items():
                _check_buffer(self._buffers[name], name, x.shape[0])
            arrays = {name: _copied(self._buffers[name], x) for name, x in arrays.items()}
        else:
            arrays = {name: x.to(self.device, non_blocking=True).contiguous() for name, x in arrays.items()}
        starts = arrays["kv_indptr"][:-1]
        return MlaLengths(arrays["kv_len_arr"], arrays["kv_indices"], starts, arrays["qo_indptr"], most), ends[-1]

    def _most_queries(self, most: int) -> int:
        """Return the most query tokens of a request that captured launches have room for."""
        if self._planned is None:
            return most
        room = self._planned.lengths.qo_len
        if most > room:
            raise ArgumentError(
                f"qo_indptr must give no request more query tokens than the first plan of a CUDA graph, {room}; "
                f"got {most}"
            )
        return room

    # ---- run

    @declare.operator("mla_run", fakes.latent_run, is_method=True)
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | torch.Tensor | None = None,
        bmm2_scale: float | torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of the planned batch.

        Parameters
        ----------
        q_nope, q_pe : `[qo_indptr[-1], num_heads, 512]` and `[..., 64]` of the planned dtype.
        ckv_cache, kpe_cache : `[num_pages, page_size, 512]` and `[..., 64]` of the planned dtype; any strides with 1
            on the last axis, rows 16-byte aligned on a GPU.
        query, kv_cache : in place of the four: pairs of the parts, or tensors with 576 columns.
        out : written and returned: `[qo_indptr[-1], num_heads, 512]`. Default: a new tensor.
        lse : written instead of a new tensor: contiguous float32 `[qo_indptr[-1], num_heads]`.
        return_lse : return `(out, lse)`. Default False.
        return_lse_base_on_e : lse is natural, not base 2. Default False.
        sinks : floating-point `[num_heads]`, natural-log domain; only after a plan with use_sinks.
        bmm1_scale, bmm2_scale : in place of the planned sm_scale and of 1: numbers or tensors of one element.
        ckv_scale, kpe_scale : factors of the cache's parts, numbers. Default 1.
        profiler_buffer, kv_len, page_table, o_scale, ckv_scale_arr, skip_softmax_threshold_scale_factor : refused
            unless None.

        Returns
        -------
        out, or with `return_lse` the pair (out, lse). A token that sees no key has out 0 and lse -inf.

        Raises
        ------
        NotPlannedError (a RuntimeError: no plan yet), ArgumentError, ArgumentTypeError, NotSupported.
        """
        if is_dynamo_compiling():
            return trace.operator("mla_run")(locals())
        plan = self._in_force()
        trtllm_options.refuse_given(NO_PROFILER, profiler_buffer=profiler_buffer)
        trtllm_options.refuse_given("the plan has lengths and pages", kv_len=kv_len, page_table=page_table)
        trtllm_options.refuse_given("outputs have 16 bits", o_scale=o_scale)
        trtllm_options.refuse_given("the cache has one scale for each part", ckv_scale_arr=ckv_scale_arr)
        trtllm_options.refuse_skipped_softmax(skip_softmax_threshold_scale_factor)
        if (sinks is not None) != plan.use_sinks:
            raise ArgumentError(f"sinks must be given exactly where plan has use_sinks, which is {plan.use_sinks}")
        queries = _operand(("query", query), ("q_nope", q_nope), ("q_pe", q_pe), plan.layouts[0])
        cache = _operand(("kv_cache", kv_cache), ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache), plan.layouts[1])
        parts = Parts(*queries, *cache)
        _check_planned(parts, plan)
        natural = checks.boolean("return_lse_base_on_e", return_lse_base_on_e)
        sm_scale = plan.sm_scale if bmm1_scale is None else bmm1_scale
        options = MlaOptions(
            NAMES, plan.causal, sm_scale, 1.0 if bmm2_scale is None else bmm2_scale, out, lse, return_lse,
            "ln" if natural else "log2", plan.enable_pdl, sinks, ckv_scale, kpe_scale,
        )  # fmt: skip
        problem = run(parts, plan.lengths, self._scratch, options, self._backend)
        if not return_lse:
            return problem.out
        assert problem.lse is not None
        return problem.out, problem.lse

    def _in_force(self) -> Planned:
        if self._planned is None:
            raise NotPlannedError("BatchMLAPagedAttentionWrapper.plan() must come before run()")
        return self._planned


# ---- arguments


def _index_array(name: str, value: Any) -> torch.Tensor:
    value = checks.tensor(name, value)
    checks.dtype(name, value.dtype, (torch.int32,))
    if value.dim() != 1:
        raise ArgumentError(f"{name} must have one axis, got {checks.describe(value)}")
    return value


def _check_room(arrays: dict[str, torch.Tensor], page_size: int) -> None:
    """Check that requests have pages for their tokens, where the host has the numbers."""
    indptr, lengths = arrays["kv_indptr"], arrays["kv_len_arr"]
    if not (indptr.is_cpu and lengths.is_cpu):
        return
    wrong = (lengths < 0) | (lengths > indptr.diff() * page_size)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        pages = int(indptr[i + 1] - indptr[i])
        raise ArgumentError(
            f"kv_len_arr must be within 0 and the tokens of a request's pages in kv_indptr; "
            f"request {i} has {int(lengths[i])} tokens and {pages} pages of {page_size}"
        )


def _check_buffer(buffer: torch.Tensor, name: str, size: int) -> None:
    """Check that an index array fits the buffer that captured launches read."""
    if size > buffer.shape[0] or (name != "kv_indices" and size != buffer.shape[0]):
        raise ArgumentError(f"{name} must fit its buffer of {buffer.shape[0]} elements, got {size}")


def _copied(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy an index array to the buffer that captured launches read."""
    buffer[: value.shape[0]].copy_(value, non_blocking=True)
    return buffer


def _dtypes(q: Any, kv: Any, out: Any) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of queries and out, and of the cache."""
    checks.dtype("q_data_type", q, HALF)
    checks.dtype("kv_data_type", kv, (q, NARROW))
    if out is not None and out != q:
        trtllm_options.refuse(f"output_dtype={out}", "out has the dtype of queries", f"output_dtype={short(q)}")
    return q, kv


def _layout(name: str, value: Any) -> str | None:
    return None if value is None else checks.choice(name, value, LAYOUTS)


def _refuse_results(lse_mode: Any, output_scale: Any, scale_mode: Any, skip_softmax: Any, profiler: Any) -> None:
    for name, value, usual, instead in (
        ("lse_mode", lse_mode, "none", "return_lse of run"),
        ("output_scale", output_scale, "none", "bmm2_scale of run"),
        ("scale_mode", scale_mode, "default", "bmm1_scale and bmm2_scale of run"),
    ):
        if value != usual:
            trtllm_options.refuse(f"{name}={value!r}", "plans do not fix what runs return or scale", instead)
    trtllm_options.refuse_given("no weight is dropped from the softmax", skip_softmax=skip_softmax)
    trtllm_options.refuse_given(NO_PROFILER, use_profiler=profiler)


def _operand(whole: tuple[str, Any], nope: tuple[str, Any], rope: tuple[str, Any], planned: str | None) -> Any:
    """Return both parts of queries or of a cache, from one argument or two."""
    name, value = whole
    if value is not None and not nope[1] is rope[1] is None:
        raise ArgumentError(f"{name} must not come with {nope[0]} and {rope[0]}")
    if isinstance(value, torch.Tensor):
        layout, parts = "packed", split_rows(name, value, (3,), f"[..., {LATENT + ROPE}]")
    else:
        layout, both = "split", (nope, rope)
        if isinstance(value, tuple | list) and len(value) == 2:
            both = (f"{name}[0]", value[0]), (f"{name}[1]", value[1])
        parts = _split(both)
    if planned not in (None, layout):
        raise ArgumentError(f"{name} must be {planned}, as planned, got it {layout}")
    return parts


def _split(both: tuple[tuple[str, Any], tuple[str, Any]]) -> tuple[Part, Part]:
    (nope, x), (rope, y) = both
    return whole_part(nope, x, LATENT, f"[..., {LATENT}]"), whole_part(rope, y, ROPE, f"[..., {ROPE}]")


def _check_planned(parts: Parts, plan: Planned) -> None:
    """Check that queries and cache are those of the plan."""
    (q_name, q), (ckv_name, ckv) = parts.q_nope, parts.ckv
    checks.dtype(q_name, q.dtype, plan.dtypes[:1])
    checks.dtype(ckv_name, ckv.dtype, plan.dtypes[1:])
    if q.shape[:2] != (plan.rows, plan.num_heads):
        raise ArgumentError(
            f"{q_name} must have {plan.rows} tokens of {plan.num_heads} heads, as planned, got {checks.describe(q)}"
        )
    if ckv.shape[1] != plan.page_size:
        raise ArgumentError(f"{ckv_name} must have the planned page_size {plan.page_size}, got {checks.describe(ckv)}")
