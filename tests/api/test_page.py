"""Page helpers against loops over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn.errors import ArgumentError, ArgumentTypeError, LayoutError

HEADS, DIM = 3, 8
LENS = [(5, 3), (0, 0), (17, 17), (4, 1), (9, 0)]  # tokens after the append, appended tokens


class Batch:
    """A paged batch in which every page number is used once, in a shuffled order."""

    def __init__(self, page_size: int, lens: list[tuple[int, int]] = LENS) -> None:
        pages = [-(-kv // page_size) for kv, _ in lens]
        self.indptr = torch.tensor(np.cumsum([0, *pages]), dtype=torch.int32)
        self.num_pages = sum(pages) + 2
        generator = torch.Generator().manual_seed(page_size)
        self.indices = torch.randperm(self.num_pages, generator=generator)[: sum(pages)].int()
        self.last = torch.tensor([kv - (n - 1) * page_size if n else 0 for (kv, _), n in zip(lens, pages, strict=True)])
        self.seq_lens = torch.tensor([kv for kv, _ in lens])
        self.append_indptr = torch.tensor(np.cumsum([0, *(new for _, new in lens)]), dtype=torch.int32)
        self.rows = [(i, kv - new + t) for i, (kv, new) in enumerate(lens) for t in range(new)]

    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indices, self.indptr, self.last


def caches(kind: str, layout: str, batch: Batch, page_size: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """A cache as the user may hold it, and a view [2, pages, page_size, heads, dim] of its memory."""
    shape = (page_size, HEADS) if layout == "NHD" else (HEADS, page_size)
    both = torch.zeros(batch.num_pages, 2, *shape, DIM, dtype=torch.float32).to(dtype)
    if kind == "strided":
        both = torch.zeros(batch.num_pages, 2, *shape, 2 * DIM, dtype=torch.float32).to(dtype)[..., 3 : 3 + DIM]
    view = both.transpose(0, 1)
    view = view if layout == "NHD" else view.transpose(2, 3)
    k, v = both.unbind(1)
    return {"tuple": (k, v), "list": [k, v], "strided": (k, v), "5-D": both}[kind], view


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", ["tuple", "list", "5-D", "strided"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_append_puts_every_row_in_its_slot(kind: str, layout: str, page_size: int, dtype: torch.dtype) -> None:
    batch = Batch(page_size)
    cache, view = caches(kind, layout, batch, page_size, dtype)
    nnz = len(batch.rows)
    packed = torch.randn(nnz + 3, 2, HEADS, DIM).abs().to(dtype)  # keys and values interleaved: strided rows
    key, value = packed.unbind(1)
    requests, positions = cute_attn.get_batch_indices_positions(batch.append_indptr, batch.seq_lens, nnz + 3)
    requests[2] = -1  # one row in the middle is left out, too
    want = view.float().clone()
    for t, (request, position) in enumerate(batch.rows):
        page = int(batch.indices[int(batch.indptr[request]) + position // page_size])
        if t != 2:
            want[0, page, position % page_size], want[1, page, position % page_size] = key[t].float(), value[t].float()
    cute_attn.append_paged_kv_cache(key, value, requests, positions, cache, *batch.table(), kv_layout=layout)
    assert want.any()
    assert torch.equal(view.float(), want)


@pytest.mark.parametrize("nnz", [0, 4])
def test_append_of_no_rows_changes_nothing(nnz: int) -> None:
    batch = Batch(4)
    cache = torch.randn(batch.num_pages, 2, 4, HEADS, DIM)
    before = cache.clone()
    rows, skip = torch.randn(nnz, HEADS, DIM), torch.full((nnz,), -1)
    for table in (batch.table(), (torch.empty(0).int(), torch.zeros(1).int(), torch.empty(0).int())):
        cute_attn.append_paged_kv_cache(rows, rows, skip, torch.zeros(nnz).int(), cache, *table)
        assert torch.equal(cache, before)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_token_may_lack_their_axis(layout: str) -> None:
    batch = Batch(1)
    rows = torch.randn(2, len(batch.rows), HEADS, DIM)
    requests, positions = cute_attn.get_batch_indices_positions(batch.append_indptr, batch.seq_lens, len(batch.rows))
    results = []
    for axis in ((1,), ()):
        cache = torch.zeros(batch.num_pages, 2, *axis, HEADS, DIM)
        given = cache.transpose(2, 3) if axis and layout == "HND" else cache
        for form in (given, tuple(given.unbind(1))):
            cute_attn.append_paged_kv_cache(*rows, requests, positions, form, *batch.table(), kv_layout=layout)
        results.append(cache.reshape(batch.num_pages, 2, HEADS, DIM))
    assert results[0].any()
    assert torch.equal(*results)


def test_head_dims_of_keys_and_values_may_differ() -> None:
    k, v = torch.zeros(2, 4, HEADS, 6), torch.zeros(2, 4, HEADS, 2)
    key, value = torch.randn(1, HEADS, 6), torch.randn(1, HEADS, 2)
    one = torch.tensor([0])
    cute_attn.append_paged_kv_cache(key, value, one, one + 5, (k, v), torch.tensor([1, 0]), torch.tensor([0, 2]), one)
    assert torch.equal(k[0, 1], key[0])
    assert torch.equal(v[0, 1], value[0])
    assert k[1].abs().sum() + v[1].abs().sum() == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=6), st.integers(0, 4), st.booleans())
def test_batch_indices_and_positions(pairs: list[tuple[int, int]], padding: int, buffers: bool) -> None:
    appended = [new for new, _ in pairs]
    indptr = torch.tensor(np.cumsum([0, *appended]), dtype=torch.int32)
    seq_lens = torch.tensor([new + old for new, old in pairs], dtype=torch.int32)
    want = [(i, old + t) for i, (new, old) in enumerate(pairs) for t in range(new)] + [(-1, 0)] * padding
    out = [torch.full((len(want),), 77, dtype=torch.int32) for _ in range(2)] if buffers else [None, None]
    requests, positions = cute_attn.get_batch_indices_positions(indptr, seq_lens, len(want), *out)
    assert requests.dtype == positions.dtype == torch.int32
    assert list(zip(requests.tolist(), positions.tolist(), strict=True)) == want
    if buffers:
        assert requests is out[0]
        assert positions is out[1]


def test_batch_indices_of_fewer_rows_than_tokens() -> None:
    requests, positions = cute_attn.get_batch_indices_positions(torch.tensor([0, 3, 5]), torch.tensor([10, 20]), 4)
    assert (requests.tolist(), positions.tolist()) == ([0, 0, 0, 1], [7, 8, 9, 18])


@pytest.mark.parametrize(
    ("indptr", "last", "page_size", "expected"),
    [([0, 3, 4, 4], [13, 8, 5], 16, [45, 8, 5]), ([0], [], 4, []), ([2, 3, 7], [1, 1], 1, [1, 4])],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_seq_lens(indptr: list[int], last: list[int], page_size: int, expected: list[int], dtype: torch.dtype) -> None:
    lens = cute_attn.get_seq_lens(torch.tensor(indptr, dtype=dtype), torch.tensor(last, dtype=dtype), page_size)
    assert lens.tolist() == expected
    assert lens.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_seq_lens_of_narrow_integers_do_not_overflow(dtype: torch.dtype) -> None:
    lens = cute_attn.get_seq_lens(torch.tensor([0, 100]).to(dtype), torch.tensor([7]).to(dtype), 1024)
    assert lens.tolist() == [99 * 1024 + 7]
    assert lens.dtype == torch.int32


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_caches_whose_slots_share_memory_are_refused(axis: int) -> None:
    """A row written to an expanded cache would appear in other slots, or overwrite its own neighbours."""
    shape = [5, 4, HEADS, DIM]
    narrow = torch.zeros([1 if i == axis else n for i, n in enumerate(shape)]).expand(shape)
    for cache in ((K.clone(), narrow), (narrow, K.clone())):
        with pytest.raises(ArgumentError, match=r"[kv] of paged_kv_cache must (not overlap itself|have stride 1)"):
            cute_attn.append_paged_kv_cache(**{**good(), "paged_kv_cache": cache})
    assert not narrow.any()


def good() -> dict[str, Any]:
    batch = Batch(4, [(5, 2), (3, 3)])
    requests, positions = cute_attn.get_batch_indices_positions(batch.append_indptr, batch.seq_lens, 5)
    return {
        "append_key": torch.zeros(5, HEADS, DIM),
        "append_value": torch.zeros(5, HEADS, DIM),
        "batch_indices": requests,
        "positions": positions,
        "paged_kv_cache": torch.zeros(batch.num_pages, 2, 4, HEADS, DIM),
        "kv_indices": batch.indices,
        "kv_indptr": batch.indptr,
        "kv_last_page_len": batch.last,
    }


ROWS = torch.zeros(5, HEADS, DIM)
K = torch.zeros(5, 4, HEADS, DIM)
BAD_APPENDS: list[tuple[str, Any, str, type]] = [
    ("kv_layout", "HDN", "kv_layout must be one of 'NHD', 'HND'", LayoutError),
    ("append_value", ROWS[:4], "append_value must have as many rows as append_key, 5", ArgumentError),
    ("batch_indices", torch.tensor([0, 0, 2, 1, 1]), "batch_indices .* the 2 requests, got 2 for row 2", ArgumentError),
    ("positions", torch.tensor([0, 1, 4, 1, 2]), "positions .* the 4 tokens .*, got 4 for row 2", ArgumentError),
    ("positions", torch.tensor([0, -1, 0, 1, 2]), "positions .* got -1 for row 1", ArgumentError),
    ("paged_kv_cache", K, r"paged_kv_cache as one tensor must have shape \[num_pages, 2, ...\]", ArgumentError),
    ("paged_kv_cache", (K,), "paged_kv_cache must be a tensor or a pair", ArgumentTypeError),
    ("paged_kv_cache", (K, K[:2]), "paged_kv_cache must have keys and values of the same pages", ArgumentError),
    ("paged_kv_cache", (K.mT.contiguous().mT, K), "must have stride 1 on its last axis", ArgumentError),
    ("paged_kv_cache", (K[:, :0], K[:, :0]), "must have a page_size >= 1", ArgumentError),
    ("kv_indices", torch.tensor([0, 1, 9]), "kv_indices .* the 5 pages of the cache, got 9", ArgumentError),
    ("kv_indices", torch.tensor([0, 1]), "kv_indptr must stay within the 2 kv_indices, got 2", ArgumentError),
    ("kv_indptr", torch.empty(0).int(), r"kv_indptr must have batch_size \+ 1 elements, got none", ArgumentError),
]


@pytest.mark.parametrize(("name", "value", "message", "error"), BAD_APPENDS)
def test_bad_appends_are_named(name: str, value: Any, message: str, error: type) -> None:
    cute_attn.append_paged_kv_cache(**good())
    with pytest.raises(error, match=message):
        cute_attn.append_paged_kv_cache(**{**good(), name: value})


INTS = torch.tensor([0, 2, 5])
BAD_HELPERS: list[tuple[str, tuple[Any, ...], str, type]] = [
    ("get_batch_indices_positions", (INTS, INTS[:2], 2.0), "nnz must be an int", ArgumentTypeError),
    ("get_batch_indices_positions", (INTS, INTS[:2], -1), "nnz must be within 0..2147483647, got -1", ArgumentError),
    ("get_batch_indices_positions", (INTS[:0], INTS[:0], 5), "append_indptr must have batch_size", ArgumentError),
    ("get_batch_indices_positions", (INTS, INTS[:2], 3, INTS), "batch_indices must have dtype int32", ArgumentError),
    ("get_seq_lens", (INTS, INTS[:2], 0), "page_size must be at least 1, got 0", ArgumentError),
    ("get_seq_lens", (INTS, INTS[:2], "16"), "page_size must be an int", ArgumentTypeError),
    ("get_seq_lens", (INTS, INTS, 4), r"kv_last_page_len must have shape \[n\] = \(2,\)", ArgumentError),
    ("get_seq_lens", (INTS[:0], INTS[:0], 4), "kv_indptr must have batch_size", ArgumentError),
    ("get_seq_lens", (INTS, INTS[:2].float(), 4), "kv_last_page_len must have dtype int32 or int64", ArgumentError),
]


@pytest.mark.parametrize(("function", "arguments", "message", "error"), BAD_HELPERS)
def test_bad_arguments_of_helpers_are_named(
    function: str, arguments: tuple[Any, ...], message: str, error: type
) -> None:
    with pytest.raises(error, match=message):
        getattr(cute_attn, function)(*arguments)
