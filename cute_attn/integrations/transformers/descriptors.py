"""What the mask function hands to the layers of one type: a 4-D tensor that says which keys each request sees.

Models, `generate` and compiled graphs pass masks on as 4-D tensors and do not look into them, so the whole description
is in the tensor's values. Three kinds, told apart by dtype and shape:

- `Rows`: int32 `[1, 1, 1 + n, 5]` on the CPU. Runs of query rows, each over a range of keys; lengths for a plan.
- `Decode`: int32 `[batch * (1 + width), 1, 1, 1]` on the model's device. One query token per request: its number of
  visible keys, then with width > 1 their indices, with width 1 the request's number: it sees the first keys.
- an exact mask, boolean or additive, `[batch or 1, 1, q_len, kv_len]`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError

FIELDS = 5
MEMO = "_cute_attn"  # attribute of a mask: its `Memo`
MARK = -0x5EE  # of a `Rows`, in a place where an integer mask of a caller has 0 or 1
HIDDEN = -1e4  # transformers adds the dtype's least number, -65504 in float16


class Memo(NamedTuple):
    """What the first layer of a forward pass computed from a tensor's values."""

    version: int
    found: dict[Hashable, Any]
    readers: set[Hashable]  # layers that have read it
    ours: bool = False  # made by the mask function: nobody else changes the values


def version(tensor: torch.Tensor) -> int:
    """Return torch's count of changes, which inference tensors do not have."""
    return 0 if tensor.is_inference() else tensor._version


def renewed(tensor: torch.Tensor, ours: bool = False) -> Memo:
    """Forget what is kept on a tensor. `ours`: layers may keep on it what they compute, as nobody else changes it."""
    memo = Memo(version(tensor), {}, set(), ours)
    setattr(tensor, MEMO, memo)
    return memo


def renew(tensor: torch.Tensor, module: torch.nn.Module) -> None:
    """Forget what is kept on a tensor of the caller where a layer reads it again, which begins a forward pass.

    Between passes the values may change without torch's count of changes: through numpy, or `tensor.data`.
    """
    memo: Memo | None = getattr(tensor, MEMO, None)
    if tensor.is_inference() or (memo is not None and memo.ours):
        return  # nothing is kept on it, or it is no caller's
    index = getattr(module, "layer_idx", None)
    reader = id(module) if index is None else ("layer", index)
    if memo is None or reader in memo.readers or memo.version != tensor._version:
        memo = renewed(tensor)
    memo.readers.add(reader)


class Run(NamedTuple):
    """Query rows `q_start:q_start + q_len` of `[batch * q_len]` over keys `kv_start:kv_start + kv_len` of a request."""

    q_start: int
    q_len: int
    request: int
    kv_start: int
    kv_len: int


class Rows(NamedTuple):
    """Runs of query rows that cover all rows in order. The last query of a causal run is at its last key."""

    causal: bool
    window_left: int  # -1: no window
    runs: tuple[Run, ...]

    def pack(self) -> torch.Tensor:
        """Return the descriptor."""
        head = (int(self.causal), self.window_left, 0, 0, MARK)
        return torch.tensor([head, *self.runs], dtype=torch.int32, device="cpu").view(1, 1, -1, FIELDS)

    @classmethod
    def unpack(cls, mask: torch.Tensor) -> Rows:
        """Return what `pack` was given."""
        head, *runs = mask[0, 0].tolist()
        if head[4] != MARK:
            raise ArgumentError("attention_mask of dtype int32 must be one that cute_attn made: pass a boolean mask")
        return cls(bool(head[0]), head[1], tuple(map(Run._make, runs)))


@functools.lru_cache(16)
def whole(batch_size: int, q_len: int, kv_lens: tuple[int, ...], causal: bool, window_left: int) -> Rows:
    """Return requests that each see their first keys."""
    runs = tuple(Run(b * q_len, q_len, b, 0, kv_len) for b, kv_len in zip(range(batch_size), kv_lens, strict=True))
    return Rows(causal, window_left, runs)


def is_rows(mask: torch.Tensor) -> bool:
    """Tell whether a mask describes runs of query rows."""
    return mask.dtype == torch.int32 and mask.shape[:2] == (1, 1) and mask.shape[2] > 1 and mask.shape[3] == FIELDS


def is_decode(mask: torch.Tensor) -> bool:
    """Tell whether a mask describes one query token per request."""
    return mask.dtype == torch.int32 and mask.shape[0] > 1 and mask.shape[1:] == (1, 1, 1)


def decode_of_lengths(kv_lens: torch.Tensor) -> torch.Tensor:
    """Return the descriptor of requests that see their first `kv_lens` `[batch]` keys."""
    requests = torch.arange(kv_lens.shape[0], dtype=torch.int32, device=kv_lens.device)
    return torch.cat((kv_lens.to(torch.int32), requests)).view(-1, 1, 1, 1)


def decode_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the descriptor of a boolean mask `[batch, kv_len]`: the indices of its keys, in order."""
    kv_len = mask.shape[1]
    if kv_len == 1:  # a table of this width would be taken for the requests' numbers
        return decode_of_lengths(mask[:, 0])
    places = mask.cumsum(1)
    table = torch.zeros(mask.shape[0], kv_len + 1, dtype=torch.int32, device=mask.device)
    indices = torch.arange(kv_len, dtype=torch.int32, device=mask.device).expand_as(mask)
    table = table.scatter(
        1, torch.where(mask, places - 1, kv_len), indices
    )  # hidden keys go to the column past the end
    return torch.cat((places[:, -1].to(torch.int32), table[:, :-1].reshape(-1))).view(-1, 1, 1, 1)


def split_decode(mask: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key counts `[batch]` and the table `[batch, width]` of a decode descriptor."""
    flat = mask.detach().reshape(-1)  # kept on a mask of which they are views, they would never be freed
    return flat[:batch_size], flat[batch_size:].view(batch_size, -1)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Return an exact mask as boolean. An additive one may hold 0 (seen) and what no score outweighs (hidden)."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        return mask != 0
    seen = mask == 0
    if not bool((seen | (mask <= HIDDEN)).all()):
        raise ArgumentError(
            f"attention_mask may add 0 or numbers <= {HIDDEN:g} to scores, got others: the kernels add no bias. "
            'Use attn_implementation="eager"'
        )
    return seen
