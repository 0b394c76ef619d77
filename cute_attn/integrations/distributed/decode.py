"""Decode over a KV cache that is sharded by tokens: `ShardedBatchDecodeWithPagedKVCacheWrapper`."""

from __future__ import annotations

import math
from typing import Any

import torch

from cute_attn.cascade import merge_states
from cute_attn.decode import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.dispatch import merge
from cute_attn.errors import ArgumentError, NotPlannedError, NotSupported, Refusal
from cute_attn.integrations.distributed.ranks import Ranks
from cute_attn.problem import short
from cute_attn.request import batch_run, checks, operands
from cute_attn.request.settings import POS_ENCODING_MODES
from cute_attn.runtime import capture
from cute_attn.wrappers.signatures import NotCopied, with_return_lse

LN2 = math.log(2)
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]
DType = torch.dtype | str
Scale = float | torch.Tensor


class ShardedBatchDecodeWithPagedKVCacheWrapper(NotCopied):
    """Decode attention of a batch over paged caches of several ranks, each of which holds some tokens of each request.

    Every rank plans its own pages and runs with the same queries. It computes a partial output and its lse over its
    tokens; one all-gather exchanges them, packed in one buffer; one launch merges them. All ranks return the same bits.
    The newest token of a request sees every key, so that any placement of tokens will do: round-robin pages
    (`shard_kv_lens`, `shard_positions`), contiguous parts, or others. A rank may hold no token of a request.

    Partial outputs are exchanged and merged in fp32. Over a cache of 16 bits they are computed so; over narrower ones
    they are rounded to q's dtype (bfloat16 for fp8 q) first, because the kernels that are fastest there write 16 bits.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer,
        paged_kv_last_page_len_buffer, backend : as for `BatchDecodeWithPagedKVCacheWrapper`, of this rank's cache.
    group : process group. Default: all ranks.

    `run` allocates nothing but what it returns: the buffer of the exchange is made by `plan`, and with `use_cuda_graph`
    keeps its address across plans. With NCCL, `run` can be captured in a CUDA graph, by all ranks, after a run outside
    (which sets up NCCL's connections); each replay is a collective call.

    Raises
    ------
    The errors of `BatchDecodeWithPagedKVCacheWrapper`, and ArgumentTypeError and ArgumentError (group).
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        *,
        group: Any = None,
    ) -> None:
        self._ranks = Ranks.of(group)
        self._local = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            backend=backend,
        )
        self._partials: Partials | None = None
        self._o_dtype, self._lse_base = torch.bfloat16, "log2"  # of the plan in force

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph=True`."""
        return self._local.is_cuda_graph_enabled

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
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        lse_base: str = "log2",
        **options: Any,
    ) -> None:
        """Schedule a batch: this rank holds the pages `indices[indptr[i]:indptr[i + 1]]` of request i.

        All ranks plan the same number of requests, heads, dimensions and output dtype; pages are their own. Nothing is
        communicated.

        Parameters
        ----------
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type,
            data_type : as for `BatchDecodeWithPagedKVCacheWrapper.plan`, of this rank's cache.
        o_data_type : float16, bfloat16 or float32, of the merged output. Default: q's dtype, bfloat16 for fp8 q.
        lse_base : "log2" (default) or "ln", of the lse that `run` returns.
        options : others of `BatchDecodeWithPagedKVCacheWrapper.plan`: `sm_scale`, `logits_soft_cap`, `seq_lens` of this
            rank, and so on. `pos_encoding_mode`, `window_left` and `q_len_per_req` are refused unless "NONE", negative
            and 1: a rank knows its tokens, but not their positions. A sliding window holds few tokens: keep them on
            every rank.

        Raises
        ------
        NotSupported (positions), ArgumentError (with `use_cuda_graph`, another o_data_type or lse_base than the first
        plan had), and the errors of `BatchDecodeWithPagedKVCacheWrapper.plan`. After an error the previous plan is
        still in force.
        """
        _refuse_positions(**options)
        q_dtype = checks.dtype_of("q_data_type", q_data_type or data_type or "float16")
        kv_dtype = checks.dtype_of("kv_data_type", kv_data_type or data_type or q_dtype)
        sixteen = q_dtype if q_dtype.itemsize == 2 else torch.bfloat16
        o_dtype = sixteen if o_data_type is None else checks.dtype_of("o_data_type", o_data_type)
        checks.dtype("o_data_type", o_dtype, (torch.float16, torch.bfloat16, torch.float32))
        checks.choice("lse_base", lse_base, ("log2", "ln"))
        if self.is_cuda_graph_enabled and self._partials is not None:
            _check_kept("o_data_type", short(o_dtype), short(self._o_dtype))
            _check_kept("lse_base", lse_base, self._lse_base)
        partial_dtype = torch.float32 if kv_dtype.itemsize == 2 else sixteen
        self._local.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=q_dtype,
            kv_data_type=kv_dtype,
            o_data_type=partial_dtype,
            **options,
        )
        shape = (indptr.numel() - 1, num_qo_heads, head_dim)
        if self._partials is None or self._partials.key != (shape, partial_dtype):
            self._partials = Partials(shape, partial_dtype, self._ranks, self._local.device)
        self._o_dtype, self._lse_base = o_dtype, lse_base

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of the planned batch over the caches of all ranks. One all-gather.

        Parameters
        ----------
        q : `[batch_size, num_qo_heads, head_dim]`, the same on every rank.
        paged_kv_cache, q_scale, k_scale, v_scale, enable_pdl, kv_cache_sf : as for
            `BatchDecodeWithPagedKVCacheWrapper.run`, of this rank's cache.
        out : written and returned instead of a new tensor: contiguous `[batch_size, num_qo_heads, head_dim]` of the
            planned output dtype, 16-byte aligned.
        lse : written instead of a new tensor: contiguous float32 `[batch_size, num_qo_heads]`. Returned if
            `return_lse`.
        return_lse : return `(out, lse)`. Default False. `run_return_lse` is `run` with True as the default.
        sinks : floating-point `[num_qo_heads]`, natural-log domain, given by every rank: one more term of each
            denominator, which rank 0 adds.

        Returns
        -------
        out `[batch_size, num_qo_heads, head_dim]`, or with `return_lse` the pair of it and the float32 lse
        `[batch_size, num_qo_heads]`. A request without keys on all ranks has out 0 and lse -inf.

        Raises
        ------
        NotPlannedError (no plan yet), and the errors of `BatchDecodeWithPagedKVCacheWrapper.run`. All are raised before
        the exchange; on one rank only, they leave the others waiting.
        """
        partials = self._partials
        if partials is None:
            raise NotPlannedError(f"{type(self).__name__}.plan() must come before run()")
        *rows, head_dim = partials.o.shape
        if out is not None or lse is not None:
            scales = q_scale, k_scale, v_scale
            given = batch_run.RunArguments(q, paged_kv_cache, *scales, out, lse, sinks=sinks, kv_cache_sf=kv_cache_sf)
            batch_run.keep_apart(self._local._planned(), given, paged_kv_cache)
        wanted, element = (out, lse, return_lse), (head_dim, self._o_dtype)
        out, lse = operands.outputs(partials.o, wanted, element, tuple(rows), "batch_size, num_qo_heads")
        checks.contiguous("out", out)
        if sinks is not None:
            checks.shape("sinks", checks.tensor("sinks", sinks), (rows[1],), "[num_qo_heads]")
        self._local.run(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=partials.o,
            lse=partials.lse,
            return_lse=True,
            enable_pdl=enable_pdl,
            sinks=sinks if self._ranks.rank == 0 else None,
            kv_cache_sf=kv_cache_sf,
        )
        partials.exchange()
        partials.merge(out, lse, self._lse_base)
        if not return_lse:
            return out
        assert lse is not None
        return out, lse

    run_return_lse = with_return_lse(run)


def _check_kept(name: str, value: str, before: str) -> None:
    """Refuse what a captured merge would not follow."""
    if value != before:
        raise ArgumentError(f"{name} must stay {before!r} with use_cuda_graph=True, got {value!r}")


def _refuse_positions(
    pos_encoding_mode: Any = "NONE", window_left: Any = -1, q_len_per_req: Any = 1, **others: Any
) -> None:
    """Refuse what depends on the positions of tokens in their request."""
    checks.choice("pos_encoding_mode", pos_encoding_mode, POS_ENCODING_MODES)
    whole = "BatchDecodeWithPagedKVCacheWrapper over a cache that is not sharded"
    refusals = [
        Refusal("sharded decode", feature, "a rank knows its tokens, but not their positions", instead)
        for feature, used, instead in (
            (f"pos_encoding_mode={pos_encoding_mode!r}", pos_encoding_mode != "NONE", "rotated q and k"),
            (f"window_left={window_left!r}", checks.whole("window_left", window_left) >= 0, whole),
            (f"q_len_per_req={q_len_per_req!r}", checks.integer("q_len_per_req", q_len_per_req) != 1, whole),
        )
        if used
    ]
    if refusals:
        raise NotSupported(refusals)


# ---- the exchange


class Partials:
    """Partial outputs and lse of a batch, `o` and `lse` of this rank among those of all.

    A rank's part of the buffer holds fp32 o `[rows, head_dim]` and then lse `[rows]`, rows being tokens and heads, so
    that one all-gather moves both. It is as long as a whole number of rows of o: the merge kernel counts in these.
    """

    @capture.lasting()
    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, ranks: Ranks, device: torch.device) -> None:
        """`shape`: [tokens, heads, head_dim]. `dtype`: of `o`, which is converted where it is not fp32."""
        self.key, self.ranks = (shape, dtype), ranks
        tokens, heads, head_dim = shape
        rows = tokens * heads
        step = rows + -(-rows // head_dim)
        self._gathered = torch.empty(ranks.world_size, step, head_dim, dtype=torch.float32, device=device)
        self._own = self._gathered[ranks.rank]
        self._o_of_all = self._gathered[:, :rows]
        self._lse_of_all = self._gathered.flatten(1)[:, rows * head_dim :][:, :rows]
        # The merge kernel reads lse in steps of rows, too.
        self._dense_lse = torch.empty(ranks.world_size, step, dtype=torch.float32, device=device)[:, :rows]
        self._own_o = self._own[:rows].view(shape)
        self.o = self._own_o if dtype == torch.float32 else torch.empty(shape, dtype=dtype, device=device)
        self.lse = self._lse_of_all[ranks.rank].view(shape[:-1])

    def exchange(self) -> None:
        """Gather the partials of all ranks."""
        if self.o is not self._own_o:
            self._own_o.copy_(self.o)
        if self._gathered.numel():
            self.ranks.all_gather(self._gathered, self._own)

    def merge(self, out: torch.Tensor, lse: torch.Tensor | None, lse_base: str) -> None:
        """Merge what was gathered into contiguous `out` and, unless it is None, `lse`."""
        scale = LN2 if lse_base == "ln" else 1.0
        self._dense_lse.copy_(self._lse_of_all)
        rows = None if lse is None else lse.view(-1)
        if merge.run(self._o_of_all, self._dense_lse, out.view(-1, out.shape[-1]), rows, scale):
            return
        v, s = merge_states(self._o_of_all.transpose(0, 1).unsqueeze(2), self._dense_lse.t().unsqueeze(2))
        out.copy_(v.view(out.shape))
        if lse is not None:
            lse.copy_(s.view(lse.shape) * scale)
