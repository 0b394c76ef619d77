"""A micro-kernel on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attn.emulator import GlobalMemory, Schedule, Stats, launch, tensormap
from tests.emulator.micro.case import Case, Map

IN, OUT = 0x10000000, 0x20000000


def run(case: Case, **how: Any) -> bytes:
    """The output."""
    return launched(case, **how)[0]


def launched(
    case: Case,
    *,
    schedule: Schedule | None = None,
    events: bool = False,
    strict: bool = True,
    valid: bool = True,
    **changes: Any,
) -> tuple[bytes, Stats]:
    """The output, and counts. `valid`: the output is initialised; `changes` of the launch's description."""
    memory = GlobalMemory()
    data = np.frombuffer(case.data, np.uint8).copy()
    out = np.zeros(case.out_bytes, np.uint8)
    if case.initial:
        out[:] = np.frombuffer(case.initial, np.uint8)
    memory.add("in", IN, len(data), writable=False, data=data)
    memory.add("out", OUT, len(out), data=out, valid=valid)
    params = IN.to_bytes(8, "little") + OUT.to_bytes(8, "little")
    offsets = [0, 8]
    for tensor in case.maps:
        offsets.append(-(-len(params) // 64) * 64)
        params = params.ljust(offsets[-1], b"\0") + encoded(tensor, IN if tensor.where == "in" else OUT)
    description = {
        "symbol": "micro",
        "grid": (case.grid, 1, 1),
        "block": (case.threads, 1, 1),
        "cluster": (case.cluster, 1, 1),
        "smem_bytes": 0,
        "params": params,
        "param_offsets": offsets,
    }
    how: dict[str, Any] = {"schedule": schedule or Schedule(), "events": events, "strict": strict}
    stats = launch(case.ptx, description | changes, memory, **how)
    return out.tobytes(), stats


def encoded(tensor: Map, base: int) -> bytes:
    parts = base + tensor.offset, tensor.dtype, tensor.dims, tensor.strides, tensor.box, tensor.swizzle, tensor.l2
    return tensormap.TensorMap(*parts).encode()
