"""Calls of everything in FlashInfer's table that computes attention, each to be repeated with one argument changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cute_attn
from cute_attn import attention, cascade, decode, prefill, sparse
from tests.support.engine_case import Batch, Tokens, workspace
from tests.support.mla_case import MlaCase

FP16, DIM = torch.float16, 64
NAN = float("nan")
HEADS = (4, 2, DIM)
Changes = dict[str, Any]
Results = tuple[torch.Tensor, ...]
Call = Callable[[str, Changes], Results]  # the method that the changes concern, and the changes


def as_tuple(found: Any) -> Results:
    return found if isinstance(found, tuple) else (found,)


def tokens(*lengths: tuple[int, int], device: str = "cpu") -> Tokens:
    """Pages have as many tokens as there are kv heads, so that both layouts have the same shape."""
    q_lens, kv_lens = zip(*lengths, strict=True)
    return Tokens(Batch(q_lens, kv_lens, dim=DIM, page_size=2, dtype=FP16, kv_dtype=FP16), device)


def of(method: str, name: str, changes: Changes) -> Changes:
    return changes if method == name else {}


class Calls:
    """`one` has a query token for each request, `many` several."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.one, self.many = tokens((1, 9), (1, 6), device=device), tokens((5, 9), (3, 6), device=device)
        self.latent = MlaCase(q_lens=(2, 2), dtype=FP16, device=device)
        generator = torch.Generator().manual_seed(0)
        self.prefix = torch.randn(2, 7, 2, DIM, generator=generator).to(FP16).to(device)

    def pages(self, of_tokens: Tokens) -> tuple[torch.Tensor, ...]:
        return of_tokens.kv_indptr, of_tokens.kv_indices, of_tokens.last_page_len

    def scratch(self) -> torch.Tensor:
        return workspace(self.device, 16 if self.device == "cuda" else 1)

    def wrapped(
        self, made: type, where: tuple[Any, ...], tensors: tuple[Any, ...], method: str, changes: Changes
    ) -> Any:
        wrapper = made(self.scratch(), **of(method, "__init__", changes))
        wrapper.plan(*where, **of(method, "plan", changes))
        if method == "forward":
            return as_tuple(wrapper.forward_return_lse(*tensors, **changes))
        return as_tuple(wrapper.run(*tensors, **{"return_lse": True, **of(method, "run", changes)}))

    def batch_decode(self, method: str, changes: Changes) -> Results:
        made, one = cute_attn.BatchDecodeWithPagedKVCacheWrapper, self.one
        return self.wrapped(made, (*self.pages(one), *HEADS, 2), (one.q, one.caches()), method, changes)

    def batch_prefill(self, method: str, changes: Changes) -> Results:
        made, many = cute_attn.BatchPrefillWithPagedKVCacheWrapper, self.many
        where = (many.qo_indptr, *self.pages(many), *HEADS, 2)
        return self.wrapped(made, where, (many.q, many.caches()), method, changes)

    def ragged_prefill(self, method: str, changes: Changes) -> Results:
        made, many = cute_attn.BatchPrefillWithRaggedKVCacheWrapper, self.many
        where = (many.qo_indptr, many.token_indptr, *HEADS)
        return self.wrapped(made, where, (many.q, *many.ragged()), method, changes)

    def sink(self, method: str, changes: Changes) -> Results:
        dims = {"head_dim_qk": DIM, "head_dim_vo": DIM, "q_data_type": FP16, "kv_data_type": FP16}
        wrapper = attention.BatchAttentionWithAttentionSinkWrapper(self.scratch(), **{**dims, **changes})
        options = {name: changes[name] for name in ("window_left", "pos_encoding_mode") if name in changes}
        wrapper.plan(self.many.qo_indptr, *self.pages(self.many), *HEADS, 2, **options)
        sinks = torch.zeros(4, device=self.device)
        return as_tuple(wrapper.run(self.many.q, self.many.caches(), sinks, 0.2, return_lse=True))

    def ranges(self, method: str, changes: Changes) -> Results:
        dims = {"head_dim_qk": DIM, "head_dim_vo": DIM, "q_data_type": FP16, "kv_data_type": FP16}
        made = attention.BatchPrefillWithCausalBidirectionalRangesWrapper
        wrapper = made(self.scratch(), **{**dims, **of(method, "__init__", changes)})
        where = self.many.qo_indptr, *self.pages(self.many), *HEADS, 2
        wrapper.plan(*where, **of(method, "plan", changes))
        ranges = torch.tensor([[0, 3]], dtype=torch.int32, device=self.device).repeat(len(self.many.q), 1)
        given = {"return_lse": True, "causal_window_left": 1, **of(method, "run", changes)}
        return as_tuple(wrapper.run(self.many.q, self.many.caches(), ranges, **given))

    def mixed(self, method: str, changes: Changes) -> Results:
        many = self.many
        wrapper = attention.BatchAttention(**{"device": self.device, **of(method, "__init__", changes)})
        types = {"q_data_type": FP16, "kv_data_type": FP16, "logits_soft_cap": 2.0}
        where = (many.qo_indptr, many.kv_indptr, many.kv_indices, many.seq_lens)
        wrapper.plan(*where, 4, 2, DIM, DIM, 2, **{**types, **of(method, "plan", changes)})
        return wrapper.run(many.q, many.caches(), **{"logits_soft_cap": 2.0, **of(method, "run", changes)})

    def blocks(self, method: str, changes: Changes) -> Results:
        wrapper = sparse.BlockSparseAttentionWrapper(self.scratch(), **of(method, "__init__", changes))
        where = (torch.tensor(x, dtype=torch.int32, device=self.device) for x in ([0, 2, 3], [0, 2, 1]))
        wrapper.plan(*where, 4, 9, 2, 3, *HEADS, **of(method, "plan", changes))
        single = tokens((4, 9), device=self.device)
        if method == "forward":
            return as_tuple(wrapper.forward(single.q, *single.ragged(), **changes))
        return as_tuple(wrapper.run(single.q, *single.ragged(), **{"return_lse": True, **of(method, "run", changes)}))

    def _shared(self, made: type, where: tuple[Any, ...], own: Tokens, method: str, changes: Changes) -> Results:
        wrapper = made(self.scratch(), **of(method, "__init__", changes))
        wrapper.begin_forward(*where, *HEADS, 2, **of(method, "begin_forward", changes))
        return as_tuple(wrapper.forward(own.q, *self.prefix, own.caches(), **of(method, "forward", changes)))

    def shared_decode(self, method: str, changes: Changes) -> Results:
        made = cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper
        return self._shared(made, self.pages(self.one), self.one, method, changes)

    def shared_prefill(self, method: str, changes: Changes) -> Results:
        made = cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper
        return self._shared(made, (self.many.qo_indptr, *self.pages(self.many)), self.many, method, changes)

    def levels(self, method: str, changes: Changes) -> Results:
        made = cascade.MultiLevelCascadeAttentionWrapper
        wrapper = made(1, self.scratch(), **of(method, "__init__", changes))
        arrays = [[x] for x in (self.many.qo_indptr, *self.pages(self.many))]
        wrapper.plan(*arrays, *HEADS, 2, **of(method, "plan", changes))
        return as_tuple(wrapper.run(self.many.q, self.many.caches()))

    def single_prefill(self, _: str, changes: Changes) -> Results:
        tensors = (self.many.q[:5], *(x[:9] for x in self.many.ragged()))
        return as_tuple(cute_attn.single_prefill_with_kv_cache(*tensors, **{"return_lse": True, **changes}))

    def single_decode(self, _: str, changes: Changes) -> Results:
        tensors = (self.one.q[0], *(x[:9] for x in self.one.ragged()))
        return as_tuple(cute_attn.single_decode_with_kv_cache(*tensors, **{"return_lse": True, **changes}))

    def _without_plan(self, function: Callable[..., Any], layout: str, changes: Changes) -> Results:
        one = self.one
        where = (self.scratch(), one.block_tables(), one.seq_lens, 9)
        return as_tuple(function(one.q, one.caches(layout), *where, **{"bmm1_scale": 0.2, **changes}))

    def trtllm_decode(self, _: str, changes: Changes) -> Results:
        return self._without_plan(decode.trtllm_batch_decode_with_kv_cache, "HND", changes)

    def xqa_decode(self, _: str, changes: Changes) -> Results:
        return self._without_plan(decode.xqa_batch_decode_with_kv_cache, "NHD", changes)

    def mla_decode(self, _: str, changes: Changes) -> Results:
        return as_tuple(self.latent.trtllm(**{"sinks": None, "return_lse": False, **changes}))

    def xqa_mla(self, _: str, changes: Changes) -> Results:
        case = self.latent
        query = case.q.unflatten(0, (len(case.q_lens), -1))
        where = (self.scratch(), 128, 512, 64, case.table, case.seq_lens, 9)
        return as_tuple(cute_attn.xqa_batch_decode_with_kv_cache_mla(query, case.cache, *where, **changes))

    def mla(self, method: str, changes: Changes) -> Results:
        wrapper = cute_attn.BatchMLAPagedAttentionWrapper(self.scratch(), **of(method, "__init__", changes))
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        latent = self.latent
        arrays = zip(names, (latent.qo_indptr, latent.kv_indptr, latent.indices, latent.seq_lens), strict=True)
        dims = {"num_heads": 4, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 2}
        options = {"causal": False, "sm_scale": 0.1, "q_data_type": FP16, "kv_data_type": FP16}
        wrapper.plan(**{**dict(arrays), **dims, **options, **of(method, "plan", changes)})
        operands = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), latent.parts(), strict=True))
        return as_tuple(wrapper.run(**{**operands, "return_lse": True, **of(method, "run", changes)}))

    def _ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.many.qo_indptr.to(self.device), self.many.token_indptr.to(self.device)

    def context(self, _: str, changes: Changes) -> Results:
        many = self.many
        where = (self.scratch(), many.block_tables(), many.seq_lens, 5, 9, 0.2, 1.0, 2, *self._ends())
        return as_tuple(prefill.trtllm_batch_context_with_kv_cache(many.q, many.caches("HND"), *where, **changes))

    def fmha(self, _: str, changes: Changes) -> Results:
        many = self.many
        where = (self.scratch(), many.seq_lens, 5, 9, 0.2, 1.0, 2, *self._ends())
        arguments = {"block_tables": many.block_tables(), **changes}
        qkv = (many.q, torch.stack(many.caches(), 1))
        return as_tuple(prefill.trtllm_fmha_v2_prefill(qkv, "Q_PAGED_KV_NHD", *where, **arguments))

    def ragged_trtllm(self, _: str, changes: Changes) -> Results:
        many = self.many
        where = (self.scratch(), many.seq_lens, 5, 9, 0.2, 1.0, 1.0, 2, -1, *self._ends(), None, True, False)
        lengths = {"q_seq_lens_cpu": many.qo_indptr.diff().cpu(), "kv_seq_lens_cpu": many.seq_lens.cpu()}
        arguments = (many.q, *many.ragged(), *where)
        return as_tuple(prefill.trtllm_ragged_attention_deepseek(*arguments, **{**lengths, **changes}))

    def xqa(self, _: str, changes: Changes) -> Results:
        one = self.one
        output = torch.full((2, 1, 4, DIM), NAN, dtype=FP16, device=self.device)
        where = (one.block_tables(), one.seq_lens.to(torch.uint32)[:, None], output, self.scratch())
        words = torch.zeros(64, dtype=torch.uint32, device=self.device)
        cute_attn.xqa(one.q[:, None], *one.caches(), *where, words, 2, 2, **changes)
        return (output,)

    def by_name(self) -> dict[str, Call]:
        """All of them by the name of the function or class."""
        return {
            "single_decode_with_kv_cache": self.single_decode,
            "single_prefill_with_kv_cache": self.single_prefill,
            "BatchDecodeWithPagedKVCacheWrapper": self.batch_decode,
            "BatchPrefillWithPagedKVCacheWrapper": self.batch_prefill,
            "BatchPrefillWithRaggedKVCacheWrapper": self.ragged_prefill,
            "BatchAttentionWithAttentionSinkWrapper": self.sink,
            "BatchPrefillWithCausalBidirectionalRangesWrapper": self.ranges,
            "BatchAttention": self.mixed,
            "BlockSparseAttentionWrapper": self.blocks,
            "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": self.shared_decode,
            "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": self.shared_prefill,
            "MultiLevelCascadeAttentionWrapper": self.levels,
            "trtllm_batch_decode_with_kv_cache": self.trtllm_decode,
            "xqa_batch_decode_with_kv_cache": self.xqa_decode,
            "trtllm_batch_context_with_kv_cache": self.context,
            "trtllm_fmha_v2_prefill": self.fmha,
            "trtllm_ragged_attention_deepseek": self.ragged_trtllm,
            "xqa": self.xqa,
            "trtllm_batch_decode_with_kv_cache_mla": self.mla_decode,
            "xqa_batch_decode_with_kv_cache_mla": self.xqa_mla,
            "BatchMLAPagedAttentionWrapper": self.mla,
        }
