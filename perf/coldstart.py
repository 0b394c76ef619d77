"""Seconds from nothing to the first results, each in a fresh process, beside FlashInfer and FlashAttention-4:
`python -m perf.coldstart --out perf/results/coldstart.json`.

A process imports torch, makes the inputs and waits for the GPU; then the clock starts: import of the library, first
prefill, first decode, each with its compile, until the result is there. "cold": empty caches; "warm": those that a cold
process left on disk; "bundle": kernels from a bundle, compiling forbidden. FlashInfer cold takes minutes of nvcc.

Byte code is there, as pip leaves it: a process that does not count writes it (FlashInfer's imports only, for its calls
take minutes). Without it the import of the DSL alone takes 2 seconds more.

The record is written after every process, so that what a stopped run has measured is kept. `--budget SECONDS` stops it
in time; ours alone starts 10 processes of 4 to 9 s (H100).

This module imports nothing but the standard library before a clock starts.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPEATS = 3
LIMIT = 600.0  # seconds of one process
SPENT = "the time budget was spent"
MODULES = {"cute_attn": "cute_attn", "FlashInfer": "flashinfer", "flash-attn-4": "flash_attn"}

# Distributions without torch; a library that compiles needs its compiler, too. FlashInfer's is the CUDA toolkit.
DSL = ("nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")))
CUDA = ("cuda-python", "cuda-bindings", "cuda-core", "cuda-pathfinder")
INSTALLED = {
    "cute_attn": ("cute_attn",),
    "cute_attn with the compiler": ("cute_attn", *DSL, *CUDA, "filelock"),
    "flash-attn-4 with the compiler": ("flash-attn-4", "quack-kernels", "apache-tvm-ffi", *DSL, *CUDA),
    "FlashInfer without nvcc": ("flashinfer-python", "flashinfer-cubin", "apache-tvm-ffi", *DSL),
}


# ---- in a fresh process

PREFILL = (4096, 32, 8, 128)  # tokens, query heads, kv heads, head dim; causal
DECODE_KEYS = 8192
KEYS = ("torch_s", "import_s", "prefill_s", "decode_s", "prefill_again_s", "decode_again_s")
BUNDLE = "PERF_COLDSTART_BUNDLE"  # where the process leaves a bundle of the kernels that it used
IMPORTS = "PERF_COLDSTART_IMPORTS"  # not empty: the process ends after the imports


def _calls(library: str) -> tuple[Callable[..., Any], ...]:
    """Imports a library; returns its causal prefill and its decode of q, k, v."""
    if library == "flash-attn-4":
        attend = importlib.import_module("flash_attn.cute").flash_attn_func
        return tuple(lambda *x, causal=c: attend(*(t[None] for t in x), causal=causal) for c in (True, False))
    module = importlib.import_module(MODULES[library])
    prefill, decode = module.single_prefill_with_kv_cache, module.single_decode_with_kv_cache
    return lambda q, k, v: prefill(q, k, v, causal=True), lambda q, k, v: decode(q[0], k, v)


def measure(library: str) -> dict[str, float]:
    """Returns the seconds of each step; without a GPU, and where `IMPORTS` is set, those of the imports alone."""
    start = time.perf_counter()
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, PREFILL[3], dtype=torch.bfloat16, device=device)

    tokens, num_qo_heads, num_kv_heads, _ = PREFILL
    prefill = normal(tokens, num_qo_heads), normal(tokens, num_kv_heads), normal(tokens, num_kv_heads)
    decode = normal(1, num_qo_heads), normal(DECODE_KEYS, num_kv_heads), normal(DECODE_KEYS, num_kv_heads)
    if gpu:
        torch.cuda.synchronize()
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    seconds = [time.perf_counter() - start]
    start = time.perf_counter()
    calls = _calls(library)
    seconds.append(time.perf_counter() - start)
    if gpu and not os.environ.get(IMPORTS):
        for call, inputs in [*zip(calls, (prefill, decode), strict=True)] * 2:
            start = time.perf_counter()
            call(*inputs)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        if library == "cute_attn" and (directory := os.environ.get(BUNDLE)):
            from cute_attn.runtime import artifacts, bundle

            bundle.write(Path(directory), artifacts.held())
    return dict(zip(KEYS, seconds, strict=False))


# ---- all processes


def conditions(library: str, directory: Path) -> dict[str, dict[str, str]]:
    """Returns the environments of a library's processes, by name, in the order in which they must run."""
    cache, bundle = str(directory / "cache"), str(directory / "bundle")
    if library == "cute_attn":
        common = {"CUTE_ATTN_CACHE_DIR": cache, "CUTE_ATTN_BUNDLE": "", "CUTE_ATTN_DISABLE_JIT": ""}
        frozen = {"CUTE_ATTN_CACHE_DIR": str(directory / "none"), "CUTE_ATTN_BUNDLE": bundle}
        return {
            "cute_attn, cold": {**common, BUNDLE: bundle},
            "cute_attn, warm": common,
            "cute_attn, bundle": {**frozen, "CUTE_ATTN_DISABLE_JIT": "1"},
        }
    if library == "FlashInfer":
        return {f"FlashInfer, {state}": {"FLASHINFER_WORKSPACE_BASE": cache} for state in ("cold", "warm")}
    off = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    on = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": cache}
    return {"flash-attn-4, cold": off, "flash-attn-4, its cache empty": on, "flash-attn-4, warm": on}


class Run:
    """Starts processes until a time budget (seconds; None: no limit) is spent."""

    def __init__(self, limit: float, budget: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._budget, self._clock, self._began = limit, budget, clock, clock()

    def start(self, library: str, env: dict[str, str]) -> dict[str, Any] | None:
        """Returns what a new process measures, or the reason why it could not; None if the budget does not last."""
        from perf import program

        if self._left() <= 0:
            return None
        found = program.in_process("coldstart", library, env, min(self._limit, self._left()), lines=1)
        return None if "reason" in found and self._left() <= 0 else found

    def _left(self) -> float:
        return math.inf if self._budget is None else self._began + self._budget - self._clock()


def measured(library: str, repeats: int, run: Run, save: Callable[[dict[str, Any]], None]) -> None:
    """Measures `repeats` rounds of a library's processes; one that fails once is not tried again.

    After each of them `save` gets the medians by condition.
    """
    if importlib.util.find_spec(MODULES[library]) is None:
        return save({library: {"reason": f"{MODULES[library]} is not installed"}})
    samples: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="cute_attn-bytecode-") as written:
        bytecode = {"PYTHONPYCACHEPREFIX": written, "PYTHONDONTWRITEBYTECODE": ""}
        with tempfile.TemporaryDirectory(prefix="cute_attn-coldstart-") as name:
            first = next(iter(conditions(library, Path(name)).values()))
            run.start(library, {**first, **bytecode, IMPORTS: "1" if library == "FlashInfer" else ""})
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="cute_attn-coldstart-") as name:
                for condition, env in conditions(library, Path(name)).items():
                    if any("reason" in sample for sample in samples.get(condition, ())):
                        continue
                    found = run.start(library, {**env, **bytecode})
                    print(f"{condition}: {found or SPENT}", file=sys.stderr, flush=True)
                    if found is not None:
                        samples.setdefault(condition, []).append(found)
                    save({condition: _medians(samples.get(condition, [{"reason": SPENT}]))})


def _medians(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failed = [sample for sample in samples if "reason" in sample]
    if failed:
        return failed[0]
    return {
        **{key: round(statistics.median(s[key] for s in samples), 4) for key in samples[0]},
        "processes": len(samples),
    }


def install_sizes() -> dict[str, dict[str, Any]]:
    """Returns the bytes of installed files, by set of distributions, and which of them are not installed."""
    found: dict[str, dict[str, Any]] = {}
    for name, distributions in INSTALLED.items():
        sizes = {d: size for d in distributions if (size := _bytes_of(d)) is not None}
        if distributions[0] not in sizes:
            found[name] = {"reason": f"{distributions[0]} is not installed"}
            continue
        found[name] = {"bytes": sum(sizes.values()), "distributions": sizes}
    return found


def _bytes_of(distribution: str) -> int | None:
    if distribution == "cute_attn":  # which may be a checkout
        package = importlib.util.find_spec("cute_attn")
        assert package is not None
        assert package.origin is not None
        return sum(path.stat().st_size for path in Path(package.origin).parent.rglob("*.py"))
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    total = 0
    for path in files:
        if path.suffix != ".pyc":
            with contextlib.suppress(OSError):
                total += Path(str(path.locate())).stat().st_size
    return total


def main(argv: Sequence[str] | None = None) -> None:
    from perf import program
    from perf.bench import save
    from perf.machine import why_no_gpu
    from perf.report import cold_start_tables

    parser = program.parser("coldstart", __doc__)
    parser.add_argument("--libraries", nargs="+", choices=MODULES, default=list(MODULES), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"processes per condition (default {REPEATS})")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of one process (default {LIMIT:.0f})")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no process after this time, and stop it")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the process that runs, too
    record: dict[str, Any] = {
        **program.head("coldstart"),
        "bytecode": "on disk",  # records without this entry were made without byte code
        "install": install_sizes(),
        "coldstart": {},
    }
    if absent := why_no_gpu():
        record["not_measured"] = f"first calls, for {absent}; imports alone"
        print(f"First calls are not measured: {absent}.", file=sys.stderr)

    def keep(found: dict[str, Any]) -> None:
        record["coldstart"].update(found)
        save(record, options.out)

    run = Run(options.limit, options.budget)
    for library in options.libraries:
        measured(library, 1 if library == "FlashInfer" else options.repeats, run, keep)  # FlashInfer: minutes each
    print("\n\n".join(cold_start_tables(record)))


if __name__ == "__main__":
    main()
