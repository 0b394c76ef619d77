"""Latent attention (MLA) of SGLang's models: over rows of its pool with absorbed queries, and of prompts over keys and
values that the model has decompressed. Needs torch alone.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from cute_attn.integrations import workspaces
from cute_attn.integrations.sglang.metadata import LayerKind, Scale
from cute_attn.integrations.sglang.tables import TableStep
from cute_attn.integrations.step_plans import StepPlans
from cute_attn.mla import trtllm_batch_decode_with_kv_cache_mla
from cute_attn.prefill import BatchPrefillWithRaggedKVCacheWrapper
from cute_attn.request.index_arrays import bounds, int32
from cute_attn.request.mla import LATENT, ROPE

NOPE = 128  # columns of keys before absorption, which change nothing


def extended(step: TableStep, q_lens: list[int]) -> TableStep:
    """Return a batch as one of extends. `q_lens`: new tokens of each request, which its `seq_lens` count."""
    starts = int32(bounds(np.asarray(q_lens, np.int64)))
    on_device = starts
    if step.seq_lens.is_cuda:
        on_device = starts.pin_memory().to(step.seq_lens.device, non_blocking=True)
    return step._replace(q_len=max(q_lens), starts=on_device, starts_cpu=starts)


class LatentAttention:
    """Attention of batches of a model.

    Parameters
    ----------
    device : of the pool.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._workspace = torch.empty(workspaces.BYTES, dtype=torch.uint8, device=device)
        self._prompts = StepPlans(lambda _: BatchPrefillWithRaggedKVCacheWrapper(self._workspace))

    def run_rows(
        self, step: TableStep, kind: LayerKind, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, scale: Scale
    ) -> None:
        """Compute attention over the pool's rows into `out`, `[num_tokens, heads, 512]`.

        `q`: absorbed queries `[num_tokens, heads, 576]`. `cache`: `[pages, page_size, 576]`. `scale`: what rows of 8
        bits are multiplied by; None: 1.
        """
        of_queries: dict[str, Any] = {}
        if step.starts is None:
            q, out = (x.unflatten(0, (-1, step.q_len)) for x in (q, out))
        else:
            of_queries = {"cum_seq_lens_q": step.starts, "max_q_len": step.q_len}
        trtllm_batch_decode_with_kv_cache_mla(
            q,
            cache,
            self._workspace,
            NOPE,
            LATENT,
            ROPE,
            step.tables[0],
            step.seq_lens,
            step.tables[0].shape[1] * cache.shape[1],
            out=out,
            bmm1_scale=kind.sm_scale if scale is None else kind.sm_scale * scale,
            bmm2_scale=1.0 if scale is None else scale,
            **of_queries,
        )

    def run_new(
        self, step: TableStep, kind: LayerKind, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        """Compute causal attention of a batch of prompts over their own keys and values into `out`.

        `rows`: q and k `[num_tokens, heads, 192]`, v `[num_tokens, heads, 128]`. The first layer of a step plans.
        """
        starts, (q, k, v), heads = step.starts_cpu, rows, kind.num_qo_heads
        assert starts is not None, "SGLang decompresses keys in extends only"
        options = {"causal": True, "sm_scale": kind.sm_scale, "q_data_type": q.dtype}
        plan = operator.methodcaller("plan", starts, starts, heads, heads, q.shape[-1], v.shape[-1], **options)
        self._prompts.of(kind, step, plan).run(q, k, v, out=out)
