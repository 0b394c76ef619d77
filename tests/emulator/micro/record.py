"""Run every micro-kernel on this machine's GPU and record the results.

    python -m tests.emulator.micro.record DIR

needs a Hopper GPU and cuda-python, not the DSL: the driver compiles the PTX. DIR gets one .npz per family, the bytes of
tensor maps, and record.json with device, driver, and the cases that failed. A case that breaks the context or hangs
costs that case alone: a child process runs them, and another one takes its place.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.runtime import tensormap
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
        storage = ctypes.create_string_buffer(MAP_BYTES + 64)
        at = -(-ctypes.addressof(storage) // 64) * 64
        rank = len(tensor.dims)
        status = tensormap._encoder()(
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
            0,  # fill with zeros
        )
        if status:
            raise DriverError(f"cuTensorMapEncodeTiled: {status} for {tensor}")
        return storage, at


@functools.cache
def device() -> Device:
    """This process's."""
    return Device()


def encode_maps() -> tuple[Array, dict[str, str]]:
    """Descriptor bytes of every map of the catalogue, in its order; failures by number."""
    rows, failures = np.zeros((len(list(maps())), MAP_BYTES), np.uint8), {}
    for i, tensor in enumerate(maps()):
        try:
            storage, at = device().encode(tensor, ADDRESS)
            rows[i] = np.frombuffer(ctypes.string_at(at, MAP_BYTES), np.uint8)
            del storage
        except DriverError as err:
            failures[f"map {i}"] = str(err)
    return rows, failures


def _run(case: Case) -> bytes:
    return device().run(case)


def results() -> Iterator[tuple[Case, bytes | DriverError]]:
    """The output of every case, or why it has none."""
    context = multiprocessing.get_context("spawn")
    child = context.Pool(1)
    for case in cases():
        result: bytes | DriverError
        try:
            result = child.apply_async(_run, (case,)).get(PATIENCE)
        except multiprocessing.TimeoutError:
            result = DriverError(f"no end within {PATIENCE:.0f} s")
        except DriverError as err:
            result = err
        if isinstance(result, DriverError):  # the context may be broken
            child.terminate()
            child = context.Pool(1)
        yield case, result
    child.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    rows, failures = encode_maps()
    np.savez_compressed(directory / "tensor_maps.npz", rows=rows)
    families: dict[str, dict[str, Any]] = {}  # outputs, and the digests of the cases that made them
    for case, result in results():
        if isinstance(result, DriverError):
            failures[case.id] = str(result)
            print(f"FAILED {case.id}: {result}", flush=True)
            continue
        outputs = {case.name: np.frombuffer(result, np.uint8), f"digest {case.name}": np.array(case.digest)}
        families.setdefault(case.family, {}).update(outputs)
    for name, arrays in families.items():
        np.savez_compressed(directory / f"{name}.npz", **arrays)
    recorded = sum(len(arrays) // 2 for arrays in families.values())
    record = {**device().facts(), "recorded": recorded, "failures": failures}
    (directory / "record.json").write_text(json.dumps(record, indent=1))
    print(f"{recorded} of {len(cases())} cases recorded in {time.monotonic() - start:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
