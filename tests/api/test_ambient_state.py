"""What torch's ambient state is, in which engines and training scripts may call, changes no result of any entry point:
the default device and dtype, autocast, inference mode.

The default device is "meta", which stands for a GPU: what is made there by mistake has no values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from cute_attn import emulator
from cute_attn.integrations import aten_flash, workspaces
from cute_attn.integrations.distributed.decode import Partials
from cute_attn.integrations.distributed.ranks import Ranks
from cute_attn.integrations.sglang.limits import ServerFacts
from cute_attn.integrations.sglang.metadata import PageTables
from cute_attn.integrations.sglang.steps import GraphTables, Operands, PlannedAttention
from cute_attn.reference.attention import attention
from cute_attn.runtime import counters, launch, staging
from cute_attn.runtime.staging import Staging
from tests.support.dense_attention import assert_near, random, seen
from tests.support.dense_attention import attention as oracle
from tests.support.entry_points import ENTRIES, NEW_RESULTS, PREFIXES, Entry, direct, operands
from tests.support.executors import GPU_MARKS
from tests.support.sglang_case import BF16, KINDS, Server, begin

State = Callable[[], AbstractContextManager[object]]


@contextlib.contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """Set what torch makes tensors of and where, as model code does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


# In fp32, which autocast would round.
REFERENCE = Entry(operands(32, dtype=torch.float16), direct(attention, compute_dtype=torch.float32), ())
CALLS = {**ENTRIES, **NEW_RESULTS, **PREFIXES, "the reference": REFERENCE}
ON_A_GPU = (*NEW_RESULTS, "the reference")
STATES: dict[str, tuple[State, ...]] = {  # of the first call, with its plan, and of later ones
    "float64": (functools.partial(defaults, torch.float64),),
    "bfloat16": (functools.partial(defaults, torch.bfloat16),),
    "autocast": (functools.partial(torch.autocast, "cpu", torch.bfloat16),),
    "inference": tuple(functools.partial(torch.inference_mode, mode) for mode in (True, False, True)),
}
AUTOCAST = (functools.partial(torch.autocast, "cuda", torch.bfloat16),)


def results(entry: Entry, states: Sequence[State], device: str = "cpu", backend: str = "auto") -> list[torch.Tensor]:
    """What calls in these states return and write, with one plan where there is one."""
    own = [{name: x.to(device, copy=True) for name, x in entry.tensors.items()} for _ in states]
    found: list[torch.Tensor] = []
    with states[0]():
        call = entry.begin(own[0], backend)
    for state, given in zip(states, own, strict=True):
        with state():
            found += tree_leaves(call({**given, **{name: x for name, x in own[0].items() if name in entry.planned}}))
        found += given.values()
    return [torch.as_tensor(x) for x in found if x is not None]


def assert_same(entry: Entry, states: Sequence[State], *where: str) -> None:
    found, expected = results(entry, states, *where), results(entry, [contextlib.nullcontext] * len(states), *where)
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("state", STATES)
def test_calls(state: str, name: str) -> None:
    assert_same(CALLS[name], STATES[state])


@pytest.mark.parametrize("name", [pytest.param(name, marks=GPU_MARKS) for name in ON_A_GPU])
def test_autocast_on_a_gpu(name: str) -> None:
    assert_same(CALLS[name], AUTOCAST, "cuda")


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *(("paged, mask", "fa2"), ("paged, mask", "fa3"), ("ragged", "fa3"), ("decode, scales", "auto")),
        *(("blocks", "auto"), ("variable blocks", "auto"), ("single prefill", "auto"), ("xqa", "auto")),
        ("trtllm context", "auto"),
    ],
)
def test_host_code_of_kernels(name: str, kernels: str) -> None:
    with emulator.using("sm_90a", kernels=kernels, sms=4):
        assert_same(ENTRIES[name], STATES["float64"], "cpu", "emulator")


# ---- what engines' plug-ins make


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torch_sdpa(dtype: torch.dtype) -> None:
    for kept in (aten_flash._uniform_lengths, aten_flash._page_per_request, workspaces._zeros):
        kept.cache_clear()
    q, k, v = (random(n, h, 64, seed=h + n) for n, h in ((6, 4), (32, 2), (32, 2)))
    with defaults(dtype):
        batch = (torch.stack((x, x)).transpose(1, 2) for x in (q, k, v))
        out = aten_flash.scaled_dot_product_flash_attention(*batch)[0]
    for request in out:
        assert_near(request.transpose(0, 1), None, oracle(q, k, v, seen(6, 32, causal=False)))


def test_steps_of_sglang() -> None:
    server, kind = Server(16, [40, 9], q_lens=[3, 1]), KINDS["full"]
    out = torch.empty_like(server.q)
    with defaults(torch.float64):
        attention = PlannedAttention(workspaces.Workspaces.on("cpu").planned, ServerFacts(*[BF16] * 2, 16))
        begin(server, attention)
        attention.run(Operands(kind, server.q, server.cache, out))
    server.check(out, kind)


def test_pinned_memory_is_asked_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch pins nothing else."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(staging.torch, "empty", lambda size, **options: asked.update(options))
    staging.CudaCopies(torch.device("cuda", 0)).buffer(8)
    assert asked == {"dtype": torch.int32, "device": "cpu", "pin_memory": True}


# ---- memory that is made in inference mode and kept, which may be written outside


def test_memory_that_is_kept() -> None:
    """Of plans, tile counters, partial results of ranks, and of steps in graphs."""
    cpu, rows = torch.device("cpu"), torch.arange(32, dtype=torch.int32).view(2, 16)
    with torch.inference_mode():
        growing, fixed = Staging(cpu), Staging(cpu)
        kept = [*growing.memory, *growing.written_on_device(8, 8, "layout"), fixed.upload(np.zeros(8), fixed=True)]
        kept.append(counters.Counters(launch.CPU, counters.TILE_COUNTERS).memory)
        kept += vars(Partials((2, 2, 64), torch.bfloat16, Ranks(None, 0, 2), cpu)).values()
        step = GraphTables(2, [PageTables(rows, 4), PageTables(rows, 4)], cpu).view(2, 3, with_mask=True)
    for memory in (*kept, *step.tables, *step):
        if isinstance(memory, torch.Tensor):
            memory.zero_()
