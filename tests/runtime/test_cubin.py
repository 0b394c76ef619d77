"""ELF reader on cubins of both ELF ABIs and on damaged bytes. Of every architecture: `test_compile.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_attn.errors import ArtifactError
from cute_attn.runtime.compile import compile_spec
from cute_attn.runtime.cubin import read_kernels
from tests.support.toy_spec import ToySpec, toy_program

TOY_PARAMS = ((0, 8), (8, 4), (12, 4), (16, 8), (24, 4))  # C layout of {i64, i32, f32, f64, i32}
ABI_7 = Path(__file__).parents[1] / "support" / "data"  # toy_kernel.py, 96 threads, by ptxas 12.9 (cu12)


@pytest.mark.parametrize("sm", [80, 90])
def test_reads_elf_abi_7(sm: int) -> None:
    (kernel,) = read_kernels((ABI_7 / f"toy_abi7_sm{sm}.cubin").read_bytes())
    assert (kernel.symbol, kernel.sm) == ("cute_attn_toy_0", sm)
    assert kernel.params == TOY_PARAMS
    assert (kernel.reqntid, kernel.stack_bytes) == ((96, 1, 1), 0)
    assert 4 <= kernel.registers <= 64


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_finds_a_stack_frame(arch: str) -> None:
    (kernel,) = read_kernels(compile_spec(ToySpec(stack=True), arch, toy_program).cubin)
    assert kernel.stack_bytes >= 64 * 4


def test_damaged_bytes_are_an_artifact_error() -> None:
    cubin = compile_spec(ToySpec(), "sm_90a", toy_program).cubin
    for size in (0, 3, 40, 64, len(cubin) // 2, len(cubin) - 1):
        with pytest.raises(ArtifactError, match="not a readable cubin"):
            read_kernels(cubin[:size])
    with pytest.raises(ArtifactError, match="no ELF64 header"):
        read_kernels(b"MZ" + cubin)
