"""Public calls under torch.compile on a GPU: eager numbers, CUDA graphs of inductor."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import cute_attn
from tests.gpu import marks
from tests.support import torch_ops
from tests.support.torch_ops import CASES, assert_same, fresh_dynamo

__all__ = ["fresh_dynamo"]  # a fixture

pytestmark = marks.SM80
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="inductor needs triton")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_TRITON)])
def test_compiled_calls_are_eager_calls(name: str, backend: str) -> None:
    call = CASES[name]("cuda")
    assert_same(call, torch.compile(call.function, fullgraph=True, backend=backend), exact=False)


@NEEDS_TRITON
def test_cuda_graphs_of_inductor_see_new_plans() -> None:
    """mode="reduce-overhead" captures a run; its replays compute what the wrapper is planned for then."""
    batch = torch_ops.tokens("cuda")
    indptr, indices, last = torch_ops.where(batch)
    buffers = [torch.zeros(len(x), dtype=torch.int32, device="cuda") for x in (indptr, indices, last)]
    wrapper = cute_attn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch_ops.workspace("cuda"), *buffers)
    heads = torch_ops.HEADS, torch_ops.KV_HEADS, torch_ops.DIM, torch_ops.PAGE
    q, cache, plain = batch.q, batch.caches(), torch_ops.planned_decode(batch)
    wrapper.plan(indptr, indices, last, *heads, q_data_type=torch_ops.BF16)
    wrapper.run(q, cache)  # a run before any capture
    function = torch.compile(lambda q: wrapper.run(q * 2, cache) + 1, fullgraph=True, mode="reduce-overhead")
    for step in range(6):
        lengths = (last - step % 3).clamp(min=1)
        wrapper.plan(indptr, indices, lengths, *heads, q_data_type=torch_ops.BF16)
        plain.plan(indptr, indices, lengths, *heads, q_data_type=torch_ops.BF16)
        torch.compiler.cudagraph_mark_step_begin()
        got = function(q).clone()
        # The sum cancels: an output that rounds otherwise in another schedule differs by its own ulp.
        torch.testing.assert_close(got, plain.run(q * 2, cache) + 1, rtol=2**-7, atol=2**-7)


def test_a_wrapper_without_cuda_graphs_is_not_captured() -> None:
    batch = torch_ops.tokens("cuda")
    wrapper, q, cache = torch_ops.planned_decode(batch), batch.q, batch.caches()
    function: Any = torch.compile(lambda q: wrapper.run(q, cache), fullgraph=True, backend="eager")
    function(q)
    with (
        pytest.raises(cute_attn.RuntimeArgumentError, match="make the wrapper with use_cuda_graph=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        function(q)
