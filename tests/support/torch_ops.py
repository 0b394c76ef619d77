"""Calls of every operator of `cute_attn.ops`: small, on any device. Most are those of `entry_points`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

import cute_attn
from tests.support.dense_attention import random
from tests.support.engine_case import Batch, Tokens, workspace
from tests.support.entry_points import ENTRIES, NEW_RESULTS, Entry

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16


class Call(NamedTuple):
    """A public call: a function of the tensors that it reads or writes."""

    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    names: Sequence[str] = ()

    def with_own_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return copies of the tensors, with their strides."""
        return tuple(x.clone() for x in self.tensors)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graph of another test is kept; modules that import this use it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(call: Call, function: Callable[..., Any], exact: bool = True) -> None:
    """A compiled function gives the numbers of the eager one, and writes the same."""
    expected_tensors, tensors = call.with_own_tensors(), call.with_own_tensors()
    expected, result = call.function(*expected_tensors), function(*tensors)
    for want, got in zip([*tree_leaves(expected), *expected_tensors], [*tree_leaves(result), *tensors], strict=True):
        if want is None:
            assert got is None
            continue
        assert (want.dtype, want.shape) == (got.dtype, got.shape)
        if exact:
            assert torch.equal(want.flatten().view(torch.uint8), got.flatten().view(torch.uint8))
        else:
            torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3, equal_nan=True)


Case = Callable[[str], Call]
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


def operands(device: str, qo_len: int = 5, kv_len: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = enumerate(((qo_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS)))
    q, k, v = (random(*size, DIM, dtype=BF16, device=device, seed=i) for i, size in sizes)
    return q, k, v


# ---- calls of `entry_points`


def call_of(entry: Entry, new_results: bool = False, **options: Any) -> Case:
    """The call of an entry, with further `options`; with `new_results` it allocates them. Tensors of zeros, which would
    hide that a result is not written, hold other numbers.
    """

    def make(device: str) -> Call:
        given = entry.on(device, ("out", "lse") if new_results else ())
        for x in given.values():
            if x.is_floating_point() and not x.cpu().any():  # torch on a GPU knows no `any` of fp8
                x.fill_(7.0)
        begun, names = entry.begin(given), [name for name in given if name not in entry.planned]
        if "method" in options:
            begun = begun._replace(method=options["method"])  # type: ignore[attr-defined]
        more = {name: x for name, x in options.items() if name != "method"}
        function = lambda *tensors: begun({**dict(zip(names, tensors, strict=True)), **more})  # noqa: E731
        return Call(function, tuple(given[name] for name in names), names)

    return make


# Calls of plans in CUDA graphs are those of plans; the others read lengths on the host, or are torch's own operators.
UNTRACED = ("CUDA graph", "blocks", "low level", "concat", "positions", "context", "fmha", "trtllm ragged")
ALLOCATING = ("single prefill", "single decode, scales", "paged", "paged with ranges", "paged with sinks", "ragged")
ALLOCATING += ("decode, scales", "xqa", "xqa, ragged", "trtllm, scales and lse", "latent", "latent, planned")
CASES |= {name: call_of(entry) for name, entry in ENTRIES.items() if not any(word in name for word in UNTRACED)}
CASES |= {f"{name}, new results": call_of(ENTRIES[name], True, return_lse=True) for name in ALLOCATING}
CASES |= {
    "paged, forward": call_of(ENTRIES["paged"], True, method="forward", causal=False, sm_scale=0.2, window_left=3),
    "ragged, forward": call_of(ENTRIES["ragged"], True, method="forward_return_lse", causal=True, logits_soft_cap=5.0),
    "decode, forward": call_of(ENTRIES["decode"], True, method="forward", window_left=4, v_scale=0.5),
    "dequantise": call_of(NEW_RESULTS["dequantise"], output_dtype=torch.float16),
    **{name: call_of(NEW_RESULTS[name]) for name in ("merge two", "merge several", "quantise")},
}


# ---- arguments by position, and in a list


@case
def single_prefill_by_position(device: str) -> Call:
    def function(q: Any, k: Any, v: Any, mask: Any) -> Any:
        nothing = (None,) * 4
        return cute_attn.single_prefill_with_kv_cache(q, k, v, *nothing, mask, None, False, "NHD", "ALIBI")

    return Call(function, (*operands(device), random(5, 9, device=device) > -0.5))


@case
def sink_run(device: str) -> Call:
    call = call_of(ENTRIES["paged with sinks"], True)(device)
    run = ENTRIES["paged with sinks"].begin(ENTRIES["paged with sinks"].on(device)).made.run
    return Call(lambda q, k, v, sinks: run(q, (k, v), sinks, 0.2), call.tensors, call.names)


@case
def trtllm_batch_decode(device: str) -> Call:
    call = call_of(ENTRIES["trtllm, scales and lse"], True)(device)
    options = {"out_dtype": "float16", "kv_layout": "NHD", "lse_layout": "HN", "return_lse": True, "max_seq_len": 16}

    def function(*tensors: Any) -> Any:
        given = dict(zip(call.names, tensors, strict=True))
        cache = given.pop("k of kv_cache"), given.pop("v of kv_cache")
        return cute_attn.trtllm_batch_decode_with_kv_cache(
            **{**given, **options, "kv_cache": cache, "sinks": [given["sinks"]]}
        )

    return Call(function, call.tensors, call.names)


# ---- batches over pages


def tokens(device: str) -> Tokens:
    return Tokens(Batch((3, 1, 2), (20, 16, 5), (HEADS, KV_HEADS), DIM, page_size=PAGE), device)


def planned(kind: str, tokens: Tokens, **options: Any) -> Any:
    """A wrapper for paged caches, "Prefill" or "Decode", with a plan."""
    wrapper = getattr(cute_attn, f"Batch{kind}WithPagedKVCacheWrapper")(workspace(tokens.device))
    bounds = (tokens.qo_indptr, tokens.kv_indptr) if kind == "Prefill" else (tokens.kv_indptr,)
    sizes = HEADS, KV_HEADS, DIM, PAGE
    wrapper.plan(*bounds, tokens.kv_indices, tokens.last_page_len, *sizes, q_data_type=BF16, **options)
    return wrapper
