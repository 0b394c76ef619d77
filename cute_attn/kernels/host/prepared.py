"""What single requests and batches ask of a prepared attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cute_attn.kernels.host.combine import CombineKernel
from cute_attn.kernels.host.output import OutputTarget, Target
from cute_attn.kernels.host.params import Values
from cute_attn.problem import BatchProblem, Problem, Settings
from cute_attn.runtime.launch import Launch

Grid = tuple[int, int, int]
Replay = Callable[[int, int, int, int, int, int], Values]  # from addresses of q, k, v, out and lse, and a stream


class PreparedKernel(Protocol):
    """Loaded launches, and all of their parameters that settings and tile decide."""

    settings: Settings
    attention: Launch
    combine: CombineKernel | None  # None: no partials
    output: OutputTarget

    def values(self, problem: Problem | BatchProblem, target: Target, numbers: Values, stream: int) -> Values:
        """Parameters of an attention launch. `numbers`: those of the schedule, and of a batch BATCH_FIELDS."""

    def replay(self, problem: BatchProblem, values: Values) -> Replay:
        """Parameters of later launches that differ from `values`, those of `problem`, in addresses only."""
