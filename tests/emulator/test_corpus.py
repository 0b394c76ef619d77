"""Kernels that are published as working on hardware come out right: what we read alike in our kernels and in the
emulator, and read wrong, would show here. `pytest -m corpus` with flash-attn-4 installed; nothing of it is kept.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from cute_attn.emulator.errors import Race
from cute_attn.emulator.isa import floats
from cute_attn.emulator.machine import Schedule
from perf.flash_attn_4.kernel import Kernel
from perf.flash_attn_4.problem import Problem, Shape
from tests.support.subprocesses import ROOT

pytestmark = pytest.mark.corpus

NEEDED = ("flash_attn.cute", "quack", "triton", "cutlass")

KERNELS = [
    Kernel(arch, head_dim, causal, group)
    for arch in ("sm_90a", "sm_100a")
    for head_dim in (64, 128)
    for causal, group in ((False, 1), (True, 1), (True, 2), (False, 4))
]
KERNELS += [Kernel("sm_100a", 128, False, 1, 2), Kernel("sm_100a", 128, True, 2, 2)]
KERNELS += [
    Kernel("sm_100a", 128, causal, 1, 2, traits) for causal, traits in ((False, "p"), (True, "c"), (False, "8"))
]

WHOLE, RAGGED, LONG = Shape(128, 256), Shape(200, 300, 2, 2), Shape(256, 1100)


def _missing() -> str:
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return name
    return ""


@pytest.fixture(scope="module")
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Kernel, str]:
    """PTX of every kernel that a selected test runs, as the DSL's compiler gives it."""
    missing = _missing()
    if missing:
        pytest.skip(f"the corpus needs the package {missing}: pip install flash-attn-4==4.0.0b36")
    folder = tmp_path_factory.mktemp("corpus")
    chosen = {item.callspec.params.get("kernel") for item in request.session.items if hasattr(item, "callspec")}
    kernels = [kernel for kernel in KERNELS if kernel in chosen]
    command = [sys.executable, "-m", "perf.flash_attn_4.compile", str(folder), *map(str, kernels)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {kernel: (folder / f"{kernel.file}.ptx").read_text() for kernel in kernels}


def _check(kernel: Kernel, shape: Shape, text: str, schedule: Schedule) -> None:
    """Their loads of tensor memory are not waited for before it is overwritten: without `strict`."""
    problem = Problem(kernel, shape)
    problem.launch(text, schedule=schedule, strict=False)
    o, lse = problem.expected()
    found = floats.bf16_to_f32(problem.o)
    # Roundings of P, to bfloat16 or e4m3, and of O, which is below 4.
    assert np.abs(found - o).max() < (0.2 if "8" in kernel.traits else 0.01)
    assert np.abs(problem.lse - lse).max() < 5e-5  # part of the exponentials are polynomials


@pytest.mark.parametrize("shape", [WHOLE, RAGGED, LONG], ids=lambda s: f"{s.qo_len}x{s.kv_len}")
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_forward(texts: dict[Kernel, str], kernel: Kernel, shape: Shape) -> None:
    _check(kernel, shape, texts[kernel], Schedule())


@pytest.mark.parametrize("kind", ["delayed", "adversarial"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.causal and k.group == 2], ids=str)
def test_forward_other_schedules(texts: dict[Kernel, str], kernel: Kernel, kind: str) -> None:
    _check(kernel, Shape(200, 500), texts[kernel], Schedule(kind, 5))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.arch == "sm_100a" and not k.causal], ids=str)
def test_strictness_tells_unwaited_loads(texts: dict[Kernel, str], kernel: Kernel) -> None:
    """These kernels store P over S without tcgen05.wait::ld in between."""
    assert "tcgen05.wait::ld" not in texts[kernel]
    with pytest.raises(Race, match=r"tcgen05\.st.*tcgen05\.ld"):
        Problem(kernel, WHOLE).launch(texts[kernel], strict=True)
