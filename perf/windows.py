"""Causal prefill under windows, ragged and paged, TFLOP/s of the keys that rows see:
`python -m perf.windows --out perf/results/windows.json`.
"""

from perf.batch_workloads import equal
from perf.bench import main

# head_dim, heads, window_left, sinks: gpt-oss, Mistral and Gemma 3 with their windows, and shorter and longer ones
LAYERS = (
    *((64, (64, 8), 127, True), (64, (64, 8), 1023, True)),
    *((128, (32, 8), 127, False), (128, (32, 8), 383, False), (128, (32, 8), 511, False), (128, (32, 8), 4095, False)),
    (256, (16, 8), 1023, False),
)
LENGTHS = ((4, 4096), (1, 16384), (16, 1024))

WORKLOADS = [
    equal(batch_size, length, length, heads, head_dim, page_size, causal=True, window_left=window, sinks=sinks)
    for head_dim, heads, window, sinks in LAYERS
    for batch_size, length in LENGTHS
    if window < length
    for page_size in (0, 64)
    if page_size == 0 or (batch_size, length) == LENGTHS[0]
]

if __name__ == "__main__":
    raise SystemExit(main("windows", WORKLOADS))
