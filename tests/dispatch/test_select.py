"""Selection: the one table decides, explains and documents."""

from __future__ import annotations

import itertools
import logging
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

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CUDA = Features(torch.device("cuda:0"), BF16, BF16, BF16, 32, 8, 128, 128)
CPU = CUDA._replace(device=torch.device("cpu"))
HOPPER, AMPERE = named("sm_90a"), named("sm_80")
FA2, FA3, XQA = (capabilities.BY_NAME[name] for name in ("fa2", "fa3", "xqa"))
REFERENCE = capabilities.BY_NAME["reference"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (16, 240), (192, 128), (256, 256), (512, 512)])
@pytest.mark.parametrize("dtype", HALF)
def test_fa2_takes_every_16_bit_problem(arch: str, head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    features = CUDA._replace(q_dtype=dtype, kv_dtype=dtype, head_dim_qk=head_dims[0], head_dim_vo=head_dims[1])
    for asked in (
        {},
        {"custom_mask": True, "sinks": True, "soft_cap": True, "positive_scale": False},
        {"pos_encoding_mode": "ROPE_LLAMA", "o_dtype": torch.float32},
        {"pos_encoding_mode": "ALIBI", "num_qo_heads": 7, "num_kv_heads": 1},
        {"kv_dtype": torch.float8_e5m2},
    ):
        assert select.choose(features._replace(**asked), arch=named(arch), load=Load(1)) is FA2


@pytest.mark.parametrize("kv_source", ["dense", "ragged", "paged"])
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (112, 112), (192, 128), (48, 16), (256, 256)])
@pytest.mark.parametrize(
    ("backend", "arch"), [("fa3", "sm_90a"), ("fa4", "sm_100a"), ("fa4", "sm_103a")], ids=lambda name: name
)
def test_persistent_kernels_take_many_rows(backend: str, arch: str, kv_source: str, head_dims: tuple[int, int]) -> None:
    features = CUDA._replace(head_dim_qk=head_dims[0], head_dim_vo=head_dims[1], kv_source=kv_source)
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"custom_mask": True, "sinks": True, "soft_cap": True, "positive_scale": False, "o_dtype": torch.float32},
        {"pos_encoding_mode": "ALIBI", "num_qo_heads": 7, "num_kv_heads": 1},
        {"multi_item": True},
    )
    able, on = capabilities.BY_NAME[backend], named(arch)
    for asked in changes:
        wanted = features._replace(**asked)
        assert select.choose(wanted, arch=on, load=Load(65)) is able
        assert select.choose(wanted, arch=on, load=Load(64)) is FA2
        assert select.choose(wanted, arch=named("sm_120a"), load=Load(65)) is FA2
        assert select.choose(wanted, backend, on, load=Load(1)) is able


@pytest.mark.parametrize("kv_source", ["dense", "ragged", "paged"])
@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize(("backend", "arch"), [("fa3", "sm_90a"), ("fa4", "sm_100a")])
def test_persistent_kernels_widen_8_bit_keys(backend: str, arch: str, kv_dtype: torch.dtype, kv_source: str) -> None:
    features = CUDA._replace(kv_dtype=kv_dtype, kv_source=kv_source)
    least = {"fa3": 33, "fa4": 65}[backend]
    assert select.choose(features, arch=named(arch), load=Load(least)).name == backend
    assert select.choose(features, arch=named(arch), load=Load(least - 1)) is FA2


@pytest.mark.parametrize(("backend", "arch"), [("fa3", "sm_100a"), ("fa4", "sm_90a"), ("fa4", "sm_120a")])
def test_kernels_of_one_architecture_run_nowhere_else(backend: str, arch: str) -> None:
    with pytest.raises(NotSupported, match=f"{backend} refuses {arch}: it runs on NVIDIA"):
        select.choose(CUDA, backend, named(arch))


@pytest.mark.parametrize(
    "asked",
    [
        {"pos_encoding_mode": "ROPE_LLAMA", "kv_dtype": E4M3},
        {"pos_encoding_mode": "ROPE_LLAMA", "kv_dtype": torch.uint8, "kv_block_scales": True},
        {"head_dim_qk": 512, "head_dim_vo": 512},
        {"expanded": True},
        {"kv_dtype": E4M3, "head_dim_vo": 72},
        {"kv_dtype": E4M3, "half_aligned_kv": True},
    ],
)
@pytest.mark.parametrize(("backend", "arch"), [("fa3", "sm_90a"), ("fa4", "sm_100a")])
def test_what_persistent_kernels_refuse_fa2_takes(backend: str, arch: str, asked: dict[str, Any]) -> None:
    assert select.choose(CUDA._replace(**asked), arch=named(arch)) is FA2
    with pytest.raises(NotSupported, match=f"{backend} refuses"):
        select.choose(CUDA._replace(**asked), backend, named(arch))


@pytest.mark.parametrize("kv_source", ["dense", "ragged", "paged"])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(
    "asked",
    [{"pos_encoding_mode": "ROPE_LLAMA"}, {"kv_dtype": torch.uint8, "kv_block_scales": True, "soft_cap": True}],
)
def test_fa3_takes_many_rows_that_its_transform_warps_prepare(
    asked: dict[str, Any], head_dims: tuple[int, int], kv_source: str
) -> None:
    features = CUDA._replace(head_dim_qk=head_dims[0], head_dim_vo=head_dims[1], kv_source=kv_source, **asked)
    least = capabilities.BY_NAME["fa3"].min_rows_of["nvfp4" if "kv_block_scales" in asked else "ROPE_LLAMA"]
    assert select.choose(features, arch=HOPPER, load=Load(least)).name == "fa3"
    assert select.choose(features, arch=HOPPER, load=Load(least - 1)) is FA2
    assert least in capabilities.rows_classes(features.kv_dtype)
    for arch in ("sm_80", "sm_100a", "sm_120a"):
        assert select.choose(features, arch=named(arch), load=Load(65)) is FA2
    for refused in ({"head_dim_qk": 72, "head_dim_vo": 72}, {"head_dim_qk": 512, "head_dim_vo": 512}):
        with pytest.raises(NotSupported, match="fa3 refuses"):
            select.choose(features._replace(**refused), "fa3", HOPPER)


FP8_Q = CUDA._replace(q_dtype=E4M3, kv_dtype=E4M3)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"per_head_scales": True},
        {"kv_source": "paged"},
        {"positive_scale": False},
        {"head_dim_qk": 64, "head_dim_vo": 64},
        {"head_dim_qk": 256, "head_dim_vo": 256},
        {"head_dim_qk": 80, "head_dim_vo": 80},
        {"head_dim_qk": 192, "head_dim_vo": 128},
        {"soft_cap": True, "pos_encoding_mode": "ALIBI"},
    ],
)
@pytest.mark.parametrize(
    ("backend", "arch"),
    [("fa3", "sm_90a"), ("fa4", "sm_100a"), ("fa4", "sm_103a"), ("fa2", "sm_120a"), ("fa2", "sm_121a")],
)
def test_one_backend_takes_fp8_queries(backend: str, arch: str, asked: dict[str, Any]) -> None:
    """However few the rows: no other backend supports fp8 q."""
    assert select.choose(FP8_Q._replace(**asked), arch=named(arch), load=Load(1)).name == backend
    assert select.choose(FP8_Q._replace(**asked), arch=named(arch), load=Load(1000)).name == backend


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_fa2_refuses_fp8_queries_without_instructions_for_them(arch: str) -> None:
    with pytest.raises(NotSupported, match=r"fa2 refuses q of an fp8 dtype, before compute capability 12\.0"):
        select.choose(FP8_Q, "fa2", named(arch))


@pytest.mark.parametrize(
    ("asked", "feature"),
    [
        ({"head_dim_vo": 72}, "q of an fp8 dtype with a head dimension that is no multiple of 16"),
        ({"head_dim_qk": 512, "head_dim_vo": 512}, "q of an fp8 dtype with head dimension 512"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode ROPE_LLAMA with q of an fp8 dtype"),
        ({"o_dtype": E4M3}, "output of an fp8 dtype"),
    ],
)
def test_what_fa2_refuses_of_fp8_queries(asked: dict[str, Any], feature: str) -> None:
    with pytest.raises(NotSupported, match=f"fa2 refuses {feature}"):
        select.choose(FP8_Q._replace(**asked), arch=named("sm_120a"))


@pytest.mark.parametrize(
    "asked",
    [
        {"head_dim_vo": 72},
        {"head_dim_qk": 512, "head_dim_vo": 512},
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"o_dtype": E4M3, "head_dim_vo": 72},
    ],
)
def test_what_fa3_refuses_of_fp8_queries(asked: dict[str, Any]) -> None:
    with pytest.raises(NotSupported, match="fa3 refuses"):
        select.choose(FP8_Q._replace(**asked), "fa3", HOPPER)
    with pytest.raises(NotSupported, match="fa3 refuses per-head scales beside"):
        select.choose(CUDA._replace(per_head_scales=True), "fa3", HOPPER)


DECODE = CUDA._replace(decode=True, kv_source="paged", kv_dtype=E4M3)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_source", ["dense", "paged"])
@pytest.mark.parametrize("kv_dtype", [*FP8, torch.uint8])
def test_xqa_takes_decode_over_narrow_keys(arch: str, kv_source: str, kv_dtype: torch.dtype) -> None:
    """As long as the rows of a request share two reads of its keys, three at head dimension 256."""
    narrow = DECODE._replace(kv_source=kv_source, kv_dtype=kv_dtype, kv_block_scales=kv_dtype == torch.uint8)
    for head_dim, most in ((64, 32), (128, 32), (256, 24)):
        features = narrow._replace(head_dim_qk=head_dim, head_dim_vo=head_dim, sinks=True, positive_scale=False)
        assert select.choose(features, arch=named(arch), load=Load(most)) is XQA
        assert select.choose(features, arch=named(arch), load=Load(most + 1)) is (
            FA3 if arch == "sm_90a" and most + 1 >= 33 else FA2
        )
        assert select.choose(features, "xqa", named(arch), load=Load(100)) is XQA
    assert select.choose(narrow._replace(decode=False), arch=named(arch), load=Load(1)) is FA2
    wide = narrow._replace(kv_dtype=BF16, kv_block_scales=False)
    assert select.choose(wide, arch=named(arch), load=Load(1)) is FA2
    assert select.choose(wide, "xqa", named(arch)) is XQA


@pytest.mark.parametrize(("head_dim", "most"), [(32, 16), (512, 16)])
@pytest.mark.parametrize("kv_dtype", [BF16, *FP8])
def test_xqa_takes_narrow_and_wide_heads(head_dim: int, most: int, kv_dtype: torch.dtype) -> None:
    features = DECODE._replace(kv_dtype=kv_dtype, head_dim_qk=head_dim, head_dim_vo=head_dim)
    for arch in map(named, ARCHS):
        assert select.choose(features, "xqa", arch) is XQA
        assert select.choose(features._replace(device_lengths=True), arch=arch, load=Load(1000)) is XQA
        if kv_dtype in FP8:
            assert select.choose(features, arch=arch, load=Load(most)) is XQA


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "taken"),
    [
        *((16, BF16, True), (72, BF16, True), (248, BF16, True), (8, BF16, False), (100, BF16, False)),
        *((304, BF16, True), (312, BF16, False), (520, BF16, False)),
        *((80, E4M3, True), (72, E4M3, False), (320, E4M3, True), (304, E4M3, False)),
        *((512, torch.uint8, True), (32, torch.uint8, False), (192, torch.uint8, False), (96, torch.uint8, False)),
    ],
)
def test_head_dims_of_xqa(head_dim: int, kv_dtype: torch.dtype, taken: bool) -> None:
    """A warp's columns of a row are whole chunks of 16 bytes; above 256 two warps share a row."""
    block_scales = kv_dtype == torch.uint8
    features = DECODE._replace(
        kv_dtype=kv_dtype, kv_block_scales=block_scales, head_dim_qk=head_dim, head_dim_vo=head_dim
    )
    assert (not select.reasons_against(XQA, features, HOPPER)) == taken


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "taken"),
    [(96, E4M3, True), (48, E4M3, False), (64, BF16, True), (112, BF16, True), (128, BF16, False)],
)
def test_auto_takes_xqa_where_it_was_measured_to_be_faster(head_dim: int, kv_dtype: torch.dtype, taken: bool) -> None:
    features = DECODE._replace(kv_dtype=kv_dtype, head_dim_qk=head_dim, head_dim_vo=head_dim)
    assert select.choose(features, arch=HOPPER, load=Load(4)) is (XQA if taken else FA2)
    bits = 8 * kv_dtype.itemsize
    passed_over = f"xqa: able, passed over: head dimension {head_dim} in {bits} bits" in explain(
        features, HOPPER, rows=4
    )
    assert passed_over is not taken


def test_auto_takes_a_backend_that_it_passes_over_if_no_other_is_able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", (FA3, XQA, REFERENCE))
    features = DECODE._replace(kv_dtype=BF16, pos_encoding_mode="NONE", head_dim_qk=512, head_dim_vo=512)
    assert select.choose(features, arch=AMPERE, load=Load(100)) is XQA
    assert "  xqa: chosen" in explain(features, AMPERE, rows=100)


def test_one_request_of_few_kv_heads_is_for_clusters() -> None:
    """On Hopper, where the kernel has clusters of CTAs, and with rows that share one read of the keys."""
    features = DECODE._replace(kv_dtype=BF16, num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, head_dim_vo=128)
    for changes, arch, rows, taken in (
        ({}, HOPPER, 4, XQA),
        ({}, HOPPER, 17, FA2),
        ({}, named("sm_80"), 4, FA2),
        ({"num_kv_heads": 16}, HOPPER, 2, FA2),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, HOPPER, 4, FA2),
        ({"head_dim_qk": 256, "head_dim_vo": 256, "num_kv_heads": 4}, HOPPER, 8, XQA),
        ({"head_dim_qk": 80, "head_dim_vo": 80}, HOPPER, 4, FA2),
    ):
        asked = features._replace(**changes)
        assert select.choose(asked, arch=arch, load=Load(rows, True)) is taken, (changes, arch.name, rows)
        assert select.choose(asked, arch=arch, load=Load(rows)) is FA2


def test_classes_of_rows_tell_what_auto_tells() -> None:
    wide = DECODE._replace(head_dim_qk=256, head_dim_vo=256)
    for features, alone in itertools.product((CUDA, DECODE, wide, wide._replace(kv_dtype=BF16)), (False, True)):
        group = features.num_qo_heads // features.num_kv_heads
        for qo_len in range(1, 70):
            load = select.load_class(features, qo_len, alone)
            assert load.rows is not None
            assert load.rows <= qo_len * group
            exact = select.choose(features, arch=HOPPER, load=Load(qo_len * group, alone))
            assert select.choose(features, arch=HOPPER, load=load) is exact


@pytest.mark.parametrize(
    "asked",
    [
        {"own_splits": True},
        {"soft_cap": True},
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"pos_encoding_mode": "ALIBI"},
        {"o_dtype": torch.float32},
        {"head_dim_qk": 192, "head_dim_vo": 128},
        {"large_cache": True},
        {"loose_scales": True},
        {"decode": False},
    ],
)
def test_what_xqa_refuses_fa2_takes(asked: dict[str, Any]) -> None:
    assert select.choose(DECODE._replace(**asked), arch=HOPPER, load=Load(4)) is FA2
    with pytest.raises(NotSupported, match="xqa refuses"):
        select.choose(DECODE._replace(**asked), "xqa", HOPPER)


ON_DEVICE = DECODE._replace(device_lengths=True)


@pytest.mark.parametrize("asked", [{}, {"kv_dtype": BF16}, {"draft_mask": True}, {"sinks": True, "expanded": True}])
def test_lengths_on_the_device_are_for_xqa(asked: dict[str, Any]) -> None:
    """However many rows and whatever the dtype of the keys: only XQA reads them there."""
    features = ON_DEVICE._replace(**asked)
    for arch in map(named, ARCHS):
        assert select.choose(features, arch=arch) is select.choose(features, "xqa", arch) is XQA
        assert select.choose(features, arch=arch, load=Load(1000)) is XQA
    assert select.load_class(features, 1000, True) == Load(0)
    assert select.choose(features._replace(device=torch.device("cpu"))) is REFERENCE
    for name in ("fa2", "fa3", "fa4"):
        with pytest.raises(
            NotSupported, match=f"{name} refuses lengths and page tables on the device.*a batch wrapper"
        ):
            select.choose(features, name, HOPPER)


def test_explain_of_lengths_on_the_device() -> None:
    lines = explain(ON_DEVICE._replace(kv_dtype=BF16, draft_mask=True), HOPPER, rows=1000).splitlines()
    assert lines[0].endswith("paged batch; device_lengths; draft_mask")
    assert "  xqa: chosen: no other backend of this GPU takes it" in lines
    assert "  fa2: refused" in lines
    assert sum("tree masks of draft tokens" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"head_dim_qk": 72, "head_dim_vo": 72}, "xqa refuses decode with head dimensions.*from 16 to 256"),
        ({"large_cache": True}, "xqa refuses paged k or v that span 64 GiB"),
        ({"loose_scales": True}, "xqa refuses block scales"),
    ],
)
def test_what_no_gpu_takes_of_lengths_on_the_device(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(NotSupported, match=words):
        select.choose(ON_DEVICE._replace(**asked), arch=HOPPER)


def test_fp8_output_needs_a_plan_less_call_and_compute_capability_9() -> None:
    features = ON_DEVICE._replace(o_dtype=E4M3)
    assert select.choose(features, arch=HOPPER) is XQA
    with pytest.raises(NotSupported, match=r"xqa refuses output of float8_e4m3fn.* before compute capability 9\.0"):
        select.choose(features, arch=AMPERE)
    with pytest.raises(NotSupported, match="xqa_batch_decode_with_kv_cache"):
        select.choose(features._replace(device_lengths=False), "xqa", HOPPER)


@pytest.mark.parametrize("o_dtype", FP8)
def test_fp8_output_is_for_fa3(o_dtype: torch.dtype) -> None:
    """However few the rows: no other backend writes it after a plan."""
    for asked in ({}, {"q_dtype": E4M3, "kv_dtype": E4M3}, {"kv_dtype": E4M3}, {"kv_source": "paged", "sinks": True}):
        features = CUDA._replace(o_dtype=o_dtype, **asked)  # type: ignore[arg-type]
        for rows in (1, 1000):
            assert select.choose(features, arch=HOPPER, load=Load(rows)).name == "fa3"
        with pytest.raises(NotSupported, match="fa2 refuses output of an fp8 dtype"):
            select.choose(features, arch=AMPERE)
    with pytest.raises(NotSupported, match="fa3 refuses output of an fp8 dtype with a head dimension"):
        select.choose(CUDA._replace(o_dtype=o_dtype, head_dim_qk=72, head_dim_vo=72), "fa3", HOPPER)


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("kv_source", ["dense", "ragged", "paged"])
def test_fa2_takes_nvfp4(kv_source: str, head_dims: tuple[int, int]) -> None:
    features = CUDA._replace(head_dim_qk=head_dims[0], head_dim_vo=head_dims[1], kv_source=kv_source)
    features = features._replace(kv_dtype=torch.uint8, kv_block_scales=True)
    assert select.choose(features, arch=AMPERE) is FA2
    assert select.choose(features, "fa2", HOPPER) is FA2


REFUSED_BY_FA2: list[tuple[dict[str, Any], str]] = [
    ({"q_dtype": E4M3, "kv_dtype": E4M3}, "q of an fp8 dtype, before compute capability 12.0"),
    (
        {"kv_dtype": torch.uint8, "kv_block_scales": True, "head_dim_qk": 80, "head_dim_vo": 80},
        "NVFP4 k and v with a head dimension that is no multiple of 64",
    ),
    ({"per_head_scales": True}, "per-head scales beside q of float16 or bfloat16"),
    ({"o_dtype": E4M3}, "output of an fp8 dtype"),
    (
        {"kv_dtype": torch.uint8, "kv_block_scales": True, "head_dim_qk": 512, "head_dim_vo": 512},
        "NVFP4 k and v with head dimension 512",
    ),
    (
        {"pos_encoding_mode": "ROPE_LLAMA", "head_dim_qk": 72},
        "pos_encoding_mode ROPE_LLAMA with a head dimension that is no multiple of 16",
    ),
    ({"head_dim_qk": 68}, "other head dimensions"),
    ({"head_dim_qk": 264, "head_dim_vo": 128}, "other head dimensions"),
    ({"head_dim_qk": 512, "head_dim_vo": 256}, "other head dimensions"),
]


@pytest.mark.parametrize(("asked", "feature"), REFUSED_BY_FA2)
@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_refusals_of_fa2(backend: str, asked: dict[str, Any], feature: str) -> None:
    """On a GPU nothing falls back to the reference by itself: it would be a thousand times slower."""
    with pytest.raises(NotSupported) as error:
        select.choose(CUDA._replace(**asked), backend, AMPERE)
    refusal = next(r for r in error.value.refusals if r[:2] == ("fa2", feature))
    assert all(refusal)
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


def test_decisions_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._prepared.cache_clear()
    select.chosen.cache_clear()
    q, kv = torch.zeros(3, 4, 16).half(), torch.zeros(7, 2, 16).half()
    out = torch.empty_like(q)
    features = Features(q.device, q.dtype, q.dtype, q.dtype, 4, 2, 16, 16)
    with caplog.at_level(logging.INFO, logger="cute_attn.dispatch.select"):
        for sm_scale in (1.0, 2.0, 1.0):
            backends.run(Problem(Settings(features, sm_scale=sm_scale), 3, 7, q, kv, kv, out, None))
    (record,) = caplog.records
    assert "auto: reference for cpu; q float16" in record.getMessage()


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
        ({"dtype": "bf16"}, "dtype must be a dtype or its name, got 'bf16'"),
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
    assert callable(backends.IMPLEMENTATIONS[backend.name].prepare)


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
