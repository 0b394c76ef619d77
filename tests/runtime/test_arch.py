"""Cubins and limits of compute capabilities."""

from __future__ import annotations

import pytest
import torch

from cute_attn.errors import ArgumentError
from cute_attn.runtime import arch as archs
from tests.support import subprocesses


@pytest.mark.parametrize(
    ("capability", "name", "smem_kb", "pdl"),
    [
        ((8, 0), "sm_80", 163, False),
        ((8, 6), "sm_80", 99, False),
        ((8, 7), "sm_80", 163, False),
        ((8, 9), "sm_80", 99, False),
        ((9, 0), "sm_90a", 227, True),
        ((10, 0), "sm_100a", 227, True),
        ((10, 3), "sm_103a", 227, True),
        ((12, 0), "sm_120a", 99, True),
        ((12, 1), "sm_121a", 99, True),
    ],
)
def test_capability_decides_cubin_and_limits(capability: tuple[int, int], name: str, smem_kb: int, pdl: bool) -> None:
    arch = archs.for_capability(capability)
    assert (arch.name, arch.smem_limit, arch.pdl) == (name, smem_kb * 1024, pdl)
    assert arch.name in archs.ARCHS


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (11, 0), (13, 0)])
def test_unknown_capability_is_named(capability: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=rf"{capability[0]}\.{capability[1]} .* 8\.x, 9\.0"):
        archs.for_capability(capability)


def test_the_given_device_decides_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (9, 0), 1: (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert [archs.for_device(index).name for index in (1, 0, 1)] == ["sm_120a", "sm_90a", "sm_120a"]


def test_imports_without_torch_cuda_and_dsl() -> None:
    code = "from cute_attn.runtime import arch; print(arch.for_capability((9, 0)).name)"
    assert subprocesses.run(code, block=["torch", "cuda", "cutlass"]).strip() == "sm_90a"
