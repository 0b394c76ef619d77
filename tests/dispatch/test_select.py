"""Selection: the one table decides, explains and documents."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from cute_attn import BatchPrefillWithRaggedKVCacheWrapper, emulator, explain, single_prefill_with_kv_cache
from cute_attn.dispatch import capabilities, select
from cute_attn.dispatch.capabilities import Load
from cute_attn.errors import ArgumentError, ArgumentTypeError, NotSupported
from cute_attn.problem import Features
from cute_attn.request.settings import FP8, HALF, KV_DTYPES, OUT_DTYPES, Q_DTYPES
from cute_attn.runtime.arch import ARCHS, Arch, named
from tests.support.batch_case import dims

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CUDA = Features(torch.device("cuda:0"), BF16, BF16, BF16, 32, 8, 128, 128)
CPU = CUDA._replace(device=torch.device("cpu"))
HOPPER, AMPERE = named("sm_90a"), named("sm_80")
FA2, FA3, XQA = (capabilities.BY_NAME[name] for name in ("fa2", "fa3", "xqa"))
REFERENCE = capabilities.BY_NAME["reference"]

Asked = dict[str, Any]
FP8_Q: Asked = {"q_dtype": E4M3, "kv_dtype": E4M3}
NVFP4: Asked = {"kv_dtype": torch.uint8, "kv_block_scales": True}
ROPE, ALIBI = {"pos_encoding_mode": "ROPE_LLAMA"}, {"pos_encoding_mode": "ALIBI"}
EVERYTHING: Asked = {"custom_mask": True, "sinks": True, "soft_cap": True, "positive_scale": False}
ODD_GROUP = {"num_qo_heads": 7, "num_kv_heads": 1}


# Refusals: docs/support.md, which `tests/docs/test_generated.py` writes again.


@pytest.mark.parametrize(
    ("backend", "arch", "asked", "least"),
    [
        ("fa3", "sm_90a", {}, 65),
        ("fa3", "sm_90a", EVERYTHING | {"kv_source": "ragged", "o_dtype": torch.float32}, 65),
        ("fa3", "sm_90a", ROPE | dims(64), 65),
        ("fa3", "sm_90a", {"kv_dtype": torch.float8_e5m2, "kv_source": "paged"}, 33),
        ("fa3", "sm_90a", NVFP4 | {"soft_cap": True}, 33),
        ("fa4", "sm_100a", dims(192, 128), 65),
        ("fa4", "sm_103a", ALIBI | ODD_GROUP, 65),
        ("fa4", "sm_100a", {"kv_dtype": E4M3}, 65),
    ],
)
def test_persistent_kernels_take_many_rows(backend: str, arch: str, asked: Asked, least: int) -> None:
    """And few where they are named. fa2 takes those of other GPUs."""
    features = CUDA._replace(**asked)
    assert select.choose(features, arch=named(arch), load=Load(least)).name == backend
    assert select.choose(features, arch=named(arch), load=Load(least - 1)) is FA2
    assert least in capabilities.ROWS_CLASSES[8 * features.kv_dtype.itemsize]
    assert select.choose(features, backend, named(arch), load=Load(1)).name == backend
    for other in ("sm_80", "sm_120a", "sm_90a" if backend == "fa4" else "sm_100a"):
        assert select.choose(features, "fa2", named(other), load=Load(1000)) is FA2
        with pytest.raises(NotSupported, match=f"{backend} refuses {other}: it runs on NVIDIA"):
            select.choose(features, backend, named(other))


@pytest.mark.parametrize("arch", ARCHS)
def test_fa2_takes_what_no_other_kernel_does(arch: str) -> None:
    for asked in (dims(512), ROPE | {"kv_dtype": E4M3}, {"kv_dtype": E4M3, "half_aligned_kv": True}):
        assert select.choose(CUDA._replace(**asked), arch=named(arch), load=Load(1000)) is FA2
    assert select.choose(CUDA, arch=named(arch), load=Load(1)) is FA2


@pytest.mark.parametrize("rows", [1, 1000])
def test_one_backend_takes_fp8_queries_and_outputs(rows: int) -> None:
    """However few the rows: no other backend supports them."""
    for backend, arch in (("fa3", "sm_90a"), ("fa4", "sm_100a"), ("fa4", "sm_103a"), ("fa2", "sm_120a")):
        assert select.choose(CUDA._replace(**FP8_Q), arch=named(arch), load=Load(rows)).name == backend
    for asked in ({}, FP8_Q, {"kv_dtype": E4M3}):
        features = CUDA._replace(**asked, o_dtype=E4M3)
        assert select.choose(features, arch=HOPPER, load=Load(rows)) is FA3
        with pytest.raises(NotSupported, match="fa2 refuses output of an fp8 dtype"):
            select.choose(features, arch=AMPERE, load=Load(rows))  # nothing falls back to the reference by itself


def test_all_reasons_are_listed() -> None:
    features = CUDA._replace(q_dtype=E4M3, kv_dtype=E4M3, per_head_scales=True, head_dim_vo=68)
    with pytest.raises(NotSupported) as error:
        select.choose(features, arch=HOPPER)
    names = [refusal[0] for refusal in error.value.refusals]
    assert names[:7] == ["fa3"] + ["fa2"] * 2 + ["xqa"] * 3 + ["fa4"]  # the fewest reasons first, other GPUs' last
    assert ("fa4", "sm_90a") in [refusal[:2] for refusal in error.value.refusals]
    assert str(error.value).count("\n") == len(error.value.refusals) - 1


def test_arch() -> None:
    old = Arch("sm_75", (7, 5), 65536)
    (refusal,) = select.reasons_against(FA2, CUDA, old)
    assert "sm_75" in str(refusal)
    assert "8.0" in str(refusal)
    (refusal,) = select.reasons_against(FA2, CPU, None)
    assert "cpu tensors" in str(refusal)
    assert select.reasons_against(REFERENCE, CUDA, old) == []


@pytest.mark.parametrize("backend", sorted(capabilities.ELSEWHERE))
def test_backends_of_flashinfer_that_are_not_here(backend: str) -> None:
    with pytest.raises(NotSupported) as error:
        select.choose(CUDA, backend, HOPPER)
    (refusal,) = error.value.refusals
    assert refusal[0] == backend
    assert refusal[3] == 'backend="auto"'


def test_explain_names_every_backend_and_reason() -> None:
    text = explain(CUDA, HOPPER)
    assert text.splitlines()[0].startswith("sm_90a; q bfloat16")
    assert "fa3: chosen" in text
    assert "fa2: able" in text
    assert "reference: able" in text
    text = explain(CUDA, HOPPER, rows=4)
    assert "fa3: able, passed over: 4 query rows per kv head are fewer than 65" in text
    assert "fa2: chosen" in text
    text = explain(CUDA._replace(q_dtype=E4M3, kv_dtype=E4M3), AMPERE)
    assert "fa2: refused\n    fa2 refuses q of an fp8 dtype" in text
    assert "no backend of a GPU takes this problem" in text
    assert "paged batch" in explain(CUDA._replace(kv_source="paged"), HOPPER).splitlines()[0]
    text = explain(CPU)
    assert "fa2: refused\n    fa2 refuses cpu tensors" in text
    assert "reference: chosen: CPU tensors run on it" in text
    assert "fa2: chosen: no other backend of this GPU takes it" in explain(CUDA, AMPERE)
    text = explain(CUDA._replace(pos_encoding_mode="ROPE_LLAMA"), HOPPER)
    assert "Instead" not in text
    assert "fa4 refuses pos_encoding_mode ROPE_LLAMA: TMA brings q and k in unrotated." in text


def test_explain_takes_tensors_words_and_names_of_gpus() -> None:
    q, k = torch.zeros(4096, 8, 64).half(), torch.zeros(4096, 2, 64).half()
    features = CUDA._replace(q_dtype=q.dtype, kv_dtype=q.dtype, o_dtype=q.dtype, num_qo_heads=8, num_kv_heads=2)
    expected = explain(features._replace(head_dim_qk=64, head_dim_vo=64), HOPPER, rows=4 * 4096)
    found = explain((q, k, k), "h100", causal=True)
    rule = "    rule: head dims (64, 64), operands 16-bit, plain\n"
    assert found.replace(rule, "") == expected != found
    words = {"qo_len": 4096, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": "float16"}
    assert explain(**words, arch="sm_90a", causal=True) == found
    decode = explain((q[0], k, k), "H200").splitlines()
    assert (
        "  fa3: able, passed over: 4 query rows per kv head are fewer than 65: another backend is faster there"
        in decode
    )
    assert explain((q, k, k)).startswith("cpu; q float16")
    assert explain(**words, arch="cpu").startswith("cpu; q float16")
    assert "sinks" in explain((q, k, k), "RTX 5090", sinks=True, logits_soft_cap=3.0).splitlines()[0]
    assert "  fa3: chosen" in explain(CUDA, "h100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "h1000"}, "arch must be one of sm_80, .*a GPU of a100, .*h100.*got 'h1000'"),
        ({"arch": 90}, "arch must be a name such as 'sm_90a'"),
        ({"asked": torch.zeros(3)}, r"asked must be Features, tensors \(q, k, v\) or None, got a float32 tensor"),
        ({"asked": (torch.zeros(2, 2, 64).half(),) * 3, "head_dim": 65}, "head_dim must not be given with tensors"),
        ({"asked": CUDA, "causal": True}, "causal must not be given with Features"),
        ({"dtype": "bf16"}, "dtype must name a dtype of torch, got 'bf16'"),
        ({"qo_len": -1}, "qo_len must be an int >= 0"),
        ({"rows": 4}, r"\brows\b"),
        ({"custom_mask": "no"}, "custom_mask must be True or False"),
        ({"head_dim_vo": "x"}, r"\bhead_dim_vo\b"),
    ],
)
def test_explain_checks_its_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        explain(**arguments)


def test_cpu_tensors_that_no_gpu_takes_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_warned_of_cpu_only", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for features in (CPU, CPU._replace(num_qo_heads=8, q_dtype=E4M3, kv_dtype=E4M3)):  # fp8: from Hopper on
            select.chosen.__wrapped__(features, "auto", Load(1))
        select.chosen.__wrapped__(CPU._replace(head_dim_qk=100), "reference", 1)  # asked for by name
    odd = CPU._replace(head_dim_qk=100, head_dim_vo=100)
    with pytest.warns(UserWarning, match='fa2 refuses other head dimensions.*backend="emulator"'):
        select.chosen.__wrapped__(odd, "auto", Load(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.chosen.__wrapped__(odd, "auto", Load(1))


# ---- the table itself


def test_rows_name_known_backends_and_say_why() -> None:
    assert len({row.feature for row in capabilities.CAPABILITIES}) == len(capabilities.CAPABILITIES)
    for row in capabilities.CAPABILITIES:
        assert set(row.unsupported) <= set(capabilities.BY_NAME)
        for no in row.unsupported.values():
            assert no.reason
            assert no.instead


def test_every_dtype_that_validation_lets_through_has_a_row() -> None:
    """Nothing may reach a backend without the table having spoken about it."""
    dtype_rows = [row for row in capabilities.CAPABILITIES if any(word in row.feature for word in ("dtype", "float"))]
    for q in Q_DTYPES:
        for kv in KV_DTYPES:
            if kv != q and (kv in HALF or q in FP8):
                continue  # refused by validation
            for out in OUT_DTYPES:
                features = CUDA._replace(q_dtype=q, kv_dtype=kv, o_dtype=out, kv_block_scales=kv == torch.uint8)
                asked = [row for row in dtype_rows if row.needed(features)]
                assert any("output" in row.feature for row in asked)
                if kv != torch.uint8:
                    assert any("output" not in row.feature for row in asked)


@pytest.mark.parametrize("single", [True, False])
def test_what_one_emulation_takes_another_refuses_in_the_name_of_the_emulator(single: bool) -> None:
    """Though the first verdict is remembered."""
    q, k, v = torch.zeros(0, 2, 64).half(), *(torch.zeros(9, 2, 64).half() for _ in "kv")

    def call() -> None:
        if single:
            single_prefill_with_kv_cache(q, k, v, window_left=4, pos_encoding_mode="ALIBI", backend="emulator")
            return
        ends = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
        made = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="emulator")
        made.plan(*ends, 2, 2, 64, window_left=4, pos_encoding_mode="ALIBI")

    with emulator.using("sm_90a", kernels="fa2"):
        call()
    with emulator.using("sm_90a", kernels="xqa"), pytest.raises(NotSupported) as error:
        call()
    assert {refusal[0] for refusal in error.value.refusals} == {"emulator"}
