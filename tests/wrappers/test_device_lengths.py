"""Plans of decode batches whose index arrays are on the GPU: the host does not look at their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn.emulator.settings import using
from cute_attn.errors import ArgumentError, ArgumentTypeError, RuntimeArgumentError
from cute_attn.problem import DeviceLengths
from cute_attn.wrappers import plan_request
from tests.support.batch_case import call, decode, heads, make, plan_arguments, wrapper
from tests.support.formula import assert_batch_right
from tests.support.graphs import graph_wrapper
from tests.support.right import assert_right

BATCHES = [  # of 5 pages each
    decode((5, 33, 16), **heads(4, 2)),
    decode((48, 0, 17), indices="int64", **heads(4, 2)),
    decode((17, 10, 20), **heads(4, 2)),
]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """CPU tensors count as tensors on the GPU. Counts how often the host reads lengths."""
    reads: list[int] = []
    host = DeviceLengths.host.func

    def counted(self: DeviceLengths) -> Any:
        reads.append(1)
        return host(self)

    monkeypatch.setattr(plan_request, "_is_on", lambda device, x: True)
    monkeypatch.setattr(DeviceLengths, "host", property(counted))
    return reads


@pytest.mark.parametrize("graph", [False, True])
def test_lengths_are_computed_on_the_device(graph: bool, on_gpu: list[int]) -> None:
    """Plans of three batches, one after the other; with CUDA graphs the wrapper's buffers receive the index arrays."""
    made, buffers = wrapper(BATCHES[0], backend="emulator"), {}
    if graph:
        made, buffers = graph_wrapper(BATCHES[0], "cpu", 40, 0, backend="emulator")
    with using("sm_90a", kernels="xqa", sms=2):
        for case in BATCHES:
            inputs = make(case)
            arguments = plan_arguments(case, inputs)
            arguments["last_page_len"][arguments["last_page_len"] == 0] = 7  # of no page
            made.plan(**arguments)
            assert_right(case, inputs, *call(case, inputs, made))
            for name in ("indptr", "last_page_len") if graph else ():
                assert buffers[f"paged_kv_{name}_buffer"].tolist() == arguments[name].tolist()
        assert not on_gpu
        assert made._max_kv_len == 20  # now the host reads them
        assert on_gpu
        arguments["last_page_len"] += 0
        with pytest.raises(RuntimeArgumentError, match="must not be written after plan"):
            _ = made._max_kv_len


def test_a_plan_of_other_lengths_keeps_the_launch_and_the_replays() -> None:
    """Lengths on the host: the records are replaced, and replays remain, also where the page numbers move."""
    made, kept = wrapper(BATCHES[0], backend="emulator"), torch.zeros(20, dtype=torch.int32)
    launches, replays = [], []
    with using("sm_90a", kernels="xqa", sms=2):
        for i, case in enumerate((*BATCHES, BATCHES[0])):
            inputs = make(case)
            arguments = plan_arguments(case, inputs)
            kept[: case.num_pages] = arguments["indices"]
            arguments["indices"] = kept if i < 3 else kept.clone()
            made.plan(**arguments)
            launches.append(made._planned().launch)
            replays.append(len(made._planned().cached_runs))
            for _ in range(2):
                assert_right(case, inputs, *call(case, inputs, made))
            assert made._max_kv_len == max(case.kv_lens)
        made.plan(**{**arguments, "sm_scale": 0.5})
    assert len({id(launch) for launch in launches}) == 1
    assert replays == [0, 1, 1, 1]
    assert made._planned().launch is not launches[0]
    with pytest.raises(ArgumentTypeError):
        made.plan(**{**arguments, "sm_scale": True})


def test_a_request_gets_no_pages_that_are_not_there(on_gpu: list[int]) -> None:
    """Numbers that only `CUTE_ATTN_VALIDATE=1` would refuse lead to no access outside the page numbers."""
    made = wrapper(BATCHES[0], backend="emulator")
    cache = torch.ones(3, 2, 16, 2, 64).half()
    indptr = torch.tensor([0, 2, 9, 5, 1 << 40], dtype=torch.int64)
    with using("sm_90a", kernels="xqa", sms=2):
        made.plan(indptr, torch.arange(3).int(), torch.tensor([99, 1, 1, 1]), 4, 2, 64, 16)
        out = made.run(torch.ones(4, 4, 64).half(), cache)
    assert out[0].eq(1).all()
    assert out[1:].eq(0).all()


def test_what_is_wrong_without_a_look_at_the_numbers(on_gpu: list[int]) -> None:
    made, good = wrapper(BATCHES[0], backend="emulator"), plan_arguments(BATCHES[0], make(BATCHES[0]))
    with using("sm_90a", kernels="xqa"):
        for change, message in (
            ({"last_page_len": good["last_page_len"][1:]}, r"last_page_len must have shape \[batch_size\] = \(3,\)"),
            ({"indptr": good["indptr"].float()}, "indptr must have dtype"),
            ({"indices": good["indices"][:, None]}, "indices must have shape"),
        ):
            with pytest.raises(ArgumentError, match=message):
                made.plan(**{**good, **change})


def test_backends_with_a_schedule_read_lengths_on_the_host(on_gpu: list[int]) -> None:
    case, inputs = BATCHES[0], make(BATCHES[0])
    made, arguments = wrapper(case), plan_arguments(case, inputs)  # the reference
    made.plan(**arguments)
    arguments["indptr"].zero_()  # the plan has read it
    assert_batch_right(case, inputs, *call(case, inputs, made))
