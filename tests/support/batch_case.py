"""Cases, batches and single requests: their tensors, calls, and the matrix of batches. Verdicts: `formula`.

Memory that belongs to no token is NaN: pages that no request has, slots after a request's last token, gaps between
heads; index entries that no request has are no pages.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import cute_attn
from cute_attn.dispatch import capabilities, select
from cute_attn.errors import Refusal
from cute_attn.problem import Features
from cute_attn.request.bit_packing import packbits
from cute_attn.runtime.arch import Arch
from tests.support import multi_item
from tests.support.case import BatchCase
from tests.support.paged_cache import NO_PAGE, SPARE_PAGES, Pages, blank, ends, ints, scattered, stacked, store

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
WORKSPACE = 32 << 20
CUDA = torch.device("cuda")
GUARD = 4096  # poisoned elements before and after every tensor of a single request
EMPTY_ROW_STEP = 7  # rows 0, 7, 14, ... of a custom mask see nothing


@dataclass(frozen=True)
class Request:
    """One request as the mathematics see it: what is stored, without where."""

    q: torch.Tensor  # [qo_len, num_qo_heads, head_dim_qk], of the case's dtype
    k: torch.Tensor  # [kv_len, num_kv_heads, head_dim_qk], fp64
    v: torch.Tensor
    keep: torch.Tensor | None  # bool [qo_len, kv_len]


@dataclass(frozen=True)
class BatchInputs:
    requests: list[Request]
    q: torch.Tensor
    kv: tuple[Any, ...]  # (cache,), or (k, v) without pages
    kv_cache_sf: Any
    qo_indptr: torch.Tensor  # index arrays are on the CPU
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    tables: torch.Tensor | None  # of pages, on q's device
    masks: dict[str, Any]
    sinks: torch.Tensor | None
    head_scales: tuple[torch.Tensor, ...]  # of q, k and v, or none


# ------------------------------------------------------------------------------------------- tensors


def moved(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`x` on a device with its strides, and the memory between its elements."""
    if torch.device(device).type == "cpu":
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def make(case: BatchCase, device: torch.device | str = "cpu", numbers: Sequence[torch.Tensor] = ()) -> BatchInputs:
    """The tensors of a case, with random numbers or with `numbers` of q, k and v of all tokens."""
    device = torch.device(device)
    generator = torch.Generator().manual_seed(case.seed)
    index_dtype = getattr(torch, case.indices)
    q, *kv = numbers or _numbers(case, generator)
    k, v = (store(x, case.stored_dtype) for x in kv)
    parts = [x for pair in zip(k.parts, v.parts, strict=True) for x in pair]
    q = q.to(getattr(torch, case.dtype))
    q[: case.first] = math.nan
    first = 2 if case.slack else 0
    if case.paged:
        pages = Pages(case.kv_lens, case.page_size, generator)
        around = torch.full((first,), NO_PAGE)
        bounds, indices = pages.indptr + first, torch.cat((around, pages.indices, around))
        slots, shape, tables = pages.all_slots(), (pages.num_pages, case.page_size), pages.tables().to(device)
    else:
        bounds, indices = ends(case.kv_lens) + first, torch.empty(0)
        slots, shape, tables = torch.arange(first, int(bounds[-1])), (1, int(bounds[-1]) + SPARE_PAGES), None
    if case.single:
        given, *stored = placed(case, (q, *parts), device)
        stored = [x.transpose(0, 1) if case.kv_layout == "HND" else x for x in stored]
    else:
        gap = {"strided": 16, "halves": 8}.get(case.cache, 0)
        given = q.to(device)
        stored = [moved(scattered(x, slots, shape, case.kv_layout, gap), device) for x in parts]
    if case.kind == "ragged":
        stored = [x[0] for x in stored]
    pairs: list[Any] = [tuple(stored[i : i + 2]) for i in range(0, len(stored), 2)]
    if case.cache == "one":
        pairs = [stacked(*pair) for pair in pairs]
    elif case.cache == "list":
        pairs = [list(pair) for pair in pairs]
    requests, items = _requests(case, q, k.values, v.values, generator), dict[str, Any]()
    if case.mask == "items":
        drawn = multi_item.draw(case.qo_lens, case.kv_lens, case.longest_item, case.seed)
        requests = [dataclasses.replace(r, keep=keep) for r, keep in zip(requests, drawn.keep, strict=True)]
        items = drawn.arguments(device)
    last = ints([(n - 1) % case.page_size + 1 if n else 0 for n in case.kv_lens])
    sinks = torch.randn(case.num_qo_heads, generator=generator).to(device) if case.sinks else None
    return BatchInputs(
        requests,
        given,
        (pairs[0],) if case.paged else pairs[0],
        pairs[1] if len(pairs) > 1 else None,
        (ends(case.qo_lens) + case.first).to(index_dtype),
        bounds.to(index_dtype),
        indices.to(index_dtype),
        last.to(index_dtype),
        tables,
        {name: moved(mask, device) for name, mask in _masks(case, requests).items()} | items,
        sinks,
        tuple(x.to(device) for x in _head_scales(case, generator)),
    )


def _numbers(case: BatchCase, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v. All kv heads of "expanded" ones are the first."""
    keys = (sum(case.kv_lens), case.num_kv_heads)
    shapes = {"q": (case.rows, case.num_qo_heads, case.head_dim_qk)}
    shapes |= {"k": (*keys, case.head_dim_qk), "v": (*keys, case.head_dim_vo)}
    drawn = {name: torch.randn(shapes[name], generator=generator) for name in ("qkv" if case.single else "kvq")}
    q, k, v = (drawn[name] for name in "qkv")
    if case.storage == "expanded":
        k, v = (x[:, :1].expand(x.shape) for x in (k, v))
    if case.spike:
        k[case.spike_key] = q[0, :1].sign() * case.spike
    return q * case.q_gain, k, v + case.v_mean


def _head_scales(case: BatchCase, generator: torch.Generator) -> list[torch.Tensor]:
    found = []
    for heads in (case.num_qo_heads, case.num_kv_heads, case.num_kv_heads) if case.head_scales else ():
        found.append(torch.rand(heads, generator=generator) + 0.5)
        if case.head_scales == "signed":
            found[-1][::2] *= -1
    return found


def _requests(
    case: BatchCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
) -> list[Request]:
    lens = list(zip(case.qo_lens, case.kv_lens, strict=True))
    drawn = [random_mask(*lengths, generator) if case.mask in ("custom", "packed") else None for lengths in lens]
    tensors = q[case.first :].split(case.qo_lens), k.split(case.kv_lens), v.split(case.kv_lens)
    return [Request(*request) for request in zip(*tensors, drawn, strict=True)]


def random_mask(qo_len: int, kv_len: int, generator: torch.Generator) -> torch.Tensor:
    """Six keys in ten, but none in the middle third of the keys, and none at all for some rows."""
    keep = torch.rand(qo_len, kv_len, generator=generator) < 0.6
    keep[:, kv_len // 3 : 2 * kv_len // 3] = False
    if qo_len > 1:
        keep[::EMPTY_ROW_STEP] = False
    return keep


def _masks(case: BatchCase, requests: list[Request]) -> dict[str, torch.Tensor]:
    if case.single and requests[0].keep is not None:
        return placed_mask(case, requests[0].keep)
    bits = [r.keep.flatten() for r in requests if r.keep is not None]
    nothing = torch.empty(0, dtype=torch.bool)
    if case.mask == "custom":
        return {"custom_mask": torch.cat([nothing, *bits])}
    if case.mask == "packed":  # the bits after a request's last are set and must not be read
        padded = [torch.nn.functional.pad(b, (0, -b.numel() % 8), value=True) for b in bits]
        return {"packed_custom_mask": packbits(torch.cat([nothing, *padded]), "little")}
    return {}


# ------------------------------------------------------------------------------- single requests in memory


def placed(case: BatchCase, values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """q, k, v and block scales, `[tokens, heads, width]` each, as `storage` has them."""
    views = []
    if case.storage == "packed_qkv":
        heads, width = [x.shape[1] for x in values], max(case.head_dim_qk, case.head_dim_vo)
        token = sum(heads) * width
        size = 2 * GUARD + max(len(x) for x in values) * token
        whole = blank((size,), values[0].dtype).to(device)
        places = [GUARD + sum(heads[:i]) * width for i in range(len(values))]
        views = [whole.as_strided(x.shape, (token, width, 1), at) for x, at in zip(values, places, strict=True)]
    else:
        for i, x in enumerate(values):
            strides, shift = _strides(case, x, i > 0)
            size = 2 * GUARD + shift + len(x) * strides[0] + x.shape[1] * strides[1]
            views.append(blank((size,), x.dtype).to(device).as_strided(x.shape, strides, GUARD + shift))
    for view, x in zip(views, values, strict=True):
        own = x.shape[1] if view.stride(1) else 1
        view[:, :own].copy_(x[:, :own])
    return views


def _strides(case: BatchCase, x: torch.Tensor, kv: bool) -> tuple[tuple[int, int, int], int]:
    """Strides, and elements before the first."""
    n, h, d = x.shape
    if case.storage == "expanded" and kv:
        return (d, 0, 1), 0
    gap, tail, shift = 0, 0, 0
    if case.storage == "padded":
        gap, tail = 16 // x.itemsize, 48 // x.itemsize
    elif case.storage == "odd" and not kv:
        gap, tail, shift = 1, 1, 1
    heads_first = kv and case.kv_layout == "HND"
    if heads_first != (case.storage == "transposed"):
        return (d + gap, n * (d + gap) + tail, 1), shift
    return (h * (d + gap) + tail, d + gap, 1), shift


def placed_mask(case: BatchCase, keep: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mask within a wider one. Bits that belong to no element are 1."""
    if case.mask == "custom":
        wide = torch.ones(len(keep), keep.shape[1] + 3, dtype=torch.bool)
        wide[:, :-3] = keep
        return {"custom_mask": wide[:, :-3]}
    packed = packbits(torch.nn.functional.pad(keep.flatten(), (0, -keep.numel() % 8), value=True), "little")
    first = GUARD + (case.storage == "odd")
    wide = torch.full((packed.numel() + 2 * GUARD,), 0xFF, dtype=torch.uint8)
    own = wide[first : first + packed.numel()]
    return {"packed_custom_mask": own.copy_(packed)}


# --------------------------------------------------------------------------------------------- calls


def wrapper(case: BatchCase, device: torch.device | str = "cpu", **arguments: Any) -> Any:
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    kinds = {
        "paged": cute_attn.BatchPrefillWithPagedKVCacheWrapper,
        "ragged": cute_attn.BatchPrefillWithRaggedKVCacheWrapper,
        "decode": cute_attn.BatchDecodeWithPagedKVCacheWrapper,
    }
    return kinds[case.kind](workspace, case.kv_layout, **arguments)


def plan_arguments(case: BatchCase, inputs: BatchInputs) -> dict[str, Any]:
    """Everything that `plan` gets, by name."""
    same = {
        name: getattr(case, name)
        for name in (
            *("num_qo_heads", "num_kv_heads", "window_left", "logits_soft_cap", "pos_encoding_mode", "sm_scale"),
            *("rope_scale", "rope_theta", "fixed_split_size", "disable_split_kv", "lse_base"),
        )
    }
    kv_dtype = None if case.kv_dtype is None else case.stored_dtype
    same |= {"q_data_type": case.dtype, "kv_data_type": kv_dtype, "o_data_type": case.o_dtype}
    if case.kind == "decode":
        indices = {"indptr": inputs.kv_indptr, "indices": inputs.kv_indices, "last_page_len": inputs.last_page_len}
        q_len = case.qo_lens[0] if case.qo_lens else 1
        return {**indices, **same, "head_dim": case.head_dim_qk, "page_size": case.page_size, "q_len_per_req": q_len}
    same |= {"head_dim_qk": case.head_dim_qk, "head_dim_vo": case.head_dim_vo, "causal": case.mask == "causal"}
    same |= {"qo_indptr": inputs.qo_indptr, **inputs.masks}
    if not case.paged:
        return {**same, "kv_indptr": inputs.kv_indptr}
    return {
        **same,
        "paged_kv_indptr": inputs.kv_indptr,
        "paged_kv_indices": inputs.kv_indices,
        "paged_kv_last_page_len": inputs.last_page_len,
        "page_size": case.page_size,
    }


def run_arguments(case: BatchCase, inputs: BatchInputs) -> dict[str, Any]:
    """Keywords of `run`."""
    arguments: dict[str, Any] = {"return_lse": case.return_lse, "sinks": inputs.sinks}
    arguments |= case.scale_arguments(inputs.q.device, "q_scale", "k_scale", "v_scale")
    return arguments | {"kv_cache_sf": inputs.kv_cache_sf}


def call(
    case: BatchCase, inputs: BatchInputs, planned: Any = None, *, backend: str = "auto", **extra: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of a single request or of a wrapper: a new one on `backend`, or one that is planned already."""
    arguments = {**run_arguments(case, inputs), **extra}
    if case.single:
        return _single(case, inputs, {"backend": backend, **arguments})
    if planned is None:
        planned = wrapper(case, inputs.q.device, backend=backend)
        planned.plan(**plan_arguments(case, inputs))
    result = planned.run(inputs.q, *inputs.kv, *inputs.head_scales, **arguments)
    return result if case.return_lse else (result, None)


def _single(
    case: BatchCase, inputs: BatchInputs, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function of a single request, with what it takes of the arguments of plans and runs."""
    function, q = cute_attn.single_prefill_with_kv_cache, inputs.q
    if case.kind == "single_decode":
        function, q = cute_attn.single_decode_with_kv_cache, q[0]
    given = {**plan_arguments(case, inputs), "kv_layout": case.kv_layout, **arguments}
    given["o_dtype"] = None if case.o_dtype is None else getattr(torch, case.o_dtype)
    accepted = inspect.signature(function).parameters
    options = {name: x for name, x in given.items() if name in accepted}
    result = function(q, *inputs.kv, *inputs.head_scales, **options)
    return result if case.return_lse else (result, None)


# --------------------------------------------------------------------------------------------- cases

DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (192, 128))
DTYPES = ("float16", "bfloat16")


def paged(qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], page_size: int = 16, **rest: Any) -> BatchCase:
    return BatchCase("paged", qo_lens, kv_lens, page_size=page_size, **rest)


def ragged(qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], **rest: Any) -> BatchCase:
    return BatchCase("ragged", qo_lens, kv_lens, **rest)


def decode(kv_lens: tuple[int, ...], page_size: int = 16, q_len: int = 1, **rest: Any) -> BatchCase:
    return BatchCase("decode", (q_len,) * len(kv_lens), kv_lens, page_size=page_size, **rest)


def heads(qo: int, kv: int) -> dict[str, Any]:
    return {"num_qo_heads": qo, "num_kv_heads": kv}


def dims(qk: int, vo: int | None = None) -> dict[str, Any]:
    return {"head_dim_qk": qk, "head_dim_vo": vo or qk}


UNEVEN = ((17, 0, 1, 33), (65, 40, 129, 33))

SMALL: tuple[BatchCase, ...] = (
    # lengths
    ragged(*UNEVEN, slack=True, dtype="bfloat16", **dims(128)),
    decode((1, 65, 0, 130), **heads(4, 1), **dims(128)),
    decode((63, 0, 17), dtype="bfloat16", **heads(8, 2), slack=True),
    paged((5, 3), (0, 0)),
    paged((), ()),
    ragged((), ()),
    decode(()),
    ragged((0, 9), (0, 0), sinks=True),
    paged((33, 20), (7, 20), mask="causal"),  # rows that see nothing
    decode((2, 9, 70), q_len=4, **heads(4, 2)),
    # page sizes, layouts, caches
    *(paged((9, 4), (33, 18), page_size=n, mask="causal") for n in (1, 2, 3, 7, 64)),
    paged((9, 4), (33, 18), page_size=5, cache="list", kv_layout="HND", **heads(4, 2)),
    paged((9, 4), (33, 18), page_size=5, cache="strided", **heads(4, 2), **dims(80)),
    paged((9, 4), (33, 18), page_size=8, cache="strided", kv_layout="HND", **heads(4, 2), **dims(192, 128)),
    ragged((9, 4), (33, 18), kv_layout="HND", indices="int64", **heads(3, 3), **dims(96)),
    decode((65, 12), kv_layout="HND", cache="one", **heads(4, 2), **dims(112)),
    decode((65, 12), cache="strided", **heads(7, 1), **dims(256)),
    paged(*UNEVEN, mask="causal", cache="strided", dtype="bfloat16", **dims(512)),
    ragged((9, 4), (33, 18), mask="custom", cache="strided", **heads(4, 2), **dims(72)),
    decode((65, 12), page_size=5, cache="strided", kv_layout="HND", **dims(104)),
    # masks
    *(paged((9, 5, 1), (33, 18, 40), mask=mask) for mask in ("custom", "packed")),
    *(ragged((9, 5, 1), (35, 18, 40), mask=mask, window_left=9) for mask in ("custom", "packed")),
    paged(*UNEVEN, window_left=0, mask="causal"),
    ragged((50, 40, 3), (400, 40, 70), mask="items", dtype="bfloat16", slack=True, **heads(3, 3), **dims(128)),
    paged((50, 0, 70), (65, 20, 170), 5, mask="items", window_left=11, logits_soft_cap=30.0),
    paged((9, 60), (300, 60), 1, mask="items", longest_item=80, kv_layout="HND", sinks=True),
    # logits
    paged(*UNEVEN, mask="causal", logits_soft_cap=30.0),
    ragged(*UNEVEN, mask="causal", pos_encoding_mode="ALIBI", **heads(3, 1)),
    paged(*UNEVEN, mask="causal", pos_encoding_mode="ROPE_LLAMA", rope_theta=5e5, rope_scale=4.0),
    decode((65, 12, 0), pos_encoding_mode="ROPE_LLAMA", dtype="bfloat16"),
    decode((65, 12, 0), pos_encoding_mode="ALIBI", **heads(4, 2)),
    paged(*UNEVEN, sm_scale=-0.1),
    paged(*UNEVEN, q_scale=0.5, k_scale=1.5, v_scale=-1.25),
    paged(*UNEVEN, q_scale=0.5, k_scale=1.5, v_scale=1.25, tensor_scales=True, mask="causal"),
    decode((65, 12, 0), q_scale=0.5, k_scale=1.5, v_scale=1.25, sinks=True),
    ragged(*UNEVEN, return_lse=False, o_dtype="bfloat16"),
    paged(*UNEVEN, o_dtype="float32", lse_base="ln", sinks=True),
    # fp8 and NVFP4
    paged(*UNEVEN, kv_dtype=E5M2, kv_layout="HND", cache="strided", dtype="bfloat16", k_scale=0.5, v_scale=2.0),
    ragged(*UNEVEN, kv_dtype=E4M3, **heads(4, 2)),
    decode((65, 12, 0), kv_dtype=E4M3, cache="one", dtype="bfloat16", **heads(4, 1), **dims(128)),
    paged(*UNEVEN, kv_dtype=E4M3, pos_encoding_mode="ROPE_LLAMA", mask="causal"),
    paged(*UNEVEN, kv_dtype="nvfp4", mask="causal", **dims(128)),
    paged((9, 4), (33, 18), kv_dtype="nvfp4", page_size=5, kv_layout="HND", cache="one", dtype="bfloat16"),
    ragged(*UNEVEN, kv_dtype="nvfp4", mask="custom"),
    decode((65, 12, 0), kv_dtype="nvfp4", **heads(4, 2), **dims(128)),
    decode((65, 12, 0), kv_dtype=E4M3, cache="strided", **heads(8, 1), **dims(512)),
    paged(*UNEVEN, kv_dtype=E5M2, cache="strided", **dims(80)),
    paged(*UNEVEN, kv_dtype="nvfp4", pos_encoding_mode="ROPE_LLAMA", cache="list"),
    # splits
    paged((3, 40), (200, 129), fixed_split_size=4, mask="causal"),
    paged((3, 40), (200, 129), disable_split_kv=True),
    ragged((3, 40), (200, 129), fixed_split_size=64),
    decode((200, 5, 0, 77), fixed_split_size=2, **heads(4, 2)),
)


def random_options(rng: random.Random, max_len: int) -> dict[str, Any]:
    """Any legal mixture of what single requests and batches have."""
    pos_encoding_mode = rng.choice(("NONE", "NONE", "NONE", "ROPE_LLAMA", "ALIBI"))
    return {
        "pos_encoding_mode": pos_encoding_mode,
        "dtype": rng.choice(DTYPES),
        "kv_layout": rng.choice(("NHD", "HND")),
        "window_left": rng.choice((-1, -1, rng.randint(0, max_len))),
        "logits_soft_cap": rng.choice((0.0, 0.0, 3.0 if pos_encoding_mode == "ALIBI" else 30.0)),
        "rope_scale": rng.choice((1.0, 4.0)),
        "rope_theta": rng.choice((1e4, 5e5)),
        "sm_scale": rng.choice((None, None, rng.uniform(-0.05, 0.08))),
        "k_scale": rng.choice((None, rng.uniform(0.5, 1.2))),
        "v_scale": rng.choice((None, rng.uniform(0.7, 1.3))),
        "tensor_scales": rng.random() < 0.3,
        "return_lse": rng.random() < 0.8,
    }


def random_batch_case(seed: int, max_len: int = 700, max_batch: int = 12) -> BatchCase:
    """A batch for fuzzing."""
    rng = random.Random(seed)
    kind = rng.choice(("paged", "paged", "ragged", "decode"))
    batch = rng.choice((1, 2, rng.randint(1, max_batch)))

    def length(largest: int) -> int:
        return rng.choice((0, 1, rng.randint(1, min(largest, 40)), rng.randint(1, largest), rng.randint(1, largest)))

    kv_lens = tuple(length(max_len) for _ in range(batch))
    q_len = rng.choice((1, 1, 1, 2, 4)) if kind == "decode" else 0
    qo_lens = tuple(q_len or length(max_len // 3) for _ in range(batch))
    num_kv_heads = rng.choice((1, 2, 3, 4))
    qk, vo = rng.choice(DIMS[:-1] if kind == "decode" else DIMS)
    split = rng.choice(("", "", "fixed", "none"))
    return BatchCase(
        *(kind, qo_lens, kv_lens, num_kv_heads * rng.choice((1, 2, 3, 4, 7, 8)), num_kv_heads, qk, vo),
        **random_options(rng, max_len),
        page_size=1 if kind == "ragged" else rng.choice((1, 2, 5, 8, 16, 16, 32, 64, 128)),
        kv_dtype=rng.choice((None, None, None, E4M3, E5M2, "nvfp4")),
        cache=rng.choice(("pair", "strided") if kind == "ragged" or qk != vo else ("pair", "list", "one", "strided")),
        mask="none" if kind == "decode" else rng.choice(("none", "causal", "causal", "custom", "packed", "packed")),
        q_scale=rng.choice((None, rng.uniform(0.7, 1.2))),
        sinks=rng.random() < 0.25,
        fixed_split_size=rng.randint(1, 12) * 16 if split == "fixed" else None,
        disable_split_kv=split == "none",
        lse_base=rng.choice(("log2", "log2", "ln")),
        indices=rng.choice(("int32", "int64")),
        slack=rng.random() < 0.3,
        seed=seed,
    )


def random_lengths(case: BatchCase, seed: int, max_len: int) -> BatchCase:
    """The same batch with other lengths that fit the same captured launch: no more rows and no more pages."""
    rng = np.random.default_rng(seed)
    kv_lens = tuple(int(n) for n in rng.integers(0, max_len + 1, len(case.kv_lens)))
    if case.kind == "decode":
        return dataclasses.replace(case, kv_lens=kv_lens, seed=seed)
    rows = int(rng.integers(0, sum(case.qo_lens) + 1))
    cuts = np.sort(rng.integers(0, rows + 1, len(case.qo_lens) - 1))
    qo_lens = tuple(int(n) for n in np.diff([0, *cuts, rows]))
    return dataclasses.replace(case, qo_lens=qo_lens, kv_lens=kv_lens, seed=seed)


def features(case: BatchCase, device: torch.device = CUDA) -> Features:
    """The features of a case on a device, without its tensors."""
    dtype = getattr(torch, case.dtype)
    scored = case.q_scale is not None or case.k_scale is not None
    return Features(
        *(device, dtype, case.stored_dtype, getattr(torch, case.o_dtype or case.dtype)),
        *(case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, case.head_dim_vo),
        custom_mask=case.mask in ("custom", "packed"),
        multi_item=case.mask == "items",
        soft_cap=case.logits_soft_cap > 0,
        pos_encoding_mode=case.pos_encoding_mode,
        positive_scale=case.scale > 0 and not (case.tensor_scales and scored and device.type == "cuda"),
        kv_block_scales=case.kv_dtype == "nvfp4",
        sinks=case.sinks,
        kv_source="dense" if case.single else "paged" if case.paged else "ragged",
        expanded=case.storage == "expanded" and case.num_kv_heads > 1,
        decode="decode" in case.kind,
        own_splits=case.fixed_split_size is not None or case.disable_split_kv,
    )


def refusals(case: BatchCase, backend: str, arch: Arch | None) -> list[Refusal]:
    """Refusals of the capability table for a case on a GPU."""
    return select.reasons_against(capabilities.BY_NAME[backend], features(case), arch)
