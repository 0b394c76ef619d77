"""Small problems through every family of kernels, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
        --kernel-name kns=cute_attn python -m tests.gpu.sanitize [WORD ...]

Problems of fa2 and xqa, and of fa3 or fa4 where the GPU has it; only those whose names contain all of the words. The
results are compared on the CPU: the only kernels that the tool has to watch are ours. Exit code 1 where one is wrong,
2 where no name contains the words.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_attn import single_prefill_with_kv_cache, xqa_batch_decode_with_kv_cache
from cute_attn.kernels.xqa.spec import XqaSpec
from perf import rings
from tests.support import batch_case, fp8_case, xqa_case
from tests.support.batch_case import E4M3, BatchCase, decode, dims, heads, paged, ragged
from tests.support.fp8_case import Fp8Case
from tests.support.matrix import BF16, CAUSAL, PACKED, prefill
from tests.support.right import Solver
from tests.support.xqa_case import XqaCase

Solve = Callable[[str], str]  # on a device; what is wrong, or ""
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


def batch(problem: BatchCase, backend: str) -> Solve:
    def solve(device: str) -> str:
        out, lse = Solver(problem, device, backend=backend).call()
        return batch_case.check(problem, batch_case.make(problem), out.cpu(), None if lse is None else lse.cpu()).detail

    return solve


def narrow(problem: Fp8Case, backend: str) -> Solve:
    def solve(device: str) -> str:
        out, lse = fp8_case.call(problem, fp8_case.make(problem, device), backend)
        try:
            fp8_case.check(problem, fp8_case.make(problem, "cpu"), out.cpu(), lse.cpu())
        except AssertionError as wrong:
            return str(wrong)
        return ""

    return solve


def function(problem: XqaCase) -> Solve:
    def solve(device: str) -> str:
        built = xqa_case.build(problem, device)
        out, lse = xqa_batch_decode_with_kv_cache(**built.arguments)
        return built.check(out, lse)

    return solve


def ring(text: str, problem: XqaCase) -> Solve:
    """On a ring of the decode kernel that no table has."""
    kv_dtype = "float8_e4m3fn" if problem.kv == "e4m3" else ""
    spec = rings.ring(text, XqaSpec("bfloat16", kv_dtype, "bfloat16", problem.head_dim, cols=16))

    def solve(device: str) -> str:
        with rings.force_spec(spec):
            return function(problem)(device)

    return solve


def leaping(head_dim: int, dtype: torch.dtype, qo_len: int, num_heads: int, backend: str) -> Solve:
    """Scores far above the anchors of earlier tiles, whose tiles are recomputed."""

    def solve(device: str) -> str:
        generator = torch.Generator().manual_seed(head_dim)
        q, k, v = (torch.randn(n, num_heads, head_dim, generator=generator).to(dtype) for n in (qo_len, 700, 700))
        k[:100] *= 300  # seen last
        moved = (x.to(device) for x in (q, k, v))
        found = single_prefill_with_kv_cache(*moved, causal=True, return_lse=True, backend=backend)
        expected = single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True, backend="reference")
        close = (torch.allclose(a.cpu(), b, 2e-2, 2e-2) for a, b in zip(found, expected, strict=True))
        return "" if all(close) else "out or lse is off by more than 2e-2"

    return solve


def for_every_gpu() -> dict[str, Solve]:
    """Problems of fa2 and xqa, by name. Rings turn over in all of them."""
    d128, bf16, fa2, xqa = dims(128), "bfloat16", "fa2", "xqa"
    window: dict[str, Any] = {"window_left": 127, "sinks": True, **dims(64)}
    return {
        "fa2 single": batch(prefill(130, 300, (2, 1), 128, **CAUSAL), fa2),
        "fa2 d512": batch(prefill(130, 300, (2, 1), 512, **CAUSAL), fa2),
        "fa2 d512 pages": batch(decode((700, 33, 0, 64), kv_dtype=E4M3, dtype=bf16, **heads(8, 1), **dims(512)), fa2),
        "fa2 d72": batch(prefill(130, 300, (2, 1), 72, **CAUSAL), fa2),
        "xqa bf16": batch(decode((700, 33, 0, 64), dtype=bf16, **heads(8, 2), **d128), xqa),
        "xqa bf16 split": batch(decode((20000, 5), dtype=bf16, **heads(8, 2), **d128), xqa),
        "xqa fp8": batch(decode((700, 33, 0, 64), kv_dtype=E4M3, dtype=bf16, **heads(8, 2), **d128), xqa),
        "xqa fp8 split": batch(decode((20000, 5), kv_dtype=E4M3, dtype=bf16, **heads(8, 2), **d128), xqa),
        "xqa nvfp4": batch(decode((700, 33, 0), kv_dtype="nvfp4", kv_layout="HND", **heads(8, 2), **d128), xqa),
        "xqa bf16 one": batch(decode((1900,), dtype=bf16, **heads(32, 8), **d128), xqa),
        "xqa bf16 one long": batch(decode((20000,), dtype=bf16, **heads(8, 2), **d128), xqa),
        "xqa fp8 one": batch(decode((1900,), kv_dtype=E4M3, dtype=bf16, **heads(32, 8), **d128), xqa),
        "xqa fp8 one long": batch(decode((20000,), kv_dtype=E4M3, dtype=bf16, **heads(8, 2), **d128), xqa),
        "xqa fp8 even": batch(decode((70,) * 256, kv_dtype=E4M3, dtype=bf16, **heads(8, 8), **d128), xqa),
        "xqa fp8 heads": ring("8x2x16x1h", XqaCase((300, 0, 77), kv="e4m3", heads=(64, 8), page_size=64, sinks=True)),
        "xqa bf16 heads": ring("4x2x16x1h", XqaCase((300, 0, 77), heads=(32, 8), q_len=2, kv_layout="HND")),
        "xqa bf16 windows": batch(decode((700, 5, 0), dtype=bf16, **heads(16, 2), **window), xqa),
        "xqa fp8 windows": batch(decode((700, 5, 0), kv_dtype=E4M3, dtype=bf16, **heads(16, 2), **window), xqa),
        "xqa fp8 windows heads": batch(
            decode((700, 5, 0, 133) * 12, kv_dtype=E4M3, dtype=bf16, **heads(32, 4), **window), xqa
        ),
        "xqa tree": function(XqaCase((300, 40, 9000), kv="e4m3", q_len=4, mask=True, window_left=200, out="e4m3")),
    }


def persistent(backend: str) -> dict[str, Solve]:
    """Problems of fa3 or fa4, by name. "tiles" have more query tiles than a GPU has multiprocessors, so that persistent
    CTAs go from one to the next.
    """
    d128, bf16 = dims(128), "bfloat16"
    mixed = (150, 0, 37, 1), (500, 20, 64, 0)
    found = {
        "d80 causal": batch(prefill(400, 700, (2, 1), 80, **CAUSAL), backend),
        "d64 causal": batch(prefill(400, 700, (2, 1), 64, **CAUSAL), backend),
        "d64 full tiles": batch(prefill(700, 300, (36, 9), 64, **BF16), backend),
        "d128 causal tiles": batch(prefill(500, 600, (36, 9), 128, **CAUSAL, **BF16), backend),
        "d128 full": batch(prefill(200, 600, (2, 2), 128), backend),
        "d256 causal": batch(prefill(150, 400, (2, 1), 256, **CAUSAL, **BF16), backend),
        "d256 full": batch(prefill(150, 400, (2, 1), 256, **BF16), backend),
        "d64 window": batch(prefill(400, 700, (16, 2), 64, **CAUSAL, **BF16, window_left=90), backend),
        "d192 window": batch(prefill(150, 400, (2, 1), (192, 128), **CAUSAL, window_left=90), backend),
        "bits": batch(prefill(70, 500, (2, 1), 64, **PACKED, logits_soft_cap=3.0), backend),
        "split": batch(prefill(3, 9000, (8, 2), 128, **BF16, **CAUSAL), backend),
        "batch split": batch(paged((5, 9), (9000, 300), mask="causal", page_size=5, **heads(2, 1)), backend),
        "ragged": batch(ragged(*mixed, mask="causal", dtype=bf16, **heads(36, 9), **d128), backend),
    }
    found |= {f"sized {name}": batch(problem, backend) for name, problem in SIZED.items()}
    for size in (1, 5, 16, 64):
        found[f"pages {size}"] = batch(paged(*mixed, size, mask="causal", dtype=bf16, **heads(36, 9), **d128), backend)
        narrow_keys = paged(*mixed, size, mask="causal", kv_dtype=E4M3, dtype=bf16, **heads(36, 9), **d128)
        found[f"fp8 pages {size}"] = batch(narrow_keys, backend)
    found["fp8 ragged"] = batch(ragged(*mixed, kv_dtype=E4M3, dtype=bf16, **heads(4, 2), **dims(256)), backend)
    for head_dim, dtype in ((64, torch.float16), (128, torch.bfloat16), (256, torch.float16)):
        found[f"leap {head_dim}"] = leaping(head_dim, dtype, 100, 2, backend)
    found["leap 128 tiles"] = leaping(128, torch.float16, 500, 36, backend)
    for problem in (
        Fp8Case((500,), (600,), (36, 9), single=True, causal=True, scales="signed"),
        Fp8Case((70,), (400,), single=True, spike=28.0, scales="none"),
        Fp8Case((70, 0, 37, 1), (300, 20, 64, 0), causal=True),
        Fp8Case((150, 0, 3, 1), (300, 20, 64, 0), (4, 1), 16, causal=True),
        Fp8Case((70,), (400,), page_size=64, window_left=90),
        Fp8Case((5,), (9000,), page_size=16, causal=True),
        Fp8Case((70, 200), (300, 900), causal=True, head_dim=64),
        Fp8Case((150,), (1700,), (2, 2), page_size=16, head_dim=256),
        Fp8Case((70,), (1700,), single=True, scales="none", custom_mask=True, soft_cap=5.0, alibi=True),
    ):
        found[f"fp8 {problem.id}"] = narrow(problem, backend)
    return {f"{backend} {name}": solve for name, solve in found.items()}


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
    wrong = 0
    for name, solve in chosen.items():
        complaint = solve("cuda")
        wrong += bool(complaint)
        print(f"{name}: {complaint or 'right'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
