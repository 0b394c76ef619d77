"""A run of vLLM's engine on the CPU in a process of its own.

`python -m tests.support.vllm_run REQUEST RESULT`, the names of two JSON files.

vLLM's CPU platform ignores `--attention-backend` and looks CPU_ATTN up in its registry, or for latent attention CPU_MLA
and its prefill: there the backends are put in their places, under these names.
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
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from cute_attn.integrations import vllm as plugin

    plugin.register()
    plugin.register()
    assert AttentionBackendEnum[plugin.NAME].get_path() == plugin.BACKEND
    assert AttentionBackendEnum[plugin.MLA_NAME].get_path() == plugin.MLA_BACKEND
    assert MLAPrefillBackendEnum[plugin.MLA_NAME].get_path() == plugin.MLA_PREFILL_BACKEND
    assert not [name for name in sys.modules if name.startswith(plugin.__name__ + ".")]
    from cute_attn.integrations.vllm import backend, mla

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

    class MlaBuilder(mla.CuteAttnMLAMetadataBuilder):
        def build(self, *args: Any, **kwargs: Any) -> Any:
            step = super().build(*args, **kwargs)
            steps.append((step.num_decodes, step.num_prefills, step.num_decode_tokens > step.num_decodes))
            return step

    class AsCpuMla(mla.CuteAttnMLABackend):
        @staticmethod
        def get_name() -> str:
            return "CPU_MLA"

        @staticmethod
        def get_builder_cls() -> type[MlaBuilder]:
            return MlaBuilder

    for cls, member in ((AsCpuAttention, AttentionBackendEnum.CPU_ATTN), (AsCpuMla, AttentionBackendEnum.CPU_MLA)):
        globals()[cls.__name__] = cls  # where the registry looks it up
        register_backend(member, f"{__name__}.{cls.__name__}")
    register_mla_prefill_backend(MLAPrefillBackendEnum.CPU, plugin.MLA_PREFILL_BACKEND)
    return steps


def supply_missing_operators() -> None:
    """Write latent caches by indexing where vLLM's compiled files for the CPU, those for AVX2, have no operator."""
    import torch
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        return

    def write(kv_c: Any, k_pe: Any, cache: Any, slots: Any, kv_cache_dtype: str, scale: Any) -> None:
        used = slots >= 0
        rows = torch.cat((kv_c, k_pe.flatten(1)), dim=-1)[: len(slots)][used].to(cache.dtype)
        cache[slots[used] // cache.shape[1], slots[used] % cache.shape[1]] = rows

    ops.concat_and_cache_mla = write


def main(request_path: str, result_path: str) -> None:
    """Generate greedily, and write tokens, their logprobs and those of the prompts."""
    request = json.loads(Path(request_path).read_text())
    os.environ.update(ENVIRONMENT)
    steps = take_the_cpus_place() if request["ours"] else []
    supply_missing_operators()
    from vllm import LLM, SamplingParams

    options = {"attention_backend": request["backend"]} if request["ours"] else {}
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
