"""Decode with our fa2 and XQA, between which "auto" chooses: `python -m perf.xqa_choice --backends fa2 xqa --peers`."""

from perf.batch_workloads import equal
from perf.bench import main

# head_dim, (query, kv) heads, page size
SHAPES = (
    *((64, (32, 8), 16), (256, (16, 4), 16), (128, (32, 32), 16), (128, (96, 8), 16), (128, (32, 8), 1)),
    *((512, (32, 4), 16), (512, (32, 2), 16), (80, (32, 8), 16)),
)
LENGTHS = ((4, 4096), (64, 2048))  # batch size, kv_len

WORKLOADS = [
    equal(batch_size, 1, kv_len, heads, head_dim, page_size, kv_dtype=kv_dtype)
    for kv_dtype in ("bfloat16", "e4m3")
    for head_dim, heads, page_size in SHAPES
    for batch_size, kv_len in LENGTHS
]

if __name__ == "__main__":
    raise SystemExit(main("xqa_choice", WORKLOADS))
