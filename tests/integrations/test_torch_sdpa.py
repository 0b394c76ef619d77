"""aten's flash attention operators on cute_attn: numbers, strides and refusals on CPU tensors; behind torch's
`scaled_dot_product_attention` and `varlen_attn` on a GPU.

The operators have no CPU kernels of torch's own; here ours are registered for the CPU too, so that calls pass torch's
dispatcher as they do on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cute_attn
from cute_attn.integrations import aten_flash, sdpa
from tests.support.dense_attention import attention, seen
from tests.support.engine_case import Batch, Tokens
from tests.support.executors import NEEDS_TRITON, needs_gpu
from tests.support.noted import noted

aten = torch.ops.aten
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 32
TOLERANCE = {"rtol": 1 / 128, "atol": 1 / 128}


@pytest.fixture
def _on_cpu() -> Iterator[None]:
    override = sdpa.Override("CPU")
    yield
    override.remove()


def by_heads(heads: int, tokens: int, batch: int = BATCH, dim: int = DIM) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, dim).bfloat16()


def by_tokens(heads: int, tokens: int, batch: int = BATCH, dim: int = DIM) -> torch.Tensor:
    return torch.randn(batch, tokens, heads, dim).bfloat16().transpose(1, 2)


def some_heads(heads: int, tokens: int) -> torch.Tensor:
    """Neither heads nor tokens are one axis with the batch."""
    return torch.randn(BATCH, heads + 1, tokens, DIM).bfloat16()[:, :heads]


def expected(q: Any, k: Any, v: Any, causal: bool, scale: float | None = None) -> tuple[Any, Any]:
    """Attention of `[..., heads, tokens, head_dim]` in fp64, and the natural-log lse."""
    if q.dim() == 4:
        results = [expected(*request, causal, scale) for request in zip(q, k, v, strict=True)]
        return tuple(map(torch.stack, zip(*results, strict=True)))
    out, lse = attention(*(x.transpose(0, 1) for x in (q, k, v)), seen(q.shape[1], k.shape[1], causal), scale)
    return out.transpose(0, 1), lse.T * math.log(2)


def assert_varlen(tokens: Tokens, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
    want, want_lse = tokens.expected(**options)
    torch.testing.assert_close(out.double(), want, **TOLERANCE)
    torch.testing.assert_close(lse.T.double(), want_lse * math.log(2), rtol=1e-5, atol=1e-5)


def steps(x: torch.Tensor) -> list[int]:
    """Strides of the axes that are longer than 1."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("make_q", [by_heads, by_tokens, some_heads])
@pytest.mark.parametrize("make_kv", [by_heads, by_tokens, some_heads])
@pytest.mark.parametrize(("qo_len", "causal", "scale"), [(5, True, None), (1, False, 0.3)])
def test_dense(
    make_q: Any, make_kv: Any, qo_len: int, causal: bool, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no layout q, k and v are copied: they reach the kernels where they are."""
    q, k, v = make_q(HEADS, qo_len), make_kv(KV_HEADS, 9), make_kv(KV_HEADS, 9)
    single = noted(monkeypatch, aten_flash, "single_prefill_with_kv_cache")
    planned = noted(monkeypatch, aten_flash.planned_prefill, "run")
    results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    launches = [args[:3] for args, _ in single] + [(args[2].q, *args[2].kv_cache) for args, _ in planned]
    assert len(launches) in (1, BATCH)  # of the whole batch, or one per request
    for i, read in enumerate(launches):
        assert [x.data_ptr() for x in read] == [x[i].data_ptr() for x in (q, k, v)]
    out, lse = expected(q, k, v, causal, scale=scale)
    torch.testing.assert_close(results[0].double(), out, **TOLERANCE)
    torch.testing.assert_close(results[1].double(), lse, rtol=1e-5, atol=1e-5)
    assert results[2:6] == (None, None, qo_len, 9)
    with FakeTensorMode() as mode:  # what torch.compile expects
        fakes = aten._scaled_dot_product_flash_attention(*map(mode.from_tensor, (q, k, v)), 0.0, causal)
    for real, fake in ((results[i], fakes[i]) for i in (0, 1, 6, 7, 8)):
        assert (real.shape, steps(real), real.dtype) == (fake.shape, steps(fake), fake.dtype)


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (2, 0)])
def test_varlen(left: int, right: int) -> None:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    tokens = Tokens(Batch((3, 5), (5, 7), (HEADS, KV_HEADS), DIM, dtype=torch.half, kv_dtype=torch.half), "cpu")
    q = torch.cat((tokens.q, tokens.q[:1]))  # row 8 is in no request
    options = {"window_size": (left, right), "enable_gqa": True, "scale": 0.2, "return_aux": AuxRequest(lse=True)}
    out, lse = varlen_attn(q, *tokens.ragged(), tokens.qo_indptr, tokens.token_indptr, 5, 7, **options)
    assert_varlen(tokens, out[:8], lse[:, :8], scale=0.2, causal=right == 0, window_left=left)
    assert not out[8].any()
    assert (lse[:, 8] == -math.inf).all()


@pytest.mark.usefixtures("_on_cpu")
def test_varlen_over_pages() -> None:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

    tokens = Tokens(Batch((3, 5), (6, 8), (HEADS, KV_HEADS), DIM, page_size=4), "cpu")
    q, cache, cum_q, pages = tokens.q, tokens.caches(), tokens.qo_indptr, tokens.block_tables()
    paged = {"enable_gqa": True, "seqused_k": tokens.seq_lens, "block_table": pages}
    options = {"window_size": (-1, 0), **paged}
    out, lse = varlen_attn(q, *cache, cum_q, None, 5, 8, return_aux=AuxRequest(lse=True), **options)
    assert_varlen(tokens, out, lse, scale=DIM**-0.5, causal=True)
    given = torch.empty_like(q)
    assert varlen_attn_out(given, q, *cache, cum_q, None, 5, 8, **options) is given
    assert torch.equal(given, out)
    with pytest.raises(cute_attn.NotSupported, match="block_table without a causal mask"):
        varlen_attn(q, *cache, cum_q, None, 5, 8, **paged)


@pytest.mark.parametrize(("paged", "first"), [(False, 0), (True, 0), (False, 1)])
def test_rows_of_no_request_are_empty(paged: bool, first: int) -> None:
    """Whatever the memory of out held: 0, and an lse of -inf, as for a token without keys."""
    q, k = torch.randn(5, HEADS, DIM).bfloat16(), torch.randn(*((4, 4) if paged else (12,)), KV_HEADS, DIM).bfloat16()
    cum_q, cum_k, lens = (torch.tensor(x, dtype=torch.int32) for x in ([first, 1 + first, 3], [0, 3, 7], [3, 4]))
    pages = {"seqused_k": lens, "block_table": torch.tensor([[0], [2]], dtype=torch.int32)} if paged else {}
    out = torch.full_like(q, math.nan)
    given = q, k, k, cum_q, None if paged else cum_k, 2, 4, 0.0, True, False
    lse = aten_flash.flash_attention_into(out, *given, **pages)
    of_requests = torch.tensor([first <= row < 3 for row in range(5)])
    assert not out[~of_requests].any()
    assert (lse[:, ~of_requests] == -math.inf).all()
    assert out[of_requests].isfinite().all()
    assert lse[:, of_requests].isfinite().all()
    with pytest.raises(cute_attn.ArgumentError, match="out requires grad"):
        aten_flash.flash_attention_into(out.clone().requires_grad_(), *given, **pages)
    for operand in (q, k.flatten()[: q.numel()].view(q.shape)):
        before = operand.clone()
        with pytest.raises(cute_attn.ArgumentError, match="out must not share memory"):
            aten_flash.flash_attention_into(operand, *given, **pages)
        assert torch.equal(operand, before)


# ---- nothing to compute


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "batch_heads_tokens_keys", [(2, 4, 3, 0), (0, 4, 3, 5), (2, 0, 3, 5), (2, 4, 0, 5), (0, 4, 0, 0)]
)
def test_empty_tensors(batch_heads_tokens_keys: Any, transposed: bool, is_causal: bool) -> None:
    """As torch's math backend and the shapes that its compiler expects."""
    batch, heads, qo_len, kv_len = batch_heads_tokens_keys
    q, k, v = (torch.randn(batch, heads, tokens, DIM).bfloat16() for tokens in (qo_len, kv_len, kv_len))
    if transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(results[0], scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    assert torch.equal(results[1], torch.full((batch, heads, qo_len), -math.inf))
    with FakeTensorMode() as mode:
        fakes = aten._scaled_dot_product_flash_attention(*map(mode.from_tensor, (q, k, v)), 0.0, is_causal)
    for real, fake in zip(results[:2], fakes[:2], strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))
    same = aten._flash_attention_forward(*tokens_first, None, None, qo_len, kv_len, 0.0, is_causal, False)
    assert torch.equal(same[0].transpose(1, 2), results[0])
    assert torch.equal(same[1], results[1])


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize(("rows", "cum_q", "lens"), [(2, [0, 1, 2], [0, 0]), (3, [0], []), (0, [0, 0, 0], [2, 3])])
@pytest.mark.parametrize("paged", [False, True])
def test_empty_batches(rows: int, cum_q: list[int], lens: list[int], paged: bool) -> None:
    """Without keys, without requests, and requests without query tokens."""
    q, k = torch.randn(rows, HEADS, DIM).half(), torch.randn(*((4, 4) if paged else (sum(lens),)), HEADS, DIM).half()
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in (cum_q, [0, *lens]))
    tables = torch.zeros(len(lens), 2, dtype=torch.int32)
    pages = {"seqused_k": ends[1:], "block_table": tables} if paged else {}
    cum_k = None if paged else ends.cumsum(0, dtype=torch.int32)
    longest = max([0, *(b - a for a, b in pairwise(cum_q))]), max([0, *lens])
    given = q, k, k, starts, cum_k, *longest, 0.0, True, False
    out, lse, *_ = aten._flash_attention_forward(*given, **pages)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((HEADS, rows), -math.inf))


@pytest.mark.usefixtures("_on_cpu")
def test_compiled() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0] + 1

    tensors = by_tokens(HEADS, 5), by_heads(KV_HEADS, 9), by_heads(KV_HEADS, 9)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), function(*tensors))


@pytest.mark.usefixtures("_on_cpu")
def test_refusals() -> None:
    q, k, v = by_heads(HEADS, 5), by_heads(KV_HEADS, 9), by_heads(KV_HEADS, 9)
    flash = aten._scaled_dot_product_flash_attention
    with pytest.raises(cute_attn.NotSupported, match=r"dropout_p=0.5.*the kernels are for inference"):
        flash(q, k, v, 0.5)
    with pytest.raises(cute_attn.NotSupported, match="return_debug_mask"):
        flash(q, k, v, 0.0, False, True)
    with pytest.raises(cute_attn.ArgumentError, match="query requires grad, and cute_attn computes no gradients"):
        flash(q.clone().requires_grad_(), k, v)
    with torch.no_grad():
        flash(q.clone().requires_grad_(), k, v)
    dense = *(x.transpose(1, 2) for x in (q, k, v)), None, None, 5, 9, 0.0, False, False
    assert torch.equal(aten._flash_attention_forward(*dense)[0].transpose(1, 2), flash(q, k, v)[0])
    for name, value in (("window_size_right", 3), ("alibi_slopes", torch.ones(HEADS)), ("seqused_k", torch.ones(2))):
        with pytest.raises(cute_attn.NotSupported, match=name):
            aten._flash_attention_forward(*dense, **{name: value})
    out, lse, *_, seed, offset, _ = flash(q, k, v)
    backward = aten._scaled_dot_product_flash_attention_backward
    with pytest.raises(cute_attn.NotSupported, match="the backward pass"):
        backward(out, q, k, v, out, lse, seed, seed, 5, 9, 0.0, False, seed, offset)


def replaced() -> set[str]:
    """The operators that have a kernel for CUDA; this torch has none of its own without a GPU build."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in sdpa.OVERRIDES if hasattr(aten, name) and has_kernel(f"aten::{name}", "CUDA")}


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA kernels of its own")
def test_activate_and_deactivate() -> None:
    before = replaced()
    for _ in range(2):
        sdpa.activate()
        sdpa.activate()
        assert sdpa.is_active()
        assert replaced() == {name for name in sdpa.OVERRIDES if hasattr(aten, name)}
        sdpa.deactivate()
        sdpa.deactivate()
        assert not sdpa.is_active()
        assert replaced() == before


def test_torch_knows_the_name() -> None:
    from torch.nn import attention

    assert sdpa.NAME in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("cute_attn")
    assert attention.current_flash_attention_impl() == "cute_attn"
    assert sdpa.is_active()
    attention.restore_flash_attention_impl()
    assert not sdpa.is_active()


# ---- on a GPU

CASES = (
    # batch, heads, kv heads, qo_len, kv_len, head_dim, causal, q, k and v
    (2, 8, 8, 512, 512, 128, True, by_tokens, by_tokens),
    (2, 8, 2, 300, 300, 64, True, by_heads, by_heads),
    (3, 8, 2, 100, 777, 128, False, by_tokens, by_heads),
    (1, 16, 4, 1, 4096, 128, False, by_heads, by_heads),
    (4, 8, 2, 1, 1000, 128, False, by_tokens, by_tokens),
    (2, 4, 4, 65, 130, 96, False, by_heads, by_tokens),
    (2, 4, 2, 257, 257, 256, True, by_tokens, by_tokens),
    (2, 4, 4, 50, 50, 40, True, by_tokens, by_tokens),
)


@pytest.fixture
def _active() -> Iterator[None]:
    sdpa.activate()
    yield
    sdpa.deactivate()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each adapter was called. Tensors are not kept: inductor refuses those that outlive a call."""
    counts: Counter[str] = Counter()

    def counted(name: str, adapter: Any, *args: Any) -> Any:
        counts[name] += 1
        return adapter(*args)

    for name in ("dense", "_ragged", "_paged"):
        monkeypatch.setattr(aten_flash, name, functools.partial(counted, name, getattr(aten_flash, name)))
    return counts


def tensors(case: Any, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    batch, heads, kv_heads, qo_len, kv_len, head_dim, _, make_q, make_kv = case
    made = make_q(heads, qo_len, batch, head_dim), *(make_kv(kv_heads, kv_len, batch, head_dim) for _ in "kv")
    return [x.to("cuda", dtype) for x in made]


def by_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        result: torch.Tensor = scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), enable_gqa=True, **options
        )
    return result


@needs_gpu
@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[:7]}-{case[7].__name__}-{case[8].__name__}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_flash_calls_run_here(case: Any, dtype: torch.dtype, calls: Counter[str]) -> None:
    q, k, v = tensors(case, dtype)
    options = {"is_causal": case[6], "scale": 0.11}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    assert calls == {"dense": 1}
    torch.testing.assert_close(out.double(), by_math(q, k, v, **options), rtol=2**-6, atol=2**-7)


@needs_gpu
@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}], ids=str)
@NEEDS_TRITON
@torch.no_grad()
def test_compiled_on_a_gpu(options: Any, calls: Counter[str]) -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    torch._dynamo.reset()
    q, k, v = tensors(CASES[0])
    compiled = torch.compile(layer, fullgraph=True, **options)
    for _ in range(4):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = compiled(q, k, v).clone()
        torch.testing.assert_close(out.double(), by_math(q * 2, k, v, is_causal=True) + 1, rtol=2**-6, atol=2**-6)
    assert calls


@needs_gpu
@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0)])
@torch.no_grad()
def test_varlen_on_a_gpu(window: tuple[int, int], calls: Counter[str]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    tokens = Tokens(Batch((100, 1, 300), (100, 500, 700), (8, 8), 128), "cuda")
    arguments = tokens.q, *tokens.ragged(), tokens.qo_indptr.cuda(), tokens.token_indptr.cuda(), 300, 700
    out = varlen_attn(*arguments, window_size=window)
    assert calls == {"_ragged": 1}
    want, _ = tokens.expected(128**-0.5, causal=window[1] == 0, window_left=window[0])
    torch.testing.assert_close(out.cpu().double(), want, rtol=2**-6, atol=2**-7)


@needs_gpu
@pytest.mark.usefixtures("_active")
def test_gradients_are_refused() -> None:
    q, k, v = tensors(CASES[0])
    with pytest.raises(cute_attn.ArgumentError, match="computes no gradients"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(q.requires_grad_(), k, v)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # other backends of torch train as before
        scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None


@needs_gpu
@torch.no_grad()
def test_deactivation_restores_torch(calls: Counter[str]) -> None:
    q, k, v = tensors(CASES[0])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = scaled_dot_product_attention(q, k, v)
        sdpa.activate()
        scaled_dot_product_attention(q, k, v)
        sdpa.deactivate()
        assert calls == {"dense": 1}
        assert torch.equal(scaled_dot_product_attention(q, k, v), before)
    assert calls == {"dense": 1}


@needs_gpu
@pytest.mark.usefixtures("_active")
@torch.no_grad()
def test_masks_stay_with_torch(calls: Counter[str]) -> None:
    q, k, v = tensors(CASES[0])
    mask = torch.rand(512, 512, device="cuda") > 0.5
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not calls
    torch.testing.assert_close(out.double(), by_math(q, k, v, attn_mask=mask), rtol=2**-6, atol=2**-6)
