"""Rows of serving workloads that nobody tuned for, drawn by a seed: `python -m perf.run random --seed 7`.

Prefill of 16-bit keys, ragged and paged, and decode over caches of 16 and 8 bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from perf.rows import Section
from perf.workloads import BatchWorkload

NAMES = ("random-prefill", "random-decode")
ROWS = 40
MOST_FLOPS, FEWEST_FLOPS = 8e12, 1e10  # of a row of prefill: 0.02 to 13 ms
MOST_BYTES, FEWEST_BYTES = 4 << 30, 4 << 20  # of a row of decode
MOST_TOKENS = 1 << 18  # of q, or of k and v of prefill
KV_HEADS, GROUPS = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5, 7, 8, 16)
DIMS = ((64, 0), (128, 0), (128, 0), (128, 0), (192, 128), (256, 0))
PAGES = (1, 16, 16, 32, 64)
WINDOWS = (-1, -1, -1, -1, 127, 1023, 4095)


def drawn(seed: int, rows: int = ROWS) -> list[BatchWorkload]:
    """Returns the rows of a seed: prefill and decode in turn."""
    source = random.Random(seed)
    kinds: tuple[Callable[[random.Random], BatchWorkload], ...] = (_prefill, _decode)
    return [_within(kinds[i % 2], source) for i in range(rows)]


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
        kv_heads, group = source.choice(KV_HEADS), source.choice(GROUPS)
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
    window = source.choice(WINDOWS) if causal else -1
    heads = _heads(source)
    return BatchWorkload(
        qo_lens, kv_lens, *heads, head_dim, page_size, causal, window_left=window, head_dim_v=head_dim_v
    )


def _decode(source: random.Random) -> BatchWorkload:
    """Draws one query token for each request over a paged cache."""
    batch_size = _log_uniform(source, 1, 256)
    head_dim = source.choice([qk for qk, vo in DIMS if not vo])
    kv_lens, kv_dtype = _lengths(source, batch_size), source.choice(("bfloat16", "e4m3"))
    page_size, window, heads = source.choice(PAGES), source.choice(WINDOWS), _heads(source)
    return BatchWorkload((1,) * batch_size, kv_lens, *heads, head_dim, page_size, kv_dtype=kv_dtype, window_left=window)


def sections(seed: int) -> dict[str, Section]:
    """Returns the rows of a seed, by phase."""
    rows = drawn(seed)
    decode = [w for w in rows if w.phase.endswith("decode")]
    return dict(zip(NAMES, (Section([w for w in rows if w not in decode]), Section(decode)), strict=True))
