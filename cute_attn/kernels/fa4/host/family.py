"""The tcgen05 kernels as a kernel family."""

from __future__ import annotations

from cute_attn.kernels.blocks.tiles import TileProblem
from cute_attn.kernels.fa4 import tiles
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.host.persistent.family import family
from cute_attn.kernels.host.persistent.variant import PersistentKernels


def choose(arch: str, problem: TileProblem) -> BlackwellTile:
    """Return the tile of a problem. Windows, groups and launches of all sizes have the same. So have modified scores: a
    row's lie in one thread, which has registers for any modification.
    """
    fp8, fp8_kv = problem.operands == "fp8", problem.operands == "fp8_kv"
    return tiles.choose(arch, problem.head_dims, problem.kv, full=problem.full, fp8=fp8, fp8_kv=fp8_kv)


KERNELS: PersistentKernels[BlackwellTile] = PersistentKernels("fa4", Fa4Spec, tiles.page_source, choose)
FAMILY: TiledFamily[BlackwellTile] = family(KERNELS)
