"""Host side of the mma.sync kernel: tile and split of a call, and the parameter block of its launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_attn import plan
from cute_attn.kernels import divisor, tiles
from cute_attn.kernels.spec import CombineSpec, Fa2Spec, KernelSpec, Tile
from cute_attn.problem import Features, Problem
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch, for_device
from cute_attn.runtime.launch import Launch, current_stream

LOG2E = math.log2(math.e)
UNBOUNDED = 1 << 30  # no causal or window bound: beyond any kv index, and row + UNBOUNDED fits 32 bits


def prepare(features: Features) -> Callable[[Problem], None]:
    index = features.device.index
    sms = torch.cuda.get_device_properties(index).multi_processor_count
    return Runner(features, for_device(index), index, sms)


def launches(problem: Problem, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """Kernels and grids of `problem` on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    features = problem.features
    if problem.qo_len == 0:
        return []
    runner = Runner(features, arch, 0, sms)
    schedule, split, grid = runner.work(problem)
    if split.num_splits == 1:
        return [(spec(features, schedule.tile, split=False), grid)]
    combine = runner.combine_spec(), runner.combine_grid(problem.qo_len)
    return [(spec(features, schedule.tile, split=True), grid), combine]


def spec(features: Features, tile: Tile, split: bool) -> Fa2Spec:
    """The kernel that solves problems of these features with this tile."""
    return Fa2Spec(
        dtype=_name(features.q_dtype),
        out_dtype="float32" if split else _name(features.o_dtype),
        head_dim_qk=features.head_dim_qk,
        head_dim_vo=features.head_dim_vo,
        mask="packed" if features.custom_mask else "band",
        scores=scores(features),
        pos_encoding="rope" if features.pos_encoding_mode == "ROPE_LLAMA" else "none",
        split=split,
        tile=tile,
    )


def plain(features: Features) -> bool:
    """Nothing but products, band and softmax in the loop: such kernels have registers left for wider tiles."""
    return not features.custom_mask and features.pos_encoding_mode != "ROPE_LLAMA" and not scores(features)


def specs(features: Features, arch: Arch) -> list[KernelSpec]:
    """Every kernel that calls of these features may need, whatever their lengths."""
    head_dims = features.head_dim_qk, features.head_dim_vo
    kernels: list[KernelSpec] = [
        spec(features, tile, split)
        for tile in tiles.candidates(head_dims, plain(features), arch)
        for split in (False, True)
    ]
    return [*kernels, CombineSpec(_name(features.o_dtype), features.head_dim_vo)]


def scores(features: Features) -> tuple[str, ...]:
    """Score steps. A positive scale alone is none: it goes into the exponent together with log2(e)."""
    steps = ["scale"]
    if features.pos_encoding_mode == "ALIBI":
        steps.append("alibi")
    if features.soft_cap:
        steps.append("soft_cap")
    return () if steps == ["scale"] and features.positive_scale else tuple(steps)


class Schedule(NamedTuple):
    """What a tile choice settles: the numbers that the split rule needs, and the kernels loaded so far."""

    tile: Tile
    tile_tokens: int  # tokens that one query tile can touch
    slots: int  # CTAs that the device holds at once
    min_tiles: int
    launches: dict[tuple[bool, bool], Launch]  # by split and PDL


class Work(NamedTuple):
    """How one call is laid out: its tile, its cut of the keys, and CTAs over (q tiles x kv heads, 1, splits)."""

    schedule: Schedule
    split: plan.Split
    grid: tuple[int, int, int]


class Target(NamedTuple):
    """Where a launch writes (addresses, strides in bytes), and what only the last writer of `out` applies."""

    o: int
    lse: int
    stride_n: int
    stride_h: int
    v_scale: float
    v_scale_ptr: int
    sinks: int


class Runner:
    """Runs problems of one structure. Kernels are loaded at first use; after that a call computes numbers."""

    def __init__(self, features: Features, arch: Arch, device_index: int, sms: int) -> None:
        self.features, self.arch, self.device_index, self.sms = features, arch, device_index, sms
        self.group = features.num_qo_heads // features.num_kv_heads
        self.group_magic = divisor.magic(self.group)
        self.kv_heads_magic = divisor.magic(features.num_kv_heads)
        self.folded_log2e = 1.0 if scores(features) else LOG2E
        self.rope_exponent = -2.0 / features.head_dim_qk
        self.schedules: dict[Tile, Schedule] = {}
        self.schedule_of: dict[int, Schedule] = {}  # by packed rows
        self.combines: dict[bool, Launch] = {}  # by PDL

    def __call__(self, problem: Problem) -> None:
        if problem.qo_len == 0:
            return
        schedule, split, grid = self.work(problem)
        pdl = self.arch.pdl and problem.enable_pdl is not False
        launch = schedule.launches.get((split.num_splits > 1, pdl))
        if launch is None:
            launch = self._launch(schedule, split.num_splits > 1, pdl)
        stream = current_stream(self.device_index)
        target = self._target(problem)
        if split.num_splits == 1:
            launch.fire(self._values(problem, target, split.tiles_per_split), grid, stream)
            return
        workspace = self._workspace(problem.qo_len, split.num_splits)
        partial = self._partial_target(workspace, problem.qo_len, split.num_splits)
        launch.fire(self._values(problem, partial, split.tiles_per_split), grid, stream)
        self._combine(problem, partial, target, split.num_splits, pdl, stream)

    def work(self, problem: Problem) -> Work:
        """The layout of a call, `qo_len` > 0. Reads lengths only, and needs no GPU."""
        qo_len, kv_len = problem.qo_len, problem.kv_len
        rows = qo_len * self.group
        schedule = self.schedule_of.get(rows) or self._schedule(rows)
        tile = schedule.tile
        ctas = plan.ceil_div(rows, tile.rows) * self.features.num_kv_heads
        visible = plan.visible_tokens(qo_len, kv_len, schedule.tile_tokens, problem.causal, problem.window_left)
        split = plan.split_kv(
            plan.ceil_div(kv_len, tile.cols),
            plan.ceil_div(visible, tile.cols),
            ctas,
            schedule.slots,
            schedule.min_tiles,
        )
        return Work(schedule, split, (ctas, 1, split.num_splits))

    def _target(self, problem: Problem) -> Target:
        out, lse, sinks, v_scale = problem.out, problem.lse, problem.sinks, problem.v_scale_tensor
        stride_n, stride_h, _ = out.stride()
        itemsize = self.features.o_dtype.itemsize
        return Target(
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            stride_n * itemsize,
            stride_h * itemsize,
            problem.v_scale,
            0 if v_scale is None else v_scale.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
        )

    def _values(self, problem: Problem, target: Target, tiles_per_split: int) -> tuple[int | float, ...]:
        """Kernel parameters in the order of `Fa2Params`."""
        q, k, v, mask = problem.q, problem.k, problem.v, problem.packed_mask
        q_stride_n, q_stride_h, _ = q.stride()
        k_stride_n, k_stride_h, _ = k.stride()
        v_stride_n, v_stride_h, _ = v.stride()
        if problem.kv_layout == "HND":
            k_stride_n, k_stride_h = k_stride_h, k_stride_n
            v_stride_n, v_stride_h = v_stride_h, v_stride_n
        itemsize = self.features.q_dtype.itemsize
        scale_ptrs = [scale.data_ptr() for scale in problem.scale_tensors]
        scale0, scale1 = (*scale_ptrs, 0, 0)[:2]
        position = problem.kv_len - problem.qo_len  # of query row 0
        return (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            target.o,
            target.lse,
            0 if mask is None else mask.data_ptr(),
            0 if mask is None else mask.numel(),
            scale0,
            scale1,
            target.v_scale_ptr,
            target.sinks,
            q_stride_n * itemsize,
            q_stride_h * itemsize,
            k_stride_n * itemsize,
            k_stride_h * itemsize,
            v_stride_n * itemsize,
            v_stride_h * itemsize,
            target.stride_n,
            target.stride_h,
            problem.qo_len,
            problem.kv_len,
            self.group,
            *self.group_magic,
            self.features.num_qo_heads,
            self.features.num_kv_heads,
            *self.kv_heads_magic,
            position if problem.causal else UNBOUNDED,
            position - problem.window_left if 0 <= problem.window_left < problem.kv_len else -UNBOUNDED,
            tiles_per_split,
            problem.sm_scale * self.folded_log2e,
            problem.logits_soft_cap,
            target.v_scale,
            1.0 / (2.0 * math.pi * problem.rope_scale),
            problem.rope_theta**self.rope_exponent,
        )

    def _workspace(self, qo_len: int, num_splits: int) -> torch.Tensor:
        """Partials of a split launch. The caching allocator keeps them with a captured graph."""
        size = num_splits * qo_len * self.features.num_qo_heads * (self.features.head_dim_vo + 1)
        return torch.empty(size, dtype=torch.float32, device=self.features.device)

    def _partial_target(self, workspace: torch.Tensor, qo_len: int, num_splits: int) -> Target:
        """o [num_splits, qo_len, num_qo_heads, head_dim_vo], then lse [num_splits, qo_len, num_qo_heads]."""
        o, row_bytes = workspace.data_ptr(), 4 * self.features.head_dim_vo
        token_bytes = row_bytes * self.features.num_qo_heads
        return Target(o, o + num_splits * qo_len * token_bytes, token_bytes, row_bytes, 1.0, 0, 0)

    def _combine(
        self, problem: Problem, partial: Target, target: Target, num_splits: int, pdl: bool, stream: int
    ) -> None:
        launch = self.combines.get(pdl)
        if launch is None:
            launch = self.combines[pdl] = load(self.combine_spec(), self.arch.name, self.device_index, pdl)
        values = (
            partial.o,
            partial.lse,
            target.o,
            target.lse,
            target.v_scale_ptr,
            target.sinks,
            target.stride_n,
            target.stride_h,
            problem.qo_len,
            self.features.num_qo_heads,
            num_splits,
            target.v_scale,
        )
        launch.fire(values, self.combine_grid(problem.qo_len), stream)

    def combine_spec(self) -> CombineSpec:
        return CombineSpec(_name(self.features.o_dtype), self.features.head_dim_vo)

    def combine_grid(self, qo_len: int) -> tuple[int, int, int]:
        return qo_len * self.features.num_qo_heads, 1, 1

    def _schedule(self, rows: int) -> Schedule:
        head_dims = self.features.head_dim_qk, self.features.head_dim_vo
        tile = tiles.choose(head_dims, plain(self.features), rows, self.arch)
        if tile not in self.schedules:
            self.schedules[tile] = Schedule(
                tile,
                (tile.rows - 1) // self.group + 2,
                self.sms * tiles.resident_ctas(tile, head_dims, self.arch),
                plan.min_split_tiles(tile.rows, tile.cols, *head_dims),
                {},
            )
        if len(self.schedule_of) >= 4096:  # lengths come from traffic: bounded, and cheap to compute again
            self.schedule_of.clear()
        self.schedule_of[rows] = self.schedules[tile]
        return self.schedules[tile]

    def _launch(self, schedule: Schedule, split: bool, pdl: bool) -> Launch:
        kernel = spec(self.features, schedule.tile, split)
        launch = schedule.launches[split, pdl] = load(kernel, self.arch.name, self.device_index, pdl)
        return launch


@functools.cache
def load(kernel: KernelSpec, arch_name: str, device_index: int, pdl: bool) -> Launch:
    """The loaded kernel: one per spec and device, shared by problems that differ in head counts only."""
    return Launch(artifacts.get(kernel, arch_name), device_index, pdl=pdl)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
