"""Batches as serving engines hold them: tokens in paged caches, index arrays, block tables, and an fp64 oracle.

Slots of a cache that hold no token are NaN. The oracle knows nothing of this library;
only NVFP4 caches are filled by it, as engines do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_attn import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from tests.support.dense_attention import batch_attention, nvfp4_values, seen
from tests.support.executors import HAS_GPU
from tests.support.graphs import cuda_graph
from tests.support.paged_cache import Pages, Pair, ends
from tests.support.xqa_case import words

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Batch:
    """Lengths and formats. `num_pages` of the cache: 0 for as many as are needed and a few more."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: tuple[int, int] = (4, 2)
    dim: int = 128
    dim_vo: int | None = None
    page_size: int = 16
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    num_pages: int = 0
    seed: int = 0


class Tokens:
    """The tensors of a batch. `keys`, `values`: of each request, `[kv_len, num_kv_heads, dim]`, random by default."""

    def __init__(
        self,
        batch: Batch,
        device: str,
        keys: list[torch.Tensor] | None = None,
        values: list[torch.Tensor] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(batch.seed)
        self.batch, self.device = batch, device
        dims = batch.dim, batch.dim_vo or batch.dim

        def normal(rows: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(rows, heads, dim, generator=generator).to(dtype)

        queries = [normal(n, batch.heads[0], dims[0], batch.dtype) for n in batch.q_lens]
        self.queries = [q.double() for q in queries]
        self.q = torch.cat(queries).to(device)
        random_keys, random_values = (
            [normal(n, batch.heads[1], dim, batch.kv_dtype).double() for n in batch.kv_lens] for dim in dims
        )
        self.keys, self.values = keys or random_keys, values or random_values
        self.pages = pages = Pages(batch.kv_lens, batch.page_size, generator, batch.num_pages)
        self.kv_indptr, self.last_page_len, self.num_pages = pages.indptr, pages.last_page_len, pages.num_pages
        self.kv_indices, self.seq_lens = pages.indices.to(device), pages.seq_lens.to(device)
        self.qo_indptr, self.token_indptr = ends(batch.q_lens), ends(batch.kv_lens)

    def block_tables(self, width: int = 0) -> torch.Tensor:
        """Page numbers of every request; 0 after a request's last page."""
        return self.pages.tables(width, beyond=0).to(self.device)

    def caches(self, layout: str = "NHD", fused: bool = False) -> Pair:
        """K and V, `[pages, page_size, heads, dim]` or HND; `fused`: of one tensor with both in its last axis."""
        sides = [torch.cat(side).to(self.batch.kv_dtype) for side in (self.keys, self.values)]
        if fused:
            whole = self.pages.scatter(torch.cat(sides, -1), layout).to(self.device)
            return whole[..., : self.batch.dim], whole[..., self.batch.dim :]
        k, v = (self.pages.scatter(side, layout).to(self.device) for side in sides)
        return k, v

    def pool(self) -> Pair:
        """K and V as `[slots, heads, dim]`: pages of one token, without an axis for them."""
        assert self.batch.page_size == 1
        k, v = self.caches()
        return k[:, 0], v[:, 0]

    def ragged(self) -> Pair:
        """K and V of all requests one after the other."""
        k, v = (torch.cat(parts).to(self.batch.kv_dtype).to(self.device) for parts in (self.keys, self.values))
        return k, v

    def newest(self, lens: Sequence[int]) -> Tokens:
        """The same queries over the last keys of each request, in a cache of their own."""
        sides = ([x[len(x) - n :] for x, n in zip(side, lens, strict=True)] for side in (self.keys, self.values))
        return Tokens(dataclasses.replace(self.batch, kv_lens=lens), self.device, *sides)

    def split(self) -> tuple[Tokens, Tokens]:
        """The cached prefix and the new tokens of every request, with the same queries."""
        cached = [n - m for m, n in zip(self.batch.q_lens, self.batch.kv_lens, strict=True)]
        parts = []
        for old, lens in ((True, cached), (False, list(self.batch.q_lens))):
            pairs = zip(self.keys, self.values, cached, strict=True)
            keys, values = zip(*((k[:n], v[:n]) if old else (k[n:], v[n:]) for k, v, n in pairs), strict=True)
            batch = dataclasses.replace(self.batch, kv_lens=lens)
            part = Tokens(batch, self.device, list(keys), list(values))
            part.q, part.queries = self.q, self.queries
            parts.append(part)
        return parts[0], parts[1]

    def shard(self, rank: int, world: int) -> Tokens:
        """The same queries over every `world`-th key from number `rank` on."""
        lens = [len(range(rank, n, world)) for n in self.batch.kv_lens]
        batch = dataclasses.replace(self.batch, kv_lens=lens)
        return Tokens(batch, self.device, [k[rank::world] for k in self.keys], [v[rank::world] for v in self.values])

    def expected(
        self,
        scale: float,
        *,
        causal: bool = False,
        window_left: int = -1,
        soft_cap: float = 0.0,
        keep: Sequence[torch.Tensor] | None = None,
        sinks: torch.Tensor | None = None,
        v_scale: float = 1.0,
    ) -> Pair:
        """(out, base-2 lse) of all rows in fp64. `keep`: a mask of each request, which takes the place of `causal`."""
        pairs = zip(self.queries, self.keys, strict=True)
        kept = [seen(len(q), len(k), causal and keep is None, window_left) for q, k in pairs]
        if keep is not None:
            kept = [a & b.bool().cpu() for a, b in zip(kept, keep, strict=True)]
        requests = zip(self.queries, self.keys, self.values, kept, strict=True)
        o, lse = batch_attention(requests, scale, soft_cap, sinks)
        return o * v_scale, lse

    def solved(self, **options: Any) -> torch.Tensor:
        """The outputs that `expected` gives for options by the names that wrappers have for them; None: the default."""
        given = {name: value for name, value in options.items() if value is not None}
        scale = given.pop("sm_scale") * given.pop("q_scale", 1.0) * given.pop("k_scale", 1.0)
        return self.expected(scale, soft_cap=given.pop("logits_soft_cap", 0.0), **given)[0]


def merge(parts: list[Pair]) -> Pair:
    """Results over disjoint sets of keys as one, from base-2 lse."""
    outs, lses = (torch.stack([x.double().cpu() for x in column]) for column in zip(*parts, strict=True))
    whole = torch.logsumexp(lses * math.log(2), 0) / math.log(2)
    weights = torch.where(lses == -math.inf, 0.0, torch.exp2(lses - whole))
    return (outs * weights[..., None]).sum(0), whole


def assert_close(found: torch.Tensor, expected: torch.Tensor, error: float = 6e-3) -> None:
    """`error`: of all elements together, relative to their norm; no single one may be far off either."""
    assert found.shape == expected.shape
    got = found.double().cpu()
    assert got.isfinite().all()
    assert not got[expected.cpu() == 0].any()
    difference = (got - expected.cpu()).abs()
    norm = float(expected.norm())
    assert float(difference.norm()) <= error * norm + 1e-9, f"error {float(difference.norm()) / norm:.2e}"
    assert float(difference.max()) <= 4 * error * (1 + float(expected.abs().max()))


def assert_lse(found: torch.Tensor, expected: torch.Tensor, error: float = 4e-3) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-3, atol=error)


def workspace(device: str, megabytes: int = 16) -> torch.Tensor:
    return torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)


def host(x: torch.Tensor) -> torch.Tensor:
    """An index array as engines hand it to `plan`: pinned where there is a GPU."""
    return x.pin_memory() if HAS_GPU else x


def gpu_backend(device: str, name: str) -> str:
    """What the engine passes; CPU tensors run on the reference."""
    return name if device == "cuda" else "auto"


class Graph:
    """What an engine captures: a CUDA graph on a GPU, the calls themselves on the CPU."""

    def __init__(self, device: str, run: Callable[[], Any]) -> None:
        self.result, self._again = run(), run
        if device == "cuda":
            torch.cuda.synchronize()
            self.result, self._again = cuda_graph(run)

    def replay(self) -> Any:
        """A graph writes the first result again."""
        found = self._again()
        return self.result if found is None else found


# ------------------------------------------------------------------------------------------- NVFP4, masks


def nvfp4_cache(tokens: Tokens, layout: str) -> tuple[Pair, Pair, Tokens]:
    """The cache after vLLM's update, and the tokens that it then holds. Slots of -1 and rows past them are padding."""
    batch, device = tokens.batch, tokens.device
    width = batch.page_size * 2 * batch.heads[1] * (batch.dim // 2 + batch.dim // 16)
    data, scales = nvfp4_pages(batch, layout, torch.zeros(tokens.num_pages, width, dtype=torch.uint8, device=device))
    slots = torch.cat([torch.tensor([-1]), tokens.pages.all_slots()]).to(device)
    rows = [torch.cat([torch.full_like(x[:1], 3.0), x, torch.full_like(x[:2], 5.0)]) for x in tokens.ragged()]
    factors = torch.tensor(0.002, device=device), torch.tensor(0.003, device=device)
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*rows, slots, data, scales, *factors, kv_layout=layout)
    stored = []
    for part, part_scales, factor in zip(data, scales, (0.002, 0.003), strict=True):
        stored.append(tokens.pages.gather(nvfp4_values(part, part_scales) * factor, layout))
    for original, kept in zip(tokens.keys + tokens.values, stored[0] + stored[1], strict=True):
        assert float((original - kept).norm()) < 0.15 * float(original.norm())
    return data, scales, Tokens(batch, device, *stored)


def nvfp4_pages(batch: Batch, layout: str, storage: torch.Tensor) -> tuple[Pair, Pair]:
    """((k, v), (k_scales, v_scales)) of bytes `[num_pages, ...]`: pages of K data, K scales, V data and V scales."""
    dims = (batch.page_size, batch.heads[1])[:: 1 if layout == "NHD" else -1]
    widths = batch.dim // 2, batch.dim // 16
    side = math.prod(dims) * sum(widths)

    def view(first: int, width: int) -> torch.Tensor:
        return storage.as_strided((len(storage), *dims, width), (2 * side, dims[1] * width, width, 1), first)

    scales_at = math.prod(dims) * widths[0]
    data = tuple(view(part * side, widths[0]) for part in range(2))
    scales = tuple(view(part * side + scales_at, widths[1]).view(E4M3) for part in range(2))
    return data, scales  # type: ignore[return-value]


def draft_mask(q_lens: Sequence[int], most: int, causal: bool) -> torch.Tensor:
    """XQA's packed mask of draft tokens, `[sum of q_lens, words]` in uint16; each row sees its own request's tokens."""
    rows = torch.cat([torch.arange(n) for n in q_lens])
    own = torch.cat([torch.full((n,), n) for n in q_lens])
    seen = torch.arange(most)[None] < own[:, None]
    if causal:
        seen &= torch.arange(most)[None] <= rows[:, None]
    return words(seen)
