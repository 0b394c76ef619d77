"""Kernels that the wheel's interface chooses for long dense problems, and their variants."""

from __future__ import annotations

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
    """Returns kernels of full attention, by name, that differ from the choice in one thing at a time: how often the
    exponential is a polynomial, and one CTA a tile."""
    d, dv = head_dims
    if arch == "sm_90a" or d != dv or d > 128:
        return {}
    one = Kernel(arch, d, False, 1, 2, "s")
    found = {} if d == 64 else {"1 CTA": one}
    found["1 CTA, no polynomial"] = Kernel(arch, d, False, 1, 2, "s", d, 0)
    found["1 CTA, every 8th group"] = Kernel(arch, d, False, 1, 2, "s", d, 8)
    return found
