"""The ranks of a process group, and collectives over bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.request import checks


class Ranks(NamedTuple):
    """A process group and the place of this process in it."""

    group: Any  # None: all ranks
    rank: int
    world_size: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Return the ranks of `group`; None stands for all. Raises for a process that is not among them."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                f"group={checks.shown(group)} needs torch.distributed: call torch.distributed.init_process_group first"
            )
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` returns to those who are not in it
            raise ArgumentError(f"group must contain this process (rank {dist.get_rank()}), which it does not")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ArgumentTypeError(f"group must be a torch.distributed.ProcessGroup, got {checks.describe(group)}")
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def peer(self, rank: int) -> int:
        """Return the global rank of a member, whose rank in the group is taken modulo the world size."""
        rank %= self.world_size
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """Gather the contiguous `own` of every rank into `gathered`, in order of ranks."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(raw(gathered).view(-1), raw(own).view(-1), group=self.group)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_sizes: Sequence[int], send_sizes: Sequence[int]
    ) -> None:
        """Exchange slices of the first axis: `send_sizes[i]` rows go to rank i, `receive_sizes[i]` come from it."""
        dist.all_to_all_single(raw(received), raw(sent), list(receive_sizes), list(send_sizes), group=self.group)


def check_tokens(name: str, x: Any) -> None:
    """Check the axes of tokens that a rank holds."""
    if checks.tensor(name, x).dim() != 3:
        raise ArgumentError(f"{name} must have shape [tokens, num_heads, head_dim], got {checks.describe(x)}")


def raw(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes on its last axis: the same for every dtype and transport."""
    return x if x.dtype == torch.uint8 else x.view(torch.uint8)
