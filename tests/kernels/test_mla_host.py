"""Tiles and shared memory of the kernel for latent attention."""

from __future__ import annotations

import pytest

from cute_attn.kernels.mla.smem import HopperMlaMemory, MlaMemory
from cute_attn.kernels.mla.spec import CacheForm, HopperMlaSpec
from cute_attn.kernels.mla.tiles import choose, choose_tile
from cute_attn.runtime.arch import ARCHS, Arch, named

NARROW = "float8_e4m3fn"
FORMS = (
    *(CacheForm(), CacheForm(rope_bits=0), CacheForm(NARROW, 8), CacheForm(NARROW, 0)),
    *(CacheForm(NARROW, 8, True), CacheForm(NARROW, 0, True), CacheForm(NARROW, 16, True)),
)
# What GPUs of compute capability 8.6 and 8.9 have, which run the cubins of sm_80.
SMALL_AMPERE = named("sm_80")._replace(smem_limit=named("sm_120a").smem_limit)


@pytest.mark.parametrize("arch", [*ARCHS.values(), SMALL_AMPERE], ids=lambda arch: f"{arch.name}-{arch.smem_limit}")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 33, 64, 65, 1024])
def test_tiles_fit(rows: int, form: CacheForm, arch: Arch) -> None:
    spec = choose_tile("bfloat16", form, rows, arch)
    assert MlaMemory(spec).bytes <= arch.smem_limit
    most = 64 if arch.smem_limit > SMALL_AMPERE.smem_limit else 32
    assert spec.rows == next((n for n in (16, 32, 64) if n >= min(rows, most)), 64)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_hopper(form: CacheForm) -> None:
    """One kernel for all numbers of rows. The registers of all threads are at most those that a launch of the kernel
    gets, which ptxas rounds down to a multiple of 8 per thread."""
    arch = named("sm_90a")
    spec = choose("bfloat16", form, 1, arch)
    assert isinstance(spec, HopperMlaSpec)
    assert choose("bfloat16", form, 1024, arch) == spec
    memory = HopperMlaMemory(spec)
    assert memory.q % 1024 == memory.p % 1024 == memory.slot_bytes % 1024 == 0  # the swizzle repeats
    assert memory.bytes <= arch.smem_limit
    producers, products = spec.registers
    at_launch = 65536 // spec.threads // 8 * 8
    assert producers * (spec.threads - spec.mma_threads) + products * spec.mma_threads <= at_launch * spec.threads
