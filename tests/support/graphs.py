"""Wrappers in CUDA-graph mode whose `run` is captured once, and replayed after plans of other lengths."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_attn.dispatch.emulator import EmulatedBatchRun
from cute_attn.wrappers import calls
from tests.support.batch_case import (
    NO_PAGE,
    BatchCase,
    BatchInputs,
    Request,
    call,
    heads,
    make,
    plan_arguments,
    random_lengths,
    run_arguments,
    wrapper,
)
from tests.support.right import assert_right

Results = list[tuple[torch.Tensor, torch.Tensor]]
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]  # runs once; its result, and a replay


def cuda_graph(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """A `Capture` on the current GPU."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph.replay


def smaller(case: BatchCase, count: int) -> Iterator[BatchCase]:
    """Batches for which the tensors of `case` have room."""
    seed, made = 0, 0
    while made < count:
        seed += 1
        other = random_lengths(dataclasses.replace(case, seed=seed), seed, max(case.kv_lens))
        if other.num_pages <= case.num_pages and other.rows <= case.rows:
            made += 1
            yield other


@contextlib.contextmanager
def without_synchronising() -> Iterator[None]:
    """Torch raises where its own calls wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def emulated_graph(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """A `Capture` of the emulator's launches."""
    held: list[tuple[EmulatedBatchRun, Any]] = []
    launch = EmulatedBatchRun.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "replay_run", lambda plan, arguments: None)  # every check
        patch.setattr(EmulatedBatchRun, "__call__", lambda plan, problem: held.append((plan, problem)))
        results = run()

    def replay() -> None:
        for plan, problem in held:
            launch(plan, problem)

    return results, replay


def assert_replays(case: BatchCase, replays: int, **arguments: Any) -> None:
    """A launch captured on a GPU is right for `case`, the largest batch, and for as many others."""
    captured = Captured(case, "cuda", cuda_graph, **arguments)
    captured.replay(case)
    for seed in range(replays):
        captured.replay(random_lengths(case, seed, max(case.kv_lens)))


def assert_plans_in_a_row_do_not_race(case: BatchCase, **arguments: Any) -> None:
    """Twenty plans and runs are queued behind a slow stream before the first of them may start."""
    cases = [random_lengths(case, seed, 900) for seed in range(20)]
    made = wrapper(cases[0], "cuda", **arguments)
    inputs = [make(case, "cuda") for case in cases]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    results = []
    for case, tensors in zip(cases, inputs, strict=True):
        made.plan(**plan_arguments(case, tensors))
        results.append(call(case, tensors, made))
    for case, tensors, (out, lse) in zip(cases, inputs, results, strict=True):
        assert_right(case, tensors, out, lse)


def graph_wrapper(
    case: BatchCase, device: str, pages: int, mask_bytes: int, **arguments: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A wrapper with buffers of those sizes, and the buffers."""
    batch = len(case.kv_lens)

    def ints(size: int) -> torch.Tensor:
        return torch.full((size,), NO_PAGE, dtype=torch.int32, device=device)

    word = "buffer" if case.kind == "decode" else "buf"
    buffers = {} if case.kind == "decode" else {"qo_indptr_buf": ints(batch + 1)}
    if case.paged:
        buffers |= {f"paged_kv_indptr_{word}": ints(batch + 1), f"paged_kv_indices_{word}": ints(pages)}
        buffers |= {f"paged_kv_last_page_len_{word}": ints(batch)}
    else:
        buffers |= {"kv_indptr_buf": ints(batch + 1)}
    if case.mask not in ("none", "causal", "items"):
        buffers["custom_mask_buf"] = torch.full((mask_bytes,), 0xFF, dtype=torch.uint8, device=device)
        buffers["mask_indptr_buf"] = ints(batch + 1)
    return wrapper(case, device, use_cuda_graph=True, **buffers, **arguments), buffers


def blank(x: torch.Tensor) -> None:
    """NaN in every float dtype; of an NVFP4 cache, the scales are floats."""
    x.view(torch.uint8).fill_(0xFF)


class Captured:
    """A run of a wrapper, or those of several layers. `case` is the largest batch: no replay has more rows, or requests
    with more keys than its longest.
    """

    def __init__(
        self, case: BatchCase, device: str, capture: Capture, promise: int | None = None, **arguments: Any
    ) -> None:
        """`promise`: query tokens of every request, as all plans are told."""
        self.case, self.device = case, device
        self.promises = {} if promise is None else {"uniform_q_len": promise}
        inputs = make(case, device)
        batch, most = len(case.kv_lens), max(case.kv_lens)
        mask_bytes = sum(case.qo_lens) * most + batch
        self.wrapper, _ = graph_wrapper(case, device, batch * -(-most // case.page_size), mask_bytes, **arguments)
        layers = [self.operands(each) for _, each in self.layers_of(case, inputs)]
        self.targets = [[x.new_empty_strided(x.shape, x.stride()) for x in layer] for layer in layers]
        for target in itertools.chain(*self.targets):
            blank(target)
        self.arguments = run_arguments(case, inputs)
        self.plan(case, inputs)
        self.run()
        self.results, self.again = capture(self.run)

    def layers_of(self, case: BatchCase, inputs: BatchInputs) -> list[tuple[BatchCase, BatchInputs]]:
        """What is computed: the case and the inputs of each call."""
        return [(case, inputs)]

    def operands(self, inputs: BatchInputs) -> list[torch.Tensor]:
        """The query, the halves of the cache, and their block scales."""
        return [inputs.q, *(inputs.kv if self.case.kind == "ragged" else inputs.kv[0]), *(inputs.kv_cache_sf or ())]

    def plan(self, case: BatchCase, inputs: BatchInputs) -> None:
        self.wrapper.plan(**plan_arguments(case, inputs), **self.promises)

    def run(self) -> Results:
        ((q, k, v, *scales),) = self.targets
        kv = (k, v) if self.case.kind == "ragged" else ((k, v),)
        return [self.wrapper.run(q, *kv, **self.arguments | {"kv_cache_sf": tuple(scales) or None})]

    def replay(self, case: BatchCase) -> None:
        """Replay with the lengths and numbers of `case`, and compare."""
        inputs = make(dataclasses.replace(case, sinks=self.case.sinks), self.device)
        layers = self.layers_of(case, inputs)
        by_head = case.kind == "ragged" and case.kv_layout == "HND"
        for targets, (_, own) in zip(self.targets, layers, strict=True):
            for i, (target, source) in enumerate(zip(targets, self.operands(own), strict=True)):
                blank(target)
                axis = int(by_head and i > 0)
                target.narrow(axis, 0, source.shape[axis]).copy_(source)
        if inputs.sinks is not None:
            self.arguments["sinks"].copy_(inputs.sinks)
        for result in itertools.chain(*self.results):
            result.fill_(torch.nan)
        self.plan(case, inputs)
        self.again()
        for (layer, own), (out, lse) in zip(layers, self.results, strict=True):
            assert_right(layer, own, out[: case.rows], lse[: case.rows])
            assert out[case.rows :].isnan().all()


# ---- layers that differ in heads and in the options of `forward`, captured in one graph under one plan


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
