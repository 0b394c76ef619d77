"""Small problems through every family of kernels, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
        --kernel-name kns=cute_attn python -m tests.gpu.sanitize [WORD ...]

Problems of fa2 and xqa, and of fa3 or fa4 where the GPU has it; only those whose names contain all of the words. The
results are compared on the CPU: the only kernels that the tool has to watch are ours. Exit code 1 where one is wrong,
2 where no name contains the words.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_attn import xqa_batch_decode_with_kv_cache
from cute_attn.kernels.xqa.spec import XqaSpec
from perf import rings
from tests.support import batch_case, xqa_case
from tests.support.batch_case import E4M3, BatchCase, decode, dims, heads, paged, ragged
from tests.support.fp8_case import PLAIN, SIGNED, fp8, single
from tests.support.matrix import ALIBI, BF16, CAUSAL, CUSTOM, PACKED, prefill
from tests.support.right import Solver, assert_right
from tests.support.xqa_case import XqaCase

Solve = Callable[[], None]  # raises AssertionError with what is wrong
# Batches whose lengths, and for the shortest numbers of rows, give them tiles of their own (`fa3.tiles.SIZED`).
LONGER, IMAGES = ((150, 0, 250), (1100, 20, 64)), ((197,) * 180, (197,) * 180)
SIZED = {
    "d96": ragged(*LONGER, mask="causal", **heads(2, 1), **dims(96)),
    "d72": ragged(*LONGER, dtype="bfloat16", **heads(2, 1), **dims(72)),
    "d160": ragged(*LONGER, mask="causal", **heads(2, 1), **dims(160)),
    "d192": ragged(*LONGER, dtype="bfloat16", **heads(2, 1), **dims(192)),
    "d64 images": ragged(*IMAGES, dtype="bfloat16", **heads(1, 1), **dims(64)),
    "d80 images": ragged(*IMAGES, **heads(1, 1), **dims(80)),
}


def solve(problem: BatchCase, backend: str) -> None:
    """Solve a problem on the GPU, and compare on the CPU."""
    out, lse = Solver(problem, "cuda", backend=backend).call()
    assert_right(problem, batch_case.make(problem), out.cpu(), None if lse is None else lse.cpu())


def function(problem: XqaCase) -> None:
    built = xqa_case.build(problem, "cuda")
    wrong = built.check(*xqa_batch_decode_with_kv_cache(**built.arguments))
    assert not wrong, wrong


def ring(text: str, problem: XqaCase) -> None:
    """On a ring of the decode kernel that no table has."""
    kv_dtype = "float8_e4m3fn" if problem.kv == "e4m3" else ""
    with rings.force_spec(rings.ring(text, XqaSpec("bfloat16", kv_dtype, "bfloat16", problem.head_dim, cols=16))):
        function(problem)


def for_every_gpu() -> dict[str, Solve]:
    """Problems of fa2 and xqa, by name. Rings turn over in all of them."""
    d128, bf16 = dims(128), "bfloat16"
    keys_of_8_bits: dict[str, Any] = {"kv_dtype": E4M3, "dtype": bf16}
    window: dict[str, Any] = {"window_left": 127, "sinks": True, **dims(64)}
    many = (20000, *[5] * 40)  # more segments than clusters take: shares of single CTAs
    planned: dict[str, BatchCase] = {
        "fa2 single": prefill(130, 300, (2, 1), 128, **CAUSAL),
        "fa2 d512": prefill(130, 300, (2, 1), 512, **CAUSAL),
        "fa2 d512 pages": decode((700, 33, 0, 64), **keys_of_8_bits, **heads(8, 1), **dims(512)),
        "fa2 d72": prefill(130, 300, (2, 1), 72, **CAUSAL),
        "xqa bf16": decode((700, 33, 0, 64), dtype=bf16, **heads(8, 2), **d128),
        "xqa bf16 split": decode(many, dtype=bf16, **heads(8, 2), **d128),
        "xqa fp8": decode((700, 33, 0, 64), **keys_of_8_bits, **heads(8, 2), **d128),
        "xqa fp8 split": decode(many, **keys_of_8_bits, **heads(8, 2), **d128),
        "xqa nvfp4": decode((700, 33, 0), kv_dtype="nvfp4", kv_layout="HND", **heads(8, 2), **d128),
        "xqa bf16 one": decode((1900,), dtype=bf16, **heads(32, 8), **d128),
        "xqa bf16 one long": decode((20000,), dtype=bf16, **heads(8, 2), **d128),
        "xqa fp8 one": decode((1900,), **keys_of_8_bits, **heads(32, 8), **d128),
        "xqa fp8 one long": decode((20000,), **keys_of_8_bits, **heads(8, 2), **d128),
        "xqa fp8 even": decode((70,) * 256, **keys_of_8_bits, **heads(8, 8), **d128),
        "xqa bf16 windows": decode((700, 5, 0), dtype=bf16, **heads(16, 2), **window),
        "xqa fp8 windows": decode((700, 5, 0), **keys_of_8_bits, **heads(16, 2), **window),
        "xqa fp8 windows heads": decode((700, 5, 0, 133) * 12, **keys_of_8_bits, **heads(32, 4), **window),
    }
    wide = XqaCase((300, 0, 77), kv="e4m3", heads=(64, 8), page_size=64, sinks=True)
    tree = XqaCase((300, 40, 9000), kv="e4m3", q_len=4, mask=True, window_left=200, out="e4m3")
    return {name: functools.partial(solve, problem, name.split()[0]) for name, problem in planned.items()} | {
        "xqa fp8 heads": lambda: ring("8x2x16x1h", wide),
        "xqa bf16 heads": lambda: ring("4x2x16x1h", XqaCase((300, 0, 77), heads=(32, 8), q_len=2, kv_layout="HND")),
        "xqa tree": lambda: function(tree),
    }


def persistent(backend: str) -> dict[str, Solve]:
    """Problems of fa3 or fa4, by name. "tiles" have more query tiles than a GPU has multiprocessors, so that persistent
    CTAs go from one to the next.
    """
    d128, bf16 = dims(128), "bfloat16"
    mixed = (150, 0, 37, 1), (500, 20, 64, 0)
    found: dict[str, BatchCase] = {
        "d80 causal": prefill(400, 700, (2, 1), 80, **CAUSAL),
        "d64 causal": prefill(400, 700, (2, 1), 64, **CAUSAL),
        "d64 full tiles": prefill(700, 300, (36, 9), 64, **BF16),
        "d128 causal tiles": prefill(500, 600, (36, 9), 128, **CAUSAL, **BF16),
        "d128 full": prefill(200, 600, (2, 2), 128),
        "d256 causal": prefill(150, 400, (2, 1), 256, **CAUSAL, **BF16),
        "d256 full": prefill(150, 400, (2, 1), 256, **BF16),
        "d64 window": prefill(400, 700, (16, 2), 64, **CAUSAL, **BF16, window_left=90),
        "d192 window": prefill(150, 400, (2, 1), (192, 128), **CAUSAL, window_left=90),
        # Scores far above the anchors of earlier tiles, whose tiles are recomputed.
        "d64 leap": prefill(100, 700, (2, 2), 64, **CAUSAL, spike=28.0),
        "d128 leap": prefill(100, 700, (2, 2), 128, **CAUSAL, **BF16, spike=28.0),
        "d256 leap": prefill(100, 700, (2, 2), 256, **CAUSAL, spike=28.0),
        "d128 leap tiles": prefill(500, 700, (36, 36), 128, **CAUSAL, spike=28.0),
        "bits": prefill(70, 500, (2, 1), 64, **PACKED, logits_soft_cap=3.0),
        "split": prefill(3, 9000, (8, 2), 128, **BF16, **CAUSAL),
        "batch split": paged((5, 9), (9000, 300), mask="causal", page_size=5, **heads(2, 1)),
        "ragged": ragged(*mixed, mask="causal", dtype=bf16, **heads(36, 9), **d128),
        "fp8 ragged": ragged(*mixed, kv_dtype=E4M3, dtype=bf16, **heads(4, 2), **dims(256)),
        **{f"sized {name}": problem for name, problem in SIZED.items()},
    }
    for size in (1, 5, 16, 64):
        for name, kv_dtype in (("", {}), ("fp8 ", {"kv_dtype": E4M3})):
            problem = paged(*mixed, size, mask="causal", dtype=bf16, **kv_dtype, **heads(36, 9), **d128)
            found[f"{name}pages {size}"] = problem
    for case in (
        single(500, 600, (36, 9), **CAUSAL, **SIGNED),
        single(70, 400, spike=28.0, **PLAIN),
        fp8((70, 0, 37, 1), (300, 20, 64, 0), **CAUSAL),
        fp8((150, 0, 3, 1), (300, 20, 64, 0), (4, 1), 16, **CAUSAL),
        fp8((70,), (400,), page_size=64, window_left=90),
        fp8((5,), (9000,), page_size=16, **CAUSAL),
        fp8((70, 200), (300, 900), **CAUSAL, head_dim=64),
        fp8((150,), (1700,), (2, 2), page_size=16, head_dim=256),
        single(70, 1700, **PLAIN, **CUSTOM, logits_soft_cap=5.0, **ALIBI),
    ):
        found[f"fp8 {case.id}"] = case
    return {f"{backend} {name}": functools.partial(solve, problem, backend) for name, problem in found.items()}


def problems(capability: tuple[int, int]) -> dict[str, Solve]:
    """The problems of a GPU with this compute capability, by name."""
    backend = {9: "fa3", 10: "fa4"}.get(capability[0])
    return for_every_gpu() | (persistent(backend) if backend else {})


def selected(words: Sequence[str], known: dict[str, Solve]) -> dict[str, Solve]:
    """The problems whose names contain all of the words; raises ValueError where there is none."""
    found = {name: solve for name, solve in known.items() if all(word in name.split() for word in words)}
    if not found:
        raise ValueError(f"no problem is named {' '.join(words)!r}; there are:\n  " + "\n  ".join(known))
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a word of a problem's name; default: all problems")
    words = parser.parse_args(arguments).words
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)  # names to be told
    try:
        chosen = selected(words, problems(capability))
    except ValueError as unknown:
        parser.error(str(unknown))
    all_right = True
    for name, solved in chosen.items():
        try:
            solved()
        except AssertionError as wrong:
            all_right = False
            print(f"{name}: {wrong}", flush=True)
        else:
            print(f"{name}: right", flush=True)
    return int(not all_right)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
