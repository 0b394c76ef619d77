"""The append kernels on a GPU: every byte as the torch implementation writes it on the CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from cute_attn.dispatch import append
from cute_attn.request.append import reference
from tests.support import append_case
from tests.support.append_case import CASES, DTYPES, SCALES, AppendCase, adversarial_blocks, quantised, special_blocks
from tests.support.executors import GPU_MARKS
from tests.support.graphs import cuda_graph

pytestmark = list(GPU_MARKS)


@pytest.fixture(autouse=True)
def _kernel_only() -> object:
    wrong = AssertionError("torch operations ran in place of the kernel")
    with mock.patch.object(append, "reference", side_effect=wrong):
        yield


@pytest.mark.parametrize("stored", ["nvfp4", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_special_numbers(stored: str, dtype: str) -> None:
    for seed, number in enumerate(map(append_case.fp32, SCALES)):
        blocks = adversarial_blocks(DTYPES[dtype], number, 3000, seed)
        rows = torch.cat([special_blocks(DTYPES[dtype]), blocks])[:3000].view(-1, 2, 96)
        want = quantised(rows, stored, number, reference)
        for scale in (number, torch.tensor(number, device="cuda")):
            found = quantised(rows.cuda(), stored, scale, append.run)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True))


def memory(x: torch.Tensor) -> torch.Tensor:
    size = x.untyped_storage().nbytes() // x.itemsize
    return x.as_strided((size,), (1,), 0).view(torch.uint8).cpu()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_calls(case: AppendCase) -> None:
    function, arguments, caches = append_case.arguments(case, "cuda")
    function(**arguments)
    with mock.patch.object(append, "reference", reference):
        same, on_cpu, want = append_case.arguments(case)
        same(**on_cpu)
    assert all(torch.equal(memory(a), memory(b)) for a, b in zip(caches, want, strict=True))


@pytest.mark.parametrize("kind", ["copy", "nvfp4", "mapped"])
def test_a_captured_graph_reads_rows_indices_and_scales_again(kind: str) -> None:
    case = AppendCase(kind, "bf16", 128, nnz=20, index=torch.int64, device_scales=True)
    function, arguments, caches = append_case.arguments(case, "cuda")
    _, replay = cuda_graph(lambda: function(**arguments))
    with mock.patch.object(append, "reference", reference):
        same, on_cpu, want = append_case.arguments(case)
        for turn in range(2):
            for name, x in on_cpu.items():
                if name in ("append_key", "append_value", "k_scale"):
                    x *= -0.7 if name != "k_scale" else 1.3
                elif name in ("slot_mapping", "batch_indices", "positions") and turn:
                    x.copy_(x.flip(0))
                if isinstance(x, torch.Tensor):
                    arguments[name].copy_(x)
            replay()
            same(**on_cpu)
            assert all(torch.equal(memory(a), memory(b)) for a, b in zip(caches, want, strict=True))
