"""Launches artifacts through `cuda.bindings.driver`. Everything is prebuilt, so a launch costs a few us of Python.

The module imports without cuda-python and without a GPU; only the construction of a `Launch` needs them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import dsl
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.param_block import ParamBlock, ParamLayout

Dim3 = tuple[int, int, int]
Lengths = tuple[Dim3, tuple[int | float | bytes, ...]]  # what lengths decide: grid, and values of parameters
MAX_CLUSTER = 8  # CTAs that every GPU with clusters runs together; 12 and 16 were slower (docs/kernels/xqa.md)
CPU = -1  # device index of CPU tensors, whose kernels run on the emulator


def current_stream(device_index: int) -> int:
    """Returns the handle of torch's current stream: one C call, where `torch.cuda.current_stream` takes 3 us."""
    if device_index == CPU:
        return 0
    return torch._C._cuda_getCurrentRawStream(device_index)


def describe(
    artifact: Artifact, values: Sequence[int | float | bytes], grid: Dim3, *, pdl: bool = False
) -> dict[str, Any]:
    """Returns what a launch passes to the driver, as plain data. Needs no GPU: the emulator and tests use it."""
    layout = ParamLayout(artifact.params)
    block = ParamBlock(layout)
    block.pack(values)
    return {
        "symbol": artifact.symbol,
        "grid": grid,
        "block": artifact.block,
        "cluster": artifact.cluster,
        "smem_bytes": artifact.smem_bytes,
        "registers": artifact.registers,
        "pdl": pdl,
        "param_offsets": [param.offset for param in artifact.params],
        "params": block.buffer.raw[: layout.size],
    }


class Launch:
    """One artifact on one device, ready to launch.

    The constructor loads the cubin onto the device, bypassing the driver's lazy loading: `fire` then allocates and
    loads nothing. Both may run under CUDA graph capture. Threads may share a Launch.

    Raises ArtifactError if the artifact does not fit the device, RuntimeError for a driver error.
    """

    def __init__(self, artifact: Artifact, device_index: int, *, pdl: bool = False) -> None:
        _check_fit(artifact, archs.for_device(device_index), pdl)
        self.artifact = artifact
        self.device_index = device_index
        self.pdl = pdl
        self._driver = load_driver()
        _check_driver(artifact, checked("cuDriverGetVersion", self._driver.cuDriverGetVersion()))
        self._context = _primary_context(device_index)
        self._function = _function(artifact, device_index)
        self._config = self._build()
        self._configured: tuple[Dim3, int] | None = None  # grid and stream of the previous launch
        self._layout = ParamLayout(artifact.params)
        self._block = ParamBlock(self._layout)
        self._lock = threading.Lock()

    def fire(self, values: Sequence[int | float | bytes], grid: Dim3, stream: int) -> None:
        """Launches on `stream`, a raw handle of this device, with `values` in parameter order."""
        driver, config = self._driver, self._config
        with self._lock:
            self._block.pack(values)
            if self._configured != (grid, stream):  # setting them costs as much as packing
                config.gridDimX, config.gridDimY, config.gridDimZ = grid
                config.hStream = stream
                self._configured = grid, stream
            if driver.cuCtxGetCurrent()[1] == self._context:
                status = driver.cuLaunchKernelEx(config, self._function, self._block.address, 0)[0]
            else:  # another device is current, or this thread has not used CUDA yet
                with _current(self._context):
                    status = driver.cuLaunchKernelEx(config, self._function, self._block.address, 0)[0]
        if status:
            raise RuntimeError(f"launching {self.artifact.symbol} with grid {grid} failed: {status.name}")

    def bound(self, values: Sequence[int | float | bytes], grid: Dim3, fields: Sequence[str]) -> Callable[..., None]:
        """Returns a function of a stream and values of `fields` that launches with this grid and, for all other fields,
        these values: `bound_to_lengths` of one `Lengths`.
        """
        return functools.partial(self.bound_to_lengths(values, fields), (grid, ()))

    def bound_to_lengths(
        self, values: Sequence[int | float | bytes], fields: Sequence[str], length_fields: Sequence[str] = ()
    ) -> Callable[..., None]:
        """Returns a function of `Lengths` (a grid, and values of `length_fields`), a stream and values of `fields` that
        launches with them and, for all other fields, with these values. It has parameter storage and a configuration of
        its own, where it writes no other field, and lengths only if they are another object than before: this takes 1
        to 2 us less than `fire`. Threads may share it.
        """
        block, config, driver, lock = ParamBlock(self._layout), self._build(), self._driver, threading.Lock()
        block.pack(values)
        config.hStream = latest = 0
        current: Lengths | None = None
        write, write_lengths = block.writer(fields), block.writer(length_fields)
        context, function = self._context, self._function

        def launch(lengths: Lengths, stream: int, *changed: int | bytes) -> None:
            nonlocal latest, current
            with lock:
                write(*changed)
                if stream != latest:
                    config.hStream = latest = stream
                if lengths is not current:
                    config.gridDimX, config.gridDimY, config.gridDimZ = lengths[0]
                    write_lengths(*lengths[1])
                    current = lengths
                if driver.cuCtxGetCurrent()[1] == context:
                    status = driver.cuLaunchKernelEx(config, function, block.address, 0)[0]
                else:
                    with _current(context):
                        status = driver.cuLaunchKernelEx(config, function, block.address, 0)[0]
            if status:
                raise RuntimeError(f"launching {self.artifact.symbol} with grid {lengths[0]} failed: {status.name}")

        return launch

    def _build(self) -> Any:
        return _config(self._driver, self.artifact, self.pdl)

    def describe(self, values: Sequence[int | float | bytes], grid: Dim3) -> dict[str, Any]:
        """Returns the plain data of a launch: see the function `describe`."""
        return describe(self.artifact, values, grid, pdl=self.pdl)


def _check_fit(artifact: Artifact, arch: archs.Arch, pdl: bool) -> None:
    if artifact.arch != arch.name:
        raise ArtifactError(f"{artifact.symbol} is compiled for {artifact.arch}, but this device needs {arch.name}")
    if artifact.smem_bytes > arch.smem_limit:
        raise ArtifactError(
            f"{artifact.symbol} needs {artifact.smem_bytes} bytes of shared memory, but a CTA of this device "
            f"(capability {arch.capability[0]}.{arch.capability[1]}) has {arch.smem_limit}"
        )
    if math.prod(artifact.cluster) > MAX_CLUSTER:
        raise ArtifactError(f"{artifact.symbol} has clusters of {artifact.cluster}, more than {MAX_CLUSTER} CTAs")
    if pdl and not arch.pdl:
        major, minor = arch.capability
        raise ArgumentError(f"pdl=True needs compute capability 9.0 or later, the device has {major}.{minor}")


def _check_driver(artifact: Artifact, version: int) -> None:
    """Raises ArtifactError for code of a CUDA version that the driver (13000: CUDA 13.0) is too old to load."""
    if version // 1000 < dsl.cuda_major(artifact.dsl):
        raise ArtifactError(
            f"{artifact.symbol} was compiled by CuTe DSL {artifact.dsl}: it needs a driver for CUDA "
            f"{dsl.cuda_major(artifact.dsl)} or later, this one is for CUDA {version // 1000}.{version % 1000 // 10}. "
            f"Update the driver, or compile (and bundle) kernels with {dsl.PACKAGE} without its extra "
            f"cu{dsl.cuda_major(artifact.dsl)}"
        )


@functools.cache
def load_driver() -> Any:
    """Returns `cuda.bindings.driver`, initialised. A RuntimeError says what is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as err:
        raise RuntimeError(f"launching needs cuda-python (pip install cuda-python): {err}") from err
    checked("cuInit", driver.cuInit(0))
    return driver


def checked(what: str, result: tuple[Any, ...]) -> Any:
    """Returns the value that a driver function returned after its status; a RuntimeError names the function."""
    status, *values = result
    if status:
        raise RuntimeError(f"{what} failed: {status.name}")
    return values[0] if values else None


@functools.cache
def _primary_context(device_index: int) -> Any:
    """Returns the context that torch uses on a device, retained for the life of the process as torch does."""
    driver = load_driver()
    device = checked("cuDeviceGet", driver.cuDeviceGet(device_index))
    return checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))


def is_current(device_index: int) -> bool:
    """Tells whether this thread uses the context of a device: another device may be current, or none yet."""
    return bool(load_driver().cuCtxGetCurrent()[1] == _primary_context(device_index))


def entered(device_index: int) -> contextlib.AbstractContextManager[None]:
    """Makes the context of a device current meanwhile."""
    return _current(_primary_context(device_index))


@contextlib.contextmanager
def _current(context: Any) -> Iterator[None]:
    driver = load_driver()
    checked("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        checked("cuCtxPopCurrent", driver.cuCtxPopCurrent())


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread load modules and allocate while a stream is captured, by any thread and in any capture mode.

    A captured graph must not depend on what happens within.
    """
    driver = load_driver()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = checked("cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        checked("cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(before))


# Kernels stay loaded as long as the process, because captured graphs hold their functions. There are as many as
# distinct cubins, whatever the number of calls.
_libraries: dict[bytes, Any] = {}  # by digest of the cubin
_functions: dict[tuple[bytes, str, int], Any] = {}  # by digest, symbol and device
_loading = threading.RLock()


def _library(digest: bytes, cubin: bytes) -> Any:
    """Loads a cubin for the process: the driver copies it to each device where it is used."""
    if digest not in _libraries:
        result = load_driver().cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
        _libraries[digest] = checked("cuLibraryLoadData", result)
    return _libraries[digest]


def _function(artifact: Artifact, device_index: int) -> Any:
    """Returns the kernel's function in the primary context of a device, and loads it there."""
    digest = hashlib.sha256(artifact.cubin).digest()
    key = digest, artifact.symbol, device_index
    with _loading:
        if key not in _functions:
            with relaxed_capture():
                _functions[key] = _load_function(_library(digest, artifact.cubin), artifact, device_index)
        return _functions[key]


def _load_function(library: Any, artifact: Artifact, device_index: int) -> Any:
    driver = load_driver()
    kernel = checked("cuLibraryGetKernel", driver.cuLibraryGetKernel(library, artifact.symbol.encode()))
    smem_limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = checked("cuDeviceGet", driver.cuDeviceGet(device_index))
    checked("cuKernelSetAttribute", driver.cuKernelSetAttribute(smem_limit, artifact.smem_bytes, kernel, device))
    with _current(_primary_context(device_index)):
        function = checked("cuKernelGetFunction", driver.cuKernelGetFunction(kernel))
        checked("cuFuncLoad", driver.cuFuncLoad(function))
    return function


def _config(driver: Any, artifact: Artifact, pdl: bool) -> Any:
    ids = driver.CUlaunchAttributeID
    attributes = []
    if artifact.cluster != (1, 1, 1):
        cluster = driver.CUlaunchAttribute()
        cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = artifact.cluster
        attributes.append(cluster)
    if pdl:
        serialization = driver.CUlaunchAttribute()
        serialization.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        serialization.value.programmaticStreamSerializationAllowed = 1
        attributes.append(serialization)
    config = driver.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = artifact.block
    config.sharedMemBytes = artifact.smem_bytes
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
