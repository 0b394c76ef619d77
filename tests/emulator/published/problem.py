"""Launches the wheel's forward kernels on the emulator.

The launch (grid, block, shared memory, parameters, tensor maps) is put together here, from the parameter list of the
PTX and the shapes of the problem.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cute_attn.emulator import launch, ptx, tensormap
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.isa import floats
from cute_attn.emulator.machine import Stats
from cute_attn.emulator.memory import GlobalMemory

ROWS = 128  # of a tile: query rows, and keys
SMEM = 227 * 1024
L2_BYTES = 50 << 20  # what their scheduler of causal problems assumes


@dataclass(frozen=True)
class Kernel:
    """One forward kernel. `traits` are letters: p: two CTAs a tile; c: work of clusters that have not started is taken
    over; 8: inputs of e4m3.
    """

    arch: str
    head_dim: int
    causal: bool
    group: int
    q_stage: int = 1
    traits: str = ""

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 2 if "p" in self.traits else 1

    @property
    def rows(self) -> int:
        """Query rows of a cluster."""
        return ROWS * self.q_stage * self.ctas

    def __str__(self) -> str:
        fields = [self.arch, self.head_dim, int(self.causal), self.group, self.q_stage, self.traits]
        return ":".join(map(str, fields))

    @classmethod
    def parse(cls, text: str) -> Kernel:
        """Returns the kernel that `str` wrote."""
        arch, head_dim, causal, group, q_stage, traits = text.split(":")
        return cls(arch, int(head_dim), causal == "1", int(group), int(q_stage), traits)

    @property
    def file(self) -> str:
        """A file name without an ending."""
        return str(self).replace(":", "_")


@dataclass(frozen=True)
class Shape:
    qo_len: int
    kv_len: int
    batch: int = 1
    kv_heads: int = 1


def _ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _divisor(d: int) -> list[bytes]:
    """A divisor prepared for multiplication: q = (mulhi(n, m) + (n - mulhi(n, m) >> s1)) >> s2 (Granlund and
    Montgomery 1994, figure 4.1), followed by the divisor."""
    bits = (d - 1).bit_length()
    multiplier = (1 << 32) * ((1 << bits) - d) // d + 1
    return [struct.pack("<IIBBxx", d, multiplier & 0xFFFFFFFF, min(bits, 1), max(bits - 1, 0)), _ints(d)]


class Problem:
    """Tensors of one problem in global memory, and what the kernel computes from them."""

    def __init__(self, kernel: Kernel, shape: Shape) -> None:
        self.kernel, self.shape = kernel, shape
        self.heads = shape.kv_heads * kernel.group
        rng = np.random.default_rng(1)
        qo, kv = (shape.batch, shape.qo_len, self.heads), (shape.batch, shape.kv_len, shape.kv_heads)
        d = kernel.head_dim
        shapes = (*qo, d), (*kv, d), (*kv, d)
        self.q, self.k, self.v = (self._rounded(rng.standard_normal(s).astype(np.float32)) for s in shapes)
        self.o, self.lse = np.zeros((*qo, d), np.uint16), np.zeros((shape.batch, self.heads, shape.qo_len), np.float32)
        self.memory, self.address = GlobalMemory(), {}
        for i, (name, output) in enumerate({"q": False, "k": False, "v": False, "o": True, "lse": True}.items()):
            data: Array = getattr(self, name)
            self.address[name] = (i + 1) << 40
            flat = data.view(np.uint8).reshape(-1)
            self.memory.add(name, self.address[name], data.nbytes, writable=output, valid=not output, data=flat)

    @property
    def item(self) -> str:
        return "uint8" if "8" in self.kernel.traits else "bfloat16"

    def _rounded(self, x: Array) -> Array:
        if self.item == "bfloat16":
            return floats.f32_to_bf16(x)
        return torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def _exact(self, x: Array) -> Array:
        if self.item == "bfloat16":
            return floats.bf16_to_f32(x).astype(np.float64)
        return torch.from_numpy(x).view(torch.float8_e4m3fn).to(torch.float64).numpy()

    def expected(self) -> tuple[Array, Array]:
        group, shape = self.kernel.group, self.shape
        q, k, v = (self._exact(x) for x in (self.q, self.k, self.v))
        k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
        s = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.kernel.head_dim)
        if self.kernel.causal:
            row, column = np.arange(shape.qo_len)[:, None], np.arange(shape.kv_len)[None]
            s = np.where(column <= row + shape.kv_len - shape.qo_len, s, -np.inf)
        top = s.max(axis=-1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        return np.einsum("bhqk,bkhd->bqhd", p / total, v), (top + np.log(total))[..., 0]

    @property
    def blocks(self) -> int:
        """Tiles of one kv head, each of a cluster: where several heads share it, their queries are packed into rows."""
        return -(-self.shape.qo_len * self.kernel.group // self.kernel.rows)

    def maps(self) -> list[bytes]:
        return [self._q_map("q"), self._map("k"), self._map("v"), self._q_map("o")]

    def _map(self, name: str) -> bytes:
        d, heads = self.kernel.head_dim, self.shape.kv_heads
        dims = (d, self.shape.kv_len, heads, self.shape.batch)
        strides = (heads * d, d, self.shape.kv_len * heads * d)
        # A pair of CTAs shares K by its rows and V by its columns.
        rows = ROWS // self.kernel.ctas if name == "k" else ROWS
        return self._encode(name, dims, strides, (self._width(name), rows, 1, 1))

    def _width(self, name: str) -> int:
        """Items of a swizzled row of 128 bytes."""
        return 128 if self.item == "uint8" and name != "o" else 64

    def _q_map(self, name: str) -> bytes:
        d, heads, group = self.kernel.head_dim, self.heads, self.kernel.group
        length, batch, kv_heads = self.shape.qo_len, self.shape.batch, self.shape.kv_heads
        row, whole = heads * d, length * heads * d
        if group == 1:
            return self._encode(name, (d, length, heads, batch), (row, d, whole), (self._width(name), ROWS, 1, 1))
        if self.kernel.arch == "sm_90a":
            return self._encode(name, (d, heads, length, batch), (d, row, whole), (64, group, ROWS // group, 1))
        dims = (d, group, length, kv_heads, batch)
        return self._encode(name, dims, (d, row, group * d, whole), (64, group, ROWS // group, 1, 1))

    def _encode(self, name: str, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        item = "bfloat16" if name == "o" else self.item
        size = 1 if item == "uint8" else 2
        parts = tuple(dims), tuple(size * s for s in strides), tuple(box)
        return tensormap.TensorMap(self.address[name], item, *parts, swizzle=3).encode()

    def scheduler(self) -> list[bytes]:
        """Parameters of their tile schedulers: of blocks in order, of causal blocks by falling cost."""
        blocks, heads, batch = self.blocks, self.shape.kv_heads, self.shape.batch
        splits: list[bytes] = [] if self.kernel.arch == "sm_90a" else [_ints(1)]
        if not self._by_cost:
            return [_ints(blocks), _ints(heads), _ints(batch), *splits, *_divisor(1), *splits]
        head_bytes = self.shape.kv_len * 2 * self.kernel.head_dim * self.k.itemsize
        section = 1 << ((L2_BYTES // head_bytes).bit_length() - 1)  # heads that share the L2 cache
        found = [_ints(blocks * heads * batch), *splits, *(_ints(x) for x in (blocks, heads, batch, section))]
        for divisor in (heads, section, section * blocks, max(heads * batch % section, 1)):
            found += _divisor(divisor)
        return [*found, _ints(heads * batch // section), *_divisor(1), *splits]

    @property
    def _by_cost(self) -> bool:
        return self.kernel.causal or "c" in self.kernel.traits

    def grid(self) -> tuple[int, int, int]:
        tiles = self.blocks * self.kernel.ctas, self.shape.kv_heads, self.shape.batch
        if self.kernel.causal and "c" not in self.kernel.traits:
            return (math.prod(tiles), 1, 1)
        return tiles

    def params(self, sizes: Sequence[int]) -> list[bytes]:
        shape, group = self.shape, self.kernel.group
        qo = _ints(shape.qo_len, self.shape.kv_heads, shape.batch)
        packed = _ints(group, shape.qo_len, shape.kv_heads, shape.batch)
        kv = _ints(shape.kv_len, shape.kv_heads, shape.batch)
        if group > 1:
            strides = shape.qo_len, group * shape.qo_len, self.heads * shape.qo_len
            lse = struct.pack("<Q16s3q", self.address["lse"], packed, *strides)
        else:
            of_lse = _ints(shape.qo_len, self.heads, shape.batch)
            lse = struct.pack("<Q12s4x2q", self.address["lse"], of_lse, shape.qo_len, self.heads * shape.qo_len)
        scale = math.log2(math.e) / math.sqrt(self.kernel.head_dim)
        # sm_90a keeps the shape of packed queries as 3 numbers, of which it reads the first, the length.
        of_q, of_o = (packed if sizes[i] == 16 else qo for i in (0, 3))
        found = [of_q, kv, kv, of_o, lse, *self.maps(), struct.pack("<f", scale)]
        while sizes[len(found)] in (1, 32, 64):  # copies that are not used
            found.append(bytes(sizes[len(found)]))
        found += self.scheduler()
        if group > 1 and self.kernel.arch != "sm_90a":
            found += _divisor(group)
        return found

    def launch(self, text: str, **options: Any) -> Stats:
        ((name, entry),) = ptx.parse(text).items()
        values = self.params([p.nbytes for p in entry.params])
        assert [len(v) for v in values] == [p.nbytes for p in entry.params]
        block = b""
        for param, value in zip(entry.params, values, strict=True):
            block = block.ljust(-(-len(block) // param.align) * param.align, b"\0") + value
        x, y, z = (int(n) for n in entry.directives["reqntid"].split(","))
        description = {
            "symbol": name,
            "grid": self.grid(),
            "block": (x, y, z),
            "cluster": (self.kernel.ctas, 1, 1),
            "smem_bytes": SMEM,
            "params": block,
        }
        return launch(text, description, self.memory, **options)
