"""Prefill calls that have no plan of their own: batch wrappers that are kept between calls.

A call reads its lengths, and plans only where they, or the options, differ from those of an earlier call: the layers of
a model run one plan. Wrappers are kept per device, stream and structure of the call, for the latest workspace.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from cute_attn.request import checks, trtllm_prefill
from cute_attn.request.index_arrays import bounds, int32, last_page_len
from cute_attn.request.trtllm_prefill import Lengths, PageList
from cute_attn.runtime import capture, switches
from cute_attn.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper

MAX_STREAMS = 16  # with wrappers of their own
MAX_STRUCTURES = 16  # layers with and without a window, decoders and encoders, ...

Key = TypeVar("Key")
Value = TypeVar("Value")


class Structure(NamedTuple):
    """What a plan of a call depends on besides lengths: hashable."""

    kv_layout: str
    backend: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype
    causal: bool
    window_left: int
    logits_soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    page_size: int = 0  # 0: k and v are ragged
    chunk: int = 0  # > 0: a token sees no key before the multiple of it at or before its own position

    def options(self) -> dict[str, Any]:
        """Return the keywords of `plan`. Scales are factors of a run, so that layers with other scales share a plan."""
        fields = self._asdict()
        del fields["kv_layout"], fields["backend"], fields["page_size"], fields["chunk"]
        return {**fields, "sm_scale": 1.0}


class RunOptions(NamedTuple):
    """The arguments of a run beside its operands."""

    q_scale: Any
    v_scale: Any
    out: Any = None
    lse: Any = None
    return_lse: bool = False
    enable_pdl: Any = None
    sinks: Any = None


class Keys(NamedTuple):
    """Keys and values of a call, and where they are: in pages of `tables`, or in the rows that `kv_indptr` counts."""

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor | None = None
    kv_indptr: np.ndarray | None = None


class PagedSession:
    """A paged wrapper, the lengths that it is planned for, and the memory from which it reads page numbers."""

    def __init__(self, workspace: torch.Tensor, structure: Structure) -> None:
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, structure.kv_layout, backend=structure.backend)
        self.structure = structure
        self.lengths: Lengths | None = None
        self.shape: torch.Size | None = None  # of the tables
        self.pages: PageList
        self.positions: torch.Tensor
        self.indices: torch.Tensor  # page numbers, filled again before every run: they may change without a new plan

    def run(self, query: torch.Tensor, keys: Keys, lengths: Lengths, options: RunOptions) -> Any:
        """Compute a batch, after a plan where its lengths differ from those before."""
        tables = keys.tables
        assert tables is not None
        planned = lengths.same(self.lengths) and tables.shape == self.shape
        if not planned:
            self.lengths = None
            self.pages = trtllm_prefill.page_list(tables, lengths.kv_len, self.structure.page_size)
            self.positions = torch.from_numpy(self.pages.positions).to(query.device)
            with capture.lasting():
                self.indices = tables.new_empty(len(self.pages.positions))
        torch.index_select(tables.view(-1), 0, self.positions, out=self.indices)
        if query.device.type == "cpu" or (switches.validates() and not torch.cuda.is_current_stream_capturing()):
            trtllm_prefill.check_pages(self.indices, self.pages, tables.shape[1], keys.k.shape[0])
        if not planned:
            self._plan(lengths)
            self.lengths, self.shape = lengths, tables.shape
        return self.wrapper.run(query, (keys.k, keys.v), **options._asdict())

    def _plan(self, lengths: Lengths) -> None:
        page_size, counts = self.structure.page_size, self.pages.counts
        self.wrapper.plan(
            int32(lengths.qo_indptr),
            int32(bounds(counts)),
            self.indices,
            int32(last_page_len(lengths.kv_len, counts, page_size)),
            page_size=page_size,
            **trtllm_prefill.chunks(self.structure.chunk, lengths.kv_len),
            **self.structure.options(),
        )


class RaggedSession:
    """A ragged wrapper and the lengths that it is planned for."""

    def __init__(self, workspace: torch.Tensor, structure: Structure) -> None:
        self.wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, structure.kv_layout, backend=structure.backend)
        self.structure = structure
        self.lengths: Lengths | None = None
        self.kv_indptr = np.empty(0, np.int64)

    def run(self, query: torch.Tensor, keys: Keys, lengths: Lengths, options: RunOptions) -> Any:
        """Compute a batch, after a plan where its lengths differ from those before."""
        assert keys.kv_indptr is not None
        if not (lengths.same(self.lengths) and np.array_equal(keys.kv_indptr, self.kv_indptr)):
            self.lengths = None
            chunks = trtllm_prefill.chunks(self.structure.chunk, lengths.kv_len)
            self.wrapper.plan(int32(lengths.qo_indptr), int32(keys.kv_indptr), **chunks, **self.structure.options())
            self.lengths, self.kv_indptr = lengths, keys.kv_indptr
        return self.wrapper.run(query, keys.k, keys.v, **options._asdict())


class Place:
    """Wrappers of one device and stream, for the latest workspace."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a plan and its run belong together
        self.workspace: checks.Extent | None = None
        self.sessions: OrderedDict[Structure, PagedSession | RaggedSession] = OrderedDict()

    def session(self, workspace: torch.Tensor, structure: Structure) -> PagedSession | RaggedSession:
        """Return the session of a structure; sessions of another workspace are dropped."""
        extent = checks.extent(workspace)
        if extent != self.workspace:
            self.sessions.clear()
            self.workspace = extent
        kind = PagedSession if structure.page_size else RaggedSession
        if structure.backend == "emulator":  # its plans are for the architecture that is emulated now
            return kind(workspace, structure)
        return _kept(self.sessions, structure, lambda: kind(workspace, structure), MAX_STRUCTURES)


_places: OrderedDict[tuple[torch.device, int], Place] = OrderedDict()
_places_lock = threading.Lock()


def run(
    workspace: torch.Tensor,
    structure: Structure,
    query: torch.Tensor,
    keys: Keys,
    lengths: Lengths,
    options: RunOptions,
) -> Any:
    """Compute a batch on the current stream of query's device. Returns what a wrapper's `run` returns."""
    device = query.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with _places_lock:
        place = _kept(_places, (device, stream), Place, MAX_STREAMS)
    with place.lock:
        return place.session(workspace, structure).run(query, keys, lengths, options)


def _kept(kept: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """Return the value of a key, made if it is new; the least recently used are dropped beyond `most`."""
    if key not in kept:
        kept[key] = make()
        if len(kept) > most:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]
