"""Replays of single calls: the numbers of a call over any number of keys, and an error wherever a call that is checked
in full raises one. Their launches: `tests/api/test_replayed_calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, single_decode_with_kv_cache, single_prefill_with_kv_cache
from cute_attn.emulator.settings import using
from cute_attn.request import single
from cute_attn.wrappers import calls
from tests.support.noted import noted

HEADS, HEAD_DIM = (4, 2), 64


@pytest.fixture(autouse=True)
def full_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls that were checked in full; no call is cached before and after."""
    calls.UNPLANNED.clear()
    yield noted(monkeypatch, single, "problem")
    calls.UNPLANNED.clear()


def operands(qo_len: int | None, kv_len: int, layout: str = "NHD") -> Any:
    q = torch.randn(*(() if qo_len is None else (qo_len,)), HEADS[0], HEAD_DIM).half()
    k, v = torch.randn(2, kv_len, HEADS[1], HEAD_DIM).half()
    return (q, k, v) if layout == "NHD" else (q, k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())


def compare(found: Any, wanted: Any) -> None:
    for x, y in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, wanted)), strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, atol=4e-3, rtol=4e-3)


GROWING = {
    "fa2 decode": ("fa2", None, (200, 201, 700, 1, 700, 700, 701, 33), {"return_lse": True, "window_left": 600}),
    "fa2 append": ("fa2", 5, (40, 41, 900, 42, 42, 42), {"causal": True, "kv_layout": "HND"}),
    "fa3 append": ("fa3", 40, (60, 500, 70, 71, 40, 71), {"causal": True, "kv_layout": "HND", "return_lse": True}),
    "xqa decode": ("xqa", None, (200, 201, 202, 0, 2000, 5000, 2, 202), {"return_lse": True, "q_scale": 0.5}),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", GROWING)
def test_replays_take_any_number_of_keys(name: str, full_checks: list[Any]) -> None:
    """Of a cache within a larger one, with whole and split keys in turn; 0 and 1 keys are checked in full. Last come
    buffers of the caller.
    """
    kernels, qo_len, kv_lens, options = GROWING[name]
    function = single_decode_with_kv_cache if qo_len is None else single_prefill_with_kv_cache
    torch.manual_seed(0)
    layout = options.get("kv_layout", "NHD")
    with using("sm_90a", kernels=kernels, sms=4):
        for i, kv_len in enumerate(kv_lens):
            q, *caches = operands(qo_len, max(kv_lens), layout)
            k, v = (x[:, :kv_len] if layout == "HND" else x[:kv_len] for x in caches)
            wanted = function(q, k, v, backend="reference", **options)
            full_checks.clear()
            compare(function(q, k, v, backend="emulator", **options), wanted)
            assert len(full_checks) == (i < 1 or kv_len < 2)
        for i in range(3):
            out = torch.empty_like(q)
            full_checks.clear()
            found = function(q, k, v, backend="emulator", out=out, **options)
            assert (found[0] if isinstance(found, tuple) else found) is out
            compare(found, wanted)
            assert len(full_checks) == (i < 1)


@pytest.mark.emulator
def test_a_replay_runs_on_the_gpu_that_is_emulated() -> None:
    x = operands(3, 20)
    for arch in ("sm_80", "sm_80", "sm_80", "sm_90a", "sm_80"):
        with using(arch, kernels="fa2") as emulation:
            single_prefill_with_kv_cache(*x, backend="emulator")
        assert [record.arch for record in emulation.records] == [arch]


# ---- on a pretended GPU


def cached(x: Any, **options: Any) -> None:
    """Makes a call twice: the second is a replay."""
    for _ in range(2):
        single_prefill_with_kv_cache(*x, **options)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_buffers_among_later_keys_are_refused_once_these_are_read(kv_layout: str, full_checks: list[Any]) -> None:
    q, k, v = operands(2, 30, kv_layout)
    out = (k[1, 20:28] if kv_layout == "HND" else k[20:24]).view(q.shape)

    def call(kv_len: int) -> None:
        keys = (x[:, :kv_len] if kv_layout == "HND" else x[:kv_len] for x in (k, v))
        single_prefill_with_kv_cache(q, *keys, kv_layout=kv_layout, out=out)

    for kv_len in (10, 10, 10, 20):
        call(kv_len)
    assert len(full_checks) == 1
    with pytest.raises(ArgumentError, match="out must not share memory with k"):
        call(21)


@pytest.mark.usefixtures("driver")
def test_layouts_dtypes_and_tensors_as_options_are_no_replays(full_checks: list[Any]) -> None:
    q, k, v = operands(3, 20)
    cached((q, k, v))
    full_checks.clear()
    wide = torch.empty(3, HEADS[0], 2 * HEAD_DIM, dtype=q.dtype)[..., :HEAD_DIM].copy_(q)
    for call in (
        lambda: single_prefill_with_kv_cache(wide, k, v),
        lambda: single_prefill_with_kv_cache(q.bfloat16(), k.bfloat16(), v.bfloat16()),
        lambda: single_prefill_with_kv_cache(q, k[:1], v[:1]),
        lambda: single_prefill_with_kv_cache(q, k, v, sinks=torch.zeros(HEADS[0])),
        lambda: single_prefill_with_kv_cache(q, k, v, custom_mask=torch.ones(3, 20, dtype=torch.bool)),
        lambda: single_prefill_with_kv_cache(q, k, v, lse_base="ln"),
    ):
        call()
    assert len(full_checks) == 6
    for scale in (0.5, 0.5, 0.25, 0.25):  # of tensors on the CPU the value counts
        single_prefill_with_kv_cache(q, k, v, k_scale=torch.tensor(scale))
    assert len(full_checks) == 8
