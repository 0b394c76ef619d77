"""All rows that results are judged by, in one run: `python -m perf.anchors --out perf/results/anchors.json`.

24 anchors each of prefill and decode, rows that were behind a peer, other shapes. FlashInfer's modules are built before
(`--warm-peers`), our kernels first, in parallel. `--budget 400` keeps the whole under seven minutes.
"""

from perf import curves, dense, models, xqa
from perf.batch_workloads import BatchWorkload, equal
from perf.sections import DECODE_BACKENDS, Section, main

HEADS, GROUPED = (32, 8), (64, 8)
KV_DTYPES = ("bfloat16", "e4m3")
MANY_LENGTHS = tuple(217 + (3946 - 217) * i // 23 for i in range(24))
UNEVEN = (*(622 + 169 * i for i in range(31)), 5856)

BEHIND_PREFILL = [
    equal(4, 4096, 4096, GROUPED, 64, causal=True, window_left=127, sinks=True),
    equal(1, 1000, 1000, HEADS, 128, causal=True),
]
BEHIND_DECODE = [
    equal(64, 1, 8192, GROUPED, 64, 16, kv_dtype="e4m3", window_left=127, sinks=True),
    BatchWorkload((1,) * len(UNEVEN), UNEVEN, 28, 4, 128, 16),
    equal(1, 1, 2048, HEADS, 128, 16),
    equal(64, 1, 8192, HEADS, 128, 16, kv_dtype="nvfp4"),
    equal(64, 1, 8192, GROUPED, 128, 64, kv_dtype="nvfp4"),
]
OTHER_PREFILL = [
    equal(8, 2048, 2048, GROUPED, 128, causal=True),
    equal(2, 3000, 3000, (40, 8), 128, causal=True),
    BatchWorkload(MANY_LENGTHS, MANY_LENGTHS, 28, 4, 128, causal=True),
    equal(1, 65536, 65536, HEADS, 128, causal=True),
    equal(8, 512, 8192, HEADS, 128, causal=True),
    equal(4, 4096, 4096, GROUPED, 64, causal=True, sinks=True),
    equal(2, 4096, 4096, HEADS, 128, causal=True, window_left=1024),
]
_EVERY_OTHER_DECODE = [
    w
    for kv_dtype in KV_DTYPES
    for w in (
        BatchWorkload((1,) * len(UNEVEN), UNEVEN, 28, 4, 128, 16, kv_dtype=kv_dtype),
        equal(64, 1, 8192, (8, 1), 128, 16, kv_dtype=kv_dtype),
        equal(1, 1, 2048, HEADS, 128, 16, kv_dtype=kv_dtype),
        equal(512, 1, 512, HEADS, 128, 16, kv_dtype=kv_dtype),
        equal(64, 1, 8192, GROUPED, 64, 16, kv_dtype=kv_dtype, window_left=127, sinks=True),
        equal(64, 1, 8192, GROUPED, 64, 16, kv_dtype=kv_dtype, sinks=True),
        equal(16, 4, 4096, HEADS, 128, 16, causal=True, kv_dtype=kv_dtype),
        equal(16, 1, 4096, (16, 8), 256, 32, kv_dtype=kv_dtype),
        equal(32, 1, 4096, (32, 32), 128, 16, kv_dtype=kv_dtype),
    )
]
OTHER_DECODE = [w for w in _EVERY_OTHER_DECODE if w not in BEHIND_DECODE]

SECTIONS = {
    "prefill": Section(dense.WORKLOADS),
    "decode": Section(xqa.ANCHORS, DECODE_BACKENDS),
    "behind-prefill": Section(BEHIND_PREFILL),
    "behind-decode": Section(BEHIND_DECODE, DECODE_BACKENDS),
    "other-prefill": Section(OTHER_PREFILL),
    "other-decode": Section(OTHER_DECODE, DECODE_BACKENDS),
}
MORE = {**models.SECTIONS, **curves.SECTIONS}

if __name__ == "__main__":
    raise SystemExit(main("anchors", __doc__, {**SECTIONS, **MORE}, default=list(SECTIONS)))
