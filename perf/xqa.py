"""Decode with paged caches of 16, 8 and 4 bits: `python -m perf.xqa --out perf/results/xqa.json`."""

from perf.batch_workloads import BatchWorkload, equal
from perf.bench import main

HEADS, GROUPED = (32, 8), (64, 8)
KV_DTYPES = ("bfloat16", "e4m3")

ANCHORS = [
    equal(batch_size, 1, kv_len, heads, 128, page_size, kv_dtype=kv_dtype)
    for kv_dtype in KV_DTYPES
    for heads, page_size in ((HEADS, 16), (GROUPED, 64))
    for batch_size, kv_len in ((1, 8192), (1, 131072), (8, 8192), (64, 2048), (64, 8192), (256, 1024))
]
SHORT = [equal(1, 1, 1024, HEADS, 128, 16, kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES]
EVEN_AND_UNEVEN = [
    BatchWorkload((1,) * 64, kv_lens, *HEADS, 128, 16, kv_dtype=kv_dtype)
    for kv_dtype in KV_DTYPES
    for kv_lens in ((128, 256, 512, 1024, 2048, 4096, 8192, 32768) * 8, (6128,) * 64)
]
NVFP4 = [
    equal(batch_size, 1, kv_len, heads, 128, page_size, kv_dtype="nvfp4")
    for heads, page_size in ((HEADS, 16), (GROUPED, 64))
    for batch_size, kv_len in ((1, 8192), (1, 131072), (64, 8192))
]
HEAD_DIMS = [  # two warps that share a row, a narrow row, a padded row
    equal(batch_size, 1, kv_len, heads, head_dim, 64, kv_dtype=kv_dtype)
    for kv_dtype in KV_DTYPES
    for head_dim, heads in ((512, (32, 4)), (32, (32, 8)), (80, (32, 8)))
    for batch_size, kv_len in ((1, 8192), (1, 131072), (64, 8192))
]

SHORT_WINDOWS = [  # half of gpt-oss's layers; and at head dim 128
    equal(batch_size, 1, 8192, heads, head_dim, 16, kv_dtype=kv_dtype, window_left=window, sinks=True)
    for kv_dtype in KV_DTYPES
    for batch_size, heads, head_dim, window in (
        *((8, GROUPED, 64, 127), (64, GROUPED, 64, 127), (256, GROUPED, 64, 127)),
        (32, HEADS, 128, 511),
    )
]

WORKLOADS = [*ANCHORS, *SHORT, *EVEN_AND_UNEVEN, *NVFP4, *HEAD_DIMS, *SHORT_WINDOWS]

if __name__ == "__main__":
    raise SystemExit(main("xqa", WORKLOADS))
