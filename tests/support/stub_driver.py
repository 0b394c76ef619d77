# ruff: noqa: N802  (the driver's names)
"""A stand-in for `cuda.bindings.driver` that records calls. Config and attributes are cuda-python's own."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as real

from cute_attn.runtime import launch
from cute_attn.runtime.artifact import Param

SUCCESS = real.CUresult.CUDA_SUCCESS


class StubDriver:
    """Launches are read out of the raw structures that a driver would see: `launches` has one dict each."""

    CUlaunchConfig = real.CUlaunchConfig
    CUlaunchAttribute = real.CUlaunchAttribute
    CUlaunchAttributeID = real.CUlaunchAttributeID
    CUfunction_attribute = real.CUfunction_attribute
    CUstreamCaptureMode = real.CUstreamCaptureMode

    def __init__(self, params: Sequence[Param]) -> None:
        self._params = params
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[dict[str, Any]] = []
        self.contexts = [real.CUcontext(0x1000)]  # stack; device i has the primary context 0x1000 + i
        self.launch_status = SUCCESS
        self.launch_seconds = 0.0
        self.version = 13000
        self.capture_mode = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return SUCCESS, self.version

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self.capture_mode = self.capture_mode, mode
        self.calls.append(("capture mode", mode.name.removeprefix("CU_STREAM_CAPTURE_MODE_")))
        return SUCCESS, before

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return SUCCESS, f"device {index}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Any, ...]:
        return SUCCESS, real.CUcontext(0x1000 + int(device.split()[1]))

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return SUCCESS, self.contexts[-1]

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return SUCCESS, self.contexts.pop()

    def cuLibraryLoadData(self, cubin: bytes, *options: Any) -> tuple[Any, ...]:
        self.calls.append(("load", cubin))
        return SUCCESS, "library"

    def cuLibraryGetKernel(self, library: str, symbol: bytes) -> tuple[Any, ...]:
        return SUCCESS, symbol.decode()

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: str, device: str) -> tuple[Any, ...]:
        self.calls.append((attribute.name, value, kernel, device))
        return (SUCCESS,)

    def cuKernelGetFunction(self, kernel: str) -> tuple[Any, ...]:
        return SUCCESS, f"{kernel} in {int(self.contexts[-1]):#x}"

    def cuFuncLoad(self, function: str) -> tuple[Any, ...]:
        self.calls.append(("funcload", function))
        return (SUCCESS,)

    def cuLaunchKernelEx(self, config: Any, function: str, params: int, extra: int) -> tuple[Any, ...]:
        time.sleep(self.launch_seconds)  # lets other threads run, as the real call does
        pointers = (ctypes.c_void_p * len(self._params)).from_address(params)
        attributes = (ctypes.c_char * (72 * config.numAttrs)).from_address(_attrs_address(config))
        self.launches.append(
            {
                "function": function,
                "context": int(self.contexts[-1]),
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "smem_bytes": config.sharedMemBytes,
                "stream": int(config.hStream),
                "attributes": _attributes(bytes(attributes)),
                "params": [
                    ctypes.string_at(address, p.size) for address, p in zip(pointers, self._params, strict=True)
                ],
            }
        )
        return (self.launch_status,)


def forget_loaded() -> None:
    """Forgets loaded kernels, before and after another driver is in place."""
    launch._libraries.clear()
    launch._functions.clear()


def _attrs_address(config: Any) -> int:
    # CUlaunchConfig: grid 3 x u32, block 3 x u32, smem u32, pad, stream, attrs, numAttrs
    return ctypes.c_void_p.from_address(config.getPtr() + 40).value or config.getPtr()


def _attributes(raw: bytes) -> dict[int, tuple[int, int, int]]:
    """Of each CUlaunchAttribute {i32 id, 4 bytes pad, 64-byte union}: three words of the union, by id."""
    words = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
    return {words[at]: (words[at + 2], words[at + 3], words[at + 4]) for at in range(0, len(words), 18)}
