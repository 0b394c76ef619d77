"""Prefill of batches with q, k and v in e4m3, or k and v only: `python -m perf.fp8 --out perf/results/fp8.json`."""

from dataclasses import replace

from perf.batch_workloads import equal
from perf.bench import main

LENGTHS = ((1, 16384, (16, 16)), (4, 4096, (32, 8)), (16, 1024, (32, 8)))
EQUAL = [
    equal(batch_size, length, length, heads, 128, page_size, causal, kv_dtype="e4m3")
    for page_size in (0, 16)
    for batch_size, length, heads in LENGTHS
    for causal in (False, True)
]
OTHER_DIMS = [
    equal(batch_size, length, length, heads, head_dim, causal=causal, kv_dtype="e4m3")
    for head_dim in (64, 256)
    for batch_size, length, heads in LENGTHS[:2]
    for causal in (False, True)
]
ALL_FP8 = [replace(w, dtype="e4m3") for w in (*EQUAL, *OTHER_DIMS)]
FP8_KV = [
    *EQUAL,
    *(equal(4, 4096, 4096, (32, 8), 128, page_size, causal=True, kv_dtype="e4m3") for page_size in (1, 64)),
    *(equal(4, 512, 16384, (32, 8), 128, page_size, causal=True, kv_dtype="e4m3") for page_size in (1, 16, 64)),
    equal(4, 4096, 4096, (32, 8), 64, 16, causal=True, kv_dtype="e4m3"),
    equal(4, 4096, 4096, (16, 8), 256, 16, causal=True, kv_dtype="e4m3"),
]
WORKLOADS = [*ALL_FP8, *FP8_KV]

if __name__ == "__main__":
    raise SystemExit(main("fp8", WORKLOADS))
