"""CTAs, clusters and the grid: the state of a launch, and the order in which warp batches take turns. `launch` is the
entry point of the emulator.
"""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from cute_attn.emulator.clocks import Clocks
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import Deadlock, LaunchFault, PtxError
from cute_attn.emulator.isa.order import Message
from cute_attn.emulator.memory import GENERIC_PARAM, RANK_SHIFT, SHARED_START, GlobalMemory, SharedMemory
from cute_attn.emulator.program import Block, Program, program
from cute_attn.emulator.schedule import Schedule
from cute_attn.emulator.timeline import Event, Recorder
from cute_attn.emulator.warp_batch import WarpBatch

T = TypeVar("T")
Dim3 = tuple[int, int, int]

SM_REGISTERS = 65536
SMEM_LIMITS = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}


@dataclass
class Stats:
    """Counts and events of a launch."""

    instructions: collections.Counter[str] = field(default_factory=collections.Counter)
    warp_instructions: int = 0
    blocks: collections.Counter[int] = field(default_factory=collections.Counter)
    cycles: float = 0.0  # virtual
    events: list[Event] = field(default_factory=list)


class Cta:
    """One CTA: its shared memory, barriers, asynchronous work and warp batches."""

    def __init__(self, cluster: Cluster, index: Dim3, rank: int) -> None:
        grid = cluster.grid
        self.cluster, self.grid, self.index, self.rank = cluster, grid, index, rank
        self.clocks = cluster.clocks
        self.num_warps = grid.num_warps
        self.first_agent: int = 1 + rank * self.num_warps
        self.smem = SharedMemory(grid.smem_end, self.clocks, grid.checks)
        self.barriers: dict[int, Any] = {}  # named barriers
        self.pending: dict[str, collections.deque[Callable[[], None]]] = {}  # asynchronous work by queue
        self.posted = 0
        self.mbarriers: dict[int, Any] = {}  # by offset
        self.units: dict[str, Any] = {}  # state of optional units, by name
        self.closing: list[Callable[[], None]] = []  # checks to run when its last warp has ended
        self.batches: list[WarpBatch] = []  # also those that have ended: no other may take their places in the timeline
        self.running: dict[int, tuple[WarpBatch, Iterator[None]]] = {}
        warps = np.arange(self.num_warps)
        together = warps[:, None] if grid.schedule.warps_apart else warps[None]
        self.adopt([WarpBatch(self, rows, list(grid.initial_registers)) for rows in together])

    def unit(self, name: str, make: Callable[[], T], check: Callable[[T], None] | None = None) -> T:
        """State of an optional unit, made at its first use. `check` is called when the last warp has ended."""
        found: T | None = self.units.get(name)
        if found is None:
            found = self.units[name] = make()
            if check is not None:
                self.closing.append(functools.partial(check, found))
        return found

    def adopt(self, batches: list[WarpBatch]) -> None:
        """Add new batches."""
        for batch in batches:
            self.batches.append(batch)
            self.running[id(batch)] = (batch, batch.run())

    def post(self, action: Callable[[], None], queue: str = "") -> None:
        """Run asynchronous work at once, or queue it until the schedule completes it. A named queue keeps its order."""
        if self.grid.schedule.kind == "eager":
            action()
            return
        self.posted += 1
        self.pending.setdefault(queue or f"#{self.posted}", collections.deque()).append(action)

    def symbol(self, name: str) -> Array:
        """Address of a shared variable, or of a kernel parameter."""
        found = self.grid.shared_offsets.get(name)
        if found is not None:
            return np.array([found | (self.rank << RANK_SHIFT)], np.uint64)
        number = self.grid.program.param_index.get(name)
        if number is None:
            raise PtxError(f"unknown name {name!r}")
        return np.array([GENERIC_PARAM | self.grid.param_offsets[number]], np.uint64)

    def special(self, name: str, batch: WarpBatch) -> Array:
        """Value of a special register, as u4."""
        axis = {"x": 0, "y": 1, "z": 2}.get(name[-1], 0) if "." in name else 0
        base = name.split(".")[0]
        if base == "%tid":
            x, y, _ = self.grid.block
            thread = (batch.warps[:, None] * 32 + np.arange(32)).ravel()
            parts = (thread % x, thread // x % y, thread // (x * y))
            return parts[axis].astype(np.uint32)
        if base == "%laneid":
            return batch.lane.astype(np.uint32)
        values: dict[str, int] = {
            "%ntid": self.grid.block[axis],
            "%ctaid": self.index[axis],
            "%nctaid": self.grid.grid[axis],
            "%cluster_ctarank": self.rank,
            "%clusterid": self.index[axis] // self.grid.cluster[axis],
        }
        if base not in values:
            raise PtxError(f"the emulator does not know the special register {name}")
        return np.array([values[base]], np.uint32)


class Cluster:
    """CTAs that can access each other's shared memory. A launch without clusters has clusters of one CTA."""

    def __init__(self, grid: Grid, number: int, origin: Dim3) -> None:
        self.grid, self.number = grid, number
        size = int(np.prod(grid.cluster))
        self.lax = grid.program.uses_tensor_memory and not grid.strict  # barriers alone order tensor memory
        fences = grid.program.uses_tensor_memory and not self.lax
        self.clocks = Clocks(size * grid.num_warps, grid.dependent, fences)
        self.barrier: Any = None  # barrier.cluster
        self.cross: dict[int, dict[int, int]] = {}  # warp -> epochs seen of warps of other clusters
        cx, cy, _ = grid.cluster
        self.ctas = []
        for rank in range(size):
            step = (rank % cx, rank // cx % cy, rank // (cx * cy))
            index = (origin[0] + step[0], origin[1] + step[1], origin[2] + step[2])
            self.ctas.append(Cta(self, index, rank))


JOIN_INTERVAL = 40  # rounds after which another cluster starts: a running one may be waiting for it


class Grid:
    """State of one launch. Options: those of `launch`."""

    def __init__(
        self,
        program: Program,
        launch: dict[str, Any],
        memory: GlobalMemory,
        *,
        checks: bool,
        schedule: Schedule,
        events: bool,
        strict: bool,
    ) -> None:
        self.program, self.memory = program, memory
        self.checks, self.schedule, self.strict = checks, schedule, strict
        self.recorder = Recorder() if events else None
        self._waiting: Iterator[tuple[int, Dim3]] = self._origins()
        self.cta_group = 0  # of the tcgen05 instructions, set by the first one
        self.grid: Dim3 = launch["grid"]
        self.block: Dim3 = launch["block"]
        self.cluster: Dim3 = launch.get("cluster", (1, 1, 1))
        self.smem_bytes: int = launch["smem_bytes"]
        self.params: bytes = launch["params"]
        self.param_offsets: list[int] = list(launch.get("param_offsets", program.param_offsets()))
        self.dependent = bool(launch.get("pdl"))
        self.num_warps = -(-int(np.prod(self.block)) // 32)
        self.registers = self._registers(launch.get("registers"))
        self.released: dict[int, list[Message]] = {}  # by address in global memory
        self.tensor_maps: dict[int, Any] = {}  # decoded, by address
        self.rng = random.Random(self.schedule.seed)
        self.slice = 20 if self.schedule.warps_apart else 400
        self.stats = Stats()
        self.home_dtypes = {h: program.names[h] for h in set(program.homes)}
        # Of all batches: no array of a register is ever changed.
        self.initial_registers = [np.zeros(1, self.home_dtypes[h]) for h in program.homes]
        self._param_words: dict[tuple[int, str], Array] = {}
        self._check()
        self._lay_out_shared()

    def _registers(self, compiled: int | None) -> int:
        """Registers of a thread at launch, as they are allocated: in eights. Where the launch does not say, those of
        .maxnreg, or as many as ptxas gives a kernel of this block."""
        threads = 32 * self.num_warps
        if compiled is None:
            wanted = self.program.kernel.directives.get("maxnreg")
            compiled = min(SM_REGISTERS // threads // 8 * 8, 255) if wanted is None else int(wanted)
        registers = -(-compiled // 8) * 8
        if registers * threads > SM_REGISTERS:
            raise LaunchFault(f"{threads} threads of {registers} registers: an SM has {SM_REGISTERS} registers")
        return registers

    def _check(self) -> None:
        threads, kinds = int(np.prod(self.block)), self.program.kernel.params
        if threads % 32:
            raise LaunchFault(f"block {self.block} is no multiple of 32 threads")
        if threads > 1024:
            raise LaunchFault(f"block {self.block} has more than 1024 threads")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise LaunchFault(f"grid {self.grid} is no multiple of the cluster {self.cluster}")
        if len(kinds) != len(self.param_offsets):
            raise LaunchFault(f"{len(self.param_offsets)} parameters, the kernel takes {len(kinds)}")
        if kinds and len(self.params) < self.param_offsets[-1] + kinds[-1].nbytes:
            raise LaunchFault(f"{len(self.params)} bytes of parameters are too few")
        asked = tuple(map(int, self.program.kernel.directives.get("reqntid", "0").split(",")))
        if asked != (0,) and asked + (1,) * (3 - len(asked)) != self.block:
            raise LaunchFault(f"block {self.block}, the kernel requires {asked}")

    def _lay_out_shared(self) -> None:
        self.shared_offsets, end, dynamic = {}, SHARED_START, []
        for variable in self.program.kernel.shared:
            if variable.nbytes == 0:
                dynamic.append(variable)
                continue
            end = -(-end // variable.align) * variable.align
            self.shared_offsets[variable.name] = end
            end += variable.nbytes
        start = -(-end // 1024) * 1024 if self.smem_bytes else end
        for variable in dynamic:
            self.shared_offsets[variable.name] = start
        self.smem_end = start + self.smem_bytes
        limit = SMEM_LIMITS[self.program.arch]
        if (end - SHARED_START) + self.smem_bytes > limit:
            raise LaunchFault(f"{end - SHARED_START} + {self.smem_bytes} bytes of shared memory, a CTA has {limit}")

    def param(self, number: int, offset: int, dtype: Any) -> Array:
        """Read a word of a kernel parameter."""
        start = self.param_offsets[number] + offset
        found = self._param_words.get((start, dtype.str))
        if found is None:
            found = np.frombuffer(self.params, dtype, 1, start)
            self._param_words[start, dtype.str] = found
        return found

    def home_of(self, register: int) -> Any:
        """The numpy type that holds a register."""
        return self.home_dtypes[self.program.homes[register]]

    def count(self, batch: WarpBatch, block: Block) -> None:
        self.stats.blocks[block.index] += len(batch.warps)
        batch.cta.clocks.time[batch.clock_rows] += block.count

    def _origins(self) -> Iterator[tuple[int, Dim3]]:
        """Yield number and first CTA of every cluster."""
        counts = [g // c for g, c in zip(self.grid, self.cluster, strict=True)]
        for number in range(int(np.prod(counts))):
            x, y, z = number % counts[0], number // counts[0] % counts[1], number // (counts[0] * counts[1])
            yield number, (x * self.cluster[0], y * self.cluster[1], z * self.cluster[2])

    def cancel(self) -> Dim3 | None:
        """Cancel the next cluster that has not started; returns its first CTA, or None."""
        found = next(self._waiting, None)
        return None if found is None else found[1]

    def run(self) -> Stats:
        """Run all clusters. They start in order; another one starts when those that run cannot make progress."""
        resident: list[Cluster] = []
        exhausted, rounds = False, 0
        while resident or not exhausted:
            rounds += 1
            if not exhausted and (not self._turn_all(resident) or rounds % JOIN_INTERVAL == 0):
                following = next(self._waiting, None)
                if following is None:
                    exhausted = True
                else:
                    resident.append(Cluster(self, *following))
            elif exhausted and resident and not self._turn_all(resident):
                self._starve(resident)
            resident = [c for c in resident if any(cta.running for cta in c.ctas)]
        self._tally()
        if self.recorder is not None:
            self.stats.events = self.recorder.events
        return self.stats

    def _turn_all(self, resident: list[Cluster]) -> bool:
        return any([self._turn(cluster) for cluster in resident])  # noqa: C419 (each must have its turn)

    def _turn(self, cluster: Cluster) -> bool:
        """Run every batch of a cluster until it yields. Returns whether any made progress."""
        moved, last = False, []
        for cta in cluster.ctas:
            entries = list(cta.running.values())
            if self.schedule.warps_apart:
                self.rng.shuffle(entries)
            for batch, steps in entries:
                if self.schedule.kind == "lagging" and batch.agents[0] == 1 + self.schedule.seed:
                    last.append((batch, steps))
                else:
                    moved = self._step(batch, steps) or moved
            moved = self.complete(cta) or moved
        for batch, steps in last if not moved else ():
            moved = self._step(batch, steps)
        return moved

    def _step(self, batch: WarpBatch, steps: Iterator[None]) -> bool:
        """Run a batch until it yields. Returns whether it made progress."""
        before = batch.wait, batch.spinning
        if next(steps, self) is self:
            del batch.cta.running[id(batch)]
            self._leave(batch)
            return True
        return (batch.wait is None and not batch.spinning) or (batch.wait, batch.spinning) != before

    def complete(self, cta: Cta) -> bool:
        """Complete one piece of a CTA's asynchronous work, chosen by the schedule. Returns whether there was one."""
        if not cta.pending:
            return False
        name = self.rng.choice(list(cta.pending))
        cta.pending[name].popleft()()
        if not cta.pending[name]:
            del cta.pending[name]
        return True

    def _leave(self, batch: WarpBatch) -> None:
        if not batch.cta.running:
            for check in batch.cta.closing:
                check()
        self.stats.cycles = max(self.stats.cycles, float(batch.cta.clocks.time[batch.agents].max()))

    def _starve(self, resident: list[Cluster]) -> None:
        lines = []
        for cluster in resident:
            for cta in cluster.ctas:
                for batch, _ in cta.running.values():
                    what = batch.wait.what if batch.wait is not None else batch.spinning
                    block = self.program.blocks[batch.pc if batch.pcs is None else int(batch.pcs[batch.pcs >= 0].min())]
                    inst = block.insts[0][0]
                    warps = ",".join(map(str, batch.warps))
                    lines.append(f"  CTA {cta.index} warps {warps}: {what}; next PTX line {inst.line}: {inst.text}")
        raise Deadlock("nothing can move:\n" + "\n".join(lines))

    def _tally(self) -> None:
        for index, times in self.stats.blocks.items():
            for inst, _, _ in self.program.blocks[index].insts:
                self.stats.instructions[inst.op] += times
            self.stats.warp_instructions += times * self.program.blocks[index].count


def launch(
    ptx: str,
    description: dict[str, Any],
    memory: GlobalMemory,
    *,
    checks: bool = True,
    schedule: Schedule = Schedule(),  # noqa: B008 (frozen)
    events: bool = False,
    strict: bool = True,
) -> Stats:
    """Execute the kernel `description["symbol"]` of `ptx` on `memory`, in place.

    `description`: symbol, grid, block, smem_bytes, params (bytes); optionally cluster, pdl, registers (of a thread)
    and, where parameters are not laid out back to back from offset 0, param_offsets.
    `checks` adds checks of races and proxy fences to those of bounds and initialisation; `events` records what a
    timeline needs. `strict`: order in tensor memory needs tcgen05.wait::ld and tcgen05.fence, as the PTX ISA has it;
    without it a tcgen05.ld is over at once and barriers order tensor memory alone. Raises EmulatorError, which says
    what is wrong and where.
    """
    needed = "symbol", "grid", "block", "smem_bytes", "params"
    if missing := [name for name in needed if description.get(name) is None]:
        raise LaunchFault(f"description lacks {', '.join(missing)}; it needs {', '.join(needed)}")
    kernel = program(ptx, description["symbol"])
    for region in memory.regions:
        region.start_launch(bool(description.get("pdl")))
    with np.errstate(all="ignore"):
        grid = Grid(kernel, description, memory, checks=checks, schedule=schedule, events=events, strict=strict)
        return grid.run()
