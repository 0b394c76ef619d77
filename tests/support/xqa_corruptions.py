"""Corrupted decode calls: each must raise an error that names the argument, before anything is launched."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    NotSupported,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from tests.support.xqa_case import Built, XqaCase, build

EXPECTED = (ArgumentError, ArgumentTypeError, NotSupported)
LONGEST_MESSAGE = 600  # characters: no message prints a whole list
HUGE = (1 << 31) - 1

BASES = (
    XqaCase((57, 3, 20), heads=(4, 2), head_dim=64, sinks=True),
    XqaCase((40, 16), kv="e4m3", heads=(4, 1), head_dim=64, page_size=8, kv_layout="HND", device_scales=True),
    XqaCase((33, 9, 64), heads=(2, 2), head_dim=64, q_len=3, mask=True, form="tensor"),
    XqaCase((33, 9, 64), heads=(4, 2), head_dim=64, q_len=4, q_lens=(4, 1, 2), mask=True),
    XqaCase((30, 5), kv="nvfp4", heads=(4, 2), head_dim=64, page_size=16, bmm1_scale=0.01),
)

Arguments = dict[str, Any]
Choices = Callable[[Arguments, XqaCase, random.Random], list[Arguments]]


def with_value(x: torch.Tensor, index: int | tuple[int, int], value: int) -> torch.Tensor:
    """A copy with another number at an index."""
    changed = x.cpu().to(torch.int64)
    changed[index] = value
    return changed.to(x.dtype).to(x.device)


def num_pages(a: Arguments) -> int:
    cache = a["kv_cache"]
    return int((cache[0] if isinstance(cache, tuple) else cache).shape[0])


# ---- page numbers and lengths


def page_numbers(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    """Of some page that the call reads."""
    request = rng.choice([i for i, n in enumerate(case.seq_lens) if n])
    entry, first = (request, rng.randrange(-(-case.seq_lens[request] // case.page_size))), num_pages(a)
    wrong = (-1, -2, -HUGE, first, first + 1, rng.randrange(first, HUGE), HUGE)
    return [{"block_tables": with_value(a["block_tables"], entry, page)} for page in wrong]


def empty_cache(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    cache, scales = a["kv_cache"], a["kv_cache_sf"]
    empty = [None if x is None else tuple(y[:0] for y in x) if isinstance(x, tuple) else x[:0] for x in (cache, scales)]
    return [{"kv_cache": empty[0], "kv_cache_sf": empty[1]}]


def lengths_beyond_pages(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    pages, room = -(-max(case.seq_lens) // case.page_size), a["block_tables"].shape[1] * case.page_size
    request = rng.randrange(len(case.seq_lens))
    lengths = (room + 1, room + rng.randrange(1, 1 << 20), 1 << 30)
    return [
        {"block_tables": a["block_tables"][:, : rng.randrange(pages)]},
        *({"seq_lens": with_value(a["seq_lens"], request, n), "max_seq_len": n} for n in lengths),
    ]


def lengths_out_of_range(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    request, device = rng.randrange(len(case.seq_lens)), a["seq_lens"].device
    found: list[Arguments] = [{"seq_lens": with_value(a["seq_lens"], request, -n)} for n in (1, 7, HUGE)]
    for length in (1 << 31, (1 << 32) - 1, (1 << 31) + rng.randrange(1 << 30)):
        lengths = [length if i == request else n for i, n in enumerate(case.seq_lens)]
        found.append({"seq_lens": torch.tensor(lengths, dtype=torch.uint32).to(device), "max_seq_len": 1 << 33})
    return found


def longest_lengths(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    return [{"max_seq_len": n} for n in (rng.randrange(max(case.seq_lens)), -1, -64, -(1 << 40))]


def query_bounds(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    bounds = a["q_cu_seq_lens"]
    if bounds is None:
        return []
    last, rows = len(case.seq_lens), a["query"].shape[0]
    wrong = {0: (1, -1, HUGE), last: (rows + 1, rows - 1, HUGE, -1), 1: (-1, case.q_len + 1, HUGE), 2: (0, HUGE)}
    changed = [with_value(bounds, index, value) for index, values in wrong.items() for value in values]
    return [{"q_cu_seq_lens": x} for x in (*changed, bounds[: rng.randrange(last + 1)])]


def other_batch_size(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    fewer = {"seq_lens": a["seq_lens"][:-1]}
    return [fewer, fewer if case.q_lens is not None else {"query": a["query"][:-1], "mask": None}]


# ---- dtypes, shapes and layouts; what any tensor of any call may have: `test_stored`, `test_shared_memory`


WRONG_DTYPES: dict[str, torch.dtype] = {
    "query": torch.float32,
    "block_tables": torch.int64,
    "seq_lens": torch.int64,
    "q_cu_seq_lens": torch.int64,
    "mask": torch.float32,
    "out": torch.float32,
    "lse": torch.float64,
}


def other_dtypes(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    given = {**a, "out": a["query"], "lse": a["query"][..., 0]}
    names = [name for name in WRONG_DTYPES if given[name] is not None]
    return [{n: torch.zeros(given[n].shape, dtype=WRONG_DTYPES[n], device=given[n].device)} for n in names]


def other_shapes(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    query = a["query"]
    shapes = [(*query.shape[:2], 32), query.shape[:2], (*query.shape, 1)]
    if case.heads[1] > 1:
        shapes.append((query.shape[0], 3 * case.heads[1] + 1, 64))
    return [{"query": torch.zeros(shape, dtype=query.dtype, device=query.device)} for shape in shapes]


def other_output_shapes(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    query, heads = a["query"], case.heads[0]
    like = {"dtype": query.dtype, "device": query.device}
    return [
        {"out": torch.zeros(query.shape[0] + 1, heads, case.head_dim, **like)},
        {"out": torch.zeros(query.shape[0], heads, 2 * case.head_dim, **like)[..., ::2]},
        {"lse": torch.zeros(query.shape[0], heads + 1, device=query.device)},
        {"sinks": torch.zeros(heads + 1, device=query.device)},
        {"mask": torch.zeros(query.shape[0], 1, dtype=torch.int16, device=query.device)},
    ]


def other_caches(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    cache = a["kv_cache"]
    k, v = cache if isinstance(cache, tuple) else cache.unbind(1)
    changes: list[Arguments] = [
        {"kv_cache": (k, v[:-1])},
        {"kv_cache": (k[..., :16], v)},
        {"kv_cache": (k, v, v)},
        {"kv_cache": k},
        {"kv_cache": (k, v.to(torch.float64) if v.element_size() > 1 else v.view(torch.int8))},
        {"kv_cache": (k.transpose(2, 3), v.transpose(2, 3))},
        {"kv_cache_sf": (k, v)},
    ]
    if case.kv == "nvfp4":
        changes += [{"kv_cache_sf": None}, {"kv_cache_sf": tuple(x[..., :1] for x in a["kv_cache_sf"])}]
    return changes


# ---- numbers and names

WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "bmm1_scale": (math.nan, math.inf, 1e39, "1", [1.0] * 10_000, True),
    "bmm2_scale": (math.nan, -math.inf, "x", (1.0,), True),
    "o_scale": (0.0, -1.0, math.nan, "1", True),
    "window_left": (None, 1.5, "2", [1] * 10_000),
    "kv_layout": ("DHN", None, 3, ["NHD"] * 10_000),
    "enable_pdl": (1, "yes", 0.0),
    "q_len_per_req": (0, -1, 1.0, "1"),
    "max_seq_len": (1.5, None, "64"),
    "return_lse": (1, None, "yes"),
    "backend": ("cuda", "nonsense", "cudnn", 7, None),
}


def options(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    return [{name: value} for name, values in WRONG_OPTIONS.items() for value in values]


def tensors_of_scales(a: Arguments, case: XqaCase, rng: random.Random) -> list[Arguments]:
    device = a["query"].device
    wrong = torch.ones(2, device=device), torch.ones(1, dtype=torch.int32, device=device)
    return [{name: value} for name in ("bmm1_scale", "bmm2_scale") for value in wrong]


# What the message has; of one wrong option its name.
CORRUPTIONS: dict[Choices, str] = {
    page_numbers: r"block_tables\[\d+, \d+\], page \d+ of request \d+",
    empty_cache: "the cache has no pages",
    lengths_beyond_pages: "seq_lens must be within .* pages of block_tables",
    lengths_out_of_range: "seq_lens must be within",
    longest_lengths: "max_seq_len",
    query_bounds: "q_cu_seq_lens|cum_seq_lens_q",
    other_batch_size: r"seq_lens must have one length for each|batch_size \* q_len_per_req",
    other_dtypes: "must have dtype|k and v must have dtype",
    other_shapes: r"same head dimension|multiple of num_kv_heads|must have shape|batch_size \* q_len_per_req",
    other_output_shapes: "(out|lse|sinks|mask) must have",
    other_caches: "kv_cache|k and v|kv_cache_sf",
    options: "",
    tensors_of_scales: "(bmm1|bmm2)_scale must be a number or a floating-point tensor",
}


# ---- calls


def call(arguments: Arguments, face: str) -> Any:
    """A call under one of the two names."""
    if face == "xqa":
        return xqa_batch_decode_with_kv_cache(**arguments)
    arguments = dict(arguments)
    bounds = arguments.pop("q_cu_seq_lens")
    if bounds is not None:
        arguments |= {"cum_seq_lens_q": bounds, "max_q_len": arguments["q_len_per_req"]}
    return trtllm_batch_decode_with_kv_cache(**arguments)


def run(count: int, device: str = "cpu") -> Counter[str]:
    """`count` corrupted calls; the number of each kind. A call that runs, another error, or a message that does not
    name the argument is raised here.
    """
    wholes: list[Built] = [build(case, device) for case in BASES]
    kinds: Counter[str] = Counter()
    for seed in range(count):
        rng = random.Random(seed)
        whole = wholes[seed % len(wholes)]
        corruption, words = rng.choice(list(CORRUPTIONS.items()))
        choices = corruption(whole.arguments, whole.case, rng)
        if not choices:
            continue
        changes, what = rng.choice(choices), f"{corruption.__name__}, seed {seed}"
        message = raised(whole.arguments | changes, rng.choice(["xqa", "trtllm"]), what)
        if corruption is options:
            (name,) = changes
            words = "q_len_per_req|max_q_len" if name == "q_len_per_req" else name
        assert re.search(words, message), f"{what}: {message}"
        assert len(message) <= LONGEST_MESSAGE, f"{what}: {message[:LONGEST_MESSAGE]}"
        kinds[corruption.__name__] += 1
    return kinds


def raised(arguments: Arguments, face: str, what: str) -> str:
    """The message of the error that a call raises."""
    try:
        call(arguments, face)
    except EXPECTED as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what}: no error")


def assert_valid_calls_are_right(device: str = "cpu") -> None:
    """The calls before their corruption."""
    for case in BASES:
        built = build(case, device)
        for face in ("xqa", "trtllm"):
            out, lse = call(built.arguments, face)
            assert built.check(out, lse) == ""
