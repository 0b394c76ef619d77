"""The mask function: called once per layer type and forward pass, it describes what the layers of that type see."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import masking_utils

from cute_attn.integrations.transformers import descriptors, patterns
from cute_attn.integrations.transformers.descriptors import Rows, Run
from cute_attn.integrations.transformers.patterns import Pattern


class Padding(NamedTuple):
    """Keys of each request that a 2-D attention mask keeps: `first:stop`, without gaps if they are `kept` in number."""

    first: torch.Tensor
    stop: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def of(cls, kept: torch.Tensor) -> Padding:
        """Reduce a boolean `[batch, kv_len]`."""
        indices = torch.arange(kept.shape[1], device=kept.device)
        first = torch.where(kept, indices, kept.shape[1]).amin(1)
        stop = torch.where(kept, indices + 1, 0).amax(1)
        return cls(torch.minimum(first, stop), stop, kept.sum(1))


def attention_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> torch.Tensor:
    """Describe which keys the queries of a forward pass see, in one of the forms of `descriptors`.

    Called by transformers. Costs one synchronisation where there is a 2-D attention mask or a static cache, as `sdpa`'s
    mask does, and none while a graph is traced.

    Parameters
    ----------
    batch_size, q_length, kv_length : sizes of the attention; kv_length is that of the keys a layer gets.
    q_offset, kv_offset : positions of the first query and of the first key; q_offset is a tensor with static caches.
    mask_function : transformers' function of (batch, head, query, key) indices.
    attention_mask : boolean `[batch_size, seen tokens]` or None.
    device : of the model's inputs.
    options : further arguments of transformers' own mask functions.
    """
    positions = options.pop("cache_position", None)  # transformers before q_length and q_offset
    asked: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset}
    if q_length is None and positions is not None:
        q_length, q_offset = len(positions), positions[0]
        asked, device = {"cache_position": positions}, positions.device
    assert q_length is not None
    if device is None:
        device = attention_mask.device if attention_mask is not None else "cpu"
    asked |= {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "device": device}
    asked |= {"mask_function": mask_function, "attention_mask": attention_mask}
    never_none = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    exact = functools.partial(masking_utils.sdpa_mask, **options | asked | never_none)
    extent = Extent(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
    kept = None if attention_mask is None else _local(attention_mask, kv_length, kv_offset)
    if torch.compiler.is_compiling():
        plain = mask_function is masking_utils.causal_mask_function and q_length == 1 and kept is None
        return _described(Pattern(True) if plain else None, extent, kept, exact)
    mask = _described(patterns.recognise(mask_function), extent, kept, exact)
    descriptors.renewed(mask, ours=True)
    return mask


class Extent(NamedTuple):
    """Sizes and positions of an attention."""

    batch_size: int
    q_len: int
    kv_len: int
    q_offset: int | torch.Tensor
    kv_offset: int
    device: torch.device

    def chunked(self, pattern: Pattern) -> bool:
        """Tell whether keys lie before the chunk of a query. Left padding only moves chunks further."""
        return pattern.chunk > 0 and self.kv_offset + self.kv_len > pattern.chunk


def _described(
    pattern: Pattern | None, extent: Extent, kept: torch.Tensor | None, exact: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return the shortest description of a mask. `kept`: keys that are not padding; `exact` makes the boolean mask."""
    if extent.q_len == 1:
        lengths = None if pattern is None else _decode_lengths(pattern, extent, kept)
        if lengths is not None:
            return descriptors.decode_of_lengths(lengths)
        return descriptors.decode_of_mask(exact()[:, 0, 0, :].expand(extent.batch_size, -1))
    rows = None if pattern is None else _rows(pattern, extent, kept)
    return exact() if rows is None else rows.pack()


def _local(attention_mask: torch.Tensor, kv_len: int, kv_offset: int) -> torch.Tensor:
    """Return the columns of a 2-D mask that belong to the keys; tokens past its end are hidden."""
    kept = attention_mask[:, kv_offset : kv_offset + kv_len].bool()
    missing = kv_len - kept.shape[1]
    return torch.nn.functional.pad(kept, (0, missing)) if missing > 0 else kept


def _decode_lengths(pattern: Pattern, extent: Extent, kept: torch.Tensor | None) -> torch.Tensor | None:
    """Return how many of its first keys each request sees; None where that does not say it."""
    if extent.chunked(pattern) or 0 < pattern.window < extent.kv_len or pattern.segment_ids is not None:
        return None
    stop = torch.full((extent.batch_size,), extent.kv_len, dtype=torch.int64, device=extent.device)
    if pattern.causal:
        stop = (torch.full_like(stop, 1 - extent.kv_offset) + extent.q_offset).clamp(max=extent.kv_len)
    if kept is None:
        return stop
    padding = Padding.of(kept)
    if not bool(((padding.first == 0) & (padding.kept == padding.stop)).all()):  # the one synchronisation
        return None
    return torch.minimum(stop, padding.stop)


def _rows(pattern: Pattern, extent: Extent, kept: torch.Tensor | None) -> Rows | None:
    """Return the runs of query rows; None where only the exact mask describes what they see."""
    window_left = pattern.window - 1 if pattern.window else -1
    if pattern.segment_ids is not None:
        starts = None if kept is not None else _segment_starts(pattern, pattern.segment_ids, extent)
        return None if starts is None else Rows(True, window_left, _packed(starts))
    if extent.chunked(pattern):
        return None
    batch_size, q_len, kv_len = extent.batch_size, extent.q_len, extent.kv_len
    ranges = [(0, kv_len)] * batch_size
    if kept is not None:
        padding = Padding.of(kept)
        columns = torch.stack(padding, 1).tolist()
        if any(count != stop - first for first, stop, count in columns):
            return None
        ranges = [(first, stop) for first, stop, _ in columns]
    if not pattern.causal:
        runs = [Run(b * q_len, q_len, b, first, stop - first) for b, (first, stop) in enumerate(ranges)]
        return Rows(False, -1, tuple(runs))
    offset = int(extent.q_offset) - extent.kv_offset
    causal: list[Run] = []
    for b, (first, stop) in enumerate(ranges):
        stop = min(stop, offset + q_len)
        live = min(max(stop - offset, 0), q_len)  # queries behind are padding on the right; their output is zero
        if live:
            causal.append(Run(b * q_len, live, b, first, max(stop - first, 0)))
        if live < q_len:
            causal.append(Run(b * q_len + live, q_len - live, b, 0, 0))
    return Rows(True, window_left, tuple(causal))


def _segment_starts(pattern: Pattern, ids: torch.Tensor, extent: Extent) -> torch.Tensor | None:
    """Tell, `[batch, tokens]`, where tokens start that see none before; None if these are not runs of tokens.

    Packing has no cache: queries and keys are the same tokens. The number of a segment may not come again in its row,
    and positions must count its tokens one by one; then they say where it crosses into another chunk.
    """
    size = extent.batch_size, extent.q_len
    if not pattern.causal or extent.q_len != extent.kv_len or int(extent.q_offset) or extent.kv_offset:
        return None
    if tuple(ids.shape) != size or (pattern.positions is not None and tuple(pattern.positions.shape) != size):
        return None
    ids = ids.cpu()
    starts = _changes(ids)
    if any(int(of_row.sum()) != row.unique().numel() for of_row, row in zip(starts, ids, strict=True)):
        return None
    if pattern.positions is not None:
        positions = pattern.positions.cpu()
        if not bool((starts[:, 1:] | (positions.diff() == 1)).all()):
            return None
        if pattern.chunk:
            first = 0 if pattern.left_padding is None else pattern.left_padding.cpu()[:, None]
            starts |= _changes((positions - first) // pattern.chunk)
    return starts


def _changes(values: torch.Tensor) -> torch.Tensor:
    """Tell where a value of `[batch, tokens]` is not the one before it; the first of a row never is."""
    return torch.nn.functional.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)


def _packed(starts: torch.Tensor) -> tuple[Run, ...]:
    """Return the runs of tokens that see only themselves."""
    length = starts.shape[1]
    runs = []
    for b, row in enumerate(starts):
        borders = [*row.nonzero().flatten().tolist(), length]
        runs += [Run(b * length + i, j - i, b, i, j - i) for i, j in itertools.pairwise(borders)]
    return tuple(runs)
