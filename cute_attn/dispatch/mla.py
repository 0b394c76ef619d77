"""Runs of multi-head latent attention: by its kernel on CUDA tensors, in torch on others."""

from __future__ import annotations

from cute_attn.dispatch import emulator
from cute_attn.errors import NotSupported, Refusal
from cute_attn.kernels.host import gpu as gpus
from cute_attn.kernels.host.operands import Fire
from cute_attn.kernels.mla.host import launch
from cute_attn.reference import mla as reference
from cute_attn.request.mla import MlaProblem

BACKENDS = ("auto", "mla", "reference", "emulator")
RUNS_ON = {"cuda": ("auto", "mla", "reference"), "cpu": ("auto", "reference", "emulator")}


def run(problem: MlaProblem, backend: str) -> Fire | None:
    """Compute `out` and `lse` of a problem on a backend of BACKENDS. Return what computes those of problems that differ
    in addresses; None for CPU tensors, whose values every call looks at.
    """
    kind = problem.settings.device.type
    if backend not in RUNS_ON[kind]:
        instead = " or ".join(f'backend="{name}"' for name in RUNS_ON[kind])
        raise NotSupported([Refusal(backend, f"{kind} tensors", "it runs on tensors of the other kind", instead)])
    if backend == "emulator":
        with emulator.visible(problem._asdict() | problem.lengths._asdict()):
            launch.run(problem, emulator.emulated_gpu())
    elif backend == "reference" or kind == "cpu":
        reference.run(problem)
    else:
        return launch.run(problem, gpus.of_device(problem.settings.device.index))
    return None
