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
from tests.support.batch_case import dims

DECODE = CUDA._replace(decode=True, kv_source="paged", kv_dtype=E4M3)


MEASURED = {  # query rows of a request up to which XQA was measured to be faster, by keys and head dimension
    **{(dtype, dim): 16 for dtype in FP8 for dim in (32, 80, 112, 512)},
    **{(dtype, dim): 32 for dtype in (*FP8, torch.uint8) for dim in (64, 128)},
    **{(dtype, 256): 24 for dtype in (*FP8, torch.uint8)},
    **{(BF16, dim): 16 for dim in (64, 112)},
    (E4M3, 96): 32,
    (E4M3, 48): 0,
    (BF16, 80): 0,
    (BF16, 128): 16,
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("kv_dtype", "head_dim"), MEASURED)
def test_auto_takes_xqa_where_it_was_measured_to_be_faster(kv_dtype: torch.dtype, head_dim: int, arch: str) -> None:
    """As long as the rows of a request share two reads of its keys, three at head dimension 256."""
    scales = {"kv_dtype": kv_dtype, "kv_block_scales": kv_dtype == torch.uint8}
    features = DECODE._replace(**scales, **dims(head_dim), sinks=True, positive_scale=False)
    most = MEASURED[kv_dtype, head_dim] if (kv_dtype, head_dim) != (BF16, 128) or arch == "sm_90a" else 0
    more = FA3 if arch == "sm_90a" and most == 32 else FA2
    assert select.choose(features, arch=named(arch), load=Load(most + 1)) is more
    assert select.choose(features, "xqa", named(arch), load=Load(100)) is XQA
    assert select.choose(features._replace(device_lengths=True), arch=named(arch), load=Load(1000)) is XQA
    assert select.choose(features._replace(decode=False), arch=named(arch), load=Load(1)) is FA2
    passed_over = f"xqa: able, passed over: head dimension {head_dim} in {8 * kv_dtype.itemsize} bits"
    assert (passed_over in explain(features, named(arch), rows=4)) == (most == 0)
    if most:
        assert select.choose(features, arch=named(arch), load=Load(most)) is XQA


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
