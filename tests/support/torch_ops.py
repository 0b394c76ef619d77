"""Calls of every operator of `cute_attn.ops`: small, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

import cute_attn

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
QO_LENS, KV_LENS = (3, 1, 2), (20, 16, 5)


class Call(NamedTuple):
    """A public call: a function of the tensors that it reads or writes."""

    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]

    def with_own_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return copies of the tensors, with their strides."""
        return tuple(x.clone() for x in self.tensors)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graph of another test is kept; modules that import this use it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(call: Call, function: Callable[..., Any], exact: bool = True) -> None:
    """A compiled function gives the numbers of the eager one, and writes the same."""
    expected_tensors, tensors = call.with_own_tensors(), call.with_own_tensors()
    expected, result = call.function(*expected_tensors), function(*tensors)
    for want, got in zip([*tree_leaves(expected), *expected_tensors], [*tree_leaves(result), *tensors], strict=True):
        if want is None:
            assert got is None
            continue
        assert (want.dtype, want.shape) == (got.dtype, got.shape)
        if exact:
            assert torch.equal(want.flatten().view(torch.uint8), got.flatten().view(torch.uint8))
        else:
            torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3, equal_nan=True)


Case = Callable[[str], Call]
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


def random(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def ints(device: str, *values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths: Any) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def workspace(device: str) -> torch.Tensor:
    return torch.zeros(16 << 20, dtype=torch.uint8, device=device)


def operands(device: str, qo_len: int = 5, kv_len: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        random(device, qo_len, HEADS, DIM),
        random(device, kv_len, KV_HEADS, DIM),
        random(device, kv_len, KV_HEADS, DIM).neg(),
    )


# ---- single requests


@case
def single_prefill(device: str) -> Call:
    function = cute_attn.single_prefill_with_kv_cache
    return Call(lambda q, k, v: function(q, k, v, causal=True, window_left=6, return_lse=True), operands(device))


@case
def single_prefill_into(device: str) -> Call:
    def function(q: Any, k: Any, v: Any, out: Any, lse: Any, k_scale: Any) -> Any:
        options = {"sm_scale": 0.3, "k_scale": k_scale, "v_scale": 2, "o_dtype": torch.float32, "lse_base": "ln"}
        return cute_attn.single_prefill_with_kv_cache_return_lse(q, k, v, out=out, lse=lse, **options)

    out, lse = random(device, 5, HEADS, DIM, dtype=torch.float32), random(device, 5, HEADS, dtype=torch.float32)
    return Call(function, (*operands(device), out, lse, torch.tensor(0.5, device=device)))


@case
def single_prefill_by_position(device: str) -> Call:
    def function(q: Any, k: Any, v: Any, mask: Any) -> Any:
        nothing = (None,) * 4
        return cute_attn.single_prefill_with_kv_cache(q, k, v, *nothing, mask, None, False, "NHD", "ALIBI")

    return Call(function, (*operands(device), random(device, 5, 9) > -0.5))


@case
def single_decode(device: str) -> Call:
    def function(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return cute_attn.single_decode_with_kv_cache(q[0], k, v, sinks=sinks, logits_soft_cap=8.0, return_lse=True)

    return Call(function, (*operands(device), random(device, HEADS, dtype=torch.float32)))


# ---- batch wrappers


def page_counts() -> list[int]:
    return [-(-length // PAGE) for length in KV_LENS]


def pages(device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    return random(device, sum(page_counts()) + 1, 2, PAGE, KV_HEADS, DIM).to(dtype)


def page_arguments(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    last = [length - (count - 1) * PAGE for length, count in zip(KV_LENS, page_counts(), strict=True)]
    indices = torch.arange(sum(page_counts()), 0, -1, dtype=torch.int32, device=device)
    return starts(page_counts()), indices, torch.tensor(last, dtype=torch.int32)


def planned_paged(device: str, **options: Any) -> Any:
    wrapper = cute_attn.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    options = {"causal": True, "q_data_type": BF16, **options}
    wrapper.plan(starts(QO_LENS), *page_arguments(device), HEADS, KV_HEADS, DIM, PAGE, **options)
    return wrapper


def planned_decode(device: str, **options: Any) -> Any:
    wrapper = cute_attn.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*page_arguments(device), HEADS, KV_HEADS, DIM, PAGE, q_data_type=BF16, **options)
    return wrapper


def planned_ragged(device: str, **options: Any) -> Any:
    wrapper = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(starts(QO_LENS), starts(KV_LENS), HEADS, KV_HEADS, DIM, causal=True, q_data_type=BF16, **options)
    return wrapper


def queries(device: str, rows: int = sum(QO_LENS)) -> torch.Tensor:
    return random(device, rows, HEADS, DIM)


@case
def paged_prefill_run(device: str) -> Call:
    wrapper = planned_paged(device, o_data_type=torch.float32)
    return Call(lambda q, cache: wrapper.run_return_lse(q, cache, lse_layout="HN"), (queries(device), pages(device)))


@case
def paged_prefill_run_into(device: str) -> Call:
    wrapper = planned_paged(device)

    def function(q: Any, k: Any, v: Any, out: Any) -> Any:
        return wrapper.run(q, (k, v), k_scale=0.5, v_scale=2.0, out=out)

    cache = pages(device)
    return Call(function, (queries(device), cache[:, 0].clone(), cache[:, 1].clone(), queries(device)))


@case
def ranges_prefill_run(device: str) -> Call:
    made = cute_attn.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(device), head_dim_qk=DIM, head_dim_vo=DIM
    )
    made.plan(starts(QO_LENS), *page_arguments(device), HEADS, KV_HEADS, DIM, PAGE)
    ranges = ints(device, *[[0, 2]] * sum(QO_LENS))
    return Call(lambda q, cache, ranges: made.run(q, cache, ranges, 3), (queries(device), pages(device), ranges))


@case
def sink_run(device: str) -> Call:
    made = cute_attn.BatchAttentionWithAttentionSinkWrapper(workspace(device), head_dim_qk=DIM, head_dim_vo=DIM)
    options = {"head_dim_vo": DIM, "q_data_type": BF16, "kv_data_type": BF16, "causal": True}
    made.plan(starts(QO_LENS), *page_arguments(device), HEADS, KV_HEADS, DIM, PAGE, **options)
    sinks = random(device, HEADS, dtype=torch.float32)
    return Call(lambda q, cache, sinks: made.run(q, cache, sinks, 0.2), (queries(device), pages(device), sinks))


@case
def paged_prefill_forward(device: str) -> Call:
    wrapper = planned_paged(device)

    def function(q: Any, cache: Any) -> Any:
        return wrapper.forward(q, cache, causal=False, sm_scale=0.2, window_left=3)

    return Call(function, (queries(device), pages(device)))


@case
def ragged_prefill_run(device: str) -> Call:
    wrapper = planned_ragged(device)
    rows = sum(KV_LENS)
    function = lambda q, k, v: wrapper.run(q, k, v, v_scale=0.5, o_scale=2.0, return_lse=True)  # noqa: E731
    return Call(function, operands(device, sum(QO_LENS), rows))


@case
def ragged_prefill_forward(device: str) -> Call:
    wrapper = planned_ragged(device)
    function = lambda q, k, v: wrapper.forward_return_lse(q, k, v, causal=True, logits_soft_cap=5.0)  # noqa: E731
    return Call(function, operands(device, sum(QO_LENS), sum(KV_LENS)))


@case
def paged_decode_run(device: str) -> Call:
    wrapper = planned_decode(device, kv_data_type=E4M3)
    function = lambda q, cache: wrapper.run(q, cache, k_scale=0.5, return_lse=True)  # noqa: E731
    return Call(function, (queries(device, len(KV_LENS)), pages(device, E4M3)))


@case
def paged_decode_run_into(device: str) -> Call:
    wrapper = planned_decode(device)
    q = queries(device, len(KV_LENS))
    function = lambda q, cache, out, lse: wrapper.run(q, cache, out=out, lse=lse, return_lse=True)  # noqa: E731
    return Call(function, (q, pages(device), q.clone(), random(device, *q.shape[:2], dtype=torch.float32)))


@case
def paged_decode_forward(device: str) -> Call:
    wrapper = planned_decode(device)
    function = lambda q, cache: wrapper.forward(q, cache, window_left=4, v_scale=0.5)  # noqa: E731
    return Call(function, (queries(device, len(KV_LENS)), pages(device)))


@case
def batch_attention_run(device: str) -> Call:
    wrapper = cute_attn.BatchAttention(device=device)
    indptr, indices, _ = page_arguments(device)
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    wrapper.plan(starts(QO_LENS), indptr, indices, lengths, HEADS, KV_HEADS, DIM, DIM, PAGE, causal=True)
    return Call(lambda q, cache: wrapper.run(q, cache, k_scale=0.5), (queries(device), pages(device)))


# ---- decode without a plan


def tables(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return ints(device, [4, 1], [2, 0], [3, 0]), ints(device, *KV_LENS)


@case
def xqa_batch_decode(device: str) -> Call:
    def function(q: Any, cache: Any, scratch: Any, tables: Any, lens: Any) -> Any:
        scale = DIM**-0.5
        return cute_attn.xqa_batch_decode_with_kv_cache(
            q, cache, scratch, tables, lens, 32, scale, q_len_per_req=2, return_lse=True
        )

    return Call(function, (queries(device), pages(device, E4M3), workspace(device), *tables(device)))


@case
def xqa_batch_decode_into(device: str) -> Call:
    def function(q: Any, cache: Any, scratch: Any, tables: Any, lens: Any, bounds: Any, out: Any) -> Any:
        return cute_attn.xqa_batch_decode_with_kv_cache(
            q, cache, scratch, tables, lens, 32, DIM**-0.5, out=out, q_len_per_req=3, q_cu_seq_lens=bounds
        )

    tensors = queries(device), pages(device), workspace(device), *tables(device), starts(QO_LENS).to(device)
    return Call(function, (*tensors, queries(device)))


@case
def trtllm_batch_decode(device: str) -> Call:
    def function(q: Any, k: Any, v: Any, scratch: Any, tables: Any, lens: Any, scale: Any, sinks: Any) -> Any:
        return cute_attn.trtllm_batch_decode_with_kv_cache(
            *(q, (k, v), scratch, tables, lens, 32, scale, 0.5),
            out_dtype="float16",
            sinks=[sinks],
            kv_layout="NHD",
            lse_layout="HN",
            return_lse=True,
        )

    cache = pages(device)
    tensors = queries(device, len(KV_LENS)), cache[:, 0].clone(), cache[:, 1].clone(), workspace(device)
    scale = torch.tensor(DIM**-0.5, device=device)
    return Call(function, (*tensors, *tables(device), scale, random(device, HEADS, dtype=torch.float32)))


@case
def trtllm_batch_decode_mla(device: str) -> Call:
    def function(q: Any, cache: Any, scratch: Any, tables: Any, lens: Any, scale: Any, sinks: Any) -> Any:
        dims = 128, 512, 64
        return cute_attn.trtllm_batch_decode_with_kv_cache_mla(
            *(q, cache, scratch, *dims, tables, lens, 32), bmm1_scale=scale, sinks=[sinks], return_lse=True
        )

    tensors = random(device, len(KV_LENS), 1, HEADS, 576), random(device, 40, PAGE, 576), workspace(device)
    scale = torch.tensor(192**-0.5, device=device)
    return Call(function, (*tensors, *tables(device), scale, random(device, HEADS, dtype=torch.float32)))


@case
def mla_run(device: str) -> Call:
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(workspace(device))
    indptr, indices, _ = page_arguments(device)
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    wrapper.plan(starts(QO_LENS), indptr, indices, lengths, HEADS, 512, 64, PAGE, True, 0.1, BF16, BF16)

    def function(nope: Any, rope: Any, ckv: Any, kpe: Any, scale: Any) -> Any:
        return wrapper.run(nope, rope, ckv, kpe, return_lse=True, bmm2_scale=scale)

    queries = (random(device, sum(QO_LENS), HEADS, width) for width in (512, 64))
    caches = (random(device, len(pages(device)), PAGE, width) for width in (512, 64))
    return Call(function, (*queries, *caches, torch.tensor(0.5, device=device)))


# ---- writes to caches, quantisation


def appended(device: str) -> tuple[torch.Tensor, ...]:
    rows = sum(QO_LENS)
    positions = [length - count + i for length, count in zip(KV_LENS, QO_LENS, strict=True) for i in range(count)]
    batch = [i for i, count in enumerate(QO_LENS) for _ in range(count)]
    return (
        random(device, rows, KV_HEADS, DIM),
        random(device, rows, KV_HEADS, DIM).neg(),
        ints(device, *batch),
        ints(device, *positions),
    )


def on(device: str) -> list[torch.Tensor]:
    indptr, indices, last = page_arguments(device)
    return [x.to(device) for x in (indices, indptr, last)]


def nvfp4_cache(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = sum(page_counts()) + 1, 2, PAGE, KV_HEADS
    empty = torch.zeros(*shape, DIM // 2, dtype=torch.uint8, device=device)
    return empty, torch.zeros(*shape, DIM // 16, dtype=torch.uint8, device=device)


@case
def append(device: str) -> Call:
    def function(k: Any, v: Any, batch: Any, positions: Any, cache: Any, *pages: Any) -> Any:
        cute_attn.append_paged_kv_cache(k, v, batch, positions, cache, *pages)
        return cache.sum()

    return Call(function, (*appended(device), pages(device), *on(device)))


@case
def append_mla(device: str) -> Call:
    def function(ckv: Any, kpe: Any, batch: Any, positions: Any, cache: Any, *pages: Any) -> Any:
        cute_attn.append_paged_mla_kv_cache(ckv, kpe, batch, positions, cache[..., :512], cache[..., 512:], *pages)
        return cache.sum()

    _, _, *where = appended(device)
    rows = random(device, len(where[0]), 512), random(device, len(where[0]), 64)
    return Call(function, (*rows, *where, random(device, len(pages(device)), PAGE, 576), *on(device)))


@case
def append_pair(device: str) -> Call:
    def function(k: Any, v: Any, batch: Any, positions: Any, cache: Any, *pages: Any) -> Any:
        cute_attn.append_paged_kv_cache(k, v, batch, positions, (cache[:, 0], cache[:, 1]), *pages)
        return cache[:, 1] + 1

    return Call(function, (*appended(device), pages(device), *on(device)))


@case
def append_nvfp4(device: str) -> Call:
    def function(k: Any, v: Any, batch: Any, positions: Any, cache: Any, sf: Any, scale: Any, *pages: Any) -> Any:
        function = cute_attn.nvfp4_quantize_append_paged_kv_cache
        return function(k, v, batch, positions, cache, sf, *pages, scale, 0.5)

    scale = torch.tensor([0.25], device=device)
    return Call(function, (*appended(device), *nvfp4_cache(device), scale, *on(device)))


@case
def append_nvfp4_slots(device: str) -> Call:
    def function(k: Any, v: Any, slots: Any, cache: Any, sf: Any, scale: Any) -> Any:
        caches, block_scales = (cache[:, 0], cache[:, 1]), (sf[:, 0], sf[:, 1])
        function = cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
        return function(k, v, slots, caches, block_scales, scale, scale)

    k, v, *_ = appended(device)
    slots = ints(device, *range(3, 3 + k.shape[0] - 1), -1)
    return Call(function, (k, v, slots, *nvfp4_cache(device), torch.tensor([0.25], device=device)))


@case
def nvfp4_quantize(device: str) -> Call:
    return Call(cute_attn.nvfp4_kv_quantize, (random(device, 6, 64), torch.tensor([0.01], device=device)))


@case
def nvfp4_dequantize(device: str) -> Call:
    def function(packed: Any, block_scales: Any, scale: Any) -> Any:
        return cute_attn.nvfp4_kv_dequantize(packed, block_scales, scale, torch.float16)

    scale = torch.tensor([0.01], device=device)
    return Call(function, (*cute_attn.nvfp4_kv_quantize(random(device, 6, 64), scale), scale))


@case
def nvfp4_dequantize_paged(device: str) -> Call:
    cache, sf = nvfp4_cache(device)
    rows, lens = tables(device)

    def function(k: Any, v: Any, k_sf: Any, v_sf: Any, tables: Any, lens: Any, one: Any, *outputs: Any) -> Any:
        cute_attn.nvfp4_kv_dequantize_paged((k, v), (k_sf, v_sf), tables, lens, one, one, *outputs)

    packed = torch.arange(cache.numel(), device=device).to(torch.uint8).view(cache.shape)
    halves = (x[:, i].clone() for x in (packed, sf + 56) for i in range(2))
    outputs = [random(device, len(KV_LENS), 32, KV_HEADS, DIM, dtype=torch.float16) for _ in range(2)]
    return Call(function, (*halves, rows, lens, torch.ones(1, device=device), *outputs))


# ---- states


def states(device: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(device, *shape, DIM), random(device, *shape, dtype=torch.float32)


@case
def merge_state(device: str) -> Call:
    return Call(cute_attn.merge_state, (*states(device, 5, HEADS), *states(device, 5, HEADS)))


@case
def merge_states(device: str) -> Call:
    return Call(cute_attn.merge_states, states(device, 5, 3, HEADS))


@case
def merge_state_in_place(device: str) -> Call:
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool, device=device)
    other, lse = states(device, 5, HEADS)
    return Call(cute_attn.merge_state_in_place, (*states(device, 5, HEADS), other.neg(), lse, mask))
