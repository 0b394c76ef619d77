"""Latent attention of planned batches: `BatchMLAPagedAttentionWrapper`. A plan is where lengths and pages are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.dispatch import mla as dispatch
from cute_attn.dispatch import select
from cute_attn.errors import ArgumentError, NotPlannedError
from cute_attn.ops import declare, fakes, trace
from cute_attn.problem import short
from cute_attn.request import checks, trtllm_options
from cute_attn.request.mla import (
    LATENT,
    NARROW,
    OF_CACHE,
    OF_LIST,
    OF_QUERY,
    MlaCall,
    MlaLengths,
    check_values,
    mla_problem,
    split_rows,
    whole_part,
)
from cute_attn.request.operands import scratch_memory
from cute_attn.wrappers import calls, mla_plan
from cute_attn.wrappers.graph import GraphBuffers
from cute_attn.wrappers.mla_plan import BY_LIST, BY_TABLE, LAYOUTS, NO_PROFILER, Planned
from cute_attn.wrappers.signatures import NotCopied

SAME = ("auto", "fa2", "fa3", "xqa", "trtllm-gen")  # FlashInfer's backends; one implementation here stands for all
QUERIES, CACHE = ("query", "q_nope", "q_pe"), ("kv_cache", "ckv_cache", "kpe_cache")


Repeatable = tuple[calls.Entries, Any, calls.Given]  # what `calls.enter` takes of a call: the key may be None


def repeated(
    call: MlaCall, others: tuple[Any, ...], names: tuple[Any, ...], entries: calls.Entries = calls.UNPLANNED
) -> tuple[Repeatable, calls.Outputs | None]:
    """Launch a call like an earlier one and return its outputs, if there is one. `others`, `names`: all other
    arguments, numbers and texts; calls that are equal in them must ask for equal problems.
    """
    q, q_pe, cache, kpe, groups, out, lse, workspace, read, scale, v_scale, sinks, *options, base = call
    scales, roles, optional, on_cpu = calls.operands((scale, None, v_scale), sinks, None, None, None)
    try:
        rotated = q[..., LATENT:] if q_pe is None else q_pe
    except calls.NOT_TENSORS:  # which full checks refuse
        rotated = q_pe
    optional = (*optional, rotated) if groups is None else (*optional, rotated, groups)
    given = q, cache, cache if kpe is None else kpe, out, lse, workspace, optional, (*read, *on_cpu), None
    names = *names, base, roles, q_pe is None, kpe is None, groups is None
    key, found = calls.repeated(entries, given, (*scales, *options, *others), names)
    return (entries, key, given), found


def run(call: MlaCall, lengths: MlaLengths, backend: str, repeatable: Repeatable) -> calls.Outputs:
    """Check a call, run it on a backend, and leave its entry. Return out, and lse or None, as the caller has them."""
    problem = mla_problem(call, lengths)
    if calls.looks_at_values(problem.q.device):
        check_values(problem)
    fire = dispatch.run(problem, backend)
    entries, key, given = repeatable
    q, _, _, out, lse, *_ = given
    result = problem.out.view(*q.shape[:-1], LATENT) if out is None else out, problem.lse if lse is None else lse
    calls.enter(entries, key, fire, given, problem, result, launched_read=problem.lengths.read)
    return result


class BatchMLAPagedAttentionWrapper(NotCopied):
    """Latent attention of a batch over a paged latent cache, with absorbed queries; for decode and short prefills.

    `plan` keeps lengths and pages on the device; `run` computes. Formulas: `trtllm_batch_decode_with_kv_cache_mla`.

    Parameters
    ----------
    float_workspace_buffer : contiguous tensor of any dtype for partial results; its device is that of all tensors.
    use_cuda_graph : default False. True: plans copy their arrays to the four buffers below, which captured launches
        read, and have the same batch size and no longer queries than the first one. Without the buffers plans must have
        a table of pages and its lengths on the device; captured launches read these, so that later plans have the same.
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
        # Serving engines read this attribute.
        self._float_workspace_buffer, _ = scratch_memory("float_workspace_buffer", float_workspace_buffer)
        self._backend = select.checked_name(backend, dispatch.BACKENDS, SAME)
        self._use_cuda_graph = checks.boolean("use_cuda_graph", use_cuda_graph)
        buffers = dict(zip(OF_LIST, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True))
        self._graph: GraphBuffers | None = None
        if self._use_cuda_graph and any(x is not None for x in buffers.values()):
            self._graph = GraphBuffers(float_workspace_buffer, buffers)
        self._planned: Planned | None = None
        self._o_dtype: torch.dtype | None = None  # of the latest plan, for traced runs
        self._handle = declare.handle_of(self)

    @property
    def device(self) -> torch.device:
        """The workspace's device."""
        return self._float_workspace_buffer.device

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans copy their arrays to buffers of the caller."""
        return self._use_cuda_graph

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

        Index arrays are int32, on the wrapper's device or on the CPU. Bounds of queries on a GPU cost a synchronisation
        without max_q_len. Arrays that are on the wrapper's device are not copied without CUDA graphs: those besides
        `kv_indptr` must not change until the last run.

        Parameters
        ----------
        metadata : `MLAPlanMetadata`, in place of all index arrays and of max_q_len.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr : its fields: pages of all requests one after the other.
        cum_seq_lens_q, block_tables, seq_lens : its fields: a table of pages.
        max_q_len : its field: the most query tokens of a request.
        num_heads : at least 1.
        head_dim_ckv, head_dim_kpe : 512 and 64, or 512 and 0 for models without rotated columns; others are refused.
        page_size : tokens per page, at least 1.
        causal : True: query token r of a request sees keys j <= r + kv_len - qo_len. False: all keys.
        sm_scale : any finite number.
        q_data_type, kv_data_type : float16 or bfloat16; the cache's the same, or float8_e4m3fn.
        use_profiler, skip_softmax : refused unless False.
        query_layout, kv_cache_layout : "packed" or "split": the form that `run` must get. None (default): either.
        lse_mode : "base2" or "basee": `run` must ask for lse to this base. "none" (default): it must not, after a plan
            from `metadata`; after others, it may.
        output_dtype : None (default) or q_data_type; others are refused.
        output_scale : refused unless "none".
        scale_mode : "kv-per-tensor": over float8_e4m3fn, whose scales `run` must get. "bmm-scalar" or "bmm-tensor":
            `run` must get bmm1_scale and bmm2_scale as numbers or as tensors. "default": what `run` gets.
        enable_pdl : as for `trtllm_batch_decode_with_kv_cache_mla`.
        use_sinks : default False. True: `run` must get sinks.

        Raises
        ------
        ArgumentError, ArgumentTypeError, LayoutError, NotSupported. After an error the previous plan is in force.
        """
        if output_scale != "none":
            checks.refuse(f"output_scale={output_scale!r}", "outputs have 16 bits", "bmm2_scale of run")
        checks.refuse_given("no weight is dropped from the softmax", skip_softmax=skip_softmax)
        checks.refuse_given(NO_PROFILER, use_profiler=use_profiler)
        _, rope = mla_plan.checked_dims(head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe)
        dtypes = mla_plan.plan_dtypes(q_data_type, kv_data_type, output_dtype)
        page_size = checks.at_least("page_size", page_size, 1)
        given = locals()
        lengths = mla_plan.plan_lengths(metadata, {name: given[name] for name in mla_plan.FIELDS}, page_size)
        layouts = {"query_layout": query_layout, "kv_cache_layout": kv_cache_layout}
        options = (
            checks.at_least("num_heads", num_heads, 1),
            rope,
            page_size,
            dtypes,
            checks.boolean("causal", causal),
            checks.real("sm_scale", sm_scale),
            tuple(None if value is None else checks.choice(name, value, LAYOUTS) for name, value in layouts.items()),
            *mla_plan.plan_modes(lse_mode, scale_mode, dtypes[1], dynamic=metadata is None),
            None if enable_pdl is None else checks.boolean("enable_pdl", enable_pdl),
            checks.boolean("use_sinks", use_sinks),
        )
        plan, before = Planned(self._placed(lengths), *options, {}), self._planned
        if before is not None and before.agreed() == plan.agreed():
            plan = plan._replace(entries=before.entries)
        self._planned = plan
        self._o_dtype = dtypes[0]

    def _placed(self, lengths: MlaLengths) -> MlaLengths:
        """Return lengths where launches read them. Nothing is written before all is checked."""
        if not self._use_cuda_graph:
            return lengths.on(self.device)
        first = lengths if self._planned is None else self._planned.lengths
        with checks.renamed(lengths.names):
            if lengths.qo_len > first.qo_len:
                raise ArgumentError(
                    "qo_indptr must give no request more query tokens than the first plan of a CUDA graph, "
                    f"{first.qo_len}; got {lengths.qo_len}"
                )
        lengths = lengths._replace(qo_len=first.qo_len)
        if lengths.kv_indptr is None:
            if self._graph is not None:
                raise ArgumentError(f"{BY_TABLE} must not be given to a wrapper whose captured launches read {BY_LIST}")
            with checks.renamed(lengths.names):
                self._check_kept(lengths.arrays(), first.arrays())
            return lengths
        if self._graph is None:
            raise ArgumentError(
                f"{BY_LIST} must have buffers from the construction of a wrapper with use_cuda_graph=True; "
                f"without them plans must get {BY_TABLE}"
            )
        self._graph.check_room(lengths.batch_size, lengths.kv_indices.numel())
        copies: list[Any] = []
        for name, x in lengths.arrays().items():
            copies += self._graph.copies(name, x)
        for copy in copies:
            copy()
        buffers: dict[str, Any] = self._graph.holding
        return lengths._replace(**buffers)

    def _check_kept(self, given: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
        """Check that arrays are those of the first plan, which captured launches read."""
        for name, x in given.items():
            checks.device(name, x, self.device)
            checks.contiguous(name, x)
            if (kept[name].data_ptr(), kept[name].shape) != (x.data_ptr(), x.shape):
                raise ArgumentError(
                    f"{name} must be the array of the first plan of a CUDA graph, which captured launches read: "
                    "change its numbers in place"
                )

    # ---- run

    @declare.operator("mla_run", fakes.latent_run)
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
        q_nope, q_pe : `[tokens, num_heads, 512]` and `[..., 64]` of the planned dtype, tokens being `qo_indptr[-1]`.
        ckv_cache, kpe_cache : `[num_pages, page_size, 512]` and `[..., 64]` of the planned dtype; any strides with 1
            on the last axis, rows 16-byte aligned on a GPU. With ckv_scale_arr kpe_cache may have bfloat16 queries'
            dtype. After a plan with head_dim_kpe=0 q_pe and kpe_cache have no columns.
        query, kv_cache : in place of the four: pairs of the parts, or tensors with 576 columns (512 without rotated
            ones).
        out : written and returned: `[tokens, num_heads, 512]`. Default: a new tensor.
        lse : written instead of a new tensor: contiguous float32 `[tokens, num_heads]`.
        return_lse : return `(out, lse)`. Default False.
        return_lse_base_on_e : lse is natural, not base 2. Default False.
        sinks : floating-point `[num_heads]`, natural-log domain; only after a plan with use_sinks.
        bmm1_scale, bmm2_scale : in place of the planned sm_scale and of 1: numbers or tensors of one element.
        ckv_scale, kpe_scale : over float8_e4m3fn only: factors of the cache's parts, numbers > 0, besides those below.
            They must be given unless bmm1_scale is. kpe_scale must be 1 for rotated columns of 16 bits, and changes
            nothing without any.
        ckv_scale_arr : in place of ckv_scale: float32 `[num_pages, page_size, 4]`, factors of each 128 latent columns
            of each token; any strides with 1 on the last axis, rows 16-byte aligned on a GPU. Products are rounded to
            the queries' dtype.
        profiler_buffer, kv_len, page_table, o_scale, skip_softmax_threshold_scale_factor : refused unless None.

        Returns
        -------
        out, or with `return_lse` the pair (out, lse). A token that sees no key has out 0 and lse -inf.

        Raises
        ------
        NotPlannedError (a RuntimeError: no plan yet), ArgumentError, ArgumentTypeError, NotSupported.
        """
        if is_dynamo_compiling():
            return trace.operator("mla_run")(locals())
        plan = self._planned
        if plan is None:
            raise NotPlannedError("BatchMLAPagedAttentionWrapper.plan() must come before run()")
        latent, rotated = _halves(QUERIES, query, q_nope, q_pe)
        ckv, kpe = _halves(CACHE, kv_cache, ckv_cache, kpe_cache)
        call = MlaCall(
            latent, rotated, ckv, kpe, ckv_scale_arr, out, lse, self._float_workspace_buffer, plan.lengths.read,
            bmm1_scale, bmm2_scale, sinks, plan.causal, return_lse, plan.enable_pdl, ckv_scale, kpe_scale,
        )  # fmt: skip
        others = (
            return_lse_base_on_e, o_scale, skip_softmax_threshold_scale_factor, profiler_buffer, kv_len, page_table,
        )  # fmt: skip
        forms = isinstance(query, torch.Tensor), isinstance(kv_cache, torch.Tensor)
        repeatable, found = repeated(call, others, forms, plan.entries)
        if found is not None:
            return found if return_lse else found[0]
        checks.refuse_given(NO_PROFILER, profiler_buffer=profiler_buffer)
        checks.refuse_given("the plan has lengths and pages", kv_len=kv_len, page_table=page_table)
        checks.refuse_given("outputs have 16 bits", o_scale=o_scale)
        trtllm_options.refuse_skipped_softmax(skip_softmax_threshold_scale_factor)
        natural = checks.boolean("return_lse_base_on_e", return_lse_base_on_e)
        _check_modes(call, plan, natural)
        queries = _parts(QUERIES, query, call[:2], plan.layouts[0], plan.rope)
        cache = _parts(CACHE, kv_cache, call[2:4], plan.layouts[1], plan.rope)
        call = call.in_parts(*queries, *cache)._replace(
            bmm1_scale=plan.sm_scale if bmm1_scale is None else bmm1_scale,
            bmm2_scale=1.0 if bmm2_scale is None else bmm2_scale,
            lse_base="ln" if natural else "log2",
        )
        packed = (OF_QUERY if forms[0] else {}) | (OF_CACHE if forms[1] else {})
        with checks.renamed({"workspace_buffer": "float_workspace_buffer", **plan.lengths.names, **packed}):
            _check_planned(call, plan)
            found = run(call, plan.lengths, self._backend, repeatable)
        return found if return_lse else found[0]


# ---- arguments


def _check_modes(call: MlaCall, plan: Planned, natural: bool) -> None:
    """Check that a run has the sinks and the scales that the plan says, and asks for that lse. `natural`: its base."""
    if (call.sinks is not None) != plan.use_sinks:
        raise ArgumentError(f"sinks must be given exactly where plan has use_sinks, which is {plan.use_sinks}")
    asked = bool(call.return_lse) or call.lse is not None or natural
    lse_mode = ("basee" if natural else "base2") if asked else "none"
    if plan.lse_mode not in (None, lse_mode):
        raise ArgumentError(
            "return_lse, lse and return_lse_base_on_e must ask for the planned lse_mode "
            f"{plan.lse_mode!r}, got {lse_mode!r}"
        )
    dtype, of_ckv = plan.dtypes[1], [x is not None for x in (call.ckv_scale, call.ckv_scale_arr)]
    if dtype != NARROW and (any(of_ckv) or call.kpe_scale is not None):
        raise ArgumentError(
            f"ckv_scale, ckv_scale_arr and kpe_scale must come with a cache of float8_e4m3fn, got one of {short(dtype)}"
        )
    needed = dtype == NARROW and (call.bmm1_scale is None or plan.scale_mode == "kv-per-tensor")
    if all(of_ckv) or (needed and not any(of_ckv)):
        raise ArgumentError(
            "Exactly one of ckv_scale or ckv_scale_arr must be given with a cache of float8_e4m3fn, "
            f"got {'both' if all(of_ckv) else 'neither'}"
        )
    if call.kpe_scale is None and needed:
        raise ArgumentError("kpe_scale must be given with a cache of float8_e4m3fn, got None")
    products = call.bmm1_scale, call.bmm2_scale
    if plan.scale_mode.startswith("bmm"):
        tensors = plan.scale_mode == "bmm-tensor"
        if any(x is None or isinstance(x, torch.Tensor) != tensors for x in products):
            found = ", ".join(map(checks.describe, products))
            raise ArgumentError(
                f"bmm1_scale and bmm2_scale must be as planned with scale_mode={plan.scale_mode!r}, got {found}"
            )


def _halves(names: Sequence[str], whole: Any, latent: Any, rotated: Any) -> tuple[Any, Any]:
    """Return the tensors of queries or of a cache, not checked yet: both parts, or one with both and None."""
    if whole is None:
        return latent, rotated
    if not latent is rotated is None:
        raise ArgumentError("{} must not come with {} and {}".format(*names))
    return tuple(whole) if isinstance(whole, tuple | list) and len(whole) == 2 else (whole, None)


def _parts(names: Sequence[str], whole: Any, halves: tuple[Any, Any], planned: Any, rope: int) -> tuple[Any, Any]:
    """Return both parts of queries or of a cache from what `_halves` returned of them. `rope`: rotated columns."""
    layout = "packed" if isinstance(whole, torch.Tensor) else "split"
    if planned not in (None, layout):
        raise ArgumentError(f"{names[0]} must be {planned}, as planned, got it {layout}")
    if layout == "packed":
        return split_rows(names[0], whole, (3,), f"[..., {LATENT + rope}]", rope)
    latent, rotated = (
        whole_part(name, half, width, f"[..., {width}]")
        for name, half, width in zip(names[1:], halves, (LATENT, rope), strict=True)
    )
    return latent, rotated


def _check_planned(call: MlaCall, plan: Planned) -> None:
    """Check that queries and cache are those of the plan. That their parts agree is checked with the call."""
    q, ckv, tokens = call.q_nope, call.ckv_cache, plan.lengths.rows
    for what, found, planned in (
        ("q_nope.dtype", short(q.dtype), short(plan.dtypes[0])),
        ("ckv_cache.dtype", short(ckv.dtype), short(plan.dtypes[1])),
        ("tokens of q_nope", q.shape[0], q.shape[0] if tokens is None else tokens),
        ("heads of q_nope", q.shape[1], plan.num_heads),
        ("page_size of ckv_cache", ckv.shape[1], plan.page_size),
    ):
        if found != planned:
            raise ArgumentError(f"{what} must be as planned, {planned}, got {found}")
