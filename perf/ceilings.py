"""Speeds that plain torch reaches on this machine, measured in the same run as the results compared with them."""

from __future__ import annotations

import torch

from perf.harness import Timer, Timing, measure

READ_BYTES = 4 << 30
GEMM_SIZE = 8192


def ceilings(
    timer: Timer, device: torch.device, read_bytes: int = READ_BYTES, gemm_size: int = GEMM_SIZE
) -> dict[str, float]:
    """Measures "read" and "copy" in GB/s, and "gemm" (bf16, cubic) in TFLOP/s."""
    source = torch.empty(read_bytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(gemm_size, gemm_size, dtype=torch.bfloat16, device=device) for _ in range(2))
    c = torch.empty_like(a)
    rows = source.view(gemm_size, -1)
    memory, _ = measure(
        {
            "sum": [lambda: source.sum()],
            "max by rows": [lambda: rows.amax(dim=1)],
            "copy": [lambda: target.copy_(source)],
        },
        timer,
    )
    # Alone: interleaved with copies, the GPU would cool down in between and clock higher than attention can.
    matrix, _ = measure({"gemm": [lambda: torch.mm(a, b, out=c)]}, timer)
    read = min(_median(memory["sum"]), _median(memory["max by rows"]))
    return {
        "read": read_bytes / read * 1e-3,
        "copy": 2 * read_bytes / _median(memory["copy"]) * 1e-3,
        "gemm": 2 * gemm_size**3 / _median(matrix["gemm"]) * 1e-6,
    }


def _median(result: Timing | str) -> float:
    if isinstance(result, str):
        raise RuntimeError(f"a ceiling could not be measured: {result}")
    return result.median_us
