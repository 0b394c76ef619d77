"""The model of decode kernels beside what a GPU measured: how much of each unit the measured time leaves idle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cute_attn.kernels.xqa import tiles
from perf.sass.decode import Decode, kernel_rows
from perf.sass.decode_clocks import UNITS, on_gpu
from perf.sass.gpus import Gpu
from perf.sass.units import QUARTERS

CANDIDATES = ("cute_attn xqa", "cute_attn xqa function")  # the first that a row has
KV_DTYPES = {"bfloat16": "bf16", "e4m3": "e4m3", "nvfp4": "nvfp4"}


class Measured(NamedTuple):
    """One timed decode launch."""

    name: str
    case: Decode
    pairs: int
    tokens: int  # times kv heads
    microseconds: float
    clock_mhz: int
    share: float  # of the read ceiling
    ceiling: float  # GB/s of a plain read in the same run
    record: str


def measured(path: Path, gpu: Gpu) -> list[Measured]:
    """Returns the rows of a record of `perf.xqa`, without windows and with bf16 queries, that the decode kernel ran on
    `gpu`.
    """
    record = json.loads(path.read_text())
    if gpu.name not in record["environment"]["gpu"]:
        raise ValueError(f"{path}: measured on {record['environment']['gpu']}, wanted {gpu.name}")
    found = []
    for row in record["rows"]:
        entries, w = row["candidates"], row["workload"]
        entry = next((entries[name] for name in CANDIDATES if "speed" in entries.get(name, {})), None)
        if entry is None or set(w["qo_lens"]) != {1} or w["dtype"] != "bfloat16" or not row["sm_clock_mhz"]:
            continue
        if w.get("window_left", -1) >= 0:
            continue
        heads = w["num_kv_heads"]
        pairs = len(w["kv_lens"]) * heads
        kv_dtype = KV_DTYPES[w["kv_dtype"]]
        rows = kernel_rows(kv_dtype, w["num_qo_heads"] // heads)
        case = Decode("xqa", gpu.arch, kv_dtype, w["head_dim"], rows, pairs > tiles.FEW)
        timing = entry["median_us"], row["sm_clock_mhz"], entry["share"], record["ceilings"]["read"]
        found.append(Measured(row["name"], case, pairs, sum(w["kv_lens"]) * heads, *timing, path.name))
    return found


def beside(found: Measured, row: Mapping[str, Any], gpu: Gpu) -> dict[str, Any]:
    """Returns the record of a measured launch: shares of its clocks in which each unit works, by the model's `row` of
    the same kernel. "bound" is the largest share of the read ceiling that the model's units allow, "fixed" the share
    of issue that launches and requests take whatever their length, each CTA that of one request or a part of it.
    """
    clocks = found.microseconds * found.clock_mhz * gpu.sms / found.tokens
    units = {name: row["clocks"].get(name, 0.0) for name in UNITS}
    model = on_gpu(row, gpu, found.ceiling)
    units["tensor"] = model["tensor"]
    memory = model["memory"] * found.clock_mhz / (1000 * gpu.clock_ghz)
    ctas = gpu.sms * row["spec"]["ctas"]
    fixed = row["fixed"]["segment"] * max(found.pairs, ctas) + row["fixed"]["launch"] * ctas
    return {
        "name": found.name,
        "model": row["name"],
        "record": found.record,
        "microseconds": round(found.microseconds, 2),
        "clock_mhz": found.clock_mhz,
        "clocks": round(clocks, 3),
        "read_share": round(found.share, 4),
        "shares": {name: round(value / clocks, 4) for name, value in units.items() if value},
        "fixed": round(fixed / QUARTERS / found.tokens / clocks, 4),
        "bound": round(memory / max(memory, *units.values()), 4),
        "largest": max(units, key=lambda name: units[name]),
    }


def cases(found: Sequence[Measured]) -> list[Decode]:
    """Returns the kernels that were measured."""
    return list(dict.fromkeys(m.case for m in found))
