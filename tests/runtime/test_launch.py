"""Launches against a stub driver: what reaches cuLaunchKernelEx, in which context, and what errors say."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Iterator

import pytest
from cuda.bindings import driver as real

from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import launch
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.compile import compile_spec
from cute_attn.runtime.launch import Launch
from tests.support import subprocesses
from tests.support.stub_driver import StubDriver, forget_loaded
from tests.support.toy_spec import ToySpec, toy_program

VALUES = (0x7F00_1234_5678, -5, 1.5, -2.25, 2**31 - 1)
CLUSTER, PDL = 4, 6  # CUlaunchAttributeID of cluster dimensions and of programmatic stream serialization


class CParams(ctypes.Structure):
    """Parameters of the toy kernel as a C compiler lays them out."""

    _fields_ = (
        ("out", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("offset", ctypes.c_double),
        ("bias", ctypes.c_int32),
    )


def expected_params(values: tuple[float, ...] = VALUES) -> list[bytes]:
    types = [ctype for _, ctype in CParams._fields_]
    return [bytes(ctype(value)) for ctype, value in zip(types, values, strict=True)]


@functools.cache
def toy(arch: str = "sm_90a", cluster: tuple[int, int, int] = (1, 1, 1)) -> Artifact:
    return compile_spec(ToySpec(cluster=cluster), arch, toy_program)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    """Two devices of capability 9.0 behind a stub; the context of device 0 is current."""
    stub = StubDriver(toy().params)
    monkeypatch.setattr(launch, "load_driver", lambda: stub)
    monkeypatch.setattr(archs, "for_device", lambda index: archs.ARCHS["sm_90a"])
    forget_loaded()
    yield stub
    forget_loaded()


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1)])
def test_driver_receives_the_launch(driver: StubDriver, pdl: bool, cluster: tuple[int, int, int]) -> None:
    Launch(toy(cluster=cluster), 0, pdl=pdl).fire(VALUES, (4, 3, 2), 0xABC0)
    assert driver.launches == [
        {
            "function": "cute_attn_toy_0 in 0x1000",
            "context": 0x1000,
            "grid": (4, 3, 2),
            "block": (128, 1, 1),
            "smem_bytes": 65536,
            "stream": 0xABC0,
            "attributes": ({CLUSTER: cluster} if cluster != (1, 1, 1) else {}) | ({PDL: (1, 0, 0)} if pdl else {}),
            "params": expected_params(),
        }
    ]


def test_second_launch_replaces_all_values(driver: StubDriver) -> None:
    kernel = Launch(toy(), 0)
    kernel.fire(VALUES, (4, 3, 2), 0xABC0)
    other = (16, 7, -0.5, 1e300, -1)
    kernel.fire(other, (9, 1, 1), 0)
    last = driver.launches[1]
    assert (last["grid"], last["stream"], last["params"]) == ((9, 1, 1), 0, expected_params(other))


def test_a_bound_launch_replaces_the_fields_that_it_is_given(driver: StubDriver) -> None:
    """Beside another of the same kernel, on another stream, and from a thread that has not touched CUDA."""
    kernel = Launch(toy(), 0)
    names = [param.name for param in kernel.artifact.params]
    some = kernel.bound(VALUES, (4, 3, 2), [names[4], names[0]])
    every = kernel.bound(VALUES, (9, 1, 1), names)
    some(0xABC0, -7, 32)
    every(0, 16, 7, -0.5, 1e300, -1)
    driver.contexts = [real.CUcontext(0)]
    some(5, -8, 48)
    found = [(launch["grid"], launch["stream"], launch["context"], launch["params"]) for launch in driver.launches]
    assert found == [
        ((4, 3, 2), 0xABC0, 0x1000, expected_params((32, *VALUES[1:4], -7))),
        ((9, 1, 1), 0, 0x1000, expected_params((16, 7, -0.5, 1e300, -1))),
        ((4, 3, 2), 5, 0x1000, expected_params((48, *VALUES[1:4], -8))),
    ]
    assert [int(context) for context in driver.contexts] == [0]
    driver.launch_status = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        some(0, -7, 32)
    with pytest.raises(ValueError, match="distinct parameters"):
        kernel.bound(VALUES, (1, 1, 1), ["nothing"])


def test_a_bound_launch_takes_lengths(driver: StubDriver) -> None:
    """A grid and values of other fields, which stay until another object comes."""
    kernel = Launch(toy(), 0)
    names = [param.name for param in kernel.artifact.params]
    launch = kernel.bound_to_lengths(VALUES, [names[0]], [names[4], names[1]])
    short, long = ((4, 3, 2), (-7, 1)), ((9, 1, 1), (-8, 2))
    for lengths, out in ((short, 32), (short, 48), (long, 48), (short, 64)):
        launch(lengths, 5, out)
    assert [(run["grid"], run["params"]) for run in driver.launches] == [
        (grid, expected_params((out, count, *VALUES[2:4], bias)))
        for (grid, (bias, count)), out in ((short, 32), (short, 48), (long, 48), (short, 64))
    ]
    driver.launch_status = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match=r"grid \(9, 1, 1\) failed: CUDA_ERROR_INVALID_VALUE"):
        launch(long, 5, 32)


def test_describe_is_what_the_driver_gets(driver: StubDriver) -> None:
    kernel = Launch(toy(), 0, pdl=True)
    kernel.fire(VALUES, (4, 3, 2), 0)
    described = kernel.describe(VALUES, (4, 3, 2))
    assert described == launch.describe(toy(), VALUES, (4, 3, 2), pdl=True)
    assert described["params"] == bytes(CParams(*VALUES))[:28]  # C pads the end to 32
    sent = driver.launches[0]
    assert {key: sent[key] for key in ("grid", "block", "smem_bytes")} == {
        key: described[key] for key in ("grid", "block", "smem_bytes")
    }
    assert b"".join(sent["params"]) == described["params"]  # the toy's layout has no holes
    assert (described["symbol"], described["cluster"], described["pdl"]) == (
        "cute_attn_toy_0",
        (1, 1, 1),
        True,
    )


def test_another_current_device_is_switched_to_and_restored(driver: StubDriver) -> None:
    kernel = Launch(toy(), 1)
    assert [int(context) for context in driver.contexts] == [0x1000]
    kernel.fire(VALUES, (1, 1, 1), 0)
    driver.contexts = [real.CUcontext(0)]  # a thread that has not touched CUDA
    kernel.fire(VALUES, (1, 1, 1), 0)
    driver.launch_status = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError):
        kernel.fire(VALUES, (1, 1, 1), 0)
    assert [(run["function"], run["context"]) for run in driver.launches] == [("cute_attn_toy_0 in 0x1001", 0x1001)] * 3
    assert [int(context) for context in driver.contexts] == [0]


def test_loading_happens_once_and_before_the_first_launch(driver: StubDriver) -> None:
    for index in (0, 1, 0):
        Launch(toy(), index)
    limit = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert [call for call in driver.calls if call[0] != "capture mode"] == [
        ("load", toy().cubin),
        (limit, 65536, "cute_attn_toy_0", "device 0"),
        ("funcload", "cute_attn_toy_0 in 0x1000"),
        (limit, 65536, "cute_attn_toy_0", "device 1"),
        ("funcload", "cute_attn_toy_0 in 0x1001"),
    ]
    before = len(driver.calls)
    Launch(toy(), 0).fire(VALUES, (1, 1, 1), 0)
    assert len(driver.calls) == before


def test_driver_error_names_code_kernel_and_grid(driver: StubDriver) -> None:
    driver.launch_status = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match=r"cute_attn_toy_0 with grid \(0, 1, 1\).*CUDA_ERROR_INVALID_VALUE"):
        Launch(toy(), 0).fire(VALUES, (0, 1, 1), 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (VALUES[:4], "each of the 5 kernel parameters, got 4"),
        ((0, 2**31, 1.0, 1.0, 0), "parameter count must be an i32, got 2147483648"),
        ((2**63, 0, 1.0, 1.0, 0), "parameter out must be an i64, got 9223372036854775808"),
        ((0, 0, 1e39, 1.0, 0), r"parameter scale must be an f32, got 1e\+39"),
        ((0, 0, 1.0, 1.0, 0.5), "parameter bias must be an i32, got 0.5"),
    ],
)
def test_value_that_does_not_fit_is_named(driver: StubDriver, values: tuple[float, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Launch(toy(), 0).fire(values, (1, 1, 1), 0)
    assert not driver.launches


def test_artifact_that_does_not_fit_the_device_is_refused(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="compiled for sm_100a, but this device needs sm_90a"):
        Launch(toy("sm_100a"), 0)
    with pytest.raises(ArtifactError, match=r"clusters of \(8, 2, 1\), more than 8 CTAs"):
        Launch(dataclasses.replace(toy(), cluster=(8, 2, 1)), 0)
    monkeypatch.setattr(archs, "for_device", lambda index: archs.for_capability((8, 6)))
    with pytest.raises(ArgumentError, match=r"pdl=True needs compute capability 9\.0"):
        Launch(toy("sm_80"), 0, pdl=True)
    monkeypatch.setattr(archs, "for_device", lambda index: archs.Arch("sm_80", (8, 6), 65535))
    with pytest.raises(ArtifactError, match=r"65536 bytes of shared memory.*8\.6.* has 65535"):
        Launch(toy("sm_80"), 0)
    assert not driver.calls


def test_threads_share_a_launch(driver: StubDriver) -> None:
    driver.launch_seconds = 1e-4
    kernel = Launch(toy(), 0)

    def fire_all(first: int) -> None:
        for number in range(first, first + 50):
            kernel.fire((number, number, float(number), float(number), number), (number, 1, 1), number)

    threads = [threading.Thread(target=fire_all, args=(first,)) for first in (1, 1001)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run["stream"] for run in driver.launches) == [*range(1, 51), *range(1001, 1051)]
    for run in driver.launches:
        number = run["stream"]
        assert run["grid"] == (number, 1, 1)
        assert run["params"] == expected_params((number, number, number, number, number))


def test_imports_without_cuda_python() -> None:
    code = """
from cute_attn.runtime import launch
try:
    launch.load_driver()
except RuntimeError as err:
    print(err)
"""
    assert "launching needs cuda-python" in subprocesses.run(code, block=["cuda"])


# ---- drivers that are too old, and first uses under capture


def test_driver_that_is_too_old_for_the_flavour_is_refused(driver: StubDriver) -> None:
    driver.version = 12090
    built = dataclasses.replace(toy(), dsl="4.8.1 cu13")
    message = r"compiled by CuTe DSL 4\.8\.1 cu13: it needs a driver for CUDA 13 or later, this one is for CUDA 12\.9"
    with pytest.raises(ArtifactError, match=message):
        Launch(built, 0)
    assert not driver.calls
    for flavour, version in (("4.8.1 cu12", 12090), ("4.8.1 cu12", 13000), ("4.8.1 cu13", 13010)):
        driver.version = version
        Launch(dataclasses.replace(toy(), dsl=flavour), 0).fire(VALUES, (1, 1, 1), 0)


def test_first_use_under_capture_loads_in_relaxed_mode(driver: StubDriver) -> None:
    """In any other mode, loading while a stream is captured is an error and ends the capture."""
    for _ in range(2):
        Launch(toy(), 0).fire(VALUES, (1, 1, 1), 0)
    assert [call for call in driver.calls if "ATTRIBUTE" not in call[0]] == [
        ("capture mode", "RELAXED"),
        ("load", toy().cubin),
        ("funcload", "cute_attn_toy_0 in 0x1000"),
        ("capture mode", "GLOBAL"),
    ]
    assert len(driver.launches) == 2


def test_capture_mode_is_restored_after_an_error(driver: StubDriver) -> None:
    with pytest.raises(KeyError), launch.relaxed_capture():
        raise KeyError
    assert driver.capture_mode == real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_threads_load_a_kernel_once(driver: StubDriver) -> None:
    start = threading.Barrier(8)

    def load() -> None:
        start.wait()
        Launch(toy(), 0)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [call[0] for call in driver.calls].count("load") == 1
    assert [call[0] for call in driver.calls].count("funcload") == 1
