"""Decode of one request with a dense cache, GB/s: `python -m perf.decode --out perf/results/decode.json`."""

from perf.bench import main
from perf.workloads import Workload

WORKLOADS = [
    Workload(1, kv_len, num_qo_heads, num_kv_heads, head_dim, head_dim)
    for num_qo_heads, num_kv_heads, head_dim in ((32, 8, 128), (64, 8, 128), (32, 4, 512))
    for kv_len in (8192, 32768, 131072)
]

if __name__ == "__main__":
    raise SystemExit(main("decode", WORKLOADS))
