"""Corrupted decode calls: each must raise an error that names the argument, before anything is launched."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Corruption(NamedTuple):
    """`apply` returns changed arguments, or None where it means nothing for the case; `named` is in the message."""

    name: str
    named: str
    apply: Callable[[Arguments, XqaCase, random.Random], Arguments | None]


CORRUPTIONS: list[Corruption] = []


def corrupts(named: str) -> Callable[[Callable[..., Arguments | None]], Callable[..., Arguments | None]]:
    def add(apply: Callable[..., Arguments | None]) -> Callable[..., Arguments | None]:
        CORRUPTIONS.append(Corruption(apply.__name__, named, apply))
        return apply

    return add


def with_value(x: torch.Tensor, index: int | tuple[int, int], value: int) -> torch.Tensor:
    """A copy with another number at an index."""
    changed = x.cpu().to(torch.int64)
    changed[index] = value
    return changed.to(x.dtype).to(x.device)


def num_pages(a: Arguments) -> int:
    cache = a["kv_cache"]
    return int((cache[0] if isinstance(cache, tuple) else cache).shape[0])


def live_entry(case: XqaCase, rng: random.Random) -> tuple[int, int]:
    """Some entry of the table that the call reads."""
    request = rng.choice([i for i, n in enumerate(case.seq_lens) if n])
    return request, rng.randrange(-(-case.seq_lens[request] // case.page_size))


# ---- page numbers and lengths


@corrupts(r"block_tables\[\d+, \d+\], page \d+ of request \d+")
def negative_page(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    return {"block_tables": with_value(a["block_tables"], live_entry(case, rng), -rng.choice([1, 2, HUGE]))}


@corrupts(r"block_tables\[\d+, \d+\], page \d+ of request \d+")
def page_beyond(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    page = rng.choice([num_pages(a), num_pages(a) + 1, rng.randrange(num_pages(a), HUGE), HUGE])
    return {"block_tables": with_value(a["block_tables"], live_entry(case, rng), page)}


@corrupts("the cache has no pages")
def empty_cache(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    cache, scales = a["kv_cache"], a["kv_cache_sf"]
    empty = [None if x is None else tuple(y[:0] for y in x) if isinstance(x, tuple) else x[:0] for x in (cache, scales)]
    return {"kv_cache": empty[0], "kv_cache_sf": empty[1]}


@corrupts("seq_lens must be within .* pages of block_tables")
def narrow_table(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    pages = -(-max(case.seq_lens) // case.page_size)
    return {"block_tables": a["block_tables"][:, : rng.randrange(pages)]}


@corrupts("seq_lens must be within .* pages of block_tables")
def length_beyond_pages(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    room = a["block_tables"].shape[1] * case.page_size
    length = rng.choice([room + 1, room + rng.randrange(1, 1 << 20), 1 << 30])
    request = rng.randrange(len(case.seq_lens))
    return {"seq_lens": with_value(a["seq_lens"], request, length), "max_seq_len": length}


@corrupts("seq_lens must be within")
def length_of_2_to_31(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    lengths = list(case.seq_lens)
    lengths[rng.randrange(len(lengths))] = rng.choice([1 << 31, (1 << 32) - 1, (1 << 31) + rng.randrange(1 << 30)])
    return {"seq_lens": torch.tensor(lengths, dtype=torch.uint32).to(a["seq_lens"].device), "max_seq_len": 1 << 33}


@corrupts("seq_lens must be within")
def negative_length(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    request = rng.randrange(len(case.seq_lens))
    return {"seq_lens": with_value(a["seq_lens"], request, -rng.choice([1, 7, HUGE]))}


@corrupts("max_seq_len")
def low_max_seq_len(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    return {"max_seq_len": rng.randrange(max(case.seq_lens))}


@corrupts("max_seq_len must be at least 0")
def negative_max_seq_len(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    return {"max_seq_len": -rng.choice([1, 64, 1 << 40])}


@corrupts("q_cu_seq_lens|cum_seq_lens_q")
def query_bounds(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments | None:
    bounds = a["q_cu_seq_lens"]
    if bounds is None:
        return None
    last, rows = len(case.seq_lens), a["query"].shape[0]
    changes = [
        (0, rng.choice([1, -1, HUGE])),
        (last, rng.choice([rows + 1, rows - 1, HUGE, -1])),
        (1, rng.choice([-1, case.q_len + 1, HUGE])),
        (2, rng.choice([0, HUGE])),
    ]
    return {"q_cu_seq_lens": with_value(bounds, *rng.choice(changes))}


@corrupts("q_cu_seq_lens|cum_seq_lens_q")
def few_query_bounds(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments | None:
    bounds = a["q_cu_seq_lens"]
    return None if bounds is None else {"q_cu_seq_lens": bounds[: rng.randrange(len(case.seq_lens) + 1)]}


@corrupts("seq_lens must have one length for each|batch_size \\* q_len_per_req")
def other_batch_size(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments | None:
    if case.q_lens is not None:
        return {"seq_lens": a["seq_lens"][:-1]}
    return rng.choice([{"seq_lens": a["seq_lens"][:-1]}, {"query": a["query"][:-1], "mask": None}])


# ---- dtypes, shapes, layouts


WRONG_DTYPES: dict[str, torch.dtype] = {
    "query": torch.float32,
    "block_tables": torch.int64,
    "seq_lens": torch.int64,
    "q_cu_seq_lens": torch.int64,
    "mask": torch.float32,
    "out": torch.float32,
    "lse": torch.float64,
}


@corrupts("must have dtype|k and v must have dtype")
def wrong_dtype(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments | None:
    name = rng.choice(list(WRONG_DTYPES))
    given = {**a, "out": a["query"], "lse": a["query"][..., 0]}[name]
    return None if given is None else {name: torch.zeros(given.shape, dtype=WRONG_DTYPES[name], device=given.device)}


@corrupts("must be a torch.Tensor|must be a tensor or a pair")
def no_tensor(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    name = rng.choice(["query", "block_tables", "seq_lens", "workspace_buffer", "kv_cache", "out"])
    return {name: rng.choice([3, "no tensor", list(range(100_000)), {}])}


@corrupts("same head dimension|multiple of num_kv_heads|must have shape|batch_size \\* q_len_per_req")
def other_shape(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    query, device = a["query"], a["query"].device
    shapes = [(*query.shape[:2], 32), (query.shape[0], 3 * case.heads[1] + 1, 64), query.shape[:2], (*query.shape, 1)]
    if case.heads[1] == 1:
        del shapes[1]
    return {"query": torch.zeros(rng.choice(shapes), dtype=query.dtype, device=device)}


@corrupts("(out|lse|sinks|mask) must have")
def other_output_shape(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    query, heads = a["query"], case.heads[0]
    like = {"dtype": query.dtype, "device": query.device}
    return rng.choice(
        [
            {"out": torch.zeros(query.shape[0] + 1, heads, case.head_dim, **like)},
            {"out": torch.zeros(query.shape[0], heads, 2 * case.head_dim, **like)[..., ::2]},
            {"lse": torch.zeros(query.shape[0], heads + 1, device=query.device)},
            {"sinks": torch.zeros(heads + 1, device=query.device)},
            {"mask": torch.zeros(query.shape[0], 1, dtype=torch.int16, device=query.device)},
        ]
    )


@corrupts("kv_cache|k and v|kv_cache_sf")
def other_cache(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
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
    return rng.choice(changes)


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


@corrupts("")
def wrong_option(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    name = rng.choice(list(WRONG_OPTIONS))
    return {name: rng.choice(WRONG_OPTIONS[name])}


@corrupts("(bmm1|bmm2)_scale must be a number or a floating-point tensor")
def wrong_scale_tensor(a: Arguments, case: XqaCase, rng: random.Random) -> Arguments:
    device = a["query"].device
    value = rng.choice([torch.ones(2, device=device), torch.ones(1, dtype=torch.int32, device=device)])
    return {rng.choice(["bmm1_scale", "bmm2_scale"]): value}


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


def expected_words(corruption: Corruption, changes: Arguments) -> str:
    """What a message must contain: of one wrong option, its name, or the engines' name of it."""
    if corruption.name == "wrong_option":
        (name,) = changes
        return "q_len_per_req|max_q_len" if name == "q_len_per_req" else name
    return corruption.named


def run(count: int, device: str = "cpu") -> Counter[str]:
    """`count` corrupted calls; the number of each kind. A call that runs, another error, or a message that does not
    name the argument is raised here.
    """
    wholes: list[Built] = [build(case, device) for case in BASES]
    kinds: Counter[str] = Counter()
    for seed in range(count):
        rng = random.Random(seed)
        whole = wholes[seed % len(wholes)]
        corruption = CORRUPTIONS[rng.randrange(len(CORRUPTIONS))]
        changes = corruption.apply(whole.arguments, whole.case, rng)
        if changes is None:
            continue
        message = raised(whole.arguments | changes, rng.choice(["xqa", "trtllm"]), f"{corruption.name}, seed {seed}")
        assert re.search(expected_words(corruption, changes), message), f"{corruption.name}, seed {seed}: {message}"
        assert len(message) <= LONGEST_MESSAGE, f"{corruption.name}, seed {seed}: {message[:LONGEST_MESSAGE]}"
        kinds[corruption.name] += 1
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
