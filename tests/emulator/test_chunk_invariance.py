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

pytestmark = pytest.mark.emulator

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
PAGE = 16
Chunk = tuple[int, int, int]  # a request, its first query token and the end of its tokens
Results = dict[Chunk, tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests, and the batches whose results must be those of whole requests."""

    id: str
    kv_lens: tuple[int, ...]
    batches: tuple[tuple[Chunk, ...], ...]
    splits: dict[str, Any]
    heads: tuple[int, int] = (4, 1)
    head_dim: int = 64
    window_left: int = -1
    kv_dtype: torch.dtype = BF16
    peak: bool = False


CHUNKS = (
    ((0, 0, 37), (1, 0, 90)),
    ((1, 89, 90), (0, 37, 149)),
    ((0, 149, 150), (1, 60, 89)),
)
UNSPLIT = {"disable_split_kv": True}
CASES = [
    Case("unsplit", (150, 90), CHUNKS, UNSPLIT),
    Case("fixed splits", (150, 90), CHUNKS, {"fixed_split_size": 4}, head_dim=128, heads=(2, 1)),
    # The window covers several kv tiles, and its left edge is in another place of each query tile.
    Case(
        "window", (460,), (((0, 0, 299),), ((0, 299, 459),), ((0, 459, 460),)), UNSPLIT, heads=(2, 1), window_left=300
    ),
    Case("e4m3 cache", (150, 90), CHUNKS, UNSPLIT, kv_dtype=E4M3),
    # Scores of one key exceed the anchors of all rows, of every eighth by so much that its anchor must move.
    Case("peak", (200,), (((0, 140, 141),), ((0, 142, 145),), ((0, 150, 151),)), UNSPLIT, heads=(1, 1), peak=True),
]


class Requests:
    """Tensors of a case, and calls of chunks of its requests."""

    def __init__(self, case: Case) -> None:
        self.case, generator = case, torch.Generator().manual_seed(0)
        self.pages = [-(-n // PAGE) for n in case.kv_lens]
        self.ids = torch.randperm(sum(self.pages), generator=generator).int().split(self.pages)
        shape = (sum(self.pages), case.heads[1], PAGE, case.head_dim)
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        q = [torch.randn(n, case.heads[0], case.head_dim, generator=generator) * 4 for n in case.kv_lens]
        if case.peak:
            k, q = k * 0.3, [x * 0.1 for x in q]
            k[..., 0] = 0
            k[self.ids[0][0], :, 5, 0] = 8
            q[0][:, :, 0] = 7
            q[0][141::8, :, 0] = 10
        self.cache = k.to(case.kv_dtype), v.to(case.kv_dtype)
        self.q = [x.to(BF16) for x in q]

    def run(self, chunks: tuple[Chunk, ...]) -> Results:
        """Returns out and lse of each chunk."""
        case, pages, queries = self.case, [-(-end // PAGE) for _, _, end in chunks], self.of(chunks)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(4 << 20, dtype=torch.uint8), "HND", backend="emulator"
        )
        wrapper.plan(
            bounds([len(x) for x in queries]),
            bounds(pages),
            torch.cat([self.ids[request][:n] for (request, _, _), n in zip(chunks, pages, strict=True)]),
            torch.tensor([(end - 1) % PAGE + 1 for _, _, end in chunks], dtype=torch.int32),
            *case.heads,
            case.head_dim,
            PAGE,
            causal=True,
            window_left=case.window_left,
            q_data_type=BF16,
            kv_data_type=case.kv_dtype,
            **case.splits,
        )
        out, lse = wrapper.run(torch.cat(queries), self.cache, return_lse=True)
        sizes = [len(x) for x in queries]
        return dict(zip(chunks, zip(out.split(sizes), lse.split(sizes), strict=True), strict=True))

    def of(self, chunks: tuple[Chunk, ...]) -> list[torch.Tensor]:
        """Returns the query tokens of chunks."""
        return [self.q[request][begin:end] for request, begin, end in chunks]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("kernels", ["fa3", "fa2"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_chunks_have_the_bits_of_the_whole(case: Case, kernels: str) -> None:
    requests = Requests(case)
    with using("sm_90a", kernels=kernels):
        whole = {i: requests.run(((i, 0, n),))[i, 0, n] for i, n in enumerate(case.kv_lens)}
        for batch in case.batches:
            for (request, begin, end), results in requests.run(batch).items():
                for result, expected in zip(results, whole[request], strict=True):
                    assert torch.equal(result, expected[begin:end]), (request, begin, end)
