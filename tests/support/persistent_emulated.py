"""Problems for persistent kernels on the emulator; solves them there and checks which kernels ran."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from cute_attn.dispatch import capabilities
from cute_attn.emulator import Schedule
from cute_attn.emulator.settings import Emulation
from cute_attn.runtime.arch import Arch, named
from tests.support.batch_case import BatchCase, dims, heads, paged, ragged, refusals
from tests.support.matrix import BF16, CAUSAL, CUSTOM, E4M3, HND, PACKED, prefill
from tests.support.right import emulate, families
from tests.support.schedules import ALL_SCHEDULES


class Target(NamedTuple):
    """A family of persistent kernels on an architecture. `schedules`: those of the whole matrix. `recomputes`: opcode
    that a recomputed kv tile runs more often.
    """

    kernels: str
    arch: str
    schedules: tuple[Schedule, ...]
    recomputes: str

    def takes(self, problem: BatchCase) -> bool:
        return not refusals(problem, self.kernels, named(self.arch))

    @property
    def on(self) -> tuple[str, str]:
        return self.kernels, self.arch

    def runs_on(self, arch: Arch) -> bool:
        return capabilities.BY_NAME[self.kernels].runs(arch)


FA3 = Target("fa3", "sm_90a", (Schedule(),), "wgmma.mma_async")  # the whole matrix runs on Hopper GPUs, too
FA4 = Target("fa4", "sm_100a", ALL_SCHEDULES, "tcgen05.ld")
TARGETS = (FA3, FA4)


# Several tiles per CTA, reuse of all stages of the rings, tiles that see no key, boxes of one token.
LONG: tuple[BatchCase, ...] = (
    prefill(400, 700, (2, 1), 64, **CAUSAL),
    prefill(200, 600, (2, 2), 128, **BF16),
    prefill(300, 100, (2, 2), 128, **CAUSAL, **BF16),
    prefill(300, 300, (1, 1), 128, **CAUSAL, **HND, window_left=40),
    prefill(300, 700, (1, 1), 64, **CAUSAL, window_left=330),
    prefill(70, 500, (2, 1), 64, **PACKED, logits_soft_cap=3.0, pos_encoding_mode="ALIBI"),
    prefill(150, 400, (1, 1), (192, 128), **CUSTOM),
    prefill(150, 400, (1, 1), 256, **CAUSAL, **BF16),
    prefill(150, 400, (2, 1), 80, **CAUSAL, **BF16),
    prefill(150, 400, (1, 1), 112, **PACKED, storage="padded"),
)
BATCHES: tuple[BatchCase, ...] = (
    ragged((200, 0, 37, 1), (300, 20, 64, 0), mask="causal"),
    paged((150, 0, 37, 1), (300, 20, 64, 0), page_size=16, mask="causal", dtype="bfloat16", **dims(128), **heads(4, 2)),
    paged((150, 20), (300, 40), page_size=5, window_left=30),
    paged((70, 9), (100, 260), page_size=16, mask="packed", sinks=True, o_dtype="float32"),
    paged((130, 20), (500, 260), page_size=192, mask="causal"),  # pages of three boxes
)
# Small pages, gathered; the last two in tiles of other widths, one of a line and a half. With these seeds no request
# owns page 0, which lanes without a page of their own read.
GATHERED: tuple[BatchCase, ...] = (
    paged((150, 0, 37, 1), (300, 20, 64, 0), page_size=1, mask="causal", dtype="bfloat16", **dims(128), **heads(4, 2)),
    paged((70, 9), (100, 260), page_size=3, mask="packed", sinks=True, o_dtype="float32", seed=39),
    paged((130, 9), (200, 90), page_size=16, kv_layout="HND", cache="strided", seed=1, **dims(192, 128)),
    paged((130, 9), (200, 260), page_size=7, mask="causal", dtype="bfloat16", seed=29, **dims(256)),
    paged((130, 9), (20, 260), page_size=12, mask="causal", cache="one", slack=True, seed=4, **dims(96)),
    paged((70,), (40,), page_size=12, cache="strided", seed=4, **dims(96)),  # NaN behind every row
    paged((70,), (40,), page_size=12, cache="strided", seed=4, **dims(80)),
)


# The test matrices with 8-bit keys and values under 16-bit q, as far as these kernels support them.
KV_DTYPES = ("float8_e4m3fn", "float8_e5m2")
OF_8_BITS = tuple(target for target in TARGETS if target.takes(prefill(70, 70, (1, 1), 128, **E4M3)))


def of_8_bits(problems: Iterable[BatchCase]) -> list[BatchCase]:
    wide = [x for x in problems if x.kv_dtype is None and x.storage != "packed_qkv" and x.kind != "decode"]
    made = [dataclasses.replace(x, kv_dtype=dtype) for x, dtype in zip(wide, itertools.cycle(KV_DTYPES), strict=False)]
    return [x for x in made if all(target.takes(x) for target in OF_8_BITS)]


# Batches whose keys the transform warps of fa3 prepare: NVFP4 widened, 16-bit keys rotated.
NVFP4: dict[str, Any] = {"kv_dtype": "nvfp4"}
ROPE: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5, "rope_scale": 4.0}
# The first: several kv tiles in boxes of 16 tokens, an empty request, rows past the end.
_TRANSFORMED = (
    paged((70, 0, 9), (150, 20, 260), page_size=16, mask="causal", **BF16, **dims(128), **heads(2, 1)),
    paged((70, 9), (100, 140), page_size=3, mask="packed", sinks=True, o_dtype="float32", seed=39),
    paged((70,), (140,), page_size=7, kv_layout="HND", cache="strided", seed=29, **BF16, **dims(256), **heads(1, 1)),
    paged((70,), (140,), page_size=64, window_left=30, **dims(192, 128)),
    ragged((3, 20), (300, 60), fixed_split_size=128, v_scale=0.5, **heads(2, 1)),
    ragged((70, 9), (100, 140), mask="causal", cache="strided", **dims(80), **heads(1, 1)),
)


def transformed(changes: dict[str, Any]) -> list[BatchCase]:
    """The batches that fa3 takes with these changes."""
    made = [dataclasses.replace(batch, **changes) for batch in _TRANSFORMED]
    return [batch for batch in made if FA3.takes(batch)]


NVFP4_BATCHES, ROPE_BATCHES = transformed(NVFP4), transformed(ROPE)


def name(value: object) -> str:
    if isinstance(value, Target):
        return value.kernels
    if type(value) is tuple:
        return "-".join(map(name, value))
    return value.kind if isinstance(value, Schedule) else str(getattr(value, "id", value))


def solve_on(target: Target, problem: BatchCase, schedule: Schedule, sms: int | None = None) -> Emulation:
    """Run a case on the target's GPU and compare."""
    return emulate(problem, target.arch, target.kernels, schedule, sms)


def assert_cut(target: Target, emulation: Emulation) -> None:
    """The keys were split, and the partials merged."""
    assert families(emulation) == [target.kernels, "combine"]
