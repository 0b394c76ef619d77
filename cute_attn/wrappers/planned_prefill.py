"""Prefill calls that have no plan of their own: batch wrappers that are kept between calls.

A call reads its lengths, and plans only where they, or the options, differ from those of an earlier call: the layers of
a model run one plan. Wrappers are kept per device, stream and structure of the call, for the latest workspace. A call
that differs from an earlier one in addresses alone, under the plan of that one, is run again without other checks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from cute_attn.problem import BatchLengths
from cute_attn.request import caches, checks, unplanned
from cute_attn.request.batch_plan import PlanOptions, PlanRequest
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.index_arrays import bounds
from cute_attn.request.unplanned import Arrays, Keys
from cute_attn.runtime import capture
from cute_attn.wrappers import calls
from cute_attn.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from cute_attn.wrappers.plan_request import with_newest
from cute_attn.wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper

LENGTHS = ("cum_seq_lens_q", "seq_lens", "cum_seq_lens_kv", "q_seq_lens_cpu", "kv_seq_lens_cpu")
TENSORS = frozenset((*LENGTHS, "block_tables", "workspace_buffer", "out", "lse", "sinks", "bmm1_scale", "bmm2_scale"))
OPERANDS = frozenset(("query", "key", "value", "kv_cache", "qkv", "attention_sinks"))  # by other names here
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
    variety: Any = None  # what else tells plans apart

    @classmethod
    def of(cls, query: torch.Tensor, keys: Keys, backend: str = "auto", chunk: int = 0, **others: Any) -> Structure:
        """Return the structure of a call with these tensors. `others`: options of a plan that they do not tell. Scales
        are factors of a run, so that layers with other scales share a plan.
        """
        k, v, _ = keys
        sizes = query.shape[1], k.shape[-2], query.shape[2], v.shape[-1]
        options = PlanOptions(*sizes, query.dtype, k.dtype, sm_scale=1.0, **others)
        return cls(backend, k.shape[1] if keys.paged else 0, chunk, options)


class Repeatable(NamedTuple):
    """A call that an equal one may repeat."""

    key: Any = None  # what equal calls have in common; None: no call repeats this one
    given: Any = None  # `calls.Given`
    lengths: list[np.ndarray] | None = None  # as the host has read them
    outputs: calls.Outputs | None = None  # of a call that repeats one


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

    def run(self, arguments: RunArguments, keys: Keys, arrays: Arrays, call: calls.RunCall | None) -> Any:
        """Compute a batch, after a plan where its lengths differ from those before."""
        tables = keys.tables
        content = None if tables is None else tables.shape, *(x.tobytes() for x in arrays)
        lengths = None if content == self.content else BatchLengths(*arrays)
        if lengths is not None:
            self.content = None
        if tables is not None:
            self._fill(keys, lengths)
        if lengths is not None:
            self._plan(lengths)
            self.content = content
        return self.wrapper._run(arguments, call=call)

    def _fill(self, keys: Keys, lengths: BatchLengths | None) -> None:
        """Write the page numbers of a batch to where its plan reads them. `lengths`: of a new plan."""
        tables = keys.tables
        if lengths is not None:
            self.pages = caches.in_table(tables, lengths.kv_len, self.structure.page_size)
            self.positions = torch.from_numpy(self.pages.positions).to(tables.device)
            with capture.lasting():
                self.indices = tables.new_empty(len(self.pages.positions))
        self.copy_pages(tables)
        if calls.looks_at_values(tables.device):
            self.pages.check(self.indices, keys.k.shape[0], caches.TABLE_ENTRY)

    def copy_pages(self, tables: torch.Tensor) -> None:
        """Copy the page numbers of the planned batch."""
        torch.index_select(tables.view(-1), 0, self.positions, out=self.indices)

    def _plan(self, lengths: BatchLengths) -> None:
        _, page_size, chunk, options, _ = self.structure
        if page_size:
            lengths = lengths.replace(kv_indptr=bounds(self.pages.counts), kv_indices=self.indices)
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
        self.repeatable: dict[Any, tuple[Session, Any]] = {}  # by key: the session, and its content then

    def session(self, workspace: torch.Tensor, structure: Structure) -> Session:
        """Return the session of a structure; sessions of another workspace are dropped."""
        extent = checks.extent(workspace)
        if extent != self.workspace:
            self.sessions.clear()
            self.workspace = extent
        if structure not in self.sessions:  # one may be dropped
            self.repeatable.clear()
        if structure.backend == "emulator":  # its plans are for the architecture that is emulated now
            return Session(workspace, structure)
        return kept(self.sessions, structure, lambda: Session(workspace, structure), MAX_STRUCTURES)

    def repeated(self, key: Any, given: calls.Given) -> calls.Outputs | None:
        """Compute a call like an earlier one; None if there is none whose plan is in force."""
        session, content = self.repeatable.get(key, (None, None))
        if session is None or session.content is not content:
            return None
        self.sessions.move_to_end(session.structure)
        tables = given[7][0]
        if tables is not None:
            session.copy_pages(tables)
        return calls.replay_run(session.wrapper._plan.batch, (key, given))


_places: OrderedDict[tuple[torch.device, int], Place] = OrderedDict()
_places_lock = threading.Lock()


def repeated(function: str, operands: Any, arguments: Mapping[str, Any], read: Sequence[str]) -> Repeatable:
    """Compute a call that repeats an earlier one of `function`. Refuse one that would be captured.

    `operands`: query, and a cache or keys and values, in any form. `arguments`: all by name. `read`: names of those
    that say lengths.
    """
    q, *kv = operands if isinstance(operands, tuple | list) and operands else (operands,)
    if not isinstance(q, torch.Tensor):
        return Repeatable()
    unplanned.refuse_capture(function, q.device)
    if calls.looks_at_values(q.device):
        return Repeatable()
    halves = kv[0] if len(kv) == 1 and isinstance(kv[0], tuple | list) else kv
    k, v = (halves[0], halves[-1]) if 1 <= len(halves) <= 2 else (None, None)
    sinks = arguments.get("sinks", arguments.get("attention_sinks"))
    sinks = sinks[0] if isinstance(sinks, tuple | list) and len(sinks) == 1 else sinks
    products = arguments["bmm1_scale"], None, arguments["bmm2_scale"]
    scales, roles, optional, on_cpu = calls.operands(products, sinks, None, None, None)
    workspace = arguments["workspace_buffer"]
    others = arguments.get("block_tables"), workspace, *map(arguments.get, LENGTHS), *on_cpu
    given: calls.Given = q, k, v, arguments.get("out"), arguments.get("lse"), None, optional, others, None
    options = *scales, *[x for name, x in arguments.items() if name not in TENSORS and name not in OPERANDS]
    key, _ = calls.repeated({}, given, tuple(options), (function, roles, read, halves is kv, len(halves)))
    if key is None:
        return Repeatable()
    arrays = [arguments[name] for name in read]
    try:
        if any(x.dtype not in unplanned.LENGTH_DTYPES for x in arrays):
            return Repeatable()
        lengths = unplanned.on_host(arrays)
        key = key, workspace.data_ptr(), tuple([x.tobytes() for x in lengths])
    except calls.NOT_TENSORS:  # which full checks refuse
        return Repeatable()
    place = place_of(q.device)
    with place.lock:
        return Repeatable(key, given, lengths, place.repeated(key, given))


def run(
    workspace: torch.Tensor,
    structure: Structure,
    arguments: RunArguments,
    keys: Keys,
    arrays: Arrays,
    call: calls.RunCall | None = None,
) -> Any:
    """Compute a batch on the current stream of query's device. Return what a wrapper's `run` returns. `arguments`: of
    that. `call`: under which later ones may repeat this one, if not under that of a run.
    """
    place = place_of(arguments.q.device)
    with place.lock:
        session = place.session(workspace, structure)
        result = session.run(arguments, keys, arrays, call)
        if call is not None:
            if len(place.repeatable) >= calls.CACHE_SIZE:
                place.repeatable.clear()
            place.repeatable[call[0]] = session, session.content
        return result


def place_of(device: torch.device) -> Place:
    """Return the wrappers of a device and its current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with _places_lock:
        return kept(_places, (device, stream), Place, MAX_STREAMS)


def kept(values: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """Return the value of a key, made if it is new; the least recently used are dropped beyond `most`."""
    if key not in values:
        values[key] = make()
        if len(values) > most:
            values.popitem(last=False)
    values.move_to_end(key)
    return values[key]
