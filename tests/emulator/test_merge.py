"""The combine kernel on the emulator: partial results that callers hold, and launches of a fixed size, with fewer warps
than rows, each of which merges several rows.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch

from cute_attn import ArgumentError, emulator
from cute_attn.dispatch import merge
from cute_attn.integrations.distributed.decode import Partials
from cute_attn.integrations.distributed.ranks import Ranks
from cute_attn.kernels.combine.spec import FEW_ROWS, RESIDENT_ROWS, WARPS, CombineSpec
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, Merge
from tests.support.batch_case import BatchCase, heads, paged
from tests.support.emulated_calls import emulated_merge
from tests.support.graphs import graph_wrapper
from tests.support.right import assert_planned_right

pytestmark = pytest.mark.emulator

ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def states(num_states: int, rows: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and lse of the same rows: one state has none of their keys, and row 1 has no key at all."""
    generator = torch.Generator().manual_seed(rows)
    o = torch.randn(num_states, rows, head_dim, generator=generator)
    lse = torch.randn(num_states, rows, generator=generator) * 4
    lse[num_states // 2] = lse[:, 1] = -torch.inf
    o[lse == -torch.inf] = 0
    return o, lse


def expected(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.exp2(lse.double())
    total = weights.sum(0)
    merged = (weights[..., None] * o.double()).sum(0) / total.clamp(min=1e-300)[..., None]
    return merged, total.log2()


def padded(x: torch.Tensor, step: int) -> torch.Tensor:
    """The same values, with states `step` rows apart."""
    made = torch.full((x.shape[0], step, *x.shape[2:]), torch.nan)
    made[:, : x.shape[1]] = x
    return made[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("num_states", "head_dim"), [(2, 128), (5, 72), (1, 64), (33, 256)])
def test_states_a_step_apart(num_states: int, head_dim: int, dtype: torch.dtype) -> None:
    """Rows that warps share on a large GPU, and have to themselves on a small one, have the same bits."""
    rows = FEW_ROWS + 1
    o, lse = states(num_states, rows, head_dim)
    found = []
    for sms in (132, 1):
        out, merged = torch.empty(rows, head_dim, dtype=dtype), torch.empty(rows)
        with emulator.using("sm_80" if num_states == 5 else "sm_90a", sms=sms):
            emulated_merge(padded(o, rows + 2), padded(lse, rows + 2), out, merged, math.log(2))
        found.append((out, merged))
    (out, merged), (own_out, own_merged) = found
    want, s = expected(o, lse)
    torch.testing.assert_close(out.double(), want, rtol=ROUNDING[dtype], atol=2**-20)
    torch.testing.assert_close(merged.double(), s * math.log(2), rtol=2**-20, atol=2**-20)
    assert torch.equal(out, own_out)
    assert torch.equal(merged, own_merged)


class LoneRank(Ranks):
    """A rank whose peers are played by the test: the parts of others are in the buffer already."""

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        assert gathered[self.rank].data_ptr() == own.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partials_of_ranks(dtype: torch.dtype) -> None:
    """The buffer of the exchange is laid out as the kernel reads it."""
    tokens, heads, head_dim, ranks = 3, 5, 64, 4
    o, lse = states(ranks, tokens * heads, head_dim)
    o = o.to(dtype).float()
    parts = [
        Partials((tokens, heads, head_dim), dtype, LoneRank(None, r, ranks), torch.device("cpu")) for r in range(4)
    ]
    for r, part in enumerate(parts):
        part.o.copy_(o[r].view(part.o.shape))
        part.lse.copy_(lse[r].view(part.lse.shape))
        part.exchange()
        parts[0]._gathered[r] = part._own  # what rank 0 receives
    out, merged = torch.empty(tokens, heads, head_dim), torch.empty(tokens, heads)
    with emulator.using("sm_90a") as emulation, mock.patch.object(merge, "run", emulated):
        parts[0].merge(out, merged, "log2")
    assert len(emulation.records) == 1
    want, s = expected(o, lse)
    torch.testing.assert_close(out.view(-1, head_dim).double(), want, rtol=2**-20, atol=2**-20)
    torch.testing.assert_close(merged.view(-1).double(), s, rtol=2**-20, atol=2**-20)


def emulated(*arguments: object) -> bool:
    emulated_merge(*arguments)  # type: ignore[arg-type]
    return True


def test_states_that_do_not_fit() -> None:
    o, lse = states(2, 4, 64)
    out = torch.empty(4, 64)
    assert merge.fits(o, lse, out)
    assert not merge.fits(o, padded(lse, 5), out)  # o and lse are not as many rows apart
    assert not merge.fits(*states(129, 4, 64), out)
    assert not merge.fits(*states(2, 4, 60), torch.empty(4, 60))
    assert not merge.fits(o, lse, torch.empty(64, 4).t())
    assert not merge.run(o, lse, out, None, 1.0)  # not on a GPU
    with pytest.raises(ArgumentError, match="cannot merge states of shape"):
        emulated_merge(o, padded(lse, 5), out, None, 1.0)


ROWS = RESIDENT_ROWS  # that the launch merges at once on one multiprocessor
GRAPHED: tuple[BatchCase, ...] = (
    paged((30, 9), (300, 40), mask="causal", fixed_split_size=8, sinks=True, **heads(2, 1)),
    paged((12, 0, 2), (90, 70, 20), fixed_split_size=8, **heads(4, 1)),  # nothing is cut
)


@pytest.mark.parametrize("schedule", ["eager", "adversarial"])
@pytest.mark.parametrize("case", GRAPHED, ids=["cut", "whole"])
@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
def test_fewer_warps_than_rows(kernels: str, case: BatchCase, schedule: str) -> None:
    made: Any = graph_wrapper(case, "cpu", 60, 0, backend="emulator")[0]
    with emulator.using("sm_90a", kernels=kernels, schedule=emulator.Schedule(schedule, 1), sms=1) as emulation:
        assert_planned_right(case, made)
    planned = made._planned().launch.planned
    plan, (items, merges, _) = planned.schedule, planned.schedule.room.capacity
    records = planned.records[0][items * ITEM_INTS :][: merges * MERGE_INTS].view(-1, MERGE_INTS)
    cut = int((records[:, Merge._fields.index("qo_len")] > 0).sum())
    grids = [record.grid for record in emulation.records if record.spec["kernel"] == CombineSpec.kernel]
    assert grids == [(ROWS // WARPS, 1, 1)]
    assert plan.combine.num_rows > ROWS
    assert (cut * min(plan.rows_per_merge, 2 * case.qo_lens[0]) > ROWS) == (case is GRAPHED[0])  # rows that exist
