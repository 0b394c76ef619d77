"""The parts of the vLLM backend that need no vLLM: cache views and writes, the split of a batch, layers, refusals.

Attention is compared with its formula in fp64, on caches in both of vLLM's memory orders.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from cute_attn import emulator
from cute_attn.dispatch import append
from cute_attn.errors import ArgumentError, NotSupported
from cute_attn.integrations import vllm as plugin
from cute_attn.integrations.vllm import attention as layers
from cute_attn.integrations.vllm import metadata as steps
from cute_attn.integrations.vllm import support
from cute_attn.integrations.vllm.attention import LayerAttention, has_standard_slopes
from cute_attn.integrations.vllm.cache import views
from cute_attn.integrations.vllm.metadata import Batch, Spans, split_decodes
from cute_attn.integrations.vllm.support import Layer
from cute_attn.prefill import BatchPrefillWithPagedKVCacheWrapper
from tests.support.dense_attention import assert_near
from tests.support.emulated_calls import emulated_append
from tests.support.engine_case import Graph
from tests.support.executors import needs_gpu
from tests.support.noted import noted
from tests.support.paged_cache import ends
from tests.support.vllm_case import UNTOUCHED, Step

BF16 = torch.bfloat16
LLAMA = Layer(4, 64, 0.125, 2)
MIXED = [(1, 37), (1, 5), (20, 20), (7, 50)]  # two decodes, a prefill, an extension


# ---- layers

IMAGES = {2: [(3, 9), (12, 18)], 3: [(40, 46)], 0: [(4, 20)]}


def step(requests: Any = MIXED, base: Layer = LLAMA, layer: Any = None, **fields: Any) -> Callable[..., Step]:
    """Make a step on a device. `layer`: changes of the layer's numbers."""
    return functools.partial(Step, requests, base._replace(**(layer or {})), **fields)


STEPS = {
    "mixed": step(),
    "hnd_window": step(layer={"window_left": 8}, memory_order="HND"),
    "soft_cap": step(layer={"scale": 0.5, "soft_cap": 3.0}),
    "alibi": step(layer={"alibi": True}, slopes=(0.25, 0.0625, 2**-6, 2**-8)),
    "sinks": step(layer={"sinks": True}, memory_order="HND"),
    "only_decodes": step([(1, 33), (1, 1), (1, 16)], Layer(8, 128, 0.1, 1)),
    "only_prefills": step([(9, 9), (40, 41)], block_size=32),
    "drafts": step([(3, 40), (3, 3), (3, 17)], threshold=3),
    "drafts_of_many_lengths": step([(3, 40), (1, 9), (2, 17), (4, 30)], threshold=3),
    "padded_graph": step([(2, 40), (2, 9)], threshold=2, padding=2, padded_tokens=4),
    "padded_requests": step([(1, 40), (1, 9)], padding=1),
    "cross_attention": step([(1, 37), (1, 60), (4, 37), (9, 60)], causal=False),
    "images": step(images=IMAGES),
    "images_and_window": step(layer={"window_left": 4, "sinks": True}, images={2: [(1, 17)], 3: [(45, 48)]}),
    "images_within_the_window": step(
        [(30, 40), (20, 20)],
        layer={"window_left": 4, "soft_cap": 3.0},
        images={0: [(11, 30)], 1: [(0, 19)]},
        mm_prefix_clamp_sliding_window=True,
    ),
    "images_of_earlier_steps": step(images={3: [(4, 30)]}),
    **{
        f"{dtype}_{order}": step(layer={"kv_cache_dtype": dtype}, memory_order=order, scales=(0.5, 0.25))
        for dtype in ("fp8_e4m3", "fp8_e5m2")
        for order in ("NHD", "HND")
    },
}


@pytest.mark.parametrize("name", STEPS)
def test_layer_matches_the_formula(name: str, device: str) -> None:
    STEPS[name](device=device).check()


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_encoder_layers_match_the_formula(soft_cap: float, device: str) -> None:
    """Each token sees all tokens of its request; rows past the requests' are padding."""
    layer = Layer(4, 64, 0.25, 2, soft_cap=soft_cap, encoder=True)
    case = Step([(9, 9), (1, 1), (40, 40)], layer, causal=False, device=device)
    attention, step = case.attention(), case.metadata()
    rows = [torch.cat([*x, torch.zeros(3, *x[0].shape[1:])]).to(device, BF16) for x in (case.q, case.k, case.v)]
    for _ in range(2):  # layers
        out = torch.full_like(rows[0], UNTOUCHED)
        attention.forward(None, *rows, case.cache, step, out)
        assert_near(out[:50], None, [case.expected()])
        assert (out[50:] == UNTOUCHED).all()


@pytest.mark.parametrize("changed", [{"window_left": 8}, {"alibi": True}, {"sinks": True}, {"kv_cache_dtype": "fp8"}])
def test_encoder_layers_that_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="encoder attention must have no"):
        LayerAttention(LLAMA._replace(encoder=True, **changed), BF16, None)


def test_windows_of_tokens_that_see_later_keys_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="sliding window of tokens that see later keys"):
        Step(MIXED, LLAMA._replace(window_left=8), causal=False).check()


@pytest.mark.parametrize("memory_order", ["NHD", "HND"])
def test_nvfp4_cache(memory_order: str, device: str) -> None:
    layer = Layer(4, 64, 0.125, 2, kv_cache_dtype="nvfp4")
    case = Step(MIXED, layer, memory_order=memory_order, scales=(0.01, 0.02), device=device)
    case.check()
    for rows, given in zip(case.stored(), (case.k, case.v), strict=True):
        error = (torch.cat(list(rows)) - torch.cat(given).double()).norm() / torch.cat(given).double().norm()
        assert error < 0.12  # of 4-bit numbers with a scale per 16


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("kv_cache_dtype", "images"),
    [("auto", None), ("auto", {1: [(3, 29)]}), ("fp8", None), ("nvfp4", None), ("nvfp4", {1: [(16, 18)]})],
)
def test_kernels_read_and_write_the_cache(
    kv_cache_dtype: str, images: Spans | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XQA, fa3 or (NVFP4) fa2, and the append kernel take the strides of vLLM's cache."""
    monkeypatch.setattr(append, "run", emulated_append)
    wrappers = "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithCausalBidirectionalRangesWrapper"
    for module, name in ((layers, "xqa_batch_decode_with_kv_cache"), *((steps, name) for name in wrappers)):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), backend="emulator"))
    layer = Layer(4, 64, 0.125, 2, kv_cache_dtype=kv_cache_dtype)
    scales = (1.0, 1.0) if kv_cache_dtype == "auto" else (0.5, 0.25)
    case = Step([(1, 20), (3, 19) if kv_cache_dtype == "nvfp4" else (33, 33)], layer, scales=scales)
    case.images = images
    with emulator.using("sm_90a"):
        case.check(step=case.metadata(emulated=True))


def test_layers_of_a_type_share_a_plan_and_layers_of_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Step(MIXED, LLAMA)
    step = case.metadata()
    plans = noted(monkeypatch, BatchPrefillWithPagedKVCacheWrapper, "plan")
    sinks = torch.linspace(-1, 2, LLAMA.num_heads)
    changes = [{}, {"scale": 0.3}, {"window_left": 8}, {"sinks": True}, {"kv_cache_dtype": "bfloat16"}]
    for layer in [*(LLAMA._replace(**changed) for changed in changes), LLAMA]:
        case.layer, case.sinks = layer, sinks if layer.sinks else None
        case.check(step=step)
    assert len(plans) == 2
    other = Step([(1, 9), (30, 60)], LLAMA, seed=1)
    after = other.metadata()
    after.sessions = step.sessions  # the next step of the same group
    other.check(step=after)
    case.layer = LLAMA
    attention = LayerAttention(LLAMA, BF16, None)
    assert_near(case.output(attention, step), None, [case.expected()])  # planned again, not with other lengths
    assert len(plans) == 4


def test_layers_of_a_type_with_and_without_a_plan_for_decodes() -> None:
    case = Step(MIXED, LLAMA)
    attention, step = case.attention(), case.metadata()
    case.fill(attention)
    for attention.plans_decode in (False, True, False):
        assert_near(case.output(attention, step), None, [case.expected()])


@pytest.mark.parametrize("window_left", [-1, 8])
def test_batch_invariant_layers_have_one_plan_without_splits(
    window_left: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For decodes too: their bits are then those of whole requests (`tests/emulator/test_chunk_invariance.py`)."""
    plans = noted(monkeypatch, BatchPrefillWithPagedKVCacheWrapper, "plan")
    layer = LLAMA._replace(window_left=window_left)
    for batch_invariant in (False, True):
        Step(MIXED, layer, batch_invariant=batch_invariant, device=device).check()
    planned = [(plan.kwargs["disable_split_kv"], plan.args[1].diff().tolist()) for plan in plans]
    assert planned == [(False, [20, 7]), (True, [1, 1, 20, 7])]


# ---- CUDA graphs


GRAPHS = {
    "soft_cap": ({"soft_cap": 3.0}, False),
    "batch_invariant": ({"sinks": True}, True),
    "window": ({"window_left": 9}, True),
    "without_plan": ({}, False),
    "fp8_without_plan": ({"kv_cache_dtype": "fp8"}, False),
}


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_writes_the_cache_and_decodes_with_what_its_replay_has(name: str, q_len: int, device: str) -> None:
    """Warm-up and capture have metadata of their own; a replay has other lengths, tables, values and padding requests,
    and where there is a plan, it is made again.
    """
    changed, batch_invariant = GRAPHS[name]
    layer = LLAMA._replace(**changed)
    lengths = ((37, 5, 50), (20, 4, 33), (2, 3, 0))
    case = Step([(q_len, n) for n in lengths[0]], layer, q_len, batch_invariant=batch_invariant, device=device)
    attention = case.attention()
    query, tables = torch.cat(case.q).to(device), case.tables.clone().to(device)
    rows, slots = [torch.cat(x).to(device) for x in (case.k, case.v)], case.slots()
    out, seq_lens = torch.empty_like(query), torch.tensor(lengths[0], dtype=torch.int32, device=device)
    made = case.metadata()
    batch = dataclasses.replace(made.batch, seq_lens=seq_lens, block_table=tables)
    made = dataclasses.replace(made, batch=batch, for_capture=True)

    def step() -> None:
        attention.do_kv_cache_update(case, rows[0], rows[1], case.cache, slots)
        attention.forward(case, query, None, None, case.cache, dataclasses.replace(made), out)

    graph = Graph(device, step)
    for now in lengths:
        order = torch.tensor((1, 2, 0) if now == lengths[1] else (0, 1, 2))
        seq_lens.copy_(torch.tensor([now[i] for i in order]))
        tables.copy_(case.tables[order])
        out.fill_(UNTOUCHED)
        rows[1].neg_()
        case.v = [-x for x in case.v]
        graph.replay()
        part = copy.copy(case)
        used = [(row, i) for row, i in enumerate(order.tolist()) if now[i]]
        part.q = [query.cpu()[row * q_len : (row + 1) * q_len] for row, _ in used]
        stored = [[x[i][: now[i]] for _, i in used] for x in case.stored()]
        assert_near(out[: len(used) * q_len], None, [part.expected((stored[0], stored[1]))])


@needs_gpu
def test_a_plan_is_refused_while_a_graph_is_captured() -> None:
    case = Step([(1, 9)], Layer(4, 64, 0.125, 2, soft_cap=3.0), device="cuda")
    attention, step, query = case.attention(), case.metadata(), torch.cat(case.q).cuda()
    case.fill(attention)
    torch.cuda.synchronize()
    with pytest.raises(NotSupported, match="capture in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention.forward(None, query, None, None, case.cache, step, torch.empty_like(query))


# ---- the cache


def test_views_copy_nothing_and_write_only_their_slots() -> None:
    case = Step(MIXED, LLAMA)
    before = case.cache.clone()
    attention = case.attention()
    case.fill(attention)
    found = attention.views(case.cache)
    k, v = found.pair
    assert k.data_ptr() == case.cache.data_ptr()
    assert v.data_ptr() == case.cache.data_ptr() + 64 * 2
    assert k.stride() == v.stride() == case.cache.stride()
    assert attention.views(case.cache) is found
    slots = case.slots()
    kept = torch.ones(case.cache.shape[0] * 16, dtype=torch.bool)
    kept[slots] = False
    tokens = case.cache.transpose(1, 2).reshape(-1, 2, 128)
    assert torch.equal(tokens[slots], torch.cat((torch.cat(case.k), torch.cat(case.v)), -1))
    untouched = before.transpose(1, 2).reshape(-1, 2, 128)[kept]
    assert torch.equal(tokens[kept].view(torch.int16), untouched.view(torch.int16))


def test_caches_of_another_packing_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"kv_cache must have shape \[blocks, 2, block_size, 128\]"):
        views(torch.zeros(3, 2, 16, 64), LLAMA)
    packed = LLAMA._replace(kv_cache_dtype="nvfp4")
    with pytest.raises(ArgumentError, match="NVFP4 kv_cache must have shape"):
        views(torch.zeros(3, 2, 16, 36, dtype=torch.uint8), packed)
    with pytest.raises(ArgumentError, match="must be dense"):
        views(torch.zeros(3, 4, 32, 36, dtype=torch.uint8)[:, :, ::2], packed)
    case, q = Step(MIXED, LLAMA), torch.zeros(4, 4, 64)
    with pytest.raises(ArgumentError, match="float16 or bfloat16"):
        case.attention().forward(case, q, None, None, case.cache, case.metadata(), q)


# ---- the batch


@pytest.mark.parametrize(
    ("lengths", "tokens", "threshold", "expected"),
    [
        ((1, 1, 1), 3, 1, (3, 3, 1, True)),
        ((1, 1, 5, 1), 8, 1, (2, 2, 1, True)),
        ((5, 1), 6, 1, (0, 0, 1, True)),
        ((3, 3), 6, 3, (2, 6, 3, True)),
        ((3, 1, 2), 6, 3, (3, 6, 3, False)),  # as many tokens as requests times 2, but not so distributed
        ((2, 2, 0, 0), 8, 2, (4, 8, 2, True)),  # padded for a graph
        ((2, 2, 0, 0), 4, 2, (4, 4, 2, False)),
        ((1, 1, 0), 2, 1, (3, 2, 1, False)),
        ((3, 2, 9, 4), 18, 3, (2, 5, 3, False)),
    ],
)
def test_split(lengths: tuple[int, ...], tokens: int, threshold: int, expected: tuple[Any, ...]) -> None:
    assert split_decodes(ends(lengths), len(lengths), tokens, max(lengths), threshold) == expected


def test_lengths_come_from_the_host_where_the_bound_is_exact() -> None:
    on_device, bound = torch.tensor([5, 9, 12], dtype=torch.int32), torch.tensor([7, 9, 12], dtype=torch.int32)
    sync = mock.MagicMock()  # a context

    def lengths(first: int, exact: Any, padding: int = 0) -> list[int]:
        loc = ends((2, 4, 6 - padding))
        if padding:
            loc[3] = loc[2]
        batch = Batch(3, loc, loc, on_device, torch.zeros(3, 1, dtype=torch.int32), bound, exact, sync)
        return batch.lengths(first).tolist()

    prefilling = torch.tensor([False, True, True])
    assert lengths(1, prefilling) == [9, 12]
    assert lengths(0, True) == [7, 9, 12]
    assert sync.call_count == 0
    assert lengths(0, prefilling) == [5, 9, 12]
    assert lengths(0, False) == [5, 9, 12]
    assert sync.call_count == 2
    assert lengths(1, torch.tensor([False, True, False]), padding=6) == [9, 0]  # padding has no query tokens
    assert sync.call_count == 2


# ---- what is supported


def sized(head_size: int, kv_cache_dtype: str = "auto", **options: Any) -> Layer:
    return Layer(8, head_size, 0.1, 8, kv_cache_dtype, **options)


@pytest.mark.parametrize(
    ("layer", "dtype", "words"),
    [
        (sized(128, "fp8", sinks=True), BF16, None),
        (sized(256, "nvfp4", soft_cap=30.0), torch.float16, None),
        (sized(80, alibi=True), BF16, None),
        (sized(320), BF16, "other head dimensions"),
        (sized(512, "nvfp4"), BF16, "NVFP4 k and v with head dimension 512"),
        (sized(72, "fp8"), BF16, "blocks of 16 elements, got head_size 72"),
        (sized(128, "float16"), BF16, "must have the model's dtype torch.bfloat16"),
        (sized(128), torch.float32, None),  # vLLM refuses it by `supported_dtypes`
        (sized(128, "int8_per_token_head"), BF16, "kv_cache_dtype must be one of auto, float16"),
    ],
)
def test_reasons(layer: Layer, dtype: torch.dtype, words: str | None) -> None:
    """Layers that no kernel supports are refused when they are made."""
    reason = support.reason(layer, dtype, (9, 0))
    assert reason is None if words is None else words in str(reason)
    with pytest.raises(NotImplementedError, match=words) if words else contextlib.nullcontext():
        LayerAttention(layer, dtype, (9, 0))


def test_compute_capabilities() -> None:
    assert support.compute_capability_reason(9, 0) is support.compute_capability_reason(8, 6) is None
    assert "7.5 is not supported" in str(support.compute_capability_reason(7, 5))
    assert "11.0 is not supported" in str(support.reason(sized(128), BF16, (11, 0)))


@pytest.mark.parametrize(
    ("layer", "without_plan"), [(sized(128), True), (sized(128, soft_cap=30.0), False), (sized(128, alibi=True), False)]
)
def test_which_layers_decode_without_a_plan(layer: Layer, without_plan: bool) -> None:
    """Sinks do not decide: layers with and without share a plan."""
    layers, gpus = (layer, layer._replace(sinks=True)), (None, (8, 0), (9, 0), (10, 0))
    assert all(support.decodes_without_plan(x, BF16, gpu) is without_plan for x in layers for gpu in gpus)


def test_slopes() -> None:
    assert not has_standard_slopes(None, 4)
    assert has_standard_slopes([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0], 6)
    for slopes in ([0.25, 0.0625], [0.5, 0.125, 2**-5, 2**-7]):
        with pytest.raises(NotImplementedError, match="standard ones of 4 heads"):
            has_standard_slopes(slopes, 4)


# ---- registration


REGISTRIES = {  # of backends, and of prefills of latent attention: the function and the names
    "vllm.v1.attention.backends.registry": ("register_backend", "AttentionBackendEnum"),
    "vllm.v1.attention.backends.mla.prefill.registry": ("register_mla_prefill_backend", "MLAPrefillBackendEnum"),
}


def registries(monkeypatch: pytest.MonkeyPatch, register: Callable[..., None]) -> dict[str, dict[str, str]]:
    """Put stand-ins of vLLM's registries in place. Returns what they contain, which `register` gets first."""
    found: dict[str, dict[str, str]] = {path: {} for path in REGISTRIES}
    for path, (function, names) in REGISTRIES.items():
        for i in range(path.count(".") + 1):
            name = path.rsplit(".", i)[0]
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        module: Any = sys.modules[path]
        setattr(module, function, functools.partial(register, found[path]))
        setattr(module, names, types.SimpleNamespace(__members__=found[path]))
    return found


def test_registration_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(names: dict[str, str], name: str, path: str) -> None:
        assert name not in names
        names[name] = path

    found = registries(monkeypatch, register)
    plugin.register()
    plugin.register()
    folder = "cute_attn.integrations.vllm"
    assert list(found.values()) == [
        {"CUTE_ATTN": f"{folder}.backend.CuteAttnBackend", "CUTE_ATTN_MLA": f"{folder}.mla.CuteAttnMLABackend"},
        {"CUTE_ATTN_MLA": f"{folder}.mla.CuteAttnMLAPrefillBackend"},
    ]


def test_registration_never_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def register(names: dict[str, str], name: str, path: str) -> None:
        raise ValueError("reserved")

    registries(monkeypatch, register)
    plugin.register()
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
