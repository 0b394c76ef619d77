"""The emulator computes what hardware computed: micro-kernels against recorded results."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from cute_attn.emulator import Schedule, tensormap
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import MemoryFault
from cute_attn.emulator.isa import floats
from tests.emulator.micro import emulate
from tests.emulator.micro.case import Case
from tests.emulator.micro.catalogue import ADDRESS, cases, maps

GOLDENS = Path(__file__).parent / "goldens"
pytestmark = pytest.mark.emulator

# Bounds of the ISA where they are no number of ulps: relative to the value, or absolute.
NEAR = {"lg2": (2**-21.5, 2**-22), "tanh": (2**-10.9, 0.0), "sin": (0.0, 2**-20.5), "cos": (0.0, 2**-20.5)}


@functools.cache
def recorded(family: str) -> dict[str, Array]:
    with np.load(GOLDENS / f"{family}.npz") as stored:
        return {name: stored[name] for name in stored.files}


@functools.cache
def refused() -> dict[str, str]:
    """What hardware said of cases that it does not run."""
    return json.loads((GOLDENS / "record.json").read_text())["failures"]


def differences(case: Case, got: bytes, want: bytes) -> str:
    """Where results differ beyond what the case allows, or ""."""
    kind = case.unit.partition(":")[0]
    unit = {"near": "f4", "bf2": "u2"}.get(kind, kind)
    a, b = (np.frombuffer(x, unit) for x in (got, want))
    values = [floats.bf16_to_f32(x) if kind == "bf2" else x for x in (a, b)]
    if kind == "near":
        relative, absolute = NEAR[case.unit[5:]]
        equal = (np.abs(a - b) <= relative * np.abs(b) + absolute) | (a == b)
    else:
        bits = [x.view(f"i{x.itemsize}").astype(np.int64) for x in (a, b)]
        equal = np.abs(bits[0] - bits[1]) <= case.ulps
    wrong = ~(equal | (np.isnan(values[0]) & np.isnan(values[1])))
    if not wrong.any():
        return ""
    first = int(np.flatnonzero(wrong)[0])
    return f"{case.id}: item {first} is {a[first]!r}, hardware has {b[first]!r}; {int(wrong.sum())} of {len(wrong)}"


CASES = [pytest.param(case, id=case.id) for case in cases() if case.id not in refused()]
REFUSED = [pytest.param(case, id=case.id) for case in cases() if case.id in refused()]


@pytest.mark.parametrize("case", CASES)
def test_emulator_reproduces_hardware(case: Case) -> None:
    stored = recorded(case.family)
    assert str(stored[f"digest {case.name}"]) == case.digest, "the case changed after it was recorded"
    assert differences(case, emulate.run(case), stored[case.name].tobytes()) == ""


@pytest.mark.parametrize("case", REFUSED)
def test_emulator_refuses_what_hardware_refuses(case: Case) -> None:
    assert "ILLEGAL_INSTRUCTION" in refused()[case.id]
    with pytest.raises(MemoryFault, match=r"TMA (store )?at"):
        emulate.run(case)


@pytest.mark.parametrize("family", ["tma", "wgmma", "barriers", "copies", "cluster", "matrix", "warp"])
@pytest.mark.parametrize("kind", ["delayed", "adversarial"])
def test_schedules_do_not_change_results(kind: str, family: str) -> None:
    for seed, case in enumerate(case for case in cases() if case.family == family and case.id not in refused()):
        got = emulate.run(case, schedule=Schedule(kind, seed))
        assert differences(case, got, recorded(family)[case.name].tobytes()) == ""


def test_descriptors_are_those_of_the_driver_and_read_as_written() -> None:
    for tensor, row in zip(maps(), recorded("tensor_maps")["rows"], strict=True):
        written = emulate.encoded(tensor, ADDRESS)
        assert written.hex() == row.tobytes().hex(), tensor
        read = tensormap.decode(written)
        assert (read.address, read.dtype) == (ADDRESS, tensor.dtype)
        assert (read.dims, read.strides, read.box) == (tensor.dims, tensor.strides, tensor.box)
        assert (read.swizzle, read.l2) == (tensor.swizzle, tensor.l2)


def test_the_record_is_complete() -> None:
    """Every case was recorded or refused, and nothing else was."""
    kept = {f"{family}/{name}" for family in {case.family for case in cases()} for name in recorded(family)}
    kept = {name for name in kept if "/digest " not in name}
    assert sorted(kept | refused().keys()) == sorted(case.id for case in cases())  # no two of which share a name
    assert not kept & refused().keys()
