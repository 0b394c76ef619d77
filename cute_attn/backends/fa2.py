"""Host side of the mma.sync kernel: tile and split of a call, and the parameter block of its launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from cute_attn import plan
from cute_attn.kernels import divisor, tiles
from cute_attn.kernels.spec import CombineSpec, Fa2Spec, KernelSpec, Tile
from cute_attn.problem import Features, Problem, Settings
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch, for_device
from cute_attn.runtime.launch import Launch, current_stream

if TYPE_CHECKING:
    from cute_attn.emulator.adapter import EmulatedLaunch

LOG2E = math.log2(math.e)
UNBOUNDED = 1 << 30  # no causal or window bound: beyond any kv index, and row + UNBOUNDED fits 32 bits

REMEMBERED = 512  # lengths come from traffic: what is kept of them is bounded, and cheap to compute again


def prepare(settings: Settings) -> Callable[[Problem], None]:
    index = settings.features.device.index
    sms = torch.cuda.get_device_properties(index).multi_processor_count
    return Runner(settings, for_device(index), index, sms)


def launches(problem: Problem, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """Kernels and grids of `problem` on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    if problem.qo_len == 0:
        return []
    runner = Runner(problem.settings, arch, 0, sms)
    schedule, (num_splits, _) = runner.work(problem.qo_len, problem.kv_len)
    kernel = spec(problem.features, schedule.tile, split=num_splits > 1)
    main = kernel, (schedule.ctas, 1, num_splits)
    combine = combine_spec(problem.features), (problem.qo_len * problem.features.num_qo_heads, 1, 1)
    return [main] if num_splits == 1 else [main, combine]


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


def combine_spec(features: Features) -> CombineSpec:
    return CombineSpec(_name(features.o_dtype), features.head_dim_vo)


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
    return [*kernels, combine_spec(features)]


def scores(features: Features) -> tuple[str, ...]:
    """Score steps. A positive scale alone is none: it goes into the exponent together with log2(e)."""
    steps = ["scale"]
    if features.pos_encoding_mode == "ALIBI":
        steps.append("alibi")
    if features.soft_cap:
        steps.append("soft_cap")
    return () if steps == ["scale"] and features.positive_scale else tuple(steps)


class Schedule(NamedTuple):
    """What `qo_len` settles: the tile, the numbers that the split rule needs, and the kernels loaded so far."""

    tile: Tile
    ctas: int  # of one split
    tile_tokens: int  # tokens that one query tile can touch
    slots: int  # CTAs that the device holds at once
    min_tiles: int
    launches: dict[bool, Launch | EmulatedLaunch]  # by split


# Where a launch writes and what only the last writer of `out` applies: addresses of out and lse, strides of a token and
# a head of out in bytes, v_scale, address of its tensor, address of sinks.
Target = tuple[int, int, int, int, float, int, int]
Values = tuple[int | float, ...]
# The launch of a call, the one after it if the keys are split, the grid of the first, and tiles_per_split.
Plan = tuple["Launch | EmulatedLaunch", "Launch | EmulatedLaunch | None", tuple[int, int, int], int]


class Runner:
    """Runs problems of the same settings. Kernels are loaded at first use; after that a call computes numbers."""

    def __init__(self, settings: Settings, arch: Arch, device_index: int | None, sms: int) -> None:
        features = settings.features
        self.settings, self.features = settings, features
        self.arch, self.device_index, self.sms = arch, device_index, sms
        self.pdl = arch.pdl and settings.enable_pdl is not False
        self.group = features.num_qo_heads // features.num_kv_heads
        self.num_qo_heads, self.head_dim_vo = features.num_qo_heads, features.head_dim_vo
        self.causal, self.window_left = settings.causal, settings.window_left
        self.token, self.head = (1, 0) if settings.kv_layout == "HND" else (0, 1)  # axes of k and v
        self.itemsize, self.out_itemsize = features.q_dtype.itemsize, features.o_dtype.itemsize
        num_kv_heads = features.num_kv_heads
        self.heads = (
            *(self.group, *divisor.magic(self.group), features.num_qo_heads),
            *(num_kv_heads, *divisor.magic(num_kv_heads)),
        )
        self.score_numbers = settings.sm_scale * (1.0 if scores(features) else LOG2E), settings.logits_soft_cap
        self.rope_numbers = (
            1.0 / (2.0 * math.pi * settings.rope_scale),
            settings.rope_theta ** (-2.0 / features.head_dim_qk),
        )
        self.combine: Launch | EmulatedLaunch | None = None
        self.schedule = functools.lru_cache(REMEMBERED)(self._schedule)
        self.plan = functools.lru_cache(REMEMBERED)(self._plan)  # the layers of a model repeat the lengths of the first

    def __call__(self, problem: Problem) -> None:
        qo_len = problem.qo_len
        if qo_len == 0:
            return
        launch, combine, grid, tiles_per_split = self.plan(qo_len, problem.kv_len)
        stream = current_stream(self.device_index)
        target = self._target(problem)
        if combine is None:
            launch.fire(self._values(problem, target, tiles_per_split), grid, stream)
            return
        rows, num_splits = qo_len * self.num_qo_heads, grid[2]
        workspace = self._workspace(problem, rows * num_splits)
        partial = self._partial_target(workspace, rows * num_splits)
        launch.fire(self._values(problem, partial, tiles_per_split), grid, stream)
        combine.fire(self._combine_values(qo_len, num_splits, partial, target), (rows, 1, 1), stream)

    def _plan(self, qo_len: int, kv_len: int) -> Plan:
        schedule, (num_splits, tiles_per_split) = self.work(qo_len, kv_len)
        split = num_splits > 1
        launch = schedule.launches.get(split) or self._launch(schedule, split)
        combine = (self.combine or self._combine()) if split else None
        return launch, combine, (schedule.ctas, 1, num_splits), tiles_per_split

    def work(self, qo_len: int, kv_len: int) -> tuple[Schedule, plan.Split]:
        """The tile of a call with `qo_len` > 0, and its cut of the keys. Needs no GPU."""
        schedule = self.schedule(qo_len)
        tile, ctas, tile_tokens, slots, min_tiles, _ = schedule
        kv_tiles = visible_tiles = -(-kv_len // tile.cols)
        if self.window_left >= 0:
            visible = plan.visible_tokens(qo_len, kv_len, tile_tokens, self.causal, self.window_left)
            visible_tiles = plan.ceil_div(visible, tile.cols)
        return schedule, plan.split_kv(kv_tiles, visible_tiles, ctas, slots, min_tiles)

    def _target(self, problem: Problem) -> Target:
        out, lse, sinks, v_scale = problem.out, problem.lse, problem.sinks, problem.v_scale_tensor
        strides = out.stride()
        return (
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            strides[0] * self.out_itemsize,
            strides[-2] * self.out_itemsize,
            self.settings.v_scale,
            0 if v_scale is None else v_scale.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
        )

    def _values(self, problem: Problem, target: Target, tiles_per_split: int) -> Values:
        """Kernel parameters in the order of `Fa2Params`."""
        _, qo_len, kv_len, q, k, v, _, _, mask, scales, *_ = problem
        q_strides, k_strides, v_strides, itemsize = q.stride(), k.stride(), v.stride(), self.itemsize
        token, head, window_left = self.token, self.head, self.window_left
        o, lse, o_stride_n, o_stride_h, v_scale, v_scale_ptr, sinks = target
        scale0, scale1 = _two_addresses(scales) if scales else (0, 0)
        position = kv_len - qo_len  # of query row 0
        return (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            o,
            lse,
            0 if mask is None else mask.data_ptr(),
            0 if mask is None else mask.numel(),
            scale0,
            scale1,
            v_scale_ptr,
            sinks,
            q_strides[0] * itemsize,
            q_strides[-2] * itemsize,
            k_strides[token] * itemsize,
            k_strides[head] * itemsize,
            v_strides[token] * itemsize,
            v_strides[head] * itemsize,
            o_stride_n,
            o_stride_h,
            qo_len,
            kv_len,
            *self.heads,
            position if self.causal else UNBOUNDED,
            position - window_left if 0 <= window_left < kv_len else -UNBOUNDED,
            tiles_per_split,
            *self.score_numbers,
            v_scale,
            *self.rope_numbers,
        )

    def _workspace(self, problem: Problem, rows: int) -> torch.Tensor:
        """Partials of a split launch. The caching allocator keeps them with a captured graph."""
        return problem.q.new_empty(rows * (self.head_dim_vo + 1), dtype=torch.float32)

    def _partial_target(self, workspace: torch.Tensor, rows: int) -> Target:
        """o [num_splits, qo_len, num_qo_heads, head_dim_vo], then lse [num_splits, qo_len, num_qo_heads]."""
        o, row_bytes = workspace.data_ptr(), 4 * self.head_dim_vo
        return o, o + rows * row_bytes, self.num_qo_heads * row_bytes, row_bytes, 1.0, 0, 0

    def _combine_values(self, qo_len: int, num_splits: int, partial: Target, target: Target) -> Values:
        """Kernel parameters in the order of `CombineParams`."""
        o_partial, lse_partial, *_ = partial
        o, lse, stride_n, stride_h, v_scale, v_scale_ptr, sinks = target
        return (
            o_partial,
            lse_partial,
            o,
            lse,
            v_scale_ptr,
            sinks,
            stride_n,
            stride_h,
            qo_len,
            self.num_qo_heads,
            num_splits,
            v_scale,
        )

    def _schedule(self, qo_len: int) -> Schedule:
        head_dims, rows = (self.features.head_dim_qk, self.features.head_dim_vo), qo_len * self.group
        tile = tiles.choose(head_dims, plain(self.features), rows, self.arch)
        return Schedule(
            tile,
            plan.ceil_div(rows, tile.rows) * self.features.num_kv_heads,
            (tile.rows - 1) // self.group + 2,
            self.sms * tiles.resident_ctas(tile, head_dims, self.arch),
            plan.min_split_tiles(tile.rows, tile.cols, *head_dims),
            {},
        )

    def _launch(self, schedule: Schedule, split: bool) -> Launch | EmulatedLaunch:
        kernel = spec(self.features, schedule.tile, split)
        launch = schedule.launches[split] = load(kernel, self.arch.name, self.device_index, self.pdl)
        return launch

    def _combine(self) -> Launch | EmulatedLaunch:
        self.combine = load(combine_spec(self.features), self.arch.name, self.device_index, self.pdl)
        return self.combine


@functools.cache
def load(kernel: KernelSpec, arch_name: str, device_index: int | None, pdl: bool) -> Launch | EmulatedLaunch:
    """The loaded kernel: one per spec and device, shared by problems that differ in head counts or numbers only."""
    if device_index is None:  # the CPU
        from cute_attn.emulator.adapter import EmulatedLaunch

        return EmulatedLaunch(artifacts.get(kernel, arch_name), pdl=pdl)
    return Launch(artifacts.get(kernel, arch_name), device_index, pdl=pdl)


def _two_addresses(tensors: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Of at most two tensors; 0 stands for none."""
    first, *second = (tensor.data_ptr() for tensor in tensors)
    return first, second[0] if second else 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
