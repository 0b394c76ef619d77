"""Pairs of CTAs of fa4: what each loads, and how many are launched. No GPU, no kernel."""

from __future__ import annotations

import pytest

from cute_attn.emulator.tensormap import decode
from cute_attn.kernels.fa4.smem import BlackwellMemory
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.kernels.host.persistent.prepared import TensorMaps
from tests.support.backend_problems import build
from tests.support.batch_case import dims, heads, paged
from tests.support.persistent_host import TARGETS, single

FA4 = TARGETS[1]
ALONE, PAIR = (BlackwellTile(query_tiles=1, cols=128, ctas=ctas) for ctas in (1, 2))


def test_a_cta_of_a_pair_holds_its_own_queries_and_half_of_k_and_v() -> None:
    alone, pair = (BlackwellMemory(tile, 256, 256).map for tile in (ALONE, PAIR))
    assert pair.ring("q").slot_bytes == alone.ring("q").slot_bytes
    for operand in "kv":
        assert 2 * pair.ring(operand).slot_bytes == alone.ring(operand).slot_bytes


@pytest.mark.parametrize(("head_dim", "columns"), [(128, 1), (160, 2), (192, 2), (256, 2)])
def test_the_ctas_of_a_pair_have_equal_columns_of_v(head_dim: int, columns: int) -> None:
    assert BlackwellMemory(PAIR, 256, head_dim).loaded("v").columns == columns


def test_boxes_of_a_pair() -> None:
    problem = single(dim=256)
    maps = TensorMaps(problem.settings, BlackwellTile(ctas=2), 4)
    q, k, v = (decode(of(x)(x.data_ptr())) for of, x in ((maps.q, problem.q), (maps.k, problem.k), (maps.v, problem.v)))
    assert (q.box, k.box, v.box) == ((64, 4, 32, 1), (64, 64, 1, 1), (64, 128, 1, 1))


@pytest.mark.parametrize(("page_size", "box"), [(128, 64), (64, 64), (96, 32)])
def test_boxes_of_pages_do_not_leave_half_of_a_tile(page_size: int, box: int) -> None:
    case = paged((1,) * 3, (40, 0, 300), page_size, **heads(6, 2), **dims(256))
    problem = build(case).problem
    maps = TensorMaps(problem.settings, PAIR, 1)
    assert maps.box_rows == box
    for of, x in ((maps.k, problem.k), (maps.v, problem.v)):
        assert decode(of(x)(x.data_ptr())).box == (64, box, 1, 1)


@pytest.mark.parametrize(("qo_len", "sms", "grid"), [(200, 132, 16), (5000, 132, 132), (5000, 9, 8), (5000, 1, 2)])
def test_grids_are_whole_pairs(qo_len: int, sms: int, grid: int) -> None:
    problem = single(dim=256)
    schedule = FA4.family.scheduler(problem.settings, FA4.arch, sms)(qo_len, 128)
    assert schedule.tile.ctas == 2
    assert schedule.grid == (grid, 1, 1)


@pytest.mark.parametrize("change", [{"kv": "gathered"}, {"kv_dtype": "float8_e4m3fn"}])
def test_pairs_take_no_rows_that_warps_write(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="by TMA"):
        Fa4Spec("bfloat16", "bfloat16", 256, 256, schedule="items", tile=PAIR, **change)
