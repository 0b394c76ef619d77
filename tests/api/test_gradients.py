"""Tensors that torch wants derivatives of, under compile. All calls: `test_stored`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import cute_attn
from cute_attn import ArgumentError
from tests.support.torch_ops import CASES, fresh_dynamo, operands

__all__ = ["fresh_dynamo"]  # a fixture


def with_tangent(x: torch.Tensor) -> torch.Tensor:
    return forward_ad.make_dual(x, torch.ones_like(x))


COMPILED = [
    ("paged", "v", r"paged_kv_cache\[1\]"),  # v of a pair
    ("ragged", "q", "q"),
    ("sink_run", "sinks", r"args\[0\]"),
    ("xqa, one cache", "kv_cache", "kv_cache"),
    ("trtllm_batch_decode", "sinks", r"sinks\[0\]"),  # in a list
    ("append", "k of paged_kv_cache", r"paged_kv_cache\[0\]"),
]


@pytest.mark.parametrize(("name", "i", "argument"), COMPILED, ids=[f"{name}-{i}" for name, i, _ in COMPILED])
def test_tensors_of_a_compiled_call(name: str, i: str, argument: str) -> None:
    call = CASES[name]("cpu")
    tensors = list(call.with_own_tensors())
    tensors[call.names.index(i)].requires_grad_()
    function = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"{argument} requires grad, and cute_attn computes no gradients"):
        function(*tensors)
    with torch.no_grad():
        function(*tensors)


def test_tangents_under_compile() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return cute_attn.single_prefill_with_kv_cache(q, k, v)

    def level_inside(q: Any, k: Any, v: Any) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(attention(with_tangent(q), k, v)).tangent

    def jvp(q: Any, k: Any, v: Any) -> Any:
        return torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))

    tensors = operands("cpu")
    for function in (level_inside, jvp):
        with pytest.raises(Exception, match="q has a tangent of forward-mode AD"):
            torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with forward_ad.dual_level():
        assert torch.equal(compiled(*tensors), attention(*tensors))
        with pytest.raises(ArgumentError, match="q has a tangent of forward-mode AD"):
            compiled(with_tangent(tensors[0]), *tensors[1:])
