"""Table of the features that each backend supports: used by selection, errors and `explain`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cute_attn.kernels.fa2.tiles import WIDE_HEAD_DIMS, tile_dims
from cute_attn.kernels.rules import MOST, above, up_to
from cute_attn.kernels.xqa.spec import is_head_dim
from cute_attn.problem import Features
from cute_attn.request.settings import FP8, HALF
from cute_attn.runtime.arch import ARCHS, Arch

XQA_HEAD_DIMS = (
    "multiples of 8 (of 16 with 8-bit k and v) from 16 to 256 and of twice that to 512; with NVFP4 64, 128, 256 and 512"
)


ROWS_OF_DECODE = 32  # packed query rows of a request up to which kernels of decode may be the fastest


class Load(NamedTuple):
    """What selection knows of the size of a problem beside its features; by default nothing."""

    rows: int | None = None  # packed query rows per request (qo_len x heads per kv head); None: not known
    whole: bool = False  # whether XQA has clusters, or a CTA for each segment, on Hopper, whatever the lengths are


UNKNOWN_LOAD = Load()


class Pass(NamedTuple):
    """Why "auto" passes a backend over; empty: it does not. `note`: what was measured there."""

    why: str = ""
    note: str = ""


TAKEN = Pass()


class Faster(NamedTuple):
    """Where a backend is faster than those that "auto" considers after it."""

    rows: range  # packed query rows of a request
    note: str = ""  # what was measured (of XQA: `perf.run decode-choice`)
    archs: Collection[str] = ARCHS
    whole: bool = False  # only where `Load.whole`


# By bits of k and v; of XQA by head dimension too. Tiles of 65 rows were measured on an H100 at 4096 tokens
# (docs/kernels/fa3.md, fp8.md): 1.2 to 2.6 times as fast as fa2. Those of 33 to 64 rows take as long: over e4m3 1.1 to
# 1.9 times as fast, docs/kernels/xqa.md. XQA's rows share one read of the keys, but for 16 at head dimension 512; over
# 8 and 4 bits also those of two reads, three at 256: 1.3 to 2 times as fast (docs/kernels/xqa.md), over bf16 at 256 and
# 512 0.26 to 1.05.
_MANY = Faster(above(64))
_E4M3 = "over e4m3 1.1 to 2.2 times as fast as fa2, but 0.85 for one request of one kv head (H100, H200)"
_BF16 = "0.97 to 1.2 times as fast as fa2 (H100, H200)"
_BF16_128 = "1.03 times as fast as fa2 in the mean of 48 batches, 0.91 (2 requests, one kv head) to 1.23 (H100)"
_BF16_256 = "up to 8 segments 1.2 to 1.4 times as fast as fa2, windows of up to 512 keys 1.07 to 2.1 (H200)"
FASTER: dict[str, dict[int, dict[int | None, Faster]]] = {
    "fa4": {8: {None: _MANY}, 16: {None: _MANY}},
    "fa3": {8: {None: Faster(above(32))}, 16: {None: _MANY}},
    "xqa": {
        8: {
            **dict.fromkeys((32, 80, 112, 512), Faster(up_to(16), _E4M3)),
            **dict.fromkeys((64, 96, 128), Faster(up_to(32), _E4M3)),
            256: Faster(up_to(24), _E4M3),
        },
        16: {
            **dict.fromkeys((32, 64, 96, 112), Faster(up_to(16), _BF16)),
            128: Faster(up_to(16), _BF16_128, ("sm_90a",)),
            256: Faster(up_to(16), _BF16_256, ("sm_90a",), whole=True),
        },
    },
}
# Packed query rows from which on selection may differ over k and v of so many bits per element. Finer ones would make
# plans anew instead of following.
ROWS_CLASSES = {
    bits: sorted({n for by in FASTER.values() for x in by[bits].values() for n in (x.rows.start, x.rows.stop)} - {MOST})
    for bits in (8, 16)
}


def faster(backend: str, features: Features) -> Faster | None:
    """Return where a backend is faster over such a cache; None: nowhere."""
    of_bits = FASTER[backend].get(8 * features.kv_dtype.itemsize, {})
    return of_bits.get(None) or of_bits.get(features.head_dim_qk)


@dataclass(frozen=True)
class Backend:
    """A backend, and where "auto" considers it."""

    name: str
    runs_on: str
    auto_on: tuple[str, ...]  # device types on which "auto" considers it
    archs: Collection[str] | None  # the architectures that it is built for; None: any device
    chunk_invariant: bool = True  # whether results can be independent of how a prompt is cut into chunks

    def runs(self, arch: Arch | None) -> bool:
        """Return whether it has kernels for an architecture (None: the CPU)."""
        return self.archs is None or (arch is not None and arch.name in self.archs)

    def preference(self, features: Features, load: Load, arch: Arch | None) -> Pass:
        """Return whether "auto" prefers others to this backend on `arch` although it supports `features`."""
        if self.name not in FASTER or arch is None or features.q_dtype in FP8 or features.device_lengths:
            return TAKEN  # only one backend of a GPU supports fp8 q, and only one lengths on the device
        if features.chunk_invariant and not self.chunk_invariant:
            return Pass(
                "its results depend on how a prompt is cut into chunks: fixed splits ask that they do not",
                "masked tiles use fewer polynomials for exp2 than others",
            )
        where, rows, dim = faster(self.name, features), load.rows, features.head_dim_qk
        if where is None or arch.name not in where.archs:
            return Pass(f"head dimension {dim} in {8 * features.kv_dtype.itemsize} bits")
        if rows is not None and rows not in where.rows:
            least, most = where.rows.start, where.rows.stop - 1
            limit = f"fewer than {least}" if rows < least else f"more than {most}"
            return Pass(f"{rows} query rows per kv head are {limit}")
        if where.whole and not load.whole:
            return Pass(f"head dimension {dim}, but for few segments and short windows")
        return Pass("", where.note)


BACKENDS = (  # in the order in which "auto" considers them
    Backend(
        "fa4",
        "NVIDIA data-centre Blackwell (compute capability 10.0, 10.3; emulated, not yet run on hardware)",
        ("cuda",),
        ("sm_100a", "sm_103a"),
        chunk_invariant=False,
    ),
    Backend("fa3", "NVIDIA Hopper (compute capability 9.0)", ("cuda",), ("sm_90a",)),
    Backend("xqa", "NVIDIA GPUs from compute capability 8.0, decode", ("cuda",), ARCHS),
    Backend("fa2", "NVIDIA GPUs from compute capability 8.0", ("cuda",), ARCHS),
    Backend("reference", "any device, in torch", ("cpu",), None),
)


# Not in the support table: it supports what the GPU backend supports whose kernels it runs.
EMULATOR = Backend("emulator", "CPU tensors, from the PTX of a GPU's kernels", (), None)


BY_NAME = {backend.name: backend for backend in (*BACKENDS, EMULATOR)}


ELSEWHERE = dict.fromkeys(  # backends of FlashInfer that are not part of this library: (reason, instead)
    ("cake", "cudnn", "cutlass", "cute-dsl", "fmha_v2", "trtllm-gen"),
    ("it is not part of this library", 'backend="auto"'),
)


class Unsupported(NamedTuple):
    """Why a backend does not support a feature, and what to use instead."""

    reason: str
    instead: str


@dataclass(frozen=True)
class Capability:
    """One row of the table: a feature of problems and the backends that do not support it; all others do. What all
    support needs a row only where it is a dtype.
    """

    feature: str
    needed: Callable[[Features], bool]  # tells whether features need it
    unsupported: Mapping[str, Unsupported] = field(default_factory=dict)  # by backend name
    below: tuple[int, int] | None = None  # only GPUs of a lower compute capability lack it

    def concerns(self, features: Features, capability: tuple[int, int] | None) -> bool:
        """Return whether `features` need it where it may be missing. `capability` None: not on a GPU."""
        if self.below is not None and (capability is None or capability >= self.below):
            return False
        return self.needed(features)


def _no(reason: str, instead: str, *backends: str) -> dict[str, Unsupported]:
    """Return that backends do not support a feature for one reason."""
    return dict.fromkeys(backends, Unsupported(reason, instead))


_FA2 = 'backend="fa2"'
_WIDEN = "pass q, k and v as float16 or bfloat16"
_DEQUANTISE = "dequantise k and v to q's dtype first"
_HALF_ALIGNED = 'backend="fa2" with q of float16 or bfloat16, or pad k and v with zeros'
_NO_FP8 = _no("its matrix instructions take 16-bit types", _WIDEN, "xqa")
_CONVERT = "o_dtype=torch.bfloat16 and a conversion after it"


def _no_xqa_head_dim(features: Features) -> bool:
    """Tell whether XQA has no kernels for the head dimensions."""
    kv_bits = 4 if features.kv_block_scales else 8 * features.kv_dtype.itemsize
    return features.head_dim_qk != features.head_dim_vo or not is_head_dim(features.head_dim_qk, kv_bits)


def _multiples(features: Features, n: int) -> bool:
    return all(dim % n == 0 for dim in features.head_dims)


def _has_tiles(features: Features) -> bool:
    return tile_dims(features.head_dims) is not None


CAPABILITIES = (
    Capability("q, k, v of float16 or bfloat16", lambda f: f.q_dtype in HALF and f.kv_dtype == f.q_dtype),
    Capability("q of an fp8 dtype", lambda f: f.q_dtype in FP8, _NO_FP8),
    Capability(
        "q of an fp8 dtype, before compute capability 12.0",
        lambda f: f.q_dtype in FP8,
        _no("mma.sync multiplies fp8 in hardware only from there on", _WIDEN, "fa2"),
        below=(12, 0),
    ),
    Capability(
        "q of an fp8 dtype with a head dimension that is no multiple of 16",
        lambda f: f.q_dtype in FP8 and _has_tiles(f) and not _multiples(f, 16),
        _no("it copies rows of q in units of 16 bytes", "pad q, k and v with zeros, and pass sm_scale", "fa2"),
    ),
    Capability(
        "q of an fp8 dtype with head dimension 512",
        lambda f: f.q_dtype in FP8 and f.head_dims == WIDE_HEAD_DIMS,
        _no("its warps exchange P in 16 bits there", _WIDEN, "fa2"),
    ),
    Capability("k and v of an fp8 dtype", lambda f: f.kv_dtype in FP8 and f.q_dtype in HALF),
    Capability(
        "NVFP4 k and v (kv_cache_sf)",
        lambda f: f.kv_block_scales,
        _no("it widens keys and values of 8 bits, no fewer", _FA2, "fa4"),
    ),
    Capability(
        "NVFP4 k and v with a head dimension that is no multiple of 64",
        lambda f: f.kv_block_scales and not _multiples(f, 64),
        _no("a token's block scales are no whole words of 4 bytes", _DEQUANTISE, "fa3", "fa2")
        | _no("a warp copies a token's block scales as 4, 8 or 16 bytes", _DEQUANTISE, "xqa"),
    ),
    Capability(
        "NVFP4 k and v with head dimension 512",
        lambda f: f.kv_block_scales and f.head_dims == WIDE_HEAD_DIMS,
        _no("its tiles hold the block scales of 256 dimensions", "k and v of float8_e4m3fn", "fa2"),
    ),
    Capability(
        "per-head scales (scale_q, scale_k, scale_v)",
        lambda f: f.per_head_scales,
        _no("they belong to fp8 attention", "multiply them into q, k and v", "xqa"),
    ),
    Capability(
        "per-head scales beside q of float16 or bfloat16",
        lambda f: f.per_head_scales and f.q_dtype in HALF,
        _no("they belong to fp8 attention", "multiply them into q, k and v", "fa4", "fa3", "xqa", "fa2"),
    ),
    Capability("output of float16 or bfloat16", lambda f: f.o_dtype in HALF),
    Capability(
        "output of float32", lambda f: f.o_dtype == torch.float32, _no("its epilogue writes 16 bits", _FA2, "xqa")
    ),
    Capability(
        "output of an fp8 dtype",
        lambda f: f.o_dtype in FP8 and not f.device_lengths,
        _no("its epilogue writes 16 or 32 bits", _CONVERT, "fa4", "fa2")
        | _no("a plan does not tell the scale of the output", "xqa_batch_decode_with_kv_cache", "xqa"),
    ),
    Capability(
        "output of an fp8 dtype with a head dimension that is no multiple of 16",
        lambda f: f.o_dtype in FP8 and not f.device_lengths and f.head_dim_vo % 16 != 0,
        _no("it stores rows in units of 16 bytes", _CONVERT, "fa3"),
    ),
    Capability(
        "output of float8_e4m3fn, lengths on the device",
        lambda f: f.o_dtype in FP8 and f.device_lengths,
        _no("its epilogue writes 16 or 32 bits", "a 16-bit out", "fa4", "fa3", "fa2"),
    ),
    Capability(
        "output of float8_e4m3fn, lengths on the device, before compute capability 9.0",
        lambda f: f.o_dtype in FP8 and f.device_lengths,
        _no("older GPUs run a kernel without that conversion", "a 16-bit out", "xqa"),
        below=(9, 0),
    ),
    Capability(
        "head dimension 512",
        lambda f: f.head_dims == WIDE_HEAD_DIMS,
        _no("its output fills tensor memory, where scores lie too", _FA2, "fa4")
        | _no("its output exceeds the registers of an MMA warpgroup", _FA2, "fa3"),
    ),
    Capability(
        "other head dimensions",
        lambda f: not _has_tiles(f),
        _no("it has no tiles for them", "pad q, k and v with zeros, and pass sm_scale", "fa4", "fa3", "fa2"),
    ),
    Capability(
        "k and v of an fp8 dtype with a head dimension that is no multiple of 16",
        lambda f: f.kv_dtype in FP8 and _has_tiles(f) and not _multiples(f, 16),
        _no("it copies rows in units of 16 bytes", _HALF_ALIGNED, "fa4", "fa3"),
    ),
    Capability(
        "k and v of an fp8 dtype or NVFP4 with rows that start at multiples of 8 bytes, not all of 16",
        lambda f: f.half_aligned_kv,
        _no("it copies rows in units of 16 bytes", _HALF_ALIGNED, "fa4", "fa3")
        | _no("it copies rows in units of 16 bytes", _FA2, "xqa"),
    ),
    Capability(
        f"decode with head dimensions that are not equal, or no {XQA_HEAD_DIMS}",
        lambda f: f.decode and _no_xqa_head_dim(f),
        _no(
            "its tiles hold k and v of one width, copied in chunks of 16 bytes",
            'backend="fa2" in a batch wrapper or a single request',
            "xqa",
        ),
    ),
    Capability(
        "prefill",
        lambda f: not f.decode,
        _no("its rows are a few newest tokens of a request", 'backend="auto", or a decode function', "xqa"),
    ),
    Capability(
        "custom masks, boolean and packed",
        lambda f: f.custom_mask,
        _no("its masks are those of drafts", 'backend="fa2", or xqa_batch_decode_with_kv_cache', "xqa"),
    ),
    Capability(
        "multi-item scoring (prefix_len_ptr, token_pos_in_items_ptr)",
        lambda f: f.multi_item,
        _no("its masks are those of drafts", _FA2, "xqa"),
    ),
    Capability(
        "multi-item scoring with q of an fp8 dtype",
        lambda f: f.multi_item and f.q_dtype in FP8,
        _no("its fp8 kernel has no registers left for the bounds of items", _WIDEN, "fa3") | _NO_FP8,
    ),
    Capability(
        "causal mask with a range of keys per token (BatchPrefillWithCausalBidirectionalRangesWrapper)",
        lambda f: f.key_ranges,
        _no("its warps take the last tile of keys from the band alone", _FA2, "fa4", "fa3")
        | _no("its masks are those of drafts", _FA2, "xqa"),
    ),
    Capability("logits_soft_cap", lambda f: f.soft_cap, _no("its softmax has no step for it", _FA2, "xqa")),
    Capability(
        "pos_encoding_mode ROPE_LLAMA",
        lambda f: f.pos_encoding_mode == "ROPE_LLAMA",
        _no("TMA brings q and k in unrotated", 'backend="fa2", or rotate q and k first', "fa4")
        | _no("it reads q and k as they are", 'backend="fa2", or rotate q and k first', "xqa"),
    ),
    Capability(
        "pos_encoding_mode ROPE_LLAMA with k and v of fewer bits than q",
        lambda f: f.pos_encoding_mode == "ROPE_LLAMA" and (f.kv_dtype in FP8 or f.kv_block_scales),
        _no("its transform warps either rotate or convert", _FA2, "fa3"),
    ),
    Capability(
        "pos_encoding_mode ROPE_LLAMA with a head dimension that is no multiple of 16",
        lambda f: f.pos_encoding_mode == "ROPE_LLAMA" and _has_tiles(f) and f.head_dim_qk % 16 != 0,
        _no("it rotates eight pairs of dimensions at a time", "rotate q and k first", "fa3", "fa2"),
    ),
    Capability(
        "pos_encoding_mode ROPE_LLAMA with q of an fp8 dtype",
        lambda f: f.pos_encoding_mode == "ROPE_LLAMA" and f.q_dtype in FP8,
        _no("it rotates tiles of 16 bits", "rotate q and k first", "fa3", "fa2"),
    ),
    Capability(
        "pos_encoding_mode ALIBI",
        lambda f: f.pos_encoding_mode == "ALIBI",
        _no("its softmax has no step for it", _FA2, "xqa"),
    ),
    Capability(
        "batches with ragged k and v",
        lambda f: f.kv_source == "ragged",
        _no("it finds the keys of a batch through page tables", _FA2, "xqa"),
    ),
    Capability(
        "lengths and page tables on the device, without a plan (xqa_batch_decode_with_kv_cache)",
        lambda f: f.device_lengths,
        _no("its launches need the schedule of a plan", "a batch wrapper", "fa4", "fa3", "fa2"),
    ),
    Capability(
        "tree masks of draft tokens",
        lambda f: f.draft_mask,
        _no("its masks cover all keys", "custom_mask of a batch prefill wrapper", "fa4", "fa3", "fa2"),
    ),
    Capability(
        "fixed_split_size, disable_split_kv",
        lambda f: f.own_splits,
        _no("its CTAs divide the keys without a schedule", _FA2, "xqa"),
    ),
    Capability(
        "expanded q, k or v (a stride of 0)",
        lambda f: f.expanded,
        _no("its tensor maps have strides of 16 bytes or more", _FA2, "fa4", "fa3"),
    ),
    Capability(
        "paged k or v that span 64 GiB or more",
        lambda f: f.large_cache,
        _no("it counts 16 bytes of them in 32 bits", _FA2, "xqa"),
    ),
    Capability(
        "block scales of a token that do not start at a multiple of their size or of 16 bytes",
        lambda f: f.loose_scales,
        _no("it copies them as one", _FA2, "xqa"),
    ),
)
