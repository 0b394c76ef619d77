"""Reads a cubin (ELF64) in pure Python, without CUDA tools: what is needed to launch a kernel and check its resources.

NVIDIA does not document the `.nv.info` records. The attributes below agree with `cuobjdump -elf` and with
`cuKernelGetParamInfo`, in the ELF ABI 7 (CUDA 12, up to sm_90) and in ABI 8 (CUDA 13, and sm_100 and later).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cute_attn.errors import ArtifactError

_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12  # in .nv.info, one per function
_KPARAM_INFO, _REQNTID = 0x17, 0x10  # in .nv.info.<kernel>
_FORMAT_SIZED = 0x04  # record with a 16-bit length; all other formats have two bytes of data
_EI_OSABI, _OSABI_7 = 7, 0x33
_NOBITS = 8  # type of a section without bytes in the file
_KERNEL_ENTRY = 0x10  # st_other bit of a __global__ function


@dataclass(frozen=True)
class CubinKernel:
    """Resources of a kernel. Sizes are in bytes, `params` are (offset, size) in order; `reqntid` is None if absent."""

    symbol: str
    sm: int
    registers: int
    stack_bytes: int
    params: tuple[tuple[int, int], ...]
    reqntid: tuple[int, int, int] | None


def read_kernels(cubin: bytes) -> tuple[CubinKernel, ...]:
    """Returns all kernels of a cubin. Raises ArtifactError if the bytes are not a complete cubin."""
    try:
        return _read_kernels(cubin)
    except (struct.error, IndexError, KeyError, ValueError) as err:
        raise ArtifactError(f"not a readable cubin ({len(cubin)} bytes): {err}") from err


def _read_kernels(cubin: bytes) -> tuple[CubinKernel, ...]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no ELF64 header")
    (segments,) = struct.unpack_from("<Q", cubin, 32)
    flags, stride, count = struct.unpack_from("<IxxHH", cubin, 48)
    if segments + stride * count > len(cubin):
        raise ValueError("program headers end past the file")
    sm = flags & 0xFF if cubin[_EI_OSABI] == _OSABI_7 else flags >> 8 & 0xFF
    sections = _sections(cubin)
    symbols = [
        (_c_string(sections[".strtab"], name), other)
        for name, _, other, *_ in struct.iter_unpack("<IBBHQQ", sections[".symtab"])
    ]
    totals: dict[tuple[str, int], int] = {}
    for attribute, value in _records(sections[".nv.info"]):
        if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
            index, amount = struct.unpack("<II", value)
            totals[symbols[index][0], attribute] = amount
    return tuple(
        _kernel(name, sm, totals, sections[f".nv.info.{name}"])
        for name, other in symbols
        if other & _KERNEL_ENTRY and f".text.{name}" in sections
    )


def _kernel(name: str, sm: int, totals: dict[tuple[str, int], int], info: bytes) -> CubinKernel:
    params: dict[int, tuple[int, int]] = {}
    reqntid = None
    for attribute, value in _records(info):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            params[ordinal] = (offset, packed >> 18)
        elif attribute == _REQNTID:
            reqntid = struct.unpack("<III", value)
    stack_bytes = max(totals[name, _FRAME_SIZE], totals.get((name, _MIN_STACK_SIZE), 0))
    in_order = tuple(params[ordinal] for ordinal in range(len(params)))
    return CubinKernel(name, sm, totals[name, _REGCOUNT], stack_bytes, in_order, reqntid)


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _FORMAT_SIZED:
            yield attribute, data[at : at + size]
            at += size


def _sections(cubin: bytes) -> dict[str, bytes]:
    """Returns the sections by name; those that take no bytes of the file are empty."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    stride, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * stride) for i in range(count)]
    names_at = headers[names_index][4]
    sections = {}
    for name_at, kind, _, _, offset, size in headers:
        name = _c_string(cubin, names_at + name_at)
        size = 0 if kind == _NOBITS else size
        if offset + size > len(cubin):
            raise ValueError(f"section {name} ends past the file")
        sections[name] = cubin[offset : offset + size]
    return sections


def _c_string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
