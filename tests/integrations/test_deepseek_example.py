"""`examples/deepseek`: its tokens are those of a dense model in fp64, and every page comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from examples.deepseek.cache import LatentCache
from examples.deepseek.forward import LatentEngine
from examples.deepseek.model import Config, DeepSeek
from examples.llama.batch import Request
from examples.llama.engine import serve
from tests.support.executors import GPU_MARKS

CONFIG = Config(layers=2, hidden=128, heads=3, q_rank=48, vocab=200)
PAGE_SIZE = 8
TIE = 16  # epsilons of the dtype, of logits that are closer than rounding can tell


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[tokens, heads, 64]` as a product of complex numbers."""
    frequencies = torch.tensor([CONFIG.rope_theta ** (-i / 32) for i in range(32)]).double()
    turns = torch.polar(torch.ones(()).double(), torch.arange(len(x)).double()[:, None] * frequencies)
    product = torch.complex(x[..., :32], x[..., 32:]) * turns[:, None]
    return torch.cat((product.real, product.imag), -1)


def dense_logits(model: DeepSeek, tokens: Sequence[int]) -> torch.Tensor:
    """Logits `[len(tokens), vocab]` of the model's weights, with keys and values of every head."""
    weights = {name: w.detach().cpu().double() for name, w in model.state_dict().items()}
    x, n = weights["embedding.weight"][list(tokens)], len(tokens)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    for i in range(CONFIG.layers):
        own = {name.split(".")[2]: w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        down = normed(x, own["attention_norm"]) @ own["qkv_down"].T
        q, latent, k_pe = down[:, :48], down[:, 48:560], down[:, 560:]
        q = (normed(q, own["q_norm"]) @ own["q_up"].T).view(n, 3, 192)
        kv = (normed(latent, own["kv_norm"]) @ own["kv_up"].T).view(n, 3, 256)
        z = torch.einsum("ihd,jhd->hij", q[..., :128], kv[..., :128])
        z = z + torch.einsum("ihd,jd->hij", turned(q[..., 128:]), turned(k_pe[:, None])[:, 0])
        weight = (z / math.sqrt(192)).masked_fill(hidden, -math.inf).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", weight, kv[..., 128:]).reshape(n, -1) @ own["out"].T
        gate, up = (normed(x, own["mlp_norm"]) @ own["gate_up"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ own["down"].T
    return normed(x, weights["norm.weight"]) @ weights["head.weight"].T


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU_MARKS)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_are_those_of_a_dense_model(dtype: torch.dtype, device: str) -> None:
    """Prompts of one token, within a page, of whole pages, and longer than a step; decode steps are padded."""
    model = DeepSeek(CONFIG, dtype, device, seed=3)
    cache = LatentCache(CONFIG, 16, PAGE_SIZE, dtype, device)
    engine = LatentEngine(model, cache, max_batch=3, chunk_tokens=12, graphs=device == "cuda")
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 5, 16, 33)
    prompts = [torch.randint(CONFIG.vocab, (n,), generator=generator).tolist() for n in lengths]
    requests = [Request(prompt, 5, arrival=i) for i, prompt in enumerate(prompts)]
    serve(engine, requests)
    assert cache.num_free == cache.num_pages
    for request in requests:
        assert len(request.output) == 5
        logits = dense_logits(model, request.tokens[:-1])[len(request.prompt) - 1 :]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(request.output)[:, None])[:, 0]
        assert (gaps <= TIE * torch.finfo(dtype).eps).all(), gaps
        assert len(set(request.output)) > 1
