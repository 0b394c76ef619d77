"""Calls that a CUDA graph may hold, on tensors without values: what needs these, or a size that depends on them, fails.
Nor is a tensor made of Python's numbers, whose copy from the host could not be captured.
"""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

import cute_attn
from tests.support.torch_ops import CASES

NAMES = [
    name for name in CASES if name.startswith(("append", "nvfp4", "merge")) and not name.startswith("append_nvfp4")
]


@pytest.mark.parametrize("name", NAMES)  # appends of NVFP4: tests/api/test_nvfp4_caches.py
def test_nothing_waits_for_the_device(name: str) -> None:
    call = CASES[name]("meta")
    with mock.patch.object(torch, "tensor", side_effect=AssertionError):
        call.function(*call.tensors)


def test_helpers_of_pages() -> None:
    ints = torch.zeros(7, dtype=torch.int32, device="meta")
    with mock.patch.object(torch, "tensor", side_effect=AssertionError):
        requests, positions = cute_attn.get_batch_indices_positions(ints[:3], ints[:2], 7)
        assert requests.shape == positions.shape == (7,)
        assert cute_attn.get_seq_lens(ints[:3], ints[:2], 4).shape == (2,)
