"""The schedule of a batch in plain integers, item by item: what the planner kernel writes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from cute_attn.kernels.host import planner
from cute_attn.kernels.host.planner import Planner, Room
from cute_attn.problem import BatchLengths, BatchLimits
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import constants
from cute_attn.schedule.constants import ITEM_TIME, UNIT
from cute_attn.schedule.params import Capacity, SchedulerParams
from cute_attn.schedule.records import ITEM_INTS, MAX_SPLITS, MERGE_INTS, NO_PARTIAL


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def fullest(costs: list[tuple[int, int]], ctas: int, resident: int) -> int:
    """Time of the fullest CTA, given (cost, number) of items."""
    return max(ceil_div(sum(n for c, n in costs if c >= cost) * ctas, resident) * cost for cost, _ in costs)


def last_wave(number: int, longest: int, params: SchedulerParams, capacity: Capacity) -> tuple[int, int, int] | None:
    """Time, first tile that is split and split size; None: whole tiles fill all waves, or there is no room."""
    ctas, resident = params.num_kv_heads, params.resident_ctas
    partial_cost, whole = UNIT * params.rows // params.cols, longest * UNIT + ITEM_TIME
    waves = number * ctas // resident
    first = waves * resident // ctas
    if first == 0 or number * ctas == waves * resident or number - first > capacity.merges:
        return None
    found = []
    for size in [ceil_div(longest, most) for most in range(2, constants.MOST_PARTS + 1)]:
        parts = (number - first) * ceil_div(longest, size)
        if size >= params.min_split_tiles and parts <= capacity.partials and first + parts <= capacity.items:
            cost = size * UNIT + ITEM_TIME + partial_cost
            early = (waves * resident - first * ctas) * (whole // cost)
            time = waves * whole + ceil_div(max(parts * ctas - early, 0), resident) * cost
            time += constants.COMBINE_TIME + parts * ctas * partial_cost // resident
            found.append((time, first, size))
    return min(found, key=lambda cut: cut[0], default=None)


def best_cut(visible: list[int], params: SchedulerParams, capacity: Capacity) -> tuple[int, int] | None:
    """First tile that is split and split size in kv tiles; None: no splits."""
    ctas, resident, least = params.num_kv_heads, params.resident_ctas, params.min_split_tiles
    partial_cost = UNIT * params.rows // params.cols
    longest, total = max(visible, default=0), sum(visible)
    if longest < 2 * least or capacity.merges < 1 or capacity.partials < 2:
        return None
    if longest * resident * 64 <= total * ctas:
        return None
    groups: dict[int, tuple[int, int]] = {}  # by bin: largest size, and how many
    for size in visible:
        largest, n = groups.get(size // (longest // 256 + 1), (0, 0))
        groups[size // (longest // 256 + 1)] = max(largest, size), n + 1
    sizes = [(max(1, size), n) for size, n in sorted(groups.values())]
    unsplit = [(size * UNIT + ITEM_TIME, n) for size, n in sizes]
    share = sum(c * n for c, n in unsplit) * ctas // resident
    makespan = max(share, fullest(unsplit, ctas, resident))
    if makespan * 64 <= share * 65:
        return None
    found: tuple[int, int] | None = None
    wanted = [ceil_div(longest, d) for d in constants.LONGEST_DIVISORS]
    wanted += [ceil_div(total * ctas * f, resident * constants.SHARE_DENOMINATOR) for f in constants.SHARE_FACTORS]
    for chunk in (min(max(size, least, ceil_div(longest, MAX_SPLITS)), longest) for size in wanted):
        parts = [(size, ceil_div(size, chunk), n) for size, n in sizes]
        costs = [(ceil_div(size, k) * UNIT + ITEM_TIME + (k > 1) * partial_cost, k * n) for size, k, n in parts]
        slowest = max(c for c, _ in costs)
        items, partials = sum(k * n for _, k, n in parts), sum(k * n for _, k, n in parts if k > 1)
        long = [(c, n) for c, n in costs if 2 * c > slowest]
        number = sum(n for _, n in long)
        in_waves = ceil_div(number * ctas, resident) * (sum(c * n for c, n in long) // number)
        time = max(sum(c * n for c, n in costs) * ctas // resident, in_waves, slowest)
        if partials:
            time += constants.COMBINE_TIME + partials * partial_cost * ctas // resident
        merges = sum(n for _, k, n in parts if k > 1)
        if items > capacity.items or partials > capacity.partials or merges > capacity.merges:
            time = constants.IMPOSSIBLE
        if found is None or time < found[0]:
            found = time, chunk
    assert found is not None
    even = None if found[0] * 20 > makespan * 19 else found
    cut = last_wave(len(visible), longest, params, capacity)
    if cut is not None and cut[0] * 200 <= makespan * 199 and (even is None or cut[0] < even[0]):
        return cut[1:]
    return None if even is None else (0, even[1])


def tiles_of(lengths: BatchLengths, params: SchedulerParams) -> list[tuple[int, int, int, int]]:
    """(request, first row, first and last visible kv tile + 1) of every query tile."""
    found = []
    for i, kv_len in enumerate(lengths.kv_len.tolist()):
        qo_len = int(lengths.qo_indptr[i + 1] - lengths.qo_indptr[i])
        for first_row in range(0, qo_len * params.group_size, params.rows):
            last = min((first_row + params.rows - 1) // params.group_size, qo_len - 1)
            stop = max(0, last + kv_len - qo_len + 1) if params.causal else kv_len
            position = first_row // params.group_size + kv_len - qo_len - params.window_left
            begin = max(0, position) // params.cols if params.window_left >= 0 else 0
            found.append((i, first_row, begin, ceil_div(stop, params.cols)))
    return found


def groups_of(lengths: BatchLengths, params: SchedulerParams) -> list[int]:
    """L2 group of every request."""
    kv_len = lengths.kv_len.tolist()
    width, groups, tokens = max(kv_len) // 256 + 1, [0] * len(kv_len), 0
    size = max(params.l2_kv_tokens, ceil_div(sum(kv_len), 256))
    for i in sorted(range(len(kv_len)), key=lambda i: -(kv_len[i] // width)):
        tokens += kv_len[i]
        groups[i] = max(tokens - 1, 0) // size
    return groups


class WorkList(NamedTuple):
    """Records of a schedule, padded with zeros to the capacity of the launch."""

    items: np.ndarray  # [capacity, ITEM_INTS]
    merges: np.ndarray  # [capacity, MERGE_INTS]
    num_partials: int

    @property
    def ints(self) -> np.ndarray:
        """All numbers in order."""
        return np.concatenate((self.items.ravel(), self.merges.ravel()))

    @property
    def counts(self) -> list[int]:
        """Items and merges that are not padding."""
        return [int((x[:, 1] > 0).sum()) for x in (self.items, self.merges)]


def padded(records: list[list[int]], capacity: int, ints: int) -> np.ndarray:
    assert len(records) <= capacity
    found = np.zeros((capacity, ints), np.int32)
    for i, record in enumerate(records):
        found[i, : len(record)] = record
    return found


def schedule(
    lengths: BatchLengths,
    params: SchedulerParams,
    limits: BatchLimits,
    capacity: Capacity | None = None,
    cut: tuple[int, int] | None = None,
) -> WorkList:
    """Records of a batch. `capacity`: of the launch, by default the one that lengths on the host get. `cut`: first tile
    that is split and split size in kv tiles, by default as the cost model has them.
    """
    tiles = tiles_of(lengths, params)
    capacity = capacity or Room.of(lengths, params, limits).capacity
    assert capacity.partials <= limits.workspace_bytes // params.partial_bytes
    fixed = None if limits.disable_split_kv else limits.fixed_split_size
    if fixed is None and cut is None:
        cut = best_cut([end - begin for _, _, begin, end in tiles], params, capacity)
    items: list[dict[str, Any]] = []
    merges: list[list[int]] = []
    partials = 0
    for i, (request, first_row, begin, end) in enumerate(tiles):
        seen = end - begin
        count = 1 if cut is None or i < cut[0] else max(1, ceil_div(seen, cut[1]))
        bounds = [begin + k * seen // count for k in range(count + 1)]
        if fixed is not None:
            chunk = ceil_div(fixed, params.cols)
            bounds = [begin, *range((begin // chunk + 1) * chunk, end, chunk), end]
            count = len(bounds) - 1
        start, qo_len = int(lengths.qo_indptr[request]), int(lengths.qo_len[request])
        if count > 1:
            merges.append([start, qo_len, first_row, partials, count])
        for first, stop in itertools.pairwise(bounds):
            kv_len = int(lengths.kv_len[request])
            mask = 0 if lengths.mask_offset is None else int(lengths.mask_offset[request])
            low = mask & 0xFFFFFFFF
            record = [start, qo_len, int(lengths.kv_start[request]), kv_len, first_row, first * params.cols]
            record += [min(stop * params.cols, kv_len), partials if count > 1 else NO_PARTIAL]
            record += [low - (1 << 32) * (low >> 31), mask >> 32, request]
            items.append({"request": request, "cost": stop - first, "record": record})
            partials += count > 1
    width = max((item["cost"] for item in items), default=0) // 256 + 1
    groups = [0] * len(lengths.kv_len)
    many = len(items) * params.num_kv_heads >= constants.L2_ORDER_MIN_WAVES * params.resident_ctas
    if params.l2_kv_tokens and (fixed or not merges) and many and int(lengths.kv_len.sum()) > params.l2_kv_tokens:
        groups = groups_of(lengths, params)
    items.sort(key=lambda item: (groups[item["request"]], -(item["cost"] // width)))
    records = [item["record"] for item in items]
    return WorkList(padded(records, capacity.items, ITEM_INTS), padded(merges, capacity.merges, MERGE_INTS), partials)


@contextlib.contextmanager
def scheduling(cut: tuple[int, int]) -> Iterator[None]:
    """Makes plans of lengths on the host have this cut in place of the planner kernel's, whose numbers are compiled."""

    def placed(
        self: Planner, lengths: BatchLengths, room: Room, staging: Staging, fixed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        work = schedule(lengths, self.params, BatchLimits(1 << 50), room.capacity, cut)
        records, *_ = staging.written_on_device(work.ints.size, 0, None, fixed)
        staging.write(lambda: records[: work.ints.size].copy_(torch.from_numpy(work.ints)))
        return records, records

    tiles = Capacity(64, 64, 64)
    with mock.patch.object(Planner, "placed", placed), mock.patch.object(planner, "capacity_for", return_value=tiles):
        yield
