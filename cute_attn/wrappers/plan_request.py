"""The checked arguments of a plan, and the copies into buffers that captured launches read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cute_attn.problem import DeviceTokens, Tokens
from cute_attn.request.batch_plan import Mask, PlanOptions, Splits
from cute_attn.runtime.staging import Uploads


class PlanRequest(NamedTuple):
    """The checked arguments of a `plan`."""

    options: PlanOptions
    tokens: Tokens | DeviceTokens
    mask: Mask
    splits: Splits
    page_size: int
    uniform_q_len: int | None = None  # query tokens of every request, if a prefill plan says so
    newest: bool = False  # whether these are the newest of their request, and see the keys up to their own

    @property
    def q_len(self) -> int | None:
        """Query tokens of every request, where the plan fixes them."""
        return self.uniform_q_len if self.tokens.q_len is None else self.tokens.q_len


class Copy(NamedTuple):
    """A copy into a buffer that captured launches read, to be made once nothing can fail."""

    target: torch.Tensor
    source: torch.Tensor
    non_blocking: bool = False

    def make(self) -> None:
        """Copy, on the current stream."""
        self.target.copy_(self.source, non_blocking=self.non_blocking)


class HostCopy(NamedTuple):
    """A copy of lengths on the host into an index buffer of CUDA graphs."""

    uploads: Uploads
    numbers: np.ndarray

    def make(self) -> None:
        """Copy, on the current stream."""
        self.uploads.copy(self.numbers)


def differ(before: PlanRequest, now: PlanRequest) -> bool:
    """Tell whether two plans differ in more than lengths. Types count: 1 == 1.0 == True."""
    old, new = before.tokens, now.tokens
    return (
        (before.options is not now.options and _options_differ(before.options, now.options))
        or (before.splits is not now.splits and before.splits != now.splits)
        or before[4:] != now[4:]  # page size and promises
        or old.q_len != new.q_len
        or old.batch_size != new.batch_size
        or not (before.mask.packed is now.mask.packed is None)
        or old.multi_item
        or new.multi_item
    )


def _options_differ(before: PlanOptions, now: PlanOptions) -> bool:
    return any(map(operator.is_not, map(type, before), map(type, now))) or before != now


def make(copies: Sequence[Copy | HostCopy]) -> None:
    """Make the copies."""
    for each in copies:
        each.make()


def same_memory(indices: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Tell whether page numbers are where their buffer starts, in its dtype and without gaps."""
    return indices.data_ptr() == buffer.data_ptr() and indices.dtype == buffer.dtype and indices.is_contiguous()


def index_values(name: str, tokens: Tokens) -> np.ndarray | None:
    """Return what an index buffer receives; None for the buffer of page numbers, which is copied on the device."""
    if "last_page_len" in name:
        return tokens.last_page_len
    if "indices" in name:
        return None
    return tokens.lengths.qo_indptr if name.startswith("qo") else tokens.kv_indptr
