"""Performance model of decode kernels by executed machine code, without a GPU: `python -m perf.decode_model`.

Of a token and kv head: issue slots and clocks of the units of an SM beside those of memory, and the slots that a
request and kv head costs whatever its length. PTX runs on the emulator at two lengths; the SASS that ptxas makes of it
says what the difference is on a machine. It counts work, not time: docs/kernels/decode_model.md says what that leaves
out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from perf.bench import publish, save
from perf.harness import reason
from perf.machine import command_line, environment
from perf.sass import decode_clocks, measured
from perf.sass.count import Counter, resources, same_code
from perf.sass.decode import KV_BITS, Decode, Executions, kernel, kernel_rows, subject
from perf.sass.gpus import GPUS, of_arch
from perf.sass.measured import Measured
from perf.sass.tools import ToolError, Tools, find
from perf.sass.units import RATES
from perf.sass.work import Roles

ARCHS = tuple(dict.fromkeys(gpu.arch for gpu in GPUS))
RESULTS = Path(__file__).parent / "results"
MEASURED = [RESULTS / f"2026-11-22_h200_xqa_{rows}.json" for rows in ("8192", "131072")]
SHORT, LONG = 512, 1024  # keys: whole turns of every warp, past a row's first maximum


def row(case: Decode, tools: Tools, executions: Executions, roles: Roles | None = None) -> dict[str, Any]:
    """Returns the record of one kernel."""
    launched = kernel(case)
    one, two = (subject(case, launched, requests, roles) for requests in (1, 2))
    counter = Counter.of(one, tools, executions.of(case, 1))
    twice = Counter(two, counter.blocks, executions.of(case, 2))
    per_token, checks = counter.unit(SHORT, LONG)
    found = {
        "name": case.name,
        **dataclasses.asdict(case),
        "spec": launched.artifact.spec,
        "bytes": case.token_bytes,
        **decode_clocks.summary(per_token.opcodes, one.roles, one.work, case.arch, one.warps, launched.ctas),
    }
    found["fixed"] = fixed(counter.slots(SHORT), twice.slots(SHORT), found["slots"] * SHORT, launched.ctas)
    found["on"] = decode_clocks.on_gpus(found)
    return {**found, **resources(one), "same_code_as_the_dsl": same_code(one, tools), "checks": checks}


def fixed(once: float, twice: float, tokens: float, ctas: int) -> dict[str, float]:
    """Returns the slots of a segment and of a CTA's launch: from those of problems with one and with two segments a
    CTA, and those of the tokens of a segment."""
    segment = (twice - once) / ctas - tokens
    return {"segment": round(segment, 1), "launch": round(once / ctas - segment - tokens, 1)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.decode_model", description=__doc__)
    parser.add_argument("--kernel", default="xqa", help="backend whose decode kernels are counted (default: xqa)")
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=list(ARCHS), help="default: all")
    parser.add_argument("--kv-dtype", nargs="+", choices=KV_BITS, default=list(KV_BITS), help="default: all")
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128, 256], help="default: 64 128 256")
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[4, 8, 16, 32], help="query rows of a kv head (4 8 16 32)"
    )
    pairs = parser.add_mutually_exclusive_group()
    pairs.add_argument("--few", dest="many", action="store_const", const=[False], help="few requests only")
    pairs.add_argument("--many", dest="many", action="store_const", const=[True], help="many requests only")
    parser.set_defaults(many=[False, True])
    parser.add_argument("--roles", type=Roles.parse, help='roles of warps, as "softmax=0-7,load=8", for slots by role')
    parser.add_argument(
        "--measured", nargs="*", type=Path, default=MEASURED, help="records of perf.xqa on an H200 (default: committed)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--tools", type=Path, help="folder where nvidia-cuda-nvcc and nvidia-cuda-nvdisasm are")
    parser.add_argument("--out", type=Path, help="JSON file for the record, written as rows are made")
    return parser.parse_args(argv)


def cases(options: argparse.Namespace, launches: Sequence[Measured]) -> list[Decode]:
    """Returns what is counted: all combinations of the options, then other kernels that were measured."""
    keys = itertools.product(options.arch, options.kv_dtype, options.head_dim, options.rows, options.many)
    chosen = [Decode(options.kernel, a, kv, d, kernel_rows(kv, rows), many) for a, kv, d, rows, many in keys]
    return list(dict.fromkeys([*chosen, *measured.cases(launches)]))


def groups(chosen: Sequence[Decode]) -> list[list[Decode]]:
    """Returns cases that architectures may share PTX of, and those of few and many requests, together."""
    found: dict[tuple[str, int, int], list[Decode]] = {}
    for case in chosen:
        found.setdefault((case.kv_dtype, case.head_dim, case.rows), []).append(case)
    return list(found.values())


def group_rows(group: Sequence[Decode], tools: Tools, roles: Roles | None) -> list[tuple[Decode, dict[str, Any] | str]]:
    """Returns the records of a group, or why there is none."""
    found: list[tuple[Decode, dict[str, Any] | str]] = []
    executions = Executions()
    for case in group:
        try:
            found.append((case, row(case, tools, executions, roles)))
        except Exception as error:  # a kernel that cannot be counted must not end the run
            found.append((case, reason(error)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        tools = find(options.tools)
    except ToolError as error:
        print(error, file=sys.stderr)
        return 2
    (gpu, *_) = of_arch("sm_90a")
    compared = gpu.arch in options.arch and options.kernel == "xqa"
    launches = [m for path in options.measured for m in measured.measured(path, gpu)] if compared else []
    record: dict[str, Any] = {
        "command": command_line("decode_model", sys.argv[1:] if argv is None else argv),
        "environment": {**environment(), **tools.versions()},
        "rates": {arch: dataclasses.asdict(RATES[arch]) for arch in options.arch},
        "gpus": [dataclasses.asdict(gpu) for gpu in GPUS if gpu.arch in options.arch],
        "decode_model": [],
        "measured": [],
        "failed_rows": {},
    }
    chosen = cases(options, launches)
    rows: dict[Decode, dict[str, Any]] = {}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        pending = [pool.submit(group_rows, group, tools, options.roles) for group in groups(chosen)]
        for done in as_completed(pending):
            for case, found in done.result():
                print(case.name, found if isinstance(found, str) else "", file=sys.stderr, flush=True)
                if isinstance(found, str):
                    record["failed_rows"][case.name] = found
                else:
                    rows[case] = found
            record["decode_model"] = [rows[case] for case in chosen if case in rows]
            if options.out:
                save(record, options.out)
    record["measured"] = [measured.beside(m, rows[m.case], gpu) for m in launches if m.case in rows]
    publish(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
