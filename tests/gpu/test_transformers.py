"""transformers' models on a GPU: small ones, of head dimensions that the kernels take, beside eager attention."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
from transformers.masking_utils import create_chunked_causal_mask  # noqa: E402

from cute_attn.integrations.transformers import register  # noqa: E402
from tests.gpu import marks  # noqa: E402
from tests.support import tiny_transformers as tiny  # noqa: E402

pytestmark = marks.SM80
OURS = "cute_attn"
CLOSE = 1.15  # times the error of eager bf16
TIE = 0.1
DEVICE = "cuda"


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def padded(ids: torch.Tensor, padding: str) -> dict[str, torch.Tensor]:
    """The options of a call."""
    if padding == "none":
        return {}
    mask = tiny.left_padding(ids, *(37, 0, 90)[: len(ids)])
    return {"attention_mask": mask if padding == "left" else mask.flip(1)}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", tiny.MAKERS)
def test_logits_are_as_close_to_fp32_as_those_of_eager_bf16(name, padding):
    model, ids = tiny.pair(name, DEVICE), tiny.tokens(6, 60 if name == "bert" else 200, device=DEVICE)
    options = padded(ids, "none" if name == "bert" and padding == "right" else padding)
    live = options["attention_mask"].bool() if options else slice(None)
    exact = tiny.logits(model.exact, "eager", ids, **options)[live]
    eager, ours = (tiny.logits(model.half, how, ids, **options)[live] for how in ("eager", OURS))
    assert tiny.error(ours, exact) <= CLOSE * tiny.error(eager, exact)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", tiny.DECODERS)
def test_greedy_tokens_are_those_of_fp32_wherever_those_of_eager_bf16_are(name, cache, padding):
    model, ids, new = tiny.pair(name, DEVICE), tiny.tokens(8, 150, device=DEVICE), 8
    options = padded(ids, padding)
    if (name, cache) == ("llama4", "static") and "block_sequence_ids" not in signature(
        create_chunked_causal_mask
    ).parameters:
        pytest.skip("this release of transformers passes its chunked mask an argument that it does not take")
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    exact = tiny.greedy(model.exact, "eager", ids, new, **options)
    eager, ours = (tiny.greedy(model.half, how, ids, new, **options).tokens for how in ("eager", OURS))
    settled = ((eager != exact.tokens) | (exact.margins < TIE)).cumsum(1) == 0
    assert torch.equal(ours[settled], exact.tokens[settled])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_generate_gives_the_tokens_of_uncompiled(name, mode):
    """Gemma 2's soft cap plans in every step, which no CUDA graph may hold."""
    model, ids = tiny.pair(name, DEVICE).half, tiny.tokens(2, 50, device=DEVICE)
    options = {"cache_implementation": "static", **padded(ids, "left")}
    plain = tiny.greedy(model, OURS, ids, 8, disable_compile=True, **options)
    torch.compiler.reset()
    traced = tiny.greedy(model, OURS, ids, 8, compile_config=transformers.CompileConfig(mode=mode), **options)
    settled = (plain.margins < TIE).cumsum(1) == 0
    assert torch.equal(traced.tokens[settled], plain.tokens[settled])


def test_a_decode_step_in_a_cuda_graph_sees_each_new_token():
    """A static cache without padding: one capture, replayed while the cache grows."""
    model, ids, new = tiny.pair("llama", DEVICE).half, tiny.tokens(3, 40, device=DEVICE), 6
    model.set_attn_implementation(OURS)

    def fresh():
        cache = transformers.StaticCache(model.config, max_cache_len=64)
        return cache, model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)

    with torch.no_grad():
        cache, token = fresh()
        expected = []
        for _ in range(new):
            token = model(token, past_key_values=cache).logits.argmax(-1)
            expected.append(token)
        warm, token = fresh()
        model(token, past_key_values=warm)
        cache, token = fresh()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(model(token, past_key_values=cache).logits.argmax(-1))
        found = []
        for _ in range(new):
            graph.replay()
            found.append(token.clone())
    assert torch.equal(torch.cat(found, 1), torch.cat(expected, 1))
