"""Generate with a Hugging Face model on cute_attn, beside transformers' eager attention.

    python examples/transformers_generate.py

The model is a small Llama with random weights, so that nothing is downloaded; with a real one, load it by
`AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="cute_attn")`.
Runs on a GPU where there is one, else on the CPU, on the torch reference.
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cute_attn.integrations.transformers import register


def main() -> None:
    """Print the tokens of both implementations, and how far their logits are apart."""
    register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().to(device, torch.bfloat16)
    prompts = torch.randint(1, 1000, (2, 24), device=device)
    mask = torch.ones_like(prompts)
    mask[0, :9] = 0  # the first prompt is shorter: padding on the left
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "cache_implementation": "static"}
    logits = {}
    for name in ("eager", "cute_attn"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(prompts, attention_mask=mask).logits[mask.bool()].float()
        start = time.perf_counter()
        tokens = model.generate(prompts, **options, disable_compile=True)[:, prompts.shape[1] :].tolist()
        seconds = time.perf_counter() - start
        print(f"{name:>9}: {tokens[0]}\n{'':>9}  {tokens[1]}   {seconds:.2f} s on {device}")
    apart = (logits["cute_attn"] - logits["eager"]).norm() / logits["eager"].norm()
    print(f"logits of the prompts differ by {apart:.1e} (bf16 rounds to 4e-3; near ties may then part the tokens)")


if __name__ == "__main__":
    main()
