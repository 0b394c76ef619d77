"""Tiny random models of transformers' families, and their outputs under attention implementations."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
import transformers

VOCAB = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,  # scores of order 1: at the default 0.02 attention would be flat
}
TWO, FOUR = ({**SMALL, "num_hidden_layers": n} for n in (2, 4))
NARROW = {**FOUR, "head_dim": 16}
WINDOWS = {**NARROW, "sliding_window": 8}
GEMMA = {**WINDOWS, "query_pre_attn_scalar": 16}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LAYERS = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}  # embeddings of each layer
LATENT = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 16}
LATENT |= {"num_key_value_heads": 4}
DENSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
DENSE |= {"moe_intermediate_size": 32}
CHUNKS = {"attention_chunk_size": 8, "num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"] * 2}
CHUNKS |= {"intermediate_size_mlp": 64}
GLOBAL = {"global_head_dim": 32, "num_global_key_value_heads": 1}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
MAKERS: dict[str, tuple[str, dict[str, Any]]] = {  # class of the model, and its configuration
    "llama": ("LlamaForCausalLM", TWO),
    "qwen3": ("Qwen3ForCausalLM", {**WINDOWS, **ALTERNATING, "use_sliding_window": True}),
    "mistral": ("MistralForCausalLM", {**TWO, "sliding_window": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 2.0}),  # low enough to bend these scores
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, **ALTERNATING}),
    "gemma4": ("Gemma4ForCausalLM", {**WINDOWS, **ALTERNATING, **LAYERS, **GLOBAL}),
    "gpt_oss": ("GptOssForCausalLM", {**WINDOWS, **ALTERNATING, **EXPERTS, "experts_per_token": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**TWO, **LATENT, **DENSE}),
    "llama4": ("Llama4ForCausalLM", {**NARROW, **CHUNKS, "no_rope_layers": [1, 0, 1, 0], "moe_layers": []}),
    "bert": ("BertForMaskedLM", {**TWO, "max_position_embeddings": 64, "num_key_value_heads": 4}),
}
DECODERS = tuple(name for name in MAKERS if name != "bert")


class Pair(NamedTuple):
    """A model in fp32 for eager attention, and its copy in bf16."""

    exact: Any
    half: Any


@functools.cache
def pair(name: str, device: str = "cpu") -> Pair:
    """Return a model, the same in every test of a process. The bf16 copy has fp32's parameters, rounded.

    Frequencies of RoPE remain in fp32, as in models that are loaded in bf16.
    """
    torch.manual_seed(7)
    model_type, options = getattr(transformers, MAKERS[name][0]), MAKERS[name][1]
    model = model_type(model_type.config_class(**options)).eval().to(device)
    half = copy.deepcopy(model).to(torch.bfloat16)
    for module, source in zip(half.modules(), model.modules(), strict=True):
        for key in [key for key in module._buffers if key.endswith("inv_freq")]:
            module._buffers[key] = source._buffers[key].clone()
    model.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
    return Pair(model, half)


def tokens(*shape: int, seed: int = 1, device: str = "cpu") -> torch.Tensor:
    """Return random token numbers."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed)).to(device)


@torch.no_grad()
def logits(model: Any, implementation: str, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return a model's logits in fp32."""
    model.set_attn_implementation(implementation)
    result: torch.Tensor = model(ids, **options).logits.float()
    return result


class Greedy(NamedTuple):
    """Greedy decoding of a batch."""

    tokens: torch.Tensor  # [batch, new tokens]
    margins: torch.Tensor  # [batch, new tokens]: by how much the best logit exceeds the second


@torch.no_grad()
def greedy(model: Any, implementation: str, ids: torch.Tensor, new: int, **options: Any) -> Greedy:
    """Return the tokens that greedy decoding appends."""
    model.set_attn_implementation(implementation)
    fixed = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, **fixed, return_dict_in_generate=True, output_logits=True, **options)
    best = torch.stack(found.logits, 1).float().topk(2).values
    return Greedy(found.sequences[:, ids.shape[1] :], best[..., 0] - best[..., 1])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median relative error of a token's logits: their distance by the norm of what they should be.

    The median, since in some tokens of a random model an error grows a hundredfold, whatever computes attention.
    """
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def left_padding(ids: torch.Tensor, *lengths: int) -> torch.Tensor:
    """Return an attention mask in which the first `lengths[i]` tokens of row i are padding."""
    first = torch.zeros(len(ids), dtype=torch.long)
    first[: len(lengths)] = torch.tensor(lengths)
    return (torch.arange(ids.shape[1]) >= first[:, None]).long().to(ids.device)
