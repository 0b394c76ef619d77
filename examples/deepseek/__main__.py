"""Serve random prompts with a small model with latent attention (MLA), and print tokens per second.

Run it from the root of a checkout, as a module, in an environment where cute_attn is installed:

    python -m examples.deepseek --check                        on a CPU or a GPU, in seconds
    python -m examples.deepseek --preset v3-4-layers --check   on a GPU: 128 heads, prompts of up to 4096

With --check, every token is compared with the one that attention over decompressed keys and values, written out in
torch, gives; the exit code is 1 if one differs by more than rounding. Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from examples.llama.command import SERVED_SIZES, Program, Served, main
from examples.llama.eager import eager

from .cache import LatentCache
from .forward import LatentEngine
from .model import Config, DeepSeek, LatentLayer

SIZES = {  # option: what it is, and its value in each preset
    "layers": ("layers of the model", 2, 4),
    "hidden": ("width of the model", 256, 7168),
    "heads": ("heads", 8, 128),
    "q_rank": ("columns of the latent space of queries", 96, 1536),
    "vocab": ("size of the vocabulary", 512, 129_280),
    **SERVED_SIZES,
}


def build(options: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Served:
    config = Config(options.layers, options.hidden, options.heads, options.q_rank, options.vocab)
    model = DeepSeek(config, dtype, device, options.seed)
    cache = LatentCache(config, options.pages, options.page_size, dtype, device)
    return Served(model, cache, LatentEngine, decompressing)


def decompressing(layer: LatentLayer, q: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
    """Compute attention of one request, written out."""
    return eager(q, *layer.decompressed(latent, k_pe))


if __name__ == "__main__":
    raise SystemExit(main(Program("examples.deepseek", __doc__, ("small", "v3-4-layers"), SIZES, ("auto",), build)))
