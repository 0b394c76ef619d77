"""The batch wrappers on CPU tensors, against the formula of every request in fp64 numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.api.test_single_cpu import alibi_slope, rotated
from tests.support.batch_case import SMALL, BatchCase, BatchInputs, Request, call, check, make, random_batch_case
from tests.support.matrix import poisoned_memory


def hidden(case: BatchCase, request: Request) -> np.ndarray:
    qo_len, kv_len = len(request.q), len(request.k)
    position = np.arange(qo_len)[:, None] + kv_len - qo_len
    key = np.arange(kv_len)[None]
    hide = np.zeros((qo_len, kv_len), bool)
    if request.keep is not None:
        hide |= ~request.keep.numpy()
    elif case.mask == "causal" or case.kind == "decode":
        hide |= key > position
    if case.window_left >= 0:
        hide |= key < position - case.window_left
    return hide


def formula(case: BatchCase, request: Request, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    qo_len, kv_len = len(request.q), len(request.k)
    q, k = rotated(case, request.q, kv_len - qo_len), rotated(case, request.k, 0)
    v, hide = request.v.numpy(), hidden(case, request)
    o = np.zeros((qo_len, case.num_qo_heads, case.head_dim_vo))
    lse = np.full((qo_len, case.num_qo_heads), -math.inf)
    for head in range(case.num_qo_heads):
        kv_head = head * case.num_kv_heads // case.num_qo_heads
        z = q[:, head] @ k[:, kv_head].T * case.scale
        if case.pos_encoding_mode == "ALIBI":
            z = z + alibi_slope(head, case.num_qo_heads) * (np.arange(kv_len)[None] - np.arange(qo_len)[:, None])
        if case.logits_soft_cap:
            z = case.logits_soft_cap * np.tanh(z / case.logits_soft_cap)
        weights = np.where(hide, 0.0, np.exp(z))
        total = weights.sum(1) + (0.0 if sinks is None else math.exp(sinks[head]))
        some = total > 0
        o[some, head] = weights[some] @ v[:, kv_head] / total[some, None]
        lse[some, head] = np.log(total[some])
    return o * (1.0 if case.v_scale is None else case.v_scale), lse / (1.0 if case.lse_base == "ln" else math.log(2))


def oracle(case: BatchCase, inputs: BatchInputs) -> tuple[np.ndarray, np.ndarray]:
    sinks = None if inputs.sinks is None else inputs.sinks.double().numpy()
    solved = [formula(case, request, sinks) for request in inputs.requests]
    o_first = np.zeros((case.first, case.num_qo_heads, case.head_dim_vo))
    lse_first = np.full((case.first, case.num_qo_heads), -math.inf)
    return np.concatenate([o_first, *(o for o, _ in solved)]), np.concatenate([lse_first, *(lse for _, lse in solved)])


def assert_right(case: BatchCase, inputs: BatchInputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    o_ref, lse_ref = oracle(case, inputs)
    assert out.dtype == getattr(torch, case.o_dtype or case.dtype)
    ulp = torch.finfo(out.dtype).eps  # the reference computes in fp32: only the output is rounded
    np.testing.assert_allclose(out.double().numpy(), o_ref, rtol=ulp, atol=1e-4 * ulp + 1e-5)
    assert not out[torch.from_numpy(np.isinf(lse_ref))].any()
    if case.return_lse:
        assert lse is not None
        assert lse.dtype == torch.float32
        np.testing.assert_allclose(lse.numpy(), lse_ref, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_batch(case: BatchCase) -> None:
    inputs = make(case)
    with poisoned_memory():
        out, lse = call(case, inputs)
    assert_right(case, inputs, out, lse)
    verdict = check(case, inputs, out, lse)
    assert verdict.ok, verdict.detail


@pytest.mark.parametrize("seed", range(100))
def test_random_batch(seed: int) -> None:
    case = random_batch_case(seed, max_len=90, max_batch=5)
    inputs = make(case)
    with poisoned_memory():
        out, lse = call(case, inputs)
    assert_right(case, inputs, out, lse)
