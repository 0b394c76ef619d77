"""Roles of warps: which rings they fill and read, from which the arrival counts of all barriers follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import RECORDS_RING


@dataclass(frozen=True)
class WarpRole:
    """Warps with one task. `fills`: rings whose slots they fill, with their arrivals at a full barrier; `reads`: rings
    whose slots each of these warps releases with one arrival. Readers of query tiles' records release `RECORDS_RING`,
    even if they do not read its slots.
    """

    name: str
    warps: int
    fills: Mapping[str, int]
    reads: tuple[str, ...] = ()
    reads_records: bool = False

    def releases(self, ring: str) -> bool:
        return ring in self.reads or (ring == RECORDS_RING and self.reads_records)


def full_arrivals(roles: Iterable[WarpRole], ring: str) -> int:
    return sum(role.fills.get(ring, 0) for role in roles)


def empty_arrivals(roles: Iterable[WarpRole], ring: str) -> int:
    return sum(role.warps for role in roles if role.releases(ring))
