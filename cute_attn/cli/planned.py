"""Problems on a GPU that need not be here: what `explain` and `demo` show of other architectures."""

from __future__ import annotations

import torch

from cute_attn.dispatch import select
from cute_attn.dispatch.families import FAMILIES
from cute_attn.kernels.host.family import KernelLaunch
from cute_attn.problem import Problem
from cute_attn.request import single as single_request
from cute_attn.runtime.arch import TYPICAL_SMS, Arch

__all__ = ["TYPICAL_SMS", "launches", "on_gpu"]


def on_gpu(call: single_request.Call) -> Problem:
    """A call with CPU tensors, checked like any other, as if they were on a GPU. Only good for planning."""
    problem = single_request.problem(call)
    features = problem.features._replace(device=torch.device("cuda"))
    return problem._replace(settings=problem.settings._replace(features=features))


def launches(problem: Problem, arch: Arch, sms: int) -> list[KernelLaunch]:
    """Kernels and grids of the backend that "auto" chooses; NotSupported if there is none."""
    load = select.load_of(problem.settings, problem.qo_len)
    return FAMILIES[select.choose(problem.features, "auto", arch, load).name].launches(problem, arch, sms)
