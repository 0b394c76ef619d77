"""What a call writes shares no memory with anything else that it has: refused in first and repeated calls alike."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, cast

import pytest
import torch

import cute_attn
from cute_attn import ArgumentError, emulator
from cute_attn import xqa as low_level
from perf.pretended_gpu import NullDriver
from tests.support.device_plan import emulated_device
from tests.support.entry_points import ENTRIES, OTHER_NAMES, PLAN_DECODE, Call, Entry, Planned, Tensors
from tests.support.launch_corpus import pretended

ALIGNMENT = 16


def with_room(tensors: Tensors, room: int) -> dict[str, torch.Tensor]:
    """Returns copies of tensors, with so many bytes of memory on both sides of each."""
    room = -(-room // ALIGNMENT) * ALIGNMENT
    copies = {}
    for name, x in tensors.items():
        memory = torch.zeros(room + x.nbytes + room + ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT + room
        copies[name] = memory[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    return copies


def crossing(x: torch.Tensor, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields tensors like another that start where x starts, end in its first bytes, or start in its last."""
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    first = x.data_ptr() - memory.data_ptr()
    last = first + (x.nbytes - 1) // ALIGNMENT * ALIGNMENT
    size = -(-like.nbytes // ALIGNMENT) * ALIGNMENT
    for start in dict.fromkeys((first, first + ALIGNMENT - size, last)):
        if 0 <= start <= memory.numel() - size:
            yield memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def assert_refused(call: Call, tensors: Tensors, *names: str) -> None:
    """The call raises an error that names both tensors, and writes nothing."""
    one, other = (OTHER_NAMES.get(name, re.escape(name)) for name in names)
    before = {name: x.clone() for name, x in tensors.items() if x.nbytes < 1 << 16}
    message = rf"^({one}) must not share memory with ({other}):|^({other}) must not share memory with ({one}):"
    with pytest.raises(ArgumentError, match=message):
        call(tensors)
    for name, x in before.items():
        assert torch.equal(x.view(torch.uint8), tensors[name].view(torch.uint8)), name


class Scene:
    """An entry point, its tensors, and a call that has run before, or not."""

    def __init__(self, entry: Entry, backend: str) -> None:
        self.entry = entry
        self.tensors = with_room(entry.tensors, max(entry.tensors[name].nbytes for name in entry.written))
        self.call = entry.begin(self.tensors, backend)
        if isinstance(self.call, Planned):
            self.tensors |= self.call.memory

    def refuses(self, written: str, name: str) -> None:
        """Asserts that the one written may not cross the other, wherever it moves, nor the other move there."""
        for moved, kept in ((written, name), (name, written)):
            if moved in self.entry.planned:
                continue
            for x in crossing(self.tensors[kept], self.tensors[moved]):
                memory = x.view(torch.uint8)
                before = memory.clone()
                if moved == name:
                    x.copy_(self.tensors[name])  # the values that the call reads
                assert_refused(self.call, {**self.tensors, moved: x}, written, name)
                memory.copy_(before)


def pairs(entry: Entry) -> list[tuple[str, str]]:
    """Returns each tensor that is written, with every other one: two that are written once."""
    others = [name for name in dict.fromkeys((*entry.tensors, *entry.planned)) if name not in entry.written]
    return [*itertools.combinations(entry.written, 2), *itertools.product(entry.written, others)]


class Driver(NullDriver):
    """Counts launches but those of the planner kernel, which write the memory of a plan."""

    def cuLaunchKernelEx(self, config: Any, artifact: Any, params: int, extra: int) -> tuple[int]:  # noqa: N802
        self.launches += artifact.spec["kernel"] != "plan"
        return (0,)


@pytest.mark.parametrize("entry", ENTRIES)
def test_shared_memory_is_refused(entry: str) -> None:
    driver = Driver()
    with pretended(driver):
        scene = Scene(ENTRIES[entry], "auto")
        for calls in (0, 3):
            for _ in range(calls):
                scene.call(scene.tensors)
            launches = driver.launches
            for pair in pairs(ENTRIES[entry]):
                scene.refuses(*pair)
            assert driver.launches == launches
        scene.call(scene.tensors)


@pytest.mark.emulator
@pytest.mark.parametrize("entry", [name for name, x in ENTRIES.items() if x.emulated])
def test_shared_memory_is_refused_on_the_emulator(entry: str) -> None:
    with emulator.using("sm_90a"):
        scene = Scene(ENTRIES[entry], "emulator")
        for calls in (0, 3):
            for _ in range(calls):
                scene.call(scene.tensors)
            for pair in pairs(ENTRIES[entry]):
                scene.refuses(*pair)


LENGTHS = {"kv_indptr": "indptr", "last_page_len": "last_page_len"}  # of decode on the device, arguments of `plan`


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_a_plan_leaves_on_the_device(name: str) -> None:
    """Plans for other options read them where the caller has them."""
    steps = ENTRIES["decode"]

    def begin(given: Tensors, backend: str = "auto", _: Any = None) -> Call:
        lengths = {argument: given[length] for length, argument in LENGTHS.items()}
        runs: Any = steps.begin(given, backend, {"plan": lengths})
        return cast(Call, runs._replace(kept=(*runs.kept, *LENGTHS)))

    tensors = steps.tensors | {length: PLAN_DECODE[argument] for length, argument in LENGTHS.items()}
    with pretended(NullDriver()), emulated_device():
        scene = Scene(Entry(tensors, begin, planned=(*steps.planned, *LENGTHS)), "auto")
        for calls in (0, 3):
            for _ in range(calls):
                scene.call(scene.tensors)
            for written in steps.written:
                scene.refuses(written, name)


# ---- nothing is left out

OUTPUTS = {"out", "lse", "output", "output_k", "output_v"}
UNREAD = {  # refused, or not used, or read before anything is written
    "BatchAttention.run": {"profiler_buffer"},
    "trtllm_batch_context_with_kv_cache": {"kv_cache_sf", "multi_ctas_kv_counter_buffer"},
    "trtllm_batch_decode_with_kv_cache": {"causal_seqlens_kv_global", "multi_ctas_kv_counter_buffer", "request_order"},
    "trtllm_batch_decode_with_kv_cache_mla": {
        "causal_seqlens_kv_global",
        "multi_ctas_kv_counter_buffer",
        "sparse_mla_top_k_lens",
    },
    "BatchMLAPagedAttentionWrapper.run": {"kv_len", "page_table", "profiler_buffer"},
    "trtllm_ragged_attention_deepseek": {"q_seq_lens_cpu", "kv_seq_lens_cpu", "sage_attn_sfs"},
}


def public_functions() -> dict[CodeType, Callable[..., Any]]:
    """Returns what users call, and what they run, by code."""
    found = []
    for module in (cute_attn, low_level):
        for value in (getattr(module, name) for name in module.__all__):
            found.append(getattr(value, "run", None) if inspect.isclass(value) else value)
    return {f.__code__: f for f in map(inspect.unwrap, filter(callable, found)) if inspect.isfunction(f)}


def tensors_of(arguments: dict[str, Any]) -> set[str]:
    """Returns the names of arguments that are tensors or have some."""
    items = ((name, x if isinstance(x, tuple | list) else (x,)) for name, x in arguments.items())
    return {name for name, parts in items if any(isinstance(x, torch.Tensor) for x in parts)}


def test_entries_give_every_tensor() -> None:
    """A function that writes memory of its caller is an entry, with all tensors that it may take."""
    functions = public_functions()
    given: dict[CodeType, set[str]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in functions:
            given.setdefault(frame.f_code, set()).update(tensors_of(frame.f_locals))

    for entry in ENTRIES.values():
        with pretended(NullDriver()):
            scene = Scene(entry, "auto")
            sys.setprofile(note)
            try:
                scene.call(scene.tensors)
            finally:
                sys.setprofile(None)
    missing = {}
    for code, function in functions.items():
        parameters = inspect.signature(function).parameters.values()
        tensors = {x.name for x in parameters if "Tensor" in str(x.annotation)}
        left = tensors - given.get(code, set()) - UNREAD.get(function.__qualname__, set())
        if left and (code in given or tensors & OUTPUTS):
            missing[function.__qualname__] = left
    assert not missing
