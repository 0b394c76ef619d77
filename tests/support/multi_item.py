"""Random batches of multi-item scoring, and what every query token of them sees as a boolean mask."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Items:
    """Requests of a prefix, and items that each follow a delimiter."""

    prefix_lens: list[int]
    positions: list[list[int]]  # of every token behind the prefix, in its item
    keep: list[torch.Tensor]  # bool [qo_len, kv_len]

    def arguments(self, device: torch.device | str, slack: int = 3) -> dict[str, Any]:
        """Keywords of `plan`; `slack`: padding behind the longest request."""
        stride = max(map(len, self.positions), default=0) + slack
        flat = [t for positions in self.positions for t in positions + [0] * (stride - len(positions))]
        longest = [max(positions, default=0) for positions in self.positions]
        return {
            "prefix_len_ptr": torch.tensor(self.prefix_lens, dtype=torch.int64).to(torch.uint32).to(device),
            "token_pos_in_items_ptr": torch.tensor(flat, dtype=torch.int64).to(torch.uint16).to(device),
            "token_pos_in_items_len": stride,
            "max_item_len_ptr": torch.tensor(longest, dtype=torch.int64).to(torch.uint16).to(device),
        }


def draw(qo_lens: Sequence[int], kv_lens: Sequence[int], longest_item: int, seed: int) -> Items:
    rng = random.Random(seed)
    prefix_lens = [rng.randint(n // 4, n // 2) for n in kv_lens]
    positions = []
    for kv_len, prefix_len in zip(kv_lens, prefix_lens, strict=True):
        found: list[int] = []
        while len(found) < kv_len - prefix_len:
            found += range(rng.randint(1, longest_item) + 1)
        positions.append(found[: kv_len - prefix_len])
    rows = zip(qo_lens, kv_lens, prefix_lens, positions, strict=True)
    return Items(prefix_lens, positions, [visible(*row) for row in rows])


def visible(qo_len: int, kv_len: int, prefix_len: int, positions: Sequence[int]) -> torch.Tensor:
    """Bool [qo_len, kv_len]: items are told apart by counting delimiters, which see the prefix alone, unseen."""
    key = torch.arange(kv_len)
    own = torch.arange(qo_len)[:, None] + kv_len - qo_len
    behind = torch.tensor(list(positions), dtype=torch.int64)[: max(0, kv_len - prefix_len)]
    item = torch.cat((torch.zeros(kv_len - len(behind), dtype=torch.int64), (behind == 0).cumsum(0)))
    delimiter = torch.cat((torch.zeros(kv_len - len(behind), dtype=torch.bool), behind == 0))
    row = own.clamp(min=0).expand(qo_len, kv_len)
    in_own_item = (item[row] == item) & ~delimiter[row] & ~delimiter & (key >= prefix_len)
    return (key <= own) & ((own < prefix_len) | (key < prefix_len) | in_own_item)
