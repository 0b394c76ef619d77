"""Index arrays of few requests, read as lists, give the tokens that `batch_plan` gives; what is wrong is left to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cute_attn.problem import BatchLengths, Tokens
from cute_attn.request import batch_plan, few_requests

NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
INDICES = torch.zeros(20_000, dtype=torch.int32)
BATCHES = 2000


def steps(rng: random.Random, first: int, number: int, lengths: list[int], wrong: int) -> torch.Tensor:
    """Returns an index array, rarely with a step `wrong`."""
    bounds = [first]
    for _ in range(number):
        bounds.append(bounds[-1] + (wrong if rng.random() < 0.02 else rng.choice(lengths)))
    return torch.tensor(bounds, dtype=rng.choice(batch_plan.INDEX_DTYPES))


def facts(tokens: Tokens) -> list[Any]:
    lengths, last = tokens.lengths, tokens.last_page_len
    arrays = [lengths.qo_indptr, lengths.qo_len, lengths.kv_start, lengths.kv_len, tokens.kv_indptr]
    numbers = [lengths.longest_qo, lengths.longest_kv, lengths.with_queries, tokens.rows, tokens.kv_end]
    numbers += [
        lengths.total_kv,
        tokens.q_len,
        tokens.first_row,
        tokens.batch_size,
        lengths.mask_offset is None,
        lengths.key_bounds is None,
    ]
    return [[(x.dtype, x.tolist()) for x in arrays], numbers, None if last is None else last.tolist()]


def paged_by_arrays(q: torch.Tensor, pages: batch_plan.Pages, page_size: int) -> Tokens:
    return batch_plan.paged(batch_plan.indptr(NAMES[0], q), pages, page_size, NAMES)


def test_tokens() -> None:
    rng = random.Random(0)
    taken = 0
    for _ in range(BATCHES):
        size, page_size = rng.randint(0, few_requests.FEW + 2), rng.choice([1, 16, 64])
        q = steps(rng, rng.choice([0, 3]), size, [0, 1, 100], -1)
        kv = steps(rng, rng.choice([0, 2]), size + (rng.random() < 0.02), [1, 5, 1000], rng.choice([0, -1]))
        last = torch.tensor([rng.randint(rng.random() > 0.02, page_size) for _ in range(size)], dtype=torch.int32)
        q_len, pages = rng.choice([1, 3]), batch_plan.Pages(kv, INDICES, last)
        uniform = (batch_plan.uniform_queries(len(kv) - 1, q_len), pages, page_size, NAMES, q_len)
        kinds: list[tuple[Tokens | None, Callable[[], Tokens]]] = [
            (few_requests.paged(q, kv, last, INDICES, page_size), partial(paged_by_arrays, q, pages, page_size)),
            (few_requests.decode(kv, last, INDICES, page_size, q_len), partial(batch_plan.paged, *uniform)),
            (few_requests.ragged(q, kv), partial(batch_plan.ragged, q, kv)),
        ]
        for tokens, by_arrays in kinds:
            if tokens is not None:
                plain = by_arrays()
                assert facts(tokens) == facts(plain)
                assert tokens.kv_indices is plain.kv_indices
                computed = BatchLengths(tokens.lengths.qo_indptr, tokens.lengths.kv_start, tokens.lengths.kv_len)
                assert facts(tokens) == facts(tokens._replace(lengths=computed))
                fewer = tokens.lengths.replace(kv_len=computed.kv_len - 1)
                assert (fewer.kv_len + 1).tolist() == computed.kv_len.tolist()
                assert fewer.qo_indptr is tokens.lengths.qo_indptr
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
    good = torch.tensor([0, 1])
    last = torch.tensor([1])
    assert few_requests.ragged(good, good) is not None
    assert few_requests.ragged(value, good) is few_requests.ragged(good, value) is None
    assert (
        few_requests.paged(value, good, last, INDICES, 1) is few_requests.paged(good, value, last, INDICES, 1) is None
    )
    assert few_requests.decode(good, last, INDICES, 1, 1) is not None
    assert few_requests.decode(value, last, INDICES, 1, 1) is few_requests.decode(good, value, INDICES, 1, 1) is None
    with pytest.raises((TypeError, ValueError)):
        batch_plan.ragged(value, good)
