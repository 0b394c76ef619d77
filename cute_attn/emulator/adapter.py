"""Adapter from torch to the emulator: CPU tensors as global memory, and launches on that memory."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_attn.emulator import settings
from cute_attn.emulator.memory import Flags, GlobalMemory, Region
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.launch import Bound, Launch, ParamBlock, ParamLayout, Settled, Value, Values

_memory: contextvars.ContextVar[GlobalMemory | None] = contextvars.ContextVar("emulated memory", default=None)


class EmulatedLaunch(Launch):
    """Launch of an artifact on CPU tensors. It must fire inside `visible`, whose memory it runs on."""

    def __init__(self, artifact: Artifact, *, pdl: bool) -> None:
        self.artifact, self.pdl = artifact, pdl
        self.layout = ParamLayout(artifact.params)

    def bind(self, static: Mapping[str, Value], moving: Sequence[str], *groups: Sequence[str]) -> EmulatedBound:
        return EmulatedBound(self, static, (moving, *groups))


class EmulatedBound(Bound):
    """Emulated launches of one kernel."""

    def __init__(self, launch: EmulatedLaunch, static: Mapping[str, Value], groups: Sequence[Sequence[str]]) -> None:
        self.artifact, self._block = launch.artifact, ParamBlock(launch.layout, static, groups)
        names = "symbol", "block", "cluster", "smem_bytes", "registers"
        self.description = {
            **{name: getattr(self.artifact, name) for name in names},
            "pdl": launch.pdl,
            "param_offsets": [param.offset for param in self.artifact.params],
        }

    def fire(self, stream: int, moving: Values, settled: Settled, tensors: Sequence[torch.Tensor] = ()) -> None:
        memory, emulation = _memory.get(), settings.current()
        if memory is None:
            raise RuntimeError("an emulated launch needs emulator.adapter.visible(...) around it")
        from cute_attn.emulator.machine import launch  # the machine: 50 ms that processes with a GPU do without

        grid, *groups = settled
        for write, values in zip(self._block.writers, (moving + self.values_of(tensors), *groups), strict=True):
            write(values)
        start = time.perf_counter()
        ptx = self.artifact.ptx
        stats = launch(
            ptx if emulation.rewrite is None else emulation.rewrite(ptx),
            {**self.description, "grid": grid, "params": self._block.buffer.raw},
            memory,
            checks=emulation.checks,
            schedule=emulation.schedule,
            events=emulation.events,
        )
        seconds = time.perf_counter() - start
        spec = self.artifact.spec
        emulation.records.append(settings.Record(self.artifact.symbol, self.artifact.arch, grid, seconds, stats, spec))


@contextlib.contextmanager
def visible(inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> Iterator[GlobalMemory]:
    """Expose these tensors, and every tensor that torch creates meanwhile, as global memory. Only their elements are in
    bounds, not gaps between rows. `inputs` are read-only, `outputs` start uninitialised.
    """
    memory = GlobalMemory()
    storages: dict[int, Region] = {}
    for name, tensor in (*inputs.items(), *outputs.items()):
        _expose(memory, storages, name, tensor)
    for tensor in inputs.values():
        _mark(storages[_key(tensor)].valid, tensor)
    for tensor in outputs.values():
        _mark(storages[_key(tensor)].writable, tensor)
    token = _memory.set(memory)
    try:
        with _Watch(memory, storages):
            yield memory
    finally:
        _memory.reset(token)


class _Watch(TorchDispatchMode):
    """Exposes every new storage to the emulator; storage that torch leaves uninitialised is marked so."""

    def __init__(self, memory: GlobalMemory, storages: dict[int, Region]) -> None:
        super().__init__()
        self.memory, self.storages = memory, storages
        self.kept: list[torch.Tensor] = []  # kept alive, so that no address is reused by another tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        empty = "empty" in str(func)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and _key(tensor) not in self.storages:
                if tensor.untyped_storage().nbytes() == 0:
                    continue
                nbytes = tensor.untyped_storage().nbytes()
                region = self.memory.add("a temporary tensor", _key(tensor), nbytes, valid=not empty)
                self.storages[_key(tensor)] = region
                self.kept.append(tensor)
        return out


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _expose(memory: GlobalMemory, storages: dict[int, Region], name: str, tensor: torch.Tensor) -> None:
    if tensor.untyped_storage().nbytes() == 0:
        storages.setdefault(0, Region(name, 0, np.zeros(0, np.uint8), False, False))
        return
    region = storages.get(_key(tensor))
    if region is None:
        nbytes = tensor.untyped_storage().nbytes()
        region = memory.add(name, _key(tensor), nbytes, writable=False, valid=False, exists=False)
        storages[_key(tensor)] = region
    else:
        region.name += f", {name}"
    _mark(region.exists, tensor)


def _mark(region: Flags, tensor: torch.Tensor) -> None:
    """Set the flags of all bytes that belong to a tensor's elements."""
    if tensor.numel() == 0 or region.all:
        return
    if tensor.is_contiguous() and tensor.nbytes == region.size:
        region.set_all()
        return
    flags, size = region.data, tensor.itemsize
    start, whole = tensor.storage_offset() * size, len(flags) & ~3
    # Kernels read bits and bytes in aligned words, which GPU allocations consist of.
    if tensor.is_contiguous():
        end = start + tensor.numel() * size
        flags[start:end] = 255
        if size == 1:
            flags[start & ~3 : min(end + 3 & ~3, whole)] = 255
        return
    strides = [stride * size for stride in tensor.stride()]
    torch.from_numpy(flags).as_strided((*tensor.shape, size), (*strides, 1), start).fill_(255)
    if size == 1:
        words = flags[:whole].view(np.uint32)
        words[words != 0] = 0xFFFFFFFF
