"""Selection of decode: which steps "auto" gives to XQA, by head dimension, cache, rows and lengths on the device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cute_attn import NotSupported, explain
from cute_attn.dispatch import select
from cute_attn.dispatch.capabilities import Backend, Load
from cute_attn.problem import Settings
from cute_attn.request.settings import FP8
from cute_attn.runtime.arch import ARCHS, Arch, named
from tests.dispatch.test_select import AMPERE, BF16, CUDA, E4M3, FA2, FA3, HOPPER, REFERENCE, XQA

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
        more = FA3 if arch == "sm_90a" and most == 32 else FA2
        assert select.choose(features, arch=named(arch), load=Load(most + 1)) is more
        assert select.choose(features, "xqa", named(arch), load=Load(100)) is XQA
    assert select.choose(narrow._replace(decode=False), arch=named(arch), load=Load(1)) is FA2
    wide = narrow._replace(kv_dtype=BF16, kv_block_scales=False)
    assert select.choose(wide, arch=named(arch), load=Load(1)) is (XQA if arch == "sm_90a" else FA2)
    assert select.choose(wide, "xqa", named(arch)) is XQA


@pytest.mark.parametrize("head_dim", [32, 80, 112, 512])
@pytest.mark.parametrize("kv_dtype", [BF16, *FP8])
def test_xqa_takes_narrow_and_wide_heads(head_dim: int, kv_dtype: torch.dtype) -> None:
    features = DECODE._replace(kv_dtype=kv_dtype, head_dim_qk=head_dim, head_dim_vo=head_dim)
    for arch in map(named, ARCHS):
        assert select.choose(features, "xqa", arch) is XQA
        assert select.choose(features._replace(device_lengths=True), arch=arch, load=Load(1000)) is XQA
        if kv_dtype in FP8:
            assert [select.choose(features, arch=arch, load=Load(rows)) for rows in (16, 17)] == [XQA, FA2]


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
    [(96, E4M3, True), (48, E4M3, False), (64, BF16, True), (112, BF16, True), (128, BF16, True), (80, BF16, False)],
)
def test_auto_takes_xqa_where_it_was_measured_to_be_faster(head_dim: int, kv_dtype: torch.dtype, taken: bool) -> None:
    features = DECODE._replace(kv_dtype=kv_dtype, head_dim_qk=head_dim, head_dim_vo=head_dim)
    bits, most = 8 * kv_dtype.itemsize, 16 if kv_dtype == BF16 else 32
    assert select.choose(features, arch=HOPPER, load=Load(most)) is (XQA if taken else FA2)
    assert select.choose(features, arch=HOPPER, load=Load(most + 1)) is not XQA
    passed_over = f"xqa: able, passed over: head dimension {head_dim} in {bits} bits" in explain(
        features, HOPPER, rows=4
    )
    assert passed_over is not taken


def test_auto_takes_a_backend_that_it_passes_over_if_no_other_is_able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", (FA3, XQA, REFERENCE))
    features = DECODE._replace(kv_dtype=BF16, pos_encoding_mode="NONE", head_dim_qk=512, head_dim_vo=512)
    assert select.choose(features, arch=AMPERE, load=Load(100)) is XQA
    assert "  xqa: chosen" in explain(features, AMPERE, rows=100)


WIDE = DECODE._replace(kv_dtype=BF16, num_qo_heads=32, num_kv_heads=4, head_dim_qk=256, head_dim_vo=256)


@pytest.mark.parametrize(
    ("changes", "arch", "q_len", "requests", "window", "taken"),
    [
        ({}, HOPPER, 1, 1, -1, XQA),
        ({}, HOPPER, 3, 1, -1, FA2),  # 24 rows
        ({}, named("sm_80"), 1, 1, -1, FA2),
        ({"num_kv_heads": 8}, HOPPER, 1, 1, -1, XQA),
        ({"num_kv_heads": 16}, HOPPER, 1, 4, -1, XQA),
        ({"num_kv_heads": 16}, HOPPER, 1, 5, -1, FA2),
        ({"head_dim_qk": 80, "head_dim_vo": 80}, HOPPER, 1, 1, -1, FA2),
        ({}, HOPPER, 1, 16, -1, XQA),
        ({}, HOPPER, 1, 17, -1, FA2),
        ({}, HOPPER, 1, 17, 4095, FA2),
        ({}, HOPPER, 1, 256, 511, XQA),
        ({}, HOPPER, 1, 256, 512, FA2),
        ({"head_dim_qk": 128, "head_dim_vo": 128}, HOPPER, 1, 256, -1, XQA),
    ],
)
def test_few_segments_and_short_windows_are_for_xqa(
    changes: dict[str, Any], arch: Arch, q_len: int, requests: int, window: int, taken: Backend
) -> None:
    """Over 16 bits at head dimension 256, on Hopper: few segments or short windows, whose rows share one read of the
    keys."""
    settings = Settings(WIDE._replace(**changes), window_left=window)
    load = select.load_of(settings, q_len, requests)
    assert select.choose(settings.features, arch=arch, load=load) is taken


def test_classes_of_rows_tell_what_auto_tells() -> None:
    wide = DECODE._replace(head_dim_qk=256, head_dim_vo=256)
    for features, requests in itertools.product((CUDA, DECODE, wide, wide._replace(kv_dtype=BF16)), (1, 2)):
        settings = Settings(features)
        for qo_len in range(1, 70):
            load, exact = select.load_class(settings, qo_len, requests), select.load_of(settings, qo_len, requests)
            assert load.rows is not None
            assert exact.rows is not None
            assert load.rows <= exact.rows
            assert select.choose(features, arch=HOPPER, load=load) is select.choose(features, arch=HOPPER, load=exact)


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
    assert select.load_class(Settings(features), 1000) == Load(0)
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


@pytest.mark.parametrize(
    ("most", "heads", "bound"),
    [
        *((1, (4, 1), 1), (2, (4, 1), 2), (3, (4, 1), 4), (4, (4, 1), 4), (8, (4, 1), 8), (9, (4, 1), 0)),
        *((3, (3, 1), 5), (5, (3, 1), 5), (2, (8, 8), 4), (33, (8, 8), 0), (1, (33, 1), 0), (1 << 62, (4, 1), 0)),
        *((0, (4, 1), 0), (-1, (4, 1), 0)),
    ],
)
def test_bounds_of_newest_tokens(most: int, heads: tuple[int, int], bound: int) -> None:
    """Those with equally many blocks of rows have one, so that their plans follow one another."""
    assert select.newest_bound(most, heads, causal=True) == bound
    assert select.newest_bound(most, heads, causal=False) == (bound if most == 1 else 0)
    assert [select.newest_bound(n, (4, 1), True, "xqa") for n in (8, 9, 16, 17)] == [8, 12, 16, 0]
