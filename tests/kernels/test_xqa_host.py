"""What the decode kernel's host side does when, on CPU tensors and without a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn.emulator import using
from cute_attn.errors import WorkspaceError
from cute_attn.kernels.xqa.host import batch as xqa_batch
from cute_attn.kernels.xqa.host import params, prepared
from cute_attn.kernels.xqa.host import single as xqa_single
from cute_attn.kernels.xqa.host import variant as xqa_variant
from cute_attn.problem import DecodeProblem, Features, Scratch, Settings
from cute_attn.runtime.arch import named
from cute_attn.runtime.launch import CPU
from tests.support import batch_case
from tests.support.batch_case import decode, heads

BF16 = torch.bfloat16
FEATURES = Features(
    *(torch.device("cpu"), BF16, BF16, BF16, 4, 2, 64, 64), kv_source="paged", decode=True, device_lengths=True
)
BATCH = decode((40, 3), page_size=4, **heads(4, 2))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Kernels, in the order in which they are loaded."""
    specs: list[Any] = []
    monkeypatch.setattr(prepared, "load", lambda spec, *where: specs.append(spec))
    xqa_batch.prepared_kernel.cache_clear()
    yield specs
    xqa_batch.prepared_kernel.cache_clear()  # of runners without a kernel


def plan() -> Any:
    inputs = batch_case.make(BATCH)
    with using("sm_90a", kernels="xqa", sms=2):
        made = batch_case.wrapper(BATCH, inputs.q.device, backend="emulator")
        made.plan(**batch_case.plan_arguments(BATCH, inputs))
    return made


def test_a_plan_loads_its_kernel(loaded: list[Any]) -> None:
    """The first run may be captured in a CUDA graph, where modules cannot be loaded."""
    made = plan()
    assert loaded == [made._plan.launch.planned.plan.spec]


def test_a_plan_without_its_kernel_leaves_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> None:
        raise RuntimeError("no kernel")

    uploads: list[Any] = []
    monkeypatch.setattr(prepared, "load", missing)
    monkeypatch.setattr("cute_attn.runtime.staging.Staging.upload", lambda staging, ints: uploads.append(ints))
    xqa_batch.prepared_kernel.cache_clear()
    with pytest.raises(RuntimeError, match="no kernel"):
        plan()
    assert not uploads


def test_the_block_has_the_fields_of_the_kernel() -> None:
    from cute_attn.kernels.xqa.kernel import XqaParams  # imports the DSL

    assert XqaParams._fields == params.FIELDS


def decode_problem(**changes: Any) -> DecodeProblem:
    """A call without a plan whose scratch is exactly large enough, unless `changes` say otherwise."""
    q, cache = torch.zeros(2, 4, 64).bfloat16(), torch.zeros(3, 16, 2, 64).bfloat16()
    tables, seq_lens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([40, 3], dtype=torch.int32)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    scratch = Scratch(buffer, buffer, buffer.data_ptr(), buffer.data_ptr() + 4096, 4096, buffer.nbytes - 4096)
    settings = Settings(FEATURES, sm_scale=0.5, window_left=7, page_size=16)
    problem = DecodeProblem(settings, 1, q, cache, cache, q.clone(), None, tables, seq_lens, 48, scratch)
    return problem._replace(**changes)


class Fired:
    """Stands for a loaded kernel."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []

    def fire(self, values: Any, grid: Any, stream: int) -> None:
        self.blocks.append(dict(zip(params.FIELDS, values, strict=True)))


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> Fired:
    launch = Fired()
    monkeypatch.setattr(prepared, "load", lambda *where: launch)
    return launch


def test_a_call_without_a_plan_is_one_launch_that_reads_its_lengths_itself(fired: Fired) -> None:
    problem = decode_problem(seq_lens=torch.empty(2, dtype=torch.int32, device="meta"))  # has no numbers to read
    runner = xqa_single.Runner(problem.settings, named("sm_90a"), CPU, 2)
    runner(problem)
    (block,) = fired.blocks
    where = {name: block[name] for name in ("table", "table_stride", "page_starts", "q_indptr", "mask", "batch")}
    assert where == {
        "table": problem.block_tables.data_ptr(),
        "table_stride": 3,
        "page_starts": 0,
        "q_indptr": 0,
        "mask": 0,
        "batch": 2,
    }
    numbers = {name: block[name] for name in ("capacity", "scale", "window_left", "page_size", "counters", "partials")}
    scratch = problem.scratch
    assert numbers == {
        "capacity": 48,
        "scale": 0.5,
        "window_left": 7,
        "page_size": 16,
        "counters": scratch.counters,
        "partials": scratch.partials,
    }
    runner(problem._replace(q=problem.q[:0]))
    assert len(fired.blocks) == 1


def test_addresses_of_one_call_are_not_those_of_the_next(fired: Fired) -> None:
    """What a block has in common with others is kept, and nothing else."""
    some = torch.zeros(4, dtype=torch.int32)
    full = decode_problem(
        qo_indptr=some[:3], draft_mask=some, sinks=torch.zeros(4), lse=torch.zeros(2, 4), v_scale_tensor=torch.ones(1),
        scale_tensors=(torch.ones(1),), block_scales=(torch.zeros(3, 16, 2, 4),) * 2,
    )  # fmt: skip
    runner = xqa_single.Runner(full.settings, named("sm_90a"), CPU, 2)
    runner(full)
    runner(decode_problem())
    first, second = fired.blocks
    optional = ("q_indptr", "mask", "sinks", "lse", "v_scale_ptr", "scale_ptr", "k_sf", "v_sf", "k_sf_stride_n")
    assert all(first[name] for name in optional)
    assert not any(second[name] for name in optional)


@pytest.mark.parametrize("short", ["counter_bytes", "partial_bytes"])
def test_a_workspace_that_is_too_small(fired: Fired, short: str) -> None:
    problem = decode_problem()
    runner = xqa_single.Runner(problem.settings, named("sm_90a"), CPU, 2)
    kernel = runner.kernel(1, True)
    needed = problem.scratch._replace(counter_bytes=kernel.counter_bytes, partial_bytes=kernel.partial_bytes)
    runner(problem._replace(scratch=needed))
    less = needed._replace(**{short: getattr(needed, short) - 1})
    with pytest.raises(WorkspaceError, match=f"{kernel.counter_bytes} bytes of semaphores and {kernel.partial_bytes}"):
        runner(problem._replace(scratch=less))


def test_launches_of_a_call_without_a_plan() -> None:
    ((spec, grid),) = xqa_single.launches(decode_problem(), named("sm_90a"), 4)
    assert spec in xqa_variant.specs(FEATURES, named("sm_90a"))
    assert grid[0] * grid[1] <= 4 * spec.ctas
    no_requests = decode_problem(seq_lens=torch.zeros(0, dtype=torch.int32))
    assert xqa_single.launches(no_requests, named("sm_90a"), 4) == []


def test_single_calls_share_their_page_table(loaded: list[Any]) -> None:
    """Captured graphs read it, so that it must outlive the runner, of which only so many are remembered."""
    settings: Settings = plan()._plan.settings
    single = settings._replace(features=settings.features._replace(kv_source="dense"))
    runners = [
        xqa_single.Runner(single._replace(sm_scale=sm_scale), named("sm_90a"), CPU, 2) for sm_scale in (1.0, 2.0)
    ]
    first, second = (runner.records.data_ptr() for runner in runners)
    assert first == second
