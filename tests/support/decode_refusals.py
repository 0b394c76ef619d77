"""Decode calls without a plan that are wrong in one place: an error names the argument before anything is launched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, ArgumentTypeError, NotSupported
from tests.support.batch_case import moved
from tests.support.entry_points import ENTRIES, F32, HEADS, XQA_FUNCTIONS, ints, randn, zeros

EXPECTED = (ArgumentError, ArgumentTypeError, NotSupported)
LONGEST_MESSAGE = 600  # characters: no message prints a whole list
HUGE = (1 << 31) - 1
TABLE, K, Q = ints(0, 1, 2, 3).view(2, 2), randn(4, 16, 2, 64), randn(2, HEADS, 64)
TO_PAGES, PAGE = "seq_lens must be within .* pages of block_tables", r"block_tables\[1, 0\], page 0 of request 1"
BOUNDS, ROWS_OF_Q = "q_cu_seq_lens|cum_seq_lens_q", r"batch_size \* q_len_per_req"


def table(page: int) -> torch.Tensor:
    """Page tables with another first page of the last request."""
    return ints(0, 1, page, 3).view(2, 2)


def options(name: str, *values: Any, words: str = "") -> list[tuple[dict[str, Any], str]]:
    return [({name: value}, words or rf"\b{name}\b") for value in values]


# By the form of an entry: what changes, and words of the message. "bounds": those of queries, under either name.
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "": [
        *(({"block_tables": table(page)}, PAGE) for page in (-1, -HUGE, 4, 5, HUGE)),
        ({"k of kv_cache": K[:0], "v of kv_cache": K[:0]}, "the cache has no pages"),
        ({"block_tables": TABLE[:, :0]}, TO_PAGES),
        *(({"seq_lens": ints(4, n), "max_seq_len": n}, TO_PAGES) for n in (33, 1 << 20, 1 << 30)),
        *(
            ({"seq_lens": torch.tensor([n, 4], dtype=torch.uint32), "max_seq_len": 1 << 33}, "seq_lens must be within")
            for n in (1 << 31, (1 << 32) - 1)
        ),
        *(({"seq_lens": ints(n, 16)}, "seq_lens must be within") for n in (-1, -HUGE)),
        *options("max_seq_len", 15, 0, 1.5, None, "64"),
        *options("max_seq_len", -1, -(1 << 40), words="max_seq_len must be at least 0"),
        ({"seq_lens": ints(4)}, "seq_lens must have one length for each"),
        ({"query": Q[:1]}, ROWS_OF_Q),
        *options("query", Q.float(), words="k and v must have dtype|query must have dtype"),
        *options(
            "query", Q[..., :32], Q[:, :3], Q[..., 0], Q[..., None], words="dimension|multiple of num_kv_heads|shape"
        ),
        *options("block_tables", TABLE.long(), words="block_tables must have dtype"),
        *options("seq_lens", ints(4, 16).long(), words="seq_lens must have dtype"),
        *options("out", zeros(2, HEADS, 64, dtype=F32), randn(3, HEADS, 64), randn(2, HEADS, 128)[..., ::2]),
        *options("lse", zeros(2, HEADS, dtype=torch.float64), zeros(2, HEADS + 1, dtype=F32)),
        *options("sinks", zeros(HEADS + 1, dtype=F32)),
        *options("mask", zeros(2, 1, dtype=F32), zeros(2, 1, dtype=torch.int16)),
        *options("v of kv_cache", K[:-1], K.double(), words="kv_cache|k and v"),
        *options("k of kv_cache", K[..., :16], words="kv_cache|k and v"),
        *options("kv_cache", (K, K, K), K, (K.mT, K.mT)),
        *options("kv_cache_sf", (K, K)),
        *options("bmm1_scale", math.nan, math.inf, 1e39, "1", [1.0] * 10_000, True, torch.ones(2), torch.ones(1).int()),
        *options("bmm2_scale", math.nan, -math.inf, "x", (1.0,), True, torch.ones(2), torch.ones(1).int()),
        *options("o_scale", 0.0, -1.0, math.nan, "1", True, torch.ones(1)),
        *options("window_left", None, 1.5, "2", [1] * 10_000),
        *options("kv_layout", "DHN", None, 3, ["NHD"] * 10_000),
        *options("enable_pdl", 1, "yes", 0.0),
        *options("q_len_per_req", 0, -1, 1.0, "1"),
        *options("return_lse", 1, None, "yes"),
        *options("backend", "cuda", "nonsense", "cudnn", 7, None),
    ],
    ", one cache": [
        *(({"block_tables": table(page)}, PAGE) for page in (-1, 4)),
        *options("kv_cache", torch.zeros(0, 2, 16, 2, 64).bfloat16(), words="the cache has no pages"),
        *options("kv_cache", torch.zeros(4, 2, 16, 2, 64), words="k must have dtype"),
    ],
    ", NVFP4": [
        *(({"block_tables": table(page)}, PAGE) for page in (-1, 4)),
        ({"v of kv_cache": zeros(4, 16, 2, 32, dtype=torch.int8)}, "kv_cache|k and v"),
        *options("kv_cache_sf", None, (zeros(4, 16, 2, 1), zeros(4, 16, 2, 1))),
    ],
    ", drafts": [
        *options("mask", zeros(6, 1, dtype=torch.int16), zeros(6, 1, dtype=F32)),
        *options("query", randn(5, HEADS, 64), words=ROWS_OF_Q),
    ],
    ", ragged": [
        *options("bounds", ints(1, 3, 8), ints(-1, 3, 8), ints(HUGE, 3, 8), words=BOUNDS),
        *options("bounds", ints(0, 4, 9), ints(0, 3, HUGE), ints(0, 3, -1), words=BOUNDS),
        *options("bounds", ints(0, -1, 8), ints(0, 6, 8), ints(0, HUGE, 8), ints(0, 3), ints(), words=BOUNDS),
        *options("bounds", ints(0, 3, 8).long(), words=BOUNDS),
        *(({"block_tables": table(page)}, PAGE) for page in (-1, 4)),
        ({"seq_lens": ints(4)}, f"{BOUNDS}|seq_lens must have one length for each"),
    ],
}
CALLS = [(name, form) for name in XQA_FUNCTIONS for form in WRONG]


def assert_refused(name: str, form: str, device: str = "cpu") -> None:
    """Every row of a form, under one of the two names; good calls before and after."""
    entry, bounds = ENTRIES[name + form], XQA_FUNCTIONS[name][1]
    given = entry.on(device)
    call = entry.begin(given)
    call(given)
    before = given["out"].clone()
    for changes, message in WRONG[form]:
        wrong = {key: moved(x, device) if isinstance(x, torch.Tensor) else x for key, x in changes.items()}
        if "bounds" in wrong:
            wrong[bounds] = wrong.pop("bounds")
        with pytest.raises(EXPECTED, match=message) as error:
            call({**given, **wrong})
        assert len(str(error.value)) < LONGEST_MESSAGE
    call(given)
    assert torch.equal(given["out"], before)
