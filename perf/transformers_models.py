"""Tokens per second of transformers' models with cute_attn and other attention implementations:
`python -m perf.transformers_models --out perf/results/transformers.json`.

Models have the shapes of published ones, few layers and random weights. Before anything is timed, an implementation's
logits after a padded prefill and a decode step are compared with those of eager attention in fp32: one that is further
away than twice eager's bf16 is not timed. Prefill runs eagerly. Decode runs over a static cache, step by step from
Python ("eager") and, where the step can be captured, as a CUDA graph ("graph").
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from perf import program
from perf.bench import save
from perf.harness import CudaGraphTimer, reason
from perf.report import markdown
from perf.vllm_engine import EXPERTS, GPT_OSS, LLAMA

OURS = "cute_attn"
IMPLEMENTATIONS = (OURS, "sdpa", "flash_attention_2", "eager")
PROGRAM = "transformers_models"
WORSE = 2.0  # times the error of eager bf16
ROUNDS = 9
WARM_ROUNDS = 3
LAYERS = 4


class Sizes(NamedTuple):
    """How much is run. Lengths in tokens."""

    prefill: tuple[tuple[int, int], ...] = ((1, 8192), (4, 2048))  # batch, length
    decode: tuple[int, int] = (32, 4096)
    check: tuple[int, int] = (4, 300)


SLIDING, FULL = "sliding_attention", "full_attention"
# Of gpt-oss, 4 experts are active of 32: here there are 4.
FEW_EXPERTS = {**EXPERTS, "num_local_experts": 4, "layer_types": [SLIDING, FULL] * (LAYERS // 2)}
GEMMA = {"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8}
WINDOWS = {"head_dim": 256, "sliding_window": 1024, "layer_types": [SLIDING] * (LAYERS - 1) + [FULL]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # class in transformers, configuration
    "Llama-3-8B": ("LlamaForCausalLM", LLAMA),
    "gpt-oss-20b, 4 experts": ("GptOssForCausalLM", {**GPT_OSS, **FEW_EXPERTS}),
    "Gemma-3-12B": ("Gemma3ForCausalLM", {**GEMMA, **WINDOWS, "query_pre_attn_scalar": 256}),
}
COMMON = {"num_hidden_layers": LAYERS, "vocab_size": 4096, "max_position_embeddings": 16384, "pad_token_id": 0}

Step = Callable[[], Any]


def build(family: tuple[str, dict[str, Any]], device: torch.device) -> Any:
    """Returns a model in bf16 with random weights."""
    import transformers

    torch.manual_seed(0)
    name, options = family
    model = getattr(transformers, name)
    config = model.config_class(**{**COMMON, **options})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return model(config).eval().to(device, torch.bfloat16)
    finally:
        torch.set_default_dtype(before)


def tokens(model: Any, *shape: int) -> torch.Tensor:
    """Returns random token numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, model.config.vocab_size, shape, generator=generator).to(model.device)


def select(model: Any, name: str) -> None:
    """Has the model use an implementation; raises where that is not installed or the model refuses it."""
    if name == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise ImportError("flash_attn is not installed")
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"the model runs {model.config._attn_implementation} instead")


# ---- correctness


def check_logits(model: Any, name: str, sizes: Sizes) -> torch.Tensor:
    """Returns the logits of live tokens after a prefill with padding on the left, then of one decode step, in fp32."""
    import transformers

    select(model, name)
    ids = tokens(model, *sizes.check)
    batch, length = ids.shape
    mask = torch.ones_like(ids)
    mask[0, : length // 3] = 0
    mask[-1, :7] = 0
    cache = transformers.StaticCache(model.config, max_cache_len=length + 8)
    prefill = model(ids, attention_mask=mask, past_key_values=cache).logits
    more = torch.cat((mask, mask.new_ones(batch, 1)), 1)
    step = model(ids[:, :1], attention_mask=more, past_key_values=cache).logits
    return torch.cat((prefill[mask.bool()], step[:, 0])).float()


def errors(model: Any, sizes: Sizes) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the relative error of each implementation's logits against fp32, and why others are excluded."""
    exact_model = copy.deepcopy(model).float()
    exact = check_logits(exact_model, "eager", sizes)
    del exact_model
    found: dict[str, float] = {}
    excluded: dict[str, str] = {}
    for name in reversed(IMPLEMENTATIONS):  # eager first
        try:
            found[name] = float((check_logits(model, name, sizes) - exact).norm() / exact.norm())
        except Exception as error:  # what one cannot do must not end the run
            excluded[name] = reason(error)
            continue
        if not found[name] <= WORSE * found["eager"]:
            excluded[name] = f"logits are off by {found[name]:.2e}, eager bf16's by {found['eager']:.2e}"
    return found, excluded


# ---- speed


def median_ms(step: Step, device: torch.device, rounds: int) -> float:
    """Returns the median time of calls from Python until their results are there, after some to warm up."""

    def milliseconds() -> float:
        wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        step()
        wait()
        return (time.perf_counter() - start) * 1e3

    for _ in range(WARM_ROUNDS):
        step()
    return statistics.median(milliseconds() for _ in range(rounds))


def prefill_speeds(model: Any, name: str, sizes: Sizes, rounds: int) -> dict[str, float]:
    """Returns tokens/s by shape."""
    select(model, name)
    speeds = {}
    for batch, length in sizes.prefill:
        ids = tokens(model, batch, length)
        step = functools.partial(model, ids, use_cache=False, logits_to_keep=1)
        speeds[f"prefill {batch} x {length}"] = ids.numel() * 1e3 / median_ms(step, model.device, rounds)
    return speeds


def filled_cache(model: Any, sizes: Sizes, rounds: int) -> Any:
    """Returns a static cache with the context, and room for what is timed. cute_attn fills it for all."""
    import transformers

    batch, length = sizes.decode
    select(model, OURS)
    room = 8 * (rounds + WARM_ROUNDS + 8) * len(IMPLEMENTATIONS)
    cache = transformers.StaticCache(model.config, max_cache_len=length + room)
    ids = tokens(model, batch, length)
    for part in ids.split(max(1, 8192 // batch), 1):  # of activations for 8192 tokens at a time
        model(part, past_key_values=cache, logits_to_keep=1)
    return cache


def decode_speeds(model: Any, name: str, cache: Any, sizes: Sizes, rounds: int) -> tuple[dict[str, float], str | None]:
    """Returns tokens/s of steps from Python and of a graph, and why there is none of a graph."""
    select(model, name)
    batch, length = sizes.decode
    ids = tokens(model, batch, 1)

    def step() -> Any:
        return model(ids, past_key_values=cache).logits

    row = f"decode {batch} x {length}"
    speeds = {f"{row} eager": batch * 1e3 / median_ms(step, model.device, rounds)}
    if model.device.type != "cuda":
        return speeds, "no CUDA device"
    try:
        replay = CudaGraphTimer().capture([step], 1)
        speeds[f"{row} graph"] = batch * 1e3 / median_ms(replay, model.device, rounds)
    except Exception as error:  # the cache of a sliding layer copies from the host
        return speeds, reason(error)
    return speeds, None


# ---- record


def run_family(label: str, device: torch.device, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Measures one model and prints what it finds as it goes."""
    model = build(FAMILIES[label], device)
    found, excluded = errors(model, sizes)
    row: dict[str, Any] = {"name": label, "error": found, "reasons": excluded, "speed": {}}
    _say(f"{label}: error of logits " + ", ".join(f"{name} {value:.2e}" for name, value in found.items()))
    cache: Any = None
    for name in IMPLEMENTATIONS:
        if name in excluded:
            _say(f"{label}: {name}: {excluded[name]}")
            continue
        speeds: dict[str, float] = {}
        row["speed"][name] = speeds
        try:
            speeds |= prefill_speeds(model, name, sizes, rounds)
            cache = cache or filled_cache(model, sizes, rounds)
            decoded, why = decode_speeds(model, name, cache, sizes, rounds)
            speeds |= decoded
        except Exception as error:  # out of memory, or a kernel failed: other implementations stay valid
            why = reason(error)
        if why is not None:
            row["reasons"][f"{name}, {'decode graph' if speeds else 'speed'}"] = why
        _say(f"{label}: {name} " + ", ".join(f"{key}: {value:.0f} tokens/s" for key, value in speeds.items()))
    return row


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = program.parser(PROGRAM, __doc__, ROUNDS)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), metavar="MODEL", help="models (default: all)")
    options = parser.parse_args(argv)
    device = program.gpu("transformers")
    from cute_attn.integrations.transformers import register

    register()
    record: dict[str, Any] = {
        **program.head(PROGRAM, argv, transformers=importlib.metadata.version("transformers")),
        "transformers": [],
        "failed_rows": {},
    }
    for label in (name for name in FAMILIES if name in options.only):
        try:
            record["transformers"].append(run_family(label, device, Sizes(), options.rounds))
        except Exception as error:  # rows of other models stay valid
            record["failed_rows"][label] = reason(error)
            _say(f"{label}: {record['failed_rows'][label]}")
        torch.cuda.empty_cache()
        save(record, options.out)
    print(markdown(record))


if __name__ == "__main__":
    main()
