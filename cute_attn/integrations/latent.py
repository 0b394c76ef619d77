"""Latent attention (MLA) as engines compute it: decodes with absorbed queries over a paged latent cache, and prefills
over decompressed keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_attn.integrations.step_plans import StepPlans
from cute_attn.prefill import BatchPrefillWithRaggedKVCacheWrapper
from cute_attn.request import checks
from cute_attn.request.mla import LATENT, NARROW, OF_CACHE, ROPE, MlaCall, MlaLengths
from cute_attn.wrappers import mla

NAMES = OF_CACHE | {"kv_indices": "block_table", "kv_len_arr": "seq_lens", "qo_indptr": "query_start_loc"}
DIMS = (LATENT, ROPE)


class LatentDecodes(NamedTuple):
    """The decodes of a step: tensors are the engine's, on the device. Nothing is planned."""

    num_tokens: int  # rows of the queries; others are padding
    q_len: int  # query tokens of every request, or with `starts` the most of any
    block_table: torch.Tensor  # int32 [num_reqs, width]
    seq_lens: torch.Tensor  # int32 [num_reqs]: keys of this rank, those of the step included
    starts: torch.Tensor | None  # int32 [num_reqs + 1], where the query tokens of each request begin
    workspace: torch.Tensor
    backend: str = "auto"


def decode(
    query: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    step: LatentDecodes,
    scale: float,
    cache_scale: float | torch.Tensor = 1.0,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the attention of a step's decodes, causal within the query tokens of a request.

    Parameters
    ----------
    query : absorbed queries `[tokens, heads, 576]`, or the pair of their parts, `[..., 512]` and `[..., 64]`. Rows past
        those of the requests are padding.
    cache : `[blocks, block_size, 576]` of the queries' dtype or e4m3, also viewed as bytes.
    step : the step's decodes.
    scale : of the softmax.
    cache_scale : what an e4m3 cache is multiplied by.
    return_lse : also return lse, natural-log domain. It is that of the keys of this rank.
    out : written and returned instead of a new tensor.

    Returns
    -------
    out `[tokens, heads, 512]`, 0 in rows of padding, and lse `[tokens, heads]` or None.
    """
    q, q_pe = query if isinstance(query, tuple) else (query, None)
    if cache.dtype == torch.uint8:
        cache = cache.view(NARROW)
    factor = cache_scale if cache.dtype == NARROW else 1.0
    used, lengths = step.num_tokens, MlaLengths(step.starts, None, step.block_table, step.seq_lens, step.q_len)
    all_out = out = q.new_empty((*q.shape[:2], LATENT)) if out is None else out
    all_lse = lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    if used < q.shape[0]:
        out[used:].zero_()
        q, out = q[:used], out[:used]
        q_pe, lse = (None if x is None else x[:used] for x in (q_pe, lse))
    call = MlaCall(
        q, q_pe, cache, None, None, out, lse, step.workspace, lengths.read, scale * factor, factor, None, True,
        return_lse, lse_base="ln",
    )  # fmt: skip
    repeatable, found = mla.repeated(call, (lengths.qo_len,), ("engine", step.backend))
    if found is None:
        queries = q.split(DIMS, dim=-1) if q_pe is None else (q, q_pe)
        call = call.in_parts(*queries, *cache.split(DIMS, dim=-1))
        with checks.renamed(NAMES):
            mla.run(call, lengths, step.backend, repeatable)
    return all_out, all_lse


class LatentPrefills:
    """Attention of prefills over decompressed keys and values: a plan for the new tokens of a step, and one for each
    chunk of context that vLLM has gathered from the cache. The first layer of a step makes them.

    `workspace`: for partial results of all plans, which run one after the other.
    """

    def __init__(self, workspace: torch.Tensor) -> None:
        self._plans = StepPlans(lambda _: BatchPrefillWithRaggedKVCacheWrapper(workspace))

    def run(
        self,
        starts: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float,
        out: torch.Tensor | None,
        return_lse: bool = False,
        chunk: Any = None,
    ) -> Any:
        """Compute attention over new tokens, causal, or over a chunk of their context, all of which they see.

        Parameters
        ----------
        starts : int32 `[num_reqs + 1]` on the host, where the new tokens of each request begin. The same tensor in all
            layers of a step.
        rows : q, k `[tokens, heads, head_dim_qk]` and v `[tokens, heads, head_dim_vo]`; any strides.
        scale : of the softmax.
        out : written and returned, or None.
        return_lse : return the pair of out and lse, `[heads, tokens]`, natural-log domain.
        chunk : vLLM's description of a chunk, whose arrays are on the device; None: the new tokens.
        """
        q, k, v = rows
        sizes = q.shape[1], k.shape[1], q.shape[2], v.shape[2]

        def plan(wrapper: Any) -> None:
            bounds = (starts, starts) if chunk is None else (chunk.query_start_loc, chunk.cu_seq_lens)
            options = {"causal": chunk is None, "sm_scale": scale, "q_data_type": q.dtype, "lse_base": "ln"}
            wrapper.plan(*bounds, *sizes, **options)

        wrapper = self._plans.of((sizes, scale, None if chunk is None else chunk.index), starts, plan)
        if not return_lse:
            return wrapper.run(q, k, v, out=out)
        found, lse = wrapper.run(q, k, v, out=out, return_lse=True)
        return found, lse.t().contiguous()  # vLLM merges by rows of heads
