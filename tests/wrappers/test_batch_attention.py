"""`BatchAttention`: prefill and decode requests in one batch, lengths in tokens, always out and lse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    BatchAttention,
    LayoutError,
    NotPlannedError,
    NotSupported,
)
from tests.support.dense_attention import EVERYWHERE, assert_near, attention, random
from tests.support.executors import REFERENCE, Executor

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 8
QO, KV = (1, 12, 1, 3, 0), (33, 12, 5, 0, 8)  # decode, prefill, decode, no keys, no query
QO_INDPTR = torch.tensor([0, *QO]).cumsum(0).int()
KV_INDPTR = torch.tensor([0, 6, 8, 10, 10, 11], dtype=torch.int32)  # more pages than keys need
INDICES = torch.tensor([3, 9, 0, 10, 5, 1, 7, 4, 2, 6, 8], dtype=torch.int32)
KV_LEN = torch.tensor(KV, dtype=torch.int32)
PLANNED = QO_INDPTR, KV_INDPTR, INDICES, KV_LEN, HEADS, KV_HEADS, DIM, DIM, PAGE


def cache(
    executor: Executor, dtype: torch.dtype = torch.float16, layout: str = "NHD"
) -> tuple[torch.Tensor, torch.Tensor]:
    kv = random(11, 2, PAGE, KV_HEADS, DIM, dtype=dtype, seed=2)
    kv = kv if layout == "NHD" else kv.transpose(2, 3).contiguous()
    return random(sum(QO), HEADS, DIM, dtype=dtype, device=executor.device, seed=1), kv.to(executor.device)


def expected(q: torch.Tensor, kv: torch.Tensor, causal: bool = False, **options: Any) -> Any:
    outs = []
    for i, kv_len in enumerate(KV):
        rows = q[QO_INDPTR[i] : QO_INDPTR[i + 1]]
        pages = INDICES[KV_INDPTR[i] : KV_INDPTR[i + 1]].to(kv.device)
        keys = kv[pages].transpose(0, 1).flatten(1, 2)[:, :kv_len]
        keep = torch.ones(len(rows), kv_len, dtype=torch.bool)
        outs.append(attention(rows, *keys, keep.tril(kv_len - len(rows)) if causal else keep, **options))
    return tuple(map(torch.cat, zip(*outs, strict=True)))


def made(executor: Executor, layout: str = "NHD") -> BatchAttention:
    wrapper = BatchAttention(layout, executor.device)
    wrapper._backend = executor.backend
    return wrapper


@pytest.mark.parametrize("executor", EVERYWHERE)
@pytest.mark.parametrize(("causal", "layout"), [(False, "NHD"), (True, "HND")])
def test_mixed_batches(causal: bool, layout: str, executor: Executor) -> None:
    q, kv = cache(executor, layout=layout)
    nhd = kv if layout == "NHD" else kv.transpose(2, 3)
    with executor.active():
        wrapper = made(executor, layout)
        arrays = (x.to(executor.device) for x in PLANNED[:4])
        half = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
        wrapper.plan(*arrays, *PLANNED[4:], causal=causal, logits_soft_cap=5.0, sm_scale=0.2, **half)
        out, lse = wrapper.run(q, kv, logits_soft_cap=5.0)
        given = torch.empty_like(q), torch.empty(len(q), HEADS, device=executor.device)
        scaled = wrapper.run(q, kv, *given, k_scale=0.5, v_scale=2.0)
    assert_near(out, lse, expected(q, nhd, causal, sm_scale=0.2, soft_cap=5.0))
    assert scaled[0] is given[0]
    assert scaled[1] is given[1]
    o, s = expected(q, nhd, causal, sm_scale=0.1, soft_cap=5.0)
    assert_near(*scaled, (2 * o, s))


def test_bfloat16_is_the_default_and_k_and_v_may_differ_in_strides() -> None:
    q, kv = cache(REFERENCE, torch.bfloat16)
    wrapper = made(REFERENCE)
    wrapper.plan(*PLANNED)
    wrapper.prewarm_paged_kv_stride_variant()
    out, lse = wrapper.run(q, (kv[:, 0].contiguous(), kv[:, 1]))
    assert_near(out, lse, expected(q, kv))
    assert wrapper.float_workspace_buffer.device == q.device


BAD: list[tuple[int | str, Any, str, type]] = [
    (
        3,
        torch.tensor([33, 12, 5, 1, 8]),
        "kv_len_arr must be within 0..0, .* request 3's pages; got 1",
        ArgumentError,
    ),
    (
        3,
        torch.tensor([49, 12, 5, 0, 8]),
        "kv_len_arr must be within 0..48, .* request 0's pages; got 49",
        ArgumentError,
    ),
    (3, torch.tensor([-1, 12, 5, 0, 8]), "kv_len_arr must be within 0..48, .*; got -1", ArgumentError),
    (3, KV_LEN[:4], r"kv_len_arr must have shape \[batch_size\]", ArgumentError),
    (3, KV_LEN.float(), "kv_len_arr must have dtype int32 or int64", ArgumentError),
    (3, KV, "kv_len_arr must be a torch.Tensor", ArgumentTypeError),
    (0, QO_INDPTR[:3], "qo_indptr and kv_indptr must both have batch_size", ArgumentError),
    (5, 3, "num_qo_heads", ArgumentError),
    ("use_profiler", True, "refuses use_profiler=True: no kernel records a profile", NotSupported),
]


@pytest.mark.parametrize(("name", "value", "message", "error"), BAD)
def test_bad_plans_are_named(name: int | str, value: Any, message: str, error: type) -> None:
    arguments: list[Any] = list(PLANNED)
    keywords = {}
    if isinstance(name, int):
        arguments[name] = value
    else:
        keywords[name] = value
    with pytest.raises(error, match=message):
        made(REFERENCE).plan(*arguments, **keywords)


def test_bad_calls_are_named() -> None:
    q, kv = cache(REFERENCE, torch.bfloat16)
    with pytest.raises(LayoutError, match="kv_layout must be one of"):
        BatchAttention("HDN", "cpu")
    wrapper = made(REFERENCE)
    with pytest.raises(NotPlannedError, match=r"BatchAttention.plan\(\) must come before run"):
        wrapper.run(q, kv)
    wrapper.plan(*PLANNED)
    with pytest.raises(ArgumentError, match=r"logits_soft_cap of run\(\) must be 0 or the planned 0.0, got 30.0"):
        wrapper.run(q, kv, logits_soft_cap=30.0)
    with pytest.raises(NotSupported, match="refuses profiler_buffer"):
        wrapper.run(q, kv, profiler_buffer=torch.zeros(8))
    with pytest.raises(LayoutError, match="variant must be one of 'independent'"):
        wrapper.prewarm_paged_kv_stride_variant("equal")
