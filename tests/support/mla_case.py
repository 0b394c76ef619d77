"""Batches of latent attention in every form that callers have them, and their results by formula."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cute_attn
from cute_attn import flash_mla
from tests.support.dense_attention import attention, batch_attention, seen
from tests.support.paged_cache import Pages, ends

LATENT, ROPE, GROUP = 512, 64, 128
Scales = tuple[float, float]
SCALES: Scales = (0.5, 1.25)  # of the parts of narrow caches, in the wrapper
ONE: Scales = (1.0, 1.0)
SCALE = (128 + ROPE) ** -0.5


def newest(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """fp64 attention of the newest tokens of a request over decompressed keys and values `[keys, heads, ...]`."""
    return attention(q, k, v, seen(len(q), len(k)), SCALE)[0]


@dataclass(frozen=True)
class MlaCase:
    """A batch whose requests have `kv_lens` keys and `q_lens` query tokens. Pages that no request has are NaN, and so
    are slots behind the last token of a request. `cache` has latent and rotated columns; `kpe` rotated ones that are
    wider than latent ones."""

    heads: int = 4
    q_lens: Sequence[int] = (1, 1)
    kv_lens: Sequence[int] = (9, 6)
    page_size: int = 2
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    causal: bool = True
    sinks: bool = False
    narrow: bool = False  # a cache of e4m3
    rope: int = ROPE  # rotated columns
    grouped: bool = False  # scales for each GROUP latent columns of a token: `ckv_scales`
    wide: bool = False  # rotated columns have the queries' dtype nevertheless
    rising: bool = False  # keys grow from tile to tile, and the largest scores with them
    seed: int = 0
    made: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        pages = Pages(self.kv_lens, self.page_size, generator)
        numbers = random(sum(self.kv_lens), self.columns)
        if self.rising:
            numbers *= torch.cat([1 + torch.arange(n) // 64 for n in self.kv_lens])[:, None]
        cache = pages.scatter(numbers[:, None])[:, :, 0]
        if self.wide:
            self.made["kpe"] = cache[..., LATENT:].clone()
        if self.grouped:
            scales = torch.rand(*cache.shape[:2], LATENT // GROUP, generator=generator) + 0.25
            self.made["ckv_scales"] = scales.masked_fill(cache[..., :1].isnan(), math.nan)
        if self.narrow:
            cache = cache.to(torch.float8_e4m3fn)
        self.made.update(
            q=2 * random(sum(self.q_lens), self.heads, self.columns),
            cache=cache,
            table=pages.tables(max(1, *map(len, pages.of_requests)), beyond=-1),
            indices=pages.indices,
            kv_indptr=pages.indptr,
            qo_indptr=ends(self.q_lens),
            seq_lens=pages.seq_lens,
        )
        if self.sinks:
            self.made["sinks"] = torch.randn(self.heads, generator=generator)
        self.made.update({name: x.to(self.device) for name, x in self.made.items()})

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["made"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def columns(self) -> int:
        return LATENT + self.rope

    @property
    def scales(self) -> Scales:
        """Factors of latent and of rotated columns in planned runs, besides scales of groups."""
        if not self.narrow:
            return ONE
        return (1.0 if self.grouped else SCALES[0], 1.0 if self.wide else SCALES[1])

    def workspace(self, megabytes: int = 8) -> torch.Tensor:
        return torch.empty(megabytes << 20, dtype=torch.uint8, device=self.device)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Queries and cache in tensors of their own."""
        split = [x.contiguous() for whole in (self.q, self.cache) for x in whole.split((LATENT, self.rope), dim=-1)]
        return (*split[:3], self.kpe if self.wide else split[3])

    def byte_rows(self) -> torch.Tensor:
        """A cache of e4m3 with scales of groups as FlashMLA keeps it: latent numbers, scales, rotated numbers."""
        rows = (x.contiguous().view(torch.uint8) for x in (self.cache[..., :LATENT], self.ckv_scales, self.kpe))
        return torch.cat(tuple(rows), dim=-1)[:, :, None]

    def trtllm(self, **changes: Any) -> Any:
        """Result of the function without a plan, called as vLLM does: a workspace of int8, an axis of one head in the
        cache. Queries of unequal lengths come with their bounds.
        """
        query, bounds = self.q, {"cum_seq_lens_q": self.qo_indptr, "max_q_len": max(self.q_lens)}
        if len(set(self.q_lens)) == 1:
            query, bounds = self.q.unflatten(0, (len(self.q_lens), -1)), {}
        given = {
            "query": query,
            "kv_cache": self.cache.unsqueeze(1),
            "workspace_buffer": self.workspace().view(torch.int8),
        }
        given |= {"qk_nope_head_dim": 128, "kv_lora_rank": LATENT, "qk_rope_head_dim": self.rope}
        given |= {"block_tables": self.table, "seq_lens": self.seq_lens, "max_seq_len": max(self.kv_lens)}
        options = {"bmm1_scale": SCALE, "sinks": self.made.get("sinks"), "return_lse": True, **bounds, **changes}
        return cute_attn.trtllm_batch_decode_with_kv_cache_mla(**given, **options)

    def arrays(self, form: str = "csr", **changes: Any) -> dict[str, torch.Tensor]:
        """Where the tokens are, by the fields of `MLAPlanMetadata`; `changes`: of these."""
        csr = {"qo_indptr": self.qo_indptr, "kv_indptr": self.kv_indptr, "kv_indices": self.indices}
        csr |= {"kv_len_arr": self.seq_lens}
        dense = {"cum_seq_lens_q": self.qo_indptr, "block_tables": self.table, "seq_lens": self.seq_lens}
        return {"csr": csr, "dense": dense, "dual": csr | dense}[form] | changes

    def metadata(self, form: str = "csr", **changes: Any) -> cute_attn.MLAPlanMetadata:
        made: cute_attn.MLAPlanMetadata = getattr(cute_attn.MLAPlanMetadata, form)(**self.arrays(form, **changes))
        return made

    def options(self, **changes: Any) -> dict[str, Any]:
        """Options of a plan besides where its tokens are; the first ones in the order of `plan`."""
        dims = {"num_heads": self.heads, "head_dim_ckv": LATENT, "head_dim_kpe": self.rope, "page_size": self.page_size}
        dtypes = {"q_data_type": self.dtype, "kv_data_type": self.cache.dtype}
        return {**dims, "causal": self.causal, "sm_scale": SCALE, **dtypes, **changes}

    def wrapper(self, backend: str = "auto", **changes: Any) -> cute_attn.BatchMLAPagedAttentionWrapper:
        """A wrapper with the plan of this batch, by position as engines call it."""
        made = cute_attn.BatchMLAPagedAttentionWrapper(self.workspace(), backend=backend)
        made.plan(*self.arrays().values(), *self.options().values(), use_sinks=self.sinks, **changes)
        return made

    def wrapped(self, backend: str = "auto", **changes: Any) -> Any:
        options = {"sinks": self.made.get("sinks"), "return_lse": True, **self.scale_options(), **changes}
        return self.wrapper(backend).run(*self.parts(), **options)

    def scale_options(self) -> dict[str, Any]:
        """The scales that planned runs over narrow caches get."""
        if not self.narrow:
            return {}
        latent = {"ckv_scale_arr": self.ckv_scales} if self.grouped else {"ckv_scale": self.scales[0]}
        return {**latent, "kpe_scale": self.scales[1]}

    def flash_mla(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Result under FlashMLA's names; narrow caches have rows of bytes."""
        query = self.q.unflatten(0, (len(self.q_lens), -1))
        given = {"q": query, "k_cache": self.byte_rows() if self.narrow else self.cache[:, :, None]}
        given |= {"block_table": self.table, "cache_seqlens": self.seq_lens, "head_dim_v": LATENT}
        given |= dict(zip(("tile_scheduler_metadata", "num_splits"), flash_mla.get_mla_metadata(), strict=True))
        options = {"softmax_scale": SCALE, "causal": self.causal, "is_fp8_kvcache": self.narrow, **changes}
        return flash_mla.flash_mla_with_kvcache(**given, **options)

    def keys(self, scales: Scales) -> torch.Tensor:
        """The cache in fp64, times its scales; products with scales of groups are rounded to the queries' dtype."""
        latent, rotated = self.cache.double().split((LATENT, self.rope), dim=-1)
        if self.grouped:
            factors = self.ckv_scales.repeat_interleave(GROUP, dim=-1)
            latent = (latent.float() * factors).to(self.dtype).double()
        if self.wide:
            rotated = self.kpe.double()
        return torch.cat((latent * scales[0], rotated * scales[1]), dim=-1).cpu()

    def expected(self, scales: Scales = ONE) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and base-2 lse in fp64, row by row. `scales`: factors of latent and of rotated columns of the cache."""
        cache = self.keys(scales)[:, :, None]
        pairs = zip(self.table.cpu().clamp(min=0).long(), self.kv_lens, strict=True)
        keys = [cache[own].flatten(0, 1)[:n] for own, n in pairs]
        kept = [seen(*lens, self.causal) for lens in zip(self.q_lens, self.kv_lens, strict=True)]
        requests = zip(self.q.split(self.q_lens), keys, (k[..., :LATENT] for k in keys), kept, strict=True)
        return batch_attention(requests, SCALE, sinks=self.made.get("sinks"))

    def check(self, found: tuple[torch.Tensor, torch.Tensor], scales: Scales = ONE) -> None:
        """Compare a result with the formula, within the rounding of P and of the output."""
        (out, lse), (want, want_lse) = found, self.expected(scales)
        out, lse = out.double().cpu().reshape(want.shape), lse.double().cpu().reshape(want_lse.shape)
        epsilon = torch.finfo(self.dtype).eps
        torch.testing.assert_close(out, want, rtol=2 * epsilon, atol=4 * epsilon)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=2e-4)


def random_case(r: random.Random, most_requests: int, longest: int, **options: Any) -> MlaCase:
    """A batch in any form, of as many keys together."""
    requests, q_len = r.choice((1, 2, 5, most_requests)), r.choice((0, 1, 1, 2, 8))
    narrow, rope, dtype = r.random() < 0.5, r.choice((0, 64, 64)), r.choice((torch.float16, torch.bfloat16))
    grouped = narrow and r.random() < 0.5
    return MlaCase(
        q_lens=[q_len or r.randrange(i == 0, 5) for i in range(requests)],
        kv_lens=[r.choice((0, 1, 64, r.randrange(longest // requests))) for _ in range(requests)],
        page_size=r.choice((1, 3, 7, 16, 32, 64)),
        dtype=dtype,
        causal=r.random() < 0.8,
        sinks=r.random() < 0.3,
        narrow=narrow,
        rope=rope,
        grouped=grouped,
        wide=grouped and rope > 0 and dtype == torch.bfloat16 and r.random() < 0.5,
        seed=r.randrange(1 << 30),
        **options,
    )
