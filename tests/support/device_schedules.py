"""Random batches, and the schedules that the planner kernel makes of them beside those of a plain program."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from cute_attn.dispatch import emulator
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.planner import Planner, Room
from cute_attn.problem import BatchLengths, BatchLimits, DeviceLengths, LaunchSizes, Lengths
from cute_attn.runtime.launch import CPU
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.params import SchedulerParams
from tests.support.makespan import random_kv_len
from tests.support.plain_schedule import WorkList, schedule


class Case(NamedTuple):
    """A batch, the tile of its launch and its limits. `page_size` 0: ragged. `q_len`: of every request, or 0."""

    qo_len: np.ndarray
    kv_len: np.ndarray
    page_size: int
    q_len: int
    params: SchedulerParams
    limits: BatchLimits

    def __str__(self) -> str:
        return f"{self.params} {self.limits} page {self.page_size} q {self.qo_len.tolist()} kv {self.kv_len.tolist()}"


def index_arrays(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """qo_indptr, kv_indptr and last_page_len of a batch, on the host."""
    size = case.page_size or 1
    pages = -(-case.kv_len // size)
    last = case.kv_len - (np.maximum(pages, 1) - 1) * size
    return np.cumsum([0, *case.qo_len]), np.cumsum([0, *pages]), last if case.page_size else None


def random_case(rng: np.random.Generator, most_requests: int = 300, most_tokens: int = 40_000) -> Case:
    """Returns a batch of any kind: decode, prefill or mixed, even or skewed, of short and long requests."""
    size = int(np.exp(rng.uniform(0, np.log(most_requests + 1)))) - (rng.random() < 0.02)
    top = int(np.exp(rng.uniform(np.log(2), np.log(100_000))))
    kv_len = random_kv_len(rng, size, top)
    q_len = int(rng.choice([0, 0, 1, 1, 4]))
    longest = int(np.exp(rng.uniform(0, np.log(max(2, min(3000, most_tokens // max(size, 1)))))))
    qo_len = np.full(size, q_len) if q_len else rng.integers(0, longest + 1, size)
    rows, cols = ((16, 64), (128, 64), (128, 128), (192, 128), (64, 176), (16, 256))[rng.integers(6)]
    num_kv_heads = int(rng.choice([1, 2, 4, 8, 32]))
    params = SchedulerParams(
        rows=rows,
        cols=cols,
        group_size=int(rng.choice([1, 2, 3, 4, 8, 20])),
        num_kv_heads=num_kv_heads,
        causal=bool(rng.random() < 0.5),
        window_left=int(rng.choice([-1, -1, 0, 127, 4096])),
        resident_ctas=int(rng.choice([16, 132, 264, 296])),
        min_split_tiles=int(rng.integers(1, 6)),
        partial_row_bytes=4 * 129,
        l2_kv_tokens=int(rng.choice([0, 1, 1000, 50_000])),
    )
    slots = int(rng.choice([0, 1, 5, 100, 100_000]))
    split = rng.random()
    limits = BatchLimits(
        workspace_bytes=slots * params.partial_bytes,
        fixed_split_size=int(rng.integers(max(top // 100, 1), top + 2)) if split < 0.2 else None,
        disable_split_kv=bool(split > 0.95),
    )
    return Case(qo_len, kv_len.astype(np.int64), int(rng.choice([0, 1, 16, 64])), q_len, params, limits)


def bounded(case: Case, spare: int) -> Case:
    """Returns the case with limits of a captured launch, in which `spare` more rows, keys or pages would fit."""
    qo_indptr, kv_indptr, _ = index_arrays(case)
    rows, kv = int(qo_indptr[-1]) + spare, int(kv_indptr[-1]) + spare
    sizes = LaunchSizes(len(case.kv_len), rows, kv * (case.page_size or 1), case.q_len or None)
    return case._replace(limits=case.limits._replace(sizes=sizes, max_qo_len=case.q_len or None))


def cases(count: int, seed: int, most_requests: int = 300) -> Iterator[Case]:
    """Yields batches that the planner does not refuse, nearly half of which have parts; of random ones a sixth have."""
    rng = np.random.default_rng(seed)
    made = 0
    while made < count:
        case = bounded(random_case(rng, most_requests), int(rng.choice([0, 3, 1000])))
        if Room.bounded(case.params, case.limits) and (expected(case).num_partials or rng.random() < 0.25):
            made += 1
            yield case


def host_lengths(case: Case) -> BatchLengths:
    return BatchLengths(*index_arrays(case)[:2], case.kv_len)


def room_of(case: Case) -> Room:
    room = Room.bounded(case.params, case.limits)
    assert room is not None
    return room


def expected(case: Case) -> WorkList:
    """Returns the schedule of a plain program."""
    return schedule(host_lengths(case), case.params, case.limits, room_of(case).capacity)


def device_lengths(case: Case, device: str) -> DeviceLengths:
    """Returns the lengths of a bounded case on a device."""
    assert case.limits.sizes is not None
    qo_indptr, kv_indptr, last = (
        None if x is None else torch.from_numpy(x.astype(np.int32)).to(device) for x in index_arrays(case)
    )
    assert kv_indptr is not None
    most = case.limits.sizes.max_kv_tokens // (case.page_size or 1)
    return DeviceLengths(None if case.q_len else qo_indptr, kv_indptr, last, most, case.q_len)


def launch(case: Case, lengths: Lengths, gpu: Gpu, staging: Staging) -> tuple[np.ndarray, list[int]]:
    """Runs the planner on a GPU, or on the emulator, where new memory may hold anything. Returns the records, and how
    many items and merges it counted.
    """
    planner, room, before = Planner(case.params, case.page_size or 1, gpu), room_of(case), staging.memory
    records, _ = planner.placed(lengths, room, staging, fixed=False)
    for old, new in zip(before[1:], staging.memory[1:], strict=True):
        if new is not old:
            new.fill_(0x5A5A5A5A)
    if gpu.device_index == CPU:
        staging.write_within(functools.partial(emulator.writing, lengths, staging))
    staging.send()
    return records[: room.memory[1]].cpu().numpy(), staging.memory[2][:2].tolist()


def difference(case: Case, gpu: Gpu, device: str, staging: Staging | None = None, on_host: bool = False) -> str | None:
    """Returns how the schedule of the device differs from the plain one; None if they are equal. `on_host`: the planner
    reads lengths that the host uploads.
    """
    work, lengths = expected(case), host_lengths(case) if on_host else device_lengths(case, device)
    found, counts = launch(case, lengths, gpu, staging or Staging(torch.device(device)))
    if counts != work.counts:
        return f"counts {counts}, not {work.counts}: {case}"
    if not np.array_equal(found, work.ints):
        at = int((found != work.ints).argmax())
        return f"number {at} of {work.ints.size} is {found[at]}, not {work.ints[at]}: {case}"
    return None
