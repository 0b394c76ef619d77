"""Plans whose index arrays are on the device: on a GPU, or on the emulator, whose device memory is the CPU's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from cute_attn.problem import DeviceLengths
from cute_attn.wrappers import plan_request
from tests.support.batch_case import BatchCase, BatchInputs, decode, heads, paged, plan_arguments, ragged

INDEX_ARRAYS = (
    *("qo_indptr", "kv_indptr", "indptr", "indices", "last_page_len"),
    *("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
)
# Of one batch size, number of query tokens and number of pages each, so that captured plans may follow one another.
PAGED = [
    paged((30, 0, 5, 9), (165, 40, 0, 33), mask="causal", **heads(4, 2)),
    paged((1, 36, 6, 1), (40, 70, 60, 68), mask="causal", **heads(4, 2)),
]
RAGGED = [
    ragged((30, 0, 5, 9), (165, 40, 0, 33), mask="causal", **heads(4, 2)),
    ragged((1, 36, 6, 1), (40, 70, 60, 68), mask="causal", **heads(4, 2)),
]
DECODE = [
    decode((165, 40, 0, 33), **heads(4, 1)),
    decode((0, 238, 0, 0), **heads(4, 1)),
]


def moved(case: BatchCase, inputs: BatchInputs, device: str) -> dict[str, Any]:
    """Arguments of `plan` with all index arrays on the device."""
    arguments = plan_arguments(case, inputs)
    return {name: x.to(device) if name in INDEX_ARRAYS else x for name, x in arguments.items()}


def _read(lengths: DeviceLengths) -> Any:
    raise AssertionError("the lengths were read on the host")


@contextlib.contextmanager
def emulated_device() -> Iterator[None]:
    """CPU tensors count as tensors on the device, and reading lengths on the host is an error."""
    with (
        mock.patch.object(plan_request, "_is_on", lambda device, value: isinstance(value, torch.Tensor)),
        mock.patch.object(DeviceLengths, "host", property(_read)),
    ):
        yield
