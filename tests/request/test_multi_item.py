"""Multi-item scoring: the bounds of hidden keys are the documented mask, and the same as one given as custom_mask."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import cute_attn
from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchLengths
from cute_attn.reference.attention import Mask
from cute_attn.request import batch_plan
from cute_attn.request.index_arrays import IndexArrays
from cute_attn.request.multi_item import bound_keys
from tests.support import multi_item

CPU = torch.device("cpu")


def bounded(qo_lens: list[int], kv_lens: list[int], arguments: dict[str, Any], first: int = 0) -> BatchLengths:
    qo, kv = (torch.tensor(np.concatenate(([first], first + np.cumsum(n)))) for n in (qo_lens, kv_lens))
    lengths = IndexArrays(("qo_indptr", "kv_indptr"), qo, kv).on_host()
    names = ("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr")
    return bound_keys(tuple(map(arguments.__getitem__, names)), lengths, batch_plan.NO_MASK)


def masks(lengths: BatchLengths, window_left: int = -1) -> list[torch.Tensor]:
    """The mask of every request, as the reference reads the bounds."""
    assert lengths.key_bounds is not None
    assert lengths.key_bounds.shape == (lengths.rows, 2)
    found = []
    for start, stop, kv_len in zip(lengths.qo_indptr[:-1], lengths.qo_indptr[1:], lengths.kv_len, strict=True):
        bounds = torch.from_numpy(lengths.key_bounds[start:stop])
        mask = Mask(causal=True, window_left=window_left, key_bounds=bounds)
        found.append(mask.visible(range(stop - start), stop - start, int(kv_len), CPU))
        assert (np.diff(lengths.key_bounds[start:stop], axis=0) >= 0).all()
    return found


@pytest.mark.parametrize("seed", range(60))
def test_random_items(seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.randint(1, 5)
    kv_lens = [rng.choice((0, 1, rng.randint(1, 90))) for _ in range(batch)]
    qo_lens = [rng.choice((0, n, rng.randint(0, n), rng.randint(0, n + 5))) for n in kv_lens]
    items = multi_item.draw(qo_lens, kv_lens, rng.randint(1, 20), seed)
    found = masks(bounded(qo_lens, kv_lens, items.arguments(CPU, slack=rng.randint(0, 4)), first=rng.randint(0, 3)))
    for got, expected in zip(found, items.keep, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("seed", range(40))
def test_any_positions(seed: int) -> None:
    """The documented formula, also where no token of an item has position 0."""
    rng = random.Random(seed)
    kv_len = rng.randint(1, 60)
    qo_len, prefix_len, window = rng.randint(1, kv_len), rng.randint(0, kv_len + 3), rng.choice((-1, rng.randint(0, 9)))
    positions = [rng.randint(0, 70)]
    for _ in range(kv_len):
        positions.append(rng.choice((positions[-1] + 1, rng.randint(0, positions[-1] + 1))))
    arguments = {
        "prefix_len_ptr": torch.tensor([prefix_len]),
        "token_pos_in_items_ptr": torch.tensor(positions, dtype=torch.int32),
        "token_pos_in_items_len": 0,  # of one request it is not read
        "max_item_len_ptr": None,
    }
    (found,) = masks(bounded([qo_len], [kv_len], arguments), window)
    for i in range(qo_len):
        p = i + kv_len - qo_len
        for j in range(kv_len):
            own = p < prefix_len or j < prefix_len or j > p - positions[p - prefix_len]
            assert bool(found[i, j]) == (j <= p and own and (window < 0 or j >= p - window)), (i, j)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 4])
def test_same_as_a_custom_mask(window_left: int, causal: bool) -> None:
    """Whatever `causal` says, also in FlashInfer's older `forward`."""
    qo_lens, kv_lens = [9, 30], [40, 30]
    items = multi_item.draw(qo_lens, kv_lens, 5, 3)
    q, k, v = (torch.randn(n, 2, 16, generator=torch.Generator().manual_seed(n)) for n in (39, 70, 71))
    q, k, v = q.half(), k.half(), v[:70].half()
    bounds = torch.tensor([0, 9, 39]), torch.tensor([0, 40, 70])
    options = {"window_left": window_left, "q_data_type": torch.float16}
    made = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8))
    made.plan(*bounds, 2, 2, 16, custom_mask=torch.cat([keep.flatten() for keep in items.keep]), **options)
    expected = made.run(q, k, v)
    made.plan(*bounds, 2, 2, 16, causal=causal, **items.arguments(CPU), **options)
    assert torch.equal(made.run(q, k, v), expected)
    assert torch.equal(made.forward(q, k, v, causal=causal, window_left=window_left), expected)
    made.plan(*bounds, 2, 2, 16, causal=True, **options)  # nothing of the items is left
    assert not torch.equal(made.run(q, k, v), expected)


def test_arguments_are_read_by_plan() -> None:
    items = multi_item.draw([6], [20], 4, 0)
    arguments = items.arguments(CPU)
    q, kv = torch.randn(6, 1, 16).half(), torch.randn(20, 1, 16).half()
    made = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8))
    made.plan(torch.tensor([0, 6]), torch.tensor([0, 20]), 1, 1, 16, **arguments)
    before = made.run(q, kv, kv)
    for name in ("prefix_len_ptr", "token_pos_in_items_ptr"):
        arguments[name].zero_()
    assert torch.equal(made.run(q, kv, kv), before)


def test_one_request_without_a_batch_axis() -> None:
    """A prefix length and a longest item as tensors of no dimension are those of the only request."""
    arguments = multi_item.draw([6], [20], 4, 0).arguments(CPU)
    expected = bounded([6], [20], arguments).key_bounds
    one = {name: arguments[name].squeeze(0) for name in ("prefix_len_ptr", "max_item_len_ptr")}
    assert all(x.dim() == 0 for x in one.values())
    found = bounded([6], [20], arguments | one).key_bounds
    assert found is not None
    assert np.array_equal(found, expected)
    with pytest.raises(ArgumentError, match=r"prefix_len_ptr must have shape \[batch_size\] = \(2,\), got 1 elements"):
        bounded([6, 6], [20, 20], arguments | one)
