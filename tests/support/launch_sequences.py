"""Sequences of calls whose launches the corpus holds (`launch_corpus`): what users and engines do in a row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import cute_attn
from tests.support.batch_case import BatchCase, wrapper
from tests.support.entry_points import ints
from tests.support.graphs import graph_wrapper
from tests.support.launch_corpus import Recorder, Script
from tests.support.paged_cache import ends

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
WORKSPACE_BYTES = 32 << 20
E4M3 = torch.float8_e4m3fn
SEQUENCES: dict[str, Script] = {}


def sequence(name: str) -> Callable[[Script], Script]:
    """Register a script."""

    def register(script: Script) -> Script:
        SEQUENCES[name] = script
        return script

    return register


# ---- single requests


def keys(rec: Recorder, name: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(rec.randn(f"{x}{name}", tokens, KV_HEADS, DIM, dtype=dtype) for x in "kv")


def single(rec: Recorder, backend: str, qo_len: int, kv_len: int) -> None:
    """First calls, repeats, other lengths, and every optional tensor, first and repeated."""
    prefill = partial(cute_attn.single_prefill_with_kv_cache, backend=backend)
    for i in range(3):
        q, (k, v) = rec.randn(f"q{i}", qo_len, HEADS, DIM), keys(rec, str(i), kv_len)
        rec.call(f"plain {i}", prefill, q, k, v, causal=True)
        rec.call(f"lse {i}", prefill, q, k, v, causal=True, return_lse=True)
        out, lse = rec.randn(f"out{i}", qo_len, HEADS, DIM), rec.randn(f"lse{i}", qo_len, HEADS, dtype=torch.float32)
        rec.call(f"buffers {i}", prefill, q, k, v, causal=True, return_lse=True, out=out, lse=lse)
        rec.call(f"window, cap, scale {i}", prefill, q, k, v, causal=True, window_left=20, sm_scale=0.3 + i)
        mask = rec.named(f"mask{i}", torch.ones(-(-qo_len * kv_len // 8), dtype=torch.uint8))
        rec.call(f"mask {i}", prefill, q, k, v, packed_custom_mask=mask)
        sinks = rec.randn(f"sinks{i}", HEADS, dtype=torch.float32)
        rec.call(f"sinks {i}", prefill, q, k, v, causal=True, sinks=sinks)
        scale = rec.randn(f"k_scale{i}", 1, dtype=torch.float32)
        rec.call(f"scale in a tensor {i}", prefill, q, k, v, causal=True, k_scale=scale)
        rec.call(f"head dims differ {i}", prefill, q, k[..., :32], v)
        rec.call(f"plain again {i}", prefill, q, k, v, causal=True)


sequence("single prefill, fa2")(partial(single, backend="fa2", qo_len=24, kv_len=80))
sequence("single prefill, fa3")(partial(single, backend="fa3", qo_len=24, kv_len=80))
sequence("single prefill, fa2, split keys")(partial(single, backend="fa2", qo_len=2, kv_len=6000))
sequence("single prefill, fa3, split keys")(partial(single, backend="fa3", qo_len=2, kv_len=6000))


@sequence("single decode over a growing cache")
def growing_decode(rec: Recorder) -> None:
    for dtype in (torch.bfloat16, E4M3):
        k, v = keys(rec, f" {dtype}", 4000, dtype)
        for i, n in enumerate((1, 2, 500, 501, 2047, 2048, 3999, 4000)):
            q = rec.randn(f"q{i} {dtype}", HEADS, DIM)
            for backend in ("auto", "fa2"):
                step = f"{n} keys, {dtype}, {backend}"
                rec.call(step, cute_attn.single_decode_with_kv_cache, q, k[:n], v[:n], backend=backend)
                rec.call(f"{step}, again", cute_attn.single_decode_with_kv_cache, q, k[:n], v[:n], backend=backend)


# ---- batches


class Batch:
    """A batch wrapper under test; `plan` takes lengths, which may be those of an earlier plan."""

    def __init__(self, rec: Recorder, kind: str, backend: str, graph: bool, requests: int) -> None:
        self.rec, self.kind, self.plans = rec, kind, 0
        case, buffers = BatchCase(kind, (1,) * requests, (1,) * requests), dict[str, torch.Tensor]()
        if graph:
            self.made, buffers = graph_wrapper(case, "cpu", 512, 0, backend=backend)
        else:
            self.made = wrapper(case, backend=backend)
        rec.named("workspace", self.made._float_workspace_buffer)
        for name, buffer in buffers.items():
            rec.named(f"{name.rpartition('_')[0]} buffer", buffer)

    def plan(self, qo_lens: Sequence[int], kv_lens: Sequence[int], **options: Any) -> None:
        self.plans += 1
        label = f"plan {self.plans}"
        qo, options = ends(qo_lens), {"q_data_type": torch.bfloat16, **options}
        if self.kind == "ragged":
            self.rec.call(label, self.made.plan, qo, ends(kv_lens), HEADS, KV_HEADS, DIM, **options)
            return
        pages = [-(-n // PAGE) for n in kv_lens]
        indices = self.rec.named(f"pages of {label}", torch.arange(sum(pages), dtype=torch.int32))
        last = ints(*[(n - 1) % PAGE + 1 for n in kv_lens])
        given = (ends(pages), indices, last, HEADS, KV_HEADS, DIM, PAGE)
        given = given if self.kind == "decode" else (qo, *given)
        self.rec.call(label, self.made.plan, *given, **options)

    def run(self, label: str, rows: int, keys: int, heads: int = HEADS, method: str = "run", **options: Any) -> None:
        label = f"{label} under plan {self.plans}"
        dtype = options.pop("kv_dtype", torch.bfloat16)
        q = self.rec.randn(f"q of {label}", rows, heads, DIM)
        shape = (keys,) if self.kind == "ragged" else (keys, PAGE)
        kv = [self.rec.randn(f"{x} of {label}", *shape, KV_HEADS, DIM, dtype=dtype) for x in "kv"]
        run = getattr(self.made, method)
        self.rec.call(label, run, q, *(kv if self.kind == "ragged" else [tuple(kv)]), **options)


def prefill(rec: Recorder, kind: str, backend: str, graph: bool = False) -> None:
    """Plans of other lengths, other options and other batch sizes; runs with other tensors, heads and options."""
    batch = Batch(rec, kind, backend, graph, requests=2)
    size = 200 if kind == "ragged" else 16
    long = 6000 if kind == "ragged" else 400
    batch.plan((20, 30), (90, 70), causal=True)
    for i in range(3):
        batch.run(f"run {i}", 50, size)
    batch.run("lse", 50, size, return_lse=True)
    batch.run("q of other rows", 7, size)
    batch.run("scale of k", 50, size, k_scale=0.5)
    sinks = rec.randn("sinks", HEADS, dtype=torch.float32)
    if kind == "paged":
        batch.run("sinks", 50, size, sinks=sinks)
        batch.run("sinks again", 50, size, sinks=sinks)
    batch.plan((26, 24), (60, 100), causal=True)
    for i in range(2):
        batch.run(f"run {i}", 50, size)
    batch.run("forward", 50, size, method="forward", causal=True, window_left=16)
    batch.run("forward again", 50, size, method="forward", causal=True, window_left=16)
    batch.run("run after forward", 50, size)
    batch.run("fewer heads", 50, size, heads=KV_HEADS)
    batch.plan((1, 2), (64, 5900), causal=True)
    for i in range(2):
        batch.run(f"split keys {i}", 3, long)
    batch.plan((-1, 2), (5, 10), causal=True)
    batch.run("after a plan that failed", 3, long)
    batch.plan((20, 30), (90, 70), causal=True)
    batch.run("the first lengths again", 50, size)
    if not graph:
        batch.plan((20, 30, 1), (90, 70, 1), causal=False, logits_soft_cap=30.0)
        batch.run("another batch size and options", 51, size)


for _kind in ("ragged", "paged"):
    for _backend in ("fa2", "fa3"):
        sequence(f"{_kind} prefill, {_backend}")(partial(prefill, kind=_kind, backend=_backend))
        sequence(f"{_kind} prefill, {_backend}, CUDA graphs")(
            partial(prefill, kind=_kind, backend=_backend, graph=True)
        )


def decode(rec: Recorder, backend: str, dtype: torch.dtype, graph: bool = False) -> None:
    """Decode steps: page indices of a new tensor in every plan, growing lengths, several layers each."""
    batch = Batch(rec, "decode", backend, graph, requests=3)
    for lengths in ((30, 100, 47), (31, 101, 48), (32, 102, 49), (33, 5000, 50)):
        batch.plan((1, 1, 1), lengths, kv_data_type=dtype)
        for layer in range(2):
            batch.run(f"layer {layer}", 3, 330, kv_dtype=dtype)
        batch.run("into a buffer", 3, 330, kv_dtype=dtype, out=rec.randn(f"out {lengths}", 3, HEADS, DIM))
    batch.run("scale of v", 3, 330, kv_dtype=dtype, v_scale=2.0)
    sinks = rec.randn("sinks", HEADS, dtype=torch.float32)
    for i in range(3):
        batch.run(f"sinks {i}", 3, 330, kv_dtype=dtype, sinks=sinks)
    batch.plan((1, 1, 1), (30, 100, 47), kv_data_type=dtype, window_left=40)
    batch.run("a window", 3, 330, kv_dtype=dtype)


for _backend, _dtype in (("fa2", torch.bfloat16), ("xqa", torch.bfloat16), ("auto", E4M3)):
    sequence(f"decode, {_backend}, {_dtype}")(partial(decode, backend=_backend, dtype=_dtype))
    sequence(f"decode, {_backend}, {_dtype}, CUDA graphs")(partial(decode, backend=_backend, dtype=_dtype, graph=True))


@sequence("two wrappers in two threads")
def threads(rec: Recorder) -> None:
    def work(name: str, kv_len: int) -> None:
        workspace = rec.named(f"workspace of {name}", torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8))
        made = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
        rec.call(f"{name} plans", made.plan, ints(0, 9), ints(0, kv_len), HEADS, KV_HEADS, DIM, causal=True)
        q = rec.randn(f"q of {name}", 9, HEADS, DIM, dtype=torch.float16)
        k, v = keys(rec, f" of {name}", kv_len, torch.float16)
        for i in range(3):
            rec.call(f"{name} runs {i}", made.run, q, k, v)

    for name, kv_len in (("first", 70), ("second", 50)):
        thread = threading.Thread(target=work, args=(name, kv_len))
        thread.start()
        thread.join()


# ---- without a plan


def unplanned(rec: Recorder, function: Callable[..., Any], dtype: torch.dtype) -> None:
    """Engines' decode: lengths at other addresses, tables that grow, every optional tensor, and a bad call between."""
    workspace = rec.named("workspace", torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8))
    for i, width in enumerate((8, 8, 8, 9, 9, 40)):
        q = rec.randn(f"q{i}", 3, HEADS, DIM)
        cache = rec.randn(f"cache{i}", 40, 2, KV_HEADS, PAGE, DIM, dtype=dtype)
        tables = rec.named(f"tables{i}", torch.randint(40, (3, width), dtype=torch.int32))
        lengths = rec.named(f"lengths{i}", torch.randint(1, 100, (3,), dtype=torch.int32))
        call = partial(rec.call, kv_layout="HND", bmm1_scale=0.125)
        given = (function, q, cache, workspace, tables, lengths, width * PAGE)
        call(f"plain {i}", *given)
        call(f"into a buffer {i}", *given, out=rec.randn(f"out{i}", 3, HEADS, DIM))
        call(f"a window and sinks {i}", *given, window_left=30, sinks=rec.randn(f"s{i}", HEADS, dtype=torch.float32))
        call(f"drafts {i}", *given[:1], rec.randn(f"drafts{i}", 6, HEADS, DIM), *given[2:], q_len_per_req=2)
        call(f"tables of another batch {i}", *given[:4], tables[:2], *given[5:])


sequence("xqa decode, bf16")(
    partial(unplanned, function=cute_attn.xqa_batch_decode_with_kv_cache, dtype=torch.bfloat16)
)
sequence("xqa decode, e4m3")(partial(unplanned, function=cute_attn.xqa_batch_decode_with_kv_cache, dtype=E4M3))
sequence("trtllm decode, bf16")(
    partial(unplanned, function=cute_attn.trtllm_batch_decode_with_kv_cache, dtype=torch.bfloat16)
)


@sequence("latent attention")
def latent(rec: Recorder) -> None:
    """Both forms, over 16 and 8 bits: heads of every tile, workspaces that are too small, scales in tensors."""
    for i, (heads, q_len, dtype) in enumerate(((16, 1, torch.bfloat16), (32, 1, E4M3), (128, 2, torch.bfloat16))):
        workspace = rec.named(f"workspace{i}", torch.zeros(WORKSPACE_BYTES << i, dtype=torch.uint8))
        q = rec.randn(f"q{i}", 3, q_len, heads, 576)
        cache = rec.randn(f"cache{i}", 40, PAGE, 576, dtype=dtype)
        tables = rec.named(f"tables{i}", torch.randint(40, (3, 8), dtype=torch.int32))
        lengths = rec.named(f"lengths{i}", torch.randint(1, 100, (3,), dtype=torch.int32))
        given = (q, cache, workspace, 128, 512, 64, tables, lengths, 8 * PAGE)
        call = partial(rec.call, bmm1_scale=0.125)
        call(f"plain {i}", cute_attn.trtllm_batch_decode_with_kv_cache_mla, *given)
        scale = rec.randn(f"scale{i}", 1, dtype=torch.float32)
        rec.call(f"scale {i}", cute_attn.trtllm_batch_decode_with_kv_cache_mla, *given, bmm1_scale=scale)
        sinks = rec.randn(f"sinks{i}", heads, dtype=torch.float32)
        call(f"lse, sinks {i}", cute_attn.trtllm_batch_decode_with_kv_cache_mla, *given, sinks=sinks, return_lse=True)
        small = rec.named(f"small workspace{i}", torch.zeros(1 << 10, dtype=torch.uint8))
        made = cute_attn.BatchMLAPagedAttentionWrapper(small)
        arrays = {"kv_indptr": ints(0, 8, 16, 24), "kv_indices": tables.flatten()}
        bounds = ints(0, q_len, 2 * q_len, 3 * q_len)
        where = bounds, *(rec.named(f"{name}{i}", x.clone()) for name, x in arrays.items()), lengths
        rec.call(f"plan {i}", made.plan, *where, heads, 512, 64, PAGE, False, 0.1, q.dtype, dtype)
        rec.call(f"run {i}", made.run, query=q.flatten(0, 1), kv_cache=cache, bmm2_scale=0.5, return_lse=True)


@sequence("rows appended to a cache")
def append(rec: Recorder) -> None:
    for i, rows in enumerate((5, 5, 9)):
        k, v = keys(rec, str(i), rows)
        cache = rec.randn(f"cache{i}", 6, 2, PAGE, KV_HEADS, DIM)
        named = {
            "batch": torch.zeros(rows, dtype=torch.int32),
            "positions": torch.arange(rows, dtype=torch.int32),
            "pages": torch.arange(6, dtype=torch.int32),
            "indptr": ints(0, 6),
            "last": ints(PAGE),
        }
        batch, positions, *table = (rec.named(f"{name}{i}", x) for name, x in named.items())
        rec.call(f"append {i}", cute_attn.append_paged_kv_cache, k, v, batch, positions, cache, *table)
