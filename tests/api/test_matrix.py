"""The test matrix covers what it states, and its verdict can fail."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cute_attn.reference import attention as reference
from tests.support.batch_case import BatchCase, call, make
from tests.support.case import LOG2E
from tests.support.formula import check
from tests.support.matrix import FULL, SMALL, STORAGES, prefill, random_case

DRAWN = tuple(random_case(seed) for seed in range(200))  # which every backend gets on a GPU, too


def test_cases_have_names_and_stay_in_their_sizes() -> None:
    for cases in (SMALL, FULL):
        assert len({case.id for case in cases}) == len(cases)
    assert len(SMALL) <= 75
    assert max(max(case.rows, *case.kv_lens) for case in SMALL) <= 200
    assert len(FULL) >= 300
    for case in (*SMALL, *FULL, *DRAWN):
        assert case.num_qo_heads % case.num_kv_heads == 0
        assert case.kind == "single_prefill" or (case.rows == 1 and case.mask == "none" and case.o_dtype is None)


@pytest.mark.parametrize("cases", [SMALL, (*FULL, *DRAWN)], ids=["small", "full"])
def test_every_feature_is_there(cases: tuple[BatchCase, ...]) -> None:
    for name, values in {
        "kind": ("single_prefill", "single_decode"),
        "dtype": ("float16", "bfloat16"),
        "kv_layout": ("NHD", "HND"),
        "mask": ("none", "causal", "custom", "packed"),
        "pos_encoding_mode": ("NONE", "ROPE_LLAMA", "ALIBI"),
        "storage": STORAGES,
        "head_dim_qk": (64, 80, 96, 112, 128, 192, 256),
        "return_lse": (True, False),
        "qo_lens": ((1,), (15,), (17,), (65,), (127,)),
        "kv_lens": ((0,), (15,), (17,), (63,), (65,), (127,), (129,)),
        "tensor_scales": (True, False),
    }.items():
        assert {getattr(case, name) for case in cases} >= set(values), name
    assert any(case.logits_soft_cap > 0 for case in cases)
    assert any(case.scale <= 0 for case in cases)
    assert {case.num_qo_heads // case.num_kv_heads for case in FULL} >= set(range(1, 17))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("storage", STORAGES)
def test_unused_memory_is_poisoned(storage: str, kv_layout: str) -> None:
    inputs = make(prefill(3, 5, (4, 2), (24, 16), mask="packed", storage=storage, kv_layout=kv_layout))
    tensors = (inputs.q, *inputs.kv)
    assert inputs.kv[0].shape == ((5, 2, 24) if kv_layout == "NHD" else (2, 5, 24))
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
    mask = inputs.masks["packed_custom_mask"]
    assert mask[-1] >> 7 == 1  # 15 bits
    assert torch.equal(reference.unpack_mask(mask, 3, 5)[0], torch.zeros(5, dtype=torch.bool))


def test_a_case_is_the_same_everywhere() -> None:
    case = prefill(3, 5, (4, 2), 8, storage="padded", mask="custom")
    inputs, moved = make(case), make(dataclasses.replace(case, storage="transposed"))
    assert torch.equal(inputs.masks["custom_mask"], moved.masks["custom_mask"])
    assert all(map(torch.equal, (inputs.q, *inputs.kv), (moved.q, *moved.kv)))


CASE, EMPTY = prefill(33, 65, (4, 2), 64, mask="causal"), prefill(65, 33, (2, 1), 64, mask="causal")
INPUTS, EMPTY_INPUTS = make(CASE), make(EMPTY)


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
def test_the_verdict_sees_another_problem(wrong: BatchCase) -> None:
    inputs = INPUTS if wrong.seed == CASE.seed else make(wrong)
    assert check(CASE, INPUTS, *call(wrong, inputs))


def test_the_verdict_sees_single_elements() -> None:
    out, lse = call(CASE, INPUTS)
    assert lse is not None
    for broken, value in ((out, math.nan), (out, 9.0), (lse, math.nan), (lse, -math.inf), (lse, math.inf)):
        spot = (7, 2, 5)[: broken.dim()]
        kept = broken[spot].clone()
        broken[spot] = value
        assert str(list(spot)) in check(CASE, INPUTS, out, lse)
        broken[spot] = kept
    assert check(CASE, INPUTS, out, lse / LOG2E)
    assert check(CASE, INPUTS, out.roll(1, 1), lse)
    assert not check(CASE, INPUTS, out, lse)


def test_the_verdict_wants_empty_rows_exact() -> None:
    out, lse = call(EMPTY, EMPTY_INPUTS)
    assert lse is not None
    assert not check(EMPTY, EMPTY_INPUTS, out, lse)
    out[0, 0, 0] = 1e-6
    assert "o[0, 0, 0]" in check(EMPTY, EMPTY_INPUTS, out, lse)
    out[0, 0, 0] = -0.0
    lse[1, 1] = -1e30
    assert "lse[1, 1]" in check(EMPTY, EMPTY_INPUTS, out, lse)


def test_the_verdict_wants_the_form_of_the_api() -> None:
    out, lse = call(CASE, INPUTS)
    assert lse is not None
    for bad in ((out.float(), lse), (out[0], lse), (out, lse.double()), (out, lse.T), (out, None)):
        assert check(CASE, INPUTS, *bad)
