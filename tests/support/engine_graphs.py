"""Layers that differ in heads and in the options of `forward`, captured in one graph under one plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.support.batch_case import BatchCase, BatchInputs, Request, heads, plan_arguments
from tests.support.graphs import Capture, Captured, Results


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


class CapturedLayers(Captured):
    """Runs of `forward` under one plan. `case` has the most heads of any layer."""

    def __init__(
        self, case: BatchCase, device: str, capture: Capture, layers: tuple[Layer, ...] = LAYERS, **arguments: Any
    ) -> None:
        self.layers = layers
        super().__init__(case, device, capture, **arguments)

    def layers_of(self, case: BatchCase, inputs: BatchInputs) -> list[tuple[BatchCase, BatchInputs]]:
        return [(x.case(case), sliced(inputs, x.num_qo_heads, x.num_kv_heads)) for x in self.layers]

    def plan(self, case: BatchCase, inputs: BatchInputs) -> None:
        self.wrapper.begin_forward(**plan_arguments(case, inputs))

    def run(self) -> Results:
        results = []
        for layer, (q, *kv) in zip(self.layers, self.targets, strict=True):
            cache = kv if self.case.kind == "ragged" else (tuple(kv),)
            results.append(self.wrapper.forward_return_lse(q, *cache, **layer.arguments(self.case)))
        return results
