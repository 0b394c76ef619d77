"""The toy kernel on real devices: streams, devices, threads. Dependent launches and CUDA graphs: `test_xqa.py`."""

from __future__ import annotations

import pytest
import torch

from cute_attn.runtime import arch as archs
from cute_attn.runtime import artifacts
from cute_attn.runtime.launch import Bound, Launch, current_stream
from tests.gpu import marks
from tests.support.threads import in_threads
from tests.support.toy_spec import ToySpec, toy_program

COUNT = 1000
GRID = (8, 1, 1)  # of 128 threads
DEVICES = range(torch.cuda.device_count())

pytestmark = marks.GPU


@pytest.fixture(params=[False, True], ids=["plain", "pdl"])
def pdl(request: pytest.FixtureRequest) -> bool:
    if request.param and not archs.for_device(0).pdl:
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    return request.param


def toy(device: int, pdl: bool = False, cluster: tuple[int, int, int] = (1, 1, 1)) -> Bound:
    artifact = artifacts.get(ToySpec(cluster=cluster), archs.for_device(device).name, toy_program)
    return Launch(artifact, device, pdl=pdl).bind({}, [param.name for param in artifact.params])


def values(out: torch.Tensor, scale: float) -> tuple[float, ...]:
    return (out.data_ptr(), COUNT, scale, 0.25, -3)


def expected(scale: float) -> torch.Tensor:
    """Exact in fp32 for the scales used here. One element more than the kernel may write."""
    result = torch.full((COUNT + 1,), -1.0)
    result[:COUNT] = scale * torch.arange(COUNT) + 0.25 - 3
    return result


def blank(device: int) -> torch.Tensor:
    return torch.full((COUNT + 1,), -1.0, device=f"cuda:{device}")


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1)])
def test_fires_on_the_stream_it_is_given(pdl: bool, cluster: tuple[int, int, int]) -> None:
    if cluster != (1, 1, 1) and not archs.for_device(0).pdl:
        pytest.skip("clusters need compute capability 9.0")
    kernel, out, stream = toy(0, pdl, cluster), blank(0), torch.cuda.Stream(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        assert current_stream(0) == stream.cuda_stream
        torch.cuda._sleep(50_000_000)  # tens of ms: the kernel must queue behind it
        kernel.fire(current_stream(0), values(out, 0.5), (GRID,))
        assert not stream.query()
    stream.synchronize()
    torch.testing.assert_close(out.cpu(), expected(0.5), rtol=0, atol=0)


@pytest.mark.parametrize("current", DEVICES)
@pytest.mark.parametrize("device", DEVICES)
def test_runs_on_its_device_whichever_is_current(device: int, current: int, pdl: bool) -> None:
    with torch.cuda.device(current):
        kernel, out = toy(device, pdl), blank(device)
        kernel.fire(current_stream(device), values(out, 3.0), (GRID,))
        assert torch.cuda.current_device() == current
        local = torch.ones(4, device="cuda")  # the restored context still works
        assert local.sum().item() == 4
        torch.testing.assert_close(out.cpu(), expected(3.0), rtol=0, atol=0)


def test_two_threads_share_a_launch(pdl: bool) -> None:
    kernel = toy(0, pdl)
    streams = [torch.cuda.Stream(0) for _ in range(2)]
    outs = [[blank(0) for _ in range(100)] for _ in streams]
    torch.cuda.synchronize()

    def fire_all(index: int) -> None:  # its thread has no CUDA context of its own yet
        for number, out in enumerate(outs[index]):
            kernel.fire(streams[index].cuda_stream, values(out, float(index * 1000 + number)), (GRID,))

    in_threads(fire_all, range(2))
    torch.cuda.synchronize()
    for index in range(2):
        for number, out in enumerate(outs[index]):
            torch.testing.assert_close(out.cpu(), expected(float(index * 1000 + number)), rtol=0, atol=0)


def test_driver_error_is_readable() -> None:
    with pytest.raises(RuntimeError, match=r"cute_attn_toy_0 with grid \(0, 1, 1\) failed: CUDA_ERROR_"):
        toy(0).fire(current_stream(0), values(blank(0), 1.0), ((0, 1, 1),))
