"""Prefill of batches with q, k and v in e4m3, TFLOP/s: `python -m perf.fp8 --out perf/results/fp8.json`."""

from dataclasses import replace

from perf.batch_workloads import equal
from perf.bench import main

WORKLOADS = [
    replace(equal(batch_size, length, length, heads, 128, page_size, causal), dtype="e4m3", kv_dtype="e4m3")
    for page_size in (0, 16)
    for batch_size, length, heads in ((1, 16384, (16, 16)), (4, 4096, (32, 8)), (16, 1024, (32, 8)))
    for causal in (False, True)
]

if __name__ == "__main__":
    raise SystemExit(main("fp8", WORKLOADS))
