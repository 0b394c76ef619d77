"""`warmup`: compiles all kernels that a model's attention may need into the cache, in parallel."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from cute_attn.cli import specs, warmup_shapes
from cute_attn.cli.terminal import format_seconds
from cute_attn.cli.warmup_shapes import KV_DTYPES, SOURCES, Shape
from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.runtime import cache
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "warmup",
        help="compile all kernels for a model's shapes into the cache",
        description=(
            "Compiles the kernels of every backend that auto may choose for the model, so that no call has to: "
            "prefill and decode of any length, any page size, with and without sliding windows, and copies into paged "
            "caches. Kernels that are in the cache stay there. Exits 1 if no backend takes the model, or a kernel does "
            "not compile."
        ),
    )
    add_options(parser)
    specs.add_targets(parser, None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe the attention of a model."""
    warmup_shapes.add_options(parser)
    parser.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="A,B",
        help=f"dtypes of k and v: auto (default: that of q), {', '.join(KV_DTYPES)}",
    )
    parser.add_argument(
        "--kv-source",
        default=",".join(SOURCES),
        metavar="A,B",
        help="where k and v are: paged, ragged (batch wrappers), dense (single requests); default all",
    )


def describes_a_model(options: argparse.Namespace) -> bool:
    """Whether any option of `add_options` was given."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return any(getattr(options, name) != default for name, default in vars(parser.parse_args([])).items())


def run(options: argparse.Namespace) -> int:
    shapes = warmup_shapes.shapes(options)
    chosen, refused = of_model(options, shapes, specs.targets(options.arch))
    keys = [cache.cache_key(spec, arch) for arch, found in chosen.items() for spec in found]
    before = sum(key is not None and cache.path_of(key).exists() for key in keys)
    start = time.monotonic()
    outcomes = specs.compile_all(chosen, options.jobs)
    seconds = time.monotonic() - start
    failures = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, ArtifactError)]
    if options.json:
        document = {
            "shapes": [shape._asdict() for shape in shapes],
            "kernels": {arch: [spec.asdict() for spec in found] for arch, found in chosen.items()},
            "before": before,
            "failures": failures,
            "refused": refused,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(document, indent=1))
    else:
        told: dict[str, Sequence[object]] = {"attention of one GPU": shapes, "no backend": refused, "failed": failures}
        print("".join(f"{what}: {line}\n" for what, lines in told.items() for line in lines), end="")
        where = ", ".join(f"{len(found)} for {arch}" for arch, found in chosen.items())
        print(f"{len(outcomes)} kernels ({where}), {before} of them there before, {len(failures)} failed", end="")
        print(f", in {format_seconds(seconds)}; cache: {cache.directory()}")
    return 1 if failures or not outcomes else 0


def of_model(
    options: argparse.Namespace, shapes: Sequence[Shape], arches: Sequence[Arch]
) -> tuple[dict[str, list[KernelSpec]], list[str]]:
    """Returns the kernels of a model by architecture, and why some calls have none."""
    kv_dtypes = _listed("--kv-dtype", options.kv_dtype, ("auto", *KV_DTYPES))
    sources = _listed("--kv-source", options.kv_source, SOURCES)
    chosen: dict[str, list[KernelSpec]] = {}
    refused: list[str] = []
    for arch in arches:
        found: list[KernelSpec] = []
        for shape in shapes:
            for kv_dtype in kv_dtypes:
                kernels, reasons = needed(shape, shape.dtype if kv_dtype == "auto" else kv_dtype, sources, arch)
                found += kernels
                refused += reasons
        chosen[arch.name] = list(dict.fromkeys(found))
    return chosen, list(dict.fromkeys(refused))


def _listed(name: str, text: str, choices: Sequence[str]) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    for part in found:
        if part not in choices:
            raise ArgumentError(f"{name} must list some of {', '.join(choices)}, got {part!r}")
    return list(dict.fromkeys(found))


def needed(shape: Shape, kv_dtype: str, sources: Sequence[str], arch: Arch) -> tuple[list[KernelSpec], list[str]]:
    """Returns the kernels that "auto" may choose for a shape, and why it finds none for some calls."""
    from cute_attn.dispatch import select
    from cute_attn.dispatch.capabilities import ROWS_CLASSES, Load
    from cute_attn.dispatch.families import FAMILIES
    from cute_attn.errors import NotSupported
    from cute_attn.kernels.plan.spec import PlanSpec
    from cute_attn.kernels.xqa.spec import LengthsSpec

    found: list[KernelSpec] = []
    reasons = []
    for source in sources:
        for decode in (False, True):
            asked = shape.features(kv_dtype, source, decode)
            calls = [asked, asked._replace(device_lengths=True)] if decode and source == "paged" else [asked]
            for features in calls:
                try:
                    loads = map(Load._make, product(ROWS_CLASSES[8 * features.kv_dtype.itemsize], (False, True)))
                    backends = {select.choose(features, "auto", arch, load).name for load in loads}
                except NotSupported as error:
                    reasons.append(f"{select.title(features, arch)}: {error.refusals[0]}")
                    continue
                for name in sorted(backends):
                    found += FAMILIES[name].specs(features, arch)
    if found and "paged" in sources:
        found += _appends(shape.dtype, kv_dtype)
    if found and {"paged", "ragged"} & {*sources}:
        found += [PlanSpec(), LengthsSpec()]  # of lengths on the GPU
    return found, reasons


def _appends(dtype: str, kv_dtype: str) -> list[KernelSpec]:
    """Returns the kernels that write rows of `dtype` to caches of `kv_dtype`."""
    from cute_attn.kernels.append.spec import COPY, AppendSpec, default_specs

    stored = kv_dtype if kv_dtype == "nvfp4" else COPY
    specs = (spec for spec in default_specs() if isinstance(spec, AppendSpec))
    return [spec for spec in specs if spec.stored == stored and spec.dtype in ("", dtype)]
