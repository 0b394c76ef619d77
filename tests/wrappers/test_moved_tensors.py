"""Replays of runs read page numbers and write partial results where a caller's tensor is now: it may move in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper
from tests.support.launch_corpus import RecordingDriver, driver

__all__ = ["driver"]  # a fixture

HEADS, HEAD_DIM, PAGE_SIZE = (4, 1), 64, 16


def run(made: BatchDecodeWithPagedKVCacheWrapper, indices: torch.Tensor, pages: int, *tensors: torch.Tensor) -> Any:
    """Plans two requests with so many pages each, and runs them."""
    bounds, last = torch.tensor([0, pages, 2 * pages], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    made.plan(bounds, indices, last, *HEADS, HEAD_DIM, PAGE_SIZE, q_data_type="bfloat16")
    return made.run(*tensors)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and a cache of 16 pages."""
    cache = torch.randn(16, 2, PAGE_SIZE, HEADS[1], HEAD_DIM)
    return torch.randn(2, HEADS[0], HEAD_DIM).bfloat16(), cache.bfloat16()


@pytest.mark.parametrize(("backend", "fields"), [("xqa", ("table", "partials")), ("fa2", ("kv_indices",))])
def test_launches_get_the_addresses_of_now(backend: str, fields: tuple[str, ...], driver: RecordingDriver) -> None:
    q, cache = tensors()
    workspace, indices = torch.zeros(1 << 22, dtype=torch.uint8), torch.arange(8, dtype=torch.int32)
    made = BatchDecodeWithPagedKVCacheWrapper(workspace, backend=backend)
    for moved in (None, indices, made._float_workspace_buffer):
        for _ in range(3):
            run(made, indices, 4, q, cache)
        if moved is not None:
            before = moved.untyped_storage()  # stays allocated: the old address is somebody else's
            moved.set_(torch.zeros(4 * moved.numel(), dtype=moved.dtype).index_put_((torch.arange(len(moved)),), moved))
            assert before.data_ptr() != moved.data_ptr()
            run(made, indices, 4, q, cache)
        values = driver.recorded[-1].values
        for field, tensor in zip(fields, (indices, made._workspace), strict=False):
            assert int.from_bytes(values[field], "little") == tensor.data_ptr()
