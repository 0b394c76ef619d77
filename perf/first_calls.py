"""The fresh process of `perf.coldstart`, which prints its seconds as JSON: `python -m perf.first_calls LIBRARY`.

Nothing but the standard library is imported before the clock starts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PREFILL = (4096, 32, 8, 128)  # tokens, query heads, kv heads, head dim; causal
DECODE_KEYS = 8192
KEYS = ("torch_s", "import_s", "prefill_s", "decode_s", "prefill_again_s", "decode_again_s")
BUNDLE = "PERF_COLDSTART_BUNDLE"  # where the process leaves a bundle of the kernels that it used
IMPORTS = "PERF_COLDSTART_IMPORTS"  # not empty: the process ends after the imports
Calls = tuple[Callable[..., Any], Callable[..., Any]]


def _with_flashinfers_api(name: str) -> Calls:
    library = importlib.import_module(name)
    prefill, decode = library.single_prefill_with_kv_cache, library.single_decode_with_kv_cache
    return lambda q, k, v: prefill(q, k, v, causal=True), lambda q, k, v: decode(q[0], k, v)


def _flash_attention_4() -> Calls:
    attention = importlib.import_module("flash_attn.cute").flash_attn_func

    def batched(causal: bool) -> Callable[..., Any]:
        return lambda q, k, v: attention(q[None], k[None], v[None], causal=causal)

    return batched(True), batched(False)


LIBRARIES: dict[str, Callable[[], Calls]] = {
    "cute_attn": lambda: _with_flashinfers_api("cute_attn"),
    "FlashInfer": lambda: _with_flashinfers_api("flashinfer"),
    "flash-attn-4": _flash_attention_4,
}


def measure(library: str) -> dict[str, float]:
    """Returns the seconds of each step; without a GPU, and where `IMPORTS` is set, those of the imports alone."""
    start = time.perf_counter()
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, PREFILL[3], dtype=torch.bfloat16, device=device)

    tokens, num_qo_heads, num_kv_heads, _ = PREFILL
    prefill = normal(tokens, num_qo_heads), normal(tokens, num_kv_heads), normal(tokens, num_kv_heads)
    decode = normal(1, num_qo_heads), normal(DECODE_KEYS, num_kv_heads), normal(DECODE_KEYS, num_kv_heads)
    if gpu:
        torch.cuda.synchronize()
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    seconds = [time.perf_counter() - start]
    start = time.perf_counter()
    calls = LIBRARIES[library]()
    seconds.append(time.perf_counter() - start)
    if gpu and not os.environ.get(IMPORTS):
        for call, inputs in [*zip(calls, (prefill, decode), strict=True)] * 2:
            start = time.perf_counter()
            call(*inputs)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        if library == "cute_attn" and (directory := os.environ.get(BUNDLE)):
            _write_bundle(Path(directory))
    return dict(zip(KEYS, seconds, strict=False))


def _write_bundle(directory: Path) -> None:
    from cute_attn.runtime import artifacts, bundle

    bundle.write(directory, artifacts.held())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.first_calls", description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    print(json.dumps(measure(parser.parse_args(argv).library)))


if __name__ == "__main__":
    main()
