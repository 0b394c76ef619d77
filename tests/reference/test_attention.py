"""The reference in fp64 against torch's SDPA. All options, against a formula: `tests/api/test_cpu.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_attn.problem import Features, Problem, Settings
from cute_attn.reference import attention as reference
from cute_attn.reference.attention import Logits, Mask, alibi_slopes, attention, rope

F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return torch's attention of tensors `[len, heads, dim]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)
    return o[0].transpose(0, 1)


def make_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: dict[str, Any] | None = None, **fields: Any
) -> Problem:
    heads_axis = 0 if fields.get("kv_layout") == "HND" else 1
    structure = Features(
        q.device,
        q.dtype,
        k.dtype,
        F64,
        q.shape[1],
        k.shape[heads_axis],
        q.shape[2],
        v.shape[2],
        **(features or {}),
    )
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), math.nan, dtype=F64)
    lse = torch.full((q.shape[0], q.shape[1]), math.nan, dtype=F64)
    settings = Settings(structure, **{name: fields.pop(name) for name in Settings._fields if name in fields})
    return Problem(settings, q.shape[0], k.shape[1 - heads_axis], q, k, v, out, lse, **fields)


def solve(problem: Problem, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    reference.run(problem, F64, **options)
    assert problem.lse is not None
    return problem.out, problem.lse


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (5, 33), (33, 5)])
def test_full_attention(heads: tuple[int, int], dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    q, k = randn(lengths[0], heads[0], dims[0]), randn(lengths[1], heads[1], dims[0], seed=1)
    v = randn(lengths[1], heads[1], dims[1], seed=2)
    o, lse = attention(q, k, v)
    torch.testing.assert_close(o, sdpa(q, k, v))
    z = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(heads[0] // heads[1], 1)) / math.sqrt(dims[0])
    torch.testing.assert_close(lse, torch.log2(z.exp().sum(-1)))


def test_results_do_not_depend_on_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = randn(13, 4, 16), randn(11, 2, 16, seed=1), randn(11, 2, 16, seed=2)
    options: dict[str, Any] = {
        "logits": Logits(0.25, 2.0, alibi_slopes(4)),
        "mask": Mask(causal=True, window_left=6),
    }
    assert [len(alibi_slopes(heads)) for heads in (1, 6)] == [1, 6]
    whole = attention(q, k, v, **options)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 3 * 2 * 11 * 8)  # three rows per chunk
    for a, b in zip(attention(q, k, v, **options), whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])  # of hidden keys: tests/api/test_hidden_keys.py
def test_special_values_of_visible_keys_propagate(poison: float) -> None:
    q, k, v = randn(4, 2, 16), randn(4, 1, 16, seed=1), randn(4, 1, 16, seed=2)
    clean, _ = attention(q, k, v)
    v[2, 0, 5] = poison
    clean[:, :, 5] = poison
    torch.testing.assert_close(attention(q, k, v)[0], clean, equal_nan=True)


def test_run_rounds_rotated_16_bit_inputs() -> None:
    q, k, v = (randn(6, 1, 16, seed=s).bfloat16() for s in range(3))
    features = {"pos_encoding_mode": "ROPE_LLAMA"}
    at = torch.arange(6)
    for rounded, dtype in ((True, torch.bfloat16), (False, F64)):
        o, _ = solve(make_problem(q, k, v, features, sm_scale=0.25), round_rotated=rounded)
        expected = sdpa(rope(q, at, dtype=dtype).double(), rope(k, at, dtype=dtype).double(), v.double())
        torch.testing.assert_close(o, expected)


def test_run_multiplies_every_scale() -> None:
    q, k, v = randn(4, 4, 16), randn(6, 2, 16, seed=1), randn(6, 2, 16, seed=2)
    scale_q, scale_k = torch.tensor([1.0, 2.0, 0.5, 1.5]), torch.tensor([2.0, 0.25])
    scale_v = torch.tensor([3.0, -1.0])
    problem = make_problem(
        q,
        k,
        v,
        {"per_head_scales": True},
        sm_scale=0.1,
        scale_tensors=(torch.tensor([2.0]), torch.tensor(1.5)),
        v_scale=0.5,
        v_scale_tensor=torch.tensor([4.0]),
        head_scales=(scale_q, scale_k, scale_v),
    )
    o, _ = solve(problem)
    expected = sdpa(
        q * scale_q.double()[:, None], k * scale_k.double()[:, None], v * scale_v.double()[:, None], scale=0.3
    )
    torch.testing.assert_close(o, 2 * expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_run_takes_fp8_and_hnd(dtype: torch.dtype) -> None:
    q, k, v = randn(4, 4, 16).to(dtype), randn(2, 6, 16, seed=1).to(dtype), randn(2, 6, 16, seed=2).to(dtype)
    o, _ = solve(make_problem(q, k, v, kv_layout="HND", sm_scale=0.25))
    torch.testing.assert_close(o, sdpa(q.double(), k.double().transpose(0, 1), v.double().transpose(0, 1)))


def test_run_computes_in_fp64() -> None:
    """Also for 16-bit inputs, whose products fp32 would round."""
    q, k, v = randn(8, 2, 16).half(), randn(9, 2, 16, seed=1).half(), randn(9, 2, 16, seed=2).half()
    problem = make_problem(q, k, v, sm_scale=0.25)
    reference.run(problem)
    torch.testing.assert_close(problem.out, sdpa(q.double(), k.double(), v.double()), rtol=1e-12, atol=1e-12)
