"""Prefill of single requests, TFLOP/s: `python -m perf.prefill --out perf/results/prefill.json`."""

from perf.bench import main
from perf.workloads import Workload


def square(head_dim: int, num_qo_heads: int, num_kv_heads: int, length: int, causal: bool) -> Workload:
    return Workload(length, length, num_qo_heads, num_kv_heads, head_dim, head_dim, causal)


WORKLOADS = [
    square(head_dim, num_qo_heads, num_kv_heads, length, causal)
    for head_dim, num_qo_heads, num_kv_heads in ((128, 32, 8), (128, 16, 16), (64, 32, 32), (256, 8, 8))
    for length in (16384, 4096)
    for causal in (False, True)
]

if __name__ == "__main__":
    raise SystemExit(main("prefill", WORKLOADS))
