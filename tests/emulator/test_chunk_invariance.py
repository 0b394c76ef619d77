"""With splits of their own, the bits of a query token are those of its request alone: whatever the batch, and however
the request was cut into chunks, down to a decode step. The reference is the whole request in one call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.emulator import using
from tests.support.engine_case import E4M3, Batch, Tokens, workspace
from tests.support.paged_cache import Pair, ends, ints
from tests.support.right import families

pytestmark = pytest.mark.emulator

Chunk = tuple[int, int, int]  # a request, its first query token and the end of its tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests, and the batches whose results must be those of whole requests."""

    id: str
    kv_lens: tuple[int, ...]
    batches: tuple[tuple[Chunk, ...], ...]
    splits: dict[str, Any]
    formats: dict[str, Any]
    window_left: int = -1
    peak: bool = False


CHUNKS = (
    ((0, 0, 37), (1, 0, 90)),
    ((1, 89, 90), (0, 37, 149)),
    ((0, 149, 150), (1, 60, 89)),
)
WINDOW = (((0, 0, 299),), ((0, 299, 459),), ((0, 459, 460),))
PEAK = (((0, 140, 141),), ((0, 142, 145),), ((0, 150, 151),))
UNSPLIT = {"disable_split_kv": True}
GROUP, PAIR, ONE = ({"heads": heads, "dim": 64} for heads in ((4, 1), (2, 1), (1, 1)))
CASES = [
    Case("unsplit", (150, 90), CHUNKS, UNSPLIT, GROUP),
    Case("fixed splits", (150, 90), CHUNKS, {"fixed_split_size": 4}, PAIR | {"dim": 128}),
    # The window covers several kv tiles, and its left edge is in another place of each query tile.
    Case("window", (460,), WINDOW, UNSPLIT, PAIR, window_left=300),
    Case("e4m3 cache", (150, 90), CHUNKS, UNSPLIT, GROUP | {"kv_dtype": E4M3}),
    # Scores of one key exceed the anchors of all rows, of every eighth by so much that its anchor must move.
    Case("peak", (200,), PEAK, UNSPLIT, ONE, peak=True),
]


def tokens_of(case: Case) -> Tokens:
    """The tokens of whole requests, with scores that vary."""
    tokens = Tokens(Batch(case.kv_lens, case.kv_lens, **case.formats), "cpu")
    tokens.q *= 4
    if case.peak:
        tokens.q *= 0.1 / 4
        tokens.q[:, :, 0], tokens.q[141::8, :, 0] = 7, 10
        tokens.keys[0] *= 0.3
        tokens.keys[0][..., 0] = 0
        tokens.keys[0][5, :, 0] = 8
    return tokens


def run(case: Case, tokens: Tokens, chunks: tuple[Chunk, ...]) -> dict[Chunk, Pair]:
    """Returns out and lse of each chunk."""
    batch, first = tokens.batch, tokens.qo_indptr.tolist()
    queries = [tokens.q[first[request] + begin : first[request] + end] for request, begin, end in chunks]
    pages = [tokens.pages.of_requests[request][: -(-end // batch.page_size)] for request, _, end in chunks]
    sizes = [len(x) for x in queries]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu", 4), "HND", backend="emulator")
    wrapper.plan(
        *(ends(sizes), ends([len(x) for x in pages]), torch.cat(pages).int()),
        ints([(end - 1) % batch.page_size + 1 for _, _, end in chunks]),
        *(*batch.heads, batch.dim, batch.page_size),
        causal=True,
        window_left=case.window_left,
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
        **case.splits,
    )
    out, lse = wrapper.run(torch.cat(queries), tokens.caches("HND"), return_lse=True)
    return dict(zip(chunks, zip(out.split(sizes), lse.split(sizes), strict=True), strict=True))


@pytest.mark.parametrize("kernels", ["auto", "fa2"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_chunks_have_the_bits_of_the_whole(case: Case, kernels: str) -> None:
    """The choice of a backend follows no lengths either."""
    tokens = tokens_of(case)
    with using("sm_90a", kernels=kernels) as emulation:
        whole = {i: run(case, tokens, ((i, 0, n),))[i, 0, n] for i, n in enumerate(case.kv_lens)}
        for batch in case.batches:
            for (request, begin, end), results in run(case, tokens, batch).items():
                for result, expected in zip(results, whole[request], strict=True):
                    assert torch.equal(result, expected[begin:end]), (request, begin, end)
    assert set(families(emulation)) - {"combine"} == {"fa3" if kernels == "auto" else kernels}
