"""The fresh process of `perf.coldstart`, which prints its seconds as JSON: `python -m perf.first_calls LIBRARY`.

Nothing but the standard library is imported before the clock starts.
"""

from __future__ import annotations

import argparse
import contextlib
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
STAGES = "PERF_COLDSTART_STAGES"  # not empty: the process times the stages of the first calls of cute_attn
PRETEND = "PERF_COLDSTART_PRETEND"  # architecture of a GPU that takes launches and does nothing
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


def measure(library: str) -> dict[str, Any]:
    """Returns the seconds of each step, and of the first calls by stage if `STAGES` is set; without a GPU, and unless
    `PRETEND` names one, those of the imports alone. With a pretended GPU they are CPU seconds.
    """
    clock = time.process_time if os.environ.get(PRETEND) else time.perf_counter
    start = clock()
    import torch

    gpu = torch.cuda.is_available() and not os.environ.get(PRETEND)
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
    seconds = [clock() - start]
    start = clock()
    calls = LIBRARIES[library]()
    seconds.append(clock() - start)
    stages: dict[str, Any] = {}
    if (gpu or os.environ.get(PRETEND)) and not os.environ.get(IMPORTS):
        pairs = [*zip(calls, (prefill, decode), strict=True)] * 2
        with _gpu():
            steps, stages = _timed(pairs, torch.cuda.synchronize if gpu else lambda: None, clock)
        seconds += steps
        if library == "cute_attn" and (directory := os.environ.get(BUNDLE)):
            _write_bundle(Path(directory))
    return dict(zip(KEYS, seconds, strict=False)) | stages


def _timed(
    calls: Sequence[tuple[Callable[..., Any], Sequence[Any]]], wait: Callable[[], None], clock: Callable[[], float]
) -> tuple[list[float], dict[str, Any]]:
    """Returns the seconds of each call, and {"stages": by stage of prefill and decode} if that is asked for."""
    stages = None
    if os.environ.get(STAGES):
        from perf.cold_stages import Stages

        stages = Stages(clock)
        stages.install()
    seconds: list[float] = []
    taken: list[dict[str, float]] = []
    for call, inputs in calls:
        start = clock()
        call(*inputs)
        wait()
        seconds.append(clock() - start)
        if stages is not None:
            taken.append(stages.take(seconds[-1]))
    return seconds, {"stages": dict(zip(("prefill", "decode"), taken, strict=False))} if taken else {}


def _gpu() -> contextlib.AbstractContextManager[Any]:
    """Pretends the GPU that `PRETEND` names, if it names one."""
    if not (arch := os.environ.get(PRETEND)):
        return contextlib.nullcontext()
    from perf.pretended_gpu import pretended_gpu

    return pretended_gpu(arch)


def _write_bundle(directory: Path) -> None:
    from cute_attn.runtime import artifacts, bundle

    bundle.write(directory, artifacts.held())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.first_calls", description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    print(json.dumps(measure(parser.parse_args(argv).library)))


if __name__ == "__main__":
    main()
