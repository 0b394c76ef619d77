"""Decode kernels as subjects of the model: whatever `xqa_batch_decode_with_kv_cache` launches on the emulator."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch

import cute_attn
from cute_attn.emulator import using
from cute_attn.emulator.adapter import EmulatedBound
from cute_attn.kernels.xqa import tiles
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.artifact import Artifact
from perf.sass.count import CountError, Subject, executed
from perf.sass.executed import Lines
from perf.sass.work import ROLES, Roles, Work

KV_BITS = {"bf16": 16, "e4m3": 8, "e5m2": 8, "nvfp4": 4}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALE_BLOCK = 16  # elements of NVFP4 that share a scale, of one byte
PAGE = 16
WORKSPACE_BYTES = 64  # too few for anything: launches then use memory of their own, as the emulator sees it
FP8_TERMS = 5  # of Q and P in e4m3 and e5m2, which stand for bf16
MIN_COLUMNS = 16  # of a matrix instruction of tcgen05 with 128 rows


@dataclass(frozen=True)
class Decode:
    """Decode with queries in bfloat16 as the model sees it. `rows`: query rows that share a kv head. `many`: the kernel
    for many pairs of a request and a kv head, instead of that for few."""

    backend: str
    arch: str
    kv_dtype: str  # a key of KV_BITS
    head_dim: int
    rows: int
    many: bool

    @property
    def name(self) -> str:
        pairs = "many" if self.many else "few"
        return f"{self.backend} {self.arch} {self.kv_dtype} d{self.head_dim} {self.rows} rows {pairs}"

    @property
    def token_bytes(self) -> float:
        """Bytes of K, V and block scales of a token and kv head."""
        elements = 2 * self.head_dim
        return elements * KV_BITS[self.kv_dtype] / 8 + (elements / SCALE_BLOCK if self.kv_dtype == "nvfp4" else 0)


def kernel_rows(kv_dtype: str, rows: int) -> int:
    """Returns the most rows of the kernel for `rows`, up to 8: the columns of a matrix instruction. With NVFP4, 4 rows
    have kernels of their own."""
    return rows if kv_dtype == "nvfp4" else max(rows, 8)


class Kernel(NamedTuple):
    """What a call launches."""

    artifact: Artifact
    ctas: int  # on a GPU of one SM


def kernel(case: Decode) -> Kernel:
    """Returns the kernel of a case."""
    with _kept() as launches:
        _call(case, 1, 1, PAGE, "emulator")
    if len(launches) != 1:
        raise CountError(f"{case.name} launches {len(launches)} kernels; the model counts one")
    return launches[0]


def subject(case: Decode, found: Kernel, requests: int = 1, roles: Roles | None = None) -> Subject:
    """Returns what counts a case on a GPU of one SM: `requests` of equal length, with a kv head for every CTA, so that
    every CTA computes `requests` segments from the first to the last key. Lengths are keys of a request."""
    artifact, heads = found.artifact, found.ctas // found.artifact.cluster[0]
    warps = artifact.block[0] // 32
    every_warp = Roles({"all": tuple(range(warps))}, ("all",))
    return Subject(
        name=str(artifact.spec["kernel"]),
        arch=case.arch,
        ptx=artifact.ptx,
        cubin=artifact.cubin,
        symbol=artifact.symbol,
        ctas=artifact.cluster[0],
        warps=warps,
        roles=roles or ROLES.get((str(artifact.spec["kernel"]), warps), every_warp),
        work=work(case, artifact.ptx),
        launch=lambda length: _error(case, requests, heads, length),
        units=lambda length: requests * heads * length,
        keys=PAGE,
    )


def work(case: Decode, ptx: str) -> Work:
    """Returns what the instructions of a token and kv head do not tell: the copies of TMA into shared memory, and with
    tcgen05, whose operand of 128 tokens is in shared memory, its reads and its operations. Operands of 8 bits count as
    half: over keys of 8 bits, K Q^T has two columns of them per row, and V^T P three."""
    copied = case.token_bytes if "cp.async.bulk" in ptx else 0
    if "tcgen05.mma" not in ptx:
        return Work("token and kv head", 0, copied)
    columns = -(-case.rows // MIN_COLUMNS) * MIN_COLUMNS
    products = 2 if KV_BITS[case.kv_dtype] == 16 else FP8_TERMS / 2
    return Work("token and kv head", 2 * case.head_dim * columns * products, copied + case.token_bytes)


class Executions:
    """Executions of emulated problems. Kernels whose PTX differs in its target alone are run once."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Lines] = {}

    def of(self, case: Decode, requests: int) -> Callable[[Subject, int], Lines]:
        """Returns what executes the problems of a case."""

        def execute(subject: Subject, length: int) -> Lines:
            problem = case.kv_dtype, case.head_dim, case.rows, requests, subject.units(length)
            key = (re.sub(r"(?m)^\.target .*$", "", subject.ptx), *problem, length)
            if key not in self.known:
                self.known[key] = executed(subject, length)
            return self.known[key]

        return execute


@contextlib.contextmanager
def _kept() -> Iterator[list[Kernel]]:
    """Collects what emulated launches would run, and runs none."""
    found: list[Kernel] = []

    def fire(self: EmulatedBound, stream: int, moving: Any, settled: Any) -> None:
        grid = settled[0]
        found.append(Kernel(self.artifact, grid[0] * grid[1] * grid[2]))

    with mock.patch.object(EmulatedBound, "fire", fire):
        yield found


def _error(case: Decode, requests: int, kv_heads: int, length: int) -> float:
    """Emulates a problem, recording events; returns the error of its output, relative to its norm."""
    exact = _call(case, requests, kv_heads, length, "reference").float()
    out = _call(case, requests, kv_heads, length, "emulator").float()
    return float((out - exact).norm() / exact.norm())


def _call(case: Decode, requests: int, kv_heads: int, length: int, backend: str) -> torch.Tensor:
    """Runs the public function for `requests` of `length` keys on a GPU of one SM."""
    generator = torch.Generator().manual_seed(1)
    pages = -(-length // PAGE) * requests
    shape = (pages, PAGE, kv_heads, case.head_dim)
    query = torch.randn((requests, kv_heads * case.rows, case.head_dim), generator=generator).bfloat16()
    (k, k_scales), (v, v_scales) = (_cache(case.kv_dtype, shape, generator) for _ in "kv")
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)

    def find(arch: Arch, bits: int, head_dim: int, shape: tiles.Shape) -> tiles.Rule:
        """Find the rule of many pairs, or of few in several requests: the problem has few of either kind."""
        return found(arch, bits, head_dim, shape._replace(requests=tiles.FEW + 1 if case.many else 2, kv_heads=1))

    found = tiles.find
    with (
        mock.patch.object(tiles, "find", find),
        using(case.arch, checks=False, events=True, kernels=case.backend, sms=1),
    ):
        out: Any = cute_attn.xqa_batch_decode_with_kv_cache(
            query,
            (k, v),
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8),
            torch.arange(pages, dtype=torch.int32).view(requests, -1),
            torch.full((requests,), length, dtype=torch.int32),
            length,
            bmm1_scale=case.head_dim**-0.5,
            kv_cache_sf=scales,
            backend=backend,
        )
    return out


def _cache(
    kv_dtype: str, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns K or V and its block scales: normally distributed values, or random codes of about that size."""
    if kv_dtype != "nvfp4":
        values = torch.randn(shape, generator=generator)
        return values.to(FP8.get(kv_dtype, torch.bfloat16)), None

    def codes(last: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (*shape[:-1], last), generator=generator, dtype=torch.uint8)

    scales = codes(shape[-1] // SCALE_BLOCK, 0x20, 0x30)  # 1/8 to 1/2
    return codes(shape[-1] // 2, 0, 256), scales.view(torch.float8_e4m3fn)
