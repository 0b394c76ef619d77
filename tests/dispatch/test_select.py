"""Selection: the one table decides, explains and documents."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from cute_attn import (
    ArgumentError,
    BatchPrefillWithRaggedKVCacheWrapper,
    LayoutError,
    NotSupported,
    emulator,
    explain,
    single_prefill_with_kv_cache,
)
from cute_attn.dispatch import backends, capabilities, select
from cute_attn.dispatch.capabilities import Load
from cute_attn.problem import Features, Problem, Settings
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
sources = pytest.mark.parametrize("kv_source", ["dense", "ragged", "paged"])
persistent = pytest.mark.parametrize(("backend", "arch"), [("fa3", "sm_90a"), ("fa4", "sm_100a")])


def assert_faster(asked: Asked, backend: str, arch: str, least: int = 65) -> None:
    """That the backend takes problems of `least` query rows, and fa2 those of fewer."""
    features = CUDA._replace(**asked)
    assert select.choose(features, arch=named(arch), load=Load(least)).name == backend
    assert select.choose(features, arch=named(arch), load=Load(least - 1)) is FA2


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (16, 240), (192, 128), (256, 256), (512, 512)])
@pytest.mark.parametrize("dtype", HALF)
def test_fa2_takes_every_16_bit_problem(arch: str, head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    features = CUDA._replace(q_dtype=dtype, kv_dtype=dtype, **dims(*head_dims))
    asked: Asked
    for asked in (
        {},
        EVERYTHING,
        ROPE | {"o_dtype": torch.float32},
        ALIBI | ODD_GROUP,
        {"kv_dtype": torch.float8_e5m2},
    ):
        assert select.choose(features._replace(**asked), arch=named(arch), load=Load(1)) is FA2


@sources
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (112, 112), (192, 128), (48, 16), (256, 256)])
@pytest.mark.parametrize(
    ("backend", "arch"), [("fa3", "sm_90a"), ("fa4", "sm_100a"), ("fa4", "sm_103a")], ids=lambda name: name
)
def test_persistent_kernels_take_many_rows(backend: str, arch: str, kv_source: str, head_dims: tuple[int, int]) -> None:
    where = {"kv_source": kv_source} | dims(*head_dims)
    for changes in ({}, EVERYTHING | {"o_dtype": torch.float32}, ALIBI | ODD_GROUP, {"multi_item": True}):
        asked = where | changes
        assert_faster(asked, backend, arch)
        features = CUDA._replace(**asked)
        assert select.choose(features, arch=named("sm_120a"), load=Load(65)) is FA2
        assert select.choose(features, backend, named(arch), load=Load(1)).name == backend


@sources
@pytest.mark.parametrize("kv_dtype", FP8)
@persistent
def test_persistent_kernels_widen_8_bit_keys(backend: str, arch: str, kv_dtype: torch.dtype, kv_source: str) -> None:
    least = {"fa3": 33, "fa4": 65}[backend]
    assert_faster({"kv_dtype": kv_dtype, "kv_source": kv_source}, backend, arch, least)


@pytest.mark.parametrize(("backend", "arch"), [("fa3", "sm_100a"), ("fa4", "sm_90a"), ("fa4", "sm_120a")])
def test_kernels_of_one_architecture_run_nowhere_else(backend: str, arch: str) -> None:
    with pytest.raises(NotSupported, match=f"{backend} refuses {arch}: it runs on NVIDIA"):
        select.choose(CUDA, backend, named(arch))


@pytest.mark.parametrize(
    "asked",
    [
        ROPE | {"kv_dtype": E4M3},
        ROPE | NVFP4,
        dims(512),
        {"expanded": True},
        {"kv_dtype": E4M3, "head_dim_vo": 72},
        {"kv_dtype": E4M3, "half_aligned_kv": True},
    ],
)
@persistent
def test_what_persistent_kernels_refuse_fa2_takes(backend: str, arch: str, asked: Asked) -> None:
    assert select.choose(CUDA._replace(**asked), arch=named(arch)) is FA2
    with pytest.raises(NotSupported, match=f"{backend} refuses"):
        select.choose(CUDA._replace(**asked), backend, named(arch))


@sources
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(("changes", "least"), [(ROPE, 65), (NVFP4 | {"soft_cap": True}, 33)])
def test_fa3_takes_many_rows_that_its_transform_warps_prepare(
    changes: Asked, least: int, head_dims: tuple[int, int], kv_source: str
) -> None:
    asked = changes | {"kv_source": kv_source} | dims(*head_dims)
    features = CUDA._replace(**asked)
    assert_faster(asked, "fa3", "sm_90a", least)
    assert least in capabilities.ROWS_CLASSES
    for arch in ("sm_80", "sm_100a", "sm_120a"):
        assert select.choose(features, arch=named(arch), load=Load(65)) is FA2
    assert select.choose(features, "fa2", HOPPER) is FA2
    for refused in (dims(72), dims(512)):
        with pytest.raises(NotSupported, match="fa3 refuses"):
            select.choose(features._replace(**refused), "fa3", HOPPER)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"per_head_scales": True},
        {"kv_source": "paged"},
        {"positive_scale": False},
        dims(64),
        dims(256),
        dims(80),
        dims(192, 128),
        ALIBI | {"soft_cap": True},
    ],
)
@pytest.mark.parametrize(
    ("backend", "arch"),
    [("fa3", "sm_90a"), ("fa4", "sm_100a"), ("fa4", "sm_103a"), ("fa2", "sm_120a"), ("fa2", "sm_121a")],
)
@pytest.mark.parametrize("rows", [1, 1000])
def test_one_backend_takes_fp8_queries(rows: int, backend: str, arch: str, asked: Asked) -> None:
    """However few the rows: no other backend supports fp8 q."""
    assert select.choose(CUDA._replace(**FP8_Q | asked), arch=named(arch), load=Load(rows)).name == backend


@pytest.mark.parametrize("o_dtype", FP8)
@pytest.mark.parametrize("asked", [{}, FP8_Q, {"kv_dtype": E4M3}, {"kv_source": "paged", "sinks": True}])
@pytest.mark.parametrize("rows", [1, 1000])
def test_fp8_output_is_for_fa3(rows: int, asked: Asked, o_dtype: torch.dtype) -> None:
    """However few the rows: no other backend writes it after a plan."""
    features = CUDA._replace(**asked, o_dtype=o_dtype)
    assert select.choose(features, arch=HOPPER, load=Load(rows)).name == "fa3"
    with pytest.raises(NotSupported, match="fa2 refuses output of an fp8 dtype"):
        select.choose(features, arch=AMPERE)


ODD_OUTPUT = "output of an fp8 dtype with a head dimension that is no multiple of 16"
PER_HEAD: tuple[Asked, str] = {"per_head_scales": True}, "per-head scales beside q of float16 or bfloat16"
# (asked, feature of the refusal)
REFUSED: dict[tuple[str, str], tuple[tuple[Asked, str], ...]] = {
    ("fa2", "sm_80"): (
        (FP8_Q, "q of an fp8 dtype, before compute capability 12.0"),
        PER_HEAD,
        (NVFP4 | dims(80), "NVFP4 k and v with a head dimension that is no multiple of 64"),
        (NVFP4 | dims(512), "NVFP4 k and v with head dimension 512"),
        ({"o_dtype": E4M3}, "output of an fp8 dtype"),
        (ROPE | {"head_dim_qk": 72}, "pos_encoding_mode ROPE_LLAMA with a head dimension that is no multiple of 16"),
        ({"head_dim_qk": 68}, "other head dimensions"),
        (dims(264, 128), "other head dimensions"),
        (dims(512, 256), "other head dimensions"),
    ),
    ("fa2", "sm_120a"): (
        (FP8_Q | {"head_dim_vo": 72}, "q of an fp8 dtype with a head dimension that is no multiple of 16"),
        (FP8_Q | dims(512), "q of an fp8 dtype with head dimension 512"),
        (FP8_Q | ROPE, "pos_encoding_mode ROPE_LLAMA with q of an fp8 dtype"),
        (FP8_Q | {"o_dtype": E4M3}, "output of an fp8 dtype"),
    ),
    ("fa3", "sm_90a"): (
        PER_HEAD,
        (FP8_Q | {"head_dim_vo": 72}, "k and v of an fp8 dtype with a head dimension that is no multiple of 16"),
        (FP8_Q | dims(512), "head dimension 512"),
        (FP8_Q | ROPE, "pos_encoding_mode ROPE_LLAMA with q of an fp8 dtype"),
        (FP8_Q | {"o_dtype": E4M3, "head_dim_vo": 72}, ODD_OUTPUT),
        (dims(72) | {"o_dtype": E4M3}, ODD_OUTPUT),
        (dims(72) | {"o_dtype": torch.float8_e5m2}, ODD_OUTPUT),
    ),
}


@pytest.mark.parametrize(
    ("backend", "arch", "asked", "feature"), [(*where, *row) for where, rows in REFUSED.items() for row in rows]
)
@pytest.mark.parametrize("by_name", [True, False])
def test_refusals(by_name: bool, backend: str, arch: str, asked: Asked, feature: str) -> None:
    """On a GPU nothing falls back to the reference by itself: it would be a thousand times slower."""
    with pytest.raises(NotSupported) as error:
        select.choose(CUDA._replace(**asked), backend if by_name else "auto", named(arch))
    refusals = [refusal for refusal in error.value.refusals if refusal[0] == backend]
    assert feature in {refusal[1] for refusal in refusals}
    assert all(all(refusal) for refusal in refusals)
    assert feature in str(error.value)


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


def test_cpu_tensors_run_on_the_reference() -> None:
    assert select.choose(CPU) is REFERENCE
    assert select.choose(CPU, "reference") is REFERENCE
    with pytest.raises(NotSupported, match="cpu tensors"):
        select.choose(CPU, "fa2")


def test_the_reference_is_there_for_cuda_when_named() -> None:
    assert select.choose(CUDA, "reference", HOPPER) is REFERENCE


@pytest.mark.parametrize("backend", sorted(capabilities.ELSEWHERE))
def test_backends_of_flashinfer_that_are_not_here(backend: str) -> None:
    with pytest.raises(NotSupported) as error:
        select.choose(CUDA, backend, HOPPER)
    (refusal,) = error.value.refusals
    assert refusal[0] == backend
    assert refusal[3] == 'backend="auto"'


def test_unknown_backend() -> None:
    choices = r"'auto', 'fa4', 'fa3', 'xqa', 'fa2', 'reference', 'emulator'"
    with pytest.raises(LayoutError, match=f"backend must be one of {choices}; got 'fa9'"):
        select.choose(CUDA, "fa9", HOPPER)


def test_explain_names_every_backend_and_reason() -> None:
    text = explain(CUDA, HOPPER)
    assert text.splitlines()[0].startswith("sm_90a; q bfloat16")
    assert "fa3: chosen" in text
    assert "fa2: able" in text
    assert "reference: able" in text
    one = torch.zeros(1, 32, 128).bfloat16()
    text = explain(Problem(Settings(CUDA), 1, 1, one, one, one, one, None), HOPPER)
    assert "fa3: able, passed over: 4 query rows per kv head are fewer than 65" in text
    assert "fa2: chosen" in text
    text = explain(CUDA._replace(q_dtype=E4M3, kv_dtype=E4M3), AMPERE)
    assert "fa2: refused\n    fa2 refuses q of an fp8 dtype" in text
    assert "no backend of a GPU takes this problem" in text
    assert "paged batch" in explain(CUDA._replace(kv_source="paged"), HOPPER).splitlines()[0]
    q = torch.zeros(1, 32, 128).bfloat16()
    text = explain(Problem(Settings(CPU), 1, 1, q, q, q, q, None))
    assert "fa2: refused\n    fa2 refuses cpu tensors" in text
    assert "reference: chosen" in text


def test_explain_takes_tensors_words_and_names_of_gpus() -> None:
    q, k = torch.zeros(4096, 8, 64).half(), torch.zeros(4096, 2, 64).half()
    features = CUDA._replace(q_dtype=q.dtype, kv_dtype=q.dtype, o_dtype=q.dtype, num_qo_heads=8, num_kv_heads=2)
    expected = explain(features._replace(head_dim_qk=64, head_dim_vo=64), HOPPER, rows=4 * 4096)
    assert explain((q, k, k), "h100", causal=True) == expected
    words = {"qo_len": 4096, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": "float16"}
    assert explain(**words, arch="sm_90a", causal=True) == expected
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
    ],
)
def test_explain_checks_its_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        explain(**arguments)


def test_chosen_has_a_reason() -> None:
    assert "fa2: chosen: no other backend of this GPU takes it" in explain(CUDA, AMPERE)
    assert "reference: chosen: CPU tensors run on it" in explain(CPU)
    text = explain(CUDA._replace(pos_encoding_mode="ROPE_LLAMA"), HOPPER)
    assert "Instead" not in text
    assert "fa4 refuses pos_encoding_mode ROPE_LLAMA: TMA brings q and k in unrotated." in text


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


@pytest.mark.parametrize("backend", capabilities.BACKENDS, ids=lambda backend: backend.name)
def test_backends_exist(backend: capabilities.Backend) -> None:
    assert callable((backends.FAMILIES | backends.OTHERS)[backend.name].prepare)


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
