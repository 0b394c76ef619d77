"""The launch corpus: what scripted sequences of calls pass to the driver of a pretended H100.

`launch_sequences.SEQUENCES` holds the scripts, `data/launch_corpus.json` what they launched when the corpus was
recorded: for every launch the kernel, the grid and the parameters that the previous launch of that kernel in the
sequence did not have. Tensor maps are an address and a digest. Addresses are those of named tensors, "q+64"; memory
that a call allocates for itself is "own 0", "own 1" in the order of the launch's parameters. Host code that passes on
the same corpus behaves the same on a GPU, but for the contents of schedules, which tests/schedule holds.

`python -m tests.support.launch_corpus` records it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from cute_attn.dispatch import append as dispatch_append
from cute_attn.kernels.append.host import launch as append_launch
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.runtime import arch as archs
from cute_attn.runtime import artifacts, launch
from cute_attn.runtime.artifact import PARAM_BYTES, Artifact, Param
from cute_attn.runtime.compile import _KIND_OF_SCALAR
from cute_attn.runtime.spec import KernelSpec, ProgramOf
from cute_attn.wrappers import calls, planned_prefill
from perf.pretended_gpu import NullDriver, always, pretended_gpu

ARCH = "sm_90a"
FILE = Path(__file__).parent / "data" / "launch_corpus.json"
ADDRESSES = range(1 << 32, 1 << 47)  # of the host's heap; strides and counts are below, "unbounded" is above
CODES = {"i32": "<i", "i64": "<q", "map": "<Q", "f32": "<f", "f64": "<d"}

Script = Callable[["Recorder"], None]


class Launched(NamedTuple):
    """What a launch passed to the driver: its stream, its grid and the bytes of every parameter, by name."""

    stream: int
    grid: tuple[int, int, int]
    values: dict[str, bytes]
    artifact: Any


class RecordingDriver(NullDriver):
    """Keeps launches."""

    def __init__(self) -> None:
        self.recorded: list[Launched] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> tuple[int]:  # noqa: N802
        pointers = (ctypes.c_void_p * len(function.params)).from_address(params)
        values = {p.name: ctypes.string_at(at, p.size) for p, at in zip(function.params, pointers, strict=True)}
        self.recorded.append(
            Launched(config.hStream, (config.gridDimX, config.gridDimY, config.gridDimZ), values, function)
        )
        return (0,)


class Recorder(RecordingDriver):
    """A driver that keeps launches as lines, and the named memory that their addresses are told by."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.names: dict[str, torch.Tensor] = {}  # kept alive, so that no address comes twice
        self._before: dict[str, dict[str, str]] = {}  # parameters of each kernel's latest launch

    def named(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Name the memory of a tensor."""
        if name in self.names:
            raise KeyError(f"{name} is the name of another tensor")
        self.names[name] = tensor
        return tensor

    def randn(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return a named tensor of random numbers."""
        return self.named(name, torch.randn(*shape).to(dtype))

    def call(self, label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the launches of a call, and name what it returns. An error of a call is part of the record."""
        result, failed = None, ""
        try:
            result = function(*args, **kwargs)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            failed = f": {type(error).__name__}"
        returned = result if isinstance(result, tuple) else (result,)
        known = {tensor.data_ptr() for tensor in self.names.values()}
        for i, tensor in enumerate(returned):
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in known:
                self.named(f"result {i} of {label}", tensor)
        self.lines.append(label + failed)
        self.lines += map(self._line, self.recorded)  # now: later calls may allocate what this one has freed
        self.recorded.clear()
        return result

    def _line(self, launched: Launched) -> str:
        _, grid, _, artifact = launched
        spec = hashlib.sha256(json.dumps(artifact.spec, sort_keys=True).encode()).hexdigest()[:8]
        kernel, now = f"{artifact.spec['kernel']} {spec}", parameters(launched, self.names)
        before = self._before.get(kernel, {})
        changed = " ".join(f"{name}={value}" for name, value in now.items() if before.get(name) != value)
        self._before[kernel] = now
        return f"  {kernel} {'x'.join(map(str, grid))} of {artifact.block[0]}: {changed}"


def parameters(launched: Launched, names: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the parameters of a launch as text, by their names; addresses by those of the tensors. Memory that has no
    name is numbered in the order of its first use.
    """
    extents = [(name, x.data_ptr(), x.untyped_storage().nbytes()) for name, x in names.items()]
    own: list[int] = []

    def place(address: int) -> str:
        for name, start, size in extents:
            if start <= address < start + max(size, 1):
                return name if address == start else f"{name}+{address - start}"
        if address not in own:
            own.append(address)
        return f"own {own.index(address)}"

    def text(kind: str, raw: bytes) -> str:
        (value,) = struct.unpack(CODES[kind], raw[:8] if kind == "map" else raw)
        if kind in ("i64", "map"):
            shown = place(value) if value in ADDRESSES else str(value)
            return f"{shown}:{hashlib.sha256(raw[8:]).hexdigest()[:8]}" if kind == "map" else shown
        return f"{value:.9g}" if isinstance(value, float) else str(value)

    return {param.name: text(param.kind, launched.values[param.name]) for param in launched.artifact.params}


def described(spec: KernelSpec, arch: str, program_of: ProgramOf) -> Artifact:
    """Return the artifact of a kernel without its code, which is not compiled: what its program says of launches."""
    program: Any = program_of(spec, arch)
    kinds = dict.fromkeys(getattr(program, "maps", ()), "map")
    kinds |= {name: _KIND_OF_SCALAR[scalar.__name__] for name, scalar in program.scalars.items()}
    params = tuple(Param(name, kind, 128 * i, PARAM_BYTES[kind]) for i, (name, kind) in enumerate(kinds.items()))
    launched = params, program.block, program.smem_bytes
    return Artifact(arch, spec.symbol, b"", "", *launched, 0, 0, 0, json.loads(spec.key()), program.cluster)


@contextlib.contextmanager
def pretended(driver: NullDriver) -> Iterator[None]:
    """A pretended H100 for CPU tensors, whose values nobody looks at, and whose launches reach `driver`."""
    gpu = Gpu(archs.named(ARCH), launch.CPU, archs.TYPICAL_SMS[ARCH])
    with (
        pretended_gpu(ARCH),
        mock.patch.object(artifacts, "get", described),
        mock.patch.object(launch, "load_driver", always(driver)),
        mock.patch.object(launch, "_function", lambda artifact, index: artifact),
        mock.patch.object(dispatch_append, "run", lambda rows: append_launch.run(rows, gpu)),
        mock.patch.object(planned_prefill, "_places", OrderedDict()),
    ):
        calls.UNPLANNED.clear()
        yield
        calls.UNPLANNED.clear()


def recorded(script: Script) -> list[str]:
    """Run a script on a pretended GPU and return its record."""
    recorder = Recorder()
    torch.manual_seed(0)
    with pretended(recorder):
        script(recorder)
    return recorder.lines


def stored() -> dict[str, list[str]]:
    """Return the corpus, by name of the sequence."""
    corpus: dict[str, list[str]] = json.loads(FILE.read_text())
    return corpus


def main() -> None:
    from tests.support.launch_sequences import SEQUENCES

    corpus = {name: recorded(script) for name, script in SEQUENCES.items()}
    FILE.write_text(json.dumps(corpus, indent=1) + "\n")
    print(f"{len(corpus)} sequences, {sum(line.startswith(' ') for x in corpus.values() for line in x)} launches")


if __name__ == "__main__":
    main()
