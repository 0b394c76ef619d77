"""Replays of runs read page numbers and write partial results where a caller's tensor is now: it may move in place."""

from __future__ import annotations

import pytest
import torch

from cute_attn import BatchDecodeWithPagedKVCacheWrapper
from tests.support.launch_corpus import RecordingDriver

HEADS, HEAD_DIM, PAGE_SIZE = (4, 1), 64, 16


@pytest.mark.parametrize("backend", ["xqa", "fa2"])
def test_launches_get_the_addresses_of_now(backend: str, driver: RecordingDriver) -> None:
    q, cache = (torch.randn(*shape, HEAD_DIM).half() for shape in ((2, HEADS[0]), (16, 2, PAGE_SIZE, HEADS[1])))
    workspace, indices = torch.zeros(1 << 22, dtype=torch.uint8), torch.arange(8, dtype=torch.int32)
    bounds, last = torch.tensor([0, 4, 8], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    made = BatchDecodeWithPagedKVCacheWrapper(workspace, backend=backend)

    for moved in (None, indices, made._float_workspace_buffer):
        for _ in range(3):
            made.plan(bounds, indices, last, *HEADS, HEAD_DIM, PAGE_SIZE, q_data_type="float16")
            made.run(q, cache)
        if moved is not None:
            moved.resize_(4 * moved.numel())
            made.run(q, cache)
        values = driver.recorded[-1].values
        read = {"kv_indices": indices} if backend == "fa2" else {"table": indices, "partials": made._workspace}
        for field, tensor in read.items():
            assert int.from_bytes(values[field], "little") == tensor.data_ptr()
