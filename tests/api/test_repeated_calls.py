"""Repeated calls reuse what the first one decided, and nothing that they would decide otherwise."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import single_decode_with_kv_cache, single_prefill_with_kv_cache
from cute_attn.errors import ArgumentError
from cute_attn.kernels.host import single as host_single
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.problem import NO_EXTRAS, Problem
from cute_attn.request import settings as request_settings
from cute_attn.request import single as single_request
from cute_attn.request.settings import Call
from cute_attn.wrappers import calls
from tests.support.launch_corpus import Launched, RecordingDriver, pretended
from tests.support.threads import in_threads

HALF = torch.float16


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Empty memos before and after each test."""
    for forget in (calls.UNPLANNED.clear, request_settings.call_settings.kept.cache_clear):
        forget()
    yield
    for forget in (calls.UNPLANNED.clear, request_settings.call_settings.kept.cache_clear):
        forget()


def tensors(qo_len: int = 3, kv_len: int = 7, heads: tuple[int, int] = (4, 2), dim: int = 16) -> dict[str, Any]:
    q = torch.randn(qo_len, heads[0], dim).half()
    k, v = torch.randn(2, kv_len, heads[1], dim).half()
    return {"q": q, "k": k, "v": v}


def problem(**arguments: Any) -> Problem:
    return single_request.problem(Call(**{**tensors(), **arguments}))


# ---- memoised settings equal those computed from scratch

OPTIONS: dict[str, tuple[Any, ...]] = {
    "kv_layout": ("NHD", "HND"),
    "pos_encoding_mode": ("NONE", "ROPE_LLAMA", "ALIBI"),
    "causal": (False, True),
    "window_left": (-1, 0, 1, 2, -7, 10**30, np.int64(1)),
    "logits_soft_cap": (None, 0.0, 1, 1.0, -1.0, 2.5),
    "sm_scale": (None, 0.25, 0, 0.0, -0.0, 1, 1.0, -1.0, np.float32(1.0)),
    "rope_scale": (None, 1, 1.0, 2.0),
    "rope_theta": (None, 1, 1.0, 1e4),
    "q_scale": (None, 1, 1.0, -1.0, 0.0),
    "k_scale": (None, 1, 1.0, 2.0, torch.tensor(1.0), torch.tensor(2.0)),
    "v_scale": (None, 1, 1.0, 0.0, -0.0, -2.0, torch.tensor(-2.0)),
    "o_dtype": (None, torch.float16, torch.bfloat16, torch.float32),
    "return_lse": (False, True),
    "enable_pdl": (None, True, False),
    "lse_base": ("log2", "ln"),
}


def decided(name: str, value: Any) -> str:
    """The settings of a square problem, that both layouts fit; `repr` tells 0.0 from -0.0 and 1 from True."""
    return repr(problem(**tensors(kv_len=2), **{name: value}).settings)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_told_apart(name: str) -> None:
    alone = []
    for value in OPTIONS[name]:
        request_settings.call_settings.kept.cache_clear()
        alone.append(decided(name, value))
    request_settings.call_settings.kept.cache_clear()
    for _ in range(2):
        assert [decided(name, value) for value in OPTIONS[name]] == alone
        assert [decided(name, value) for value in reversed(OPTIONS[name])] == alone[::-1]


def test_every_option_is_tried() -> None:
    assert tuple(OPTIONS) == Call._fields[len(request_settings.NOT_OPTIONS) :]


@pytest.mark.parametrize(
    "arguments",
    [
        {"sinks": torch.zeros(4)},
        {"custom_mask": torch.ones(3, 7, dtype=torch.bool)},
        {"packed_custom_mask": torch.zeros(3, dtype=torch.uint8)},
        {"head_scales": (torch.ones(4), None, None)},
        tensors(heads=(4, 1)),
        tensors(heads=(8, 2)),
        tensors(dim=32),
        {"v": torch.zeros(7, 2, 8, dtype=HALF)},
        {name: tensor.bfloat16() for name, tensor in tensors().items()},
        {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors().items()},
        {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors().items() if name != "q"},
        {**tensors(), "q": torch.zeros(4, 16, dtype=HALF), "decode": True},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_structures_are_told_apart(arguments: dict[str, Any]) -> None:
    alone = problem(**arguments)
    request_settings.call_settings.kept.cache_clear()
    plain = problem()
    again = problem(**arguments)
    assert again.settings == alone.settings
    assert problem().settings == plain.settings
    assert [x is None for x in again.extras] == [x is None for x in alone.extras]
    assert again.out.shape == alone.out.shape


class Fickle:
    """An integer that changes its value, but not its hash."""

    value = 1

    def __index__(self) -> int:
        return self.value


def test_values_that_may_change_are_not_remembered() -> None:
    window, array = Fickle(), np.array(3)
    assert problem(window_left=window).settings.window_left == 1
    window.value = 2
    assert problem(window_left=window).settings.window_left == 2
    assert problem(window_left=array).settings.window_left == 3  # an array has no hash
    assert request_settings.call_settings.kept.cache_info().currsize == 0


def test_scales_on_the_cpu_are_read_in_every_call() -> None:
    scale = torch.tensor(0.5)
    assert problem(k_scale=scale, sm_scale=1.0, v_scale=scale).settings[5:7] == (0.5, 0.5)
    scale.fill_(2.0)
    assert problem(k_scale=scale, sm_scale=1.0, v_scale=scale).settings[5:7] == (2.0, 2.0)


def test_scales_on_the_device_have_no_known_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a number decides more than a tensor does. "meta" tensors stand for a GPU's."""
    monkeypatch.setattr(request_settings, "DEVICES", ("meta",))
    given = {name: tensor.to("meta") for name, tensor in tensors().items()}
    scale = torch.ones(1, device="meta")
    for _ in range(2):
        with_number, with_tensor = problem(**given, k_scale=2.0), problem(**given, k_scale=scale, v_scale=scale)
        assert with_number.settings.features.positive_scale
        assert with_number.extras == NO_EXTRAS
        assert not with_tensor.settings.features.positive_scale
        assert with_tensor.extras.scale0 is with_tensor.extras.v_scale is scale
        assert with_tensor.settings.sm_scale == with_number.settings.sm_scale / 2


def test_a_flat_custom_mask_is_the_same_mask() -> None:
    given, mask = tensors(), torch.rand(3, 7) < 0.5
    out = single_prefill_with_kv_cache(**given, custom_mask=mask)
    assert torch.equal(single_prefill_with_kv_cache(**given, custom_mask=mask.flatten()), out)
    assert not torch.equal(out, single_prefill_with_kv_cache(**given))


# ---- the same through the launches

BITS, BOOLS = torch.zeros(6, dtype=torch.uint8), torch.ones(48, dtype=torch.bool)
NVFP4 = {name: torch.zeros(16, 2, 32, dtype=torch.uint8) for name in "kv"}
SIZED_BY_KEYS = {
    "packed_custom_mask": {"packed_custom_mask": BITS},
    "custom_mask": {"custom_mask": BOOLS},
    "k_sf": NVFP4 | {"kv_cache_sf": (torch.zeros(16, 2, 4, dtype=torch.float8_e4m3fn),) * 2},
}


@pytest.mark.parametrize("name", SIZED_BY_KEYS)
def test_masks_and_block_scales_of_another_number_of_keys(name: str, driver: RecordingDriver) -> None:
    given = {**tensors(kv_len=16, dim=64), **SIZED_BY_KEYS[name]}
    for _ in range(2):
        single_prefill_with_kv_cache(**given)
    with pytest.raises(ArgumentError, match=name):
        single_prefill_with_kv_cache(**{**given, **{x: torch.cat((given[x], given[x])) for x in "kv"}})


def test_kinds_of_masks_are_told_apart(driver: RecordingDriver) -> None:
    given = tensors(kv_len=16, dim=64)
    for right in (SIZED_BY_KEYS["packed_custom_mask"], SIZED_BY_KEYS["custom_mask"]):
        single_prefill_with_kv_cache(**given, **right)
    both = {"packed_custom_mask": BITS, "custom_mask": BITS}
    for wrong in ({"custom_mask": BITS}, {"packed_custom_mask": BOOLS}, both):
        with pytest.raises(ArgumentError, match="custom_mask must"):
            single_prefill_with_kv_cache(**given, **wrong)


class SlowDriver(RecordingDriver):
    """Lets other threads run, as the real call does."""

    def cuLaunchKernelEx(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        time.sleep(1e-4)
        return super().cuLaunchKernelEx(*arguments)


def numbers(launched: Launched, *names: str) -> tuple[int, ...]:
    """Return integers that a launch passed."""
    return tuple(int.from_bytes(launched.values[name], "little", signed=True) for name in names)


def test_a_growing_cache_decides_its_settings_once(driver: RecordingDriver) -> None:
    """Decode over a growing cache: every launch has its own length. Numbers: `tests/wrappers/test_single_calls.py`."""
    given = tensors(kv_len=700, dim=64)
    q, k, v = given["q"][0], given["k"], given["v"]
    kv_lens = (0, 1, 2, 63, 64, 65, 699, 700, 64)
    for kv_len, window_left in itertools.product(kv_lens, (-1, 20)):
        single_decode_with_kv_cache(q, k[:kv_len], v[:kv_len], window_left=window_left, backend="fa2")
    launched = [launch for launch in driver.recorded if launch.artifact.spec["kernel"] == "fa2"]
    assert request_settings.call_settings.kept.cache_info().currsize == 2
    assert [numbers(launch, "kv_len") for launch in launched] == [(n,) for n in kv_lens for _ in range(2)]
    assert {launch.grid[2] for launch in launched} > {1}  # whole and split


def test_threads_and_streams_share_memos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch carries the addresses, numbers and stream of one call, while others are under way."""
    own = threading.local()
    monkeypatch.setattr(host_single, "current_stream", lambda index: own.stream)
    expected: list[tuple[int, ...]] = []
    kept: list[dict[str, Any]] = []

    def work(stream: int) -> None:
        own.stream, causal = stream, stream % 2 == 0
        given = tensors(qo_len=100, kv_len=100 + stream, dim=64)
        kept.append(given)  # or another thread would get the same addresses
        for offset in range(50):
            q = given["q"][offset:]
            right = 100 + stream - len(q) if causal else UNBOUNDED
            expected.append((stream, q.data_ptr(), len(q), 100 + stream, right))
            single_prefill_with_kv_cache(q, given["k"], given["v"], causal=causal, backend="fa2")

    slow = SlowDriver()
    with pretended(slow):
        in_threads(work, range(1, 5))
    found = [(launch.stream, *numbers(launch, "q", "qo_len", "kv_len", "right")) for launch in slow.recorded]
    assert sorted(found) == sorted(expected)
    assert len(found) == 200


# ---- what is kept


@pytest.mark.usefixtures("driver")
def test_no_tensor_is_kept_alive() -> None:
    given = {
        **tensors(),
        "out": torch.empty(3, 4, 16, dtype=HALF),
        "lse": torch.empty(3, 4),
        "sinks": torch.zeros(4),
        "k_scale": torch.ones(1),
        "custom_mask": torch.ones(3, 7, dtype=torch.bool),
    }
    references = [weakref.ref(tensor) for tensor in given.values()]
    single_prefill_with_kv_cache(**given)
    wrong = torch.ones(1)
    references.append(weakref.ref(wrong))
    for name in ("sm_scale", "window_left", "causal", "o_dtype", "kv_layout"):
        with pytest.raises(ValueError, match=name):
            single_prefill_with_kv_cache(**{**given, name: wrong})
    with pytest.raises(TypeError, match="not alike"):
        calls.interned(1.0, (None, wrong))
    q, k, v = tensors(kv_len=300, dim=64).values()
    for backend, kv_len in itertools.product(("fa2", "xqa"), (100, 100, 100, 101)):  # and replays
        out = single_decode_with_kv_cache(q[0], k[:kv_len], v[:kv_len], backend=backend)
        references += map(weakref.ref, (q, k, v, out))
    del given, wrong, q, k, v, out
    gc.collect()
    assert not [reference for reference in references if reference() is not None]
