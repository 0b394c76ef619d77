"""Partial results of all ranks: the buffer of their exchange, and their merging."""

from __future__ import annotations

import math

import torch

from cute_attn.cascade import merge_states
from cute_attn.dispatch import merge
from cute_attn.integrations.distributed.ranks import Ranks
from cute_attn.runtime import capture

LN2 = math.log(2)


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
