"""Outputs inside larger buffers, which detect writes beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.right import Solver, assert_right

GUARD = 512
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Guarded:
    """`out` `[rows, heads, dim]` with gaps after heads and tokens, `lse` `[rows, heads]`, in their buffers."""

    out: torch.Tensor
    lse: torch.Tensor
    buffers: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, rows: int, heads: int, dim: int, dtype: torch.dtype) -> Guarded:
        strides = (heads * (dim + 8) + 16, dim + 8, 1)
        out = torch.full((2 * GUARD + rows * strides[0],), UNTOUCHED, dtype=dtype, device="cuda")
        lse = torch.full((2 * GUARD + rows * heads,), UNTOUCHED, device="cuda")
        inner = lse[GUARD : GUARD + rows * heads].view(rows, heads)
        return cls(out.as_strided((rows, heads, dim), strides, GUARD), inner, (out, lse))

    def assert_alone(self) -> None:
        """Nothing beside them was written. They are overwritten."""
        self.out.fill_(UNTOUCHED)
        self.lse.fill_(UNTOUCHED)
        assert all(bool((buffer == UNTOUCHED).all()) for buffer in self.buffers)


def assert_outputs_alone_are_written(solver: Solver) -> None:
    problem, inputs = solver.problem, solver.inputs
    dtype = getattr(torch, problem.o_dtype or problem.dtype)
    outputs = Guarded.of(problem.rows, problem.num_qo_heads, problem.head_dim_vo, dtype)
    out, lse = outputs.out, outputs.lse
    out[: problem.first], lse[: problem.first] = 0.0, -torch.inf  # rows of no request: the caller's
    out, lse = (out[0], lse[0]) if problem.kind == "single_decode" else (out, lse)
    returned = solver.call(out=out, lse=lse)
    assert returned[0].data_ptr() == out.data_ptr()
    assert_right(problem, inputs, out, lse)
    outputs.assert_alone()
