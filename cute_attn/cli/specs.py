"""Options that select kernels (`--arch`, `--spec`); labels and gates of kernels in tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from cute_attn.cli.terminal import ProgressBar, interruptible
from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.kernels import catalog
from cute_attn.kernels.catalog import from_dict
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.fa4.spec import BlackwellTile
from cute_attn.kernels.programs import program
from cute_attn.runtime import arch as archs
from cute_attn.runtime import artifacts
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.artifacts import Outcome
from cute_attn.runtime.spec import KernelSpec

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def add_targets(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Adds the options of compiling. `default`: architectures; None: the GPU of this machine."""
    parser.add_argument(
        "--arch",
        default=default,
        metavar="A,B",
        help=f"comma-separated list of {', '.join(archs.ARCHS)}, or of GPUs such as h100 "
        f"(default: {default or 'the GPU of this machine'})",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="number of compile processes (default: one per CPU, at most 8)"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "sm_90a,sm_100a")
    parser.add_argument(
        "--spec",
        action="append",
        metavar="JSON",
        help="kernel spec as printed by errors and `kernels --json`; repeatable (default: the default specs)",
    )


def selected(options: argparse.Namespace) -> dict[str, list[KernelSpec]]:
    """Returns the selected specs by architecture."""
    names = [arch.name for arch in targets(options.arch)]
    if options.spec is not None:
        return {arch: list(map(_parse, options.spec)) for arch in names}
    return {arch: catalog.default_specs(arch) for arch in names}


def targets(text: str | None) -> list[archs.Arch]:
    """Returns the architectures of a list; None: those of the GPUs of this machine."""
    if text is not None:
        return [archs.of_gpu(name.strip()) for name in text.split(",")]
    import torch

    if not torch.cuda.is_available():
        raise ArgumentError("torch finds no GPU here: say with --arch for which one to compile, for example sm_90a")
    indices = range(torch.cuda.device_count())
    return list({arch.name: arch for arch in map(archs.for_device, indices)}.values())


def _parse(text: str) -> KernelSpec:
    try:
        return from_dict(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"--spec must be the JSON of a kernel spec, got {text!r} ({error!r})") from error


def compile_all(specs_by_arch: dict[str, list[KernelSpec]], jobs: int | None) -> dict[tuple[str, KernelSpec], Outcome]:
    """Returns every artifact, from the cache or compiled, and shows a progress bar; failures are values."""
    total = sum(len(specs) for specs in specs_by_arch.values())
    with interruptible(), ProgressBar(total) as bar:
        try:
            return artifacts.get_many(
                specs_by_arch, program, jobs, lambda spec, arch, outcome: bar.step(f"{arch} {label(spec)}")
            )
        except (KeyboardInterrupt, SystemExit):
            print(f"interrupted after {bar.done} of {total} kernels: the same command goes on", file=sys.stderr)
            raise


def failures(arch: str, spec: KernelSpec, outcome: Outcome) -> list[str]:
    """Returns the gates that a kernel fails: no stack, shared memory within the arch's limit, matrix instructions."""
    if isinstance(outcome, ArtifactError):
        return [f"does not compile: {outcome}"]
    limit = archs.named(arch).smem_limit
    failed = []
    if outcome.stack_bytes != 0:
        failed.append(f"{outcome.stack_bytes} stack bytes: registers spill")
    if outcome.smem_bytes > limit:
        failed.append(f"{outcome.smem_bytes} bytes of shared memory, but {arch} has {limit}")
    if spec.needs_mma and outcome.mma_count == 0:
        failed.append("no matrix instruction")
    return failed


def label(spec: KernelSpec) -> str:
    """Returns the spec in a few words, without fields at their defaults."""
    words = [spec.kernel]
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value != field.default or isinstance(value, (Tile, HopperTile, BlackwellTile)):
            words.append(_word(field.name, value))
    return " ".join(filter(None, words))


def _word(name: str, value: Any) -> str:
    if isinstance(value, Tile):
        return f"{value.rows}x{value.cols}/{value.warps_rows}x{value.warps_cols}/{value.stages}"
    if isinstance(value, HopperTile):
        held = f"/q{value.q_registers}" if value.q_registers else ""
        return f"{value.rows}x{value.cols}/{value.stages}+{value.q_stages}{held}"
    if isinstance(value, BlackwellTile):
        return f"{value.rows}x{value.cols}/{value.k_stages}+{value.v_stages}"
    if isinstance(value, bool):
        return name
    if isinstance(value, tuple):
        return "+".join(value)
    if isinstance(value, int):
        return f"{name.removeprefix('head_dim_')}{value}"
    prefix = ">" if name == "out_dtype" else ""
    return prefix + SHORT.get(value, value)


def summary(outcome: Artifact) -> dict[str, Any]:
    """Returns the resources of a compiled kernel."""
    return {
        "registers": outcome.registers,
        "stack_bytes": outcome.stack_bytes,
        "smem_bytes": outcome.smem_bytes,
        "mma_count": outcome.mma_count,
        "threads": outcome.block[0] * outcome.block[1] * outcome.block[2],
        "cubin_bytes": len(outcome.cubin),
    }
