"""Clocks of a token and kv head of a decode kernel, by unit of an SM, beside those of the memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perf.sass.clocks import Opcodes, Weight, clocks, slots
from perf.sass.gpus import Gpu, of_arch
from perf.sass.units import QUARTERS, RATES, flops, unit, words
from perf.sass.work import Roles, Work

UNITS = ("issue", "tensor", "MUFU", "ALU", "FMA", "smem", "TMEM")  # whose clocks are set against those of memory
BY_QUARTER = ("issue", "MUFU", "ALU", "FMA", "uniform")
LIMIT = 0.7  # of the clocks of memory, for every unit: 30 % to spare
NVFP4_LIMIT = 0.75  # for issue


def summary(opcodes: Opcodes, roles: Roles, work: Work, arch: str, warps: int, ctas: int = 1) -> dict[str, Any]:
    """Returns the record of a token and kv head. "issue" is that of the fullest quarter of the SM; slots are of all
    warps. "flops" are those of the tensor cores, in terms of 16-bit operands. `ctas` per SM of fewer than four warps
    are taken to share the quarters evenly."""
    rates = RATES[arch]
    every_warp = Roles({"all": tuple(range(warps))}, ("all",))
    found = clocks(opcodes, every_warp, work, rates)
    found["issue"] = found.pop("fullest quarter")
    for name in BY_QUARTER:
        found[name] *= min(warps, QUARTERS) / min(warps * ctas, QUARTERS)
    found["smem"] += _of_all_warps(opcodes, copied_bytes) / rates.smem_bytes
    named = dict.fromkeys(unit(op) for op, _ in opcodes)
    return {
        "slots": _of_all_warps(opcodes, lambda op: 1),
        "units": {name: _of_all_warps(opcodes, lambda op, n=name: unit(op) == n) for name in named},  # type: ignore[misc]
        "roles": {role: round(units["all"], 4) for role, units in slots(opcodes, roles).items()},
        "clocks": {name: round(found[name], 4) for name in (*UNITS, "uniform") if name in found and name != "tensor"},
        "flops": {"mma.sync": _of_all_warps(opcodes, flops), "tcgen05": work.tensor_flops},
    }


def copied_bytes(opcode: str) -> int:
    """Returns the bytes that an instruction copies from global to shared memory, with all lanes of a warp."""
    return 128 * words(opcode) if opcode.startswith("LDGSTS") else 0


def _of_all_warps(opcodes: Opcodes, weight: Weight) -> float:
    return round(sum(weight(op) * float(times.sum()) / len(times) for op, times in opcodes), 4)


def on_gpus(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns, by GPU of a row's architecture: clocks of memory and of tensor cores, the unit that takes longest beside
    memory and its share of memory's clocks, the share of issue, and whether the row keeps its limit."""
    return {gpu.name: on_gpu(row, gpu, gpu.bandwidth) for gpu in of_arch(row["arch"])}


def on_gpu(row: Mapping[str, Any], gpu: Gpu, bandwidth: float) -> dict[str, Any]:
    """Returns what `on_gpus` does of one GPU whose memory delivers `bandwidth` GB/s."""
    memory = gpu.memory_clocks(row["bytes"]) * gpu.bandwidth / bandwidth
    tensor = row["flops"]["mma.sync"] / gpu.mma_flops + row["flops"]["tcgen05"] / RATES[gpu.arch].tensor_flops
    found = {"tensor": tensor, **{name: row["clocks"].get(name, 0.0) for name in UNITS if name != "tensor"}}
    largest = max(UNITS, key=lambda name: found[name])
    limited, limit = (found["issue"], NVFP4_LIMIT) if row["kv_dtype"] == "nvfp4" else (found[largest], LIMIT)
    return {
        "memory": round(memory, 4),
        "tensor": round(tensor, 4),
        "largest": largest,
        "share": round(found[largest] / memory, 4),
        "issue_share": round(found["issue"] / memory, 4),
        "holds": bool(limited <= limit * memory),
    }
