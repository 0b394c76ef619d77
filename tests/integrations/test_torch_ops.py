"""Public calls under torch.compile, as operators of torch.library."""

from __future__ import annotations

import copy
import gc
import inspect
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cute_attn
from cute_attn.ops import register, trace
from cute_attn.ops.declare import DECLARED
from tests.support import torch_ops
from tests.support.executors import GPU_MARKS, NEEDS_TRITON, needs_gpu
from tests.support.paged_cache import ends
from tests.support.torch_ops import CASES, Call, assert_same, fresh_dynamo

__all__ = ["fresh_dynamo"]  # a fixture

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class Recorder(TorchDispatchMode):
    """Keeps the operators of cute_attn that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cute_attn":
            self.calls.append((function, copy.deepcopy(args)))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls under a recorder go to their operators, as where Dynamo traces them. Within these there is no mode."""
    for declaration in DECLARED.values():
        space = inspect.unwrap(declaration.function).__globals__
        monkeypatch.setitem(space, "is_dynamo_compiling", torch._C._len_torch_dispatch_stack)


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


# ---- all operators

BACKENDS = [
    ("cpu", "aot_eager"),
    pytest.param("cuda", "aot_eager", marks=GPU_MARKS),
    pytest.param("cuda", "inductor", marks=(*GPU_MARKS, NEEDS_TRITON)),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_calls_are_eager_calls(name: str, device: str, backend: str) -> None:
    call = CASES[name](device)
    assert_same(call, compiled(call.function, backend), exact=device == "cpu")


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str, traced: None) -> None:
    call = CASES[name]("cpu")
    with Recorder() as recorder:
        call.function(*call.tensors)
    assert recorder.calls
    for operator, arguments in recorder.calls:
        floats8 = any(x.dtype == torch_ops.E4M3 for x in tree_leaves(arguments) if isinstance(x, torch.Tensor))
        checks = OPCHECKS[1:] if floats8 else OPCHECKS  # torch compares no fp8 tensors
        torch.library.opcheck(operator, arguments, test_utils=checks)


def test_every_operator_has_a_case(traced: None) -> None:
    with Recorder() as recorder:
        for call in [make("cpu") for make in CASES.values()]:
            call.function(*call.tensors)
    assert {operator._opname for operator, _ in recorder.calls} == set(DECLARED)


@pytest.mark.parametrize("name", DECLARED)
def test_arguments_reach_the_operator_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a string of its own name here. Variables of closures are none that Dynamo's `locals()` may meet."""
    function = inspect.unwrap(DECLARED[name].function)
    parameters = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    seen: list[trace.Arguments] = []
    monkeypatch.setitem(function.__globals__, "is_dynamo_compiling", lambda: True)
    monkeypatch.setattr(trace, "operator", lambda operator: seen.append if operator == name else None)
    function(**{parameter: parameter for parameter in parameters})
    assert {parameter: seen[0][parameter] for parameter in parameters} == {x: x for x in parameters}
    taken = [parameter.split(":")[0] for parameter in register.KINDS[name].split(" ")]
    assert taken == [parameter for parameter in parameters if parameter != "self"]
    assert function.__code__.co_cellvars == ()


def test_positions_that_no_operator_takes() -> None:
    tokens = torch_ops.tokens("cpu")
    wrapper, q, cache = torch_ops.planned("Prefill", tokens, causal=True), tokens.q, tokens.caches()
    for positional in ((0.5, 2.0), (None, q), (q, None, True)):
        with pytest.raises(Exception, match=r"torch\.compile takes tensors, and one number after them"):
            compiled(lambda *args: wrapper.run(q, cache, *args))(*positional)


# ---- what a graph keeps and what it does not


def test_new_plans_need_no_new_graph() -> None:
    q, k, v = torch_ops.operands("cpu", 6, 10)
    wrapper = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(torch_ops.workspace("cpu"))

    def plan(qo_lens: list[int], kv_lens: list[int], **options: Any) -> None:
        heads = torch_ops.HEADS, torch_ops.KV_HEADS, torch_ops.DIM
        lengths = ends(qo_lens), ends(kv_lens)
        wrapper.plan(*lengths, *heads, causal=True, q_data_type=torch.bfloat16, **options)

    counter = CompileCounter()
    function = compiled(lambda q, k, v: wrapper.run_return_lse(q, k, v), counter)
    for qo_lens, kv_lens in (([2, 4], [5, 5]), ([1, 5], [2, 8]), ([3, 2, 1], [4, 5, 1])):
        plan(qo_lens, kv_lens)
        for got, want in zip(function(q, k, v), wrapper.run_return_lse(q, k, v), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count == 1
    plan([2, 4], [5, 5], o_data_type=torch.float32)  # another dtype of results: another graph
    assert function(q, k, v)[0].dtype == torch.float32
    assert counter.frame_count == 2


def test_lengths_may_be_dynamic() -> None:
    counter = CompileCounter()
    function = compiled(lambda q, k, v: cute_attn.single_prefill_with_kv_cache(q, k, v, return_lse=True), counter)
    for qo_len, kv_len in ((5, 9), (7, 12), (2, 30)):
        tensors = torch_ops.operands("cpu", qo_len, kv_len)
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        for got, want in zip(
            function(*tensors), cute_attn.single_prefill_with_kv_cache(*tensors, return_lse=True), strict=True
        ):
            assert torch.equal(got, want)
    assert counter.frame_count == 1


def test_dynamic_batches_of_decode() -> None:
    def function(q: Any, cache: Any, scratch: Any, tables: Any, lens: Any, longest: int) -> Any:
        return cute_attn.xqa_batch_decode_with_kv_cache(q, cache, scratch, tables, lens, longest, return_lse=True)

    traced = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    tokens, scratch = torch_ops.tokens("cpu"), torch_ops.workspace("cpu")
    for batch, longest in ((3, 32), (2, 31)):
        q, tables, lens = (x[:batch] for x in (tokens.q, tokens.block_tables(), tokens.seq_lens))
        tensors = q, torch.stack(tokens.caches(), 1), scratch, tables, lens, longest
        for got, want in zip(traced(*tensors), function(*tensors), strict=True):
            assert torch.equal(got, want)


def test_an_append_is_seen_by_the_run_after_it() -> None:
    tokens = torch_ops.tokens("cpu")
    wrapper, (k, v) = torch_ops.planned("Decode", tokens), torch_ops.operands("cpu", 6, 6)[1:]

    def step(q: Any, k: Any, v: Any, batch: Any, positions: Any, cache: Any, *pages: Any) -> Any:
        cute_attn.append_paged_kv_cache(k, v, batch, positions, cache, *pages)
        return wrapper.run(q * 2, cache) + 1

    where = cute_attn.get_batch_indices_positions(tokens.qo_indptr, tokens.seq_lens, 6)
    pages = torch.stack(tokens.caches(), 1), tokens.kv_indices, tokens.kv_indptr, tokens.last_page_len
    call = Call(step, (tokens.q[:3], k, v, *where, *pages))
    assert_same(call, compiled(step))
    untouched = wrapper.run(call.tensors[0] * 2, call.tensors[5]) + 1
    assert not torch.equal(step(*call.with_own_tensors()), untouched)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    def layer(q: Any, k: Any, v: Any, out: Any) -> Any:
        first, lse = cute_attn.single_prefill_with_kv_cache(q.neg(), k, v, return_lse=True)
        cute_attn.single_prefill_with_kv_cache(first, k, v, out=out)
        return lse, out + 1

    q, k, v = torch_ops.operands("cpu")
    results = [torch.zeros_like(q) for _ in range(2)]
    want, got = layer(q, k, v, results[0]), compiled(layer, "inductor")(q, k, v, results[1])
    assert all(map(torch.equal, [*want, results[0]], [*got, results[1]]))


# ---- errors. Gradients: `tests/api/test_gradients.py`


def test_a_run_needs_a_plan() -> None:
    wrapper = cute_attn.BatchDecodeWithPagedKVCacheWrapper(torch_ops.workspace("cpu"))
    with pytest.raises(Exception, match=r"plan\(\) must come before run\(\) is traced"):
        compiled(wrapper.run)(torch_ops.tokens("cpu").q[:3], torch_ops.tokens("cpu").caches())


def test_errors_of_the_call_are_those_of_the_eager_call() -> None:
    q, k, v = torch_ops.operands("cpu")
    with pytest.raises(cute_attn.NotSupported, match="fa3 refuses"):
        compiled(cute_attn.single_prefill_with_kv_cache)(q, k, v, backend="fa3")


def test_a_handle_does_not_keep_its_wrapper() -> None:
    tokens = torch_ops.tokens("cpu")
    wrapper, q, cache = torch_ops.planned("Decode", tokens), tokens.q[:3], torch.stack(tokens.caches(), 1)
    handle, o_dtype = wrapper._handle, wrapper._o_dtype
    run = register.OPERATORS["paged_decode_run"]
    flat = [q, [cache], *[None] * 8, False, None, None, None, None, None, None]
    expected = wrapper.run(q, cache)
    assert torch.equal(run(handle, o_dtype, [], None, *flat)[0], expected)
    del wrapper
    gc.collect()
    with pytest.raises(cute_attn.RuntimeArgumentError, match=f"handle {handle} stands for no batch wrapper"):
        run(handle, o_dtype, [], None, *flat)


# ---- CUDA graphs


@needs_gpu
@NEEDS_TRITON
def test_cuda_graphs_of_inductor_see_new_plans() -> None:
    """mode="reduce-overhead" captures a run; its replays compute what the wrapper is planned for then."""
    tokens = torch_ops.tokens("cuda")
    q, cache, indptr, indices = tokens.q[:3], tokens.caches(), tokens.kv_indptr, tokens.kv_indices
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, len(indices), 3)]
    wrapper = cute_attn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch_ops.workspace("cuda"), *buffers)
    heads = torch_ops.HEADS, torch_ops.KV_HEADS, torch_ops.DIM, torch_ops.PAGE
    plain = torch_ops.planned("Decode", tokens)
    wrapper.plan(indptr, indices, tokens.last_page_len, *heads, q_data_type=torch_ops.BF16)
    wrapper.run(q, cache)  # a run before any capture
    function = compiled(lambda q: wrapper.run(q * 2, cache) + 1, "inductor", mode="reduce-overhead")
    for step in range(6):
        lengths = (tokens.last_page_len - step % 3).clamp(min=1)
        wrapper.plan(indptr, indices, lengths, *heads, q_data_type=torch_ops.BF16)
        plain.plan(indptr, indices, lengths, *heads, q_data_type=torch_ops.BF16)
        torch.compiler.cudagraph_mark_step_begin()
        got = function(q).clone()
        # The sum cancels: an output that rounds otherwise in another schedule differs by its own ulp.
        torch.testing.assert_close(got, plain.run(q * 2, cache) + 1, rtol=2**-7, atol=2**-7)


@needs_gpu
def test_a_wrapper_without_cuda_graphs_is_not_captured() -> None:
    tokens = torch_ops.tokens("cuda")
    wrapper, q, cache = torch_ops.planned("Decode", tokens), tokens.q[:3], tokens.caches()
    function = compiled(lambda q: wrapper.run(q, cache), "eager")
    function(q)
    with (
        pytest.raises(cute_attn.RuntimeArgumentError, match="make the wrapper with use_cuda_graph=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        function(q)
