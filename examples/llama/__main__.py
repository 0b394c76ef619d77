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

import torch

from .cache import E4M3, PagedCache
from .command import SERVED_SIZES, Program, Served, main
from .eager import attention_of, fp8_scales
from .engine import Engine
from .model import Config, Llama

SIZES = {  # option: what it is, and its value in each preset
    "layers": ("layers of the model", 2, 4),
    "hidden": ("width of the model", 256, 4096),
    "heads": ("query heads", 8, 32),
    "kv_heads": ("heads of keys and values", 2, 8),
    "vocab": ("size of the vocabulary", 512, 128_256),
    **SERVED_SIZES,
}


def build(options: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Served:
    config = Config(options.layers, options.hidden, options.heads, options.kv_heads, options.vocab)
    model = Llama(config, dtype, device, options.seed)
    scales = fp8_scales(model) if options.kv_dtype == "fp8" else None
    cache = PagedCache(config, options.pages, options.page_size, E4M3 if scales else dtype, device, scales)
    return Served(model, cache, Engine, attention_of(cache))


if __name__ == "__main__":
    raise SystemExit(main(Program("examples.llama", __doc__, ("small", "8b-4-layers"), SIZES, ("auto", "fp8"), build)))
