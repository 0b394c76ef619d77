"""Head dimensions 512, and those that share the tiles of others, TFLOP/s and GB/s:
`python -m perf.head_dims --backends auto fa2 --out perf/results/head_dims.json`.
"""

from perf.batch_workloads import equal
from perf.bench import AnyWorkload, main
from perf.prefill import square
from perf.workloads import Workload

WIDE, NARROW = 512, (72, 80, 112, 160)

PREFILL = [
    *(square(WIDE, 32, 4, length, causal) for length in (16384, 4096) for causal in (False, True)),
    *(square(head_dim, 16, 16, 4096, causal) for head_dim in NARROW for causal in (False, True)),
]
DECODE = [
    *(Workload(1, kv_len, 32, 4, WIDE, WIDE) for kv_len in (8192, 131072)),
    *(Workload(1, 32768, 32, 8, head_dim, head_dim) for head_dim in NARROW),
]
BATCHES = [
    *(equal(4, 4096, 4096, (32, 4), WIDE, page, causal=True) for page in (0, 16)),
    *(equal(4, 512, 16384, (32, 4), WIDE, 16, causal=True, kv_dtype=kv_dtype) for kv_dtype in ("bfloat16", "e4m3")),
    *(
        equal(batch_size, 1, 8192, (32, 4), WIDE, 16, kv_dtype=kv_dtype)
        for batch_size in (1, 32)
        for kv_dtype in ("bfloat16", "e4m3")
    ),
    *(equal(4, 4096, 4096, (16, 16), head_dim, 16, causal=True) for head_dim in NARROW[1:3]),
    equal(4, 4096, 4096, (16, 16), 80, 16, causal=True, kv_dtype="e4m3"),
]
WORKLOADS: list[AnyWorkload] = [*PREFILL, *DECODE, *BATCHES]

if __name__ == "__main__":
    raise SystemExit(main("head_dims", WORKLOADS))
