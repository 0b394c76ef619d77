"""The table of a kernel: slots by role and clocks by unit of one unit of work, from attributed opcodes."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cute_attn.emulator.dtypes import Array
from perf.sass.units import QUARTERS, Rates, columns, unit, words
from perf.sass.work import STEP, Roles, Work

Opcodes = Sequence[tuple[str, Array]]  # of one unit of work: executions by [CTA rank, warp]
Weight = Callable[[str], float]

BINDING = ("tensor", "smem", "MUFU", "FMA", "ALU", "fullest quarter", "TMEM")  # that may be what binds


def clocks(opcodes: Opcodes, roles: Roles, work: Work, rates: Rates) -> dict[str, float]:
    """Returns the clocks of each unit. MUFU, FMA, ALU, uniform and issue count the roles of the softmax, on their
    fullest quarter; "fullest quarter" is the issue of all roles, in the fullest CTA of a cluster.
    """
    of_softmax = [warp for role in roles.math for warp in roles.warps[role]]
    everybody = [warp for warps in roles.warps.values() for warp in warps]
    found = {"tensor": work.tensor_flops / rates.tensor_flops}
    accesses = _sum(opcodes, lambda op: words(op) if unit(op) == "smem" else 0)
    found["smem"] = work.smem_bytes / rates.smem_bytes + accesses * 32 * 4 / rates.smem_bytes
    found |= {
        "MUFU": _slots(opcodes, of_softmax, _of("MUFU", rates)),
        "FMA": _slots(opcodes, of_softmax, lambda op: _of("FMA", rates)(op) + _of("FMA2", rates)(op)),
        "ALU": _slots(opcodes, of_softmax, _of("ALU", rates)),
        "uniform": _slots(opcodes, of_softmax, _of("uniform", rates)),
        "issue": _slots(opcodes, of_softmax, lambda op: 1),
        "fullest quarter": float(_by_quarter(opcodes, everybody, lambda op: 1).max()),
    }
    if rates.tmem_bytes:
        moved = _sum(opcodes, lambda op: columns(op) if unit(op) == "TMEM" else 0)
        found["TMEM"] = moved * 32 * 4 / rates.tmem_bytes
    return found


def binds(found: dict[str, float]) -> list[str]:
    """Returns the units that take longest: the first, and others within 1 %."""
    most = max(found.get(name, 0) for name in BINDING)
    return [name for name in BINDING if found.get(name, 0) >= 0.99 * most]


def slots(opcodes: Opcodes, roles: Roles) -> dict[str, dict[str, float]]:
    """Returns the issue slots of each role, of all units and by unit, on the quarter where the role has most."""
    found: dict[str, dict[str, float]] = {}
    for role, warps in roles.warps.items():
        total: dict[str, float] = {"all": _slots(opcodes, warps, lambda op: 1)}
        for name in dict.fromkeys(unit(op) for op, _ in opcodes):
            if count := _slots(opcodes, warps, lambda op, name=name: unit(op) == name):  # type: ignore[misc]
                total[name] = count
        found[role] = total
    return found


def counts(opcodes: Opcodes, roles: Roles) -> dict[str, dict[str, float]]:
    """Returns the executions of each opcode by role: per quarter where the role's warps have all quarters, as four
    warps of a warpgroup have, else of all its warps."""
    found: dict[str, dict[str, float]] = {}
    for role, warps in roles.warps.items():
        ops: dict[str, float] = collections.defaultdict(float)
        for op, times in opcodes:
            ops[op] += float(times[:, list(warps)].sum()) / len(times)
        share = QUARTERS if len(warps) % QUARTERS == 0 else 1
        found[role] = {op: round(n / share, 4) for op, n in sorted(ops.items(), key=lambda item: -item[1]) if n}
    return found


def polynomial_share(opcodes: Opcodes, roles: Roles) -> float:
    """Returns the share of a tile step's exponentials that polynomials compute: pairs that the MUFU does not. An odd
    one on the MUFU is the factor of a correction."""
    of_softmax = [warp for role in roles.math for warp in roles.warps[role]]
    on_mufu = _slots(opcodes, of_softmax, _exponentials)
    return max(0, 2 * math.ceil((STEP - on_mufu) / 2)) / STEP


def matrix_instructions(opcodes: Opcodes) -> float:
    """Returns the matrix instructions of a CTA per unit of work."""
    return _sum(opcodes, lambda op: unit(op) == "tensor")


def summary(opcodes: Opcodes, roles: Roles, work: Work, rates: Rates) -> dict[str, Any]:
    """Returns all of the above as a record."""
    found = clocks(opcodes, roles, work, rates)
    return {
        "clocks": {name: round(value, 2) for name, value in found.items()},
        "binds": binds(found),
        "slots": {role: {n: round(x, 2) for n, x in units.items()} for role, units in slots(opcodes, roles).items()},
        "polynomial_share": round(polynomial_share(opcodes, roles), 4),
        "matrix_instructions": round(matrix_instructions(opcodes), 3),
        "opcodes": counts(opcodes, roles),
    }


def _exponentials(op: str) -> float:
    return (2 if "16x2" in op else 1) if op.startswith("MUFU.EX2") else 0


def _of(name: str, rates: Rates) -> Weight:
    return lambda op: rates.clocks(name) if unit(op) == name else 0


def _slots(opcodes: Opcodes, warps: Sequence[int], weight: Weight) -> float:
    """Returns the weighted executions on the fullest quarter, averaged over the CTAs of a cluster."""
    return float(_by_quarter(opcodes, warps, weight).max(axis=1).mean())


def _by_quarter(opcodes: Opcodes, warps: Sequence[int], weight: Weight) -> Array:
    """Returns weighted executions by [CTA rank, quarter]."""
    found = np.zeros((_ranks(opcodes), QUARTERS))
    for op, times in opcodes:
        if w := weight(op):
            for warp in warps:
                found[:, warp % QUARTERS] += w * times[:, warp]
    return found


def _sum(opcodes: Opcodes, weight: Weight) -> float:
    """Returns the weighted executions of all warps of a CTA."""
    return float(sum(weight(op) * times.sum() for op, times in opcodes if weight(op))) / _ranks(opcodes)


def _ranks(opcodes: Opcodes) -> int:
    return len(opcodes[0][1]) if opcodes else 1
