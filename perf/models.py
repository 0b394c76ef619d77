"""Layers of models in use, prefill TFLOP/s and decode GB/s: `python -m perf.models --out perf/results/models.json`."""

from perf.batch_workloads import BatchWorkload, equal
from perf.sections import DECODE_BACKENDS, Section, main
from perf.workloads import Workload

GPT_OSS, LLAMA_TP8, QWEN_7B, QWEN_14B = (64, 8), (8, 1), (28, 4), (40, 8)
GEMMA_256, GEMMA_512 = (16, 8), (32, 4)
DECODE_LENGTHS = tuple(500 + 120 * i for i in range(63))  # of the requests of an engine, in tokens

GPT_OSS_PREFILL = [equal(4, 4096, 4096, GPT_OSS, 64, 16, True, window_left=window, sinks=True) for window in (127, -1)]
GPT_OSS_DECODE = [
    equal(64, 1, 8192, GPT_OSS, 64, 16, kv_dtype=kv_dtype, window_left=window, sinks=True)
    for kv_dtype in ("bfloat16", "e4m3")
    for window in (127, -1)
]
LLAMA = [
    equal(4, 4096, 4096, LLAMA_TP8, 128, 16, causal=True),
    *(equal(64, 1, 4096, LLAMA_TP8, 128, 16, kv_dtype=kv_dtype) for kv_dtype in ("bfloat16", "e4m3")),
]
QWEN = [
    w
    for heads in (QWEN_7B, QWEN_14B)
    for w in (equal(4, 4096, 4096, heads, 128, 16, causal=True), equal(64, 1, 4096, heads, 128, 16))
]
GEMMA = [
    *(equal(4, 4096, 4096, GEMMA_256, 256, causal=True, window_left=window) for window in (511, 1023)),
    equal(4, 4096, 4096, GEMMA_512, 512, causal=True),
    *(equal(32, 1, 8192, GEMMA_256, 256, 16, window_left=window) for window in (511, 1023)),
    equal(32, 1, 8192, GEMMA_512, 512, 16),
]
DEEPSEEK = [Workload(length, length, 16, 16, 192, 128, causal=True) for length in (4096, 16384)]  # of 128 heads, TP 8
VIT = [equal(64, 197, 197, (16, 16), head_dim) for head_dim in (64, 72, 80)]
ENGINE = [BatchWorkload((*(1,) * 63, 2048), (*DECODE_LENGTHS, 2048), 32, 8, 128, 16, causal=True)]
VERIFICATION = [
    equal(64, 5, 4096, (32, 8), 128, 16, causal=True, kv_dtype=kv_dtype) for kv_dtype in ("bfloat16", "e4m3")
]

SECTIONS = {
    "gpt-oss": Section([*GPT_OSS_PREFILL, *GPT_OSS_DECODE]),
    "llama-70b-tp8": Section(LLAMA),
    "qwen": Section(QWEN),
    "gemma": Section(GEMMA),
    "deepseek": Section(DEEPSEEK),
    "vit": Section(VIT),
    "engine": Section(ENGINE),
    "verification": Section(VERIFICATION, DECODE_BACKENDS[:1]),
}

if __name__ == "__main__":
    raise SystemExit(main("models", __doc__, SECTIONS))
