"""How the CTAs of a launch divide its work (`XqaSpec.work`), and what they merge accordingly."""

from typing import Any, NamedTuple

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.xqa.parts.partition import (
    ClusterSegments,
    Load,
    Partition,
    WarpShares,
    WholeSegments,
)
from cute_attn.kernels.xqa.parts.team import HeadWarp, LoneWarp, WarpTeam
from cute_attn.kernels.xqa.parts.tickets import TicketPartition
from cute_attn.kernels.xqa.parts.warp_merge import ClusterMerge, EvenMerge, HeadMerge, WarpMerge, WholeMerge
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import Work, XqaSpec


class Kind(NamedTuple):
    partition: type[Partition]
    merge: type[WarpMerge]
    warp: type[LoneWarp] = LoneWarp  # that has all columns


KINDS: dict[Work, Kind] = {
    "shares": Kind(TicketPartition, WarpMerge),
    "even": Kind(WarpShares, EvenMerge, HeadWarp),
    "whole": Kind(WholeSegments, WholeMerge),
    "heads": Kind(WholeSegments, HeadMerge, HeadWarp),
    "cluster": Kind(ClusterSegments, ClusterMerge),
}


def make_partition(spec: XqaSpec, p: Any, load: Load = ptx.load_word_if) -> Partition:
    # NVFP4, whose warps compute longest: 64 x 8192 took 4 % longer with the same cuts made by `EvenPartition`
    # (H200).
    if spec.work == "shares" and spec.kv_bits == 4:
        return Partition(p, spec, load=load)
    return KINDS[spec.work].partition(p, spec, load=load)


def make_team(spec: XqaSpec, memory: XqaMemory) -> LoneWarp | WarpTeam:
    return WarpTeam(spec, memory) if spec.team > 1 else KINDS[spec.work].warp()
