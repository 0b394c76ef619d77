"""Rings of the decode kernel that plans are made to take: what fits an SM, names, launches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import torch

from cute_attn.kernels.host.prepared import prepared
from cute_attn.kernels.programs import program
from cute_attn.kernels.rules import Rule
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.host.family import rule_of_batch
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.kernels.xqa.tiles import Rings
from cute_attn.problem import BatchLengths, BatchLimits, Features, Settings
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch
from perf import peers
from perf.harness import Call
from perf.machine import require
from perf.workloads import BatchInputs, BatchWorkload

SPEC_DTYPES = {"bfloat16": "", "e4m3": "float8_e4m3fn", "nvfp4": "nvfp4"}
IN_FLIGHT = (32 << 10, 200 << 10)  # bytes of K and V per SM
WARPS_PER_SM = (4, 24)
FEW = (1, 2), (0, 1)  # CTAs per SM, and guests, of launches of few pairs of a request and a kv head
MANY = (1, 2, 3, 4, 6, 8), (0,)
SHORT = (2, 3, 4, 6, 8, 12, 16), (0,)  # of windows that one CTA reads alone
RING = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?:\+(\d+))?(?:c(\d+)|([weh]))?(?:a(\d+))?")


def title(spec: XqaSpec) -> str:
    """Returns the text that `ring` reads."""
    work = {"shares": "", "even": "e", "whole": "w", "heads": "h", "cluster": f"c{spec.cluster_size}"}[spec.work]
    guests = f"+{spec.guests}" if spec.guests else ""
    ahead = f"a{spec.prefetch}" if spec.prefetch else ""
    return f"{spec.warps}x{spec.stages}x{spec.cols}x{spec.ctas}{guests}{work}{ahead}"


def ring(text: str, start: XqaSpec) -> XqaSpec:
    """Returns `start` with the ring "WARPSxSTAGESxTOKENSxCTAS", as in "4x2x32x3": tokens of a tile, CTAs per SM.

    Behind it may stand "+1", guests; "c6", CTAs of a cluster, or "w", a CTA for every segment, or "h", a warp for every
    segment, those of a CTA of adjacent kv heads, or "e", shares for such warps, of whole segments where these are about
    equally long; "a3", first tiles of a warp that are fetched into L2 before the preceding kernel has ended.
    """
    if not (found := RING.fullmatch(text)):
        raise ValueError(f"a ring is WARPSxSTAGESxTOKENSxCTAS[+GUESTS][cCLUSTER|w|e|h][aTILES], got {text!r}")
    warps, stages, cols, ctas, guests = (int(number or 0) for number in found.groups()[:5])
    shape: dict[str, Any] = {"warps": warps, "stages": stages, "cols": cols, "ctas": ctas, "guests": guests}
    work = "cluster" if found[6] else {None: "shares", "w": "whole", "e": "even", "h": "heads"}[found[7]]
    shape |= {"work": work, "cluster_size": int(found[6] or 1), "prefetch": int(found[8] or 0)}
    return dataclasses.replace(start, **shape)


def resident(spec: XqaSpec, arch: Arch) -> bool:
    """Tells whether the CTAs of a ring, guests included, fit the shared memory of an SM together."""
    ctas = spec.ctas + spec.guests
    return ctas * (XqaMemory(spec).bytes + tiles.RESERVED_SMEM) <= arch.smem_limit + tiles.RESERVED_SMEM


def around(start: XqaSpec, w: BatchWorkload, arch: Arch) -> list[XqaSpec]:
    """Lists every ring that fits an SM of `arch` and keeps neither too few nor too many bytes in flight."""
    few = len(w.kv_lens) * w.num_kv_heads <= tiles.FEW
    ctas, guests = SHORT if 0 <= w.window_left < tiles.SHORT else FEW if few else MANY
    specs = [
        dataclasses.replace(start, warps=warps, stages=stages, cols=cols, ctas=ctas, guests=guests)
        for warps, stages, cols, ctas, guests in itertools.product(
            (1, 2, 4, 8), (2, 3, 4, 6), (16, 32, 64), ctas, guests
        )
    ]
    return [spec for spec in specs if _fits(spec, arch)]


def _fits(spec: XqaSpec, arch: Arch) -> bool:
    try:
        memory = XqaMemory(spec)
    except ValueError:  # no slot beside those of the outputs
        return False
    in_flight = spec.ctas * spec.warps * memory.prefetch_distance * memory.slot_bytes
    enough_warps = WARPS_PER_SM[0] <= spec.ctas * spec.warps
    few_warps = (spec.ctas + spec.guests) * spec.warps <= WARPS_PER_SM[1]
    return resident(spec, arch) and enough_warps and few_warps and IN_FLIGHT[0] <= in_flight <= IN_FLIGHT[1]


@contextlib.contextmanager
def forced(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    """Applies the patches; forgets which kernels and tilings run which settings before and afterwards."""
    prepared.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.callback(prepared.cache_clear)
        for patch in patches:
            stack.enter_context(patch)
        yield


def force_spec(spec: XqaSpec) -> AbstractContextManager[None]:
    """Makes plans and calls take this kernel."""
    return forced(mock.patch.object(tiles, "choose", return_value=spec))


def bind(spec: XqaSpec, arch: Arch, w: BatchWorkload, sets: Sequence[BatchInputs], backend: str = "xqa") -> list[Call]:
    """Binds the decode wrapper, whose plans take this kernel, unless it needs stack."""
    made = artifacts.get(spec, arch.name, program)
    require(not made.stack_bytes, f"it needs {made.stack_bytes} bytes of stack")
    with force_spec(spec):
        return peers.ours(w, sets, backend=backend)


def rule_of(w: BatchWorkload, arch: Arch) -> Rule[Rings]:
    """Return the rule that a plan of the workload follows on a typical GPU of `arch`."""
    features = Features(
        torch.device("cuda"), w.torch_dtype, w.torch_kv_dtype, w.torch_dtype, w.num_qo_heads, w.num_kv_heads,
        w.head_dim, w.head_dim, kv_source="paged", kv_block_scales=w.kv_dtype == "nvfp4", decode=True,
    )  # fmt: skip
    starts = np.arange(len(w.kv_lens) + 1)
    lengths = BatchLengths(starts, starts[:-1], np.array(w.kv_lens))
    settings = Settings(features, window_left=w.window_left, page_size=w.page_size)
    return rule_of_batch(settings, lengths, BatchLimits(0, max_qo_len=1), arch)


def start_of(w: BatchWorkload, arch: Arch) -> XqaSpec:
    """Returns the kernel of a workload by the table."""
    rows, kv_dtype = w.num_qo_heads // w.num_kv_heads, SPEC_DTYPES[w.kv_dtype]
    return tiles.choose(w.dtype, kv_dtype, w.dtype, w.head_dim, rows, False, rule_of(w, arch), arch, w.num_kv_heads)
