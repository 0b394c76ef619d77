"""Decode attention of a batch over a paged cache: `BatchDecodeWithPagedKVCacheWrapper` and its CUDA-graph form."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np
import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.request import batch_plan, checks
from cute_attn.request.batch_plan import Options
from cute_attn.wrappers.base import Asked, BatchWrapper, Result
from cute_attn.wrappers.legacy_args import name_in_order
from cute_attn.wrappers.legacy_args_batch import head_scales_only
from cute_attn.wrappers.prefill import Cache, DType, Scale, refuse_jit

P = ParamSpec("P")

NAMES = ("qo_indptr", "indptr", "indices", "last_page_len")
NUM_COMMON = 7  # arguments up to page_size
LEGACY_PLAN = (  # positional order after page_size, from before these were keywords
    *("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "data_type"),
    *("sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "fixed_split_size"),
    *("disable_split_kv", "q_len_per_req"),
)


def _legacy_positionals(plan: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(plan)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        extra = args[1 + NUM_COMMON :]
        if extra:
            warnings.warn("plan() takes the arguments after page_size by keyword", DeprecationWarning, stacklevel=2)
            kwargs = name_in_order(LEGACY_PLAN, extra, kwargs, "page_size")
        plan(*args[: 1 + NUM_COMMON], **kwargs)

    return wrapper


class BatchDecodeWithPagedKVCacheWrapper(BatchWrapper):
    """Attention of one new token (or `q_len_per_req`) of every request over its keys and values in a paged cache.

    The keys include those of the new tokens; of several, each sees the keys up to its own.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, backend : as for `BatchPrefillWithPagedKVCacheWrapper`.
    use_tensor_cores : a hint; tensor cores are used always.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : with `use_cuda_graph`, int32
        `[batch_size + 1]`, any size, and `[batch_size]`.
    jit_args : refused unless None.
    """

    kv_source = "paged"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        refuse_jit(jit_args)
        self._use_tensor_cores = checks.boolean("use_tensor_cores", use_tensor_cores)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._take_buffers(
            {
                "paged_kv_last_page_len_buffer": (paged_kv_last_page_len_buffer, 0),
                "paged_kv_indptr_buffer": (paged_kv_indptr_buffer, 1),
                "paged_kv_indices_buffer": (paged_kv_indices_buffer, None),
            }
        )

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @_legacy_positionals
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        lse_base: str = "log2",
    ) -> None:
        """Make the schedule of a batch: request i has the pages `indices[indptr[i]:indptr[i + 1]]`.

        Arguments have the meanings of `BatchPrefillWithPagedKVCacheWrapper.plan`, but for those below. From
        `pos_encoding_mode` on, without `window_right`, they are also taken by position, which is deprecated.

        Parameters
        ----------
        data_type : default of `q_data_type` and `kv_data_type`. Default of q's: float16.
        window_right : refused unless 0: keys to the right of a token are never seen.
        q_len_per_req : query tokens of every request.
        """
        checks.boolean("non_blocking", non_blocking)
        if checks.integer("window_right", window_right) != 0:
            reason = "a token sees no key to its right"
            batch_plan.refuse("window_right", window_right, reason, "a prefill wrapper with causal=False")
        q_len = batch_plan.count("q_len_per_req", q_len_per_req)
        page_size = batch_plan.page_size(page_size)
        batch_size = max(0, checks.tensor("indptr", indptr).numel() - 1)
        qo_indptr = np.arange(batch_size + 1, dtype=np.int64) * q_len
        tokens = batch_plan.paged(qo_indptr, indptr, indices, last_page_len, page_size, NAMES)
        batch_plan.check_known_lengths("seq_lens", seq_lens, tokens.lengths.kv_len)
        if block_tables is not None:
            checks.tensor("block_tables", block_tables)
        first_choice = data_type if q_data_type is None else q_data_type
        options = Options(
            *(num_qo_heads, num_kv_heads, head_dim, None),
            *("float16" if first_choice is None else first_choice, data_type if kv_data_type is None else kv_data_type),
            *(o_data_type, pos_encoding_mode, q_len > 1, window_left),
            *(logits_soft_cap, sm_scale, rope_scale, rope_theta, lse_base),
        )
        splits = batch_plan.splits(fixed_split_size, disable_split_kv, page_size)
        tokens, mask = tokens._replace(q_len=q_len), batch_plan.no_mask(tokens)
        self._make_plan(Asked(options, tokens, mask, splits, page_size))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> Result:
        """Attention of the planned batch. Arguments as in `BatchPrefillWithPagedKVCacheWrapper.run`, but for:

        Parameters
        ----------
        q : `[batch_size * q_len_per_req, num_qo_heads, head_dim]`, the tokens of a request one after the other.
        args : `scale_q, scale_k, scale_v` of fp8 attention, which have a number a head.
        q_len_per_req : None, or the planned one; deprecated.
        """
        if skip_softmax_threshold_scale_factor is not None:
            name = "skip_softmax_threshold_scale_factor"
            batch_plan.refuse(name, skip_softmax_threshold_scale_factor, "softmax is exact", f"{name}=None")
        if q_len_per_req is not None:
            _check_q_len(q_len_per_req, self._planned().tokens.q_len)
        head_scales = head_scales_only(args) if args else None
        return self._run(
            (q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks,
             kv_cache_sf, head_scales)
        )  # fmt: skip

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """Older form of `run`. Its options, given or by default, take the place of the planned ones, for this run and
        those after it.
        """
        self._plan_again(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph=True`."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """`wrapper.plan` without synchronisation, from lengths that the host knows.

    `global_override_indptr_cpu` takes the place of `indptr`, and where pages have one token, `last_page_len` is not
    looked at. Otherwise both must be on the CPU, or they are fetched.
    """
    if not isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper):
        raise ArgumentTypeError(f"wrapper must be a BatchDecodeWithPagedKVCacheWrapper, got {checks.describe(wrapper)}")
    if global_override_indptr_cpu is not None:
        indptr = checks.tensor("global_override_indptr_cpu", global_override_indptr_cpu)
    if batch_plan.page_size(page_size) == 1:
        last_page_len = torch.ones(max(0, checks.tensor("indptr", indptr).numel() - 1), dtype=torch.int32)
    wrapper.plan(
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
    )


def _check_q_len(given: Any, planned: int | None) -> None:
    warnings.warn("q_len_per_req belongs to plan()", DeprecationWarning, stacklevel=3)
    if checks.integer("q_len_per_req", given) != planned:
        raise ArgumentError(f"q_len_per_req of run() must be the planned {planned}, got {given!r}: pass it to plan()")
