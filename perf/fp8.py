"""Prefill of batches with q, k and v in e4m3, TFLOP/s: `python -m perf.fp8 --out perf/results/fp8.json`."""

from dataclasses import replace

from perf.batch_workloads import equal
from perf.bench import main

LONG, MIDDLE, SHORT = (1, 16384, (16, 16)), (4, 4096, (32, 8)), (16, 1024, (32, 8))
WORKLOADS = [
    replace(equal(batch_size, length, length, heads, head_dim, page_size, causal), dtype="e4m3", kv_dtype="e4m3")
    for head_dim, page_size, batches in (
        (128, 0, (LONG, MIDDLE, SHORT)),
        (128, 16, (LONG, MIDDLE, SHORT)),
        (64, 0, (LONG, MIDDLE)),
        (256, 0, (LONG, MIDDLE)),
    )
    for batch_size, length, heads in batches
    for causal in (False, True)
]

if __name__ == "__main__":
    raise SystemExit(main("fp8", WORKLOADS))
