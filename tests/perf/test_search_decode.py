"""Search of decode rings on a CPU: what it tries, and that a plan takes the ring that it forces."""

from __future__ import annotations

import pytest
import torch

from cute_attn.kernels.xqa.host import grid
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.tiles import RESERVED_SMEM
from cute_attn.problem import Features
from cute_attn.runtime.arch import named
from perf import search_decode
from perf.batch_workloads import BatchWorkload, equal

HOPPER = named("sm_90a")


FEATURES = Features(
    "cuda", torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16, 32, 8, 128, 128, kv_source="paged", device_lengths=True
)


def workload(batch_size: int, kv_dtype: str) -> BatchWorkload:
    return equal(batch_size, 1, 2048, (32, 8), 128, 16, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", search_decode.SPEC_DTYPES)
@pytest.mark.parametrize("batch_size", [1, 64])
def test_rings_contain_that_of_the_table_and_fit(batch_size: int, kv_dtype: str) -> None:
    w = workload(batch_size, kv_dtype)
    start = search_decode.start_of(w, HOPPER)
    found = search_decode.rings(start, search_decode.segments(w), HOPPER)
    assert start in found
    assert len({search_decode.title(spec) for spec in found}) == len(found) > 10
    for spec in found:
        bytes_of_ctas = (spec.ctas + spec.guests) * (XqaMemory.of(spec).bytes + RESERVED_SMEM)
        assert bytes_of_ctas <= HOPPER.smem_limit + RESERVED_SMEM
        assert (spec.kv_dtype, spec.head_dim, spec.row_blocks) == (start.kv_dtype, start.head_dim, start.row_blocks)


def test_a_forced_ring_is_launched() -> None:
    start = search_decode.start_of(workload(64, "e4m3"), HOPPER)
    other = next(spec for spec in search_decode.rings(start, "many", HOPPER) if spec.warps != start.warps)

    def launched() -> object:
        return grid.choose_spec(FEATURES, 1, "many", HOPPER)

    assert launched() == start
    with search_decode.force_spec(other):
        assert launched() == other
    assert launched() == start
