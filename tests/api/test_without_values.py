"""Calls that a CUDA graph may hold, on tensors without values: what needs these, or a size that depends on them, fails.
Nor is a tensor made of Python's numbers, whose copy from the host could not be captured.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.support.entry_points import NEW_RESULTS, OTHERS, without

CALLS = OTHERS | {name: entry for name, entry in NEW_RESULTS.items() if not name.startswith("quantise pages")}


def shapes(found: Any) -> list[torch.Size]:
    return [x.shape for x in tree_leaves(found) if x is not None]


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    """Scales may be numbers, or tensors on the CPU, which are no others: nothing is copied to the device of caches."""
    entry, meta = CALLS[name], {key: x.to("meta") for key, x in CALLS[name].tensors.items()}
    call, numbers = entry.begin({}), {"k_scale": torch.ones(1), "v_scale": 0.5} if "append NVFP4" in name else {}
    for left_out in ((), ("batch_indices", "positions")) if name == "positions" else ((),):
        wanted = shapes(call(without({key: x.clone() for key, x in entry.tensors.items()}, *left_out)))
        with mock.patch.object(torch, "tensor", side_effect=AssertionError):
            for given in (meta, meta | numbers):
                assert shapes(call(without(given, *left_out))) == wanted
