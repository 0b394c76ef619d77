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


LAYERS: tuple[dict[str, Any], ...] = (  # heads, and options of `forward` by the names of `BatchCase`
    {**heads(4, 2), "sm_scale": 64**-0.5},
    {**heads(2, 2), "sm_scale": 64**-0.5},
    {**heads(4, 2), "sm_scale": 0.3, "logits_soft_cap": 5.0, "mask": "causal"},
    {**heads(4, 1), "window_left": 7, "mask": "causal"},
)


def options(case: BatchCase) -> dict[str, Any]:
    """Keywords of `forward`."""
    names = ("sm_scale", "window_left", "logits_soft_cap")
    causal = {} if case.kind == "decode" else {"causal": case.mask == "causal"}
    return {name: getattr(case, name) for name in names} | causal


def sliced(inputs: BatchInputs, num_qo_heads: int, num_kv_heads: int) -> BatchInputs:
    """The first heads of everything: another layer, with the same pages."""

    def first(x: torch.Tensor) -> torch.Tensor:
        return x[..., :num_kv_heads, :].contiguous()

    requests = [Request(r.q[:, :num_qo_heads], first(r.k), first(r.v), r.keep) for r in inputs.requests]
    kv = tuple(first(x) if isinstance(x, torch.Tensor) else tuple(map(first, x)) for x in inputs.kv)
    return dataclasses.replace(inputs, requests=requests, q=inputs.q[:, :num_qo_heads].contiguous(), kv=kv)


class CapturedLayers:
    """`case` has the most heads of any layer, and is the largest batch: no replay has more rows or keys."""

    def __init__(self, case: BatchCase, device: str, capture: Capture, layers: Any = LAYERS, **arguments: Any) -> None:
        self.planned, self.device, self.layers = case, device, layers
        pages = len(case.kv_lens) * -(-max(case.kv_lens) // case.page_size)
        self.wrapper: Any = graph_wrapper(case, device, pages, 0, **arguments)[0]
        inputs = make(case, device)
        self.tensors = [self.operands(tensors) for _, tensors in self.of(case, inputs)]
        self.plan(case, inputs)
        self.run()  # settles what the plan left open
        self.results, self.again = capture(self.run)

    def plan(self, case: BatchCase, inputs: BatchInputs) -> None:
        self.wrapper.begin_forward(**plan_arguments(case, inputs))

    def of(self, case: BatchCase, inputs: BatchInputs) -> list[tuple[BatchCase, BatchInputs]]:
        """Every layer of a batch, with its tensors."""
        cases = [dataclasses.replace(case, **layer) for layer in self.layers]
        return [(x, sliced(inputs, x.num_qo_heads, x.num_kv_heads)) for x in cases]

    def operands(self, inputs: BatchInputs) -> list[torch.Tensor]:
        return [inputs.q, *(inputs.kv if self.planned.kind == "ragged" else inputs.kv[0])]

    def run(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for layer, (q, *kv) in zip(self.layers, self.tensors, strict=True):
            cache = kv if self.planned.kind == "ragged" else (tuple(kv),)
            case = dataclasses.replace(self.planned, **layer)
            results.append(self.wrapper.forward_return_lse(q, *cache, **options(case)))
        return results

    def replay(self, case: BatchCase) -> None:
        """Plan other lengths once, replay all layers, and compare each."""
        inputs = make(case, self.device)
        self.plan(case, inputs)
        layers = self.of(case, inputs)
        for (_, tensors), targets, (out, lse) in zip(layers, self.tensors, self.results, strict=True):
            for target, source in zip(targets, self.operands(tensors), strict=True):
                blank(target)
                target[: len(source)].copy_(source)
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
        self.again()
        for (layer, tensors), (out, lse) in zip(layers, self.results, strict=True):
            assert_right(layer, tensors, out[: case.rows], lse[: case.rows])
