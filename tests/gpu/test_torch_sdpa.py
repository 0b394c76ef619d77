"""torch's scaled_dot_product_attention and varlen_attn on cute_attn: routing, numbers, torch.compile, restoration."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cute_attn
from cute_attn.integrations import aten_flash, sdpa
from tests.gpu import marks
from tests.support.dense_attention import attention, seen

pytestmark = marks.SM80
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="inductor needs triton")
CASES = (
    # batch, heads, kv heads, qo_len, kv_len, head_dim, causal, by tokens: q, kv
    (2, 8, 8, 512, 512, 128, True, True, True),
    (2, 8, 2, 300, 300, 64, True, False, False),
    (3, 8, 2, 100, 777, 128, False, True, False),
    (1, 16, 4, 1, 4096, 128, False, False, False),
    (4, 8, 2, 1, 1000, 128, False, True, True),
    (2, 4, 4, 65, 130, 96, False, False, True),
    (2, 4, 2, 257, 257, 256, True, True, True),
    (2, 4, 4, 50, 50, 40, True, True, True),
)


@pytest.fixture
def _active() -> Iterator[None]:
    sdpa.activate()
    yield
    sdpa.deactivate()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The adapters that are called."""
    seen: list[str] = []

    def spy(name: str, function: Any) -> Any:
        def called(*args: Any) -> Any:
            seen.append(name)
            return function(*args)

        return called

    for name in ("dense", "_ragged", "_paged"):
        monkeypatch.setattr(aten_flash, name, spy(name, getattr(aten_flash, name)))
    return seen


def tensors(case: Any, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    batch, heads, kv_heads, qo_len, kv_len, head_dim, _, q_by_tokens, kv_by_tokens = case
    made = []
    for h, n, by_tokens in ((heads, qo_len, q_by_tokens), *[(kv_heads, kv_len, kv_by_tokens)] * 2):
        x = torch.randn((batch, n, h, head_dim) if by_tokens else (batch, h, n, head_dim), dtype=dtype, device="cuda")
        made.append(x.transpose(1, 2) if by_tokens else x)
    return made


def by_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        result: torch.Tensor = scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), enable_gqa=True, **options
        )
    return result


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_flash_calls_run_here(case: Any, dtype: torch.dtype, calls: list[str]) -> None:
    q, k, v = tensors(case, dtype)
    options = {"is_causal": case[6], "scale": 0.11}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    assert calls == ["dense"]
    torch.testing.assert_close(out.double(), by_math(q, k, v, **options), rtol=2**-6, atol=2**-7)


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}], ids=str)
@NEEDS_TRITON
@torch.no_grad()
def test_compiled(options: Any, calls: list[str]) -> None:
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


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0)])
@torch.no_grad()
def test_varlen(window: tuple[int, int], calls: list[str]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q_lens, kv_lens = (100, 1, 300), (100, 500, 700)
    cum_q, cum_k = (torch.tensor([0, *x], device="cuda").cumsum(0, dtype=torch.int32) for x in (q_lens, kv_lens))
    q, k, v = (torch.randn(sum(n), 8, 128, dtype=torch.bfloat16, device="cuda") for n in (q_lens, kv_lens, kv_lens))
    try:
        out = varlen.varlen_attn(q, k, v, cum_q, cum_k, 300, 700, window_size=window)
    except TypeError:  # an older torch: is_causal in place of windows
        if window[0] >= 0:
            pytest.skip("this torch has no windows in varlen_attn")
        out = varlen.varlen_attn(q, k, v, cum_q, cum_k, 300, 700, window == (-1, 0))
    assert calls == ["_ragged"]
    for i, (qo_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        rows, keys = slice(cum_q[i], cum_q[i + 1]), slice(cum_k[i], cum_k[i + 1])
        want, _ = attention(q[rows], k[keys], v[keys], seen(qo_len, kv_len, window[1] == 0, window[0]))
        torch.testing.assert_close(out[rows].cpu().double(), want, rtol=2**-6, atol=2**-7)


@pytest.mark.usefixtures("_active")
def test_gradients_are_refused() -> None:
    q, k, v = tensors(CASES[0])
    with pytest.raises(cute_attn.ArgumentError, match="computes no gradients"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(q.requires_grad_(), k, v)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # other backends of torch train as before
        scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None


@torch.no_grad()
def test_deactivation_restores_torch(calls: list[str]) -> None:
    q, k, v = tensors(CASES[0])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = scaled_dot_product_attention(q, k, v)
        sdpa.activate()
        scaled_dot_product_attention(q, k, v)
        sdpa.deactivate()
        assert calls == ["dense"]
        assert torch.equal(scaled_dot_product_attention(q, k, v), before)
    assert calls == ["dense"]


@pytest.mark.usefixtures("_active")
@torch.no_grad()
def test_masks_stay_with_torch(calls: list[str]) -> None:
    q, k, v = tensors(CASES[0])
    mask = torch.rand(512, 512, device="cuda") > 0.5
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not calls
    torch.testing.assert_close(out.double(), by_math(q, k, v, attn_mask=mask), rtol=2**-6, atol=2**-6)
