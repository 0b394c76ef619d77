"""Replays of runs read page numbers and write partial results where a caller's tensor is now: it may move in place."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper
from cute_attn.emulator.settings import using
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


def test_page_numbers_that_move_in_place() -> None:
    for kernels in ("xqa", "fa2"):
        q, cache = tensors()
        indices = torch.arange(4, dtype=torch.int32)
        reference = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 16, dtype=torch.uint8), backend="reference")
        with using("sm_90a", kernels=kernels, sms=2, checks=False):
            made = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8), backend="emulator")
            for _ in range(2):
                run(made, indices, 2, q, cache)
            before = indices.untyped_storage()  # stays allocated: the old address is somebody else's
            indices.set_(torch.arange(15, 7, -1, dtype=torch.int32))
            out = run(made, indices, 4, q, cache)
        assert before.data_ptr() != indices.data_ptr()
        wanted = run(reference, indices, 4, q, cache)
        torch.testing.assert_close(out.double(), wanted.double(), rtol=0, atol=0.02)


def test_launches_get_the_addresses_of_now(driver: RecordingDriver) -> None:
    q, cache = tensors()
    workspace, indices = torch.zeros(1 << 22, dtype=torch.uint8), torch.arange(8, dtype=torch.int32)
    made = BatchDecodeWithPagedKVCacheWrapper(workspace, backend="xqa")
    for moved in (None, indices, made._float_workspace_buffer):
        for _ in range(3):
            run(made, indices, 4, q, cache)
        if moved is not None:
            moved.resize_(4 * moved.numel())
            run(made, indices, 4, q, cache)
        values = driver.recorded[-1].values
        for field, tensor in (("table", indices), ("partials", made._workspace)):
            assert int.from_bytes(values[field], "little") == tensor.data_ptr()
