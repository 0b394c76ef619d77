"""How the CTAs of a launch divide its work (`XqaSpec.work`), and what they merge accordingly."""

from typing import Any, NamedTuple

from cute_attn.kernels.xqa.parts.cluster_merge import ClusterMerge
from cute_attn.kernels.xqa.parts.even import EvenPartition
from cute_attn.kernels.xqa.parts.head_merge import EvenMerge, HeadMerge
from cute_attn.kernels.xqa.parts.partition import ClusterSegments, Load, Partition, WholeSegments, load_word
from cute_attn.kernels.xqa.parts.team import HeadWarp, LoneWarp, WarpTeam
from cute_attn.kernels.xqa.parts.warp_merge import WarpMerge, WholeMerge
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import Work, XqaSpec


class Kind(NamedTuple):
    partition: type[Partition]
    merge: type[WarpMerge]
    warp: type[LoneWarp] = LoneWarp  # that has all columns


KINDS: dict[Work, Kind] = {
    "shares": Kind(Partition, WarpMerge),
    "even": Kind(EvenPartition, EvenMerge, HeadWarp),
    "whole": Kind(WholeSegments, WholeMerge),
    "heads": Kind(WholeSegments, HeadMerge, HeadWarp),
    "cluster": Kind(ClusterSegments, ClusterMerge),
}


def make_partition(spec: XqaSpec, p: Any, load: Load = load_word) -> Partition:
    return KINDS[spec.work].partition(p, spec, load=load)


def make_team(spec: XqaSpec, memory: XqaMemory) -> LoneWarp | WarpTeam:
    return WarpTeam(spec, memory) if spec.team > 1 else KINDS[spec.work].warp()
