"""Speed over length and over batch size, for pictures: `python -m perf.curves --out perf/results/curves.json`.

Causal prefill of 16384 tokens in requests of one length (one request from 16384 tokens on), and decode of requests of
4096 tokens. Few rounds, as the lines matter and not a single point: 90 s on a GPU, FlashInfer's modules built before.
"""

from perf.batch_workloads import equal
from perf.sections import Section, main

TOKENS = 16384
LENGTHS = tuple(512 << i for i in range(7))  # up to 32768
HEADS = {64: (32, 32), 128: (16, 16), 256: (8, 8)}  # by head dim: query and kv heads of equal width
BATCH_SIZES = tuple(1 << i for i in range(9))  # up to 256
KV_LEN = 4096
ROUNDS = 7

SECTIONS = {
    **{
        f"curve-d{head_dim}": Section(
            [equal(max(1, TOKENS // length), length, length, heads, head_dim, causal=True) for length in LENGTHS]
        )
        for head_dim, heads in HEADS.items()
    },
    **{
        f"curve-decode-{kv_dtype}": Section(
            [equal(batch_size, 1, KV_LEN, (32, 8), 128, 16, kv_dtype=kv_dtype) for batch_size in BATCH_SIZES]
        )
        for kv_dtype in ("bfloat16", "e4m3")
    },
}

if __name__ == "__main__":
    raise SystemExit(main("curves", __doc__, SECTIONS, rounds=ROUNDS))
