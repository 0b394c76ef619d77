"""Calls of every public function and wrapper, with all tensors that it may take.

An entry's tensors are keyed by the names that error messages give them, and contiguous, so that a test may put them
anywhere. `ENTRIES` write memory of their caller; `NEW_RESULTS` write new tensors only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

import cute_attn
from cute_attn import xqa as low_level

BF16, F32, E4M3, U8, I32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int32
HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 64, 16, 4
ROWS, KEYS = 8, 32  # of single requests and of ragged batches
QO_INDPTR, KV_INDPTR = (0, 3, ROWS), (0, 4, 20)  # 2 requests
PAGE_INDPTR, LAST_PAGE_LEN, KV_LENS = (0, 1, 2), (4, 16), (4, 16)
WORKSPACE_BYTES = 1 << 16
UNCHANGED: Mapping[str, Any] = {}
SCHEDULE = "the schedule"  # the name of a plan's records, which are the wrapper's own memory

# What messages call a tensor where the caller's name is another.
OTHER_NAMES = {
    "the cache": "[kv]|the cache",
    "kv_cache": "([kv] of )?kv_cache",
    "query": "q|query",
    "workspace_buffer": "workspace_buffer|the workspace",
    "k of kv_cache": "k( of kv_cache)?",
    "v of kv_cache": "v( of kv_cache)?",
    "bmm1_scale": "bmm1_scale|q_scale",
    "bmm2_scale": "bmm2_scale|v_scale",
}

Tensors = Mapping[str, torch.Tensor]
Call = Callable[[Mapping[str, Any]], Any]  # with other arguments than tensors, if any
Changes = Mapping[str, Mapping[str, Any]]  # arguments by method


class Begin(Protocol):
    """Makes a wrapper and plans, if there is one, and returns the call. Backends: "auto", on the CPU or on a pretended
    GPU, and "emulator". `changes`: further arguments of the constructor and the plan.
    """

    def __call__(self, given: Tensors, backend: str = "auto", changes: Changes = ..., /) -> Call: ...


class Entry(NamedTuple):
    """How to make the tensors of a call, and how to begin."""

    tensors: dict[str, torch.Tensor]
    begin: Begin
    written: tuple[str, ...] = ("out", "lse")
    planned: tuple[str, ...] = ()  # names of tensors that `begin` reads and the plan keeps
    emulated: bool = True

    def on(self, device: str, but: Sequence[str] = ()) -> dict[str, Any]:
        """Return copies of the tensors on a device, where a plan's lengths do not go; all `but` some."""
        given = {name: x.to(device, copy=True) for name, x in self.tensors.items() if name not in but}
        return given | {name: x for name, x in self.tensors.items() if name == "kv_len_arr"}


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ints(*numbers: int) -> torch.Tensor:
    """Return int32 on the CPU, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=I32, device="cpu")


def zeros(*shape: int, dtype: torch.dtype = U8) -> torch.Tensor:
    """Return zeros, by default bytes."""
    return torch.zeros(*shape, dtype=dtype)


def outputs(rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Return `out` and `lse`."""
    return {"out": zeros(rows, HEADS, DIM, dtype=BF16), "lse": zeros(rows, HEADS, dtype=F32)}


def operands(*shape: int, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    """Return q, and k and v of `shape`."""
    k, v = (randn(*shape, KV_HEADS, DIM, dtype=dtype) for _ in "kv")
    return {"q": randn(ROWS, HEADS, DIM, dtype=dtype), "k": k, "v": v}


def scales(*names: str) -> dict[str, torch.Tensor]:
    """Return scales of one element."""
    return {name: torch.ones(1) for name in names}


BLOCK_SCALES = ("k_sf of kv_cache_sf", "v_sf of kv_cache_sf")
HEAD_SCALES = {"scale_q": torch.ones(HEADS), "scale_k": torch.ones(KV_HEADS), "scale_v": torch.ones(KV_HEADS)}
SINKS = {"sinks": torch.zeros(HEADS)}


def nvfp4(
    *shape: int, names: tuple[str, str] = ("k", "v"), scales: tuple[str, str] = BLOCK_SCALES
) -> dict[str, torch.Tensor]:
    """Return NVFP4 k and v, and their block scales."""
    codes = {name: zeros(*shape, KV_HEADS, DIM // 2) for name in names}
    return codes | {name: zeros(*shape, KV_HEADS, DIM // 16, dtype=E4M3) for name in scales}


def arguments(given: Mapping[str, Any], *pairs: tuple[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return tensors as arguments: block scales, and other `pairs` of tensors, under one name, unless that is given."""
    found: dict[str, Any] = dict(given)
    for name, halves in (("kv_cache_sf", BLOCK_SCALES), *pairs):
        if halves[0] in found:
            found.setdefault(name, tuple(found.pop(half) for half in halves))
    return found


def named(backend: str) -> dict[str, Any]:
    """Return the argument of a backend."""
    return {} if backend == "auto" else {"backend": backend}


def direct(function: Callable[..., Any], *pairs: tuple[str, tuple[str, ...]], **options: Any) -> Begin:
    """Return the beginning of a call without a plan."""

    def begin(_: Tensors, backend: str = "auto", __: Changes = UNCHANGED) -> Call:
        return lambda given: function(**{**options, **named(backend), **arguments(given, *pairs)})

    return begin


# ---- single requests

PREFILL, DECODE = direct(cute_attn.single_prefill_with_kv_cache), direct(cute_attn.single_decode_with_kv_cache)
DENSE = operands(KEYS) | outputs()
TOKEN = DENSE | {name: DENSE[name][0].clone() for name in ("q", "out", "lse")}

SINGLE = {
    "single prefill": Entry(DENSE, PREFILL),
    "single prefill, mask": Entry(DENSE | {"custom_mask": torch.ones(ROWS, KEYS, dtype=torch.bool)}, PREFILL),
    "single prefill, packed mask": Entry(DENSE | {"packed_custom_mask": zeros(ROWS * KEYS // 8)}, PREFILL),
    "single prefill, scales": Entry(DENSE | SINKS | scales("k_scale", "v_scale"), PREFILL),
    "single prefill, head scales": Entry(operands(KEYS, dtype=E4M3) | outputs() | HEAD_SCALES, PREFILL),
    "single prefill, NVFP4": Entry(DENSE | nvfp4(KEYS), PREFILL),
    "single decode": Entry(TOKEN, DECODE),
    "single decode, scales": Entry(TOKEN | SINKS | scales("q_scale", "k_scale", "v_scale"), DECODE),
}

# ---- batches with a plan

SIZES = (HEADS, KV_HEADS, DIM)
SIZES_OF_PREFILL = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim_qk"), SIZES, strict=True))
SIZES_OF_OTHERS = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), SIZES, strict=True))
WORKSPACE = {"the workspace": zeros(WORKSPACE_BYTES)}
INDICES = {"kv_indices": torch.arange(PAGE_INDPTR[-1], dtype=I32)}
MASK = {"packed_mask": zeros(2 + 10)}  # 3 x 4 and 5 x 16 bits


class Planned(NamedTuple):
    """Runs of a wrapper. `planned`: arguments of its plan; `kept`: names of what that has already; `paged`: k and v are
    one argument.
    """

    made: Any
    planned: dict[str, Any]
    kept: tuple[str, ...]
    paged: bool
    options: dict[str, Any]
    method: str = "run"

    def __call__(self, given: Mapping[str, Any]) -> Any:
        t = {name: x for name, x in given.items() if name not in self.kept}
        q, head_scales = t.pop("q"), [t.pop(name) for name in HEAD_SCALES if HEAD_SCALES.keys() <= given.keys()]
        kv: Any = (t.pop("the cache"),) if "the cache" in t else (t.pop("k"), t.pop("v"))
        if self.paged and len(kv) == 2:
            kv = (kv,)
        return getattr(self.made, self.method)(q, *kv, *head_scales, **{**self.options, **arguments(t)})

    @property
    def memory(self) -> dict[str, torch.Tensor]:
        """What the wrapper has, whoever made it."""
        return {"the workspace": self.made._float_workspace_buffer, SCHEDULE: self.made._int_workspace_buffer}


def types_of(given: Tensors) -> dict[str, Any]:
    """Return the options of a plan that name dtypes."""
    q_dtype, kv_dtype = given["q"].dtype, given["the cache" if "the cache" in given else "k"].dtype
    return {"q_data_type": q_dtype} | ({} if kv_dtype == q_dtype else {"kv_data_type": kv_dtype})


# Arguments of plans but for dtypes. A string is the name of a tensor of the entry, if it has that.
ROWS_OF_REQUESTS = {"qo_indptr": ints(*QO_INDPTR)}
PAGE_TABLE = {"indptr": ints(*PAGE_INDPTR), "indices": "kv_indices", "last_page_len": ints(*LAST_PAGE_LEN)}
PACKED_MASK = {"packed_custom_mask": "packed_mask"}
PLAN_PAGED: dict[str, Any] = {**ROWS_OF_REQUESTS, **{f"paged_kv_{name}": x for name, x in PAGE_TABLE.items()}}
PLAN_PAGED |= {**SIZES_OF_PREFILL, "page_size": PAGE, **PACKED_MASK}
PLAN_RAGGED: dict[str, Any] = {**ROWS_OF_REQUESTS, "kv_indptr": ints(*KV_INDPTR), **SIZES_OF_PREFILL, **PACKED_MASK}
PLAN_DECODE = {**PAGE_TABLE, **SIZES_OF_OTHERS, "page_size": PAGE}
PLAN_MIXED: dict[str, Any] = {**ROWS_OF_REQUESTS, "kv_indptr": ints(*PAGE_INDPTR), "kv_indices": "kv_indices"}
PLAN_MIXED |= {"kv_len_arr": ints(*KV_LENS), **SIZES_OF_PREFILL, "head_dim_vo": DIM, "page_size": PAGE}
PLAN_BLOCKS: dict[str, Any] = {
    "indptr": ints(0, 1, 3),
    "indices": "kv_indices",
    "M": ROWS,
    "N": KEYS,
    "R": ROWS // 2,
    "C": KEYS // 2,
}
PLAN_BLOCKS |= {**SIZES_OF_OTHERS, "o_data_type": BF16, "packed_mask": "packed_mask"}

KEPT = ("the workspace", SCHEDULE, "kv_indices", "packed_mask")
GRAPH = {"paged_kv_indptr_buf": ints(0, 0, 0), "paged_kv_last_page_len_buf": ints(1, 1), "qo_indptr_buf": ints(0, 0, 0)}


def batch(
    given: dict[str, torch.Tensor],
    wrapper: Callable[..., Any],
    plan: Mapping[str, Any],
    buffers: Mapping[str, str] | None = None,
    paged: bool = True,
    **options: Any,
) -> Entry:
    """Return the entry of a wrapper. `buffers`: those of CUDA graphs, keywords of the constructor by tensors' names."""
    kept = *KEPT, *(buffers or ())

    def begin(given: Tensors, backend: str = "auto", changes: Changes = UNCHANGED) -> Call:
        chosen = named(backend)
        if buffers is not None:
            chosen |= {"use_cuda_graph": True} | {word: given[name] for name, word in buffers.items()}
        made = wrapper(given["the workspace"], **{**chosen, **changes.get("__init__", {})})
        own = {**given, **{name: given[name].clone() for name in buffers or () if name in KEPT}}
        arguments = {name: own.get(x) if isinstance(x, str) else x for name, x in plan.items()}
        arguments = {name: x for name, x in arguments.items() if x is not None}
        arguments |= {**types_of(given), **changes.get("plan", {})}
        made.plan(**arguments)
        return Planned(made, arguments, kept, paged, options)

    planned = tuple(name for name in kept if name == SCHEDULE or name in given)
    return Entry(given, begin, planned=planned)


PAGES_OF_2 = operands(PAGES, PAGE) | outputs() | WORKSPACE | INDICES
ROWS_OF_2 = operands(KEYS) | outputs() | WORKSPACE
STEP = PAGES_OF_2 | outputs(2) | {"q": randn(2, HEADS, DIM)}  # of decode
ONE_CACHE = {"the cache": randn(PAGES, 2, PAGE, KV_HEADS, DIM)}


def without(given: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    """Return all tensors but some."""
    return {name: x for name, x in given.items() if name not in names}


PAGED_BUFFERS = {name: name for name in GRAPH} | {"kv_indices": "paged_kv_indices_buf"}
MASK_BUFFERS = {"packed_mask": "custom_mask_buf", "mask_indptr_buf": "mask_indptr_buf"}
RAGGED_BUFFERS = {"qo_indptr_buf": "qo_indptr_buf", "kv_indptr_buf": "kv_indptr_buf"}
DECODE_BUFFERS = {
    "paged_kv_indptr_buffer": "paged_kv_indptr_buffer",
    "kv_indices": "paged_kv_indices_buffer",
    "paged_kv_last_page_len_buffer": "paged_kv_last_page_len_buffer",
}
GRAPHED_STEP = STEP | {name: zeros(n, dtype=I32) for name, n in zip(DECODE_BUFFERS, (3, 2, 2), strict=True)} | INDICES
ALL_SCALES = SINKS | scales("q_scale", "k_scale", "v_scale")


def graphed_decode(workspace: torch.Tensor, use_cuda_graph: bool, backend: str = "auto", **buffers: Any) -> Any:
    """Return the wrapper whose constructor takes buffers only."""
    return cute_attn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers.values())


MADE_FOR = {"head_dim_qk": DIM, "head_dim_vo": DIM}
RANGES = functools.partial(cute_attn.BatchPrefillWithCausalBidirectionalRangesWrapper, **MADE_FOR)
WITH_SINKS = functools.partial(cute_attn.BatchAttentionWithAttentionSinkWrapper, **MADE_FOR)


def mixed_wrapper(workspace: torch.Tensor, **options: Any) -> Any:
    """Return a wrapper that owns its workspace."""
    return cute_attn.BatchAttention(**{"device": workspace.device, **options})


def variable_blocks(num_kv_heads: int) -> Entry:
    """Return the entry of 2 x 2 blocks for every kv head."""
    kv = {name: randn(num_kv_heads, KEYS, DIM) for name in "kv"}
    out, lse = (zeros(num_kv_heads * ROWS, HEADS // num_kv_heads, *n, dtype=t) for n, t in (((DIM,), BF16), ((), F32)))
    rows, columns = (ints(*x).expand(num_kv_heads, 2) for x in ((3, 5), (16, 16)))
    plan: dict[str, Any] = {
        "block_mask_map": ints(1).bool().expand(num_kv_heads, 2, 2),
        "block_row_sz": rows,
        "block_col_sz": columns,
    }
    plan |= {"num_qo_heads": HEADS, "num_kv_heads": num_kv_heads, "head_dim": DIM}
    given = {"q": randn(HEADS, ROWS, DIM), **kv, "out": out, "lse": lse, **WORKSPACE}
    return batch_of_rows(given, cute_attn.VariableBlockSparseAttentionWrapper, plan)


PAGED, RAGGED = cute_attn.BatchPrefillWithPagedKVCacheWrapper, cute_attn.BatchPrefillWithRaggedKVCacheWrapper
STEPS, BLOCKS = cute_attn.BatchDecodeWithPagedKVCacheWrapper, cute_attn.BlockSparseAttentionWrapper
batch_of_rows = functools.partial(batch, paged=False)
BLOCKS_OF_2 = operands(KEYS) | outputs() | WORKSPACE | {"kv_indices": ints(0, 0, 1)}
COLUMNS = {"lse": zeros(HEADS, ROWS, dtype=F32)}

NARROW_HEADS = HEAD_SCALES | operands(KEYS, dtype=E4M3)
MORE_PAGED = {  # besides `PAGES_OF_2`, by the name of the entry
    "": {},
    ", mask": MASK,
    ", scales": ALL_SCALES,
    ", head scales": HEAD_SCALES | operands(PAGES, PAGE, dtype=E4M3),
    ", NVFP4": nvfp4(PAGES, PAGE),
}
MORE_RAGGED = MORE_PAGED | {", head scales": NARROW_HEADS, ", NVFP4": nvfp4(KEYS)}
RAGGED_GRAPH = {name: ints(0, 0, 0) for name in RAGGED_BUFFERS}
GRAPH_MASK = MASK | {"mask_indptr_buf": ints(0, 0, 0)}
MORE_BLOCKS = {"": {}, ", mask": {"packed_mask": zeros(8 + 16)}, ", head scales": NARROW_HEADS}
BATCHES = {
    **{f"paged{form}": batch(PAGES_OF_2 | more, PAGED, PLAN_PAGED) for form, more in MORE_PAGED.items()},
    "paged, one cache": batch(without(PAGES_OF_2, "k", "v") | ONE_CACHE, PAGED, PLAN_PAGED),
    "paged, lse by heads": batch(PAGES_OF_2 | COLUMNS, PAGED, PLAN_PAGED, lse_layout="HN", return_lse=True),
    "paged, natural lse": batch(PAGES_OF_2, PAGED, PLAN_PAGED, lse_base="ln", return_lse=True),
    "paged, CUDA graph": batch(PAGES_OF_2 | GRAPH, PAGED, PLAN_PAGED, PAGED_BUFFERS),
    "paged, CUDA graph, mask": batch(PAGES_OF_2 | GRAPH | GRAPH_MASK, PAGED, PLAN_PAGED, PAGED_BUFFERS | MASK_BUFFERS),
    "paged with ranges": batch(
        PAGES_OF_2 | SINKS | {"bidirectional_ranges": torch.zeros(ROWS, 2, dtype=I32)}, RANGES, PLAN_PAGED
    ),
    "paged with sinks": batch(PAGES_OF_2 | SINKS, WITH_SINKS, PLAN_PAGED),
    "mixed": batch(PAGES_OF_2 | scales("k_scale", "v_scale"), mixed_wrapper, PLAN_MIXED)._replace(emulated=False),
    **{f"ragged{form}": batch_of_rows(ROWS_OF_2 | more, RAGGED, PLAN_RAGGED) for form, more in MORE_RAGGED.items()},
    "ragged, CUDA graph": batch_of_rows(ROWS_OF_2 | RAGGED_GRAPH, RAGGED, PLAN_RAGGED, RAGGED_BUFFERS),
    "ragged, CUDA graph, mask": batch_of_rows(
        ROWS_OF_2 | RAGGED_GRAPH | GRAPH_MASK, RAGGED, PLAN_RAGGED, RAGGED_BUFFERS | MASK_BUFFERS
    ),
    **{f"decode{form}": batch(STEP | MORE_PAGED[form], STEPS, PLAN_DECODE) for form in ("", ", scales", ", NVFP4")},
    "decode, CUDA graph": batch(GRAPHED_STEP, STEPS, PLAN_DECODE, DECODE_BUFFERS),
    "decode, CUDA graph's own wrapper": batch(GRAPHED_STEP, graphed_decode, PLAN_DECODE, DECODE_BUFFERS)._replace(
        emulated=False
    ),
    **{f"blocks{form}": batch_of_rows(BLOCKS_OF_2 | more, BLOCKS, PLAN_BLOCKS) for form, more in MORE_BLOCKS.items()},
    "variable blocks": variable_blocks(HEADS),
    "variable blocks, grouped": variable_blocks(KV_HEADS),
}

# ---- wrappers of prefixes, which write new tensors only

HALVES = {"q": randn(ROWS, HEADS, DIM).half(), "the workspace": zeros(WORKSPACE_BYTES)}
HALF_PAGES = randn(PAGES, 2, PAGE, KV_HEADS, DIM).half()
SHARED = HALVES | {name: randn(7, KV_HEADS, DIM).half() for name in ("k_shared", "v_shared")}
SHARED |= {"unique_kv_cache": HALF_PAGES}
OWN_PAGES = ints(*PAGE_INDPTR), INDICES["kv_indices"], ints(*LAST_PAGE_LEN)


def shared(wrapper: Callable[..., Any], rows: int, *bounds: torch.Tensor) -> Entry:
    """Return the entry of a wrapper for requests with one shared prefix."""

    def begin(given: Tensors, _: str = "auto", changes: Changes = UNCHANGED) -> Call:
        made = wrapper(given["the workspace"], **changes.get("__init__", {}))
        made.begin_forward(*bounds, *OWN_PAGES, *SIZES, PAGE, **changes.get("begin_forward", {}))
        return lambda given: made.forward(**without(dict(given), "the workspace"))

    return Entry(SHARED | {"q": SHARED["q"][:rows]}, begin, ())


def begin_levels(given: Tensors, _: str = "auto", changes: Changes = UNCHANGED) -> Call:
    """Plan one level of a cascade, and return its runs."""
    made = cute_attn.MultiLevelCascadeAttentionWrapper(1, given["the workspace"], **changes.get("__init__", {}))
    made.plan(*([x] for x in (ints(*QO_INDPTR), *OWN_PAGES)), *SIZES, PAGE, **changes.get("plan", {}))
    return lambda given: made.run(**without(dict(given), "the workspace"))


PREFIXES = {
    "shared prefix, decode": shared(cute_attn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper, 2),
    "shared prefix, prefill": shared(cute_attn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper, ROWS, ints(*QO_INDPTR)),
    "levels": Entry(HALVES | {"paged_kv_cache": HALF_PAGES}, begin_levels, ()),
}

# ---- batches without a plan

CACHE = ("kv_cache", ("k of kv_cache", "v of kv_cache"))
TABLES = {"block_tables": torch.arange(4, dtype=I32).view(2, 2), "seq_lens": ints(*KV_LENS)}
UNPLANNED = {name: randn(PAGES, PAGE, KV_HEADS, DIM) for name in CACHE[1]} | TABLES
UNPLANNED |= {"workspace_buffer": zeros(WORKSPACE_BYTES)}
BMM_SCALES = scales("bmm1_scale", "bmm2_scale")
REQUESTS = {"max_q_len": 5, "max_kv_len": 16, "batch_size": 2}
BOUNDS = {"cum_seq_lens_q": ints(*QO_INDPTR), "cum_seq_lens_kv": ints(0, *KV_LENS)}


def unplanned(rows: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a call over pages, with so many query tokens."""
    return UNPLANNED | {"query": randn(rows, HEADS, DIM), "out": zeros(rows, HEADS, DIM, dtype=BF16)}


def lse_of(rows: int) -> dict[str, torch.Tensor]:
    """Return a buffer for the lse."""
    return {"lse": zeros(rows, HEADS, dtype=F32)}


CONTEXT = direct(cute_attn.trtllm_batch_context_with_kv_cache, CACHE, kv_layout="NHD", **REQUESTS)
FMHA_TENSORS = {"query": randn(ROWS, HEADS, DIM), "out": zeros(ROWS, HEADS, DIM, dtype=BF16)} | SINKS | BMM_SCALES
FMHA_TENSORS |= without(operands(KEYS), "q") | {"seq_lens": ints(*KV_LENS), "workspace_buffer": zeros(WORKSPACE_BYTES)}
FMHA_TENSORS |= {"cum_seq_lens_q": ints(*QO_INDPTR), "cum_seq_lens_kv": ints(*KV_INDPTR)}
FMHA_PAGES = without(FMHA_TENSORS, "k", "v") | ONE_CACHE | TABLES | BOUNDS


def fmha(layout: str, *names: str) -> Begin:
    """Return a call of the function that takes query, keys and values as one argument."""
    return direct(cute_attn.trtllm_fmha_v2_prefill, ("qkv", names), input_layout=layout, **REQUESTS)


RAGGED_NAMES = {"k": "key", "v": "value", "sinks": "attention_sinks"}
RAGGED_TENSORS = {RAGGED_NAMES.get(name, name): x for name, x in FMHA_TENSORS.items()} | lse_of(ROWS)
RAGGED_OPTIONS = {"o_sf_scale": 1.0, "window_left": -1, "enable_pdl": None, "is_causal": True, "return_lse": True}


LOW_LEVEL_NAMES = {"query": "q", "k of kv_cache": "k_cache", "v of kv_cache": "v_cache", "out": "output"}
LOW_LEVEL_NAMES |= {"block_tables": "page_table"}
LOW_LEVEL = {LOW_LEVEL_NAMES.get(name, name): x for name, x in (unplanned(2) | SINKS).items()}
LOW_LEVEL |= {"semaphores": zeros(4096), **scales("q_scale", "kv_scale")}
LOW_LEVEL_SIZES = {"num_kv_heads": KV_HEADS, "page_size": PAGE}
LOW_LEVEL_WRITTEN = "output", "workspace_buffer", "semaphores"
WRITTEN, WITH_LSE = ("out", "workspace_buffer"), ("out", "lse", "workspace_buffer")
XQA_FUNCTIONS = {
    "xqa": (cute_attn.xqa_batch_decode_with_kv_cache, "q_cu_seq_lens", "q_len_per_req"),
    "trtllm": (cute_attn.trtllm_batch_decode_with_kv_cache, "cum_seq_lens_q", "max_q_len"),
}


def low_level_entry(rows: int, *pairs: tuple[str, torch.Tensor], **options: Any) -> Entry:
    """Return the entry of XQA's own function, with so many query tokens and more tensors."""
    given = LOW_LEVEL | {"q": randn(rows, HEADS, DIM), "output": zeros(rows, HEADS, DIM, dtype=BF16)} | dict(pairs)
    return Entry(given, direct(low_level.xqa, **LOW_LEVEL_SIZES, **options), LOW_LEVEL_WRITTEN)


def xqa_entries() -> dict[str, Entry]:
    """Return the entries of decode without a plan under both names."""
    found, one_cache = {}, {"kv_cache": ONE_CACHE["the cache"]}
    for name, (function, bounds, longest) in XQA_FUNCTIONS.items():
        begin = direct(function, CACHE, kv_layout="NHD", max_seq_len=16)
        drafts = direct(function, CACHE, kv_layout="NHD", max_seq_len=16, q_len_per_req=3)
        ragged = direct(function, CACHE, kv_layout="NHD", max_seq_len=16, **{longest: 5})
        tensors = {
            "": (unplanned(2) | SINKS, begin, WRITTEN),
            ", large workspace": (unplanned(2) | {"workspace_buffer": zeros(9 << 20)}, begin, WRITTEN),
            ", one cache": (without(unplanned(2), *CACHE[1]) | one_cache, begin, WRITTEN),
            ", scales and lse": (unplanned(2) | SINKS | BMM_SCALES | lse_of(2), begin, WITH_LSE),
            ", NVFP4": (unplanned(2) | nvfp4(PAGES, PAGE, names=CACHE[1]), begin, WRITTEN),
            ", drafts": (unplanned(6) | {"mask": torch.full((6, 1), 7, dtype=I32)}, drafts, WRITTEN),
            ", ragged": (unplanned(ROWS) | {bounds: ints(*QO_INDPTR)}, ragged, WRITTEN),
        }
        found |= {name + form: Entry(given, start, written) for form, (given, start, written) in tensors.items()}
    return found


DECODE_OF_TRTLLM, COLUMNS_OF_TRTLLM = (
    direct(cute_attn.trtllm_batch_decode_with_kv_cache, CACHE, kv_layout="NHD", max_seq_len=16, lse_layout=layout)
    for layout in ("NH", "HN")
)
BATCHES_WITHOUT_PLAN = {
    "trtllm context": Entry(unplanned(ROWS) | BOUNDS | SINKS | BMM_SCALES | lse_of(ROWS), CONTEXT),
    "trtllm fmha": Entry(FMHA_TENSORS, fmha("SEPARATE_Q_K_V", "query", "k", "v"), ("out",)),
    "trtllm ragged": Entry(
        RAGGED_TENSORS, direct(cute_attn.trtllm_ragged_attention_deepseek, **RAGGED_OPTIONS, **REQUESTS), ("out", "lse")
    ),
    "trtllm fmha, pages": Entry(FMHA_PAGES, fmha("Q_PAGED_KV_NHD", "query", "the cache"), ("out",)),
    **xqa_entries(),
    "trtllm, log2 scale": Entry(unplanned(2) | scales("bmm1_scale_log2"), DECODE_OF_TRTLLM, WRITTEN),
    "trtllm, lse by heads": Entry(unplanned(2) | {"lse": zeros(HEADS, 2, dtype=F32)}, COLUMNS_OF_TRTLLM, WITH_LSE),
    "xqa, low level": low_level_entry(2),
    "xqa, low level, NVFP4": low_level_entry(
        2, *nvfp4(PAGES, PAGE, names=("k_cache", "v_cache"), scales=("k_sf_cache", "v_sf_cache")).items()
    ),
    "xqa, low level, drafts": low_level_entry(6, ("mask", torch.full((6, 1), 7, dtype=I32)), q_seq_len=3),
    "xqa, low level, ragged": low_level_entry(ROWS, ("q_cu_seq_lens", ints(*QO_INDPTR)), q_seq_len=5),
}

# ---- latent attention

LATENT = {"query": randn(2, 1, HEADS, 576), "kv_cache": randn(PAGES, PAGE, 576)} | TABLES | BMM_SCALES | SINKS
LATENT |= {"out": zeros(2, 1, HEADS, 512, dtype=BF16), "workspace_buffer": zeros(WORKSPACE_BYTES), **lse_of(2)}
LATENT_DIMS = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_seq_len": 16}
RAGGED_LATENT = LATENT | {"query": randn(ROWS, HEADS, 576), "out": zeros(ROWS, HEADS, 512, dtype=BF16), **lse_of(ROWS)}
RAGGED_LATENT |= {"cum_seq_lens_q": ints(*QO_INDPTR)}
LATENT_FUNCTION = cute_attn.trtllm_batch_decode_with_kv_cache_mla
LATENT_PARTS = {"q_nope": randn(2, HEADS, 512), "q_pe": randn(2, HEADS, 64), "ckv_cache": randn(PAGES, PAGE, 512)}
LATENT_PARTS |= {"kpe_cache": randn(PAGES, PAGE, 64), "out": zeros(2, HEADS, 512, dtype=BF16), **lse_of(2), **SINKS}
LATENT_PARTS |= {"float_workspace_buffer": zeros(WORKSPACE_BYTES)}
LATENT_PARTS |= {"kv_indices": INDICES["kv_indices"], "kv_len_arr": ints(*KV_LENS)}
LATENT_KEPT = ("float_workspace_buffer", "kv_indices", "kv_len_arr")
SCALED_PARTS = LATENT_PARTS | {
    "ckv_cache": zeros(PAGES, PAGE, 512, dtype=torch.float8_e4m3fn),
    "ckv_scale_arr": torch.ones(PAGES, PAGE, 4),
}


def begin_latent(given: Tensors, backend: str = "auto", changes: Changes = UNCHANGED) -> Call:
    """Plan a batch of latent attention, and return its runs."""
    init = {"backend": backend, **changes.get("__init__", {})}
    made: Any = cute_attn.BatchMLAPagedAttentionWrapper(given["float_workspace_buffer"], **init)
    arrays = {"qo_indptr": ints(0, 1, 2), "kv_indptr": ints(*PAGE_INDPTR), "kv_indices": given["kv_indices"]}
    sizes = {"num_heads": HEADS, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": PAGE}
    dtype = given["ckv_cache"].dtype
    options = {"causal": False, "sm_scale": 1.0, "q_data_type": BF16, "kv_data_type": dtype, "use_sinks": True}
    made.plan(**{**arrays, "kv_len_arr": given["kv_len_arr"], **sizes, **options, **changes.get("plan", {})})
    scale = {"kpe_scale": 1.0} if dtype == torch.float8_e4m3fn else {}
    return lambda given: made.run(**{**scale, **without(dict(given), *LATENT_KEPT)})


LATENT_ENTRIES = {
    "latent": Entry(LATENT, direct(LATENT_FUNCTION, **LATENT_DIMS), WITH_LSE),
    "latent, ragged": Entry(RAGGED_LATENT, direct(LATENT_FUNCTION, **LATENT_DIMS, max_q_len=5), WITH_LSE),
    "latent, planned": Entry(LATENT_PARTS, begin_latent, planned=LATENT_KEPT),
    "latent, planned, scales": Entry(LATENT_PARTS | BMM_SCALES, begin_latent, planned=LATENT_KEPT),
    "latent, scales of groups": Entry(SCALED_PARTS, begin_latent, planned=LATENT_KEPT),
    "latent, xqa": Entry(
        without(LATENT, "lse"),
        direct(cute_attn.xqa_batch_decode_with_kv_cache_mla, **LATENT_DIMS),
        WRITTEN,
        emulated=False,
    ),
}

# ---- caches and states

PAIR = ("paged_kv_cache", ("k of paged_kv_cache", "v of paged_kv_cache"))
SCALE_PAIR = ("kv_cache_sf", ("k of kv_cache_sf", "v of kv_cache_sf"))
NEW_ROWS = {name: randn(3, KV_HEADS, DIM) for name in ("append_key", "append_value")}
TABLE = {"batch_indices": ints(0, 0, 1), "positions": ints(0, 1, 2), **INDICES}
TABLE |= {"kv_indptr": ints(*PAGE_INDPTR), "kv_last_page_len": ints(*LAST_PAGE_LEN)}
CACHES = {name: zeros(PAGES, PAGE, KV_HEADS, DIM, dtype=BF16) for name in PAIR[1]}
NVFP4_CACHES = {name: zeros(PAGES, PAGE, KV_HEADS, DIM // 2) for name in PAIR[1]}
NVFP4_CACHES |= {name: zeros(PAGES, PAGE, KV_HEADS, DIM // 16) for name in SCALE_PAIR[1]}
QUANTISED = NEW_ROWS | NVFP4_CACHES | scales("k_scale", "v_scale")
STATES = {"v": randn(ROWS, HEADS, DIM), "s": torch.ones(ROWS, HEADS), "v_other": randn(ROWS, HEADS, DIM)}
STATES |= {"s_other": torch.ones(ROWS, HEADS), "mask": torch.ones(ROWS, dtype=torch.bool)}
POSITIONS = {"append_indptr": ints(0, 1, 3), "seq_lens": ints(5, 9), "batch_indices": ints(0, 0, 0)}
POSITIONS |= {"positions": ints(0, 0, 0)}
DEQUANTISED = {name: zeros(2, 16, KV_HEADS, DIM, dtype=BF16) for name in ("output_k", "output_v")}


def other(function: Callable[..., Any], tensors: dict[str, torch.Tensor], *written: str, **options: Any) -> Entry:
    """Return the entry of a function without a backend."""
    return Entry(tensors, direct(function, PAIR, SCALE_PAIR, **options), written, emulated=False)


OTHERS = {
    "append": other(cute_attn.append_paged_kv_cache, NEW_ROWS | TABLE | CACHES, *CACHES),
    "append NVFP4": other(cute_attn.nvfp4_quantize_append_paged_kv_cache, QUANTISED | TABLE, *NVFP4_CACHES),
    "append NVFP4 to slots": other(
        cute_attn.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
        QUANTISED | {"slot_mapping": ints(1, 8, 9)},
        *NVFP4_CACHES,
    ),
    "dequantise pages": other(
        cute_attn.nvfp4_kv_dequantize_paged,
        NVFP4_CACHES | scales("k_scale", "v_scale") | TABLES | DEQUANTISED,
        *DEQUANTISED,
        kv_layout="NHD",
    ),
    "append latent rows": other(
        cute_attn.append_paged_mla_kv_cache,
        {"append_ckv": randn(3, 512), "append_kpe": randn(3, 64), "ckv_cache": zeros(PAGES, PAGE, 512, dtype=BF16)}
        | {"kpe_cache": zeros(PAGES, PAGE, 64, dtype=BF16)}
        | TABLE,
        *("ckv_cache", "kpe_cache"),
    ),
    "concat": other(
        cute_attn.concat_mla_k,
        {"k": zeros(3, HEADS, 192, dtype=BF16), "k_nope": randn(3, HEADS, 128), "k_rope": randn(3, 1, 64)},
        "k",
    ),
    "positions": other(cute_attn.get_batch_indices_positions, POSITIONS, "batch_indices", "positions", nnz=3),
    "merge": other(cute_attn.merge_state_in_place, STATES, "v", "s"),
}

ENTRIES = SINGLE | BATCHES | BATCHES_WITHOUT_PLAN | LATENT_ENTRIES | OTHERS

# ---- calls that write new tensors only


SCALE = {"global_scale": torch.ones(1)}
TWO_CACHES = {"k_cache": randn(2, 4, 2, DIM), "v_cache": randn(2, 4, 2, DIM)}
PACKED = {"fp4_data": zeros(4, 32) + 0x21, "block_scales": zeros(4, 4) + 0x38}
TWO_STATES = dict(zip(("v_a", "s_a", "v_b", "s_b"), STATES.values(), strict=False))
PAGE_COUNTS = {"kv_indptr": ints(0, 1, 2), "kv_last_page_len": ints(*LAST_PAGE_LEN)}
NEW_RESULTS = {
    "merge two": other(cute_attn.merge_state, TWO_STATES),
    "merge several": other(cute_attn.merge_states, {"v": randn(5, 3, HEADS, DIM), "s": torch.ones(5, 3, HEADS)}),
    "quantise": other(cute_attn.nvfp4_kv_quantize, {"input": randn(4, DIM), **SCALE}),
    "dequantise": other(cute_attn.nvfp4_kv_dequantize, PACKED | SCALE),
    "quantise pages": other(cute_attn.nvfp4_quantize_paged_kv_cache, TWO_CACHES),
    "quantise pages to fp8": other(cute_attn.fp8_quantize_paged_kv_cache, TWO_CACHES),
    "lengths": other(cute_attn.get_seq_lens, PAGE_COUNTS, page_size=16),
}
