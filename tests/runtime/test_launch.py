"""Launches against a stub driver: what reaches cuLaunchKernelEx, in which context, and what errors say."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

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
from tests.support.threads import in_threads
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


NAMES = tuple(name for name, _ in CParams._fields_)
MOVING, FIRST, SECOND = ("bias", "out"), ("count",), ("offset", "scale")  # groups of a launch


def fire(kernel: Launch, values: tuple[float, ...], grid: tuple[int, int, int], stream: int) -> None:
    """Launches once with these values of all parameters."""
    kernel.bind({}, NAMES).fire(stream, values, (grid,))


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
    fire(Launch(toy(cluster=cluster), 0, pdl=pdl), VALUES, (4, 3, 2), 0xABC0)
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


def test_a_launch_writes_what_is_another_object(driver: StubDriver) -> None:
    """Beside another of the same kernel, on another stream, and from a thread that has not touched CUDA."""
    kernel = Launch(toy(), 0)
    some, every = kernel.bind({}, MOVING, FIRST, SECOND), kernel.bind({}, NAMES)
    grid, other, scales = (4, 3, 2), (9, 1, 1), (-2.25, 1.5)
    few, many = (grid, (1,), scales), (other, (2,), scales)
    some.fire(0xABC0, (-7, 32), few)
    every.fire(0, (16, 7, -0.5, 1e300, -1), (other,))
    some.fire(0xABC0, (-7, 48), few)
    driver.contexts = [real.CUcontext(0)]
    some.fire(5, (-8, 48), many)
    some.fire(5, (-8, 64), (other, (2,), (0.5, 0.25)))
    some.fire(5, (-8, 64), few)
    found = [(launch["grid"], launch["stream"], launch["context"], launch["params"]) for launch in driver.launches]
    assert found == [
        (grid, 0xABC0, 0x1000, expected_params((32, 1, 1.5, -2.25, -7))),
        (other, 0, 0x1000, expected_params((16, 7, -0.5, 1e300, -1))),
        (grid, 0xABC0, 0x1000, expected_params((48, 1, 1.5, -2.25, -7))),
        (other, 5, 0x1000, expected_params((48, 2, 1.5, -2.25, -8))),
        (other, 5, 0x1000, expected_params((64, 2, 0.25, 0.5, -8))),
        (grid, 5, 0x1000, expected_params((64, 1, 1.5, -2.25, -8))),
    ]
    assert [int(context) for context in driver.contexts] == [0]
    driver.launch_status = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match=r"cute_attn_toy_\d+ with grid \(9, 1, 1\) failed: CUDA_ERROR_INVALID_VALUE"):
        some.fire(0, (-7, 32), many)


def test_a_launch_that_was_refused_leaves_no_half_written_groups(driver: StubDriver) -> None:
    """Groups of a launch that raised are written again, even where the next launch brings the same objects."""
    bound = Launch(toy(), 0).bind({}, MOVING, FIRST, SECOND)
    grid, one, two = (1, 1, 1), (1,), (2,)
    right = grid, one, (0.5, 0.25)
    bound.fire(0, (7, 32), right)
    with pytest.raises(ArgumentError, match=r"parameter scale must be an f32, got 1e\+39"):
        bound.fire(0, (7, 32), (grid, two, (0.5, 1e39)))
    with pytest.raises(ArgumentError, match=r"one entry for each of \['bias', 'out'\], got 1"):
        bound.fire(0, (7,), right)
    bound.fire(0, (7, 32), right)
    assert [run["params"] for run in driver.launches] == [expected_params((32, 1, 0.25, 0.5, 7))] * 2


@pytest.mark.parametrize(
    ("static", "groups", "message"),
    [
        ({}, (MOVING, FIRST), r"without a value: \['offset', 'scale'\]"),
        ({"heads": 1}, (MOVING, FIRST, SECOND), r"without a parameter: \['heads'\]"),
        ({}, (MOVING, FIRST, SECOND, ("heads",)), r"without a parameter: \['heads'\]"),
        ({"count": 1}, (MOVING, FIRST, SECOND), r"more than once: \['count'\]"),
        ({}, (MOVING, FIRST, SECOND, ("out",)), r"more than once: \['out'\]"),
    ],
)
def test_every_parameter_is_named_once(driver: StubDriver, static: Any, groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Launch(toy(), 0).bind(static, *groups)


def test_another_current_device_is_switched_to_and_restored(driver: StubDriver) -> None:
    kernel = Launch(toy(), 1)
    assert [int(context) for context in driver.contexts] == [0x1000]
    fire(kernel, VALUES, (1, 1, 1), 0)
    driver.contexts = [real.CUcontext(0)]  # a thread that has not touched CUDA
    fire(kernel, VALUES, (1, 1, 1), 0)
    driver.launch_status = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError):
        fire(kernel, VALUES, (1, 1, 1), 0)
    assert [(run["function"], run["context"]) for run in driver.launches] == [("cute_attn_toy_0 in 0x1001", 0x1001)] * 3
    assert [int(context) for context in driver.contexts] == [0]


def test_loading_happens_once_and_before_the_first_launch(driver: StubDriver) -> None:
    """In relaxed mode: in any other, loading while a stream is captured is an error and ends the capture."""
    for index in (0, 1, 0):
        Launch(toy(), index)
    limit = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert driver.calls == [
        *(("capture mode", "RELAXED"), ("load", toy().cubin)),
        (limit, 65536, "cute_attn_toy_0", "device 0"),
        *(("funcload", "cute_attn_toy_0 in 0x1000"), ("capture mode", "GLOBAL"), ("capture mode", "RELAXED")),
        (limit, 65536, "cute_attn_toy_0", "device 1"),
        *(("funcload", "cute_attn_toy_0 in 0x1001"), ("capture mode", "GLOBAL")),
    ]
    before = len(driver.calls)
    fire(Launch(toy(), 0), VALUES, (1, 1, 1), 0)
    assert len(driver.calls) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 2**31, 1.0, 1.0, 0), "parameter count must be an i32, got 2147483648"),
        ((2**63, 0, 1.0, 1.0, 0), "parameter out must be an i64, got 9223372036854775808"),
        ((0, 0, 1.0, 1.0, 0.5), "parameter bias must be an i32, got 0.5"),
    ],
)
def test_value_that_does_not_fit_is_named(driver: StubDriver, values: tuple[float, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fire(Launch(toy(), 0), values, (1, 1, 1), 0)
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
    bound = Launch(toy(), 0).bind({}, NAMES)

    def fire_all(first: int) -> None:
        for number in range(first, first + 50):
            bound.fire(number, (number, number, float(number), float(number), number), ((number, 1, 1),))

    in_threads(fire_all, (1, 1001))
    assert sorted(run["stream"] for run in driver.launches) == [*range(1, 51), *range(1001, 1051)]
    for run in driver.launches:
        number = run["stream"]
        assert run["grid"] == (number, 1, 1)
        assert run["params"] == expected_params((number, number, number, number, number))


def test_an_interrupted_launch_blocks_no_later_one(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    bound = Launch(toy(), 0).bind({}, NAMES)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "cuLaunchKernelEx", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bound.fire(0, VALUES, ((1, 1, 1),))
    bound.fire(0, VALUES, ((1, 1, 1),))
    assert len(driver.launches) == 1


def test_imports_without_cuda_python() -> None:
    code = """
from cute_attn.runtime import launch
try:
    launch.load_driver()
except RuntimeError as err:
    print(err)
"""
    assert "launching needs cuda-python" in subprocesses.run(code, block=["cuda"])


# ---- drivers that are too old, and captures


def test_driver_that_is_too_old_for_the_flavour_is_refused(driver: StubDriver) -> None:
    driver.version = 12090
    built = dataclasses.replace(toy(), dsl="4.8.1 cu13")
    message = r"compiled by CuTe DSL 4\.8\.1 cu13: it needs a driver for CUDA 13 or later, this one is for CUDA 12\.9"
    with pytest.raises(ArtifactError, match=message):
        Launch(built, 0)
    assert not driver.calls
    for flavour, version in (("4.8.1 cu12", 12090), ("4.8.1 cu12", 13000), ("4.8.1 cu13", 13010)):
        driver.version = version
        fire(Launch(dataclasses.replace(toy(), dsl=flavour), 0), VALUES, (1, 1, 1), 0)


def test_capture_mode_is_restored_after_an_error(driver: StubDriver) -> None:
    with pytest.raises(KeyError), launch.relaxed_capture():
        raise KeyError
    assert driver.capture_mode == real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_threads_load_a_kernel_once(driver: StubDriver) -> None:
    in_threads(lambda _: Launch(toy(), 0), range(8))
    assert [call[0] for call in driver.calls].count("load") == 1
    assert [call[0] for call in driver.calls].count("funcload") == 1
