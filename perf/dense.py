"""Batches of equal lengths, TFLOP/s, compared with dense batches of cuDNN and FlashAttention-4:
`python -m perf.dense --out perf/results/dense.json`.
"""

from perf.batch_workloads import equal
from perf.bench import main

WORKLOADS = [
    equal(batch_size, length, length, heads, head_dim, causal=causal)
    for head_dim, heads in ((64, (32, 32)), (128, (16, 16)), (128, (32, 8)), (256, (8, 8)))
    for batch_size, length in ((1, 16384), (4, 4096), (16, 1024))
    for causal in (False, True)
]

if __name__ == "__main__":
    raise SystemExit(main("dense", WORKLOADS))
