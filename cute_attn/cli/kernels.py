"""`kernels`: compiles kernels for any architecture, no GPU needed, and shows their resources."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cute_attn.cli import specs
from cute_attn.cli.terminal import format_bytes, table
from cute_attn.errors import ArtifactError
from cute_attn.runtime.spec import KernelSpec

HEADER = ("arch", "kernel", "registers", "stack", "smem", "mma", "threads", "cubin", "")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "kernels",
        help="compile kernels and show registers, stack, shared memory and matrix instructions",
        description=(
            "Compiles kernels (or finds them in the cache) and prints their resources. A kernel is shown as name, "
            "input dtype, >output dtype, head dims, variants, tile rows x cols / warps / stages. Exits 1 if a "
            "kernel does not compile or, with --check, fails a gate: no stack bytes, shared memory within the "
            "architecture's limit, matrix instructions if the kernel multiplies matrices."
        ),
    )
    specs.add_options(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 if a kernel fails a gate")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    outcomes = specs.compile_all(specs.selected(options), options.jobs)
    failed = {key: specs.failures(*key, outcome) for key, outcome in outcomes.items()}
    if options.json:
        kernels = []
        for (arch, spec), outcome in outcomes.items():
            numbers = {} if isinstance(outcome, ArtifactError) else specs.summary(outcome)
            kernels.append({"arch": arch, "spec": spec.asdict(), **numbers, "failures": failed[arch, spec]})
        print(json.dumps({"kernels": kernels, "failed": sum(map(bool, failed.values()))}, indent=1))
    else:
        print(report(outcomes, failed))
    broken = any(isinstance(outcome, ArtifactError) for outcome in outcomes.values())
    return 1 if broken or (options.check and any(failed.values())) else 0


Key = tuple[str, KernelSpec]


def report(outcomes: dict[Key, specs.Outcome], failed: dict[Key, list[str]]) -> str:
    """Returns the table, the failures in words, and a last line that counts them."""
    rows = []
    for (arch, spec), outcome in outcomes.items():
        verdict = "FAILS" if failed[arch, spec] else "ok"
        numbers: tuple[object, ...] = ("-",) * 6
        if not isinstance(outcome, ArtifactError):
            n = specs.summary(outcome)
            smem, cubin = format_bytes(n["smem_bytes"]), format_bytes(n["cubin_bytes"])
            numbers = (n["registers"], n["stack_bytes"], smem, n["mma_count"], n["threads"], cubin)
        rows.append((arch, specs.label(spec), *numbers, verdict))
    failing = {key: why for key, why in failed.items() if why}
    lines = [table(HEADER, rows, left=2), ""]
    for (arch, spec), why in failing.items():
        lines.append(f"{arch} {specs.label(spec)}: {'; '.join(why)}\n  {spec.key()}")
    lines.append(f"{len(outcomes) - len(failing)} of {len(outcomes)} kernels pass every gate")
    return "\n".join(lines)
