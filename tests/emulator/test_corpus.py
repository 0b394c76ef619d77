"""Kernels that are published as working on hardware come out right: what we read alike in our kernels and in the
emulator, and read wrong, would show here. `pytest -m corpus` with flash-attn-4 installed; nothing of it is kept.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest

from cute_attn.emulator import ptx
from cute_attn.emulator.errors import Race, RegisterFault
from cute_attn.emulator.isa import floats, load, registry
from cute_attn.emulator.machine import Schedule
from tests.emulator.published.problem import Kernel, Problem, Shape
from tests.support.subprocesses import ROOT

pytestmark = pytest.mark.corpus

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


@pytest.fixture(scope="module")
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Kernel, str]:
    """PTX of every kernel that a selected test runs, as the DSL's compiler gives it."""
    try:
        metadata.distribution("flash-attn-4")
    except metadata.PackageNotFoundError:
        pytest.skip("the corpus needs a package: pip install flash-attn-4==4.0.0b36")
    folder = tmp_path_factory.mktemp("corpus")
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {kernel for given in params for kernel in (given.get("kernel"), *given.get("kernels", ()))}
    kernels = [kernel for kernel in KERNELS if kernel in chosen]
    command = [sys.executable, "-m", "tests.emulator.published.compile", str(folder), *map(str, kernels)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {kernel: (folder / f"{kernel.file}.ptx").read_text() for kernel in kernels}


def _check(kernel: Kernel, shape: Shape, text: str, schedule: Schedule, strict: bool = False) -> None:
    """Their loads of tensor memory are not waited for, and they have no tcgen05.fence: without `strict`."""
    problem = Problem(kernel, shape)
    problem.launch(text, schedule=schedule, strict=strict)
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


# --- what of the emulator they exercise -------------------------------------------------------------------------------

# Opcodes that exist from sm_100 on. All others of these rest on our reading of the ISA alone.
EXERCISED = {
    *(f"{op}.f32x2" for op in ("add.rn", "add.rm", "sub.rn", "mul.rn", "fma.rn")),
    *(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}.b32.b128" for axis in "xyz"),
    "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128",
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128",
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint.cta_group::2",
    *(f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32" for group in (1, 2)),
    *(f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32" for group in (1, 2)),
    *(f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned" for group in (1, 2)),
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
    *(f"tcgen05.ld.sync.aligned.32x32b.x{num}.b32" for num in (16, 32)),
    *(f"tcgen05.st.sync.aligned.32x32b.x{num}.b32" for num in (8, 16)),
    *(f"tcgen05.mma.cta_group::{group}.kind::f16" for group in (1, 2)),
    "tcgen05.mma.cta_group::1.kind::f8f6f4",
    "tcgen05.wait::st.sync.aligned",
}


@pytest.mark.parametrize("kernels", [tuple(k for k in KERNELS if k.arch == "sm_100a")], ids=["sm_100a"])
def test_forms_of_blackwell_that_they_exercise(texts: dict[Kernel, str], kernels: tuple[Kernel, ...]) -> None:
    load()
    bodies = [entry.body for kernel in kernels for entry in ptx.parse(texts[kernel]).values()]
    opcodes = {inst.op for body in bodies for inst in body if isinstance(inst, ptx.Inst)}
    assert {op for op in opcodes if registry.lookup(op, 100)[0].since >= 100} == EXERCISED


# --- what the PTX ISA asks for and they leave out ---------------------------------------------------------------------
#
# Their loads of tensor memory have no tcgen05.wait::ld: ptxas makes an instruction wait for the registers that it uses,
# but nothing orders a load before the store of P over S, or before the arrival that hands the columns on. Nor is there
# any tcgen05.fence. Both are hazards by the ISA; the text with waits and fences put in must not be reported.

BLACKWELL = [k for k in KERNELS if k.arch == "sm_100a" and not k.causal]
_GUARD = r"(?m)^(\s*(?:@!?[%\w]+\s+)?"


def _waiting(text: str) -> str:
    return re.sub(r"(tcgen05\.ld\.[^;]*;)", r"\1 tcgen05.wait::ld.sync.aligned;", text)


def _fenced(text: str) -> str:
    text = re.sub(
        _GUARD + r"(?:mbarrier\.arrive|bar\.sync|bar\.arrive))", r"tcgen05.fence::before_thread_sync;\1", text
    )
    return re.sub(_GUARD + r"tcgen05\.(?:ld|st|mma)\.)", r"tcgen05.fence::after_thread_sync;\1", text)


@pytest.mark.parametrize("kernel", BLACKWELL, ids=str)
def test_strictness_tells_what_is_left_out(texts: dict[Kernel, str], kernel: Kernel) -> None:
    text = texts[kernel]
    assert re.search(r"tcgen05\.(wait::ld|fence)", text) is None
    with pytest.raises(RegisterFault, match=r"before tcgen05\.wait::ld"):
        Problem(kernel, WHOLE).launch(_fenced(text))
    with pytest.raises(Race, match=r"tcgen05\.ld.* a write by tcgen05\.mma"):
        Problem(kernel, WHOLE).launch(_waiting(text))


@pytest.mark.parametrize("kind", ["eager", "adversarial"])
@pytest.mark.parametrize("kernel", BLACKWELL, ids=str)
def test_with_waits_and_fences(texts: dict[Kernel, str], kernel: Kernel, kind: str) -> None:
    _check(kernel, RAGGED, _fenced(_waiting(texts[kernel])), Schedule(kind, 5), strict=True)
