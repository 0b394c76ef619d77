"""Compiles, on a machine with or without a GPU, every kernel that the single-request matrix launches.

    python -m tests.gpu.bundle DIR [--arch sm_90a] [--random 200] [--jobs 2]

Then, where the GPU is: CUTE_ATTN_BUNDLE=DIR CUTE_ATTN_DISABLE_JIT=1 python -m pytest tests/gpu
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch

from cute_attn.backends import fa2
from cute_attn.kernels.spec import KernelSpec
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch, named
from tests.case import features
from tests.matrix import FULL, SMALL, Case, random_case


def kernels(cases: Iterable[Case], arch: Arch) -> list[KernelSpec]:
    specs: dict[KernelSpec, None] = {}
    for case in cases:
        specs.update(dict.fromkeys(fa2.specs(features(case, torch.device("cuda", 0)), arch)))
    return list(specs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--random", type=int, default=200, help="random cases to cover, by seed")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    cases = [*SMALL, *FULL, *(random_case(seed) for seed in range(options.random))]
    specs = kernels(cases, named(options.arch))
    print(f"{len(cases)} cases, {len(specs)} kernels")
    artifacts.write_bundle(options.directory, {options.arch: specs}, options.jobs, None)


if __name__ == "__main__":
    main()
