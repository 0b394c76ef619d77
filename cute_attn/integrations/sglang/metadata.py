"""SGLang's batches as cute_attn's arguments: kinds of layers, page tables, masks of drafts. Needs torch alone.

SGLang keeps a slot of its token pool for every token of every request. Slots of a page follow each other, so that the
first slot of each page, divided by the page size, is its page number. All tables are made on the device of the pool
without a synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_attn.integrations.sglang.limits import attn_type_of, soft_cap_of, window_of

WORD_BITS = 32  # of the masks of drafts
Scale = float | torch.Tensor | None  # of keys or values of an fp8 pool; None: 1


class LayerKind(NamedTuple):
    """What layers must share to share a plan."""

    in_window_pool: bool  # of the two pools of a model with sliding windows
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    window_left: int
    soft_cap: float
    causal: bool

    @classmethod
    def of(cls, layer: Any, in_window_pool: bool = False) -> LayerKind:
        """Return the kind of a RadixAttention layer."""
        return cls(
            in_window_pool,
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.qk_head_dim,
            float(layer.scaling),
            window_of(layer),
            soft_cap_of(layer),
            attn_type_of(layer) != "encoder_only",
        )


class PageTables:
    """Reads page numbers out of SGLang's table of slots.

    Parameters
    ----------
    req_to_token : int32 `[requests, max_context]`, the slot of each token of each request.
    page_size : tokens per page.
    translate : None, or the function from slots of the full pool to those of the pool of sliding-window layers.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        page_size: int,
        translate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._first_slots = req_to_token[:, ::page_size]  # a view: rows are read where SGLang writes them
        self.page_size = page_size
        self._translate = translate
        self.max_pages: int = self._first_slots.shape[1]

    def block_tables(
        self, requests: torch.Tensor, num_pages: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int32 `[len(requests), num_pages]`, the pages of each request; entries past its keys are stale.

        `requests`: rows of the table. `num_pages`: default as many as a row can have. `out`: written instead of a new
        tensor.
        """
        first_slots = self._first_slots[:, :num_pages]
        if out is not None and self.page_size == 1 and self._translate is None:
            return torch.index_select(first_slots, 0, requests, out=out)
        return self._pages(first_slots.index_select(0, requests), out)

    def page_indices(self, requests: torch.Tensor, kv_lens: torch.Tensor, num_pages: int) -> torch.Tensor:
        """Return int32 `[num_pages]`, the pages of all requests one after another.

        `kv_lens`: keys of each request, on the table's device. `num_pages`: how many pages these are, so that the
        device need not be asked.
        """
        counts = (kv_lens + (self.page_size - 1)) // self.page_size
        owner = torch.repeat_interleave(counts, output_size=num_pages)
        first = counts.cumsum(0) - counts
        column = torch.arange(num_pages, device=owner.device) - first[owner]
        return self._pages(self._first_slots[requests[owner], column])

    def _pages(self, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._translate is not None:
            slots = self._translate(slots)
        if out is not None:
            return torch.floor_divide(slots, self.page_size, out=out)
        pages = slots if self.page_size == 1 else slots // self.page_size
        return pages.to(torch.int32)


def as_pages(buffer: torch.Tensor, page_size: int, layout: str) -> torch.Tensor:
    """Return a layer's buffer of keys or values as pages, without a copy.

    "NHD": `[slots, heads, head_dim]` becomes `[pages, page_size, heads, head_dim]`; slots past the last whole page hold
    no tokens. "HND": `[pages, heads, page_size, head_dim]` as it is.
    """
    if layout == "HND":
        return buffer
    whole = buffer.shape[0] // page_size * page_size
    return buffer[:whole].unflatten(0, (-1, page_size))


def draft_mask(
    visible: torch.Tensor, seq_lens: torch.Tensor, q_len: int, with_prefix: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Pack which draft tokens see which: int32 `[len(seq_lens) * q_len, ceil(q_len / 32)]`.

    Bit j of a token's row, least significant first, tells whether it sees draft token j of its request.

    Parameters
    ----------
    visible : bool, 1-D: of each request a row for each of its q_len draft tokens, True where it sees a key.
    seq_lens : keys of each request before its draft tokens, on the device of `visible`.
    q_len : draft tokens of every request.
    with_prefix : the rows begin with the seq_len keys before the drafts (SGLang's FULL_MASK), instead of with the
        drafts (QLEN_ONLY).
    out : written instead of a new tensor.

    Requests past those that `visible` has, which pad a batch, get any mask.
    """
    device = visible.device
    before = seq_lens.long() if with_prefix else torch.zeros_like(seq_lens, dtype=torch.int64)
    row_len = before + q_len
    start = (row_len.cumsum(0) - row_len) * q_len
    token = torch.arange(q_len, device=device)
    row = start[:, None] + token * row_len[:, None] + before[:, None]
    cells = (row[:, :, None] + token).clamp_max_(visible.numel() - 1)
    num_words = -(-q_len // WORD_BITS)
    bits = torch.zeros(len(seq_lens) * q_len, num_words * WORD_BITS, dtype=torch.int32, device=device)
    bits[:, :q_len] = visible[cells].view(-1, q_len)
    place = torch.arange(WORD_BITS, dtype=torch.int32, device=device)  # `packbits` has a pass per bit
    words = (bits.view(-1, num_words, WORD_BITS) << place).sum(-1, dtype=torch.int32)
    return words if out is None else out.copy_(words)
