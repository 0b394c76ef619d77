"""Interface of a prepared attention kernel to the code that runs single requests and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cute_attn.kernels.host.combine import CombineKernel
from cute_attn.kernels.host.output import OutputTarget, Target
from cute_attn.kernels.host.params import Values
from cute_attn.problem import BatchProblem, Problem
from cute_attn.runtime.launch import Launch

Grid = tuple[int, int, int]
Replay = Callable[[int, int, int, int, int, int], Values]  # from addresses of q, k, v, out and lse, and a stream, to
# ^ values of `PreparedKernel.replay_fields`


class PreparedKernel(Protocol):
    """Loaded kernels, and all of their parameters that settings and tile decide."""

    attention: Launch
    combine: CombineKernel | None  # None: the attention kernel leaves no partials to combine
    output: OutputTarget
    number_fields: tuple[str, ...]  # those of the kernel's schedule
    replay_fields: tuple[str, ...]

    def values(self, problem: Problem | BatchProblem, target: Target, numbers: Values, stream: int) -> Values:
        """Returns the parameters of an attention launch. `numbers`: values of `number_fields`."""

    def replay(self, problem: Problem | BatchProblem) -> Replay:
        """Returns a function that computes the parameters in which a launch differs from that of `problem`, if its
        tensors differ in addresses only.
        """
