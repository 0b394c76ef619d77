"""Rings of the decode kernel that `perf.tune` may be given: they are launched, and right, on the emulator."""

from __future__ import annotations

import pytest
import torch

from cute_attn import emulator
from cute_attn.emulator.machine import Schedule
from cute_attn.runtime.arch import named
from perf import peers, rings
from perf.bench import oracle
from perf.workloads import BatchWorkload

pytestmark = pytest.mark.emulator
HOPPER = named("sm_90a")


def decode(heads: tuple[int, int], kv_lens: tuple[int, ...], head_dim: int = 128, **more: object) -> BatchWorkload:
    return BatchWorkload((1,) * len(kv_lens), kv_lens, *heads, head_dim, 16, **more)  # type: ignore[arg-type]


WINDOW = decode((8, 1), (300, 1, 33), 64, kv_dtype="e4m3", window_left=127, sinks=True)
# A problem, SMs, and rings that differ in structure.
CASES: dict[str, tuple[BatchWorkload, int, tuple[str, ...]]] = {
    "more warps per SM": (WINDOW, 2, ("4x2x32x6w", "2x2x32x8w")),
    "six warps": (decode((7, 1), (150, 1, 33)), 2, ("6x2x16x1+1",)),
    "clusters, two CTAs per SM": (decode((8, 2), (300,)), 22, ("6x2x16x2c6a1",)),
}


@pytest.mark.parametrize(("name", "schedule"), zip(CASES, ("adversarial", "eager", "delayed"), strict=True))
def test_rings(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 1 << 20)  # the emulator follows every word of it
    w, sms, texts = CASES[name]
    start = rings.start_of(w, HOPPER)
    sets = [w.inputs(torch.device("cpu"))]
    for text in texts:
        spec = rings.ring(text, start)
        assert rings.resident(spec, HOPPER)
        with emulator.using("sm_90a", kernels="xqa", sms=sms, schedule=Schedule(schedule, 1)) as emulation:
            (call,) = rings.bind(spec, HOPPER, w, sets, backend="emulator")
            error = oracle(w, sets[0]).error(call())
        assert [r.spec for r in emulation.records] == [spec.asdict()]
        assert error < 5e-3
