"""Compiles a KernelSpec to an Artifact with CuTe DSL, for any architecture. Needs no GPU and no driver.

`import cutlass` takes 1-2 s, so it happens on the first compile and not before. The DSL is not thread-safe
(two threads that compile at once fail with assertion errors): a lock serialises them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterator

from cute_attn.errors import ArtifactError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import cubin as cubins
from cute_attn.runtime import dsl
from cute_attn.runtime.artifact import PARAM_BYTES, Artifact, Param
from cute_attn.runtime.spec import KernelSpec, Program, ProgramOf

_MATRIX_INSTRUCTION = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
_PTX_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)")
_KIND_OF_SCALAR = {"Int32": "i32", "Int64": "i64", "Float32": "f32", "Float64": "f64"}
_KIND_OF_PTX = {"u32": "i32", "u64": "i64", "f32": "f32", "f64": "f64", "b8": "map"}

_compile_lock = threading.RLock()
# A child forked while another thread compiles would inherit a lock that is never released.
os.register_at_fork(
    before=_compile_lock.acquire,
    after_in_parent=_compile_lock.release,
    after_in_child=_compile_lock.release,
)


def compile_spec(spec: KernelSpec, arch: str, program_of: ProgramOf) -> Artifact:
    """Compiles the kernel that `program_of` builds from `spec` for `arch` ("sm_90a", ...).

    Raises ArtifactError if the DSL is missing, the compile fails, or the result contradicts the program's own
    description (parameters, block).
    """
    archs.named(arch)
    with _compile_lock, _no_collections():
        try:
            program = program_of(spec, arch)
            ptx, cubin = _compile(program, spec.symbol, arch)
        except Exception as err:
            raise ArtifactError(f"compiling {spec.key()} for {arch} failed: {type(err).__name__}: {err}") from err
    return _artifact(spec, arch, program, ptx, cubin)


def dsl_import_error() -> str | None:
    """Imports CuTe DSL and returns None, or the reason why that is not possible."""
    try:
        with _no_collections():
            importlib.import_module("cutlass.cute")
    except (ImportError, OSError, RuntimeError) as err:  # RuntimeError: no toolkit flavour fits the driver
        return f"nvidia-cutlass-dsl does not import ({err})"
    return None


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without garbage collections: they take a quarter of importing the DSL and 8 % of a compile, 0.3 s together,
    and free nothing. A thread that finds them switched off leaves that to the one that did it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _compile(program: Program, symbol: str, arch: str) -> tuple[str, bytes]:
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir, GPUArch, KeepCUBIN, KeepPTX, OptLevel

    program.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
    # The DSL passes PTX through a file whose name is not unique, hence a private directory.
    with tempfile.TemporaryDirectory(prefix="cute_attn-") as directory:
        options = (GPUArch(arch), OptLevel(3), KeepPTX(True), KeepCUBIN(True), DumpDir(directory))
        compiled = cute.compile[options](program, *program.compile_args(), no_jit_engine=True)  # launched by the driver
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    return ptx, cubin


def _artifact(spec: KernelSpec, arch: str, program: Program, ptx: str, cubin: bytes) -> Artifact:
    kernels = cubins.read_kernels(cubin)
    if len(kernels) != 1 or not kernels[0].symbol.startswith(spec.symbol):
        found = ", ".join(kernel.symbol for kernel in kernels)
        raise ArtifactError(f"{spec.key()} for {arch}: expected one kernel {spec.symbol}*, the cubin has: {found}")
    kernel = kernels[0]
    if kernel.sm != int(arch.removeprefix("sm_").removesuffix("a")):
        raise ArtifactError(f"{kernel.symbol}: requested {arch}, but the cubin is for sm_{kernel.sm}")
    block = tuple(program.block)
    if kernel.reqntid != block:
        raise ArtifactError(f"{kernel.symbol}: program.block is {block}, the cubin was built for {kernel.reqntid}")
    return Artifact(
        arch=arch,
        symbol=kernel.symbol,
        cubin=cubin,
        ptx=ptx,
        params=_params(kernel, program, ptx),
        block=block,
        smem_bytes=program.smem_bytes,
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        mma_count=count_matrix_instructions(ptx),
        spec=json.loads(spec.key()),
        cluster=tuple(getattr(program, "cluster", (1, 1, 1))),
        dsl=dsl.version() or "",
    )


def count_matrix_instructions(ptx: str) -> int:
    """Counts mma.sync, wgmma.mma_async and tcgen05.mma instructions in a PTX text."""
    return len(_MATRIX_INSTRUCTION.findall(ptx))


def _params(kernel: cubins.CubinKernel, program: Program, ptx: str) -> tuple[Param, ...]:
    """Returns the parameters that the program declares, checked against the cubin (sizes) and the PTX (types)."""
    kinds = dict.fromkeys(getattr(program, "maps", ()), "map") | {
        name: _KIND_OF_SCALAR.get(hint.__name__, hint.__name__) for name, hint in program.scalars.items()
    }
    header = ptx[ptx.index(f".entry {kernel.symbol}(") :].split(")", 1)[0]
    compiled = [_KIND_OF_PTX.get(kind, kind) for kind in _PTX_PARAM.findall(header)]
    declared = list(kinds.values())
    if declared != compiled or [PARAM_BYTES.get(kind) for kind in declared] != [size for _, size in kernel.params]:
        raise ArtifactError(
            f"{kernel.symbol}: {type(program).__name__} declares {kinds}, but the PTX has {compiled} and the cubin "
            f"(offset, size) {kernel.params}"
        )
    return tuple(
        Param(name, kind, offset, size)
        for (name, kind), (offset, size) in zip(kinds.items(), kernel.params, strict=True)
    )
