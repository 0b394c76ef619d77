"""Layers that differ in heads and in the options of `forward`, captured in one graph under one plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tests.support.batch_case import BatchCase, BatchInputs, Request, heads, make, plan_arguments
from tests.support.graphs import blank, graph_wrapper
from tests.support.right import assert_right

Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """Heads, and options of `forward` by the names of `BatchCase`."""

    num_qo_heads: int
    num_kv_heads: int
    options: dict[str, Any]

    def case(self, planned: BatchCase) -> BatchCase:
        return dataclasses.replace(planned, **heads(self.num_qo_heads, self.num_kv_heads), **self.options)

    def arguments(self, planned: BatchCase) -> dict[str, Any]:
        case = self.case(planned)
        names = ("sm_scale", "window_left", "logits_soft_cap")
        causal = {} if case.kind == "decode" else {"causal": case.mask == "causal"}
        return {name: getattr(case, name) for name in names} | causal


LAYERS = (
    Layer(4, 2, {"sm_scale": 64**-0.5}),
    Layer(2, 2, {"sm_scale": 64**-0.5}),
    Layer(4, 2, {"sm_scale": 0.3, "logits_soft_cap": 5.0, "mask": "causal"}),
    Layer(4, 1, {"window_left": 7, "mask": "causal"}),
)


def sliced(inputs: BatchInputs, num_qo_heads: int, num_kv_heads: int) -> BatchInputs:
    """The first heads of everything: another layer, with the same pages."""

    def first(x: torch.Tensor) -> torch.Tensor:
        return x[..., :num_kv_heads, :].contiguous()

    requests = [Request(r.q[:, :num_qo_heads], first(r.k), first(r.v), r.keep) for r in inputs.requests]
    kv = tuple(first(x) if isinstance(x, torch.Tensor) else tuple(map(first, x)) for x in inputs.kv)
    return dataclasses.replace(inputs, requests=requests, q=inputs.q[:, :num_qo_heads].contiguous(), kv=kv)


class CapturedLayers:
    """`case` has the most heads of any layer, and is the largest batch: no replay has more rows or keys."""

    def __init__(
        self, case: BatchCase, device: str, capture: Capture, layers: tuple[Layer, ...] = LAYERS, **arguments: Any
    ) -> None:
        self.planned, self.device, self.layers = case, device, layers
        pages = len(case.kv_lens) * -(-max(case.kv_lens) // case.page_size)
        self.wrapper: Any = graph_wrapper(case, device, pages, 0, **arguments)[0]
        inputs = make(case, device)
        self.tensors = [self.operands(sliced(inputs, x.num_qo_heads, x.num_kv_heads)) for x in layers]
        self.plan(case, inputs)
        self.run()  # settles what the plan left open
        self.results, self.again = capture(self.run)

    def plan(self, case: BatchCase, inputs: BatchInputs) -> None:
        self.wrapper.begin_forward(**plan_arguments(case, inputs))

    def operands(self, inputs: BatchInputs) -> list[torch.Tensor]:
        return [inputs.q, *(inputs.kv if self.planned.kind == "ragged" else inputs.kv[0])]

    def run(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for layer, (q, *kv) in zip(self.layers, self.tensors, strict=True):
            cache = kv if self.planned.kind == "ragged" else (tuple(kv),)
            results.append(self.wrapper.forward_return_lse(q, *cache, **layer.arguments(self.planned)))
        return results

    def replay(self, case: BatchCase) -> None:
        """Plan other lengths once, replay all layers, and compare each."""
        inputs = make(case, self.device)
        self.plan(case, inputs)
        for layer, targets, (out, lse) in zip(self.layers, self.tensors, self.results, strict=True):
            for target, source in zip(
                targets, self.operands(sliced(inputs, layer.num_qo_heads, layer.num_kv_heads)), strict=True
            ):
                blank(target)
                target[: len(source)].copy_(source)
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
        self.again()
        for layer, (out, lse) in zip(self.layers, self.results, strict=True):
            tensors = sliced(inputs, layer.num_qo_heads, layer.num_kv_heads)
            assert_right(layer.case(case), tensors, out[: case.rows], lse[: case.rows])
