"""The parts of the SGLang plug-in that need no SGLang: tables, lengths, masks, plans, refusals; with an fp64 oracle."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import logging
import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import cute_attn.integrations.sglang as plugin
from cute_attn.errors import NotSupported
from cute_attn.integrations.sglang import limits, planned
from cute_attn.integrations.sglang.limits import LayerFacts, ServerFacts
from cute_attn.integrations.sglang.metadata import LayerKind, PageTables, as_pages, draft_mask, lengths
from cute_attn.integrations.sglang.planned import CacheFormat, GraphBuffers, PlannedAttention, Step
from cute_attn.integrations.sglang.tables import GraphTables, TableAttention

BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM = 4, 2, 64
MAX_CONTEXT = 128
SERVER = ServerFacts(BF16, BF16)
LAYER = LayerFacts(0, DIM, DIM)


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is read of a RadixAttention."""

    layer_id: int = 0
    tp_q_head_num: int = HEADS
    tp_k_head_num: int = KV_HEADS
    qk_head_dim: int = DIM
    v_head_dim: int = DIM
    scaling: float = DIM**-0.5
    logit_cap: float = 0.0
    sliding_window_size: int | None = -1
    attn_type: Any = "decoder"
    is_cross_attention: bool = False
    pos_encoding_mode: str = "NONE"
    logit_capping_method: str = "tanh"
    xai_temperature_len: int = -1


class Server:
    """A pool with random contents and a table of slots as SGLang fills it."""

    def __init__(self, page_size: int, kv_lens: list[int], dtype: torch.dtype = BF16) -> None:
        generator = torch.Generator().manual_seed(page_size)
        self.page_size, self.kv_lens = page_size, kv_lens
        pages = torch.randperm(512 // page_size, generator=generator) + 1
        self.slots = torch.full((8, MAX_CONTEXT), -1, dtype=torch.int32)
        self.requests = torch.tensor([5, 2, 7][: len(kv_lens)])
        for request, kv_len in zip(self.requests.tolist(), kv_lens, strict=True):
            count = -(-kv_len // page_size)
            own, pages = pages[:count], pages[count:]
            slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()
            self.slots[request, :kv_len] = slots[:kv_len].int()
        size = 512 + page_size
        self.buffers = tuple(torch.randn(size, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.kv_lens)

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.buffers
        return as_pages(keys, self.page_size, "NHD"), as_pages(values, self.page_size, "NHD")

    def expected(self, q: torch.Tensor, q_lens: list[int], kind: LayerKind, **options: Any) -> torch.Tensor:
        """fp64 attention, slot by slot. `among`: which drafts see which; `k_scale`, `v_scale`, `sinks`."""
        rows, first = [], 0
        for request, kv_len, q_len in zip(self.requests.tolist(), self.kv_lens, q_lens, strict=True):
            slots = self.slots[request, :kv_len].long()
            part = q[first : first + q_len].double()
            rows.append(attend(part, *(buffer[slots].double() for buffer in self.buffers), kind, **options))
            first += q_len
        return torch.cat(rows)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kind: LayerKind,
    among: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    q_len, kv_len = len(q), len(keys)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys * k_scale, values * v_scale))
    z = torch.einsum("qhd,khd->hqk", q, keys) * kind.sm_scale
    if kind.soft_cap:
        z = kind.soft_cap * torch.tanh(z / kind.soft_cap)
    position, key = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
    visible = (key <= position) if kind.causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    if among is not None:
        visible = torch.cat((torch.ones(q_len, kv_len - q_len, dtype=torch.bool), among), 1)
    if kind.window_left >= 0:
        visible = visible & (key >= position - kind.window_left)
    z = z.masked_fill(~visible, -math.inf)
    if sinks is not None:
        z = torch.cat((z, sinks.double()[:, None, None].expand(-1, q_len, 1)), -1)
    return torch.einsum("hqk,khd->qhd", z.softmax(-1)[..., :kv_len], values)


def queries(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(tokens)).to(BF16)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=1 / 128, atol=1 / 128)


# ---- tables and lengths


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


def test_lengths() -> None:
    found = lengths([3, 1, 0, 16], torch.tensor([20, 16, 0, 33]), 16)
    assert found.qo_indptr.tolist() == [0, 3, 4, 4, 20]
    assert found.kv_indptr.tolist() == [0, 2, 3, 3, 6]
    assert found.last_page_len.tolist() == [4, 16, 0, 1]
    assert (found.num_tokens, found.num_pages) == (20, 6)
    assert all(x.dtype == torch.int32 for x in found[:3])


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


# ---- attention


KINDS = {
    "full": LayerKind.of(Layer()),
    "window": LayerKind.of(Layer(sliding_window_size=10)),
    "capped": LayerKind.of(Layer(logit_cap=2.0)),
    "encoder": LayerKind.of(Layer(attn_type=SimpleNamespace(value="encoder_only"))),
}


def started(server: Server, q_lens: list[int], attention: PlannedAttention, **options: Any) -> Step:
    pages = PageTables(server.slots, server.page_size)
    counted = lengths(q_lens, server.kv_lens, server.page_size)
    step = Step(counted, lambda _: pages.page_indices(server.requests, server.seq_lens, counted.num_pages))
    attention.begin(step, **options)
    return step


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_extend(name: str, page_size: int) -> None:
    """Two steps of one set of wrappers; the second has cached prefixes."""
    workspace = torch.empty(planned.WORKSPACE_BYTES, dtype=torch.uint8)
    attention = PlannedAttention(workspace, CacheFormat(BF16, BF16, "NHD", page_size, False), decode=False)
    kind = KINDS[name]
    for kv_lens, q_lens in (([37, 5], [37, 5]), ([40, 1, 90], [3, 1, 20])):
        server = Server(page_size, kv_lens)
        started(server, q_lens, attention)
        q = queries(sum(q_lens))
        out = torch.empty_like(q)
        attention.run(kind, q, server.cache(), out, None, None, None)
        assert_close(out, server.expected(q, q_lens, kind))


@pytest.mark.parametrize("deterministic", [False, True])
def test_planned_decode_in_buffers_of_a_graph(deterministic: bool) -> None:
    indices = torch.zeros(3 * MAX_CONTEXT, dtype=torch.int32)
    buffers = GraphBuffers(torch.zeros(4, dtype=torch.int32), indices, torch.zeros(3, dtype=torch.int32))
    workspace = torch.empty(planned.WORKSPACE_BYTES, dtype=torch.uint8)
    attention = PlannedAttention(
        workspace, CacheFormat(BF16, BF16, "NHD", 1, deterministic), decode=True, graph_buffers=lambda _: buffers
    )
    kind, sinks = KINDS["capped"], torch.randn(HEADS)
    for kv_lens in ([37, 5, 1], [2, 90, 1]):
        server = Server(1, kv_lens)
        started(server, [1, 1, 1], attention, kinds=[kind])
        assert buffers.indptr.tolist() == [0, *torch.tensor(kv_lens).cumsum(0).tolist()]
        q = queries(3)
        out = torch.empty_like(q)
        attention.run(kind, q, server.cache(), out, None, None, sinks)
        assert_close(out, server.expected(q, [1, 1, 1], kind, sinks=sinks))


def test_deterministic_results_do_not_depend_on_the_batch() -> None:
    """The plan must forbid splits: of captured launches too, whose splits would follow from their capacity."""
    seen: list[dict[str, Any]] = []

    class Recorded(planned.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            seen.append(options)
            super().plan(*args, **options)

    server = Server(16, [37, 5])
    workspace = torch.empty(planned.WORKSPACE_BYTES, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "BatchPrefillWithPagedKVCacheWrapper", Recorded)
        for deterministic in (False, True):
            fmt = CacheFormat(BF16, BF16, "NHD", 16, deterministic)
            attention = PlannedAttention(workspace, fmt, decode=False)
            started(server, [3, 1], attention, kinds=[KINDS["full"], KINDS["window"]])
    assert [options["disable_split_kv"] for options in seen] == [False, False, True, True]


@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_decode_by_tables(name: str, kv_dtype: torch.dtype, as_tensor: bool) -> None:
    kind, server, scales = KINDS[name], Server(16, [37, 5, 90], kv_dtype), (None, None)
    if kv_dtype != BF16:
        scales = (torch.tensor(0.5), torch.tensor(2.0)) if as_tensor else (0.5, 2.0)
    attention = TableAttention("cpu", "NHD", PageTables(server.slots, 16), None, MAX_CONTEXT)
    sinks = torch.randn(HEADS)
    for longest in (None, 90):
        step = attention.step(server.requests, server.seq_lens, longest)
        assert step.num_tokens == 3
        q = queries(3)
        out = torch.empty_like(q)
        attention.run(step, kind, q, server.cache(), out, *scales, sinks)
        numbers = {} if scales[0] is None else {"k_scale": 0.5, "v_scale": 2.0}
        assert_close(out, server.expected(q, [1, 1, 1], kind, sinks=sinks, **numbers))


def test_drafts_in_buffers_of_a_graph() -> None:
    """A captured batch keeps its addresses; a padded request has one key."""
    q_len, server = 3, Server(16, [37, 5])
    among = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    pages = PageTables(server.slots.clamp_min(0), 16)
    attention = TableAttention("cpu", "NHD", pages, None, MAX_CONTEXT)
    graph = GraphTables(4, pages, None, "cpu")
    first = graph.view(3, q_len, with_mask=True)
    addresses = [x.data_ptr() for x in (first.tables, first.seq_lens, first.mask)]
    requests = torch.tensor([*server.requests.tolist(), 0])
    before = torch.tensor([37 - q_len, 5 - q_len, 1])
    graph.set_mask(among.flatten().repeat(2), before, q_len, with_prefix=False)
    graph.fill(requests, before, q_len)
    step = graph.view(3, q_len, with_mask=True)
    assert [x.data_ptr() for x in (step.tables, step.seq_lens, step.mask)] == addresses
    assert step.seq_lens.tolist() == [37, 5, 1 + q_len]
    q = queries(3 * q_len)
    out = torch.empty_like(q)
    attention.run(step, KINDS["full"], q, server.cache(), out, None, None, None)
    assert_close(out[: 2 * q_len], server.expected(q[: 2 * q_len], [q_len, q_len], KINDS["full"], among=among))


# ---- refusals


def test_a_plain_server_is_served() -> None:
    limits.check(SERVER, [LAYER, LAYER._replace(window_left=20, soft_cap=30.0)])
    limits.check(SERVER._replace(kv_dtype=torch.float8_e5m2, kv_layouts=("hnd",)), [LAYER])
    limits.check(SERVER._replace(speculative="EAGLE", draft_trees=True), [LAYER])


@pytest.mark.parametrize(
    ("server", "layer", "reason"),
    [
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, {}, "queries are 16-bit"),
        ({"kv_dtype": torch.float16}, {}, "a KV cache of float16 under bfloat16"),
        ({"kv_dtype": torch.uint8, "quantized_pool": "nvfp4"}, {}, "the KV cache recipe nvfp4"),
        ({"kv_layouts": ("vectorized_5d",)}, {}, "vectorized_5d"),
        ({"mla": True}, {}, "multi-head latent attention"),
        ({"encoder_decoder": True}, {}, "encoder-decoder"),
        ({"attention_chunk_size": 8192}, {}, "chunked attention"),
        ({"draft_worker": True}, {}, "--speculative-draft-attention-backend"),
        ({"context_parallel": 2}, {}, "--attn-cp-size 2"),
        ({"decode_context_parallel": 2}, {}, "--dcp-size 2"),
        ({"translated_slots": True}, {}, "--enable-unified-memory"),
        ({"diffusion": True}, {}, "diffusion"),
        ({"full_prefill_graphs": True}, {}, "--cuda-graph-backend-prefill full"),
        ({"speculative": "EAGLE"}, {"soft_cap": 30.0}, "has no soft cap"),
        ({"speculative": "EAGLE", "deterministic": True}, {}, "splits depend on the batch"),
        ({"speculative": "EAGLE", "draft_trees": True}, {"window_left": 20}, "draft trees with sliding windows"),
        ({}, {"cross_attention": True}, "cross attention"),
        ({}, {"attn_type": "decoder_bidirectional"}, "decoder_bidirectional"),
        ({}, {"v_head_dim": 32}, "value heads of dimension 32"),
        ({}, {"pos_encoding_mode": "ALIBI"}, "ALIBI"),
        ({}, {"soft_cap": 30.0, "capping_method": "tanh-shifted"}, "tanh-shifted"),
        ({}, {"temperature_len": 1024}, "xai_temperature_len"),
    ],
)
def test_refusals(server: dict[str, Any], layer: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotSupported, match=reason) as caught:
        limits.check(SERVER._replace(**server), [LAYER, LAYER._replace(layer_id=1, **layer)])
    assert len(caught.value.refusals) == 1, "a reason is named once, and no other"
    assert "Instead: " in str(caught.value)


def test_all_reasons_are_named_at_once() -> None:
    with pytest.raises(NotSupported) as caught:
        limits.check(SERVER._replace(mla=True, diffusion=True), [LAYER._replace(cross_attention=True)] * 3)
    assert len(caught.value.refusals) == 3


def test_facts_of_a_layer() -> None:
    facts = limits.layer_facts(Layer(sliding_window_size=None, logit_cap=0.0))
    assert facts == LAYER
    facts = limits.layer_facts(Layer(sliding_window_size=20, logit_cap=30.0, attn_type=SimpleNamespace(value="x")))
    assert facts == LAYER._replace(window_left=20, soft_cap=30.0, attn_type="x")


# ---- registration


def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """A stand-in for the modules of SGLang that `register` uses."""
    backends: dict[str, Callable[..., Any]] = {}
    known, repeatable = ["triton"], ["triton"]
    choices = SimpleNamespace(
        ATTENTION_BACKEND_CHOICES=known,
        add_attention_backend_choices=known.extend,
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES=repeatable,
        add_deterministic_attention_backend_choices=repeatable.extend,
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
    assert backends == {"cute_attn": plugin.build}


def test_register_without_the_extension_points(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = builtins.__import__

    def no_sglang(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sglang"):
            raise ImportError(f"no module {name}")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_sglang)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "tested with SGLang 0.5.23" in caplog.text
