"""The single-request test matrix as data.

`SMALL` touches every feature and edge with few and short tokens, for slow executors; `FULL` has real sizes;
`random_case` makes more. What a case is, and how its result is judged, is in `tests/support/case.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from tests.support.batch_case import DTYPES, random_options
from tests.support.case import BatchCase


def prefill(
    qo_len: int, kv_len: int, heads: tuple[int, int] = (2, 1), dims: int | tuple[int, int] = 64, **rest: Any
) -> BatchCase:
    dim_qk, dim_vo = (dims, dims) if isinstance(dims, int) else dims
    return BatchCase("single_prefill", (qo_len,), (kv_len,), *heads, dim_qk, dim_vo, **rest)


def decode(kv_len: int, heads: tuple[int, int] = (2, 1), dim: int = 64, **rest: Any) -> BatchCase:
    return BatchCase("single_decode", (1,), (kv_len,), *heads, dim, dim, **rest)


BF16: dict[str, Any] = {"dtype": "bfloat16"}
HND: dict[str, Any] = {"kv_layout": "HND"}
E4M3: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}
E5M2: dict[str, Any] = {"kv_dtype": "float8_e5m2"}
CAUSAL: dict[str, Any] = {"mask": "causal"}
CUSTOM: dict[str, Any] = {"mask": "custom"}
PACKED: dict[str, Any] = {"mask": "packed"}
ROPE: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA"}
ALIBI: dict[str, Any] = {"pos_encoding_mode": "ALIBI"}

DIMS: tuple[int | tuple[int, int], ...] = (64, 80, 96, 112, 128, 256, (192, 128))
DECODE_DIMS = (64, 80, 96, 112, 128, 256)
OTHER_DIMS: tuple[int | tuple[int, int], ...] = (512, 160, 144, 48, (128, 64), (64, 128), (192, 192))
STORAGES = ("dense", "packed_qkv", "padded", "odd", "transposed", "expanded")

SMALL: tuple[BatchCase, ...] = (
    # head dims
    prefill(33, 65, (1, 1), 80, **BF16),
    prefill(33, 65, (2, 2), 96, **CAUSAL),
    prefill(17, 63, (1, 1), 112, **CAUSAL),
    prefill(65, 65, (1, 1), 256, **BF16, **CAUSAL),
    prefill(33, 65, (2, 1), (192, 128), **CAUSAL),
    prefill(17, 33, (1, 1), (192, 128), **BF16, **HND),
    prefill(17, 33, (1, 1), 512, **PACKED, pos_encoding_mode="ROPE_LLAMA", logits_soft_cap=30.0, storage="padded"),
    prefill(17, 65, (2, 2), 72, **BF16, **CAUSAL, storage="padded"),
    prefill(70, 17, (1, 1), (40, 72), o_dtype="float32"),
    prefill(17, 33, (1, 1), 160, pos_encoding_mode="ROPE_LLAMA"),
    # lengths off every tile, and edges
    prefill(17, 15, (2, 1), 128, **BF16, **CAUSAL, **HND),
    prefill(17, 0, (2, 1)),
    prefill(5, 0, (2, 1), 128, **CAUSAL, **BF16),
    prefill(0, 17, (2, 1)),
    # groups
    prefill(17, 33, (7, 1), **CAUSAL),
    prefill(15, 65, (16, 1), **BF16, **CAUSAL),
    # windows
    prefill(65, 129, (1, 1), **CAUSAL, window_left=0),
    prefill(127, 63, (1, 1), **CAUSAL, **BF16, window_left=15),
    # masks
    prefill(65, 127, (1, 1), 128, **BF16, **PACKED),
    prefill(15, 17, (1, 1), (192, 128), **CUSTOM, storage="padded"),
    # logits: scale, soft cap, ALiBi
    prefill(17, 65, (1, 1), 128, **BF16, logits_soft_cap=5.0),
    prefill(17, 129, (4, 2), 128, **ALIBI, **CAUSAL, **BF16),
    prefill(33, 33, (5, 1), **ALIBI, **PACKED, logits_soft_cap=3.0),
    prefill(17, 33, **CAUSAL, sm_scale=0.0),
    prefill(17, 33, **CAUSAL, sm_scale=-0.125),
    prefill(17, 33, (1, 1), sm_scale=1.0, k_scale=0.5, v_scale=-1.25),
    prefill(17, 33, (1, 1), 128, **BF16, k_scale=1.5, v_scale=0.75, tensor_scales=True),
    prefill(9, 17, o_dtype="bfloat16"),
    # keys and values of 8 bits
    prefill(65, 129, (2, 1), 128, **BF16, **E4M3, **CAUSAL),
    prefill(33, 65, (2, 2), 64, **E5M2, **HND, storage="padded", k_scale=0.5, v_scale=1.25),
    prefill(17, 65, (2, 1), 96, **E4M3, **PACKED),
    prefill(17, 65, (2, 1), 512, **E4M3, **CAUSAL),
    prefill(70, 33, (1, 1), 80, **E4M3, storage="padded"),
    # RoPE
    prefill(17, 127, (2, 1), 128, **ROPE, **CAUSAL, **BF16, rope_theta=5e5, rope_scale=8.0),
    prefill(33, 17, (1, 1), 80, **ROPE, **CAUSAL),
    prefill(17, 33, (1, 1), 64, **ROPE, **CUSTOM, logits_soft_cap=30.0, storage="padded", **HND),
    # memory
    prefill(17, 33, (2, 1), (192, 128), **HND, storage="packed_qkv"),
    prefill(33, 65, (2, 2), 80, **HND, storage="padded"),
    prefill(17, 65, (2, 2), 128, **BF16, storage="odd"),
    prefill(17, 65, (2, 2), 64, **CAUSAL, storage="transposed"),
    prefill(17, 33, (4, 4), 64, storage="expanded"),
    # decode
    decode(129, (4, 1), 128),
    decode(200, (8, 2), 64, **BF16, **HND, window_left=64),
    decode(17, (3, 1), 256, logits_soft_cap=30.0, return_lse=False),
    decode(65, (5, 1), 80, **ROPE, q_scale=0.5, k_scale=2.0, v_scale=1.25),
    decode(127, (2, 2), 96, **ALIBI, storage="padded"),
    decode(129, (8, 1), 512, **BF16, sm_scale=-0.1),
    decode(200, (2, 1), 104, storage="padded"),
    decode(0, (2, 1), 64),
)


def _full_shapes() -> Iterator[BatchCase]:
    masks = itertools.cycle(("none", "causal", "custom", "packed"))
    dtypes = itertools.cycle(DTYPES)
    for dims, dtype, mask in itertools.product(DIMS, DTYPES, ("none", "causal")):
        for qo_len, kv_len in ((1024, 1024), (129, 1000), (1, 777)):
            yield prefill(qo_len, kv_len, (8, 2), dims, dtype=dtype, mask=mask)
    for qo_len, kv_len in itertools.product(
        (1, 15, 17, 63, 64, 65, 127, 128, 129, 257), (0, 1, 15, 17, 63, 64, 65, 127, 129, 1023)
    ):
        dim = 128 if (qo_len + kv_len) % 3 else 64
        yield prefill(qo_len, kv_len, (4, 2), dim, dtype=next(dtypes), mask=next(masks))
    for group in range(1, 17):
        yield prefill(257, 513, (2 * group, 2), 128, dtype=next(dtypes), **CAUSAL)
    for qo_len, kv_len in ((500, 100), (129, 1), (300, 299), (2048, 700)):  # rows that see nothing come first
        yield prefill(qo_len, kv_len, (4, 1), 128, dtype=next(dtypes), **CAUSAL)
        yield prefill(qo_len, kv_len, (4, 1), 64, dtype=next(dtypes), **CAUSAL, window_left=40)
    for dtype, mask in itertools.product(DTYPES, ("none", "causal")):
        yield prefill(4096, 4096, (32, 8), 128, dtype=dtype, mask=mask)
        yield prefill(2048, 4000, (8, 2), 256, dtype=dtype, mask=mask)
        yield prefill(3001, 3001, (16, 16), (192, 128), dtype=dtype, mask=mask)
    yield prefill(130, 900, (32, 1), 128, **ALIBI, **CAUSAL)
    yield prefill(100, 4096, (4, 1), 128, **ROPE, **CAUSAL, rope_scale=8.0)
    yield prefill(4096, 4096, (4, 1), 128, **BF16, **ROPE, **CAUSAL)
    yield prefill(200, 333, (6, 3), 128, storage="expanded")


def _full_decode() -> Iterator[BatchCase]:
    dtypes, dims = itertools.cycle(DTYPES), itertools.cycle(DECODE_DIMS)
    heads: tuple[tuple[int, int], ...] = ((8, 8), (32, 8), (7, 1), (16, 1), (10, 2))
    for head_counts, kv_len in itertools.product(heads, (0, 1, 2, 63, 64, 65, 127, 129, 1000, 4095, 16385)):
        yield decode(kv_len, head_counts, next(dims), dtype=next(dtypes))
    yield decode(40000, (32, 8), 128, **BF16)
    yield decode(20000, (4, 1), 128, window_left=9000)


def _full_other_dims() -> Iterator[BatchCase]:
    """Head dims that the other groups leave out: 512, and those that share the tiles of others."""
    dtypes = itertools.cycle(DTYPES)
    masks = itertools.cycle(("causal", "none", "custom", "packed", "none"))
    for dims in OTHER_DIMS:
        for qo_len, kv_len in ((1024, 1024), (129, 1000), (65, 300), (3, 777), (1, 5000)):
            yield prefill(qo_len, kv_len, (8, 2), dims, dtype=next(dtypes), mask=next(masks))
        yield prefill(333, 1200, (4, 4), dims, dtype=next(dtypes), **CAUSAL, **ROPE, rope_theta=5e5)
        yield prefill(257, 600, (8, 2), dims, dtype=next(dtypes), **ALIBI, mask=next(masks), logits_soft_cap=3.0)
        yield prefill(257, 600, (8, 2), dims, dtype=next(dtypes), **E4M3, mask=next(masks), storage="padded")
        yield prefill(200, 333, (6, 3), dims, dtype=next(dtypes), kv_layout="HND", storage="packed_qkv", window_left=40)
    for dim in (8, 72, 88, 136, 200, 248):  # no multiples of 16
        yield prefill(300, 700, (4, 2), dim, dtype=next(dtypes), mask=next(masks), storage="padded")
        yield decode(5000, (8, 2), dim, dtype=next(dtypes), window_left=3000)
    for kv_len, heads in itertools.product((0, 1, 129, 1000, 16385), ((8, 1), (32, 4), (2, 2))):
        yield decode(kv_len, heads, 512, dtype=next(dtypes))
        yield decode(kv_len, heads, 512, dtype=next(dtypes), **E4M3, kv_layout="HND", k_scale=0.5, v_scale=1.25)


def random_case(seed: int, max_len: int = 1500) -> BatchCase:
    """A case for fuzzing: any legal mixture, lengths up to `max_len`."""
    rng = random.Random(seed)

    def length() -> int:
        return rng.choice((rng.randint(1, 130), rng.randint(1, max_len), 64 * rng.randint(1, max(1, max_len // 64))))

    num_kv_heads = rng.choice((1, 2, 3, 4))
    heads, storage = (num_kv_heads * rng.randint(1, 8), num_kv_heads), rng.choice(STORAGES)
    common: dict[str, Any] = {**random_options(rng, max_len), "heads": heads, "storage": storage, "seed": seed}
    if rng.random() < 0.3:
        return decode(length(), dim=rng.choice(DECODE_DIMS), **common)
    mask = rng.choice(("none", "causal", "causal", "custom", "packed"))
    return prefill(length(), length(), dims=rng.choice(DIMS), mask=mask, **common)


# Real sizes. Features and storages in all combinations are in draws of `random_case`, which GPUs get as well.
FULL: tuple[BatchCase, ...] = tuple(dict.fromkeys((*_full_shapes(), *_full_decode(), *_full_other_dims())))
