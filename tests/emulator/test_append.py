"""The append kernels on the emulator and on a GPU: every byte as the torch implementation writes it on the CPU, and no
other byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import cute_attn
from cute_attn import emulator
from cute_attn.dispatch import append
from cute_attn.request.append import Append, PageTable, reference
from tests.support import append_case
from tests.support.append_case import CASES, DTYPES, SCALES, AppendCase, adversarial_rows, quantised
from tests.support.emulated_calls import emulated_append
from tests.support.executors import CUDA, GPU_MARKS, Executor, emulated, needs_gpu
from tests.support.graphs import cuda_graph

ARCHS = ("sm_80", "sm_90a", "sm_100a")  # later ones have the PTX of the last
ON = [
    *(pytest.param(emulated(arch), id=arch, marks=pytest.mark.emulator) for arch in ARCHS),
    pytest.param(CUDA, id=CUDA.name, marks=GPU_MARKS),
]


@contextlib.contextmanager
def kernel_of(on: Executor, checks: bool = True) -> Iterator[append_case.Run]:
    """What runs the kernel, and nothing else."""
    if on.arch:
        with emulator.using(on.arch, checks=checks) as emulation:
            yield emulated_append
        assert emulation.records
        return
    wrong = AssertionError("torch operations ran in place of the kernel")
    with mock.patch.object(append, "reference", side_effect=wrong):
        yield append.run


@pytest.mark.parametrize("stored", ["nvfp4", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("on", ON)
def test_ties_and_special_numbers(on: Executor, stored: str) -> None:
    """Infinities and NaN become what the reference makes of them."""
    blocks = 384 if on.arch else 3000
    for dtype in DTYPES.values():
        for seed, number in enumerate(map(append_case.fp32, SCALES)):
            rows = adversarial_rows(stored, dtype, number, blocks, seed)
            want = quantised(rows, stored, number, reference)
            for scale in (number, torch.tensor(number, device=on.device)):
                with kernel_of(on) as run:
                    found = quantised(rows.to(on.device), stored, scale, run)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True))


def written(case: AppendCase, run: append_case.Run, device: str = "cpu") -> list[torch.Tensor]:
    """What a call leaves in the whole memory of its caches, as bytes."""
    function, arguments, caches = append_case.arguments(case, device)
    with mock.patch.object(append, "run", run):
        for _ in range(1 + (device == "cuda")):  # the second repeats the first
            function(**arguments)
    return [memory(x) for x in caches]


def memory(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).view(torch.uint8).cpu()


# Every case on a GPU and on one of the older architectures; conversions of the newer are their own, copies are not.
DEALT = [(ON[i % 2], case) for i, case in enumerate(CASES)] + [(ON[3], case) for case in CASES]
DEALT += [(ON[2], case) for case in CASES if case.kind != "copy"]


@pytest.mark.parametrize(
    ("on", "case"), [pytest.param(*on.values, case, id=f"{on.id}-{case.id}", marks=on.marks) for on, case in DEALT]
)
def test_calls_write_what_the_reference_writes(on: Executor, case: AppendCase) -> None:
    nothing, want = written(case, lambda problem: None), written(case, reference)
    # Races are kept by words of 4 bytes: two warps that write bytes of one word would count as one.
    with kernel_of(on, checks=False) as run:
        found = written(case, run, on.device)
    assert all(map(torch.equal, found, want))
    assert not any(map(torch.equal, nothing, want))


@needs_gpu
@pytest.mark.parametrize("kind", ["copy", "nvfp4", "mapped"])
def test_a_captured_graph_reads_rows_indices_and_scales_again(kind: str) -> None:
    case = AppendCase(kind, "bf16", 128, nnz=20, index=torch.int64, device_scales=True)
    function, arguments, caches = append_case.arguments(case, "cuda")
    with kernel_of(CUDA):
        _, replay = cuda_graph(lambda: function(**arguments))
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


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_rows_without_a_page_go_nowhere(arch: str, dtype: torch.dtype) -> None:
    """On a GPU index tensors are not checked: whatever they hold, no memory outside the cache is written."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    page_size, num_pages = 4, 3
    request = torch.tensor([0, -1, 3, high, low, 0, 0, 0, 1, 1, 2, 2, 0])
    position = torch.tensor([1, 0, 0, 0, 0, -1, 4, high, 0, 4, 0, 3, low])
    pages = torch.tensor([2, -1, num_pages])  # of requests 0, 1 (two) and, with a wrong start, 2
    table = PageTable(*(x.to(dtype) for x in (request, position, pages, torch.tensor([0, 1, 3, low]), torch.zeros(3))))
    cache = torch.zeros(2, num_pages, page_size, 1, 8, dtype=torch.bfloat16)
    rows = torch.randn(2, len(request), 1, 8).bfloat16()
    want = cache.clone()
    want[:, 2, 1] = rows[:, 0]
    with emulator.using(arch):
        emulated_append(Append(tuple(rows), tuple(cache), table))
    assert torch.equal(cache, want)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_whole_tensors_are_quantised_as_by_torch(arch: str) -> None:
    torch.manual_seed(0)
    x, cache = torch.randn(5, 48).bfloat16(), torch.randn(3, 2, 2, 5, 32).half().unbind(1)
    wide = torch.randn(3, 2, 2, 5, 40).half()[..., 3:35].unbind(1)  # rows at any address

    def results() -> list[torch.Tensor]:
        found = [*cute_attn.nvfp4_kv_quantize(x, torch.tensor([0.002]))]
        for pair in (cache, wide):
            data, scales, *_ = cute_attn.nvfp4_quantize_paged_kv_cache(*pair)
            found += [*data, *scales, *cute_attn.fp8_quantize_paged_kv_cache(*pair)[0]]
        return found

    want = results()
    with emulator.using(arch) as emulation, mock.patch.object(append, "run", emulated_append):
        found = results()
    assert len(emulation.records) == 9
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, want, strict=True))


@pytest.mark.emulator
def test_other_architectures_run_the_same_code() -> None:
    case = CASES[4]
    want = written(case, reference)
    for arch in ("sm_103a", "sm_120a", "sm_121a"):
        with emulator.using(arch):
            assert all(map(torch.equal, written(case, emulated_append), want))
