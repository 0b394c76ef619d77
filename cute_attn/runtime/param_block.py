"""Memory for the parameters of a kernel, in the layout that its cubin declares."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cute_attn.errors import ArgumentError
from cute_attn.runtime.artifact import Param

_STRUCT_CODES = {"i32": "i", "i64": "q", "f32": "f", "f64": "d", "map": "128s"}

MISMATCHES = struct.error, OverflowError, TypeError  # what a writer raises of values that do not fit

Value = int | float | bytes
Values = tuple[Value, ...]
Bind = Callable[[Any], Callable[..., None]]  # from a buffer to a function that stores values of some fields in it


class ParamLayout:
    """Where the parameters of one kernel are. All blocks share its compiled functions, which take 0.3 ms to make."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.params = {param.name: param for param in params}
        self.size = max((param.offset + param.size for param in params), default=0)
        self._numbers = {param.name: i for i, param in enumerate(params)}
        self._writers: dict[tuple[str, ...], Bind] = {}  # as many as there are sets of fields in the sources

    def writer(self, fields: Sequence[str]) -> Bind:
        """Returns what makes `ParamBlock.writer` of the memory of a block."""
        key = tuple(fields)
        if key not in self._writers:
            self._writers[key] = self._make_writer(key)
        return self._writers[key]

    # This generates Python source: one call of `struct.pack_into` for each run of adjacent fields takes a third of the
    # time of a loop over fields (`timeit`, Python 3.11, Xeon).
    def _make_writer(self, fields: tuple[str, ...]) -> Bind:
        numbers = self._numbers
        space: dict[str, Any] = {}
        lines = [f"def bind(buffer):\n def write({', '.join(fields)}):"]
        in_order = sorted(fields, key=numbers.__getitem__)
        for _, run in itertools.groupby(enumerate(in_order), lambda pair: numbers[pair[1]] - pair[0]):  # adjacent ones
            names = [name for _, name in run]
            params = [self.params[name] for name in names]
            name, start = f"pack{len(lines)}", params[0].offset
            space[name] = _packing(params, start).pack_into
            lines.append(f"  {name}(buffer, {start}, {', '.join(names)})")
        exec("\n".join([*lines, "  return", " return write"]), space)
        bind: Bind = space["bind"]
        return bind


def _packing(params: Sequence[Param], start: int) -> struct.Struct:
    """Returns how to pack values of parameters from the byte `start` of a block on."""
    layout, end = "=", start
    for param in params:
        layout += f"{param.offset - end}x{_STRUCT_CODES[param.kind]}"
        end = param.offset + param.size
    return struct.Struct(layout)


class ParamBlock:
    """Storage of one kernel's parameters. Its addresses never change."""

    def __init__(self, layout: ParamLayout) -> None:
        self._layout = layout
        self.buffer = ctypes.create_string_buffer(max(layout.size, 1))
        base, offsets = ctypes.addressof(self.buffer), [param.offset for param in layout.params.values()]
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*[base + offset for offset in offsets])
        self.address = ctypes.addressof(self._pointers)  # the void*[] that cuLaunchKernelEx takes

    def fill(self, values: Mapping[str, Value], groups: Sequence[Sequence[str]]) -> None:
        """Stores values by name. `groups`: fields that `writer` stores; a ValueError unless each parameter is in one of
        them or has a value, once. An ArgumentError names a value that does not fit.
        """
        given, params = [*values, *itertools.chain.from_iterable(groups)], self._layout.params
        if len(given) != len(params) or params.keys() != {*given}:
            raise ValueError(
                f"kernel parameters without a value: {sorted(params.keys() - {*given})}, "
                f"values without a parameter: {sorted({*given} - params.keys())}, "
                f"named more than once: {sorted({name for name in given if given.count(name) > 1})}"
            )
        for name, value in values.items():
            param = params[name]
            try:
                struct.pack_into("=" + _STRUCT_CODES[param.kind], self.buffer, param.offset, value)
            except MISMATCHES as err:
                raise self.mismatch((name,), (value,)) from err

    def writer(self, fields: Sequence[str]) -> Callable[..., None]:
        """Returns a function that stores values of these fields, in this order, and leaves all others."""
        return self._layout.writer(fields)(self.buffer)

    def mismatch(self, fields: Sequence[str], values: Sequence[Value]) -> ArgumentError:
        """Returns the error of values of `fields` that a writer refused."""
        for name, value in zip(fields, values, strict=False):
            kind = self._layout.params[name].kind
            try:
                struct.pack("=" + _STRUCT_CODES[kind], value)
            except MISMATCHES:
                return ArgumentError(f"kernel parameter {name} must be an {kind}, got {value!r}")
        return ArgumentError(f"values must have one entry for each of {list(fields)}, got {len(values)}")
