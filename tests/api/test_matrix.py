"""The test matrix covers what it states, and its verdict can fail."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cute_attn.reference import attention as reference
from tests.support.case import LOG2E, Case, check, make, problem
from tests.support.matrix import FULL, SMALL, STORAGES, random_case


def solved(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's own answer in the dtypes of the API."""
    rows = (case.qo_len, case.num_qo_heads)
    out = torch.empty(*rows, case.head_dim_vo, dtype=getattr(torch, case.o_dtype or case.dtype))
    lse = torch.empty(rows)
    reference.run(problem(case, make(case), out, lse))
    return (out[0], lse[0]) if case.kind == "decode" else (out, lse)


def test_cases_have_names_and_stay_in_their_sizes() -> None:
    for cases in (SMALL, FULL):
        assert len({case.id for case in cases}) == len(cases)
    assert len(SMALL) <= 75
    assert max(max(case.qo_len, case.kv_len) for case in SMALL) <= 200
    assert len(FULL) >= 300
    for case in (*SMALL, *FULL, *(random_case(seed) for seed in range(300))):
        assert case.num_qo_heads % case.num_kv_heads == 0
        assert case.kind == "prefill" or (case.qo_len == 1 and case.mask == "none" and case.o_dtype is None)


@pytest.mark.parametrize("cases", [SMALL, FULL], ids=["small", "full"])
def test_every_feature_is_there(cases: tuple[Case, ...]) -> None:
    for name, values in {
        "kind": ("prefill", "decode"),
        "dtype": ("float16", "bfloat16"),
        "kv_layout": ("NHD", "HND"),
        "mask": ("none", "causal", "custom", "packed"),
        "pos_encoding_mode": ("NONE", "ROPE_LLAMA", "ALIBI"),
        "storage": STORAGES,
        "head_dim_qk": (64, 80, 96, 112, 128, 192, 256),
        "return_lse": (True, False),
        "qo_len": (1, 15, 17, 63, 65, 127, 129),
        "kv_len": (0, 1, 15, 17, 63, 65, 127, 129),
        "tensor_scales": (True, False),
    }.items():
        assert {getattr(case, name) for case in cases} >= set(values), name
    assert any(case.logits_soft_cap > 0 for case in cases)
    assert any(case.scale <= 0 for case in cases)
    assert {case.num_qo_heads // case.num_kv_heads for case in FULL} >= set(range(1, 17))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("storage", STORAGES)
def test_unused_memory_is_poisoned(storage: str, kv_layout: str) -> None:
    case = Case("prefill", 3, 5, 4, 2, 24, 16, mask="packed", storage=storage, kv_layout=kv_layout)
    inputs = make(case)
    tensors = (inputs.q, inputs.k, inputs.v)
    assert inputs.k.shape == ((5, 2, 24) if kv_layout == "NHD" else (2, 5, 24))
    used: dict[int, set[int]] = {}
    for x in tensors:
        assert torch.isfinite(x).all()
        assert x.stride(2) == 1
        where = torch.arange(x.untyped_storage().nbytes() // 2).as_strided(x.shape, x.stride(), x.storage_offset())
        used.setdefault(x.untyped_storage().data_ptr(), set()).update(where.flatten().tolist())
    for x in tensors:
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        live = used[x.untyped_storage().data_ptr()]
        assert int(torch.isfinite(whole).sum()) == len(live)
        assert min(live) > 128
        assert max(live) < whole.numel() - 128
    mask = inputs.packed_custom_mask
    assert mask is not None
    assert mask[-1] >> 7 == 1  # 15 bits
    assert torch.equal(reference.unpack_mask(mask, 3, 5)[0], torch.zeros(5, dtype=torch.bool))


def test_a_case_is_the_same_everywhere() -> None:
    case = Case("prefill", 3, 5, 4, 2, 8, 8, storage="padded", mask="custom")
    moved = make(dataclasses.replace(case, storage="transposed"))
    for a, b in zip(vars(make(case)).values(), vars(moved).values(), strict=True):
        assert a is b is None or torch.equal(a, b)


CASE = Case("prefill", 33, 65, 4, 2, 64, 64, mask="causal")
EMPTY = Case("prefill", 65, 33, 2, 1, 64, 64, mask="causal")


@pytest.mark.parametrize(
    "wrong",
    [
        dataclasses.replace(CASE, mask="none"),
        dataclasses.replace(CASE, window_left=62),  # rows 31 and 32 lose one and two keys of 64 and 65
        dataclasses.replace(CASE, sm_scale=0.126),
        dataclasses.replace(CASE, logits_soft_cap=50.0),
        dataclasses.replace(CASE, pos_encoding_mode="ALIBI"),
        dataclasses.replace(CASE, pos_encoding_mode="ROPE_LLAMA"),
        dataclasses.replace(CASE, v_scale=1.01),
        dataclasses.replace(CASE, seed=1),
    ],
    ids=lambda case: case.id,
)
def test_the_verdict_sees_another_problem(wrong: Case) -> None:
    rows = (CASE.qo_len, CASE.num_qo_heads)
    out, lse = torch.empty(*rows, 64, dtype=torch.float16), torch.empty(rows)
    inputs = make(CASE if wrong.seed == CASE.seed else wrong)
    reference.run(problem(wrong, inputs, out, lse))
    assert not check(CASE, out, lse).ok


def test_the_verdict_sees_single_elements() -> None:
    out, lse = solved(CASE)
    for broken, value in ((out, math.nan), (out, 9.0), (lse, math.nan), (lse, -math.inf), (lse, math.inf)):
        spot = (7, 2, 5)[: broken.dim()]
        kept = broken[spot].clone()
        broken[spot] = value
        result = check(CASE, out, lse)
        assert not result.ok
        assert str(list(spot)) in result.detail
        broken[spot] = kept
    assert not check(CASE, out, lse / LOG2E).ok
    assert not check(CASE, out.roll(1, 1), lse).ok
    assert check(CASE, out, lse).ok


def test_the_verdict_wants_empty_rows_exact() -> None:
    out, lse = solved(EMPTY)
    assert check(EMPTY, out, lse).ok
    out[0, 0, 0] = 1e-6
    assert "o[0, 0, 0]" in check(EMPTY, out, lse).detail
    out[0, 0, 0] = -0.0
    lse[1, 1] = -1e30
    assert "lse[1, 1]" in check(EMPTY, out, lse).detail


def test_the_verdict_wants_the_form_of_the_api() -> None:
    out, lse = solved(CASE)
    for bad in ((out.float(), lse), (out[0], lse), (out, lse.double()), (out, lse.T), (out, None)):
        assert not check(CASE, *bad).ok
