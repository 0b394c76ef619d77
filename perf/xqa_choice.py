"""Decode with our fa2 and XQA, between which "auto" chooses: `python -m perf.xqa_choice --backends fa2 xqa --peers`."""

from perf.batch_workloads import BatchWorkload, equal
from perf.bench import main

# head_dim, (query, kv) heads, page size
SHAPES = (
    *((64, (32, 8), 16), (64, (64, 8), 16), (128, (32, 8), 16), (128, (64, 8), 64), (128, (28, 4), 16)),
    *((128, (8, 1), 16), (128, (32, 32), 16), (256, (16, 4), 16)),
)
PADDED = ((80, (32, 8), 16), (96, (32, 8), 16), (112, (32, 8), 16))  # rows of XQA that are not a power of two
RARE = (
    *((128, (96, 8), 16), (128, (32, 8), 1), (512, (32, 4), 16), (512, (32, 2), 16), (32, (32, 8), 16)),
    (256, (8, 1), 16),
)
LENGTHS = ((1, 1024), (1, 8192), (1, 65536), (8, 4096), (64, 2048), (256, 1024))  # batch size, kv_len
FEW_LENGTHS = ((1, 8192), (4, 4096), (64, 2048))
UNEVEN = tuple(622 + 169 * i for i in range(32))
WINDOWS = ((8, 127), (64, 127), (1, 1023), (64, 1023), (256, 1023))  # batch size, window_left

GRID = [
    equal(batch_size, 1, kv_len, heads, head_dim, page_size, kv_dtype=kv_dtype)
    for kv_dtype, shapes, lengths in (
        *(("bfloat16", SHAPES, LENGTHS), ("bfloat16", (*PADDED, *RARE), FEW_LENGTHS)),
        *(("e4m3", PADDED, LENGTHS), ("e4m3", RARE, FEW_LENGTHS)),
    )
    for head_dim, heads, page_size in shapes
    for batch_size, kv_len in lengths
]
UNEVEN_LENGTHS = [
    BatchWorkload((1,) * len(UNEVEN), UNEVEN, *heads, head_dim, page_size)
    for head_dim, heads, page_size in ((128, (28, 4), 16), (128, (32, 8), 16), (64, (64, 8), 16))
]
WINDOWED = [
    equal(batch_size, 1, 8192, heads, head_dim, 16, window_left=window, sinks=True)
    for head_dim, heads in ((64, (64, 8)), (128, (32, 8)))
    for batch_size, window in WINDOWS
]
# batch size, query tokens, kv_len, (query, kv) heads, head_dim: 20 to 64 packed rows, which fa3 takes too
DRAFT_SHAPES = (
    *((64, 5, 4096, (32, 8), 128), (64, 8, 4096, (32, 8), 128), (64, 12, 4096, (32, 8), 128)),
    *((64, 5, 4096, (64, 8), 128), (64, 8, 4096, (64, 8), 128), (4, 8, 2048, (32, 8), 128)),
    *((16, 8, 8192, (32, 8), 128), (64, 4, 4096, (64, 8), 64), (64, 5, 4096, (64, 8), 64)),
    *((64, 8, 4096, (64, 8), 64), (64, 8, 4096, (32, 8), 96), (64, 8, 4096, (32, 8), 112)),
    *((32, 5, 4096, (32, 8), 256), (32, 12, 4096, (32, 8), 256)),
)
DRAFTS = [
    equal(batch_size, tokens, kv_len, heads, head_dim, 16, causal=True, kv_dtype=kv_dtype)
    for kv_dtype, shapes in (("e4m3", DRAFT_SHAPES), ("nvfp4", ((64, 8, 4096, (32, 8), 128),)))
    for batch_size, tokens, kv_len, heads, head_dim in shapes
]

WORKLOADS = [*GRID, *UNEVEN_LENGTHS, *WINDOWED, *DRAFTS]

if __name__ == "__main__":
    raise SystemExit(main("xqa_choice", WORKLOADS))
