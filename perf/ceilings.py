"""What plain torch reaches on this machine, measured in the run whose numbers it judges."""

from __future__ import annotations

import torch

from perf.harness import Timer, Timing, measure

READ_BYTES = 4 << 30
GEMM_SIZE = 8192


def ceilings(timer: Timer, device: torch.device) -> dict[str, float]:
    """What plain code reaches here: "read" and "copy" in GB/s, "gemm" (bf16, 8192^3) in TFLOP/s."""
    source = torch.empty(READ_BYTES // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    c = torch.empty_like(a)
    rows = source.view(GEMM_SIZE, -1)
    done, _ = measure(
        {
            "sum": [lambda: source.sum()],
            "max by rows": [lambda: rows.amax(dim=1)],
            "copy": [lambda: target.copy_(source)],
            "gemm": [lambda: torch.mm(a, b, out=c)],
        },
        timer,
    )
    read = min(_median(done["sum"]), _median(done["max by rows"]))
    return {
        "read": READ_BYTES / read * 1e-3,
        "copy": 2 * READ_BYTES / _median(done["copy"]) * 1e-3,
        "gemm": 2 * GEMM_SIZE**3 / _median(done["gemm"]) * 1e-6,
    }


def _median(result: Timing | str) -> float:
    if isinstance(result, str):
        raise RuntimeError(f"a ceiling could not be measured: {result}")
    return result.median_us
