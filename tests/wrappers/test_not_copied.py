"""Copies of wrappers, which would share schedules with the original."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import ArgumentTypeError


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 16, dtype=torch.uint8)


MADE: dict[str, Callable[[], Any]] = {
    "decode": lambda: cute_attn.BatchDecodeWithPagedKVCacheWrapper(workspace()),
    "block sparse": lambda: cute_attn.BlockSparseAttentionWrapper(workspace()),
    "cascade": lambda: cute_attn.MultiLevelCascadeAttentionWrapper(2, workspace()),
    "shared prefix": lambda: cute_attn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace()),
}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", MADE)
def test_copies_are_refused(kind: str, copied: Callable[[Any], Any]) -> None:
    wrapper = MADE[kind]()
    with pytest.raises(ArgumentTypeError, match=f"a {type(wrapper).__name__} cannot be copied.*Construct another"):
        copied(wrapper)
