"""Run every micro-kernel on this machine's GPU and record the results.

    python -m tests.emulator.micro.record DIR

needs a Hopper GPU and cuda-python, not the DSL: the driver compiles the PTX. DIR gets one .npz per family, the bytes of
tensor maps, and record.json with device, driver, and the cases that failed. A case that breaks the context or hangs
costs that case alone: the work is done by a child process, which is restarted after it.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.emulator.micro.case import MAP_BYTES, Case, Map
from tests.emulator.micro.catalogue import ADDRESS, cases, maps

PATIENCE = 30.0  # seconds for one case


class DriverError(RuntimeError):
    pass


class Device:
    """The first GPU, through the driver."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver: Any = driver
        self.do("cuInit", 0)
        self.device = self.do("cuDeviceGet", 0)
        self.context = self.do("cuDevicePrimaryCtxRetain", self.device)
        self.do("cuCtxSetCurrent", self.context)

    def do(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self.driver, name)(*arguments)
        if int(status):
            raise DriverError(f"{name}: {status.name}")
        return values[0] if len(values) == 1 else values

    def facts(self) -> dict[str, str]:
        name = self.do("cuDeviceGetName", 256, self.device)
        return {
            "device": name.split(b"\0")[0].decode(),
            "driver": str(self.do("cuDriverGetVersion")),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "command": "python -m tests.emulator.micro.record DIR",
        }

    def run(self, case: Case) -> bytes:
        module = self.do("cuModuleLoadData", case.ptx.encode() + b"\0")
        function = self.do("cuModuleGetFunction", module, b"micro")
        source, target = self.do("cuMemAlloc", len(case.data)), self.do("cuMemAlloc", case.out_bytes)
        initial = case.initial or bytes(case.out_bytes)
        self.do("cuMemcpyHtoD", source, case.data, len(case.data))
        self.do("cuMemcpyHtoD", target, initial, case.out_bytes)
        blocks = [ctypes.c_uint64(int(source)), ctypes.c_uint64(int(target))]
        addresses = [ctypes.addressof(block) for block in blocks]
        kept = []
        for tensor in case.maps:
            base = int(source if tensor.where == "in" else target)
            storage, at = self.encode(tensor, base + tensor.offset)
            kept.append(storage)
            addresses.append(at)
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        grid, block = (case.grid, 1, 1), (case.threads, 1, 1)
        self.do("cuLaunchKernel", function, *grid, *block, 0, 0, ctypes.addressof(parameters), 0)
        self.do("cuCtxSynchronize")
        out = bytearray(case.out_bytes)
        self.do("cuMemcpyDtoH", out, target, case.out_bytes)
        self.do("cuMemFree", source)
        self.do("cuMemFree", target)
        self.do("cuModuleUnload", module)
        return bytes(out)

    def encode(self, tensor: Map, address: int) -> tuple[Any, int]:
        """Storage, and the aligned address of the 128 bytes in it."""
        found = self.do("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
        pointer, word = ctypes.c_void_p, ctypes.c_int
        kind = ctypes.CFUNCTYPE(
            word, pointer, word, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer, word, word, word, word
        )
        encode = kind(int(found[0]))
        storage = ctypes.create_string_buffer(MAP_BYTES + 64)
        at = -(-ctypes.addressof(storage) // 64) * 64
        rank = len(tensor.dims)
        status = encode(
            at,
            getattr(self.driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{tensor.dtype.upper()}"),
            rank,
            address,
            (ctypes.c_uint64 * rank)(*tensor.dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*tensor.strides),
            (ctypes.c_uint32 * rank)(*tensor.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            tensor.swizzle,
            tensor.l2,
            int(tensor.nan_fill),
        )
        if status:
            raise DriverError(f"cuTensorMapEncodeTiled: {status} for {tensor}")
        return storage, at


def part(directory: Path, number: int) -> Path:
    """The file of one case's result."""
    return directory / "parts" / f"{number}.bin"


def work(directory: Path, first: int) -> int:
    """Run cases from number `first` on; each result goes into a file."""
    device = Device()
    for number, case in enumerate(cases()[first:], first):
        try:
            part(directory, number).write_bytes(device.run(case))
        except DriverError as err:
            print(err)
            return 3  # the context may be broken
    return 0


def encode_maps(directory: Path) -> dict[str, str]:
    """Descriptor bytes of every map of the catalogue, in its order; failures by number."""
    device, failures = Device(), {}
    rows = np.zeros((len(list(maps())), MAP_BYTES), np.uint8)
    for i, tensor in enumerate(maps()):
        try:
            storage, at = device.encode(tensor, ADDRESS)
            rows[i] = np.frombuffer(ctypes.string_at(at, MAP_BYTES), np.uint8)
            del storage
        except DriverError as err:
            failures[f"map {i}"] = str(err)
    np.savez_compressed(directory / "tensor_maps.npz", rows=rows)
    (directory / "facts.json").write_text(json.dumps(device.facts()))
    return failures


def supervise(directory: Path) -> dict[str, str]:
    """Children until every case is done or has failed."""
    failures: dict[str, str] = {}
    first, total = 0, len(cases())
    while first < total:
        command = [sys.executable, "-m", "tests.emulator.micro.record", str(directory), "--from", str(first)]
        log = directory / "log.txt"
        with log.open("w") as stream:
            child = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
            hung = _hangs(child, directory)
        if child.returncode == 0:
            break
        at = next(number for number in range(first, total) if not part(directory, number).exists())
        failures[cases()[at].id] = f"no end within {PATIENCE:.0f} s" if hung else log.read_text()[-400:].strip()
        print(f"FAILED {cases()[at].id}: {failures[cases()[at].id]}", flush=True)
        first = at + 1
    return failures


def _hangs(child: subprocess.Popen[bytes], directory: Path) -> bool:
    """Wait for the child's end, or until it has had no result for so long that it is killed: returns whether it was."""
    done, since = -1, time.monotonic()
    while child.poll() is None:
        time.sleep(0.05)
        now = len(list((directory / "parts").iterdir()))
        if now != done:
            done, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            child.kill()
            child.wait()
            return True
    return False


def collect(directory: Path) -> int:
    """Merges parts into one file per family: outputs, and the digests of the cases that made them."""
    families: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for number, case in enumerate(cases()):
        result = part(directory, number)
        if result.exists():
            family = families.setdefault(case.family, {})
            family[case.name] = np.frombuffer(result.read_bytes(), np.uint8)
            family[f"digest {case.name}"] = np.array(case.digest)
            result.unlink()
    for name, arrays in families.items():
        np.savez_compressed(directory / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    (directory / "parts").rmdir()
    return sum(len(arrays) // 2 for arrays in families.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--from", type=int, dest="first", help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory: Path = options.directory
    if options.first is not None:
        return work(directory, options.first)
    (directory / "parts").mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    failures = encode_maps(directory) | supervise(directory)
    recorded = collect(directory)
    facts = json.loads((directory / "facts.json").read_text())
    (directory / "facts.json").unlink()
    (directory / "log.txt").unlink(missing_ok=True)
    (directory / "record.json").write_text(json.dumps({**facts, "recorded": recorded, "failures": failures}, indent=1))
    print(f"{recorded} of {len(cases())} cases recorded in {time.monotonic() - start:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
