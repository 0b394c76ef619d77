"""Latent attention (MLA) of SGLang's models: over rows of its pool with absorbed queries, and of prompts over keys and
values that the model has decompressed. Needs torch alone.
"""

from __future__ import annotations

import numpy as np
import torch

from cute_attn.integrations import latent, workspaces
from cute_attn.integrations.latent import LatentDecodes, LatentPrefills
from cute_attn.integrations.sglang.metadata import LayerKind, Scale
from cute_attn.integrations.sglang.steps import TableStep
from cute_attn.request.index_arrays import bounds, int32


def extended(step: TableStep, q_lens: list[int]) -> TableStep:
    """Return a batch as one of extends. `q_lens`: new tokens of each request, which its `seq_lens` count."""
    starts = int32(bounds(np.asarray(q_lens, np.int64)))
    on_device = starts
    if step.seq_lens.is_cuda:
        on_device = starts.pin_memory().to(step.seq_lens.device, non_blocking=True)
    return step._replace(q_len=max(q_lens), starts=on_device, starts_cpu=starts)


class LatentAttention:
    """Attention of batches of a model. `device`: of the pool."""

    def __init__(self, device: torch.device | str) -> None:
        self._workspace = torch.empty(workspaces.BYTES, dtype=torch.uint8, device=device)
        self._prefills = LatentPrefills(self._workspace)

    def run_rows(
        self, step: TableStep, kind: LayerKind, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, scale: Scale
    ) -> None:
        """Compute attention over the pool's rows into `out`, `[num_tokens, heads, 512]`.

        `q`: absorbed queries `[num_tokens, heads, 576]`. `cache`: `[pages, page_size, 576]`. `scale`: what rows of 8
        bits are multiplied by; None: 1.
        """
        where = step.tables[0], step.seq_lens, step.starts
        decodes = LatentDecodes(step.num_tokens, step.q_len, *where, self._workspace)
        latent.decode(q, cache, decodes, kind.sm_scale, 1.0 if scale is None else scale, out=out)

    def run_new(
        self, step: TableStep, kind: LayerKind, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        """Compute causal attention of a batch of prompts over their own keys and values into `out`.

        `rows`: q and k `[num_tokens, heads, 192]`, v `[num_tokens, heads, 128]`. The first layer of a step plans.
        """
        assert step.starts_cpu is not None, "SGLang decompresses keys in extends only"
        self._prefills.run(step.starts_cpu, rows, kind.sm_scale, out)
