"""Honour or refuse, for every argument: on the reference, and by the capability table for other backends."""

from __future__ import annotations

import inspect

import pytest
import torch

import cute_attn
from cute_attn.dispatch import capabilities, select
from cute_attn.runtime.arch import named
from tests.support.batch_case import features
from tests.support.honour import CALLS, ELSEWHERE, IDS, PERTURBATIONS, Perturbation, base, honour

FUNCTIONS = {
    "paged": cute_attn.BatchPrefillWithPagedKVCacheWrapper,
    "ragged": cute_attn.BatchPrefillWithRaggedKVCacheWrapper,
    "decode": cute_attn.BatchDecodeWithPagedKVCacheWrapper,
    "single_prefill": cute_attn.single_prefill_with_kv_cache,
    "single_decode": cute_attn.single_decode_with_kv_cache,
}


@pytest.mark.parametrize(("kind", "perturbation"), CALLS, ids=IDS)
def test_reference(kind: str, perturbation: Perturbation) -> None:
    honour(kind, perturbation, "reference", "cpu", None)


@pytest.mark.parametrize(("kind", "perturbation"), CALLS, ids=IDS)
@pytest.mark.parametrize("backend", [b for b in capabilities.BACKENDS if b.archs], ids=lambda b: b.name)
def test_refusals_say_why_and_what_instead(
    backend: capabilities.Backend, kind: str, perturbation: Perturbation
) -> None:
    case = base(kind, perturbation.after)
    wanted = features(case, torch.device("cuda:0"))
    arch = named("sm_100a" if backend.name == "fa4" else "sm_90a")
    reasons = select.reasons_against(backend, wanted, arch)
    rows = [row for row in capabilities.CAPABILITIES if backend.name in row.unsupported and row.needed(wanted)]
    assert [reason[1] for reason in reasons] == [row.feature for row in rows]
    if not reasons:
        assert select.choose(wanted, backend.name, arch) is backend
        return
    with pytest.raises(cute_attn.NotSupported) as error:
        select.choose(wanted, backend.name, arch)
    for name, feature, reason, instead in error.value.refusals:
        assert name == backend.name
        assert all(text in str(error.value) for text in (feature, reason, instead))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_every_argument_is_perturbed(kind: str) -> None:
    function = FUNCTIONS[kind]
    functions = (function.plan, function.run) if inspect.isclass(function) else (function,)
    names = {name for f in functions for name in inspect.signature(f).parameters}
    perturbed = {p.argument for p in PERTURBATIONS if kind in p.kinds}
    assert names - perturbed - ELSEWHERE == set()


def test_every_capability_has_a_call() -> None:
    cpu = torch.device("cpu")
    cases = [features(base(kind, p.after), cpu) for kind, p in CALLS]
    scaled = cases[0]._replace(per_head_scales=True)
    fp8 = scaled._replace(q_dtype=torch.float8_e4m3fn, o_dtype=torch.float8_e5m2, head_dim_qk=96, head_dim_vo=96)
    strides = cases[0]._replace(expanded=True, large_cache=True, loose_scales=True, half_aligned_kv=True)
    fp8_dims = [fp8._replace(head_dim_qk=dim, head_dim_vo=dim) for dim in (72, 512)]
    rotated = fp8._replace(pos_encoding_mode="ROPE_LLAMA")
    items = fp8._replace(multi_item=True)
    ranges = cases[0]._replace(key_ranges=True)
    rotated_fp8_kv = cases[0]._replace(kv_dtype=torch.float8_e4m3fn, pos_encoding_mode="ROPE_LLAMA")
    narrow = cases[0]._replace(o_dtype=torch.float8_e4m3fn, head_dim_vo=72)
    drafts = cases[0]._replace(device_lengths=True, draft_mask=True, o_dtype=torch.float8_e4m3fn)
    asked = (*cases, scaled, fp8, *fp8_dims, rotated, rotated_fp8_kv, items, ranges, strides, narrow, drafts)
    for row in capabilities.CAPABILITIES:
        assert any(row.needed(case) for case in asked), row.feature
