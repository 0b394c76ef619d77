"""Kernels that are published as working on hardware come out right: what we read alike in our kernels and in the
emulator, and read wrong, would show here. `pytest -m corpus` with flash-attn-4 installed; nothing of it is kept.

The launch (grid, block, shared memory, parameters, tensor maps) is put together here, from the parameter list of the
PTX and the shapes of the problem.
"""

from __future__ import annotations

import importlib.util
import math
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn.emulator import ptx, run, tensormap
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import Race, RegisterFault
from cute_attn.emulator.isa import floats
from cute_attn.emulator.machine import Schedule, Stats
from cute_attn.emulator.memory import GlobalMemory
from tests.support.subprocesses import ROOT

pytestmark = pytest.mark.corpus

NEEDED = ("flash_attn.cute", "quack", "triton", "cutlass")
ROWS = 128  # of a tile
SMEM = 227 * 1024
L2_BYTES = 50 << 20  # what their scheduler of causal problems assumes


@dataclass(frozen=True)
class Kernel:
    arch: str
    head_dim: int
    causal: bool
    group: int
    q_stage: int = 1
    traits: str = ""  # p: two CTAs a tile; c: work of clusters that have not started is taken over; 8: inputs of e4m3

    def __str__(self) -> str:
        return f"{self.arch}:{self.head_dim}:{int(self.causal)}:{self.group}:{self.q_stage}:{self.traits}"

    @property
    def ctas(self) -> int:
        return 2 if "p" in self.traits else 1


KERNELS = [
    Kernel(arch, head_dim, causal, group)
    for arch in ("sm_90a", "sm_100a")
    for head_dim in (64, 128)
    for causal, group in ((False, 1), (True, 1), (True, 2), (False, 4))
]
KERNELS += [Kernel("sm_100a", 128, False, 1, 2), Kernel("sm_100a", 128, True, 2, 2)]
KERNELS += [
    Kernel("sm_100a", 128, causal, 1, 2, traits) for causal, traits in ((False, "p"), (True, "c"), (False, "8"))
]


@dataclass(frozen=True)
class Shape:
    qo_len: int
    kv_len: int
    batch: int = 1
    kv_heads: int = 1


WHOLE, RAGGED, LONG = Shape(128, 256), Shape(200, 300, 2, 2), Shape(256, 1100)


def _missing() -> str:
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return name
    return ""


@pytest.fixture(scope="module")
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Kernel, str]:
    """PTX of every kernel that a selected test runs, as the DSL's compiler gives it."""
    missing = _missing()
    if missing:
        pytest.skip(f"the corpus needs the package {missing}: pip install flash-attn-4==4.0.0b36")
    folder = tmp_path_factory.mktemp("corpus")
    script = Path(__file__).with_name("corpus_compile.py")
    chosen = {item.callspec.params.get("kernel") for item in request.session.items if hasattr(item, "callspec")}
    kernels = [kernel for kernel in KERNELS if kernel in chosen]
    command = [sys.executable, str(script), str(folder), *map(str, kernels)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {kernel: (folder / f"{str(kernel).replace(':', '_')}.ptx").read_text() for kernel in kernels}


# --- the launch -------------------------------------------------------------------------------------------------------


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
        d = kernel.head_dim
        qo, kv = (shape.batch, shape.qo_len, self.heads, d), (shape.batch, shape.kv_len, shape.kv_heads, d)
        self.q, self.k, self.v = (self._rounded(rng.standard_normal(s).astype(np.float32)) for s in (qo, kv, kv))
        self.o, self.lse = np.zeros(qo, np.uint16), np.zeros((shape.batch, self.heads, shape.qo_len), np.float32)
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
        codes: Array = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return codes

    def _exact(self, x: Array) -> Array:
        if self.item == "bfloat16":
            return floats.bf16_to_f32(x).astype(np.float64)
        values: Array = torch.from_numpy(x).view(torch.float8_e4m3fn).to(torch.float64).numpy()
        return values

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

    # Queries of one kv head are packed into the rows of a tile where there are several.

    @property
    def tile_heads(self) -> int:
        return self.shape.kv_heads

    @property
    def blocks(self) -> int:
        """Tiles of one kv head, each of a cluster."""
        return -(-self.shape.qo_len * self.kernel.group // (ROWS * self.kernel.q_stage * self.kernel.ctas))

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
        return tensormap.encode_tiled(item, self.address[name], dims, [size * s for s in strides], box, swizzle=3)

    def scheduler(self) -> list[bytes]:
        """Parameters of their tile schedulers: one of blocks in order, one of causal blocks by falling cost."""
        blocks, heads, batch = self.blocks, self.tile_heads, self.shape.batch
        splits = [_ints(1)] if self.kernel.arch == "sm_100a" else []
        if not self.kernel.causal and "c" not in self.kernel.traits:
            return [_ints(blocks), _ints(heads), _ints(batch), *splits, *_divisor(1), *splits]
        head_bytes = self.shape.kv_len * 2 * self.kernel.head_dim * self.k.itemsize
        section = 1 << ((L2_BYTES // head_bytes).bit_length() - 1)  # heads that share the L2 cache
        found = [_ints(blocks * heads * batch), *splits, *(_ints(x) for x in (blocks, heads, batch, section))]
        for divisor in (heads, section, section * blocks, max(heads * batch % section, 1)):
            found += _divisor(divisor)
        return [*found, _ints(heads * batch // section), *_divisor(1), *splits]

    def params(self, sizes: Sequence[int]) -> list[bytes]:
        shape, group = self.shape, self.kernel.group
        qo = _ints(shape.qo_len, self.tile_heads, shape.batch)
        packed = _ints(group, shape.qo_len, shape.kv_heads, shape.batch)
        kv = _ints(shape.kv_len, shape.kv_heads, shape.batch)
        if group > 1:
            head, batch = group * shape.qo_len, self.heads * shape.qo_len
            lse = struct.pack("<Q4i3q", self.address["lse"], *struct.unpack("<4i", packed), shape.qo_len, head, batch)
        else:
            strides = shape.qo_len, self.heads * shape.qo_len
            lse = struct.pack("<Q3i4x2q", self.address["lse"], shape.qo_len, self.heads, shape.batch, *strides)
        scale = math.log2(math.e) / math.sqrt(self.kernel.head_dim)
        # sm_90a keeps the shape of packed queries as 3 numbers, of which it reads the first, the length.
        head = [packed if size == 16 else qo for size in sizes[:1]] + [kv, kv]
        found = [*head, packed if sizes[3] == 16 else qo, lse, *self.maps(), struct.pack("<f", scale)]
        while sizes[len(found)] in (1, 32, 64):  # copies that are not used
            found.append(bytes(sizes[len(found)]))
        found += self.scheduler()
        if group > 1 and self.kernel.arch == "sm_100a":
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
        tiles = self.blocks * self.kernel.ctas, self.tile_heads, self.shape.batch
        flat = self.kernel.causal and "c" not in self.kernel.traits
        description = {
            "symbol": name,
            "grid": (math.prod(tiles), 1, 1) if flat else tiles,
            "block": (x, y, z),
            "cluster": (self.kernel.ctas, 1, 1),
            "smem_bytes": SMEM,
            "params": block,
        }
        return run.launch(text, description, self.memory, **options)


def _check(kernel: Kernel, shape: Shape, text: str, schedule: Schedule, strict: bool = False) -> None:
    """Their loads of tensor memory are not waited for, and they have no tcgen05.fence: without `strict`."""
    problem = Problem(kernel, shape)
    problem.launch(text, schedule=schedule, strict=strict)
    o, lse = problem.expected()
    found = floats.bf16_to_f32(problem.o)
    # Roundings of P, to bfloat16 or e4m3, and of O, which is below 4.
    assert np.abs(found - o).max() < (0.2 if "8" in kernel.traits else 0.01)
    assert np.abs(problem.lse - lse).max() < 5e-5  # part of the exponentials are polynomials


@pytest.mark.parametrize("shape", [WHOLE, RAGGED, LONG], ids=lambda s: f"{s.qo_len}x{s.kv_len}")
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_forward(texts: dict[Kernel, str], kernel: Kernel, shape: Shape) -> None:
    _check(kernel, shape, texts[kernel], Schedule())


@pytest.mark.parametrize("kind", ["delayed", "adversarial"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.causal and k.group == 2], ids=str)
def test_forward_other_schedules(texts: dict[Kernel, str], kernel: Kernel, kind: str) -> None:
    _check(kernel, Shape(200, 500), texts[kernel], Schedule(kind, 5))


# --- what the PTX ISA asks for and they leave out ---------------------------------------------------------------------
#
# Their loads of tensor memory have no tcgen05.wait::ld: ptxas makes an instruction wait for the registers that it uses,
# but nothing orders a load before the store of P over S, or before the arrival that hands the columns on. Nor is there
# any tcgen05.fence. Both are hazards by the ISA; the text with waits and fences put in must not be reported.

BLACKWELL = [k for k in KERNELS if k.arch == "sm_100a" and not k.causal]
_GUARD = r"(?m)^(\s*(?:@!?[%\w]+\s+)?"


def _waiting(text: str) -> str:
    return re.sub(r"(tcgen05\.ld\.[^;]*;)", r"\1 tcgen05.wait::ld.sync.aligned;", text)


def _fenced(text: str) -> str:
    text = re.sub(
        _GUARD + r"(?:mbarrier\.arrive|bar\.sync|bar\.arrive))", r"tcgen05.fence::before_thread_sync;\1", text
    )
    return re.sub(_GUARD + r"tcgen05\.(?:ld|st|mma)\.)", r"tcgen05.fence::after_thread_sync;\1", text)


@pytest.mark.parametrize("kernel", BLACKWELL, ids=str)
def test_strictness_tells_what_is_left_out(texts: dict[Kernel, str], kernel: Kernel) -> None:
    text = texts[kernel]
    assert re.search(r"tcgen05\.(wait::ld|fence)", text) is None
    with pytest.raises(RegisterFault, match=r"before tcgen05\.wait::ld"):
        Problem(kernel, WHOLE).launch(_fenced(text))
    with pytest.raises(Race, match=r"tcgen05\.ld.* a write by tcgen05\.mma"):
        Problem(kernel, WHOLE).launch(_waiting(text))


@pytest.mark.parametrize("kind", ["eager", "adversarial"])
@pytest.mark.parametrize("kernel", BLACKWELL, ids=str)
def test_with_waits_and_fences(texts: dict[Kernel, str], kernel: Kernel, kind: str) -> None:
    _check(kernel, RAGGED, _fenced(_waiting(texts[kernel])), Schedule(kind, 5), strict=True)
