"""Serve random prompts with a small Llama of random weights, and print tokens per second.

From the root of a checkout, in an environment where cute_attn is installed:

    python -m examples.llama --check                          a CPU or a GPU, seconds
    python -m examples.llama --preset 8b-4-layers --check     a GPU: layers of Llama-3-8B, 64 requests of up to 4096 tokens
    python -m examples.llama --kv-dtype fp8 --check           half the cache
    python -m examples.llama --no-graphs                      decode steps without CUDA graphs

`--check` compares every token with attention written out in torch; the exit code is 1 if they differ. Nothing is
downloaded. The files of this folder, in reading order: `__init__.py`.
"""

from __future__ import annotations

import argparse
import random

import torch

from cute_attn.cli.terminal import ProgressBar

from .cache import E4M3, PagedCache
from .batch import Request
from .eager import check, fp8_scales
from .engine import Engine, Speed, serve
from .model import Config, Llama

PRESETS = {
    "small": dict(
        layers=2, hidden=256, heads=8, kv_heads=2, vocab=512,
        requests=8, prompt_len=100, new_tokens=16, pages=24, page_size=16, max_batch=6, chunk_tokens=64,
    ),
    "8b-4-layers": dict(
        layers=4, hidden=4096, heads=32, kv_heads=8, vocab=128_256,
        requests=64, prompt_len=4096, new_tokens=128, pages=8192, page_size=16, max_batch=64, chunk_tokens=8192,
    ),
}  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HELP = {
    "layers": "layers of the model",
    "hidden": "width of the model, a multiple of the heads",
    "heads": "query heads",
    "kv_heads": "heads of keys and values",
    "vocab": "size of the vocabulary",
    "requests": "number of requests",
    "prompt_len": "tokens of the longest prompt",
    "new_tokens": "tokens to generate per request",
    "pages": "pages of the cache",
    "page_size": "tokens per page",
    "max_batch": "most requests that run at a time",
    "chunk_tokens": "most prompt tokens per step",
}


def main() -> int:
    options = arguments()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    config = Config(options.layers, options.hidden, options.heads, options.kv_heads, options.vocab)
    model = Llama(config, dtype, device, options.seed)
    scales = fp8_scales(model) if options.kv_dtype == "fp8" else None
    cache = PagedCache(config, options.pages, options.page_size, E4M3 if scales else dtype, device, scales)
    graphs = device.type == "cuda" and not options.no_graphs
    engine = Engine(model, cache, options.max_batch, options.chunk_tokens, graphs)
    print(f"{config}\n{options.dtype} on {device}, cache of {cache.num_pages} pages in {cache.dtype}, graphs: {graphs}")

    requests = random_requests(options)
    if device.type == "cuda":  # compile and load the kernels of these prompts before anything is timed
        serve(engine, [Request(request.prompt, 2, request.arrival) for request in requests])
        engine.prefilled, engine.decoded = Speed(), Speed()
    with ProgressBar(sum(request.new_tokens for request in requests)) as bar:
        steps = serve(engine, requests, lambda new_tokens: bar.step(f"{len(engine.waiting)} waiting", new_tokens))

    print(f"{len(requests)} requests in {steps} steps; {cache.num_free} of {cache.num_pages} pages are free again")
    for name, speed in (("prefill", engine.prefilled), ("decode", engine.decoded)):
        print(f"{name:8}{speed.tokens:8} tokens {speed.seconds:8.3f} s {speed.tokens_per_second:10.0f} tokens/s")
    if not options.check:
        return 0
    verdict = check(model, cache, requests)
    print(f"check: {verdict.equal} of {verdict.tokens} tokens are those of eager attention", end="")
    near = f"; its logits of the others are at most {verdict.worst:.1e} below its largest"
    print(f"{near if verdict.worst else ''} ({'ok' if verdict.passed else 'WRONG'})")
    return 0 if verdict.passed else 1


def arguments() -> argparse.Namespace:
    """Parse the command line. What is not given comes from the preset."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes that are not given (default: small)")
    for name, text in HELP.items():
        defaults = ", ".join(str(preset[name]) for preset in PRESETS.values())
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{text} (presets: {defaults})")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and activations")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="of the cache; auto: as --dtype")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--check", action="store_true", help="compare the tokens with eager attention")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs for decode")
    options = parser.parse_args()
    for name, value in PRESETS[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def random_requests(options: argparse.Namespace) -> list[Request]:
    """Draw prompts of 1 to `prompt_len` tokens; one comes in every other step."""
    generator = random.Random(options.seed)
    lengths = [generator.randint(1, options.prompt_len) for _ in range(options.requests)]
    prompts = [[generator.randrange(options.vocab) for _ in range(length)] for length in lengths]
    return [Request(prompt, options.new_tokens, arrival=2 * i) for i, prompt in enumerate(prompts)]


if __name__ == "__main__":
    raise SystemExit(main())
