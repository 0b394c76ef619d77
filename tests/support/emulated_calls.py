"""Calls outside of the table of backends on the emulator: their kernels, for CPU tensors, on the architecture that is
emulated now.
"""

from __future__ import annotations

import torch

from cute_attn.dispatch import emulator, merge
from cute_attn.emulator import adapter
from cute_attn.errors import ArgumentError
from cute_attn.kernels.append.host import launch
from cute_attn.request.append import Append


def emulated_append(append: Append) -> None:
    """Raises ArgumentError for a request that does not fit the kernel."""
    inputs = {f"rows[{i}]": x for i, x in enumerate(append.rows)}
    inputs |= {f"slots[{i}]": x for i, x in enumerate(append.slots)}
    inputs |= {f"scales[{i}]": x for i, x in enumerate(append.scales) if isinstance(x, torch.Tensor)}
    outputs = {f"caches[{i}]": x for i, x in enumerate(append.caches)}
    outputs |= {f"block_scales[{i}]": x for i, x in enumerate(append.block_scales)}
    with adapter.visible(inputs, outputs):
        written = launch.run(append, emulator.emulated_gpu())
    if not written and append.rows[0].numel() and append.caches[0].numel():
        raise ArgumentError("the append kernel cannot run this request: fp8 needs rows of whole blocks of 16 elements")


def emulated_merge(
    o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, merged: torch.Tensor | None, lse_scale: float
) -> None:
    """Raises ArgumentError for states that do not fit the kernel."""
    if not merge.fits(o, lse, out):
        raise ArgumentError(f"the combine kernel cannot merge states of shape {tuple(o.shape)}")
    outputs = {"out": out} if merged is None else {"out": out, "merged": merged}
    with adapter.visible({"o": o, "lse": lse}, outputs):
        merge.launch(o, lse, out, merged, lse_scale, emulator.emulated_gpu())
