"""Compiles, with or without a GPU, every kernel that the single-request matrix launches, XQA's tests, or appends.

    python -m tests.gpu.bundle DIR [--arch sm_90a] [--random 200] [--jobs 2] [--xqa | --append]

Then, where the GPU is: CUTE_ATTN_BUNDLE=DIR CUTE_ATTN_DISABLE_JIT=1 python -m pytest tests/gpu
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path

import torch

from cute_attn.kernels.append.spec import AppendSpec
from cute_attn.kernels.fa2.host import variant as fa2_variant
from cute_attn.kernels.programs import program
from cute_attn.kernels.xqa.host.variant import specs as xqa_specs
from cute_attn.problem import Features
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch, named
from cute_attn.runtime.spec import KernelSpec
from tests.gpu import test_matrices as matrices
from tests.gpu import test_xqa as functions
from tests.support.batch_case import features as batch_features
from tests.support.case import Case, features
from tests.support.matrix import FULL, SMALL, random_case
from tests.support.xqa_batches import CUDA, random_batches
from tests.support.xqa_batches import SMALL as SMALL_BATCHES
from tests.support.xqa_case import DTYPES, XqaCase

QUANTISED = ("nvfp4", "float8_e4m3fn", "float8_e5m2")


def kernels(cases: Iterable[Case], arch: Arch) -> list[KernelSpec]:
    specs: dict[KernelSpec, None] = {}
    for case in cases:
        specs.update(dict.fromkeys(fa2_variant.specs(features(case, torch.device("cuda", 0)), arch)))
    return list(specs)


def xqa_kernels(random: int, arch: Arch) -> list[KernelSpec]:
    """Of XQA in `test_xqa.py` and `test_matrices.py`, with so many random problems each."""
    asked = [(functions.case_of(functions.KERNELS[i % len(functions.KERNELS)], i)) for i in range(random)]
    asked += [*functions.LARGE, *functions.GRAPHED, *functions.PRODUCED]
    calls = map(of_function, asked)
    specs = dict.fromkeys(kernel for of, qo_len in calls for kernel in xqa_specs(of, arch, qo_len))
    batches = [*SMALL_BATCHES, *matrices.LARGE_DECODE, *matrices.GRAPHED["xqa"]]
    for first in range(0, random, matrices.CHUNK):
        batches += itertools.islice(random_batches(first, 3000, 12), matrices.CHUNK)
    for batch in batches:
        qo_len = batch.qo_lens[0] if batch.qo_lens else 1
        specs.update(dict.fromkeys(xqa_specs(batch_features(batch, CUDA), arch, qo_len)))
    for single in matrices.SINGLE_DECODE:
        specs.update(dict.fromkeys(xqa_specs(features(single, CUDA), arch, 1)))
    return list(specs)


def of_function(case: XqaCase) -> tuple[Features, int]:
    """Features of a call of the function, and its query tokens per request."""
    q_dtype = DTYPES[case.q]
    asked = Features(
        *(CUDA, q_dtype, DTYPES[case.kv], DTYPES[case.out] if case.out else q_dtype),
        *(*case.heads, case.head_dim, case.head_dim),
        kv_block_scales=case.kv == "nvfp4",
        draft_mask=case.mask,
    )
    return asked, case.q_len


def append_kernels() -> list[KernelSpec]:
    """Of `test_append.py`."""
    specs: list[KernelSpec] = [AppendSpec(access=n, per_thread=1) for n in (1, 2, 4, 8, 16)]
    specs.append(AppendSpec())
    for dtype, size in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        for stored, slots in (("nvfp4", "pages"), ("nvfp4", "mapped"), *((kind, "rows") for kind in QUANTISED)):
            specs += [AppendSpec(stored, dtype, slots, access, 1) for access in (size, 16)]
        specs += [AppendSpec("nvfp4", dtype, slots) for slots in ("pages", "mapped")]
    return specs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--random", type=int, default=200, help="random cases to cover, by seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--xqa", action="store_true", help="the kernels of XQA's tests instead")
    parser.add_argument("--append", action="store_true", help="the kernels that append to caches instead")
    options = parser.parse_args()
    if options.xqa or options.append:
        specs = append_kernels() if options.append else xqa_kernels(options.random, named(options.arch))
        print(f"{len(specs)} kernels")
        artifacts.write_bundle(options.directory, {options.arch: specs}, program, options.jobs, None)
        return
    cases = [*SMALL, *FULL, *(random_case(seed) for seed in range(options.random))]
    specs = kernels(cases, named(options.arch))
    print(f"{len(cases)} cases, {len(specs)} kernels")
    artifacts.write_bundle(options.directory, {options.arch: specs}, program, options.jobs, None)


if __name__ == "__main__":
    main()
