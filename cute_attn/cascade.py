"""Attention of batches that share prefixes (cascade attention), and the merging of attention states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.dispatch import backends
from cute_attn.errors import ArgumentError, ArgumentTypeError, NotPlannedError, NotSupported, Refusal
from cute_attn.ops import declare, fakes, trace
from cute_attn.problem import Problem
from cute_attn.request import checks, index_arrays, single
from cute_attn.request.settings import POS_ENCODING_MODES, Call
from cute_attn.wrappers.base import BatchWrapper, Cache, DType, Result
from cute_attn.wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.wrappers.engine_attributes import EngineHooks
from cute_attn.wrappers.paged_prefill import PAGED_BUFFERS, BatchPrefillWithPagedKVCacheWrapper
from cute_attn.wrappers.signatures import EndsForward, accepts_older_names

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

ARRAYS = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
OPTIONS = (  # of a plan, which all levels share
    *("pos_encoding_mode", "use_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap", "rope_scale"),
    *("rope_theta", "q_data_type", "kv_data_type"),
)
DECODE_PLAN_NAMES = {
    "indptr": "unique_kv_indptr",
    "indices": "unique_kv_indices",
    "last_page_len": "unique_kv_last_page_len",
    "head_dim_qk": "head_dim",
    "q_data_type": "data_type",
    "kv_data_type": "data_type",
}
V_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
AXES = ("n", "num_heads")
S_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class MultiLevelCascadeAttentionWrapper(EngineHooks, EndsForward):
    """Attention of a batch whose requests share prefixes. A shared page is read once for all queries that share it.

    Level 0 has the keys that most requests share, the last level those of single requests. In each level, groups of
    consecutive query tokens attend to the same pages. The keys of a query are those of its groups in all levels, in
    order. Each level is one run of a paged prefill wrapper; the results are merged as by `merge_state`:
    s = log2(sum of 2^s_i), v = sum of 2^(s_i - s) v_i.

    Parameters
    ----------
    num_levels : number of levels, at least 1.
    float_workspace_buffer, kv_layout, use_cuda_graph : as for `BatchPrefillWithPagedKVCacheWrapper`.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr : with
        `use_cuda_graph`, lists of that wrapper's buffers, one per level.

    Raises
    ------
    ArgumentTypeError (not an int, bool, tensor or list), ArgumentError (num_levels < 1; a list of another length;
    shape, dtype, device or alignment of a buffer), LayoutError (`kv_layout`).
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        given = locals()
        self._num_levels = checks.at_least("num_levels", num_levels, 1)
        self._use_cuda_graph = checks.boolean("use_cuda_graph", use_cuda_graph)
        buffers = {f"{name}_arr": given[f"{name}_arr"] for name in PAGED_BUFFERS}
        levels = [
            [None] * num_levels if arrays is None and not use_cuda_graph else self._levels(name, arrays)
            for name, arrays in buffers.items()
        ]
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *level)
            for level in zip(*levels, strict=True)
        ]
        self._ready = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph=True`."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Replace the workspace. There is no plan afterwards: call `plan` before the next `run`.

        Parameters
        ----------
        float_workspace_buffer : as for the constructor.
        int_workspace_buffers : a list with a tensor per level on the same device, not used: the levels' wrappers
            allocate the memory of their schedules.

        Raises
        ------
        ArgumentTypeError (not a tensor or list), ArgumentError (a list of another length, another device).
        """
        self._ready = False
        buffers = self._levels("int_workspace_buffers", int_workspace_buffers)
        for wrapper, buffer in zip(self._wrappers, buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    @accepts_older_names
    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Schedule all levels. After an error there is no plan.

        Parameters
        ----------
        qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len : lists with the arrays of
            `BatchPrefillWithPagedKVCacheWrapper.plan` per level, int32 or int64: `[groups + 1]`, `[groups + 1]`, page
            numbers, and `[groups]`. All levels have the same number of query tokens.
        num_qo_heads, num_kv_heads, page_size, use_fp16_qk_reduction (older name `allow_fp16_qk_reduction`), sm_scale,
            logits_soft_cap, rope_scale, rope_theta, q_data_type, kv_data_type : as for
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        head_dim : of q, k, v and the output, at least 1.
        causal : default False. Applies to the last level, whose keys end with the query tokens' own; the other levels
            are seen in full.
        pos_encoding_mode, window_left : with more than one level refused unless "NONE" and negative: they depend on
            positions, and a level knows only those within itself.

        Raises
        ------
        ArgumentTypeError (not a list), ArgumentError (lists of another length, levels with different numbers of query
        tokens), NotSupported (positions), and the errors of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        given = locals()
        self._ready = False
        self._refuse_positions(pos_encoding_mode, window_left)
        arrays = [self._levels(name, given[name]) for name in ARRAYS]
        rows = [int(index_arrays.indptr(f"qo_indptr_arr[{i}]", indptr)[-1]) for i, indptr in enumerate(arrays[0])]
        if len(set(rows)) > 1:
            raise ArgumentError(f"qo_indptr_arr must end with the same number of query tokens everywhere, got {rows}")
        options = {name: given[name] for name in OPTIONS}
        for wrapper, *level in zip(self._wrappers, *arrays, strict=True):
            options["causal"] = causal if wrapper is self._wrappers[-1] else False
            wrapper.plan(*level, num_qo_heads, num_kv_heads, head_dim, page_size, **options)
        self._ready = True

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        """Compute the attention of the planned batch over all levels.

        Parameters
        ----------
        q : `[qo_indptr[-1], num_qo_heads, head_dim]`.
        paged_kv_cache : as for `BatchPrefillWithPagedKVCacheWrapper.run`; all levels' pages are in it.

        Returns
        -------
        `[qo_indptr[-1], num_qo_heads, head_dim]` in q's dtype (bfloat16 for fp8 q).

        Raises
        ------
        NotPlannedError (no plan yet), and the errors of `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if not self._ready:
            raise NotPlannedError("MultiLevelCascadeAttentionWrapper.plan() must come before run()")
        *shared, last = self._wrappers
        v, s = last.run(q, paged_kv_cache, return_lse=True)
        for wrapper in shared:
            merge_state_in_place(v, s, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return v

    forward = run

    def _levels(self, name: str, arrays: Any) -> Sequence[Any]:
        if not isinstance(arrays, list | tuple):
            raise checks.wrong(f"{name} must be a list with a tensor for each level", arrays, ArgumentTypeError)
        if len(arrays) != self._num_levels:
            raise ArgumentError(f"{name} must have a tensor for each of {self._num_levels} levels, got {len(arrays)}")
        return arrays

    def _refuse_positions(self, pos_encoding_mode: Any, window_left: Any) -> None:
        reason, instead, used = "a level knows positions within itself only", "a paged wrapper over all pages", []
        if checks.choice("pos_encoding_mode", pos_encoding_mode, POS_ENCODING_MODES) != "NONE":
            used.append(f"pos_encoding_mode={pos_encoding_mode!r}")
        if checks.whole("window_left", window_left) >= 0:
            used.append(f"window_left={window_left!r}")
        if used and self._num_levels > 1:
            raise NotSupported([Refusal("cascade", feature, reason, instead) for feature in used])


class _SharedPrefixWrapper(EndsForward):
    """What the two wrappers share: the call over the prefix, and the merging of both results."""

    _wrapper: BatchWrapper  # of the requests' own keys

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replace the workspace. There is no plan afterwards: call `begin_forward` before the next `forward`.

        Parameters
        ----------
        float_workspace_buffer : as for the constructor.
        int_workspace_buffer : a tensor on the same device, not used.

        Raises
        ------
        ArgumentTypeError (not a tensor), ArgumentError (not contiguous, not 16-byte aligned, another device).
        """
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _prefix(self, q: Any, k_shared: Any, v_shared: Any, sm_scale: Any) -> Problem:
        """Check the call over the prefix, which all query tokens see in full. Nothing is launched yet."""
        call = Call(q, k_shared, v_shared, kv_layout=self._wrapper._kv_layout, sm_scale=sm_scale, return_lse=True)
        with checks.renamed({"k": "k_shared", "v": "v_shared", "k and v": "k_shared and v_shared"}):
            return single.problem(call)


def _merged(prefix: Problem, own: Result) -> torch.Tensor:
    """Run the call over the prefix and merge its result into that of the requests' own keys."""
    out, lse = own
    backends.run(prefix, "auto")
    assert prefix.lse is not None
    merge_state_in_place(out, lse, prefix.out, prefix.lse)
    return out


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode attention of a batch: one new token per request over a prefix that all requests share, in tensors of its
    own, and the request's keys in a paged cache. `MultiLevelCascadeAttentionWrapper` also takes prefixes in pages.

    The keys of a request are those of the prefix and its own, in this order; results over both are merged as by
    `merge_state`.

    Parameters
    ----------
    float_workspace_buffer : as for `BatchDecodeWithPagedKVCacheWrapper`.
    kv_layout : "NHD" (default) or "HND", of prefix and cache.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (not contiguous, not 16-byte aligned), LayoutError (`kv_layout`).
    """

    _wrapper: BatchDecodeWithPagedKVCacheWrapper

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Schedule a batch. `plan` is the same method.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len : the requests' own pages: `[batch_size + 1]`, page
            numbers, and `[batch_size]`, as for `BatchDecodeWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, head_dim, page_size : at least 1; num_qo_heads must be a multiple of num_kv_heads.
        data_type : of q, prefix and cache: a torch dtype or its name, default float16.

        Raises
        ------
        The errors of `BatchDecodeWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        pages = unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
        with checks.renamed(DECODE_PLAN_NAMES):
            self._wrapper.plan(*pages, num_qo_heads, num_kv_heads, head_dim, page_size, data_type=data_type)

    plan = begin_forward

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Cache
    ) -> torch.Tensor:
        """Compute the attention of the planned batch. `run` is the same method.

        Parameters
        ----------
        q : `[batch_size, num_qo_heads, head_dim]`.
        k_shared, v_shared : the prefix: `[prefix_len, num_kv_heads, head_dim]` ("NHD") or `[num_kv_heads, prefix_len,
            head_dim]` ("HND").
        unique_kv_cache : the cache with the requests' own pages, as for `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns
        -------
        `[batch_size, num_qo_heads, head_dim]` in q's dtype.

        Raises
        ------
        NotPlannedError (no plan yet), and the errors of `BatchDecodeWithPagedKVCacheWrapper.run` and
        `single_prefill_with_kv_cache`.
        """
        prefix = self._prefix(q, k_shared, v_shared, None)
        return _merged(prefix, self._wrapper.run(q, unique_kv_cache, return_lse=True))

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper, EngineHooks):
    """Prefill or append attention of a batch over a prefix that all requests share: as
    `BatchDecodeWithSharedPrefixPagedKVCacheWrapper`, with any number of query tokens per request.

    Parameters
    ----------
    float_workspace_buffer, kv_layout : as for `BatchDecodeWithSharedPrefixPagedKVCacheWrapper`.

    Raises
    ------
    The errors of `BatchDecodeWithSharedPrefixPagedKVCacheWrapper`.
    """

    _wrapper: BatchPrefillWithPagedKVCacheWrapper

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Schedule a batch. `plan` is the same method.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : query tokens and own pages of the
            requests: `[batch_size + 1]`, `[batch_size + 1]`, page numbers, and `[batch_size]`, as for
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, page_size, q_data_type, kv_data_type : as there.
        head_dim : of q, k, v and the output, at least 1.

        Raises
        ------
        The errors of `BatchPrefillWithPagedKVCacheWrapper.plan`. After an error the previous plan is still in force.
        """
        arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._wrapper.plan(*arrays, *sizes, q_data_type=q_data_type, kv_data_type=kv_data_type)

    plan = begin_forward

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Compute the attention of the planned batch. `run` is the same method.

        Parameters
        ----------
        q : `[qo_indptr[-1], num_qo_heads, head_dim]`.
        k_shared, v_shared, unique_kv_cache : prefix and cache, as for
            `BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward`.
        causal : default False. Applies to the requests' own keys; the prefix is seen in full.
        use_fp16_qk_reduction : a hint; scores are always accumulated in fp32.
        sm_scale : any finite number. Default `head_dim ** -0.5`.
        rope_scale, rope_theta : > 0; without effect, as no position is encoded.

        Returns
        -------
        `[qo_indptr[-1], num_qo_heads, head_dim]` in q's dtype.

        Raises
        ------
        NotPlannedError (no plan yet), and the errors of `BatchPrefillWithPagedKVCacheWrapper.forward` and
        `single_prefill_with_kv_cache`.
        """
        prefix = self._prefix(q, k_shared, v_shared, sm_scale)
        own = self._wrapper.forward(
            q,
            unique_kv_cache,
            causal=causal,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            return_lse=True,
        )
        return _merged(prefix, own)

    run = forward


# ---- attention states: results over disjoint keys of the same queries


@declare.operator("merge_state", fakes.merged)
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention states of the same queries over disjoint keys.

    `s = log2(2^s_a + 2^s_b)` and `v = (2^s_a v_a + 2^s_b v_b) / 2^s`, in fp32. A row of s = -inf has no keys and no
    weight; where both are, v is 0 and s is -inf. Can be captured by CUDA graphs.

    Parameters
    ----------
    v_a, v_b : `[n, num_heads, head_dim]` fp16, bf16 or fp32, both the same.
    s_a, s_b : `[n, num_heads]` fp32, fp16 or bf16: base-2 log-sum-exp of each row; converted to fp32.

    Returns
    -------
    (v, s) : `[n, num_heads, head_dim]` in v_a's dtype and fp32 `[n, num_heads]`.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device).
    """
    if is_dynamo_compiling():
        return trace.operator("merge_state")(locals())
    _check(("v_a", v_a), ("s_a", s_a), ("v_b", v_b), ("s_b", s_b))
    weights, s = _weights(torch.stack((s_a.float(), s_b.float())), 0)
    v = _weighted(v_a, weights[0]) + _weighted(v_b, weights[1])
    return v.to(v_a.dtype), s


@declare.operator("merge_state_in_place", mutates=("v", "s"))
def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge the state (v_other, s_other) into (v, s), by the formula of `merge_state`. Can be captured by CUDA graphs.

    Parameters
    ----------
    v : `[n, num_heads, head_dim]` fp16, bf16 or fp32, written.
    s : fp32 `[n, num_heads]`, base 2, written. Other dtypes are refused: they could not hold the result.
    v_other, s_other : the other state: v_other with v's shape, dtype and device; s_other `[n, num_heads]` fp32, fp16 or
        bf16, converted to fp32.
    mask : bool or uint8 `[n]`; rows where it is 0 keep v and s bit for bit. None (default) merges all rows.

    Returns
    -------
    None; v and s are overwritten.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device; v or s overlap themselves or another
    argument; a tensor that requires grad: a result in place has no derivative).
    """
    if is_dynamo_compiling():
        trace.operator("merge_state_in_place")(locals())
        return
    _check(("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other))
    checks.dtype("s", s.dtype, (torch.float32,))
    checks.dense("v", v)
    checks.dense("s", s)
    for name, x in (("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other)):
        checks.check_grad(name, x)
    if mask is not None:
        checks.operand("mask", mask, (torch.bool, torch.uint8), tuple(v.shape[:1]), "[n]", v.device, "v's device")
    checks.apart((("v", v), ("s", s)), (("v_other", v_other), ("s_other", s_other), ("mask", mask)))
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        merge = mask != 0
        merged_v = torch.where(merge[:, None, None], merged_v, v)
        merged_s = torch.where(merge[:, None], merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


@declare.operator("merge_states", fakes.merged)
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of attention states of the same queries over disjoint keys.

    `s = log2(sum of 2^s_i)` and `v = sum of 2^(s_i - s) v_i`, in fp32. Can be captured by CUDA graphs.

    Parameters
    ----------
    v : `[n, num_states, num_heads, head_dim]` fp16, bf16 or fp32.
    s : `[n, num_states, num_heads]` fp32, fp16 or bf16: base-2 log-sum-exp; converted to fp32.

    Returns
    -------
    (v, s) : `[n, num_heads, head_dim]` in v's dtype and fp32 `[n, num_heads]`; zeros and -inf if num_states is 0.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device).
    """
    if is_dynamo_compiling():
        return trace.operator("merge_states")(locals())
    _check_state("v", v, "s", s, ("n", "num_states", "num_heads"))
    weights, merged = _weights(s.float(), 1)
    return _weighted(v, weights).sum(1).to(v.dtype), merged


def _weights(s: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each state in the merged row, and the merged lse."""
    if s.shape[axis] == 0:
        return s, s.sum(axis) - torch.inf
    maximum = s.amax(axis, keepdim=True)
    anchor = torch.where(maximum == -torch.inf, 0.0, maximum)  # -inf - -inf would be NaN
    weights = torch.exp2(s - anchor)
    total = weights.sum(axis, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0), (torch.log2(total) + anchor).squeeze(axis)


def _weighted(v: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[..., None]
    return torch.where(weights > 0, v.float() * weights, 0.0)  # a row without keys may hold anything, even NaN


def _check(a: tuple[str, object], s_a: tuple[str, object], b: tuple[str, object], s_b: tuple[str, object]) -> None:
    v, other = _check_state(*a, *s_a, AXES), checks.tensor(*b)
    checks.shape(b[0], other, tuple(v.shape), f"{a[0]}'s")
    checks.dtype(b[0], other.dtype, (v.dtype,))
    checks.device(b[0], other, v.device, f"{a[0]}'s device")
    _check_state(*b, *s_b, AXES)


def _check_state(v_name: str, v: object, s_name: str, s: object, axes: tuple[str, ...]) -> torch.Tensor:
    v, s = checks.tensor(v_name, v), checks.tensor(s_name, s)
    checks.shape(v_name, v, (None,) * (len(axes) + 1), f"[{', '.join(axes)}, head_dim]")
    checks.dtype(v_name, v.dtype, V_DTYPES)
    checks.shape(s_name, s, tuple(v.shape[:-1]), f"[{', '.join(axes)}]")
    checks.dtype(s_name, s.dtype, S_DTYPES)
    checks.device(s_name, s, v.device, f"{v_name}'s device")
    return v
