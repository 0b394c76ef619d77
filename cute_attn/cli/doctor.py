"""`doctor`: what is here, what runs where, and why not. Needs nothing: no GPU, no DSL, no CUDA, no torch."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

from cute_attn.cli.text import size, table
from cute_attn.errors import ArgumentError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import bundle, cache, switches
from cute_attn.runtime.compile import dsl_import_error

ENVIRONMENT = (
    *("CUTE_ATTN_CACHE_DIR", "CUTE_ATTN_BUNDLE", "CUTE_ATTN_EMULATE_ARCH"),
    *(switches.DISABLE_JIT, switches.VALIDATE, "CUDA_VISIBLE_DEVICES"),
)
OLDEST_DRIVER = 13000  # cuda-python 13 refuses older drivers
MAJOR_ATTRIBUTE, MINOR_ATTRIBUTE = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class Line(NamedTuple):
    """One finding. `state`: "ok", "--" (not here, and not needed), "!!" (broken: the exit code becomes 1)."""

    state: str
    name: str
    text: str


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]


class Driver(NamedTuple):
    """The CUDA driver as it answers itself, without torch or cuda-python."""

    version: int  # 13000 is CUDA 13.0
    gpus: tuple[Gpu, ...]
    problem: str | None  # why there is none, or why it cannot be used


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is here, what runs where, and why not",
        description=(
            "Looks at Python, torch, the CUDA driver, GPUs, CuTe DSL, cuda-python, cache and environment. "
            "Exits 0 if everything that this machine could run runs, 1 if something it needs is broken "
            "(lines marked !!)."
        ),
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    driver = probe_driver()
    here = [
        python(),
        torch(driver),
        driver_line(driver),
        *gpu_lines(driver),
        dsl(driver),
        cuda_python(driver),
    ]
    here += [cache_line(), *environment()]
    runs = [reference_line(), *kernel_lines(driver, here), compile_line()]
    print("What is here\n" + _lines(here) + "\n\nWhat runs\n" + _lines(runs))
    return 1 if any(line.state == "!!" for line in (*here, *runs)) else 0


def _lines(lines: Sequence[Line]) -> str:
    return "\n".join(table(("", "", ""), lines, left=3).splitlines()[2:])


def probe_driver() -> Driver:
    """Ask libcuda."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(0, (), "libcuda.so.1 is not here")
    if status := cuda.cuInit(0):
        return Driver(0, (), f"cuInit failed with error {status}")
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return Driver(version.value, tuple(_gpu(cuda, index) for index in range(count.value)), None)


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    values = []
    for attribute in (MAJOR_ATTRIBUTE, MINOR_ATTRIBUTE):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values.append(value.value)
    return Gpu(name.value.decode(errors="replace"), (values[0], values[1]))


def python() -> Line:
    return Line("ok", "python", f"{platform.python_version()} on {platform.machine()} {platform.system()}")


def torch(driver: Driver) -> Line:
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Line("!!", "torch", f"does not import ({error}): nothing runs without it")
    cuda = module.version.cuda
    if driver.gpus and cuda is None:
        return Line("!!", "torch", f"{module.__version__} is a build without CUDA: GPU tensors are impossible")
    if driver.gpus and not module.cuda.is_available():
        return Line("!!", "torch", f"{module.__version__} for CUDA {cuda} cannot use the GPU: see the driver")
    return Line("ok", "torch", f"{module.__version__}, " + (f"CUDA {cuda}" if cuda else "built without CUDA"))


def driver_line(driver: Driver) -> Line:
    if driver.problem:
        return Line("--", "CUDA driver", driver.problem)
    major, minor = driver.version // 1000, driver.version % 1000 // 10
    if driver.version < OLDEST_DRIVER:
        need = f"cuda-python needs one for CUDA {OLDEST_DRIVER // 1000}"
        return Line("!!", "CUDA driver", f"for CUDA {major}.{minor}: too old, {need}")
    return Line("ok", "CUDA driver", f"for CUDA {major}.{minor}")


def gpu_lines(driver: Driver) -> list[Line]:
    if not driver.gpus:
        return [Line("--", "GPU", "none")]
    lines = []
    for index, gpu in enumerate(driver.gpus):
        major, minor = gpu.capability
        lines.append(Line("ok", f"GPU {index}", f"{gpu.name}, compute capability {major}.{minor}"))
    return lines


def dsl(driver: Driver) -> Line:
    """Without it kernels come from bundles only."""
    version = cache.dsl_version()
    absent = "!!" if driver.gpus and not bundle.directories() else "--"
    if version is None:
        return Line(absent, "CuTe DSL", "not installed (nvidia-cutlass-dsl): kernels come from bundles only")
    if error := dsl_import_error():
        return Line(absent, "CuTe DSL", f"{version}: {error}")
    return Line("ok", "CuTe DSL", version)


def cuda_python(driver: Driver) -> Line:
    try:
        importlib.import_module("cuda.bindings.driver")
        version = importlib.metadata.version("cuda-bindings")
    except (ImportError, OSError, RuntimeError) as error:
        state = "!!" if driver.gpus else "--"
        return Line(state, "cuda-python", f"does not import ({error}): kernels cannot be launched")
    return Line("ok", "cuda-python", version)


def cache_line() -> Line:
    directory = cache.directory()
    files = list(directory.glob("*.artifact")) if directory.is_dir() else []
    where = f"{directory}: {len(files)} kernels, {size(sum(file.stat().st_size for file in files))}"
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Line("!!", "cache", f"{where}; not writable: every process compiles again")
    return Line("ok", "cache", where)


def environment() -> list[Line]:
    return [Line("ok", name, os.environ[name]) for name in ENVIRONMENT if name in os.environ]


def reference_line() -> Line:
    try:
        importlib.import_module("cute_attn.reference.attention")
    except (ImportError, OSError) as error:
        return Line("!!", "CPU tensors", f"no: {error}")
    return Line("ok", "CPU tensors", "the reference, in torch: every feature, slow")


def kernel_lines(driver: Driver, here: Sequence[Line]) -> list[Line]:
    """For each GPU, the kernels' verdict: what stands in the way is marked in `here`."""
    if not driver.gpus:
        return [Line("--", "GPU tensors", f"no: {driver.problem or 'the driver shows no GPU'}")]
    broken = [line.name for line in here if line.state == "!!" and line.name != "cache"]
    lines = []
    for index, gpu in enumerate(driver.gpus):
        try:
            arch = archs.for_capability(gpu.capability)
        except ArgumentError as error:
            lines.append(Line("--", f"GPU {index} tensors", f"no: {error}"))
            continue
        if broken:
            lines.append(Line("!!", f"GPU {index} tensors", f"no: see {', '.join(broken)} above"))
        else:
            lines.append(Line("ok", f"GPU {index} tensors", f"kernels for {arch.name}"))
    return lines


def compile_line() -> Line:
    """Compiling needs the DSL alone, and works for every architecture."""
    if cache.dsl_version() is None or dsl_import_error():
        return Line("--", "compiling", "no: it needs CuTe DSL (pip install 'nvidia-cutlass-dsl[cu13]')")
    if switches.is_on(switches.DISABLE_JIT):
        return Line("--", "compiling", f"no: {switches.DISABLE_JIT} is set")
    return Line("ok", "compiling", f"for {', '.join(archs.ARCHS)}, no GPU needed")
