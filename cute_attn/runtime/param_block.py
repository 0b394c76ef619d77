"""Memory for the parameters of a kernel, in the layout that its cubin declares."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from cute_attn.errors import ArgumentError
from cute_attn.runtime.artifact import Param

_STRUCT_CODES = {"i32": "i", "i64": "q", "f32": "f", "f64": "d", "map": "128s"}

Bind = Callable[[Any], Callable[..., None]]  # from a buffer to a function that stores values of some fields in it


class ParamLayout:
    """Where the parameters of one kernel are. All blocks share its compiled functions, which take 0.3 ms to make."""

    def __init__(self, params: Sequence[Param]) -> None:
        self._params = tuple(params)
        self.struct, self.size = _packing(self._params, 0)
        self.offsets = [param.offset for param in self._params]
        self._writers: dict[tuple[str, ...], Bind] = {}  # as many as there are sets of fields in the sources

    def writer(self, fields: Sequence[str]) -> Bind:
        """Returns what makes `ParamBlock.writer` of the memory of a block."""
        key = tuple(fields)
        if key not in self._writers:
            self._writers[key] = self._make_writer(key)
        return self._writers[key]

    def _make_writer(self, fields: tuple[str, ...]) -> Bind:
        numbers = {param.name: i for i, param in enumerate(self._params)}
        if len({*fields} & {*numbers}) < len(fields):
            raise ValueError(f"fields to write must be distinct parameters of the kernel, got {list(fields)}")
        space: dict[str, Any] = {}
        lines = [f"def bind(buffer):\n def write({', '.join(fields)}):"]
        in_order = sorted(fields, key=numbers.__getitem__)
        for _, run in itertools.groupby(enumerate(in_order), lambda pair: numbers[pair[1]] - pair[0]):  # adjacent ones
            names = [name for _, name in run]
            params = [self._params[numbers[name]] for name in names]
            name, start = f"pack{len(lines)}", params[0].offset
            space[name] = _packing(params, start)[0].pack_into
            lines.append(f"  {name}(buffer, {start}, {', '.join(names)})")
        exec("\n".join([*lines, "  return", " return write"]), space)
        bind: Bind = space["bind"]
        return bind

    def mismatch(self, values: Sequence[int | float | bytes]) -> str:
        """Returns which of `values`, which cannot be packed, does not fit."""
        if len(values) != len(self._params):
            return (
                f"values must have one entry for each of the {len(self._params)} kernel parameters, got {len(values)}"
            )
        for param, value in zip(self._params, values, strict=True):
            try:
                struct.pack("=" + _STRUCT_CODES[param.kind], value)
            except (struct.error, OverflowError, TypeError):
                return f"kernel parameter {param.name} must be an {param.kind}, got {value!r}"
        raise AssertionError("every value fits on its own")


def _packing(params: Sequence[Param], start: int) -> tuple[struct.Struct, int]:
    """Returns how to pack values of parameters from the byte `start` of a block on, and the byte behind the last."""
    layout, end = "=", start
    for param in params:
        layout += f"{param.offset - end}x{_STRUCT_CODES[param.kind]}"
        end = param.offset + param.size
    return struct.Struct(layout), end


class ParamBlock:
    """Storage of one kernel's parameters. Its addresses never change."""

    def __init__(self, layout: ParamLayout) -> None:
        self._layout, self._pack_into = layout, layout.struct.pack_into
        self.buffer = ctypes.create_string_buffer(max(layout.size, 1))
        base, offsets = ctypes.addressof(self.buffer), layout.offsets
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*[base + offset for offset in offsets])
        self.address = ctypes.addressof(self._pointers)  # the void*[] that cuLaunchKernelEx takes

    def pack(self, values: Sequence[int | float | bytes]) -> None:
        """Stores one value per parameter, in order. An ArgumentError names the first value that does not fit."""
        try:
            self._pack_into(self.buffer, 0, *values)
        except (struct.error, OverflowError, TypeError) as err:
            raise ArgumentError(self._layout.mismatch(values)) from err

    def writer(self, fields: Sequence[str]) -> Callable[..., None]:
        """Returns a function that stores values of these fields, in this order, and leaves all others."""
        return self._layout.writer(fields)(self.buffer)
