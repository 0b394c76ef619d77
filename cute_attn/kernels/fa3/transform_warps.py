"""Hopper kernels whose operands are not what TMA brings: warps beside the producer's make them.

producer     K0 Q V0 K1 V1 ...              (rings of arriving tiles, or the operands' own)
helpers         K0' K1' V0' K2' V1' ...     (rings of operands)
math groups         S0 | S1 + O(P0 V0') ...
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.pipeline import Place, start
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Params, Fa3Program, Maps
from cute_attn.kernels.fa3.parts.rings import Shared


class HelpedProgram(Fa3Program):
    def work(self, warp: Int32, lane: Int32) -> Any:
        """What a helper does."""
        raise NotImplementedError

    def help(self, shared: Shared, work: Any, at: Any, total: Int32, valid: Int32) -> Any:
        """Makes the operands of `total` kv tiles, of the first of which `valid` keys exist; where the next are."""
        raise NotImplementedError

    def first_place(self) -> Any:
        return start()

    @property
    def helpers(self) -> int:
        """Warps: the rest of the producer's warpgroup, then the last one."""
        return self.spec.tile.helpers

    def initialise(self, shared: Shared) -> None:
        warps = self.math_threads // 32
        shared.q.initialise(warps + self.helpers)
        shared.k.initialise(warps)
        shared.v.initialise(warps)
        for arriving, ring in ((shared.arriving_k, shared.k), (shared.arriving_v, shared.v)):
            if arriving is not ring:
                arriving.initialise(self.helpers)

    @cute.jit
    def feed(self, params: Fa3Params, maps: Maps, shared: Shared, thread: Int32) -> None:
        if thread < 32:
            self.produce(params, maps, shared)
        else:
            self.assist(params, shared, thread - 32)

    @cute.jit
    def compute(self, params: Fa3Params, shared: Shared, thread: Int32) -> None:
        if cutlass.const_expr(self.helpers == 3):
            self.do_math(params, shared)
        else:
            if thread < 128 + self.math_threads:
                self.do_math(params, shared)
            else:
                sm90.release_registers(self.spec.registers[0])
                self.assist(params, shared, thread - (32 + self.math_threads))

    @cute.jit
    def assist(self, p: Fa3Params, shared: Shared, thread: Int32) -> None:
        """The kv tiles of all query tiles, in the order of their arrival. `thread`: of the helpers."""
        lane = thread & 31
        work = self.work(cute.arch.make_warp_uniform(thread >> 5), lane)
        q, at = start(), self.first_place()
        head_block = self.next_tile(shared, q)
        while head_block >= 0:
            query = QueryTile.load(shared.record(q))
            order = self.order(p, query)
            shared.q.release(q, lane)
            valid = query.kv_end - (order.end - 1) * self.spec.tile.cols  # of the tile that comes first
            at = self.help(shared, work, at, order.total, valid)
            q = shared.q.next(q)
            head_block = self.next_tile(shared, q)

    @cute.jit
    def made(self, barriers: cutlass.Constexpr, lane: Int32) -> None:
        """This warp's part of an operand is there, and what it was made of is read: says so at the barriers."""
        sm90.fence_async()
        ptx.sync_warp()
        if lane == 0:
            for i in cutlass.range_constexpr(len(barriers)):
                sm90.barrier_arrive(barriers[i])

    @cute.jit
    def clear_tail(self, shared: Shared, math: cutlass.Constexpr, first: Place) -> None:
        """The helpers have done it."""
