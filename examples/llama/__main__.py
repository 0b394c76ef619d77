"""Serve random prompts with a small Llama of random weights, and print tokens per second.

Run it from the root of a checkout, as a module, in an environment where cute_attn is installed:

    python -m examples.llama --check                        on a CPU or a GPU, in seconds
    python -m examples.llama --preset 8b-4-layers --check   on a GPU: four layers of Llama-3-8B, prompts of up to 4096
    python -m examples.llama --kv-dtype fp8 --check         with a cache of half the size
    python -m examples.llama --no-graphs                    without CUDA graphs for decode steps

With --check, every token is compared with the one that attention written out in torch gives; the exit code is 1 if one
differs by more than rounding. Nothing is downloaded. `examples/llama/__init__.py` tells in which order to read.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch

from cute_attn.cli.terminal import ProgressBar

from .batch import Request
from .cache import E4M3, PagedCache
from .eager import Verdict, check, fp8_scales
from .engine import Engine, Speed, serve
from .model import Config, Llama

PRESETS = ("small", "8b-4-layers")
SIZES = {  # option: what it is, and its value in each preset
    "layers": ("layers of the model", 2, 4),
    "hidden": ("width of the model", 256, 4096),
    "heads": ("query heads", 8, 32),
    "kv_heads": ("heads of keys and values", 2, 8),
    "vocab": ("size of the vocabulary", 512, 128_256),
    "requests": ("number of requests", 8, 64),
    "prompt_len": ("tokens of the longest prompt", 100, 4096),
    "new_tokens": ("tokens generated per request", 16, 128),
    "pages": ("pages of the cache", 24, 8192),
    "page_size": ("tokens per page", 16, 16),
    "max_batch": ("most requests that run at a time", 6, 64),
    "chunk_tokens": ("most prompt tokens per step", 64, 8192),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> int:
    try:
        return run(arguments())
    except ValueError as error:  # sizes that do not fit together
        print(f"python -m examples.llama: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    config = Config(options.layers, options.hidden, options.heads, options.kv_heads, options.vocab)
    model = Llama(config, dtype, device, options.seed)
    scales = fp8_scales(model) if options.kv_dtype == "fp8" else None
    cache = PagedCache(config, options.pages, options.page_size, E4M3 if scales else dtype, device, scales)
    graphs = device.type == "cuda" and not options.no_graphs
    engine = Engine(model, cache, options.max_batch, options.chunk_tokens, graphs)
    decode = "CUDA graphs" if graphs else "no CUDA graphs"
    print(f"{config}\n{dtype} on {device}, {decode}, cache of {options.pages} pages of {cache.dtype}")

    requests = random_requests(options)
    if device.type == "cuda":  # compile and load the kernels of these prompts before anything is timed
        serve(engine, [Request(request.prompt, 2, request.arrival) for request in requests])
        engine.prefilled, engine.decoded = Speed(), Speed()
    with ProgressBar(options.requests * options.new_tokens) as bar:  # on stderr, if that is a terminal
        steps = serve(engine, requests, lambda new_tokens: bar.step(f"{len(engine.waiting)} waiting", new_tokens))

    print(f"{len(requests)} requests in {steps} steps, {cache.num_free} of {cache.num_pages} pages free again")
    for name, speed in (("prefill", engine.prefilled), ("decode", engine.decoded)):
        print(f"{name:8}{speed.tokens:8} tokens {speed.seconds:8.3f} s {speed.tokens_per_second:10.0f} tokens/s")
    return report(check(model, cache, requests)) if options.check else 0


def report(verdict: Verdict) -> int:
    """Print how the tokens compare with those of eager attention. Return the exit code."""
    print(f"check: {verdict.equal} of {verdict.tokens} tokens are those of eager attention", end="")
    if verdict.equal < verdict.tokens:
        print(f", the others within {verdict.worst:.1e} of its largest logit", end="")
    print(f": {'ok' if verdict.passed else 'WRONG'}")
    return 0 if verdict.passed else 1


def arguments() -> argparse.Namespace:
    """Parse the command line. Sizes that are not given are those of the preset."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default=PRESETS[0], help="sizes (default: small)")
    for name, (text, *values) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=f"{text} (presets: {values})")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and activations")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="of the cache; auto: as --dtype")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--check", action="store_true", help="compare the tokens with those of eager attention")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs for decode steps")
    options = parser.parse_args()
    for name, (_, *values) in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, values[PRESETS.index(options.preset)])
    return options


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def random_requests(options: argparse.Namespace) -> list[Request]:
    """Draw prompts of 1 to `prompt_len` tokens; one comes in every other step."""
    generator = random.Random(options.seed)
    lengths = [generator.randint(1, options.prompt_len) for _ in range(options.requests)]
    prompts = [[generator.randrange(options.vocab) for _ in range(length)] for length in lengths]
    return [Request(prompt, options.new_tokens, arrival=2 * i) for i, prompt in enumerate(prompts)]


if __name__ == "__main__":
    raise SystemExit(main())
