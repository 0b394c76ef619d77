"""The parts of the SGLang plug-in that need no SGLang: tables, lengths, masks, plans, refusals; with an fp64 oracle."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import cute_attn.integrations.sglang as plugin
from cute_attn import emulator
from cute_attn.errors import NotSupported
from cute_attn.integrations.sglang import limits, steps
from cute_attn.integrations.sglang.limits import ServerFacts
from cute_attn.integrations.sglang.metadata import PageTables, as_pages, draft_mask
from cute_attn.integrations.sglang.steps import GraphTables, Operands, PlannedAttention, TableStep, attend
from cute_attn.integrations.workspaces import Workspaces
from tests.support.engine_case import Graph
from tests.support.noted import noted
from tests.support.sglang_case import (
    BF16,
    DIM,
    HEADS,
    KINDS,
    KV_HEADS,
    LATENT_LAYERS,
    MAX_CONTEXT,
    Layer,
    Server,
    begin,
)

E4M3 = torch.float8_e4m3fn
SERVER = ServerFacts(BF16, BF16)
LAYER = Layer()


# ---- tables


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_tables(page_size: int) -> None:
    """Pages in order, of the full pool and of one whose slots are translated."""
    server = Server(page_size, [37, 1, 100])
    expected = [
        [int(server.slots[request, i]) // page_size for i in range(0, kv_len, page_size)]
        for request, kv_len in zip(server.requests.tolist(), server.kv_lens, strict=True)
    ]
    for shift, translate in ((0, None), (2, lambda slots: slots.long() + 2 * page_size)):
        pages = PageTables(server.slots, page_size, translate)
        wide = pages.block_tables(server.requests)
        assert wide.dtype == torch.int32
        assert wide.shape == (3, MAX_CONTEXT // page_size)
        narrow = pages.block_tables(server.requests, num_pages=-(-100 // page_size))
        out = torch.zeros(3, MAX_CONTEXT // page_size, dtype=torch.int32)
        assert pages.block_tables(server.requests, out=out).data_ptr() == out.data_ptr()
        moved = [[page + shift for page in row] for row in expected]
        for table in (wide, narrow, out):
            assert [row[: len(want)].tolist() for row, want in zip(table, moved, strict=True)] == moved
        flat = pages.page_indices(server.requests, server.seq_lens, sum(map(len, expected)))
        assert flat.dtype == torch.int32
        assert flat.tolist() == list(itertools.chain(*moved))


def test_pages_are_views() -> None:
    fused = torch.zeros(2, 80, KV_HEADS, DIM)
    values = fused[1, :72]  # a pool whose last page is not whole
    pages = as_pages(values, 16, "NHD")
    assert pages.shape == (4, 16, KV_HEADS, DIM)
    assert pages.data_ptr() == values.data_ptr()
    assert pages.stride() == (16 * KV_HEADS * DIM, *values.stride())
    head_major = torch.zeros(5, KV_HEADS, 16, DIM)
    assert as_pages(head_major, 16, "HND") is head_major


@pytest.mark.parametrize("q_len", [3, 32, 45])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_masks_of_drafts(q_len: int, with_prefix: bool) -> None:
    """Every bit, of rows longer than a word too; a batch padded past the mask reads nothing outside it."""
    before = [5, 0, 9]
    among = torch.rand(2, q_len, q_len, generator=torch.Generator().manual_seed(q_len)) < 0.5
    parts = []
    for i in range(2):
        prefix = torch.ones(q_len, before[i] if with_prefix else 0, dtype=torch.bool)
        parts.append(torch.cat((prefix, among[i]), 1).flatten())
    words = draft_mask(torch.cat(parts), torch.tensor(before), q_len, with_prefix)
    assert words.shape == (3 * q_len, -(-q_len // 32))
    assert words.dtype == torch.int32
    for i in range(2):
        for row in range(q_len):
            bits = [(int(word) & 0xFFFFFFFF) >> j & 1 for word in words[i * q_len + row] for j in range(32)]
            assert bits[:q_len] == among[i, row].int().tolist()
            assert not any(bits[q_len:])


def test_masks_of_drafts_take_few_operations() -> None:
    """Each is a launch, in every step that verifies a tree."""
    with torch.profiler.profile() as found:
        draft_mask(torch.ones(3 * 45 * 45, dtype=torch.bool), torch.tensor([5, 0, 9]), 45, False)
    assert sum(event.cpu_parent is None for event in found.events()) <= 30


# ---- attention


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_extend(name: str, page_size: int, device: str) -> None:
    """Two steps of one set of wrappers; the second has cached prefixes, and a request without tokens."""
    attention = PlannedAttention(Workspaces.on(device).planned, SERVER._replace(page_size=page_size))
    kind = KINDS[name]
    for kv_lens, q_lens in (([37, 5], [37, 5]), ([40, 0, 90], [3, 0, 20])):
        server = Server(page_size, kv_lens, device, q_lens=q_lens)
        begin(server, attention)
        out = torch.empty_like(server.q)
        attention.run(Operands(kind, server.q, server.cache, out))
        server.check(out, kind)


@pytest.mark.parametrize("deterministic", [False, True])
def test_planned_decode_in_buffers_of_a_graph(deterministic: bool, device: str) -> None:
    indices = torch.zeros(3 * MAX_CONTEXT, dtype=torch.int32, device=device)
    attention = PlannedAttention(Workspaces.on(device).planned, SERVER._replace(deterministic=deterministic))
    attention.captured_indices = [indices]
    kind, sinks = KINDS["capped"], torch.randn(HEADS, device=device)
    for kv_lens, known in (([37, 5, 1], [kind]), ([2, 90, 1], [])):
        server = Server(1, kv_lens, device)
        begin(server, attention, decode=True, captured=known)
        out = torch.empty_like(server.q)
        attention.run(Operands(kind, server.q, server.cache, out, sinks=sinks))
        assert indices[: sum(kv_lens)].tolist() == torch.cat(server.tokens.pages.slots).tolist()
        server.check(out, kind, sinks=sinks)


def test_deterministic_plans_forbid_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits would make results depend on the rest of the batch."""
    plans = noted(monkeypatch, steps.BatchPrefillWithPagedKVCacheWrapper, "plan")
    for deterministic in (False, True):
        form = SERVER._replace(page_size=16, deterministic=deterministic)
        for decode, q_lens in ((False, [3, 1]), (True, [1, 1])):
            attention = PlannedAttention(Workspaces.on("cpu").planned, form)
            attention.captured_indices = [torch.zeros(8, dtype=torch.int32)]
            captured = [KINDS["full"], KINDS["window"]]
            begin(Server(16, [37, 5], q_lens=q_lens), attention, decode=decode, captured=captured)
    assert [plan.kwargs["disable_split_kv"] for plan in plans] == [False] * 4 + [True] * 4


def by_tables(device: str) -> Callable[..., None]:
    workspace = Workspaces.on(device).decode
    return functools.partial(attend, workspace=workspace, layout="NHD", max_context=MAX_CONTEXT)


@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize(("kv_dtype", "as_tensor"), [(BF16, False), (E4M3, False), (E4M3, True)])
def test_decode_by_tables(name: str, kv_dtype: torch.dtype, as_tensor: bool, device: str) -> None:
    kind, server = KINDS[name], Server(16, [37, 5, 90], device, kv_dtype)
    numbers = {} if kv_dtype == BF16 else {"k_scale": 0.5, "v_scale": 2.0}
    scales = [numbers.get(x) for x in ("k_scale", "v_scale")]
    if as_tensor:
        scales = [torch.tensor(x, device=device) for x in scales]
    attention = by_tables(device)
    sinks = torch.randn(HEADS, device=device)
    for pages in (None, 6):
        step = TableStep([PageTables(server.slots, 16).block_tables(server.requests, pages)], server.seq_lens.int())
        assert step.num_tokens == 3
        out = torch.empty_like(server.q)
        attention(step, Operands(kind, server.q, server.cache, out, *scales, sinks))
        server.check(out, kind, sinks=sinks, **numbers)


@pytest.mark.emulator
@pytest.mark.parametrize("page_size", [1, 16])
def test_decode_on_a_kernel(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads the pool through its views; table entries past a request's keys are -1."""
    decode = functools.partial(steps.xqa_batch_decode_with_kv_cache, backend="emulator")
    monkeypatch.setattr(steps, "xqa_batch_decode_with_kv_cache", decode)
    server, kind = Server(page_size, [37, 5]), KINDS["window"]
    attention = by_tables("cpu")
    step = TableStep([PageTables(server.slots, page_size).block_tables(server.requests)], server.seq_lens.int())
    out = torch.empty_like(server.q)
    with emulator.using("sm_90a"):
        attention(step, Operands(kind, server.q, server.cache, out))
    server.check(out, kind)


AMONG = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)  # which drafts see which
DRAFTS = len(AMONG)


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_steps_in_buffers_of_a_graph(drafts: int, device: str) -> None:
    """The graph holds what `init_forward_metadata_in_graph` does, and a layer; before a replay the host sets the mask.
    Replays follow the token table, at the same addresses; a request that pads the batch has few keys.
    """
    kind, rows = KINDS["full"], max(drafts, 1)
    servers = [Server(16, n, device, seed=i, q_lens=[rows] * 2) for i, n in enumerate(([37, 5], [4, 90]))]
    slots, (keys, values) = servers[0].slots.clamp_min(0), (x.clone() for x in servers[0].cache)
    attention, buffers = by_tables(device), GraphTables(4, [PageTables(slots, 16)], device)
    requests = torch.cat((servers[0].requests, torch.zeros_like(servers[0].requests[:1])))
    before = torch.ones_like(requests)
    q = torch.cat((servers[0].q, servers[0].q[:rows]))
    out = torch.empty_like(q)

    def step() -> TableStep:
        return buffers.view(3, rows, with_mask=drafts > 0)

    def layer() -> None:
        buffers.fill(requests, before, drafts)
        attention(step(), Operands(kind, q, (keys, values), out))

    graph, addresses = Graph(device, layer), set()
    for server in servers:
        slots.copy_(server.slots.clamp_min(0))
        before[:2] = server.seq_lens - drafts
        for static, own in zip((q[: 2 * rows], keys, values), (server.q, *server.cache), strict=True):
            static.copy_(own)
        if drafts:
            buffers.set_mask(AMONG.flatten().repeat(2).to(device), before, drafts, with_prefix=False)
        graph.replay()
        assert step().seq_lens.tolist() == [*server.kv_lens, 1 + drafts]
        addresses.add(tuple(x.data_ptr() for x in (*step().tables, step().seq_lens, step().mask) if x is not None))
        server.check(out[: 2 * rows], kind, AMONG if drafts else None)
    assert len(addresses) == 1


# ---- refusals


def test_a_plain_server_is_served() -> None:
    for formats in ({}, {"kv_dtype": E4M3, "speculative": "EAGLE"}):
        limits.check(SERVER._replace(mla=True, **formats), LATENT_LAYERS)
    limits.check(SERVER, [LAYER, Layer(sliding_window_size=20, logit_cap=30.0)])
    limits.check(SERVER._replace(kv_dtype=torch.float8_e5m2, kv_layouts=("hnd",)), [LAYER])
    limits.check(SERVER._replace(speculative="EAGLE", draft_trees=True), [Layer(sliding_window_size=None)])


@pytest.mark.parametrize(
    ("server", "layer", "reason"),
    [
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, {}, "queries are 16-bit"),
        ({"kv_dtype": torch.float16}, {}, "a KV cache of float16 under bfloat16"),
        ({"kv_dtype": torch.uint8, "quantized_pool": "nvfp4"}, {}, "the KV cache recipe nvfp4"),
        ({"kv_layouts": ("vectorized_5d",)}, {}, "vectorized_5d"),
        ({"mla": True, "deterministic": True}, {}, "splits depend on the batch"),
        ({"mla": True, "draft_trees": True, "speculative": "EAGLE"}, {}, "draft trees with latent attention"),
        ({"mla": True, "kv_dtype": torch.float8_e5m2}, {}, "fp8_e5m2 with latent attention"),
        ({"mla": True, "quantized_pool": "MLATokenToKVPoolFP4"}, {}, "MLATokenToKVPoolFP4"),
        ({"mla": True}, {"qk_head_dim": 320, "v_head_dim": 256}, r"head dimensions \(320, 256\)"),
        ({"mla": True}, {"sliding_window_size": 128}, "a window or a soft cap"),
        ({"encoder_decoder": True}, {}, "encoder-decoder"),
        ({"attention_chunk_size": 8192}, {}, "chunked attention"),
        ({"draft_worker": True}, {}, "--speculative-draft-attention-backend"),
        ({"context_parallel": 2}, {}, "--attn-cp-size 2"),
        ({"decode_context_parallel": 2}, {}, "--dcp-size 2"),
        ({"translated_slots": True}, {}, "--enable-unified-memory"),
        ({"diffusion": True}, {}, "diffusion"),
        ({"full_prefill_graphs": True}, {}, "--cuda-graph-backend-prefill full"),
        ({"speculative": "EAGLE"}, {"logit_cap": 30.0}, "has no soft cap"),
        ({"speculative": "EAGLE", "deterministic": True}, {}, "splits depend on the batch"),
        (
            {"speculative": "EAGLE", "draft_trees": True},
            {"sliding_window_size": 20},
            "draft trees with sliding windows",
        ),
        ({}, {"is_cross_attention": True}, "cross attention"),
        ({}, {"attn_type": SimpleNamespace(value="decoder_bidirectional")}, "decoder_bidirectional"),
        ({}, {"v_head_dim": 32}, "value heads of dimension 32"),
        ({}, {"pos_encoding_mode": "ALIBI"}, "ALIBI"),
        ({}, {"logit_cap": 30.0, "logit_capping_method": "tanh-shifted"}, "tanh-shifted"),
        ({}, {"xai_temperature_len": 1024}, "xai_temperature_len"),
    ],
)
def test_refusals(server: dict[str, Any], layer: dict[str, Any], reason: str) -> None:
    layers = LATENT_LAYERS if server.get("mla") else [LAYER]
    with pytest.raises(NotSupported, match=reason) as caught:
        limits.check(SERVER._replace(**server), [*layers, dataclasses.replace(layers[0], layer_id=1, **layer)])
    assert len(caught.value.refusals) == 1, "a reason is named once, and no other"
    assert "Instead: " in str(caught.value)


def test_all_reasons_are_named_at_once() -> None:
    with pytest.raises(NotSupported) as caught:
        limits.check(SERVER._replace(context_parallel=2, diffusion=True), [Layer(is_cross_attention=True)] * 3)
    assert len(caught.value.refusals) == 3


# ---- registration


def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """A stand-in for the modules of SGLang that `register` uses."""
    backends: dict[str, Callable[..., Any]] = {}
    known, repeatable, cached = ["triton"], ["triton"], ["triton"]
    choices = SimpleNamespace(
        ATTENTION_BACKEND_CHOICES=known,
        add_attention_backend_choices=known.extend,
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES=repeatable,
        add_deterministic_attention_backend_choices=repeatable.extend,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND=cached,
        add_radix_supported_deterministic_attention_backend_choices=cached.extend,
    )
    registry = SimpleNamespace(register_attention_backend=lambda name: lambda fn: backends.setdefault(name, fn))
    names = "sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.layers", "sglang.srt.layers.attention"
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.arg_groups"].choices = choices  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.attention_registry", registry)  # type: ignore[arg-type]
    return choices, backends


def test_register_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    choices, backends = installed(monkeypatch)
    plugin.register()
    plugin.register()
    assert choices.ATTENTION_BACKEND_CHOICES == ["triton", "cute_attn"]
    assert choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES == ["triton", "cute_attn"]
    assert choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND == ["triton", "cute_attn"]
    assert backends == {"cute_attn": plugin.build}


def test_register_without_the_extension_points(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # is not importable
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "tested with SGLang 0.5.23" in caplog.text
