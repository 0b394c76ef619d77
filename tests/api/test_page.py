"""Page helpers against loops over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from tests.support.paged_cache import Pages, ends

HEADS, DIM = 3, 8
LENS = [(5, 3), (0, 0), (17, 17), (4, 1), (9, 0)]  # tokens after the append, appended tokens


class Batch:
    """A paged batch in which every page number is used once, in a shuffled order."""

    def __init__(self, page_size: int, lens: list[tuple[int, int]] = LENS) -> None:
        self.pages = Pages([kv for kv, _ in lens], page_size, torch.Generator().manual_seed(page_size))
        self.num_pages, self.seq_lens = self.pages.num_pages, self.pages.seq_lens
        self.append_indptr = ends([new for _, new in lens])
        self.rows = [(i, kv - new + t) for i, (kv, new) in enumerate(lens) for t in range(new)]

    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.pages.indices, self.pages.indptr, self.pages.last_page_len


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
        page, slot = divmod(int(batch.pages.slots[request][position]), page_size)
        if t != 2:
            want[0, page, slot], want[1, page, slot] = key[t].float(), value[t].float()
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
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=6), st.integers(-4, 4), st.booleans())
def test_batch_indices_and_positions(pairs: list[tuple[int, int]], padding: int, buffers: bool) -> None:
    """`padding`: rows besides those of tokens, or below 0 how many tokens have none."""
    appended = [new for new, _ in pairs]
    indptr = ends(appended)
    seq_lens = torch.tensor([new + old for new, old in pairs], dtype=torch.int32)
    tokens = [(i, old + t) for i, (new, old) in enumerate(pairs) for t in range(new)]
    want = (tokens + [(-1, 0)] * 4)[: max(0, len(tokens) + padding)]
    out = [torch.full((len(want),), 77, dtype=torch.int32) for _ in range(2)] if buffers else [None, None]
    requests, positions = cute_attn.get_batch_indices_positions(indptr, seq_lens, len(want), *out)
    assert requests.dtype == positions.dtype == torch.int32
    assert list(zip(requests.tolist(), positions.tolist(), strict=True)) == want
    if buffers:
        assert requests is out[0]
        assert positions is out[1]


@pytest.mark.parametrize(
    ("indptr", "last", "page_size", "expected"),
    [
        ([0, 3, 4, 4], [13, 8, 5], 16, [45, 8, 5]),
        ([0], [], 4, []),
        ([2, 3, 7], [1, 1], 1, [1, 4]),
        ([0, 100], [7], 1024, [101383]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_seq_lens(indptr: list[int], last: list[int], page_size: int, expected: list[int], dtype: torch.dtype) -> None:
    """Those of narrow integers do not overflow."""
    lens = cute_attn.get_seq_lens(torch.tensor(indptr, dtype=dtype), torch.tensor(last, dtype=dtype), page_size)
    assert lens.tolist() == expected
    assert lens.dtype == (dtype if dtype == torch.int64 else torch.int32)
