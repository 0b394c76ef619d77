"""exp2 on the FMA units, on the emulator: its error, and what it makes of scores out of range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from cute_attn.emulator.adapter import EmulatedLaunch, visible
from cute_attn.runtime.compile import compile_spec
from cute_attn.runtime.spec import KernelSpec, Program

pytestmark = pytest.mark.emulator

ROWS, COLUMNS = 128, 32
# Of the cubic; the exponent adds 2^-18 and the sum's rounding less.
RELATIVE = 1.02e-4 + 2**-17


@dataclass(frozen=True)
class Exp2Spec(KernelSpec):
    kernel: ClassVar[str] = "exp2"
    needs_mma: ClassVar[bool] = False
    polynomial: int


def program(spec: KernelSpec, arch: str) -> Program:
    from tests.support.exp2_kernel import Exp2Program

    assert isinstance(spec, Exp2Spec)
    return Exp2Program(spec.polynomial)


def run(x: torch.Tensor, polynomial: int, scale: float = 1.0, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the exponentials of x [ROWS, COLUMNS] and their sums."""
    launch = EmulatedLaunch(compile_spec(Exp2Spec(polynomial), "sm_100a", program), pdl=False)
    p, sums = torch.empty(ROWS, COLUMNS), torch.empty(ROWS)
    with visible({"x": x}, {"p": p, "sums": sums}):
        values = x.data_ptr(), p.data_ptr(), sums.data_ptr(), scale, shift
        launch.bind({}, [param.name for param in launch.artifact.params]).fire(0, values, ((1, 1, 1),))
    return p, sums


@pytest.mark.parametrize("polynomial", [0, 5, 16])
def test_error(polynomial: int) -> None:
    x = torch.linspace(-30, 9, ROWS * COLUMNS).view(ROWS, COLUMNS)
    p, sums = run(x, polynomial)
    expected = torch.exp2(x.double())
    error = (p / expected - 1).abs().max()
    assert error < RELATIVE
    assert (error > 5e-5) == (polynomial > 0)  # that the polynomial was used
    torch.testing.assert_close(sums.double(), expected.sum(1), rtol=RELATIVE, atol=0)


def test_error_of_scaled_scores() -> None:
    """Scores of 1000 and their anchor cancel: each of three roundings is 2^-24 of that."""
    x = 1000 + torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 8
    scale, shift = 1.25, -1260.0
    p, _ = run(x, 16, scale, shift)
    torch.testing.assert_close(p.double(), torch.exp2(x.double() * scale + shift), rtol=RELATIVE + 3e-4, atol=0)


def test_out_of_range() -> None:
    x = torch.zeros(ROWS, COLUMNS)
    lowest = torch.tensor([-torch.inf, -1e30, -1000.0, -200.0, -128.0])
    highest = torch.tensor([torch.inf, 1e30, 1000.0, 200.0, 128.0])
    for i in range(len(lowest)):
        x[i], x[8 + i] = lowest[i], highest[i]
    p, sums = run(x, 16)
    assert (p[:5] == 0).all()
    assert (p[8:13] == 2.0**127).all()
    assert (sums[:5] == 0).all()
    assert sums[8].isnan()  # as in exact arithmetic: no anchor brings an infinite score into range
    assert (sums[9:13] > 2.0**100).all()


def test_nan_reaches_the_sum() -> None:
    """Of every column, in the row of its number."""
    x = torch.zeros(ROWS, COLUMNS)
    x[:COLUMNS].fill_diagonal_(torch.nan)
    _, sums = run(x, 6)
    assert sums.isnan().nonzero().flatten().tolist() == list(range(COLUMNS))
