"""Batches through the wrappers, TFLOP/s and GB/s: `python -m perf.batch --out perf/results/batch.json`."""

from perf.batch_workloads import BatchWorkload, equal
from perf.bench import main

HEADS, GROUPED = (32, 8), (64, 8)

PREFILL = [
    *(equal(4, 4096, 4096, HEADS, 128, page, causal=True) for page in (0, 16, 1)),
    *(equal(4, 512, 16384, HEADS, 128, page, causal=True) for page in (16, 64, 1)),
    equal(16, 1024, 1024, HEADS, 128, causal=True),
    BatchWorkload((512,) * 31 + (32768,), (512,) * 31 + (32768,), *HEADS, 128, causal=True),
]
DECODE = [
    equal(batch_size, 1, kv_len, heads, 128, page_size)
    for heads, page_size in ((HEADS, 16), (GROUPED, 64))
    for batch_size, kv_len in ((1, 8192), (1, 131072), (8, 8192), (64, 2048), (64, 8192), (256, 1024))
]
EVEN_AND_UNEVEN = [
    BatchWorkload((1,) * 64, kv_lens, *HEADS, 128, 16)
    for kv_lens in ((128, 256, 512, 1024, 2048, 4096, 8192, 32768) * 8, (6128,) * 64)
]

WORKLOADS = [*PREFILL, *DECODE, *EVEN_AND_UNEVEN]

if __name__ == "__main__":
    raise SystemExit(main("batch", WORKLOADS))
