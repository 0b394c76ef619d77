"""Index arrays of few requests, read as lists, give the tokens that arrays give; what is wrong is left to these."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cute_attn.problem import BatchLengths
from cute_attn.request import index_arrays
from cute_attn.request.index_arrays import IndexArrays

NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
INDICES = torch.zeros(20_000, dtype=torch.int32)
BATCHES = 2000


def steps(rng: random.Random, first: int, number: int, lengths: list[int], wrong: int) -> torch.Tensor:
    """Returns an index array, rarely with a step `wrong`."""
    bounds = [first]
    for _ in range(number):
        bounds.append(bounds[-1] + (wrong if rng.random() < 0.02 else rng.choice(lengths)))
    return torch.tensor(bounds, dtype=rng.choice(index_arrays.DTYPES))


def facts(lengths: BatchLengths) -> list[Any]:
    last = lengths.last_page_len
    arrays = [lengths.qo_indptr, lengths.qo_len, lengths.kv_start, lengths.kv_len, lengths.kv_indptr]
    numbers = [lengths.longest_qo, lengths.longest_kv, lengths.with_queries, lengths.rows, lengths.kv_end]
    numbers += [
        lengths.total_kv,
        lengths.q_len,
        lengths.first_row,
        lengths.batch_size,
        lengths.mask_offset is None,
        lengths.key_bounds is None,
    ]
    return [[(x.dtype, x.tolist()) for x in arrays], numbers, None if last is None else last.tolist()]


def test_tokens() -> None:
    rng = random.Random(0)
    taken = 0
    for _ in range(BATCHES):
        size, page_size = rng.randint(0, index_arrays.FEW + 2), rng.choice([1, 16, 64])
        q = steps(rng, rng.choice([0, 3]), size, [0, 1, 100], -1)
        kv = steps(rng, rng.choice([0, 2]), size + (rng.random() < 0.02), [1, 5, 1000], rng.choice([0, -1]))
        last = torch.tensor([rng.randint(rng.random() > 0.02, page_size) for _ in range(size)], dtype=torch.int32)
        pages = kv, INDICES, last, page_size
        kinds = [
            IndexArrays(NAMES, q, *pages),
            IndexArrays(NAMES, None, *pages, rng.choice([1, 3])),
            IndexArrays(NAMES, q, kv),
        ]
        for arrays in kinds:
            listed = arrays.as_lists()
            if listed is not None:
                plain = arrays.on_host()
                assert facts(listed) == facts(plain)
                assert listed.kv_indices is plain.kv_indices
                computed = BatchLengths(listed.qo_indptr, listed.kv_indptr, listed.kv_len)
                kept = listed.q_len, listed.last_page_len
                computed.q_len, computed.last_page_len = kept
                assert facts(listed) == facts(computed)
                moved = listed.replace(mask_offset=computed.kv_start)
                assert listed.mask_offset is None
                assert moved.qo_indptr is listed.qo_indptr
                taken += 1
    assert taken > BATCHES


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0, 1]]),
        torch.tensor([1, 0]),
        torch.tensor([-1, 1]),
        torch.tensor([0, 1 << 40]),
        torch.tensor([], dtype=torch.int32),
        [0, 1],
        None,
    ],
    ids=str,
)
def test_what_is_wrong(value: Any) -> None:
    good, pages = torch.tensor([0, 1]), (INDICES, torch.tensor([1]), 1)
    assert IndexArrays(NAMES, good, good).as_lists() is not None
    assert IndexArrays(NAMES, value, good).as_lists() is IndexArrays(NAMES, good, value).as_lists() is None
    for q, q_len in ((good, None), (None, 1)):
        assert IndexArrays(NAMES, q, good, *pages, q_len).as_lists() is not None
        assert IndexArrays(NAMES, q, value, *pages, q_len).as_lists() is None
        assert IndexArrays(NAMES, q, good, INDICES, value, 1, q_len).as_lists() is None
    assert IndexArrays(NAMES, value, good, *pages).as_lists() is None
    with pytest.raises((TypeError, ValueError)):
        IndexArrays(NAMES, value, good).on_host()
