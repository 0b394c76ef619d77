"""Kernels that the wheel's interface chooses for long dense problems, and their variants."""

from __future__ import annotations

import dataclasses

from perf.flash_attn_4.kernel import Kernel

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def choose(arch: str, head_dims: tuple[int, int], causal: bool) -> Kernel:
    """Returns the forward kernel for 16-bit tensors: two CTAs a tile at head dim 256, and without a mask from 128 on;
    one query tile and two tiles of scores at 256; persistent CTAs without a mask."""
    d, dv = head_dims
    if arch == "sm_90a":
        return Kernel(arch, d, causal, 1, head_dim_vo=0 if d == dv else dv)
    wide = dv == 256
    pair = wide or (d >= 128 and not causal)
    traits = ("p" if pair else "") + ("" if causal else "s") + ("t" if wide else "")
    return Kernel(arch, d, causal, 1, 1 if wide else 2, traits, 0 if d == dv else dv)


def variants(arch: str, head_dims: tuple[int, int]) -> dict[str, Kernel]:
    """Returns kernels of full attention, by name, that are not the choice: CTAs of one tile, one CTA a tile, and other
    shares of polynomials with it."""
    d, dv = head_dims
    if arch == "sm_90a":
        return {}
    chosen = choose(arch, head_dims, False)
    found = {"not persistent": dataclasses.replace(chosen, traits=chosen.traits.replace("s", ""))}
    if d != dv or d > 128:
        return found
    if d > 64:
        found["1 CTA"] = Kernel(arch, d, False, 1, 2, "s")
    found["1 CTA, no polynomial"] = Kernel(arch, d, False, 1, 2, "s", d, 0)
    found["1 CTA, every 8th group"] = Kernel(arch, d, False, 1, 2, "s", d, 8)
    return found
