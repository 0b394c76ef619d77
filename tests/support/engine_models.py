"""Small models with random weights that serving engines load in processes of their own, and what transformers says."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
COMMON = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,  # large enough for attention to decide logits
}
LATENT = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 64,  # of the rotated part, as transformers has it
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,  # no experts
}


def made(name: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """Write a model of transformers in bfloat16. Return it in fp32 and in bfloat16, both with eager attention."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")
    model(getattr(transformers, f"{name}Config")(**{**COMMON, **options})).to(torch.bfloat16).save_pretrained(folder)
    # Loaded again, for the cast has rounded the frequencies of RoPE too, which no checkpoint holds
    load = functools.partial(model.from_pretrained, folder, attn_implementation="eager")
    return load(dtype=torch.float32).eval(), load(dtype=torch.bfloat16).eval()


def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, each given those before it."""
    given = torch.tensor(tokens)
    with torch.no_grad():
        scores = model(given[None]).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(1, given[1:, None])[:, 0]
