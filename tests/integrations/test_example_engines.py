"""`examples/llama` and `examples/deepseek`: their tokens are those of dense models, and every page comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from examples.deepseek.cache import LatentCache
from examples.deepseek.forward import LatentEngine
from examples.deepseek.model import Config as LatentConfig
from examples.deepseek.model import DeepSeek
from examples.llama.batch import Request
from examples.llama.cache import E4M3, PagedCache, quantized
from examples.llama.eager import attention_of, compare, fp8_scales
from examples.llama.engine import Engine, padded_sizes, serve
from examples.llama.model import Config, Llama
from tests.support.executors import needs_gpu

CONFIG = Config(layers=3, hidden=128, heads=4, kv_heads=2, vocab=300)
LATENT = LatentConfig(layers=2, hidden=128, heads=3, q_rank=48, vocab=200)
PAGE_SIZE = 8


# ---- an oracle: no cache, no chunks, no batch; fp64 throughout

Weights = dict[str, torch.Tensor]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of `[tokens, heads, dim]` as a product of complex numbers."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([theta ** (-i / half) for i in range(half)]).double()
    turns = torch.polar(torch.ones(()).double(), torch.arange(len(x)).double()[:, None] * frequencies)
    product = torch.complex(x[..., :half], x[..., half:]) * turns[:, None]
    return torch.cat((product.real, product.imag), -1)


def grouped_qkv(x: torch.Tensor, own: Weights, config: Config) -> tuple[torch.Tensor, ...]:
    q, k, v = (x @ own["qkv"].T).view(len(x), -1, config.head_dim).split([config.heads, *[config.kv_heads] * 2], 1)
    group = config.heads // config.kv_heads
    return turned(q, config.rope_theta), *(y.repeat_interleave(group, 1) for y in (turned(k, config.rope_theta), v))


def latent_qkv(x: torch.Tensor, own: Weights, config: LatentConfig) -> tuple[torch.Tensor, ...]:
    """With keys and values of every head."""
    q, latent, k_pe = (x @ own["qkv_down"].T).split([config.q_rank, 512, 64], 1)
    q = (normed(q, own["q_norm"]) @ own["q_up"].T).view(len(x), -1, 192)
    k, v = (normed(latent, own["kv_norm"]) @ own["kv_up"].T).view(len(x), -1, 256).split(128, 2)
    k_pe = turned(k_pe[:, None], config.rope_theta).expand(-1, config.heads, -1)
    return torch.cat((q[..., :128], turned(q[..., 128:], config.rope_theta)), -1), torch.cat((k, k_pe), -1), v


def dense_logits(model: Llama, tokens: Sequence[int]) -> torch.Tensor:
    """Logits `[len(tokens), vocab]` of the model's weights."""
    weights = {name: w.detach().cpu().double() for name, w in model.state_dict().items()}
    qkv: Any = latent_qkv if isinstance(model, DeepSeek) else grouped_qkv
    x, hidden = weights["embedding.weight"][list(tokens)], torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for i in range(model.config.layers):
        own = {name.split(".")[2]: w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        q, k, v = qkv(normed(x, own["attention_norm"]), own, model.config)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        weight = scores.masked_fill(hidden, -math.inf).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", weight, v).reshape(len(x), -1) @ own["out"].T
        gate, up = (normed(x, own["mlp_norm"]) @ own["gate_up"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ own["down"].T
    return normed(x, weights["norm.weight"]) @ weights["head.weight"].T


def assert_greedy(model: Llama, request: Request) -> None:
    """Every token has the oracle's largest logit, or one that rounding cannot tell from it.

    One dense pass covers all steps: it is given the very tokens that each step followed.
    """
    assert len(request.output) == request.new_tokens
    logits = dense_logits(model, request.tokens[:-1])[len(request.prompt) - 1 :]
    gaps = logits.amax(-1) - logits.gather(1, torch.tensor(request.output)[:, None])[:, 0]
    assert float(gaps.max()) <= 16 * torch.finfo(model.dtype).eps, gaps  # logits have deviation 1


# ---- engines


def model_of(dtype: torch.dtype = torch.float16, device: str = "cpu", config: Config = CONFIG) -> Llama:
    return Llama(config, dtype, device, seed=3)


def cache_of(model: Llama, num_pages: int, scales: Any = None, page_size: int = PAGE_SIZE) -> PagedCache:
    device = model.head.weight.device
    return PagedCache(model.config, num_pages, page_size, E4M3 if scales else model.dtype, device, scales)


def requests_of(lengths: Sequence[int], new_tokens: Sequence[int], vocab: int = CONFIG.vocab) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    return [Request(p, new, i) for i, (p, new) in enumerate(zip(prompts, new_tokens, strict=True))]


def assert_all_free(cache: Any) -> None:
    assert sorted(cache.take(cache.num_free).tolist()) == list(range(cache.num_pages))


@pytest.mark.parametrize(
    ("dtype", "page_size", "chunk_tokens"),
    [(torch.float16, 8, 1000), (torch.float16, 8, 11), (torch.bfloat16, 1, 11)],
    ids=["whole prompts", "chunks", "pages of a token"],
)
def test_requests_that_come_and_go(dtype: torch.dtype, page_size: int, chunk_tokens: int) -> None:
    """Prompts of one token, of whole pages and of others, more of them than the cache has pages for."""
    model = model_of(dtype)
    cache = cache_of(model, num_pages=112 // page_size, page_size=page_size)
    requests = requests_of([1, PAGE_SIZE, 3 * PAGE_SIZE, 2, 29, 1, 40, 4 * PAGE_SIZE], [6, 1, 9, 3, 2, 17, 4, 9])
    engine = Engine(model, cache, max_batch=5, chunk_tokens=chunk_tokens, graphs=False)
    queued = mixed = 0

    def observe(_: int) -> None:
        nonlocal queued, mixed
        queued += bool(engine.waiting) and len(engine.running) < engine.max_batch
        mixed += len({request.remaining > 1 for request in engine.running}) == 2
        held = [page for request in engine.running for page in request.pages.tolist()]
        assert len(held) == len(set(held)) == cache.num_pages - cache.num_free

    serve(engine, requests, observe)
    for request in requests:
        assert_greedy(model, request)
    assert queued  # for pages, not for a place in the batch
    assert bool(mixed) == (chunk_tokens == 11)  # some decoded while the prompts of others were under way
    assert len({token for request in requests for token in request.output}) > 20  # not one token again and again
    assert_all_free(cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latent_attention(dtype: torch.dtype, device: str) -> None:
    """Prompts of one token, within a page, of whole pages, and longer than a step; decode steps are padded."""
    model = DeepSeek(LATENT, dtype, device, seed=3)
    cache = LatentCache(LATENT, 16, PAGE_SIZE, dtype, device)
    requests = requests_of([1, 5, 16, 33], [5] * 4, LATENT.vocab)
    serve(LatentEngine(model, cache, max_batch=3, chunk_tokens=12, graphs=device == "cuda"), requests)
    assert_all_free(cache)
    for request in requests:
        assert_greedy(model, request)
    assert len({token for request in requests for token in request.output}) > 1


class Recording(Llama):
    """Keeps the logits of every forward pass."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden)
        self.__dict__.setdefault("seen", []).append(found)
        return found


def test_fp8_cache() -> None:
    """Its logits are near those of the dense model, but not as near as with a cache of 16 bits."""
    errors = []
    for kv_dtype in ("auto", "fp8"):
        model = Recording(CONFIG, torch.float16, "cpu", seed=3)
        cache = cache_of(model, 8, fp8_scales(model) if kv_dtype == "fp8" else None)
        (request,) = requests_of([21], [12])
        serve(Engine(model, cache, 1, 64, False), [request])
        found, expected = torch.cat(model.seen), dense_logits(model, request.tokens[:-1])[20:]
        errors.append(float((found - expected).norm() / expected.norm()))
        assert compare(model, attention_of(cache), [request]).passed  # against what the cache holds
    assert errors[0] < 0.005
    assert 0.02 < errors[1] < 0.2, errors


def test_numbers_too_large_for_fp8_become_its_largest() -> None:
    x = torch.tensor([1e4, -1e4, 3.0])
    assert quantized(x, 2.0, E4M3).float().tolist() == [448, -448, 1.5]


def test_the_check_notices_other_tokens() -> None:
    model = model_of()
    cache, requests = cache_of(model, 20), requests_of([9, 30], [5, 5])
    serve(Engine(model, cache, 2, 64, False), requests)
    assert compare(model, attention_of(cache), requests).equal == 10
    requests[1].tokens[-2] = (requests[1].tokens[-2] + 1) % CONFIG.vocab
    verdict = compare(model, attention_of(cache), requests)
    assert not verdict.passed
    assert verdict.equal < 10


@pytest.mark.parametrize(
    ("request_", "text"),
    [(Request([], 3), "needs a prompt"), (Request([1], 0), "new token"), (Request([1] * 30, 3), "needs 4 pages")],
)
def test_requests_that_could_never_run(request_: Request, text: str) -> None:
    model = model_of()
    engine = Engine(model, cache_of(model, 3), 1, 64, False)
    with pytest.raises(ValueError, match=text):
        engine.add(request_)
    assert not engine.busy


def test_padded_sizes() -> None:
    assert [padded_sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@needs_gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_cuda_graphs_change_no_token(kv_dtype: str) -> None:
    config = Config(layers=2, hidden=512, heads=8, kv_heads=2, vocab=300)
    model = model_of(torch.bfloat16, "cuda", config)
    scales = fp8_scales(model) if kv_dtype == "fp8" else None
    found = []
    for graphs in (False, True):
        cache = cache_of(model, 40, scales, page_size=16)
        requests = requests_of([1, 16, 200, 33, 64, 129], [20, 3, 12, 30, 7, 9])
        serve(Engine(model, cache, 4, 64, graphs), requests)
        assert compare(model, attention_of(cache), requests).passed
        if scales is None:
            for request in requests:
                assert_greedy(model, request)
        found.append([request.output for request in requests])
        assert_all_free(cache)
    assert found[0] == found[1]
