"""Launches artifacts through `cuda.bindings.driver`. Everything is prebuilt, so a launch costs a few us of Python.

The module imports without cuda-python and without a GPU; only the construction of a `Launch` needs them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import dsl
from cute_attn.runtime.artifact import Artifact, Param

_STRUCT_CODES = {"i32": "i", "i64": "q", "f32": "f", "f64": "d", "map": "128s"}
MISMATCHES = struct.error, OverflowError, TypeError, ValueError  # of values that do not fit
Value = int | float | bytes
Values = tuple[Value, ...]
Write = Callable[[Values], None]
Bind = Callable[[Any], Write]  # from a buffer to a function that stores values of some fields in it

MAX_CLUSTER = 8  # CTAs that every GPU with clusters runs together; 12 and 16 were slower (docs/kernels/xqa.md)
CPU = -1  # device index of CPU tensors, whose kernels run on the emulator


def current_stream(device_index: int) -> int:
    """Returns the handle of torch's current stream: one C call, where `torch.cuda.current_stream` takes 3 us."""
    if device_index == CPU:
        return 0
    return torch._C._cuda_getCurrentRawStream(device_index)


class Launch:
    """One artifact on one device, ready to be bound to parameters.

    The constructor loads the cubin onto the device, bypassing the driver's lazy loading: later launches allocate and
    load nothing, and may run under CUDA graph capture. Threads may share a Launch.

    Raises ArtifactError if the artifact does not fit the device, RuntimeError for a driver error.
    """

    def __init__(self, artifact: Artifact, device_index: int, *, pdl: bool = False) -> None:
        _check_fit(artifact, archs.for_device(device_index), pdl)
        self.artifact = artifact
        self.pdl = pdl
        self.driver = load_driver()
        _check_driver(artifact, checked("cuDriverGetVersion", self.driver.cuDriverGetVersion()))
        self.context = primary_context(device_index)
        self.function = _function(artifact, device_index)
        self.layout = ParamLayout(artifact.params)

    def bind(self, static: Mapping[str, Value], moving: Sequence[str], *groups: Sequence[str]) -> Bound:
        """Returns launches whose fields in `static` have these values. Those in `moving` have others in every launch,
        those of `groups` often the same. A ValueError unless every parameter of the kernel is named once.
        """
        return Bound(self, static, moving, groups)


Settled = tuple[Any, ...]  # a grid, and a tuple of values for each group of `Launch.bind`


class Bound:
    """Launches of one kernel with parameter storage of their own. Threads may share it."""

    # Of tensors that launches are given: those whose addresses, then those whose sizes are the last moving values.
    of_tensors: tuple[Sequence[int], Sequence[int]] = (), ()

    def __init__(
        self, launch: Launch, static: Mapping[str, Value], moving: Sequence[str], groups: Sequence[Sequence[str]]
    ) -> None:
        self.artifact = launch.artifact
        block = ParamBlock(launch.layout, static, (moving, *groups))
        self._write, *writers = block.writers
        self._writers = list(enumerate(writers, 1))  # by their places in what is settled
        self._config = config = _config(launch.driver, launch.artifact, launch.pdl)
        self._block = block  # whose memory the driver reads
        self._constant = launch.driver, launch.context, config, launch.function, block.address, threading.Lock()
        self._stream: int | None = None
        self._unsettled: Settled = (None,) * (1 + len(groups))
        self._settled = self._unsettled  # what the latest launch has written

    def fire(self, stream: int, moving: Values, settled: Settled, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Launches on `stream`, a raw handle of the device, with these values of the moving fields but for those of
        `tensors`, a grid, and values of the groups. What is the same object as before is not written again.
        """
        if tensors:
            moving += self.values_of(tensors)
        driver, context, config, function, address, lock = self._constant  # once: each attribute takes as long as this
        with lock:  # a signal may raise an error after `acquire` returned, but not as a context begins
            if settled is not self._settled:
                self._settle(settled)
            self._write(moving)
            if stream != self._stream:
                config.hStream = self._stream = stream
            if driver.cuCtxGetCurrent()[1] == context:
                status = driver.cuLaunchKernelEx(config, function, address, 0)[0]
            else:  # another device is current, or this thread has not used CUDA yet
                with entered(context):
                    status = driver.cuLaunchKernelEx(config, function, address, 0)[0]
        if status:
            raise RuntimeError(f"launching {self.artifact.symbol} with grid {settled[0]} failed: {status.name}")

    def values_of(self, tensors: Sequence[torch.Tensor]) -> Values:
        """Returns the values that fields take from tensors."""
        addresses, sizes = self.of_tensors
        values = [tensors[i].data_ptr() for i in addresses]
        for i in sizes:
            values.append(tensors[i].numel())
        return tuple(values)

    def _settle(self, settled: Settled) -> None:
        """Writes a grid and the groups that have changed."""
        before, self._settled = self._settled, self._unsettled  # until all are written
        if settled[0] is not before[0]:
            config = self._config
            config.gridDimX, config.gridDimY, config.gridDimZ = settled[0]
        for i, write in self._writers:
            if settled[i] is not before[i]:
                write(settled[i])
        self._settled = settled


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


def primary_context(device_index: int) -> Any:
    """Returns the context that torch uses on a device, retained for the life of the process as torch does."""
    driver = load_driver()
    device = checked("cuDeviceGet", driver.cuDeviceGet(device_index))
    return checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))


@contextlib.contextmanager
def entered(context: Any) -> Iterator[None]:
    """Makes a context current meanwhile."""
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


def _function(artifact: Artifact, device_index: int) -> Any:
    """Returns the kernel's function in the primary context of a device, and loads it there."""
    digest = hashlib.sha256(artifact.cubin).digest()
    key = digest, artifact.symbol, device_index
    with _loading:
        if key not in _functions:
            with relaxed_capture():
                if digest not in _libraries:  # for the process: the driver copies it to each device where it is used
                    result = load_driver().cuLibraryLoadData(artifact.cubin, None, None, 0, None, None, 0)
                    _libraries[digest] = checked("cuLibraryLoadData", result)
                _functions[key] = _load_function(_libraries[digest], artifact, device_index)
        return _functions[key]


def _load_function(library: Any, artifact: Artifact, device_index: int) -> Any:
    driver = load_driver()
    kernel = checked("cuLibraryGetKernel", driver.cuLibraryGetKernel(library, artifact.symbol.encode()))
    smem_limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = checked("cuDeviceGet", driver.cuDeviceGet(device_index))
    checked("cuKernelSetAttribute", driver.cuKernelSetAttribute(smem_limit, artifact.smem_bytes, kernel, device))
    with entered(primary_context(device_index)):
        function = checked("cuKernelGetFunction", driver.cuKernelGetFunction(kernel))
        checked("cuFuncLoad", driver.cuFuncLoad(function))
    return function


def _config(driver: Any, artifact: Artifact, pdl: bool) -> Any:
    """Returns a new launch configuration; its grid and stream are not set."""
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


# ---- parameters, in the layout that a cubin declares


class ParamLayout:
    """Where the parameters of one kernel are. All blocks share its compiled functions, which take 0.3 ms to make."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.params = {param.name: param for param in params}
        self.size = max((param.offset + param.size for param in params), default=0)
        self._numbers = {param.name: i for i, param in enumerate(params)}
        self._writers: dict[tuple[str, ...], Bind] = {}  # as many as there are sets of fields in the sources

    def writer(self, fields: Sequence[str]) -> Bind:
        """Returns what makes of the memory of a block a function that stores values of these fields, in this order, and
        leaves all others. It raises an ArgumentError for values that do not fit.
        """
        key = tuple(fields)
        if key not in self._writers:
            self._writers[key] = self._make_writer(key)
        return self._writers[key]

    # This generates Python source: one call of `struct.pack_into` for each run of adjacent fields takes a third of the
    # time of a loop over fields (`timeit`, Python 3.11, Xeon).
    def _make_writer(self, fields: tuple[str, ...]) -> Bind:
        numbers = self._numbers
        space: dict[str, Any] = {"MISMATCHES": MISMATCHES, "mismatch": functools.partial(self.mismatch, fields)}
        lines = [f"def bind(buffer):\n def write(values):\n  try:\n   [{', '.join(fields)}] = values"]
        in_order = sorted(fields, key=numbers.__getitem__)
        for _, run in itertools.groupby(enumerate(in_order), lambda pair: numbers[pair[1]] - pair[0]):  # adjacent ones
            names = [name for _, name in run]
            params = [self.params[name] for name in names]
            name, start = f"pack{len(lines)}", params[0].offset
            layout, end = "=", start
            for param in params:
                layout += f"{param.offset - end}x{_STRUCT_CODES[param.kind]}"
                end = param.offset + param.size
            space[name] = struct.Struct(layout).pack_into
            lines.append(f"   {name}(buffer, {start}, {', '.join(names)})")
        lines.append("  except MISMATCHES as err:\n   raise mismatch(values) from err\n return write")
        exec("\n".join(lines), space)
        bind: Bind = space["bind"]
        return bind

    def mismatch(self, fields: Sequence[str], values: Sequence[Value]) -> ArgumentError:
        """Returns the error of values of `fields` that do not fit."""
        for name, value in zip(fields, values, strict=False):
            kind = self.params[name].kind
            try:
                struct.pack("=" + _STRUCT_CODES[kind], value)
            except MISMATCHES:
                return ArgumentError(f"kernel parameter {name} must be an {kind}, got {value!r}")
        return ArgumentError(f"values must have one entry for each of {list(fields)}, got {len(values)}")


class ParamBlock:
    """Storage of one kernel's parameters. Its addresses never change."""

    def __init__(self, layout: ParamLayout, static: Mapping[str, Value], groups: Sequence[Sequence[str]]) -> None:
        """Stores static values by name. `groups`: fields that `writers` store; a ValueError unless each parameter is in
        one of them or has a value, once.
        """
        given, params = [*static, *itertools.chain.from_iterable(groups)], layout.params
        if len(given) != len(params) or params.keys() != {*given}:
            raise ValueError(
                f"kernel parameters without a value: {sorted(params.keys() - {*given})}, "
                f"values without a parameter: {sorted({*given} - params.keys())}, "
                f"named more than once: {sorted({name for name in given if given.count(name) > 1})}"
            )
        self.buffer = ctypes.create_string_buffer(max(layout.size, 1))
        base, offsets = ctypes.addressof(self.buffer), [param.offset for param in params.values()]
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*[base + offset for offset in offsets])
        self.address = ctypes.addressof(self._pointers)  # the void*[] that cuLaunchKernelEx takes
        self.writers = [layout.writer(fields)(self.buffer) for fields in groups]
        layout.writer(tuple(static))(self.buffer)(tuple(static.values()))
