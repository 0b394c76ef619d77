"""Rows that are measured: sections of workloads, by name, for `python -m perf.run NAME ...`.

"prefill" and "decode" are the 24 anchors each that results are judged by; `GROUPS` names several sections at once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from perf.harness import ROUNDS
from perf.workloads import BatchWorkload, equal, one_request

DECODE_BACKENDS = ("auto", "fa2", "xqa")
KV_DTYPES = ("bfloat16", "e4m3")
HEADS, GROUPED, EVERY = (32, 8), (64, 8), (32, 32)  # query and kv heads


class Section(NamedTuple):
    """Rows that are summarised together. `backends`: ours that are measured, in so many rounds."""

    workloads: Sequence[BatchWorkload]
    backends: tuple[str, ...] = ("auto",)
    rounds: int = ROUNDS


def square(
    batch_size: int, length: int, heads: tuple[int, int], head_dim: int, page_size: int = 0, kv_dtype: str = "bfloat16"
) -> list[BatchWorkload]:
    """Returns prefill of new requests, full and causal."""
    return [
        equal(batch_size, length, length, heads, head_dim, page_size, causal, kv_dtype=kv_dtype)
        for causal in (False, True)
    ]


def single(length: int, heads: tuple[int, int], head_dim: int) -> list[BatchWorkload]:
    """Returns prefill of one request through the public function, full and causal."""
    return [one_request(length, length, *heads, head_dim, head_dim, causal) for causal in (False, True)]


def decode(
    shapes: Iterable[tuple[int, tuple[int, int], int]], sizes: Sequence[tuple[int, int]], **options: Any
) -> list[BatchWorkload]:
    """Returns decode of all `sizes` (requests, their keys) in each of the `shapes` (head dim, heads, page size)."""
    return [
        equal(batch_size, 1, kv_len, heads, head_dim, page_size, **options)
        for head_dim, heads, page_size in shapes
        for batch_size, kv_len in sizes
    ]


def both(workloads: Sequence[BatchWorkload]) -> list[BatchWorkload]:
    """Returns workloads with a cache of 16 bits, then the same with one of 8 bits."""
    return [dataclasses.replace(w, kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES for w in workloads]


# ---- anchors: the rows that results are judged by, rows that were behind a peer, other shapes

PREFILL = [
    w
    for head_dim, heads in ((64, EVERY), (128, (16, 16)), (128, HEADS), (256, (8, 8)))
    for batch_size, length in ((1, 16384), (4, 4096), (16, 1024))
    for w in square(batch_size, length, heads, head_dim)
]
_DECODE_SHAPES = ((128, HEADS, 16), (128, GROUPED, 64))
DECODE = both(
    decode(_DECODE_SHAPES, ((1, 8192), (1, 131072), (8, 8192), (64, 2048), (64, 8192), (256, 1024))),
)
UNEVEN = (*(622 + 169 * i for i in range(31)), 5856)
MANY_LENGTHS = tuple(217 + (3946 - 217) * i // 23 for i in range(24))
BEHIND_PREFILL = [
    equal(4, 4096, 4096, GROUPED, 64, causal=True, window_left=127, sinks=True),
    equal(1, 1000, 1000, HEADS, 128, causal=True),
    BatchWorkload((4096,) * 2, (4096,) * 2, *EVERY, 192, causal=True, head_dim_v=128),
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
_OTHER_DECODE = [
    BatchWorkload((1,) * len(UNEVEN), UNEVEN, 28, 4, 128, 16),
    equal(64, 1, 8192, (8, 1), 128, 16),
    equal(1, 1, 2048, HEADS, 128, 16),
    equal(512, 1, 512, HEADS, 128, 16),
    equal(64, 1, 8192, GROUPED, 64, 16, window_left=127, sinks=True),
    equal(64, 1, 8192, GROUPED, 64, 16, sinks=True),
    equal(16, 4, 4096, HEADS, 128, 16, causal=True),
    equal(16, 1, 4096, (16, 8), 256, 32),
    equal(32, 1, 4096, EVERY, 128, 16),
]
OTHER_DECODE = [w for w in both(_OTHER_DECODE) if w not in BEHIND_DECODE]
ANCHORS = {
    "prefill": Section(PREFILL),
    "decode": Section(DECODE, DECODE_BACKENDS),
    "behind-prefill": Section(BEHIND_PREFILL),
    "behind-decode": Section(BEHIND_DECODE, DECODE_BACKENDS),
    "other-prefill": Section(OTHER_PREFILL),
    "other-decode": Section(OTHER_DECODE, DECODE_BACKENDS),
}

# ---- layers of models in use

QWEN_7B, QWEN_14B, LLAMA_TP8, GEMMA_256, GEMMA_512 = (28, 4), (40, 8), (8, 1), (16, 8), (32, 4)
ENGINE_LENGTHS = tuple(500 + 120 * i for i in range(63))  # of requests in decode, in tokens
MODELS = {
    "gpt-oss": Section(
        [
            *(equal(4, 4096, 4096, GROUPED, 64, 16, True, window_left=window, sinks=True) for window in (127, -1)),
            *both([equal(64, 1, 8192, GROUPED, 64, 16, window_left=window, sinks=True) for window in (127, -1)]),
        ]
    ),
    "llama-70b-tp8": Section(
        [equal(4, 4096, 4096, LLAMA_TP8, 128, 16, causal=True), *both([equal(64, 1, 4096, LLAMA_TP8, 128, 16)])]
    ),
    "qwen": Section(
        [
            w
            for heads in (QWEN_7B, QWEN_14B)
            for w in (equal(4, 4096, 4096, heads, 128, 16, causal=True), equal(64, 1, 4096, heads, 128, 16))
        ]
    ),
    "gemma": Section(
        [
            *(equal(4, 4096, 4096, GEMMA_256, 256, causal=True, window_left=window) for window in (511, 1023)),
            equal(4, 4096, 4096, GEMMA_512, 512, causal=True),
            *(equal(32, 1, 8192, GEMMA_256, 256, 16, window_left=window) for window in (511, 1023)),
            equal(32, 1, 8192, GEMMA_512, 512, 16),
        ]
    ),
    "deepseek": Section(  # of 128 heads, TP 8; and in a batch
        [
            *(one_request(n, n, 16, 16, 192, 128, causal=True) for n in (4096, 16384)),
            BatchWorkload((4096, 4096), (4096, 4096), *EVERY, 192, causal=True, head_dim_v=128),
        ]
    ),
    "vit": Section([equal(64, 197, 197, (16, 16), head_dim) for head_dim in (64, 72, 80)]),
    "engine": Section([BatchWorkload((*(1,) * 63, 2048), (*ENGINE_LENGTHS, 2048), *HEADS, 128, 16, causal=True)]),
    "verification": Section(both([equal(64, 5, 4096, HEADS, 128, 16, causal=True)])),
}

# ---- speed over length and over batch size, for pictures: few rounds, as the lines matter and not a single point

CURVE_ROUNDS = 7
CURVE_HEADS = {64: EVERY, 128: (16, 16), 256: (8, 8)}  # by head dim: query and kv heads of equal width
CURVES = {
    **{
        f"curve-d{head_dim}": Section(
            [
                equal(max(1, 16384 // length), length, length, heads, head_dim, causal=True)
                for length in (512 << i for i in range(7))  # up to 32768
            ],
            rounds=CURVE_ROUNDS,
        )
        for head_dim, heads in CURVE_HEADS.items()
    },
    **{
        f"curve-decode-{kv_dtype}": Section(
            decode([(128, HEADS, 16)], [(1 << i, 4096) for i in range(9)], kv_dtype=kv_dtype), rounds=CURVE_ROUNDS
        )
        for kv_dtype in KV_DTYPES
    },
}

# ---- single features

SINGLE_PREFILL = [
    w
    for head_dim, heads in ((128, HEADS), (128, (16, 16)), (64, EVERY), (256, (8, 8)))
    for length in (16384, 4096)
    for w in single(length, heads, head_dim)
]
SINGLE_DECODE = [
    one_request(1, kv_len, *heads, head_dim, head_dim)
    for heads, head_dim in ((HEADS, 128), (GROUPED, 128), ((32, 4), 512))
    for kv_len in (8192, 32768, 131072)
]
BATCHES = [
    *(equal(4, 4096, 4096, HEADS, 128, page, causal=True) for page in (0, 16, 1)),
    *(equal(4, 512, 16384, HEADS, 128, page, causal=True) for page in (16, 64, 1)),
    equal(16, 1024, 1024, HEADS, 128, causal=True),
    BatchWorkload((512,) * 31 + (32768,), (512,) * 31 + (32768,), *HEADS, 128, causal=True),
]
_LENGTHS = ((1, 16384, (16, 16)), (4, 4096, HEADS), (16, 1024, HEADS))
_FP8_EQUAL = [
    w for page in (0, 16) for batch_size, n, heads in _LENGTHS for w in square(batch_size, n, heads, 128, page, "e4m3")
]
_FP8_DIMS = [
    w
    for dim in (64, 256)
    for batch_size, n, heads in _LENGTHS[:2]
    for w in square(batch_size, n, heads, dim, 0, "e4m3")
]
FP8_KV = [
    *_FP8_EQUAL,
    *(equal(4, 4096, 4096, HEADS, 128, page, causal=True, kv_dtype="e4m3") for page in (1, 64)),
    *(equal(4, 512, 16384, HEADS, 128, page, causal=True, kv_dtype="e4m3") for page in (1, 16, 64)),
    equal(4, 4096, 4096, HEADS, 64, 16, causal=True, kv_dtype="e4m3"),
    equal(4, 4096, 4096, (16, 8), 256, 16, causal=True, kv_dtype="e4m3"),
]
_SPREAD = (128, 256, 512, 1024, 2048, 4096, 8192, 32768) * 8, (6128,) * 64  # as many tokens in equal lengths
SPREAD = both([BatchWorkload((1,) * 64, kv_lens, *HEADS, 128, 16) for kv_lens in _SPREAD])
_FEW_AND_MANY = (1, 8192), (1, 131072), (64, 8192)
NVFP4 = decode(_DECODE_SHAPES, _FEW_AND_MANY, kv_dtype="nvfp4")
# Two warps that share a row, a narrow row, a padded row.
DECODE_DIMS = both(decode(((512, (32, 4), 64), (32, HEADS, 64), (80, HEADS, 64)), _FEW_AND_MANY))
DECODE_WINDOWS = both(  # half of gpt-oss's layers; and at head dim 128
    [
        *decode([(64, GROUPED, 16)], ((8, 8192), (64, 8192), (256, 8192)), window_left=127, sinks=True),
        *decode([(128, HEADS, 16)], ((32, 8192),), window_left=511, sinks=True),
    ]
)
_CHUNKS = (  # requests, their query tokens and keys: query tiles that fill the GPU and a little more
    *((1, 512, 4096, (40, 8), 128), (1, 512, 16384, (40, 8), 128), (1, 640, 8192, HEADS, 128)),
    *((5, 128, 8192, QWEN_7B, 128), (4, 300, 3000, QWEN_7B, 128), (3, 512, 2048, (14, 2), 128)),
    *((5, 256, 4096, (16, 4), 256), (2, 352, 2817, (24, 8), 256)),
)
CHUNKS = [equal(b, q, kv, heads, head_dim, 16, causal=True) for b, q, kv, heads, head_dim in _CHUNKS]
WIDE, NARROW = 512, (72, 80, 112, 160)
PREFILL_DIMS: list[BatchWorkload] = [
    *(w for length in (16384, 4096) for w in single(length, (32, 4), WIDE)),
    *(w for head_dim in NARROW for w in single(4096, (16, 16), head_dim)),
    *(equal(4, 4096, 4096, (32, 4), WIDE, page, causal=True) for page in (0, 16)),
    *(equal(4, 512, 16384, (32, 4), WIDE, 16, causal=True, kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES),
    *(equal(4, 4096, 4096, (16, 16), head_dim, 16, causal=True) for head_dim in (80, 112)),
]
# head_dim, heads, window_left, sinks: gpt-oss, Mistral and Gemma 3 with their windows, and shorter and longer ones
_LAYERS = (
    *((64, GROUPED, 127, True), (64, GROUPED, 1023, True)),
    *((128, HEADS, 127, False), (128, HEADS, 383, False), (128, HEADS, 511, False), (128, HEADS, 4095, False)),
    (256, (16, 8), 1023, False),
)
WINDOWS = [
    equal(batch_size, length, length, heads, head_dim, page_size, causal=True, window_left=window, sinks=sinks)
    for head_dim, heads, window, sinks in _LAYERS
    for batch_size, length in ((4, 4096), (1, 16384), (16, 1024))
    if window < length
    for page_size in ((0, 64) if length == 4096 else (0,))
]

# ---- decode between whose backends "auto" chooses: head dim, heads, page size; requests and their keys

_SHAPES = (
    *((64, HEADS, 16), (64, GROUPED, 16), (128, HEADS, 16), (128, GROUPED, 64), (128, (28, 4), 16)),
    *((128, (8, 1), 16), (128, EVERY, 16), (256, (16, 4), 16)),
)
_PADDED = ((80, HEADS, 16), (96, HEADS, 16), (112, HEADS, 16))  # rows of XQA that are not a power of two
_RARE = (
    *((128, (96, 8), 16), (128, HEADS, 1), (512, (32, 4), 16), (512, (32, 2), 16), (32, HEADS, 16)),
    (256, (8, 1), 16),
)
_MANY = ((1, 1024), (1, 8192), (1, 65536), (8, 4096), (64, 2048), (256, 1024))
_FEW = ((1, 8192), (4, 4096), (64, 2048))
DECODE_CHOICE = [
    *decode(_SHAPES, _MANY),
    *decode((*_PADDED, *_RARE), _FEW),
    *decode(_PADDED, _MANY, kv_dtype="e4m3"),
    *decode(_RARE, _FEW, kv_dtype="e4m3"),
    *(
        equal(batch_size, 1, 8192, heads, head_dim, 16, window_left=window, sinks=True)
        for head_dim, heads in ((64, GROUPED), (128, HEADS))
        for batch_size, window in ((8, 127), (64, 127), (1, 1023), (64, 1023), (256, 1023))
    ),
]
# Requests, their query tokens and keys, heads, head dim: 20 to 64 packed rows, which fa3 takes too.
_DRAFTS = (
    *((64, 5, 4096, HEADS, 128), (64, 8, 4096, HEADS, 128), (64, 12, 4096, HEADS, 128), (64, 5, 4096, GROUPED, 128)),
    *((64, 8, 4096, GROUPED, 128), (4, 8, 2048, HEADS, 128), (16, 8, 8192, HEADS, 128), (64, 4, 4096, GROUPED, 64)),
    *((64, 5, 4096, GROUPED, 64), (64, 8, 4096, GROUPED, 64), (64, 8, 4096, HEADS, 96), (64, 8, 4096, HEADS, 112)),
    *((32, 5, 4096, HEADS, 256), (32, 12, 4096, HEADS, 256)),
)
DRAFTS = [
    equal(batch_size, tokens, kv_len, heads, head_dim, 16, causal=True, kv_dtype=kv_dtype)
    for kv_dtype, shapes in (("e4m3", _DRAFTS), ("nvfp4", (_DRAFTS[1],)))
    for batch_size, tokens, kv_len, heads, head_dim in shapes
]

SECTIONS: Mapping[str, Section] = {
    **ANCHORS,
    **MODELS,
    **CURVES,
    "single-prefill": Section(SINGLE_PREFILL),
    "single-decode": Section(SINGLE_DECODE),
    "batches": Section(BATCHES),
    "fp8": Section([dataclasses.replace(w, dtype="e4m3") for w in (*_FP8_EQUAL, *_FP8_DIMS)]),
    "fp8-kv": Section(FP8_KV),
    "windows": Section(WINDOWS),
    "chunks": Section(CHUNKS),
    "prefill-dims": Section(PREFILL_DIMS),
    "decode-spread": Section(SPREAD, DECODE_BACKENDS),
    "decode-nvfp4": Section(NVFP4, DECODE_BACKENDS),
    "decode-dims": Section(DECODE_DIMS, DECODE_BACKENDS),
    "decode-windows": Section(DECODE_WINDOWS, DECODE_BACKENDS),
    "decode-choice": Section(DECODE_CHOICE, DECODE_BACKENDS),
    "drafts": Section(DRAFTS, (*DECODE_BACKENDS, "fa3")),
}
GROUPS: Mapping[str, Sequence[str]] = {"anchors": [*ANCHORS], "models": [*MODELS], "curves": [*CURVES]}

# ---- rows of serving workloads that nobody tuned for, drawn by a seed: `python -m perf.run random --seed 7`
# Prefill of 16-bit keys, ragged and paged, and decode over caches of 16 and 8 bits.

RANDOM_NAMES = ("random-prefill", "random-decode")
RANDOM_ROWS = 40
MOST_FLOPS, FEWEST_FLOPS = 8e12, 1e10  # of a row of prefill: 0.02 to 13 ms
MOST_BYTES, FEWEST_BYTES = 4 << 30, 4 << 20  # of a row of decode
MOST_TOKENS = 1 << 18  # of q, or of k and v of prefill
KV_HEADS, GROUP_SIZES = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5, 7, 8, 16)
DIMS = ((64, 0), (128, 0), (128, 0), (128, 0), (192, 128), (256, 0))
PAGES = (1, 16, 16, 32, 64)
SOME_WINDOWS = (-1, -1, -1, -1, 127, 1023, 4095)


def drawn(seed: int, rows: int = RANDOM_ROWS) -> list[BatchWorkload]:
    """Returns the rows of a seed: prefill and decode in turn."""
    source = random.Random(seed)
    return [_within(_decode if i % 2 else _prefill, source) for i in range(rows)]


def _within(draw: Callable[[random.Random], BatchWorkload], source: random.Random) -> BatchWorkload:
    """Draws until a row has the work of a serving step."""
    while True:
        w = draw(source)
        if w.phase.endswith("decode"):
            if FEWEST_BYTES <= w.bytes <= MOST_BYTES:
                return w
        elif FEWEST_FLOPS <= w.flops <= MOST_FLOPS and max(sum(w.qo_lens), sum(w.kv_lens)) <= MOST_TOKENS:
            return w


def _heads(source: random.Random) -> tuple[int, int]:
    """Draws the number of query heads, 8 to 64, and of kv heads."""
    while True:
        kv_heads, group = source.choice(KV_HEADS), source.choice(GROUP_SIZES)
        if 8 <= kv_heads * group <= 64:
            return kv_heads * group, kv_heads


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** source.random())


def _lengths(source: random.Random, batch_size: int) -> tuple[int, ...]:
    """Draws the keys of the requests, 64 to 32768: equal ones, or some that spread around a mean."""
    mean = _log_uniform(source, 64, 32768)
    if source.random() < 0.4:
        return (mean,) * batch_size
    return tuple(max(1, min(32768, round(mean * source.uniform(0.2, 1.8)))) for _ in range(batch_size))


def _prefill(source: random.Random) -> BatchWorkload:
    """Draws new requests, or chunks of requests whose first keys are in a paged cache."""
    batch_size = _log_uniform(source, 1, 64)
    head_dim, head_dim_v = source.choice(DIMS)
    page_size = 0 if head_dim_v else source.choice((0, 0, 16, 64))
    kv_lens = _lengths(source, batch_size)
    appends = bool(page_size) and source.random() < 0.5
    qo_lens = tuple(max(2, n // 8) if appends else max(2, n) for n in kv_lens)
    kv_lens = tuple(map(max, qo_lens, kv_lens))
    causal = source.random() < 0.8
    window = source.choice(SOME_WINDOWS) if causal else -1
    heads = _heads(source)
    return BatchWorkload(
        qo_lens, kv_lens, *heads, head_dim, page_size, causal, window_left=window, head_dim_v=head_dim_v
    )


def _decode(source: random.Random) -> BatchWorkload:
    """Draws one query token for each request over a paged cache."""
    batch_size = _log_uniform(source, 1, 256)
    head_dim = source.choice([qk for qk, vo in DIMS if not vo])
    kv_lens, kv_dtype = _lengths(source, batch_size), source.choice(("bfloat16", "e4m3"))
    page_size, window, heads = source.choice(PAGES), source.choice(SOME_WINDOWS), _heads(source)
    return BatchWorkload((1,) * batch_size, kv_lens, *heads, head_dim, page_size, kv_dtype=kv_dtype, window_left=window)


def random_sections(seed: int) -> dict[str, Section]:
    """Returns the rows of a seed, by phase."""
    rows = drawn(seed)
    decode = [w for w in rows if w.phase.endswith("decode")]
    return dict(zip(RANDOM_NAMES, (Section([w for w in rows if w not in decode]), Section(decode)), strict=True))
