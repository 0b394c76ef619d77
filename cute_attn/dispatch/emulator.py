"""The emulator as a backend: the host code of the GPU backends on CPU tensors, and their kernels from PTX."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch

from cute_attn.dispatch.capabilities import Load
from cute_attn.dispatch.families import FAMILIES, KernelFamily
from cute_attn.dispatch.select import emulated, load_class, load_of_batch
from cute_attn.emulator import adapter, settings
from cute_attn.emulator.errors import LaunchFault
from cute_attn.errors import ArgumentError
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import ROLES, Fire, Runner, optional_tensors
from cute_attn.kernels.host.prepared import prepared
from cute_attn.problem import (
    BatchLimits,
    BatchProblem,
    DecodeProblem,
    DeviceLengths,
    Extras,
    Lengths,
    Request,
    Settings,
)
from cute_attn.request.operands import ALIGNMENT, NARROW_ALIGNMENT, aligned
from cute_attn.runtime import counters
from cute_attn.runtime.arch import TYPICAL_SMS, named
from cute_attn.runtime.launch import CPU
from cute_attn.runtime.staging import Staging

OUTPUTS = ("out", "lse", "workspace")
TENSORS = ("q", "k", "v", "out", "lse")  # of every problem, in the order of what a `Fire` takes
_emulating = threading.RLock()  # emulated launches share counters, as those of one stream do: one runs after the other

Placed = TypeVar("Placed", Request, BatchProblem)


def prepare(request_settings: Settings) -> EmulatedRun:
    """Returns what runs single requests of these settings."""

    def run_of(problem: Request) -> Runner:
        family, gpu = _emulated(request_settings, load_class(request_settings, problem.qo_len))
        return prepared(family.prepare, request_settings, gpu)

    return EmulatedRun(run_of)


@contextlib.contextmanager
def writing(lengths: Lengths, staging: Staging) -> Iterator[None]:
    """Makes visible to emulated kernels: lengths on the device, and the memory of a plan."""
    written = {f"plan's memory {i}": x for i, x in enumerate(staging.memory) if x.numel()}
    arrays = lengths.arrays() if isinstance(lengths, DeviceLengths) else {}
    inputs = {name: x for name, x in arrays.items() if x.numel()}
    with adapter.visible({**inputs, **written}, written):
        yield


def plan(batch_settings: Settings, lengths: Lengths, limits: BatchLimits, staging: Staging) -> EmulatedBatchRun | None:
    """Returns what runs batches of these settings and lengths on the architecture that is emulated now, even
    if another one is emulated later; None: `TiledFamily.plan`.
    """
    family, gpu = emulated_batch(batch_settings, lengths, limits)
    planned = family.plan(batch_settings, lengths, limits, staging, gpu)
    staging.write_within(functools.partial(writing, lengths, staging))
    return None if planned is None else EmulatedBatchRun(planned, (gpu, family.name), staging)


def emulated_gpu() -> Gpu:
    """Returns the GPU that is emulated."""
    emulation = settings.current()
    return Gpu(named(emulation.arch), CPU, emulation.sms or TYPICAL_SMS[emulation.arch])


def _emulated(asked: Settings, load: Load) -> tuple[KernelFamily, Gpu]:
    """Returns the family whose kernels run requests of these settings and this load, and the GPU that is emulated."""
    gpu = emulated_gpu()
    return FAMILIES[emulated(asked.features, gpu.arch, load).name], gpu


def emulated_batch(asked: Settings, lengths: Lengths, limits: BatchLimits) -> tuple[KernelFamily, Gpu]:
    """Returns the family whose kernels run a batch, and the GPU that is emulated."""
    return _emulated(asked, load_of_batch(asked, lengths, limits))


class EmulatedRun(Runner):
    """Runs requests or batches in the emulated global memory. `run_of`: what launches the kernels of a problem on the
    GPU that is emulated at the time of the call.
    """

    def __init__(self, run_of: Callable[[Any], Runner]) -> None:
        self.run_of = run_of

    def __call__(self, problem: Any) -> Fire | None:
        """Emulates the launches of a problem. Returns what emulates those like it, on any GPU; None for decode calls,
        whose values every call looks at.
        """
        if not isinstance(problem, DecodeProblem):
            return super().__call__(problem)
        problem = _placed(problem)
        run = self.run_of(problem)
        with visible(problem._asdict(), run):
            run(problem)
        return None

    def bind(self, problem: Any) -> Fire:
        """Returns a function that keeps no memory of the problem, and binds it again where another GPU is emulated."""
        like, (roles, _) = _like(_placed(problem)), optional_tensors(problem)
        rest = ("kv_indices", "workspace") if isinstance(problem, BatchProblem) else ("kv_len",)
        names = (*TENSORS, *(ROLES[i] for i in roles), *rest)
        bound: MutableMapping[Runner, Fire] = weakref.WeakKeyDictionary()

        def fire(q: int, k: int, v: int, out: int, lse: int, tensors: tuple[Any, ...]) -> None:
            run = self.run_of(like)
            if run not in bound:
                bound[run] = run.bind(like)
            rows, *others = tensors
            rows = _aligned(rows)
            named = zip(names, (rows, *others[:4], *others[4], *others[5:]), strict=True)
            with visible(dict(named), run):
                bound[run](rows.data_ptr(), k, v, out, lse, (rows, *others))

        return fire


class EmulatedBatchRun(EmulatedRun):
    """Runs batches of one plan."""

    def __init__(self, planned: Runner, on: tuple[Gpu, str], staging: Staging) -> None:
        super().__init__(lambda _: planned)
        self.planned, self.on, self.staging = planned, on, staging

    def again(self, lengths: Lengths) -> bool | None:
        """Replaces the lengths of the requests, if the kernels can, and the same GPU is emulated, and tells whether
        launches are the same otherwise; else returns None.
        """
        gpu, name = self.on
        if emulated_gpu() != gpu or settings.current().kernels not in ("auto", name):
            return None
        same = self.planned.again(lengths)
        self.staging.write_within(functools.partial(writing, lengths, self.staging))
        return same


def _placed(problem: Placed) -> Placed:
    """Returns the problem with aligned rows, as requests on a GPU have them: q is copied if necessary, and k, v or out
    that are not aligned raise an ArgumentError.
    """
    of_kv = NARROW_ALIGNMENT if problem.settings.features.half_aligned_kv else ALIGNMENT
    for name, alignment in (("k", of_kv), ("v", of_kv), ("out", ALIGNMENT)):
        if not aligned(getattr(problem, name), alignment):
            raise ArgumentError(f"{name} must have rows that start at multiples of {alignment} bytes")
    return problem._replace(q=_aligned(problem.q))


def _aligned(q: torch.Tensor) -> torch.Tensor:
    return q if aligned(q) else q.clone(memory_format=torch.contiguous_format)


def _like(problem: Any) -> Any:
    """Returns a problem of the same layouts, without memory."""

    def without_memory(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return Extras(*map(without_memory, value)) if isinstance(value, Extras) else value

    return problem._make(map(without_memory, problem))


@contextlib.contextmanager
def visible(named: Mapping[str, Any], run: object = None) -> Iterator[None]:
    """Makes visible to emulated kernels: tensors by the names that problems have for them, those of `scratch`, the
    shared counters, and of `run` its `records`, which launches may only read, and its `counters`. Raises a LaunchFault
    if counters are not zero afterwards. Launches of other threads wait.
    """
    inputs: dict[str, torch.Tensor] = _tensors("records", getattr(run, "records", None))
    outputs: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        if name not in ("scratch", "lengths"):
            (outputs if name in OUTPUTS else inputs).update(_tensors(name, value))
    memory = [counters.of_device(CPU, kind).memory for kind in (counters.TILE_COUNTERS, counters.SEMAPHORES)]
    memory += _tensors("", getattr(run, "counters", None)).values()
    if scratch := named.get("scratch"):
        memory.append(_bytes_at(scratch.counter_buffer, scratch.counters, scratch.counter_bytes))
        outputs["partials"] = _bytes_at(scratch.partial_buffer, scratch.partials, scratch.partial_bytes)
    by_name = {f"counters {i}": counter for i, counter in enumerate(memory)}
    with _emulating:
        try:
            with adapter.visible({**inputs, **by_name}, {**outputs, **by_name}):
                yield
            for counter in memory:
                if counter.any():
                    i = int(counter.flatten().nonzero()[0])
                    raise LaunchFault(
                        f"a launch left counter {i} of {counter.numel()} at {int(counter.flatten()[i])}, not 0"
                    )
        finally:
            for counter in memory:
                counter.zero_()  # a launch that failed leaves others


def _bytes_at(buffer: torch.Tensor, address: int, num_bytes: int) -> torch.Tensor:
    start = address - buffer.data_ptr()
    return buffer.reshape(-1).view(torch.uint8)[start : start + num_bytes]


def _tensors(name: str, value: object) -> dict[str, torch.Tensor]:
    """Returns the tensors of one field of a problem, by name."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, Extras):
        return {name: item for name, item in value._asdict().items() if item is not None}
    if isinstance(value, tuple):  # records of a plan
        return {f"{name}[{i}]": item for i, item in enumerate(value) if isinstance(item, torch.Tensor)}
    return {}
