"""Generate text with vLLM on cute_attn's attention: `python examples/vllm_generate.py MODEL`. Needs a GPU.

What the backend supports: docs/integrations/vllm.md.
"""

from __future__ import annotations

import argparse
import time

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a model's name, or its folder")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8, fp8_e5m2 or nvfp4")
    parser.add_argument("--requests", type=int, default=32)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "vLLM's CPU platform ignores attention_backend: this example needs a GPU\n")
    from vllm import LLM, SamplingParams

    llm = LLM(arguments.model, attention_backend="CUTE_ATTN", kv_cache_dtype=arguments.kv_cache_dtype)
    prompts = [f"Question {i + 1}: what is attention in a language model? Answer:" for i in range(arguments.requests)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=128))
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(outputs[0].prompt + outputs[0].outputs[0].text)
    print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
