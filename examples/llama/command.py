"""The command line of engines: serve random prompts, print tokens per second, check the tokens."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.cli.terminal import ProgressBar

from .batch import Request
from .cache import PagedCache
from .eager import Verdict, compare
from .engine import Engine, Speed, serve
from .model import Llama

SERVED_SIZES = {  # option: what it is, and its value in each of two presets
    "requests": ("number of requests", 8, 64),
    "prompt_len": ("tokens of the longest prompt", 100, 4096),
    "new_tokens": ("tokens generated per request", 16, 128),
    "pages": ("pages of the cache", 24, 8192),
    "page_size": ("tokens per page", 16, 16),
    "max_batch": ("most requests that run at a time", 6, 64),
    "chunk_tokens": ("most prompt tokens per step", 64, 8192),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Served(NamedTuple):
    """What serves the requests, and the attention written out that checks their tokens."""

    model: Llama
    cache: PagedCache
    engine_type: type[Engine]
    attention: Callable[..., Tensor]


class Program(NamedTuple):
    """An example's command line."""

    name: str  # of its module
    description: str | None
    presets: tuple[str, ...]
    sizes: dict[str, tuple[Any, ...]]
    kv_dtypes: tuple[str, ...]
    build: Callable[[argparse.Namespace, torch.dtype, torch.device], Served]


def main(program: Program) -> int:
    """Run an example. Return the exit code."""
    try:
        return run(program, arguments(program))
    except ValueError as error:  # sizes that do not fit together
        print(f"python -m {program.name}: {error}", file=sys.stderr)
        return 2


def run(program: Program, options: argparse.Namespace) -> int:
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    model, cache, engine_type, attention = program.build(options, dtype, device)
    graphs = device.type == "cuda" and not options.no_graphs
    engine = engine_type(model, cache, options.max_batch, options.chunk_tokens, graphs)
    decode = "CUDA graphs" if graphs else "no CUDA graphs"
    print(f"{model.config}\n{dtype} on {device}, {decode}, cache of {options.pages} pages of {cache.dtype}")

    requests = random_requests(options)
    if device.type == "cuda":  # compile and load the kernels of these prompts before anything is timed
        serve(engine, [Request(request.prompt, 2, request.arrival) for request in requests])
        engine.prefilled, engine.decoded = Speed(), Speed()
    with ProgressBar(options.requests * options.new_tokens) as bar:  # on stderr, if that is a terminal
        steps = serve(engine, requests, lambda new_tokens: bar.step(f"{len(engine.waiting)} waiting", new_tokens))

    print(f"{len(requests)} requests in {steps} steps, {cache.num_free} of {cache.num_pages} pages free again")
    for name, speed in (("prefill", engine.prefilled), ("decode", engine.decoded)):
        print(f"{name:8}{speed.tokens:8} tokens {speed.seconds:8.3f} s {speed.tokens_per_second:10.0f} tokens/s")
    return report(compare(model, attention, requests)) if options.check else 0


def report(verdict: Verdict) -> int:
    """Print how the tokens compare with those of eager attention. Return the exit code."""
    print(f"check: {verdict.equal} of {verdict.tokens} tokens are those of eager attention", end="")
    if verdict.equal < verdict.tokens:
        print(f", the others within {verdict.worst:.1e} of its largest logit", end="")
    print(f": {'ok' if verdict.passed else 'WRONG'}")
    return 0 if verdict.passed else 1


def arguments(program: Program) -> argparse.Namespace:
    """Parse the command line. Sizes that are not given are those of the preset."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program.name}",
        description=program.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=program.presets, default=program.presets[0], help="sizes (default: small)")
    for name, (text, *values) in program.sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=f"{text} (presets: {values})")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and activations")
    parser.add_argument("--kv-dtype", choices=program.kv_dtypes, default="auto", help="of the cache; auto: as --dtype")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--check", action="store_true", help="compare the tokens with those of eager attention")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs for decode steps")
    options = parser.parse_args()
    for name, (_, *values) in program.sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, values[program.presets.index(options.preset)])
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
