"""The append kernels on the emulator: every byte as the torch implementation writes it, and no other byte."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import cute_attn
from cute_attn import emulator
from cute_attn.dispatch import append
from cute_attn.request.append import Append, PageTable, reference
from tests.support import append_case
from tests.support.append_case import CASES, DTYPES, SCALES, AppendCase, adversarial_blocks, quantised, special_blocks
from tests.support.emulated_calls import emulated_append

pytestmark = pytest.mark.emulator

ARCHS = ("sm_80", "sm_90a", "sm_100a")  # later ones have the PTX of the last
FP8 = ("float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_nvfp4_decides_every_tie_as_the_reference(arch: str, dtype: str) -> None:
    with emulator.using(arch):
        for seed, scale in enumerate(map(append_case.fp32, SCALES)):
            rows = adversarial_blocks(DTYPES[dtype], scale, 384, seed).view(-1, 2, 64)
            want = quantised(rows, "nvfp4", scale, reference)
            assert len(want[1].unique()) > 1 or dtype == "fp16"
            for found, expected in zip(quantised(rows, "nvfp4", scale, emulated_append), want, strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("stored", FP8)
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_fp8_decides_every_tie_as_the_reference(arch: str, stored: str) -> None:
    numbers = torch.arange(append_case.E4M3.numel() - 1, dtype=torch.uint8).view(getattr(torch, stored)).double()
    with emulator.using(arch):
        for seed, scale in enumerate(map(append_case.fp32, SCALES)):
            for dtype in (torch.bfloat16, torch.float32):
                ties = append_case.near((numbers[1:] + numbers[:-1]) / 2 * scale, dtype)
                noise = adversarial_blocks(dtype, scale, 48, seed).flatten()
                rows = torch.cat([ties, noise])[: (len(ties) + len(noise)) // 16 * 16].view(-1, 1, 16)
                (found,), (want,) = (quantised(rows, stored, scale, run) for run in (emulated_append, reference))
                assert torch.equal(found, want)


@pytest.mark.parametrize("stored", ["nvfp4", *FP8])
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_infinities_and_nan_become_what_the_reference_makes_of_them(arch: str, stored: str) -> None:
    with emulator.using(arch):
        for dtype in DTYPES.values():
            rows = special_blocks(dtype).unsqueeze(1)
            results = zip(*(quantised(rows, stored, 0.5, run) for run in (emulated_append, reference)), strict=True)
            assert all(torch.equal(found, want) for found, want in results)


def named(value: AppendCase | str) -> str:
    return value if isinstance(value, str) else value.id


def written(case: AppendCase, run: append_case.Run) -> list[torch.Tensor]:
    """What a call leaves in the whole memory of its caches."""
    function, arguments, caches = append_case.arguments(case)
    with mock.patch.object(append, "run", run):
        function(**arguments)
    return [x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).clone() for x in caches]


# Every case on one of the older architectures; conversions of the newer ones are their own, copies are not.
DEALT = [(case, ARCHS[i % 2]) for i, case in enumerate(CASES)]
DEALT += [(case, ARCHS[2]) for case in CASES if case.kind != "copy"]


@pytest.mark.parametrize(("case", "arch"), DEALT, ids=named)
def test_calls_write_what_the_reference_writes(case: AppendCase, arch: str) -> None:
    nothing = written(case, lambda problem: None)
    want = written(case, reference)
    # Races are kept by words of 4 bytes: two warps that write bytes of one word would count as one.
    with emulator.using(arch, checks=False) as emulation:
        found = written(case, emulated_append)
    assert len(emulation.records) == 1
    for before, expected, result in zip(nothing, want, found, strict=True):
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))
        assert not torch.equal(before.view(torch.uint8), expected.view(torch.uint8))


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


def test_other_architectures_run_the_same_code() -> None:
    case = CASES[4]
    want = written(case, reference)
    for arch in ("sm_103a", "sm_120a", "sm_121a"):
        with emulator.using(arch):
            assert all(map(torch.equal, written(case, emulated_append), want))
