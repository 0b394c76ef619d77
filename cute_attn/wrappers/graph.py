"""CUDA graphs: the caller's buffers, which captured launches read, and what the first plan of a wrapper fixes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError, RuntimeArgumentError
from cute_attn.problem import BatchLengths, DeviceLengths, Features, LaunchSizes, Lengths, Settings
from cute_attn.request import caches, checks
from cute_attn.request.batch_plan import Mask, PlanRequest, Splits
from cute_attn.request.index_arrays import copied_at_once, int32
from cute_attn.request.settings import MAX_INDEX
from cute_attn.runtime.staging import Staging, is_capturing

Copies = Sequence[Callable[[], Any]]


class Kind(NamedTuple):
    """What a buffer holds, and how many numbers."""

    holds: str  # a field of `Lengths` or of `Mask`
    more: int | None  # elements beyond the batch size; None: any number
    dtype: torch.dtype = torch.int32


MASK, MASK_OFFSETS = "packed", "offsets"
OF_KEYS = "kv_indptr", "kv_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indptr_buffer"
OF_PAGES = "kv_indices", "paged_kv_indices_buf", "paged_kv_indices_buffer"
KINDS = {  # by the name of a constructor's argument
    **dict.fromkeys(("qo_indptr", "qo_indptr_buf"), Kind("qo_indptr", 1)),
    **dict.fromkeys(OF_KEYS, Kind("kv_indptr", 1)),
    **dict.fromkeys(OF_PAGES, Kind("kv_indices", None)),
    **dict.fromkeys(("paged_kv_last_page_len_buf", "paged_kv_last_page_len_buffer"), Kind("last_page_len", 0)),
    "kv_len_arr": Kind("kv_len_arr", 0),
    "custom_mask_buf": Kind(MASK, None, torch.uint8),
    "mask_indptr_buf": Kind(MASK_OFFSETS, 1),
}
LENGTHS = ("qo_indptr", "kv_indptr", "last_page_len")  # fields of `Lengths` that plans upload


class GraphInvariants(NamedTuple):
    """What a captured graph has fixed, so that later plans must not change it."""

    settings: Settings
    splits: Splits
    limits: LaunchSizes
    first_row: int  # `run` fills the rows of out and lse before it with torch


class GraphBuffers:
    """The buffers of a wrapper with CUDA graphs. They share no memory, because a plan writes them all."""

    def __init__(self, workspace: torch.Tensor, given: Mapping[str, Any]) -> None:
        """`given`: the constructor's arguments, by name. The first whose size follows from the batch size sets it. Of
        the mask buffers both or neither are given.
        """
        self.buffers: dict[str, torch.Tensor] = {}  # by the caller's name
        self.holding: dict[str, torch.Tensor] = {}  # by `Kind.holds`
        self.batch_size = 0
        kinds = {name: KINDS[name] for name in given}
        masked = any(given[name] is not None for name, kind in kinds.items() if kind.holds in Mask._fields)
        for name, kind in kinds.items():
            if masked or kind.holds not in Mask._fields:
                self._add(name, kind, given[name], workspace)
        self._extents = [checks.extent(buffer) for buffer in self.buffers.values()]
        self._staged = {
            what: Staging(workspace.device, target=self.holding[what]) for what in LENGTHS if what in self.holding
        }

    def _add(self, name: str, kind: Kind, value: Any, workspace: torch.Tensor) -> None:
        """Check a buffer beside those before it."""
        if not isinstance(value, torch.Tensor):
            raise checks.wrong(f"{name} must be a torch.Tensor with use_cuda_graph=True", value)
        device = workspace.device, "the workspace's device"
        buffer = checks.operand(name, value, (kind.dtype,), (None,), "[n]", *device)
        checks.contiguous(name, buffer)
        if kind.more is not None:
            if not self.buffers:
                self.batch_size = buffer.numel() - kind.more
            size = self.batch_size + kind.more
            if buffer.numel() != size:
                raise ArgumentError(
                    f"{name} must have {size} elements for batch size {self.batch_size}, got {buffer.numel()}"
                )
        checks.apart(((name, buffer),), (("float_workspace_buffer", workspace), *self.buffers.items()))
        self.buffers[name] = self.holding[kind.holds] = buffer

    @property
    def page_indices(self) -> torch.Tensor:
        """The buffer of page numbers."""
        return self.holding["kv_indices"]

    # ---- what plans must keep

    def checked(
        self, request: PlanRequest, settings: Settings, before: GraphInvariants | None
    ) -> GraphInvariants | None:
        """Return what the first plan fixes, which may be this one; None until its number of rows is known. Refuse a
        plan that changes more than lengths, or for which buffers or captured launches have no room.
        """
        lengths = request.lengths
        host_lengths = isinstance(lengths, BatchLengths)
        self.check_room(lengths.batch_size, lengths.kv_end if host_lengths and lengths.kv_indices is not None else 0)
        if lengths.rows is None:
            return None
        self._check_mask(request.mask)
        if before is None:
            most_keys = lengths.kv_end if lengths.kv_indices is None else self.page_indices.numel() * settings.page_size
            limits = LaunchSizes(lengths.batch_size, lengths.rows, most_keys, request.max_qo_len)
            return GraphInvariants(settings, request.splits, limits, lengths.first_row)
        _check_sizes(before.limits, lengths, request.max_qo_len)
        first_row = lengths.first_row if host_lengths else before.first_row
        _check_unchanged(before, GraphInvariants(settings, request.splits, before.limits, first_row))
        return before

    def check_room(self, batch_size: int, pages: int) -> None:
        """Refuse a batch of another size, or of more page numbers than the buffer holds."""
        if batch_size != self.batch_size:
            raise ArgumentError(
                f"the batch size must stay {self.batch_size} with use_cuda_graph=True (the size of the index "
                f"buffers), got {batch_size}"
            )
        if pages and pages > self.page_indices.numel():
            raise ArgumentError(
                f"the paged kv indices must fit the {self.page_indices.numel()} elements of their buffer, got {pages}"
            )

    def _check_mask(self, mask: Mask) -> None:
        if mask.packed is None:
            return
        if MASK not in self.holding:
            raise ArgumentError("a custom mask with use_cuda_graph=True needs custom_mask_buf and mask_indptr_buf")
        room = self.holding[MASK].numel()
        if mask.offsets[-1] > min(room, MAX_INDEX):
            raise ArgumentError(f"the packed mask must fit the {room} bytes of custom_mask_buf, got {mask.offsets[-1]}")

    # ---- what a plan writes

    def place(self, request: PlanRequest) -> tuple[PlanRequest, Copies]:
        """Return the request with page numbers and mask where captured launches read them, and the copies of all arrays
        into the buffers. Sources that overlap a buffer are copied aside here, before anything is written.
        """
        lengths, mask = request.lengths, request.mask
        copies: list[Callable[[], Any]] = []
        for what, staging in self._staged.items():
            if isinstance(lengths, DeviceLengths):
                copies += self.copies(what, getattr(lengths, what))
            else:
                staging.upload(getattr(lengths, what))
                copies.append(staging.send)
        if lengths.kv_indices is not None:
            copies += self.copies("kv_indices", lengths.kv_indices[: lengths.kv_end])
            lengths = lengths.replace(kv_indices=self.page_indices)
        if mask.packed is not None:
            copies += (*self.copies(MASK, mask.packed), *self.copies(MASK_OFFSETS, int32(mask.offsets)))
            mask = mask._replace(packed=self.holding[MASK])
        return request._replace(lengths=lengths, mask=mask), copies

    def copies(self, what: str, source: torch.Tensor) -> Copies:
        """Return the copy of numbers to the start of the buffer that holds them; none where they are there."""
        target, size = self.holding[what], source.numel()
        if size != target.numel():
            target = target[:size]
        if source.data_ptr() == target.data_ptr() and source.dtype == target.dtype and source.is_contiguous():
            return ()
        source = self._aside(source)
        waits = copied_at_once(source, target.device) and not is_capturing(target.device)  # replays copy anew
        return [functools.partial(target.copy_, source, non_blocking=not waits)]

    def _aside(self, source: torch.Tensor) -> torch.Tensor:
        """Return a source for a copy into a buffer: int32 numbers or mask bytes, of which no buffer is a part."""
        if source.dtype == torch.int64:
            return caches.as_int32(source, source.device)
        start, stop = checks.extent(source)
        met = [first for first, end in self._extents if start < end and first < stop]
        return source.clone() if met else source

    def captured(self, lengths: DeviceLengths) -> DeviceLengths:
        """Return the lengths of a planner launch that is captured: its replays read the buffers, which hold the lengths
        of the latest plan.
        """
        return lengths.replace(**{what: self.holding.get(what) for what in LENGTHS})


def _check_sizes(limits: LaunchSizes, lengths: Lengths, q_len: int | None) -> None:
    """Refuse a plan for which captured launches have no room."""
    assert lengths.rows is not None
    if limits.max_qo_len != q_len:
        name = "uniform_q_len" if lengths.q_len is None else "q_len_per_req"
        raise RuntimeArgumentError(
            f"{name} must stay {limits.max_qo_len} with use_cuda_graph=True, got {q_len}: use another wrapper"
        )
    sizes = [("qo_indptr[-1]", lengths.rows, limits.max_rows)]
    if lengths.kv_indices is None:
        sizes.append(("kv_indptr[-1]", lengths.kv_end, limits.max_kv_tokens))
    for name, size, most in sizes:
        if size > most:
            raise ArgumentError(
                f"{name} must not exceed {most}, that of the first plan, with use_cuda_graph=True: captured launches "
                f"have no room for more; got {size}"
            )


def _check_unchanged(before: GraphInvariants, now: GraphInvariants) -> None:
    """Refuse a plan that changes more than lengths: captured launches contain all other numbers."""
    fixed = _by_name(before)
    for name, value in _by_name(now).items():
        if fixed[name] != value:
            raise RuntimeArgumentError(
                f"{name} must stay {fixed[name]!r} with use_cuda_graph=True: a captured graph would not see the "
                f"change to {value!r}; use another wrapper, or call reset_workspace_buffer() and capture again"
            )


def _by_name(invariants: GraphInvariants) -> dict[str, Any]:
    settings = invariants.settings._asdict()
    features: Features = settings.pop("features")
    named = features._asdict()
    del named["own_splits"]  # follows from the splits, which are compared too
    return {**named, **settings, **invariants.splits._asdict(), "qo_indptr[0]": invariants.first_row}
