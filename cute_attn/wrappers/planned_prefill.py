"""Prefill calls that have no plan of their own: batch wrappers that are kept between calls.

A call reads its lengths, and plans only where they, or the options, differ from those of an earlier call: the layers of
a model run one plan. Wrappers are kept per device, stream and structure of the call, for the latest workspace.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from cute_attn.problem import BatchLengths
from cute_attn.request import caches, checks, unplanned
from cute_attn.request.batch_plan import PlanOptions, PlanRequest
from cute_attn.request.index_arrays import bounds
from cute_attn.request.unplanned import Arrays, Keys
from cute_attn.runtime import capture
from cute_attn.wrappers import calls
from cute_attn.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.wrappers.plan_request import with_newest
from cute_attn.wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper

MAX_STREAMS = 16  # with wrappers of their own
MAX_STRUCTURES = 16  # layers with and without a window, decoders and encoders, ...

Key = TypeVar("Key")
Value = TypeVar("Value")


class Structure(NamedTuple):
    """What a plan of a call depends on besides lengths: hashable."""

    backend: str
    page_size: int  # 0: k and v are ragged
    chunk: int  # > 0: a token sees no key before the multiple of it at or before its own position
    options: PlanOptions

    @classmethod
    def of(cls, query: torch.Tensor, keys: Keys, backend: str = "auto", chunk: int = 0, **others: Any) -> Structure:
        """Return the structure of a call with these tensors. `others`: options of a plan that they do not tell. Scales
        are factors of a run, so that layers with other scales share a plan.
        """
        k, v, _ = keys
        sizes = query.shape[1], k.shape[-2], query.shape[2], v.shape[-1]
        options = PlanOptions(*sizes, query.dtype, k.dtype, sm_scale=1.0, **others)
        return cls(backend, k.shape[1] if keys.paged else 0, chunk, options)


class Session:
    """A wrapper, the lengths that it is planned for, and where it reads page numbers."""

    def __init__(self, workspace: torch.Tensor, structure: Structure) -> None:
        make = BatchPrefillWithPagedKVCacheWrapper if structure.page_size else BatchPrefillWithRaggedKVCacheWrapper
        self.wrapper: Any = make(workspace, backend=structure.backend)
        self.structure = structure
        self.content: Any = None  # lengths, and the shape of the tables, that the plan is for
        self.pages = caches.NO_PAGES
        self.positions: torch.Tensor
        self.indices: torch.Tensor  # page numbers, filled again before every run: they may change without a new plan

    def run(self, query: torch.Tensor, keys: Keys, arrays: Arrays, options: dict[str, Any]) -> Any:
        """Compute a batch, after a plan where its lengths differ from those before."""
        k, v, tables = keys
        content = None if tables is None else tables.shape, *(x.tobytes() for x in arrays)
        lengths = None if content == self.content else BatchLengths(*arrays)
        if lengths is not None:
            self.content = None
        if tables is not None:
            self._fill(keys, lengths)
        if lengths is not None:
            self._plan(lengths)
            self.content = content
        return self.wrapper.run(query, *((k, v) if tables is None else ((k, v),)), **options)

    def _fill(self, keys: Keys, lengths: BatchLengths | None) -> None:
        """Write the page numbers of a batch to where its plan reads them. `lengths`: of a new plan."""
        tables = keys.tables
        if lengths is not None:
            self.pages = caches.in_table(tables, lengths.kv_len, self.structure.page_size)
            self.positions = torch.from_numpy(self.pages.positions).to(tables.device)
            with capture.lasting():
                self.indices = tables.new_empty(len(self.pages.positions))
        torch.index_select(tables.view(-1), 0, self.positions, out=self.indices)
        if calls.looks_at_values(tables.device):
            self.pages.check(self.indices, keys.k.shape[0], caches.TABLE_ENTRY)

    def _plan(self, lengths: BatchLengths) -> None:
        _, page_size, chunk, options = self.structure
        if page_size:
            kv_indptr = bounds(self.pages.counts)
            lengths = BatchLengths(lengths.qo_indptr, kv_indptr, lengths.kv_len, kv_indices=self.indices)
        if chunk:
            lengths = lengths.replace(key_bounds=unplanned.chunk_bounds(chunk, lengths))
        request = PlanRequest(options, page_size=page_size or 1, lengths=lengths)
        self.wrapper._make_plan(with_newest(self.wrapper._place, request, lengths.longest_qo))


class Place:
    """Wrappers of one device and stream, for the latest workspace."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a plan and its run belong together
        self.workspace: checks.Extent | None = None
        self.sessions: OrderedDict[Structure, Session] = OrderedDict()

    def session(self, workspace: torch.Tensor, structure: Structure) -> Session:
        """Return the session of a structure; sessions of another workspace are dropped."""
        extent = checks.extent(workspace)
        if extent != self.workspace:
            self.sessions.clear()
            self.workspace = extent
        if structure.backend == "emulator":  # its plans are for the architecture that is emulated now
            return Session(workspace, structure)
        return kept(self.sessions, structure, lambda: Session(workspace, structure), MAX_STRUCTURES)


_places: OrderedDict[tuple[torch.device, int], Place] = OrderedDict()
_places_lock = threading.Lock()


def run(
    workspace: torch.Tensor,
    structure: Structure,
    query: torch.Tensor,
    keys: Keys,
    arrays: Arrays,
    options: dict[str, Any],
) -> Any:
    """Compute a batch on the current stream of query's device. Returns what a wrapper's `run` returns, to which
    `options` go.
    """
    device = query.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with _places_lock:
        place = kept(_places, (device, stream), Place, MAX_STREAMS)
    with place.lock:
        return place.session(workspace, structure).run(query, keys, arrays, options)


def kept(values: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """Return the value of a key, made if it is new; the least recently used are dropped beyond `most`."""
    if key not in values:
        values[key] = make()
        if len(values) > most:
            values.popitem(last=False)
    values.move_to_end(key)
    return values[key]
