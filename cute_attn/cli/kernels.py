"""`kernels`: compile kernels for any architecture, no GPU needed, and show what the compiler made of them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cute_attn.cli import specs
from cute_attn.cli.text import size, table
from cute_attn.errors import ArtifactError
from cute_attn.runtime.spec import KernelSpec

HEADER = ("arch", "kernel", "registers", "stack", "smem", "mma", "threads", "cubin", "")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "kernels",
        help="compile kernels and show registers, stack, shared memory and matrix instructions",
        description=(
            "Compiles kernels (or finds them in the cache) and prints their resources. A kernel reads: name, "
            "input dtype, >output dtype, head dims, variants, tile rows x cols / warps / stages. Exits 1 if "
            "one does not compile or, with --check, misses a gate: 0 stack bytes, shared memory within the "
            "architecture's limit, matrix instructions where the kernel multiplies matrices."
        ),
    )
    specs.add_options(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 where a gate is missed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    outcomes = specs.compile_all(specs.chosen(options), options.jobs)
    missed = {key: specs.failures(*key, outcome) for key, outcome in outcomes.items()}
    if options.json:
        print(json.dumps(document(outcomes, missed), indent=1))
    else:
        print(report(outcomes, missed))
    broken = any(isinstance(outcome, ArtifactError) for outcome in outcomes.values())
    return 1 if broken or (options.check and any(missed.values())) else 0


Key = tuple[str, KernelSpec]


def report(outcomes: dict[Key, specs.Outcome], missed: dict[Key, list[str]]) -> str:
    """The table, the failures in words, and a last line that counts them."""
    rows = []
    for (arch, spec), outcome in outcomes.items():
        verdict = "FAILS" if missed[arch, spec] else "ok"
        numbers: tuple[object, ...] = ("-",) * 6
        if not isinstance(outcome, ArtifactError):
            n = specs.summary(outcome)
            smem, cubin = size(n["smem_bytes"]), size(n["cubin_bytes"])
            numbers = (n["registers"], n["stack_bytes"], smem, n["mma_count"], n["threads"], cubin)
        rows.append((arch, specs.label(spec), *numbers, verdict))
    failing = {key: why for key, why in missed.items() if why}
    lines = [table(HEADER, rows, left=2), ""]
    for (arch, spec), why in failing.items():
        lines.append(f"{arch} {specs.label(spec)}: {'; '.join(why)}\n  {spec.key()}")
    lines.append(f"{len(outcomes) - len(failing)} of {len(outcomes)} kernels pass every gate")
    return "\n".join(lines)


def document(outcomes: dict[Key, specs.Outcome], missed: dict[Key, list[str]]) -> dict[str, Any]:
    """The same as data."""
    kernels = []
    for (arch, spec), outcome in outcomes.items():
        numbers = {} if isinstance(outcome, ArtifactError) else specs.summary(outcome)
        kernels.append({"arch": arch, "spec": spec.asdict(), **numbers, "failures": missed[arch, spec]})
    return {"kernels": kernels, "failed": sum(bool(why) for why in missed.values())}
