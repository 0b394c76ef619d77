"""Arguments of calls as data, and back: JSON with tagged values, and the memory of tensors as bytes.

Tensors that share memory share it again when they are read, with the strides and the alignment that they had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.flash_mla import SchedMeta
from cute_attn.mla import MLAPlanMetadata
from cute_attn.problem import short

ALIGNMENT = 256  # of addresses, which is kept
REPR_LENGTH = 200  # characters of a value that is no data
PLAIN = (bool, int, float, str, type(None))


@dataclass(eq=False)
class Memory:
    """A range of one storage that arguments use. `data`: its bytes on the host, None if they are left out."""

    start: int
    end: int
    tensor: torch.Tensor | None  # one of those in it, of whose storage it is a part; None once it is copied
    device: str
    zeros: bool = True  # only workspaces use it: its values do not matter
    data: torch.Tensor | None = None
    why: str = ""  # its bytes are left out
    names: list[str] = field(default_factory=list)  # arguments that use it

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class Snapshot:
    """Encodes values, and collects the memory of their tensors. `copy` reads it, once and last: it completes what
    `encode` has returned.
    """

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self._tensors: list[tuple[dict[str, Any], torch.Tensor]] = []

    def encode(self, value: Any, name: str, scratch: bool = False) -> Any:
        """Returns `value` as JSON. `scratch`: the values of tensors do not matter."""
        if type(value) in PLAIN:
            # JSON has no infinities or NaN of its own.
            return {"float": repr(value)} if isinstance(value, float) else value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name, scratch)
        if isinstance(value, torch.dtype):
            return {"dtype": short(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, (tuple, list)):
            items = [self.encode(item, f"{name}[{i}]", scratch) for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        if isinstance(value, dict):
            return {"dict": [[key, self.encode(item, f"{name}[{key!r}]", scratch)] for key, item in value.items()]}
        if isinstance(value, SchedMeta):  # no call reads it
            return None
        if isinstance(value, MLAPlanMetadata):
            return {"mla_metadata": self.encode(vars(value), name, scratch)}
        return {"other": f"{type(value).__name__}: {repr(value)[:REPR_LENGTH]}"}

    def _tensor(self, tensor: torch.Tensor, name: str, scratch: bool) -> dict[str, Any]:
        shape = {"shape": list(tensor.shape), "dtype": short(tensor.dtype), "device": str(tensor.device)}
        if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
            return {"other": f"tensor {shape}, {tensor.layout}"}
        begin = tensor.data_ptr()
        num_bytes = _span(tensor.shape, tensor.stride()) * tensor.element_size()
        memory = self._memory(tensor, begin, begin + num_bytes) if num_bytes else None
        if memory is not None:
            memory.zeros &= scratch
            memory.names.append(name)
        number = -1 if memory is None else self.memories.index(memory)
        record = {**shape, "stride": list(tensor.stride()), "requires_grad": tensor.requires_grad, "memory": number}
        self._tensors.append((record, tensor))
        return {"tensor": record}

    def _memory(self, tensor: torch.Tensor, begin: int, end: int) -> Memory:
        """Returns the range of the tensor's storage, made as large as the tensor needs."""
        storage = tensor.untyped_storage().data_ptr()
        begin = max(storage, begin // ALIGNMENT * ALIGNMENT)
        for memory in self.memories:
            if memory.tensor is not None and memory.tensor.untyped_storage().data_ptr() == storage:
                memory.start, memory.end = min(memory.start, begin), max(memory.end, end)
                return memory
        self.memories.append(Memory(begin, end, tensor, str(tensor.device)))
        return self.memories[-1]

    def copy(self, budget: int) -> None:
        """Copies memory to the host, at most `budget` bytes, small ranges first."""
        for record, tensor in self._tensors:
            if record["memory"] >= 0:
                record["offset"] = tensor.data_ptr() - self.memories[record["memory"]].start
        self._tensors.clear()
        for memory in sorted(self.memories, key=lambda memory: memory.num_bytes):
            source, memory.tensor = memory.tensor, None  # a wrapper's state must not keep memory of the GPU alive
            if memory.zeros or source is None:
                continue
            if memory.num_bytes > budget:
                memory.why = f"larger than what was left of the limit ({budget} bytes)"
                continue
            try:
                memory.data = _bytes(source.untyped_storage(), memory)
                budget -= memory.num_bytes
            except RuntimeError as error:  # after a fault of the GPU
                memory.why = f"could not be read: {str(error).splitlines()[0]}"

    def index(self) -> list[dict[str, Any]]:
        """Returns what JSON says about the memory."""
        return [
            {"bytes": m.num_bytes, "address": m.start % ALIGNMENT, "device": m.device, "names": m.names}
            | {"stored": m.data is not None, "zeros": m.zeros, "left_out": m.why}
            for m in self.memories
        ]


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements lie between the first and the last of a tensor, with both."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0


def _bytes(storage: torch.UntypedStorage, memory: Memory) -> torch.Tensor:
    """Returns a copy of a range of a storage on the host."""
    view = torch.empty(0, dtype=torch.uint8, device=memory.device)
    view.set_(storage, memory.start - storage.data_ptr(), (memory.num_bytes,), (1,))
    return view.cpu().clone()


class Reader:
    """Decodes values. `device`: where tensors go, by where they were. `data`: the bytes of a memory by its number."""

    def __init__(
        self, index: list[dict[str, Any]], data: Callable[[int], bytes], device: Callable[[str], torch.device]
    ) -> None:
        self._index, self._data, self._device = index, data, device
        self._memories: dict[int, torch.Tensor] = {}
        self.filled: list[str] = []  # arguments whose values were left out: random numbers stand for them

    def decode(self, value: Any) -> Any:
        """Returns the value of `Snapshot.encode`. ArgumentError: it is no data, or its numbers were left out."""
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "float":
            return float(content)
        if kind == "tensor":
            return self._tensor(content)
        if kind == "dtype":
            return dtype_named(content)
        if kind == "device":
            return self._device(content)
        if kind in ("tuple", "list"):
            items = [self.decode(item) for item in content]
            return tuple(items) if kind == "tuple" else items
        if kind == "dict":
            return {key: self.decode(item) for key, item in content}
        if kind == "mla_metadata":
            return MLAPlanMetadata(**self.decode(content))
        raise ArgumentError(f"the file holds no data for a value of type {str(content)[:REPR_LENGTH]}")

    def _tensor(self, record: dict[str, Any]) -> torch.Tensor:
        dtype, number = dtype_named(record["dtype"]), record["memory"]
        shape, strides = record["shape"], record["stride"]
        num_bytes = _span(shape, strides) * dtype.itemsize
        if number < 0 and not num_bytes:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device(record["device"]))
        size = self._index[number]["bytes"] if number >= 0 else 0
        if not 0 <= record["offset"] <= size - num_bytes:  # torch would make the memory larger
            raise ArgumentError(
                f"a tensor of {num_bytes} bytes, shape {shape} and strides {strides} is outside its memory"
            )
        memory = self._memory(number)
        tensor = torch.empty(0, dtype=dtype, device=memory.device)
        offset = memory.storage_offset() + record["offset"]
        tensor.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, strides)
        if self._index[number]["left_out"]:
            _fill(tensor, self._index[number])
        if record["requires_grad"]:
            tensor.requires_grad_()
        return tensor

    def _memory(self, number: int) -> torch.Tensor:
        """Returns the bytes of a memory on their device, at an address that is aligned as it was."""
        if number not in self._memories:
            entry = self._index[number]
            size, address = entry["bytes"], entry["address"]
            data = torch.frombuffer(bytearray(self._data(number)), dtype=torch.uint8) if entry["stored"] else None
            if data is not None and len(data) != size:
                raise ArgumentError(f"the file holds {len(data)} bytes for a memory of {size}")
            whole = torch.zeros(size + 2 * ALIGNMENT, dtype=torch.uint8, device=self._device(entry["device"]))
            first = (address - whole.data_ptr()) % ALIGNMENT
            memory = whole[first : first + size]
            if data is not None:
                memory.copy_(data)
            if entry["left_out"]:
                self.filled += entry["names"]
            self._memories[number] = memory
        return self._memories[number]


def dtype_named(name: str) -> torch.dtype:
    """Returns a dtype by its name; ArgumentError for another name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"the file names {name!r}, which is no dtype of torch {torch.__version__}")
    return found


def _fill(tensor: torch.Tensor, entry: dict[str, Any]) -> None:
    """Writes random numbers of deviation 1, always the same, in place of values that were left out."""
    if not (tensor.is_floating_point() or tensor.dtype == torch.uint8):
        names = ", ".join(entry["names"])
        raise ArgumentError(f"the file does not hold the values of {names} ({tensor.dtype}): {entry['left_out']}")
    generator = torch.Generator().manual_seed(0)
    with contextlib.suppress(RuntimeError):  # overlapping elements: a view of other memory was filled already
        if tensor.dtype == torch.uint8:
            tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8, device="cpu"))
        else:
            numbers = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
            tensor.copy_(numbers.to(tensor.dtype))


def tensors(value: Any) -> Iterable[torch.Tensor]:
    """Yields the tensors of a value that may be a tensor, or tuples, lists and dicts of values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
