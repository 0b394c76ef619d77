"""transformers' own models on cute_attn: as close to fp32 as eager bf16 is, with every cache and kind of padding. On
CPUs, and with longer prompts on GPUs.
"""

from __future__ import annotations

from collections import OrderedDict
from inspect import signature

import pytest
import torch
import transformers
from transformers import masking_utils

from cute_attn.integrations.transformers import forward, register
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.wrappers import planned_prefill
from tests.support import tiny_transformers as tiny
from tests.support.executors import needs_gpu
from tests.support.noted import Noted, noted

OURS = "cute_attn"
CLOSE = 1.15  # times the error of eager bf16, whose sums differ from CPU to CPU
TIE = 0.1  # a margin of logits, of standard deviation 1.2, that rounding to bf16 may turn
PACKED = (5, 1, 12, 3)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """Every plan that the test makes, after those of other tests are forgotten."""
    monkeypatch.setattr(planned_prefill, "_places", OrderedDict())
    return noted(monkeypatch, BatchPrefillWithPagedKVCacheWrapper, "plan")


def padded(ids: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """The options of a call: an attention mask with padding on one side, or with holes."""
    if kind == "none":
        return {}
    mask = tiny.left_padding(ids, *((37, 0, 90) if ids.shape[1] > 90 else (5, 0, 11))[: len(ids)])
    if kind == "right":
        mask = mask.flip(1)
    if kind == "holes":
        mask[:, 13] = 0
        mask[1, 4:7] = 0
    return {"attention_mask": mask}


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", tiny.MAKERS)
def test_logits_are_as_close_to_fp32_as_those_of_eager_bf16(name, padding, device):
    model, length = tiny.pair(name, device), 21 if device == "cpu" else 60 if name == "bert" else 200
    ids = tiny.tokens(8, length, device=device)
    options = padded(ids, padding)
    live = options["attention_mask"].bool() if options else slice(None)
    exact = tiny.logits(model.exact, "eager", ids, **options)[live]
    eager, ours = (tiny.logits(model.half, how, ids, **options)[live] for how in ("eager", OURS))
    assert tiny.error(ours, exact) <= CLOSE * tiny.error(eager, exact)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", tiny.DECODERS)
def test_greedy_tokens_are_those_of_fp32_wherever_those_of_eager_bf16_are(name, cache, padding, device):
    """On CPUs windows and chunks of 8 end on the way."""
    own_mask = signature(masking_utils.create_chunked_causal_mask).parameters
    if (name, cache) == ("llama4", "static") and "block_sequence_ids" not in own_mask:
        pytest.skip("this release of transformers passes its chunked mask an argument that it does not take")
    model, ids, new = tiny.pair(name, device), tiny.tokens(12, 15 if device == "cpu" else 150, device=device), 8
    options = padded(ids, padding)
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    exact = tiny.greedy(model.exact, "eager", ids, new, **options)
    eager, ours = (tiny.greedy(model.half, how, ids, new, **options).tokens for how in ("eager", OURS))
    unsettled = (eager != exact.tokens) | (exact.margins < TIE)
    settled = unsettled.cumsum(1) == 0  # what follows another token has no meaning
    assert settled.sum() >= new
    assert torch.equal(ours[settled], exact.tokens[settled])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4"])
def test_packed_sequences_do_not_see_each_other(name, planned):
    if name == "llama4" and not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("this release of transformers counts chunks along the row, not within a packed sequence")
    model, ids = tiny.pair(name), tiny.tokens(4, sum(PACKED))
    positions = torch.cat([torch.arange(n) for n in PACKED]).expand(4, -1)
    parts = ids.split(PACKED, 1)
    exact = torch.cat([tiny.logits(model.exact, "eager", part) for part in parts], 1)
    eager = torch.cat([tiny.logits(model.half, "eager", part) for part in parts], 1)
    ours = tiny.logits(model.half, OURS, ids, position_ids=positions, use_cache=False)
    assert tiny.error(ours, exact) <= CLOSE * tiny.error(eager, exact)
    assert all(call.kwargs["custom_mask"] is None for call in planned)  # chunks part the sequences further


def test_cu_seq_lens_part_a_row_of_tokens():
    model, ids = tiny.pair("llama"), tiny.tokens(1, sum(PACKED))
    bounds = torch.tensor([0, *PACKED]).cumsum(0).int()
    one = tiny.logits(model.half, OURS, ids[:, 6:18])  # the third sequence; rope sees only differences of positions
    row = tiny.logits(model.half, OURS, ids, cu_seq_lens_q=bounds, use_cache=False)[:, 6:18]
    whole = tiny.logits(model.half, OURS, ids, use_cache=False)[:, 6:18]
    assert tiny.error(row, one) < 0.02 < tiny.error(whole, one)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must go from 0 to the tokens of one row, 21"):
        tiny.logits(model.half, OURS, ids, cu_seq_lens_q=bounds[:-1], use_cache=False)


def test_one_plan_per_layer_type_and_forward_pass(planned):
    """Gemma 2 has 2 sliding and 2 full layers, and a soft cap, for which decode plans too."""
    model, ids = tiny.pair("gemma2").half, tiny.tokens(2, 15)
    model.set_attn_implementation(OURS)
    with torch.no_grad():
        cache = model(ids, attention_mask=tiny.left_padding(ids, 3), use_cache=True).past_key_values
        assert sorted(call.kwargs["window_left"] for call in planned) == [-1, 7]
        model(ids[:, :1], attention_mask=tiny.left_padding(ids.repeat(1, 2)[:, :16], 3), past_key_values=cache)
    assert len(planned) == 4
    planned.clear()
    tiny.logits(model, OURS, tiny.tokens(2, 15, seed=2), attention_mask=tiny.left_padding(ids, 3))
    assert not planned  # lengths of an earlier forward pass


def test_one_exact_mask_per_layer_type_and_forward_pass(planned):
    """Llama 4 has 2 chunked and 2 full layers; a chunk needs the exact mask."""
    model = tiny.pair("llama4").half
    tiny.logits(model, OURS, tiny.tokens(2, 15))
    assert sorted(call.kwargs["custom_mask"] is not None for call in planned) == [False, True]
    tiny.logits(model, OURS, tiny.tokens(2, 15))
    assert len(planned) == 3  # an exact mask is a new one in each forward pass


def test_decode_of_a_static_cache_makes_no_plan_and_copies_nothing(planned, monkeypatch):
    decodes = noted(monkeypatch, forward, "xqa_batch_decode_with_kv_cache")
    model, ids = tiny.pair("llama").half, tiny.tokens(3, 9)
    cache = transformers.StaticCache(model.config, max_cache_len=16)
    model.set_attn_implementation(OURS)
    with torch.no_grad():
        model(ids, past_key_values=cache, attention_mask=tiny.left_padding(ids, 2, 4))
        assert len(planned) == 1
        for more in (10, 11):
            padding = tiny.left_padding(ids.repeat(1, 2)[:, :more], 2, 4)
            model(ids[:, :1], past_key_values=cache, attention_mask=padding)
    own = [
        [layer.keys.untyped_storage().data_ptr(), layer.values.untyped_storage().data_ptr()] for layer in cache.layers
    ]
    assert [[x.untyped_storage().data_ptr() for x in call.args[1]] for call in decodes] == own * 2
    assert len(planned) == 1


@pytest.mark.filterwarnings("ignore")
def test_generate_with_a_static_cache_under_torch_compile():
    """Every decode step is a graph without breaks, and gives the tokens of the same steps without a graph."""
    model, ids = tiny.pair("llama").half, tiny.tokens(2, 9)
    config = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True  # on the CPU `generate` does not compile unless asked to
    options = {"cache_implementation": "static", "attention_mask": tiny.left_padding(ids, 3)}
    plain = tiny.greedy(model, OURS, ids, 5, disable_compile=True, **options)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    traced = tiny.greedy(model, OURS, ids, 5, compile_config=config, **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert torch.equal(plain.tokens, traced.tokens)
    assert torch.equal(plain.margins, traced.margins)


def test_the_mask_of_a_caller_is_obeyed():
    """A boolean and an additive 4-D mask: the prompt is a prefix that all of its tokens see."""
    model, ids = tiny.pair("llama"), tiny.tokens(2, 12)
    i, j = torch.arange(12)[:, None], torch.arange(12)
    seen = ((j <= i) | (j < 5))[None, None]
    added = torch.zeros(1, 1, 12, 12).masked_fill(~seen, torch.finfo(torch.float32).min)
    exact = tiny.logits(model.exact, "eager", ids, attention_mask=added)
    eager = tiny.logits(model.half, "eager", ids, attention_mask=added.bfloat16())
    for mask in (seen, added.bfloat16()):
        ours = tiny.logits(model.half, OURS, ids, attention_mask=mask)
        assert tiny.error(ours, exact) <= CLOSE * tiny.error(eager, exact)
    assert tiny.error(tiny.logits(model.half, OURS, ids), exact) > 0.1


# ---- on a GPU


@needs_gpu
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_generate_gives_the_tokens_of_uncompiled(name, mode):
    """Gemma 2's soft cap plans in every step, which no CUDA graph may hold."""
    model, ids = tiny.pair(name, "cuda").half, tiny.tokens(2, 50, device="cuda")
    options = {"cache_implementation": "static", **padded(ids, "left")}
    plain = tiny.greedy(model, OURS, ids, 8, disable_compile=True, **options)
    torch.compiler.reset()
    traced = tiny.greedy(model, OURS, ids, 8, compile_config=transformers.CompileConfig(mode=mode), **options)
    settled = (plain.margins < TIE).cumsum(1) == 0
    assert torch.equal(traced.tokens[settled], plain.tokens[settled])


@needs_gpu
def test_a_decode_step_in_a_cuda_graph_sees_each_new_token():
    """A static cache without padding: one capture, replayed while the cache grows."""
    model, ids, new = tiny.pair("llama", "cuda").half, tiny.tokens(3, 40, device="cuda"), 6
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
