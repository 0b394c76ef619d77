"""What one step of vLLM tells the layers of a KV cache group: where its requests are, and how they are computed.

Decodes come first in vLLM's batch. They run without a plan, from the block tables and lengths on the device, so that
CUDA graphs can contain them. The other requests, and all of them in layers whose decode needs a plan (soft cap, ALiBi),
run a plan, made by the first layer of a type in a step and used by all others of that type. So do all requests where
results must be batch invariant: one kernel then computes a token, whether as part of a prompt or as a decode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.attention import BatchPrefillWithCausalBidirectionalRangesWrapper
from cute_attn.integrations.step_plans import StepPlans
from cute_attn.integrations.vllm.support import Layer
from cute_attn.integrations.workspaces import Workspaces
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from cute_attn.request import checks
from cute_attn.request.batch_plan import PlanOptions
from cute_attn.request.caches import in_table
from cute_attn.request.index_arrays import bounds, int32, last_page_len

Spans = dict[int, list[tuple[int, int]]]  # of a request: the first and the last position of each of its images

KV_LAYOUT = "HND"  # of the views of `cache.py`


@functools.lru_cache(16)
def _shared_workspaces(device: torch.device) -> Workspaces:
    return Workspaces.on(device)


def workspaces(vllm_config: Any, device: torch.device) -> Workspaces:
    """Return the workspaces of a builder, made before its steps, as CUDA graphs keep their addresses: those that all KV
    cache groups of a device share, or of its own where micro-batches, which have a builder each, run at the same time.
    """
    overlap = getattr(vllm_config.parallel_config, "use_ubatching", False)
    return Workspaces.on(device) if overlap else _shared_workspaces(device)


class Size(NamedTuple):
    """What a CUDA graph of decodes fixes."""

    num_reqs: int
    q_len: int
    table_width: int


class LayerType(NamedTuple):
    """What a plan depends on besides lengths and pages. Scales and sinks are given to runs: layers that differ in them
    share a plan.
    """

    options: PlanOptions
    page_size: int  # 0: an encoder's layer, whose keys are those of the query tokens
    batch_invariant: bool  # keys are not split: tiles do not depend on lengths either

    @classmethod
    def of(
        cls, layer: Layer, page_size: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, batch_invariant: bool
    ) -> LayerType:
        """Return the type of a layer. Encoders are not causal."""
        sizes = layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size
        scores = layer.pos_encoding_mode, page_size > 0, layer.window_left, layer.soft_cap, 1.0
        return cls(PlanOptions(*sizes, q_dtype, kv_dtype, None, *scores), page_size, batch_invariant)

    def arguments(self, ranges: bool) -> dict[str, Any]:
        """Return the keywords of its `plan`. Where tokens have ranges, runs say the mask."""
        found = {**self.options._asdict(), "disable_split_kv": self.batch_invariant}
        if self.page_size:
            found["page_size"] = self.page_size
        left_out = ("causal", "window_left", "rope_scale", "rope_theta", "lse_base") if ranges else ()
        return {name: value for name, value in found.items() if name not in left_out}


class Decodes(NamedTuple):
    """The decodes of a step: the first `num_reqs` requests."""

    num_reqs: int
    num_tokens: int  # rows of the query: theirs, and where all have as many, those of padding requests
    q_len: int  # the most query tokens of a request
    uniform: bool  # every request has q_len rows of the query; padding requests may not use theirs


def split_decodes(
    query_start_loc: torch.Tensor, num_reqs: int, num_tokens: int, max_query_len: int, threshold: int
) -> Decodes:
    """Return the decodes of a batch, which come first: requests of at most `threshold` query tokens.

    Parameters
    ----------
    query_start_loc : int32 `[num_reqs + 1]` on the CPU. Padding requests, at the end, have no tokens.
    num_reqs, num_tokens : of the batch, padding included.
    max_query_len : the longest request's, in tokens.
    threshold : >= 1, in tokens.
    """
    if max_query_len <= 1 and num_tokens == num_reqs:
        return Decodes(num_reqs, num_tokens, 1, True)
    starts = query_start_loc[: num_reqs + 1].numpy()
    lengths = starts[1:] - starts[:-1]
    longer = lengths > threshold
    count = int(longer.argmax()) if longer.any() else num_reqs
    tokens = num_tokens if count == num_reqs else int(starts[count])
    if count == 0:
        return Decodes(0, 0, 1, True)
    lengths = lengths[:count]
    q_len = max(int(lengths.max()), 1)
    real = int(np.count_nonzero(lengths))
    uniform = tokens == count * q_len and bool((lengths[:real] == q_len).all())
    return Decodes(count, tokens if uniform else int(starts[count]), q_len, uniform)


@dataclass
class Batch:
    """A step's requests as vLLM describes them, padding included."""

    num_reqs: int
    query_start_loc: torch.Tensor  # int32 [num_reqs + 1] on the device
    query_start_loc_cpu: torch.Tensor  # the same on the host
    seq_lens: torch.Tensor  # int32 [num_reqs] on the device: keys, those of this step included
    block_table: torch.Tensor  # int32 [num_reqs, width] on the device
    host_seq_lens: torch.Tensor | None = None  # an upper bound of seq_lens on the CPU
    exact: torch.Tensor | bool = False  # where the bound is the length: for all requests, or bool [num_reqs] on the CPU
    sync: Callable[[], AbstractContextManager[Any]] = nullcontext  # around a copy that waits for the device

    def lengths(self, first: int) -> np.ndarray:
        """Return the keys of the requests from `first` on, on the host; 0 where they have no query tokens.

        Where vLLM knows no more than a bound (requests whose number of accepted drafts is still on the device), this
        waits for the device: once a step.
        """
        rows = slice(first, self.num_reqs)
        used = np.diff(self.query_start_loc_cpu[first : self.num_reqs + 1].numpy()) > 0
        exact = self.exact if isinstance(self.exact, bool) else bool(self.exact[rows].numpy()[used].all())
        if self.host_seq_lens is not None and exact:
            lengths = self.host_seq_lens[rows].numpy()
        else:
            with self.sync():
                lengths = self.seq_lens[rows].cpu().numpy()
        return np.where(used, lengths, 0).astype(np.int64)


# Index arrays of a plan: qo_indptr, kv_indptr, page numbers, last_page_len.
Pages = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def pages(batch: Batch, first: int, page_size: int) -> Pages:
    """Return the index arrays of the requests from `first` on: on the host, but for the page numbers.

    These are gathered from the block table on the device: positions go there in one copy from pinned memory,
    and nothing waits.
    """
    lengths = batch.lengths(first)
    tables = batch.block_table[first : batch.num_reqs]
    if tables.stride(0) != tables.shape[1]:
        tables = tables.contiguous()
    counts, positions = in_table(tables, lengths, page_size)
    where = torch.from_numpy(positions)
    if tables.is_cuda:
        where = where.pin_memory().to(tables.device, non_blocking=True)
    indices = tables.view(-1).index_select(0, where)
    starts = batch.query_start_loc_cpu[first : batch.num_reqs + 1]
    last = last_page_len(lengths, counts, page_size)
    return starts - starts[0], int32(bounds(counts)), indices, int32(last)


def device_pages(batch: Batch, q_len: int, page_size: int) -> Pages:
    """Return the index arrays of a batch of decodes, `q_len` query tokens each, computed on the device alone. A CUDA
    graph that contains this computes them from vLLM's tables and lengths in every replay.
    """
    count, width = batch.num_reqs, batch.block_table.shape[1]
    lengths = batch.seq_lens[:count]
    counts = (lengths + (page_size - 1)) // page_size
    kv_indptr = lengths.new_zeros(count + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=kv_indptr[1:])
    column = torch.arange(width, dtype=torch.int32, device=lengths.device)
    # Entries past a request's pages go to one place behind all others.
    place = torch.where(column < counts[:, None], kv_indptr[:-1, None] + column, count * width)
    indices = lengths.new_zeros(count * width + 1)
    indices.scatter_(0, place.flatten().long(), batch.block_table[:count].flatten())
    qo_indptr = torch.arange(0, count * q_len + 1, q_len, dtype=torch.int32, device=lengths.device)
    return qo_indptr, kv_indptr, indices, lengths - (counts - 1).clamp_min(0) * page_size


def token_ranges(batch: Batch, first: int, spans: Spans) -> torch.Tensor | None:
    """Return the span that each query token of the requests from `first` on is in: int32 `[tokens, 2]` on the device,
    (-1, -1) for none. None where no token is in one.
    """
    starts, lengths = batch.query_start_loc_cpu[first : batch.num_reqs + 1].numpy(), batch.lengths(first)
    starts = starts - starts[0]
    ranges = np.full((starts[-1], 2), -1, np.int32)
    for i, (row, stop, kv_len) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        position = kv_len - (stop - row)  # of the request's first query token
        for span in spans.get(first + i, ()):
            if span[0] < span[1]:  # vLLM has no spans of one token
                ranges[max(row, row + span[0] - position) : max(row, min(stop, row + span[1] + 1 - position))] = span
    if (ranges < 0).all():
        return None
    found = torch.from_numpy(ranges)
    return found.pin_memory().to(batch.seq_lens.device, non_blocking=True) if batch.seq_lens.is_cuda else found


class Sessions:
    """The wrappers of a KV cache group: one for each type of its layers."""

    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces = workspaces
        self.plans = StepPlans(self._wrapper)

    def _wrapper(self, key: tuple[LayerType, bool, Size | None, bool]) -> Any:
        """Return a wrapper for layers of a type: where tokens of an image see each other, and where there is a size,
        for plans that are part of a CUDA graph of decodes. Those of all requests and of some have one each.
        """
        (options, page_size, _), ranges, size, _ = key
        workspace = self.workspaces.planned
        if not page_size:
            return BatchPrefillWithRaggedKVCacheWrapper(workspace)
        if ranges:
            names = "pos_encoding_mode", "q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo"
            fixed = {name: getattr(options, name) for name in names}
            return BatchPrefillWithCausalBidirectionalRangesWrapper(workspace, KV_LAYOUT, **fixed)
        if size is None:
            return BatchPrefillWithPagedKVCacheWrapper(workspace, KV_LAYOUT)
        count, _, width = size
        lengths = (count + 1, count + 1, count * width + 1, count)
        qo, kv, indices, last = (torch.zeros(n, dtype=torch.int32, device=workspace.device) for n in lengths)
        return BatchPrefillWithPagedKVCacheWrapper(workspace, KV_LAYOUT, True, qo, kv, indices, last)


@dataclass(eq=False)
class StepMetadata:
    """What the layers of a KV cache group share in one step."""

    batch: Batch
    decodes: Decodes
    sessions: Sessions
    causal: bool = True  # False: every token sees all keys of its request, as in cross attention
    for_capture: bool = False  # the step warms up or captures a CUDA graph, which has lengths on the device only
    mm_prefix_range: Spans | None = None  # vLLM's name: models whose layers of full attention ignore images set None
    # Slices that every layer would make.
    decode_tables: torch.Tensor = field(init=False)
    decode_seq_lens: torch.Tensor = field(init=False)
    decode_starts: torch.Tensor | None = field(init=False)
    _pages: dict[tuple[int, int], Pages] = field(default_factory=dict, init=False)
    _ranges: dict[int, torch.Tensor | None] = field(default_factory=dict, init=False)
    _rows: dict[int, slice] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        n = self.decodes.num_reqs
        self.decode_tables = self.batch.block_table[:n]
        self.decode_seq_lens = self.batch.seq_lens[:n]
        self.decode_starts = None if self.decodes.uniform else self.batch.query_start_loc[: n + 1]

    @property
    def has_prefills(self) -> bool:
        """Whether there are requests after the decodes."""
        return self.decodes.num_reqs < self.batch.num_reqs

    @functools.cached_property
    def _size_in_graph(self) -> Size | None:
        """What a CUDA graph fixes whose part the plans of this step become; None where they are not part of one."""
        if not self.for_capture or self.has_prefills or not self.decodes.uniform:
            return None
        return Size(self.decodes.num_reqs, self.decodes.q_len, self.batch.block_table.shape[1])

    def planned(self, kind: LayerType, decodes_too: bool) -> tuple[Any, slice, torch.Tensor | None]:
        """Return the wrapper of a layer type, planned for this step by the first layer of the type; the rows of the
        query that its plan is for, and their `token_ranges`. `decodes_too`: all requests of the step, not only those
        after the decodes.

        NotSupported while a CUDA graph is captured, but for uniform decodes: other plans need lengths on the host.
        """
        batch, first = self.batch, 0 if decodes_too else self.decodes.num_reqs
        size = self._size_in_graph if kind.page_size else None
        if kind.page_size and not self.causal:
            kind = kind._replace(options=kind.options._replace(causal=False))
        if kind.page_size and size is None:
            if not self.causal and kind.options.window_left >= 0:
                raise NotImplementedError(
                    "a sliding window of tokens that see later keys: kernels have none to the right"
                )
            if self.mm_prefix_range is not None and first not in self._ranges:
                self._ranges[first] = token_ranges(batch, first, self.mm_prefix_range)
        ranges = self._ranges.get(first) if kind.page_size and size is None else None

        def plan(wrapper: Any) -> None:
            wrapper.plan(*self._arrays(first, kind.page_size, size), **kind.arguments(ranges is not None))
            starts = batch.query_start_loc_cpu
            self._rows[first] = slice(int(starts[first]), int(starts[batch.num_reqs]))

        wrapper = self.sessions.plans.of((kind, ranges is not None, size, decodes_too), self, plan)
        return wrapper, self._rows[first] if size is None else slice(0, self.decodes.num_tokens), ranges

    def _arrays(self, first: int, page_size: int, size: Size | None) -> Iterable[torch.Tensor]:
        """Return the index arrays of a plan for the requests from `first` on."""
        batch, starts = self.batch, self.batch.query_start_loc_cpu
        if not page_size:
            return starts, starts
        if size is None and batch.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
            feature = "capture in a CUDA graph of requests that need a plan"
            reason = "it reads lengths on the host and schedules by them"
            checks.refuse(feature, reason, "cudagraph_mode PIECEWISE", "CUTE_ATTN")
        if (first, page_size) not in self._pages:
            found = pages(batch, first, page_size) if size is None else device_pages(batch, size.q_len, page_size)
            self._pages[first, page_size] = found
        return self._pages[first, page_size]
