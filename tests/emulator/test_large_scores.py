"""Logits up to 1e8, the documented limit, where the spacing of fp32 is 8; what larger ones leave alone."""

from __future__ import annotations

import pytest
import torch

from cute_attn import emulator, single_decode_with_kv_cache, single_prefill_with_kv_cache
from tests.support.right import emulate_call


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("kernels", "arch"), [("fa2", "sm_90a"), ("fa3", "sm_90a"), ("fa4", "sm_100a"), ("xqa", "sm_90a")]
)
def test_large_logits(kernels: str, arch: str) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 70, 2, 64, generator=generator).bfloat16()
    q, k = q * 2.0**12, k * 2.0**12
    call, q = (single_decode_with_kv_cache, q[-1]) if kernels == "xqa" else (single_prefill_with_kv_cache, q)
    _, lse = call(q, k, v, return_lse=True, backend="reference")
    assert 5e7 < lse.abs().max() < 5e8
    emulate_call(call, q, k, v, on=(kernels, arch), near=1.6e-2, lse_near=1e-5)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("kernels", "arch"), [("reference", ""), ("fa2", "sm_90a"), ("fa3", "sm_90a"), ("fa4", "sm_100a")]
)
@pytest.mark.parametrize("factor", [2.0**30, 2.0**120])
def test_larger_logits_of_one_row_leave_the_others_alone(kernels: str, arch: str, factor: float) -> None:
    """The second factor makes products beyond fp32; the reference computes them too."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 70, 2, 64, generator=generator).bfloat16()
    others = torch.arange(70) != 20

    def call() -> torch.Tensor:
        if kernels == "reference":
            return single_prefill_with_kv_cache(q, k, v, backend="reference")
        with emulator.using(arch, kernels=kernels):
            return single_prefill_with_kv_cache(q, k, v, backend="emulator")

    expected = call()
    q[20] *= factor
    out = call()
    torch.testing.assert_close(out[others], expected[others], rtol=1e-2, atol=1e-2)
    if kernels == "reference":
        best = (q[20].double()[:, None] @ k.double().permute(1, 2, 0))[:, 0].argmax(-1)
        assert torch.equal(out[20], v[best, torch.arange(2)])
