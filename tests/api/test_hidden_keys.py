"""What keys that a row does not see may hold: anything in K, finite numbers in V; keys past kv_len anything in both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from cute_attn.errors import ArgumentError
from tests.gpu import marks
from tests.support.engine_case import workspace
from tests.support.executors import REFERENCE, Executor

QO_HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
SPECIAL = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
BY_KV_HEAD = torch.tensor([[torch.nan, torch.inf], [-torch.inf, torch.nan]])  # no CTA and no row reads two of them

Keys = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def executors(*families: str) -> list[Any]:
    """Returns the reference, and the emulator and the GPU with the kernels of each family."""
    found = [pytest.param(REFERENCE, id="reference")]
    for family in families:
        name = f"emulator-{family}"
        emulated = Executor(name, "emulator", "cpu", "sm_100a" if family == "fa4" else "sm_90a", family)
        found.append(pytest.param(emulated, id=name, marks=pytest.mark.emulator))
        on_gpu = Executor(f"cuda-{family}", family, "cuda")
        found.append(pytest.param(on_gpu, id=on_gpu.name, marks=marks.OF[family]))
    return found


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with request.param.active():
        yield request.param


def tokens(qo_len: int, kv_len: int, dtype: torch.dtype = torch.bfloat16) -> Keys:
    generator = torch.Generator().manual_seed(qo_len + kv_len)
    q, k, v = (
        torch.randn(n, heads, DIM, generator=generator)
        for n, heads in ((qo_len, QO_HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    )
    return q.bfloat16(), k.to(dtype), v.to(dtype)


def prefill(on: Executor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    device = on.device
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out, lse = single_prefill_with_kv_cache(
        q.to(device), k.to(device), v.to(device), backend=on.backend, return_lse=True, **moved
    )
    return torch.cat((out.float(), lse[..., None]), -1).cpu()


def hiding(kv_len: int, key: int) -> dict[str, dict[str, Any]]:
    """Returns options that hide `key` from the first of 70 rows at least."""
    keep = torch.ones(70, kv_len, dtype=torch.bool)
    keep[:, key] = False
    return {"causal": {"causal": True}, "window": {"window_left": 3}, "mask": {"custom_mask": keep}}


def seen(kv_len: int, key: int, kind: str) -> torch.Tensor:
    """Returns which of 70 rows see `key`."""
    position = torch.arange(70) + kv_len - 70
    if kind == "causal":
        return position >= key
    if kind == "window":
        return position - 3 <= key
    return torch.zeros(70, dtype=torch.bool)


@pytest.mark.parametrize("on", executors("fa2", "fa3", "fa4"), indirect=True)
@pytest.mark.parametrize(
    ("kind", "key"), [("causal", 139), ("causal", 100), ("window", 40), ("mask", 139), ("mask", 5)]
)
def test_k_of_a_hidden_key_may_be_anything(on: Executor, kind: str, key: int) -> None:
    q, k, v = tokens(70, 140)
    options = hiding(140, key)[kind]
    clean = prefill(on, q, k, v, **options)
    unseen = ~seen(140, key, kind)
    assert unseen.any()
    for specials in BY_KV_HEAD:
        k[key] = specials[:, None]
        out = prefill(on, q, k, v, **options)
        assert torch.equal(out[unseen], clean[unseen]), specials


@pytest.mark.parametrize("on", executors("fa2", "fa3", "fa4"), indirect=True)
@pytest.mark.parametrize(("kind", "key"), [("causal", 139), ("window", 40), ("mask", 5)])
def test_v_of_a_hidden_key_stays_within_its_kv_head(on: Executor, kind: str, key: int) -> None:
    q, k, v = tokens(70, 140)
    options = hiding(140, key)[kind]
    clean = prefill(on, q, k, v, **options)
    for special in SPECIAL.values():
        v[key, 1, 7] = special
        out = prefill(on, q, k, v, **options)
        group = QO_HEADS // KV_HEADS
        assert torch.equal(out[:, :group], clean[:, :group])
        others = [column for column in range(DIM + 1) if column != 7]  # the last one is lse
        assert torch.equal(out[:, group:, others], clean[:, group:, others])
        if on is REFERENCE:
            assert out[~seen(140, key, kind), group:, 7].isnan().all()


# ---- batches: past kv_len, and in other requests, k, v and q may be anything

KV_LENS = (37, 16, 130)
SPLIT = 48  # tokens: the last split of the last request ends within a tile


def paged(special: float, dtype: torch.dtype, hidden: tuple[int, int] = (0, 0)) -> Keys:
    """Returns a cache [pages, 2, page_size, heads, dim], indptr and last_page_len. `special` is behind the tokens, and
    in the first `hidden` tokens of the last request: of all heads of K, and of head 1 of V.
    """
    halves: list[list[torch.Tensor]] = [[], []]
    for n in KV_LENS:
        for half, values in enumerate(tokens(1, n)[1:]):
            rows = torch.full((-(-n // PAGE) * PAGE, KV_HEADS, DIM), special)
            rows[:n] = values
            if n == KV_LENS[-1]:
                rows[: hidden[half], half:] = special
            halves[half].append(rows)
    cache = torch.stack([torch.cat(rows).view(-1, PAGE, KV_HEADS, DIM) for rows in halves], 1)
    indptr = torch.tensor([0, 3, 4, 13], dtype=torch.int32)
    last = torch.tensor([(n - 1) % PAGE + 1 for n in KV_LENS], dtype=torch.int32)
    return cache.to(dtype), indptr, last


def paged_prefill(on: Executor, q: torch.Tensor, special: float, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    cache, indptr, last = paged(special, dtype)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(on.device, 32), backend=on.backend)
    indices = torch.arange(int(indptr[-1]), dtype=torch.int32, device=on.device)
    qo_indptr = torch.tensor([0, 5, 9, 20], dtype=torch.int32)
    wrapper.plan(
        *(qo_indptr, indptr, indices, last, QO_HEADS, KV_HEADS, DIM, PAGE),
        **{"causal": True, "q_data_type": q.dtype, "kv_data_type": dtype, **options},
    )
    return wrapper.run(q.to(on.device), cache.to(on.device)).float().cpu()


@pytest.mark.parametrize("on", executors("fa2", "fa3", "fa4"), indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("options", [{}, {"fixed_split_size": SPLIT}], ids=["whole", "split"])
def test_padding_of_pages_may_be_anything(on: Executor, dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, _, _ = tokens(20, 1)
    clean = paged_prefill(on, q, 0.0, dtype, **options)
    for special in (torch.nan, torch.inf) if dtype == torch.bfloat16 else (torch.nan,):
        assert torch.equal(paged_prefill(on, q, special, dtype, **options), clean)
    q[9:] = torch.nan  # another request in the same query tile
    out = paged_prefill(on, q, torch.nan, dtype, **options)
    assert torch.equal(out[:9], clean[:9])
    assert out[9:].isnan().all()


@pytest.mark.parametrize("on", executors("fa2", "fa3", "fa4"), indirect=True)
def test_other_requests_of_a_ragged_batch_may_hold_anything(on: Executor) -> None:
    q, k, v = tokens(40, 150)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(on.device, 32), backend=on.backend)
    qo_indptr, kv_indptr = (torch.tensor(x, dtype=torch.int32) for x in ([0, 13, 20, 40], [0, 37, 90, 150]))
    wrapper.plan(qo_indptr, kv_indptr, QO_HEADS, KV_HEADS, DIM, causal=True, q_data_type=q.dtype)
    clean = wrapper.run(*(x.to(on.device) for x in (q, k, v))).cpu()
    for special in SPECIAL.values():
        q[13:20], k[37:90], v[37:90] = (special,) * 3
        out = wrapper.run(*(x.to(on.device) for x in (q, k, v))).cpu()
        assert torch.equal(out[:13], clean[:13])
        assert torch.equal(out[20:], clean[20:])


def decode(on: Executor, cache: torch.Tensor, indptr: torch.Tensor, last: torch.Tensor, window: int) -> torch.Tensor:
    q, _, _ = tokens(len(KV_LENS), 1)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(on.device, 32), backend=on.backend)
    indices = torch.arange(int(indptr[-1]), dtype=torch.int32, device=on.device)
    wrapper.plan(
        *(indptr, indices, last, QO_HEADS, KV_HEADS, DIM, PAGE),
        window_left=window,
        q_data_type=q.dtype,
        kv_data_type=cache.dtype,
    )
    return wrapper.run(q.to(on.device), cache.to(on.device)).float().cpu()


@pytest.mark.parametrize("on", executors("fa2", "xqa"), indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [-1, 20])
def test_decode_reads_neither_padding_nor_hidden_k(on: Executor, dtype: torch.dtype, window: int) -> None:
    clean = decode(on, *paged(0.0, dtype), window)
    hidden = max(0, KV_LENS[-1] - 1 - window) if window >= 0 else 0
    assert torch.equal(decode(on, *paged(torch.nan, dtype, (hidden, 0)), window), clean)


@pytest.mark.parametrize("on", executors("fa2", "xqa"), indirect=True)
def test_v_hidden_by_a_window_stays_within_its_request_and_kv_head(on: Executor) -> None:
    clean = decode(on, *paged(0.0, torch.bfloat16), 20)
    out = decode(on, *paged(torch.nan, torch.bfloat16, (0, 109)), 20)
    assert torch.equal(out[:2], clean[:2])
    assert torch.equal(out[2, :2], clean[2, :2])
    if on is REFERENCE:
        assert out[2, 2:].isnan().all()


@pytest.mark.parametrize("on", executors("fa2", "xqa"), indirect=True)
def test_single_decode_hides_k(on: Executor) -> None:
    q, k, v = tokens(1, 700)
    move = {name: x.to(on.device) for name, x in (("q", q[0]), ("k", k), ("v", v))}
    clean = single_decode_with_kv_cache(**move, window_left=50, backend=on.backend)
    for special in SPECIAL.values():
        move["k"][:649] = special
        assert torch.equal(single_decode_with_kv_cache(**move, window_left=50, backend=on.backend), clean)


# ---- sinks


@pytest.mark.parametrize("on", executors("fa2", "fa3", "fa4"), indirect=True)
def test_a_sink_of_minus_infinity_is_none(on: Executor) -> None:
    q, k, v = tokens(70, 140)
    clean = prefill(on, q, k, v, causal=True)
    out = prefill(on, q, k, v, causal=True, sinks=torch.full((QO_HEADS,), -torch.inf))
    torch.testing.assert_close(out, clean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on", executors("fa2", "xqa"), indirect=True)
def test_a_sink_of_minus_infinity_is_none_in_decode(on: Executor) -> None:
    q, k, v = (x.to(on.device) for x in tokens(1, 700))
    clean, clean_lse = single_decode_with_kv_cache(q[0], k, v, return_lse=True, backend=on.backend)
    sinks = torch.full((QO_HEADS,), -torch.inf, device=on.device)
    out, lse = single_decode_with_kv_cache(q[0], k, v, sinks=sinks, return_lse=True, backend=on.backend)
    torch.testing.assert_close(out, clean, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, clean_lse)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_other_sinks_without_a_finite_weight_are_refused_where_they_can_be_read(value: float) -> None:
    q, k, v = tokens(5, 9)
    with pytest.raises(ArgumentError, match=r"sinks must be finite or -inf.*got (inf|nan) for head 2"):
        single_prefill_with_kv_cache(q, k, v, sinks=torch.tensor([0.0, 1.0, value, 0.0]))
