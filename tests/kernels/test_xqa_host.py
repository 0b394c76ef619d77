"""What the decode kernel's host side does when, on CPU tensors and without a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cute_attn.emulator import using
from cute_attn.kernels.xqa.host import batch as xqa_batch
from cute_attn.kernels.xqa.host import prepared
from cute_attn.kernels.xqa.host import single as xqa_single
from cute_attn.problem import Settings
from cute_attn.runtime.arch import named
from cute_attn.runtime.launch import CPU
from tests.support import batch_case
from tests.support.batch_case import decode, heads

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


def test_single_calls_share_their_page_table(loaded: list[Any]) -> None:
    """Captured graphs read it, so that it must outlive the runner, of which only so many are remembered."""
    settings: Settings = plan()._plan.settings
    single = settings._replace(features=settings.features._replace(kv_source="dense"))
    runners = [
        xqa_single.Runner(single._replace(sm_scale=sm_scale), named("sm_90a"), CPU, 2) for sm_scale in (1.0, 2.0)
    ]
    first, second = (runner.records.data_ptr() for runner in runners)
    assert first == second
