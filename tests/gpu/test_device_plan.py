"""Plans whose lengths stay on the GPU: schedules of the host, no synchronisation, and graphs that plan again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from cute_attn.kernels.host import gpu
from cute_attn.problem import DeviceLengths
from tests.gpu import marks
from tests.support.batch_case import (
    E4M3,
    BatchCase,
    BatchInputs,
    call,
    decode,
    dims,
    heads,
    make,
    paged,
    ragged,
    wrapper,
)
from tests.support.device_plan import moved
from tests.support.device_schedules import cases, difference
from tests.support.graphs import Captured, Results, cuda_graph, smaller, without_synchronising
from tests.support.right import assert_right

pytestmark = marks.GPU

BATCHES = 1000
LARGEST = [
    paged((300, 5, 40, 1), (900, 700, 333, 1200), mask="causal", **heads(4, 2)),
    ragged((300, 5, 40, 1), (900, 700, 333, 1200), mask="causal", **heads(4, 2)),
    decode((900, 700, 333, 1200), **heads(4, 1)),
    decode((900, 700, 333, 1200), q_len=4, page_size=1, window_left=200, **heads(8, 2)),
    decode((300,) * 37, kv_dtype=E4M3, dtype="bfloat16", indices="int64", **heads(8, 2), **dims(128)),
]
IDS = ["paged", "ragged", "decode", "verify", "fp8"]


def backends(case: BatchCase) -> list[str]:
    if case.kv_dtype is not None:
        return ["xqa"]
    return ["fa2", "fa3"] if marks.CAPABILITY == (9, 0) and case.kind != "decode" else ["fa2"]


def test_schedules_are_those_of_a_plain_program() -> None:
    """Of lengths on the GPU and on the host."""
    here, drawn = gpu.of_device(torch.cuda.current_device()), enumerate(cases(2 * BATCHES, seed=11))
    wrong = [found for i, case in drawn if (found := difference(case, here, "cuda", on_host=i % 2 > 0))]
    assert not wrong, f"{len(wrong)} of {2 * BATCHES}: {wrong[0]}"


@pytest.mark.parametrize("case", LARGEST, ids=IDS)
def test_plans_make_no_synchronising_call(case: BatchCase) -> None:
    """torch raises for its own; calls that copy to the host are counted besides, and so are reads of lengths."""
    for backend in backends(case):
        planned = wrapper(case, "cuda", backend=backend)
        first = make(case, "cuda")
        planned.plan(**moved(case, first, "cuda"))  # allocates memory and loads kernels, which may wait
        call(case, first, planned)
        batches = [(other, make(other, "cuda")) for other in smaller(case, 5)]
        arguments = [moved(other, inputs, "cuda") for other, inputs in batches]
        torch.cuda.synchronize()
        results, calls = [], []

        def counted(name: str, calls: list[str] = calls) -> Any:
            original = getattr(torch.Tensor, name)
            return mock.patch.object(torch.Tensor, name, lambda x, *rest: calls.append(name) or original(x, *rest))

        with counted("cpu"), counted("item"), counted("tolist"), counted("numpy"), without_synchronising():
            for (other, inputs), plan in zip(batches, arguments, strict=True):
                planned.plan(**plan)
                results.append(call(other, inputs, planned))
        assert calls == []
        assert isinstance(planned._plan_info.lengths, DeviceLengths)
        for (other, inputs), (out, lse) in zip(batches, results, strict=True):
            assert_right(other, inputs, out, lse)


class Replanned(Captured):
    """Index arrays change between replays of `plan` and `run`, or of `run` alone, after a plan of them."""

    def __init__(self, case: BatchCase, backend: str, with_plan: bool, planned_first: bool = False) -> None:
        self.with_plan, self.arrays = with_plan, moved(case, make(case, "cuda"), "cuda")
        for name, x in self.arrays.items():
            if name.endswith("indices"):
                self.arrays[name] = torch.zeros(case.num_pages, dtype=torch.int32, device="cuda")
                self.arrays[name][: len(x)] = x
        super().__init__(case, "cuda", self.captured_after_a_plan if planned_first else cuda_graph, backend=backend)

    def captured_after_a_plan(self, run: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """Of a plan in another workspace, which no run has met."""
        self.wrapper.reset_workspace_buffer(torch.empty_like(self.wrapper._float_workspace_buffer))
        self.wrapper.plan(**self.arrays)
        return cuda_graph(run)

    def plan(self, case: BatchCase, inputs: BatchInputs) -> None:
        for name, x in moved(case, inputs, "cuda").items():
            if isinstance(x, torch.Tensor):
                self.arrays[name][: len(x)].copy_(x)
        if not self.with_plan:
            self.wrapper.plan(**self.arrays)

    def run(self) -> Results:
        if self.with_plan:
            self.wrapper.plan(**self.arrays)
        return super().run()


@pytest.mark.parametrize("case", LARGEST, ids=IDS)
def test_a_captured_plan_follows_its_index_arrays(case: BatchCase) -> None:
    """The graph holds `plan` and `run`."""
    for backend in backends(case):
        captured = Replanned(case, backend, with_plan=True)
        count = BATCHES // 5 if marks.CAPABILITY == (9, 0) and case.kind != "decode" else BATCHES // 4
        for other in smaller(case, count):
            captured.replay(other)


@pytest.mark.parametrize("first_run", ["before", "captured"])
@pytest.mark.parametrize("case", LARGEST, ids=IDS)
def test_plans_between_replays_of_a_run(case: BatchCase, first_run: str) -> None:
    """Graphs that hold the run alone, with plans of lengths on the GPU between replays."""
    for backend in backends(case):
        captured = Replanned(case, backend, with_plan=False, planned_first=first_run == "captured")
        for other in smaller(case, 50):
            captured.replay(other)
