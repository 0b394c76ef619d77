"""A run of vLLM's engine on the CPU in a process of its own.

`python -m tests.support.vllm_run REQUEST RESULT`, the names of two JSON files.

vLLM's CPU platform ignores `--attention-backend` and looks CPU_ATTN up in its registry: there the backend is put in its
place, under that name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # entry points of what else is installed
}


def take_the_cpus_place() -> list[tuple[int, int, bool]]:
    """Register the backend, and as CPU_ATTN. Returns a list that will hold, for every step of a KV cache group, its
    decodes, its other requests, and whether decodes have several query tokens.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from cute_attn.integrations import vllm as plugin

    plugin.register()
    plugin.register()
    assert AttentionBackendEnum[plugin.NAME].get_path() == plugin.BACKEND
    assert not [name for name in sys.modules if name.startswith(plugin.__name__ + ".")]
    from cute_attn.integrations.vllm import backend

    steps: list[tuple[int, int, bool]] = []

    class Builder(backend.CuteAttnMetadataBuilder):
        def build(self, *args: Any, **kwargs: Any) -> Any:
            step = super().build(*args, **kwargs)
            count, decodes = step.batch.num_reqs, step.decodes
            steps.append((decodes.num_reqs, count - decodes.num_reqs, decodes.q_len > 1))
            return step

    class AsCpuAttention(backend.CuteAttnBackend):
        @staticmethod
        def get_name() -> str:
            return "CPU_ATTN"

        @staticmethod
        def get_builder_cls() -> type[Builder]:
            return Builder

    globals()[AsCpuAttention.__name__] = AsCpuAttention  # where the registry looks it up
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{AsCpuAttention.__name__}")
    return steps


def main(request_path: str, result_path: str) -> None:
    """Generate greedily, and write tokens, their logprobs and those of the prompts."""
    request = json.loads(Path(request_path).read_text())
    os.environ.update(ENVIRONMENT)
    steps = take_the_cpus_place() if request["ours"] else []
    from vllm import LLM, SamplingParams

    options = {"attention_backend": "CUTE_ATTN"} if request["ours"] else {}
    llm = LLM(
        model=request["model"],
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=512,
        **request["engine"],
        **options,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
    sampling = SamplingParams(
        max_tokens=request["max_tokens"],
        temperature=0,
        logprobs=0,
        prompt_logprobs=request["prompt_logprobs"],
        detokenize=False,
        ignore_eos=True,
    )
    found = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        generated = output.outputs[0]
        tokens = list(generated.token_ids)
        logprobs = [at[token].logprob for at, token in zip(generated.logprobs, tokens, strict=True)]
        prompt = [
            at[token].logprob
            for at, token in zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=False)
            if at is not None
        ]
        found.append({"tokens": tokens, "logprobs": logprobs, "prompt_logprobs": prompt})
    Path(result_path).write_text(json.dumps({"requests": found, "steps": steps}))


if __name__ == "__main__":
    main(*sys.argv[1:])
