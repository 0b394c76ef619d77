"""`doctor`: reports what is installed, what runs on which device, and why not. Needs the standard library only."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cute_attn
from cute_attn.cli.terminal import format_bytes, table
from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import bundle, cache, switches
from cute_attn.runtime.compile import dsl_import_error
from cute_attn.runtime.dsl import version as dsl_version

ENVIRONMENT = (*switches.VARIABLES, "CUDA_VISIBLE_DEVICES")
PACKAGES = {"numpy": "nothing runs without it", "filelock": "kernels cannot be compiled without it"}
# Lines without which no kernel runs.
PREVENTING = (*PACKAGES, "torch", "CUDA driver", "CuTe DSL", "cuda-python", "bundle")
OLDEST_DRIVER = 12040  # has cuFuncLoad
MAJOR_ATTRIBUTE, MINOR_ATTRIBUTE = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class Finding(NamedTuple):
    """One line of the report. `state`: "ok", "--" (missing, but not needed), "!!" (broken: the exit code becomes 1)."""

    state: str
    name: str
    text: str


class Driver(NamedTuple):
    """Answers of the CUDA driver itself, without torch or cuda-python."""

    version: int  # 13000 is CUDA 13.0
    gpus: tuple[tuple[str, tuple[int, int]], ...]  # names and compute capabilities
    problem: str | None  # why it is missing or cannot be used


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="report what is installed, what runs on which device, and why not",
        description=(
            "Checks Python, torch, the CUDA driver, GPUs, CuTe DSL, cuda-python, cache and environment variables. "
            "Exits 1 if something that this machine needs is broken (lines marked !!), else 0."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--variables", action="store_true", help="print the environment variables, as Markdown, instead"
    )


def run(options: argparse.Namespace) -> int:
    if options.variables:
        print(switches.markdown(), end="")
        return 0
    driver = probe_driver()
    installed = [
        Finding("ok", "cute_attn", cute_attn.__version__),
        Finding("ok", "python", f"{platform.python_version()} on {platform.machine()} {platform.system()}"),
        torch(driver),
        *map(package, PACKAGES),
        driver_line(driver),
        *gpu_lines(driver),
        dsl(driver),
        cuda_python(driver),
    ]
    installed += [cache_line(), *environment()]
    runs = [reference_line(), *kernel_lines(driver, installed), compile_line()]
    broken = any(line.state == "!!" for line in (*installed, *runs))
    if options.json:
        parts = {"installed": installed, "runs": runs}
        document = {part: [line._asdict() for line in lines] for part, lines in parts.items()}
        print(json.dumps({"broken": broken, **document}, indent=1))
    else:
        print("Installed\n" + _table(installed) + "\n\nRuns\n" + _table(runs))
    return 1 if broken else 0


def _table(findings: Sequence[Finding]) -> str:
    return "\n".join(table(("", "", ""), findings, left=3).splitlines()[2:])


def probe_driver() -> Driver:
    """Asks libcuda for its version and its GPUs."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(0, (), "libcuda.so.1 is not installed")
    if status := cuda.cuInit(0):
        return Driver(0, (), f"cuInit failed with error {status}")
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return Driver(version.value, tuple(_gpu(cuda, index) for index in range(count.value)), None)


def _gpu(cuda: ctypes.CDLL, index: int) -> tuple[str, tuple[int, int]]:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR_ATTRIBUTE, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR_ATTRIBUTE, device)
    return name.value.decode(errors="replace"), (major.value, minor.value)


def torch(driver: Driver) -> Finding:
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Finding("!!", "torch", f"cannot be imported ({error}): nothing runs without it")
    cuda = module.version.cuda
    if driver.gpus and cuda is None:
        return Finding("!!", "torch", f"{module.__version__} is a build without CUDA: it has no GPU tensors")
    if driver.gpus and not module.cuda.is_available():
        return Finding("!!", "torch", f"{module.__version__} for CUDA {cuda} cannot use the GPU: see the driver")
    return Finding("ok", "torch", f"{module.__version__}, " + (f"CUDA {cuda}" if cuda else "built without CUDA"))


def package(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding("!!", name, f"not installed: {PACKAGES[name]}")


def driver_line(driver: Driver) -> Finding:
    if driver.problem:
        return Finding("--", "CUDA driver", driver.problem)
    major, minor = driver.version // 1000, driver.version % 1000 // 10
    oldest = oldest_driver()
    if driver.version < oldest:
        need = f"launching needs a driver for CUDA {oldest // 1000}.{oldest % 1000 // 10} or later"
        return Finding("!!", "CUDA driver", f"CUDA {major}.{minor}: too old, {need}")
    return Finding("ok", "CUDA driver", f"CUDA {major}.{minor}")


def oldest_driver() -> int:
    """Returns the oldest driver that launches: cuda-python refuses those of an earlier major version of CUDA."""
    try:
        major = int(importlib.metadata.version("cuda-bindings").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        major = 0
    return max(OLDEST_DRIVER, 1000 * major)


def gpu_lines(driver: Driver) -> list[Finding]:
    if not driver.gpus:
        return [Finding("--", "GPU", "none")]
    described = (f"{name}, compute capability {major}.{minor}" for name, (major, minor) in driver.gpus)
    return [Finding("ok", f"GPU {index}", text) for index, text in enumerate(described)]


def dsl(driver: Driver) -> Finding:
    """Checks the DSL, without which kernels come only from bundles."""
    version = dsl_version()
    absent = "!!" if driver.gpus and not bundle.directories() else "--"
    if version is None:
        return Finding(absent, "CuTe DSL", "not installed (nvidia-cutlass-dsl): kernels come only from bundles")
    if error := dsl_import_error():
        return Finding(absent, "CuTe DSL", f"{version}: {error}")
    return Finding("ok", "CuTe DSL", version)


def cuda_python(driver: Driver) -> Finding:
    try:
        importlib.import_module("cuda.bindings.driver")
        version = importlib.metadata.version("cuda-bindings")
    except (ImportError, OSError, RuntimeError) as error:
        state = "!!" if driver.gpus else "--"
        return Finding(state, "cuda-python", f"cannot be imported ({error}): kernels cannot be launched")
    return Finding("ok", "cuda-python", version)


def cache_line() -> Finding:
    directory = cache.directory()
    files = list(directory.glob("*.artifact")) if directory.is_dir() else []
    where = f"{directory}: {len(files)} kernels, {format_bytes(sum(file.lstat().st_size for file in files))}"
    if directory.is_dir():
        try:
            cache.check_private(directory, directory.stat())
        except cache.NotPrivate as error:
            return Finding("!!", "cache", f"{where}; not used ({error}): every process compiles its kernels itself")
    if not directory.is_absolute():
        return Finding("!!", "cache", f"{where}; not used ({cache.NOWHERE}): every process compiles its kernels itself")
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding("!!", "cache", f"{where}; not writable: every process compiles its kernels itself")
    return Finding("ok", "cache", where)


def environment() -> list[Finding]:
    """Returns the variables that are set, the bundles that one of them names, and variables that nobody knows."""
    lines = [Finding("ok", name, os.environ[name]) for name in ENVIRONMENT if os.environ.get(name)]
    lines += [bundle_line(directory) for directory in bundle.directories()]
    return lines + [Finding("!!", name, switches.advice(name, meant)) for name, meant in switches.unknown().items()]


def bundle_line(directory: Path) -> Finding:
    """Tells whether a bundle can be used, and for which architectures it has kernels."""
    try:
        counts = bundle.counts(directory)
    except ArtifactError as error:
        return Finding("!!", "bundle", str(error))
    kernels = ", ".join(f"{count} kernels for {arch}" for arch, count in sorted(counts.items()))
    return Finding("ok", "bundle", f"{directory}: {kernels or 'no kernels'}")


def reference_line() -> Finding:
    try:
        importlib.import_module("cute_attn.reference.attention")
    except (ImportError, OSError) as error:
        return Finding("!!", "CPU tensors", f"no: {error}")
    return Finding("ok", "CPU tensors", "the reference in torch: all features, slow")


def kernel_lines(driver: Driver, installed: Sequence[Finding]) -> list[Finding]:
    """Tells for each GPU whether kernels run on it; the lines of `installed` that prevent it are named."""
    if not driver.gpus:
        return [Finding("--", "GPU tensors", f"no: {driver.problem or 'the driver finds no GPU'}")]
    broken = [line.name for line in installed if line.state == "!!" and line.name in PREVENTING]
    lines = []
    for index, (_, capability) in enumerate(driver.gpus):
        try:
            arch = archs.for_capability(capability)
        except ArgumentError as error:
            lines.append(Finding("--", f"GPU {index} tensors", f"no: {error}"))
            continue
        if broken:
            lines.append(Finding("!!", f"GPU {index} tensors", f"no: see {', '.join(broken)} above"))
        else:
            lines.append(Finding("ok", f"GPU {index} tensors", f"kernels for {arch.name}"))
    return lines


def compile_line() -> Finding:
    """Tells whether kernels can be compiled, which needs only the DSL and works for every architecture."""
    if dsl_version() is None or dsl_import_error():
        return Finding("--", "compiling", "no: it needs CuTe DSL (pip install nvidia-cutlass-dsl)")
    if switches.is_on(switches.DISABLE_JIT):
        return Finding("--", "compiling", f"no: {switches.DISABLE_JIT} is set")
    return Finding("ok", "compiling", f"for {', '.join(archs.ARCHS)}, no GPU needed")
