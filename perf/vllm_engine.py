"""Tokens per second of vLLM's engine with our attention backend and with vLLM's own:
`python -m perf.vllm_engine --model Llama-3-8B --out perf/results/vllm.json`.

Models have all layers of the published ones and random weights. Each engine is a process of its own, one after the
other, so that no two share the host's processors or the GPU; a round starts each of them once, in turn. Prompts are
random and differ between repetitions, so that no prefix is known, but for "long", whose prompts are in the prefix cache
before its decode steps are timed. Whether the tokens are right is not asked here: tests/integrations.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf import program
from perf.bench import save
from perf.report import ENGINE_OURS, markdown

NAME = "vllm_engine"
BACKENDS = (ENGINE_OURS, "FLASH_ATTN", "TRITON_ATTN")
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
EXPERTS = {"head_dim": 64, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # class in transformers, configuration
    "Llama-3-8B": ("LlamaForCausalLM", {**LLAMA, "head_dim": 128, "num_hidden_layers": 32, "vocab_size": 128256}),
    "gpt-oss-20b": ("GptOssForCausalLM", {**GPT_OSS, **EXPERTS, "num_hidden_layers": 24, "vocab_size": 201088}),
}
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
MODES: dict[str, dict[str, Any]] = {
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", **GRAPHS}},
    "eager": {"enforce_eager": True},
    "compile": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", **GRAPHS}},  # vLLM's default
}
ENGINE = {
    "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0, "max_model_len": 8192,
    "max_num_batched_tokens": 8192, "max_num_seqs": 256, "gpu_memory_utilization": 0.85,
}  # fmt: skip
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_PLUGINS": "cute_attn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
PREFILL = 32, 2048, 1  # requests, tokens of a prompt, tokens to generate
DECODE = 256, 128, 256
LONG = 64, 4096, 128
HOST = 256, 128, 32
WARM = 8  # tokens
TOKENS = 3, 32000  # of prompts: from, below
REPETITIONS = 3


# ---- one engine, in a process of its own


class Engine:
    """vLLM's engine and a supply of prompts."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import numpy as np
        from vllm import LLM

        self.llm = LLM(**options)
        self._random = np.random.default_rng(0)

    def prompts(self, requests: int, tokens: int) -> list[dict[str, Any]]:
        """Return prompts that no engine has seen."""
        return [{"prompt_token_ids": self._random.integers(*TOKENS, tokens).tolist()} for _ in range(requests)]

    def seconds(self, prompts: Sequence[Mapping[str, Any]], tokens: int) -> float:
        """Return the time in which every prompt got so many tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        start = time.perf_counter()
        self.llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def speeds(self, requests: int, tokens: int, new: int) -> list[float]:
        """Return tokens per second: those of prompts if each gets one new token, else the new ones."""
        self.seconds(self.prompts(requests, tokens), min(new, WARM))  # compiles what is left
        counted = requests * (tokens if new == 1 else new)
        return [counted / self.seconds(self.prompts(requests, tokens), new) for _ in range(REPETITIONS)]

    def long(self, requests: int, tokens: int, new: int) -> list[float]:
        """Return tokens per second of the decode steps alone."""
        prompts = self.prompts(requests, tokens)
        self.seconds(prompts, WARM)
        first = min(self.seconds(prompts, 1) for _ in range(REPETITIONS))
        return [requests * (new - 1) / (self.seconds(prompts, new) - first) for _ in range(REPETITIONS)]


def measure(asked: Mapping[str, Any]) -> program.Row:
    """Return the tokens per second of a cell, or the host times of its layers."""
    times = host_times() if asked["host"] else {}
    start = time.perf_counter()
    engine = Engine(asked["engine"])
    found: program.Row = {"start_s": time.perf_counter() - start}
    if asked["host"]:
        engine.seconds(engine.prompts(*HOST[:2]), WARM)
        for of_calls in times.values():
            of_calls.clear()
        engine.seconds(engine.prompts(*HOST[:2]), HOST[2])
        return {**found, "host_us": {name: statistics.median(calls) for name, calls in times.items() if calls}}
    return {
        **found,
        "prefill": engine.speeds(*PREFILL),
        "decode": engine.speeds(*DECODE),
        "long": engine.long(*LONG),
    }


def host_times() -> dict[str, list[float]]:
    """Have every backend note the microseconds of its calls on the host. Most steps are decodes: so are the medians."""
    from vllm.v1.attention.backends import flash_attn, triton_attn

    from cute_attn.integrations.vllm import backend

    times: dict[str, list[float]] = {}

    def noted(owner: type, name: str) -> None:
        call, of_calls = getattr(owner, name), times.setdefault(name, [])

        def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            result = call(self, *args, **kwargs)
            of_calls.append((time.perf_counter_ns() - start) / 1e3)
            return result

        setattr(owner, name, timed)

    impls = backend.CuteAttnImpl, flash_attn.FlashAttentionImpl, triton_attn.TritonAttentionImpl
    for owner, name in itertools.product(impls, ("forward", "do_kv_cache_update")):
        noted(owner, name)
    builders = flash_attn.FlashAttentionMetadataBuilder, triton_attn.TritonAttentionMetadataBuilder
    for owner in (backend.CuteAttnMetadataBuilder, *builders):
        noted(owner, "build")
    return times


# ---- all engines


def save_model(name: str, folder: Path) -> Path:
    """Write the configuration of a model; its weights are made up by vLLM."""
    import transformers

    architecture, options = MODELS[name]
    made = getattr(transformers, architecture).config_class
    config = made(**options, max_position_embeddings=16384, tie_word_embeddings=False)
    config.architectures, config.dtype = [architecture], "bfloat16"
    config.save_pretrained(folder / name)
    return folder / name


def main() -> None:
    """Run the command line."""
    parser = program.parser(NAME, __doc__, rounds=1)
    parser.add_argument("--model", choices=MODELS, default="Llama-3-8B")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--backends", nargs="+", default=BACKENDS, metavar="NAME", help="vLLM's names of backends")
    parser.add_argument("--host", action="store_true", help="microseconds on the host per layer of an eager decode")
    parser.add_argument("--limit", type=float, default=300, help="seconds for an engine (default 300)")
    options = parser.parse_args()
    program.gpu("vllm")
    record: program.Row = {**program.head(NAME), "model": options.model, NAME: []}
    modes = ["eager"] if options.host else options.modes
    environment = ENVIRONMENT | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.host else {})
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(options.model, Path(folder))
        for mode, round_, i in itertools.product(modes, range(options.rounds), range(len(options.backends))):
            backend = options.backends[(round_ + i) % len(options.backends)]
            asked = {"engine": {**ENGINE, **MODES[mode], "model": str(model), "attention_backend": backend}}
            found = program.in_process(NAME, {**asked, "host": options.host}, environment, options.limit)
            record[NAME].append({"mode": mode, "backend": backend, **found})
            print(json.dumps(record[NAME][-1]), flush=True)
            save(record, options.out)
    if not options.host:  # whose rows are printed above
        print(markdown(record))


if __name__ == "__main__":
    main()
