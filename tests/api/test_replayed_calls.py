"""A call like an earlier one, with tensors at other addresses, launches what a call does that is checked in full."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import ArgumentError, ArgumentTypeError, flash_mla
from cute_attn.integrations import latent
from cute_attn.request import block_sparse, nvfp4, operands
from cute_attn.wrappers import calls
from perf.pretended_gpu import NullDriver
from tests.support.entry_points import (
    CACHE,
    CACHES,
    DIM,
    ENTRIES,
    OTHERS,
    PAIR,
    SCALE_PAIR,
    Entry,
    Planned,
    direct,
    without,
    zeros,
)
from tests.support.launch_corpus import RecordingDriver, parameters, pretended
from tests.support.mla_case import LATENT, MlaCase

# NVFP4 caches in a tensor each, by heads.
XQA = direct(cute_attn.xqa_batch_decode_with_kv_cache, kv_layout="HND", max_seq_len=16)
IN_ONE = {"kv_cache": zeros(4, 2, 2, 16, 32), "kv_cache_sf": zeros(4, 2, 2, 16, 4)}
NVFP4 = without(ENTRIES["xqa, NVFP4"].tensors, *CACHE[1], "k_sf of kv_cache_sf", "v_sf of kv_cache_sf") | IN_ONE
REPLAYED = {name: entry for name, entry in ENTRIES.items() if name not in OTHERS or name.startswith("append")}
PREFILL = ("trtllm context", "trtllm ragged", "trtllm fmha", "trtllm fmha, pages")  # wrappers keep their workspace
REPLAYED |= {"xqa, NVFP4, one cache": ENTRIES["xqa, NVFP4"]._replace(tensors=NVFP4, begin=XQA)}


def by_vllm(case: MlaCase) -> Entry:
    """Latent attention as vLLM calls it, with a row of padding."""

    def call(given: Any) -> Any:
        step = 5, 3, given["table"], given["lens"], given["bounds"], zeros(32 << 20)
        return latent.decode(given["q"], given["cache"], latent.LatentDecodes(*step), 0.1, 0.5, return_lse=True)

    given = {"q": case.q, "cache": case.cache, "table": case.table, "lens": case.seq_lens, "bounds": case.qo_indptr}
    return Entry(given, lambda *_: call)


def by_flash_mla(case: MlaCase) -> Entry:
    """Latent attention by FlashMLA's names."""
    cache = case.byte_rows() if case.wide else case.cache[:, :, None]
    given = {"q": case.q.unflatten(0, (2, 3)), "k_cache": cache}
    given |= {"block_table": case.table, "cache_seqlens": case.seq_lens}
    options = {"head_dim_v": LATENT, "causal": True, "is_fp8_kvcache": case.wide}
    return Entry(given, direct(flash_mla.flash_mla_with_kvcache, **options))


def append_to_halves(given: Any) -> None:
    """An append to caches that are halves of one tensor."""
    halves = {name: given[name].unbind(1) for name in (PAIR[0], SCALE_PAIR[0])}
    cute_attn.nvfp4_quantize_append_paged_kv_cache(**{**given, **halves})


ROWS = without(ENTRIES["append NVFP4"].tensors, *PAIR[1], *SCALE_PAIR[1])
BOTH = ROWS | {PAIR[0]: zeros(4, 2, 16, 2, 32), SCALE_PAIR[0]: zeros(4, 2, 16, 2, 4)}
REPLAYED["append, one cache"] = ENTRIES["append NVFP4"]._replace(tensors=BOTH)
REPLAYED["append, halves of a cache"] = Entry(BOTH, lambda *_: append_to_halves)
DRAFTS = MlaCase(q_lens=(3, 3), kv_lens=(70, 40), page_size=64)
REPLAYED |= {"latent, vLLM": by_vllm(DRAFTS), "latent, FlashMLA": by_flash_mla(DRAFTS)}
BYTES = MlaCase(q_lens=(3, 3), kv_lens=(70, 40), page_size=64, narrow=True, grouped=True, wide=True)
REPLAYED |= {"latent, rows of bytes": by_flash_mla(BYTES)}
CASES = [(name, "auto") for name in REPLAYED]
CASES += [(f"{name}{kind}", "fa3") for name in ("single prefill", "paged", "ragged") for kind in ("", ", scales")]
CASES += [(f"{name} mask", "fa3") for name in ("single prefill, packed", "paged,", "ragged,")]
CASES += [(name, backend) for name in ("single decode, scales", "decode, scales") for backend in ("fa2", "xqa")]


def launched(driver: RecordingDriver, call: Any, given: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
    """The launches of a call, their memory by the names of its tensors and results, and the forms of the results. The
    planner kernel runs in the first call alone.
    """
    driver.recorded.clear()
    found = call({**given, **options})
    results = found if isinstance(found, tuple) else () if found is None else (found,)
    names = given | (call.memory if isinstance(call, Planned) else {})
    names |= {f"result {i}": x for i, x in enumerate(results)}
    launches = [
        (x.grid, x.artifact.spec, parameters(x, names)) for x in driver.recorded if x.artifact.spec["kernel"] != "plan"
    ]
    return launches, [(x.shape, x.dtype, x.stride(), any(x is y for y in given.values())) for x in results]


@pytest.mark.parametrize("new", [False, True], ids=["buffers", "new results"])
@pytest.mark.parametrize(("name", "backend"), CASES, ids=["-".join(case) for case in CASES])
def test_launches(name: str, backend: str, new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, driver, replay = REPLAYED[name], RecordingDriver(), calls.replay
    replays: list[Any] = []
    kept: list[Any] = []  # so that no address comes twice
    copied = block_sparse.rows_by_kv_head
    monkeypatch.setattr(block_sparse, "rows_by_kv_head", lambda *a: kept.append(copied(*a)) or kept[-1])
    with pretended(driver):
        call = entry.begin(entry.tensors, backend)
        same = {*entry.planned, "workspace_buffer" if name in PREFILL else ""}
        for i in range(3):
            given = {key: x if key in same else x.clone() for key, x in entry.tensors.items()}
            options = {}
            if new:
                options = {"return_lse": True} if "lse" in given and name != "mixed" else {}
                given = without(given, "out", "lse")
            kept.append(given)
            monkeypatch.setattr(calls, "replay", lambda *a, **k: replays.append(replay(*a, **k)) or replays[-1])
            repeated = launched(driver, call, given, options)
            assert len([x for x in replays if x is not None]) == i
            monkeypatch.setattr(calls, "replay", lambda *a, **k: None)
            assert repeated == launched(driver, call, given, options)
            assert repeated[0]


def test_scales_of_appends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_is_number", lambda x: False)
    monkeypatch.setattr(nvfp4, "scale_of", lambda name, value, *_: value)
    test_launches("append NVFP4", "auto", False, monkeypatch)


@pytest.mark.parametrize("name", ["append NVFP4", "single prefill, scales"])
def test_scales_on_the_cpu_that_need_gradients(name: str) -> None:
    """They are numbers of a launch without gradients, read in every call."""
    entry, driver = ENTRIES[name], RecordingDriver()
    with pretended(driver), torch.no_grad():
        call = entry.begin(entry.tensors, "auto")
        for value in ("0.5", "0.25"):
            scale = torch.full((1,), float(value), dtype=torch.float32, requires_grad=True)
            [(_, _, of_launch)], _ = launched(driver, call, {**entry.tensors, "v_scale": scale}, {})
            assert of_launch["v_scale"] == value


def test_appends_to_values_behind_keys() -> None:
    """Values are checked in every call, and no call runs the kernel of an earlier one that had odd addresses."""
    entry, driver, needs_grad = ENTRIES["append"], RecordingDriver(), lambda x: x.detach().requires_grad_()
    k, v = torch.zeros_like(torch.stack(list(CACHES.values()), 1)).unbind(1)
    odd = torch.cat((k.flatten(),) * 2)[1 : 1 + 3 * k[0, 0].numel()].view(3, *k.shape[2:])
    with pretended(driver):
        call, given = entry.begin(entry.tensors, "auto"), entry.tensors | dict(zip(CACHES, (k, v), strict=True))
        for rows, access in ((odd, 2), (entry.tensors["append_key"], 16)):
            [(_, spec, _)], _ = launched(driver, call, given | {"append_key": rows}, {})
            assert spec["access"] == access
        for view, error in ((torch._neg_view, "negative view"), (needs_grad, "require grad")):
            with pytest.raises(ArgumentError, match=f"v of paged_kv_cache .*{error}"):
                call(given | {PAIR[1][1]: view(v)})


def test_rows_that_kernels_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied in every call, also where rows by kv head are the query's own memory."""
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    entry, driver = ENTRIES["variable blocks"], RecordingDriver()
    q = torch.cat((entry.tensors["q"],) * 2, dim=2)[:, :, : DIM + 1].contiguous()[:, :, :DIM]
    with pretended(driver):
        call, given = entry.begin(entry.tensors, "auto"), entry.tensors | {"q": q}
        assert launched(driver, call, given, {}) == launched(driver, call, given, {})


@pytest.mark.parametrize("scales", [(), (None, None), torch.ones(8), torch.ones(4, 3), 1.0], ids=str)
@pytest.mark.parametrize("name", ["single prefill", "paged", "ragged", "decode", "xqa", "trtllm"])
def test_block_scales_after_calls_without_them(name: str, scales: Any) -> None:
    """They are refused like those of a first call."""
    entry = ENTRIES[name]
    with pretended(NullDriver()):
        call = entry.begin(entry.tensors, "auto")
        for _ in range(2):
            call(entry.tensors)
        with pytest.raises((ArgumentError, ArgumentTypeError), match="kv_cache_sf"):
            call({**entry.tensors, "kv_cache_sf": scales})


@pytest.mark.parametrize("name", ["single prefill", "paged", "trtllm, lse by heads"])
@pytest.mark.parametrize("written", ["out", "lse"])
def test_outputs_that_only_inference_mode_may_write(name: str, written: str) -> None:
    entry = ENTRIES[name]
    with torch.inference_mode():
        of_inference = entry.tensors[written].clone()
    with pretended(NullDriver()):
        call = entry.begin(entry.tensors, "auto")
        call(entry.tensors)
        with pytest.raises(ArgumentError, match=f"{written} is written and must not be an inference tensor"):
            call({**entry.tensors, written: of_inference})


@pytest.mark.parametrize("name", ["paged", "trtllm fmha, pages", "xqa", "trtllm"])
def test_one_cache_twice_is_no_cache(name: str) -> None:
    """After calls with that cache of keys and values."""
    entry = ENTRIES.get(f"{name}, one cache", ENTRIES[name])
    place = "the cache" if "the cache" in entry.tensors else "kv_cache"
    with pretended(NullDriver()):
        call = entry.begin(entry.tensors, "auto")
        call(entry.tensors)
        for count in (1, 2):
            with pytest.raises((ArgumentError, ArgumentTypeError), match="cache"):
                call({**entry.tensors, place: (entry.tensors[place],) * count})
