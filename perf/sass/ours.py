"""Our kernels as subjects of the model: any family with a tile, launched on the emulator by its own host code."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from cute_attn.dispatch import emulator as emulated
from cute_attn.dispatch.families import FAMILIES
from cute_attn.emulator import using
from cute_attn.kernels.fa3.host.family import KERNELS as FA3
from cute_attn.kernels.fa4.host.family import KERNELS as FA4
from cute_attn.kernels.host.persistent.family import family
from cute_attn.kernels.host.persistent.variant import PersistentKernels
from cute_attn.kernels.programs import program
from cute_attn.reference import attention
from cute_attn.request import single as single_request
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import named
from cute_attn.runtime.spec import KernelSpec
from perf.sass.count import CountError, Subject
from perf.sass.work import ROLES, STEP, Roles, Tiling, tile_step

LONG = 2048  # query tokens and keys of a problem whose tile is that of long problems
ITEM_BYTES = 2
PERSISTENT: tuple[PersistentKernels[Any], ...] = (FA3, FA4)

Dims = tuple[int, int]  # of q and k, of v
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v
TileFields = Mapping[str, Any]


@contextlib.contextmanager
def other_tiles(fields: TileFields) -> Iterator[None]:
    """Gives these fields to the tiles that the families fa3 and fa4 choose meanwhile. What remembers tiles of a
    family, as `backends` does, must not be used meanwhile: `emulate` does without.
    """
    if not fields:
        yield
        return
    others = {kernels.name: family(_choosing(kernels, fields)) for kernels in PERSISTENT}
    with mock.patch.dict(FAMILIES, others):
        yield


def _choosing(kernels: PersistentKernels[Any], fields: TileFields) -> PersistentKernels[Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        tile = kernels.choose_tile(*args, **kwargs)
        known = [field.name for field in dataclasses.fields(tile)]
        if unknown := fields.keys() - known:
            raise CountError(f"tile: {sorted(unknown)} must be fields of {type(tile).__name__}: {', '.join(known)}")
        return dataclasses.replace(tile, **fields)

    return dataclasses.replace(kernels, choose_tile=choose)


def subject(
    backend: str,
    arch: str,
    head_dims: Dims,
    causal: bool,
    roles: Roles | None = None,
    tile_fields: TileFields | None = None,
) -> Subject:
    """Returns what counts the kernel that `backend` ("auto", "fa4", ...) launches for a long dense request in bfloat16:
    one head, the query rows of one cluster, a GPU of one SM, so that keys are not split. `tile_fields`: fields of the
    tile that differ from the table's, of fa3 and fa4.
    """
    fields = tile_fields or {}
    spec = _launched(backend, arch, head_dims, causal, LONG, fields)
    tile = getattr(spec, "tile", None)
    if tile is None:
        raise CountError(f"{spec.kernel} has no tile")
    artifact = artifacts.get(spec, arch, program)
    warps = artifact.block[0] // 32
    found = roles or ROLES.get((spec.kernel, warps))
    if found is None:
        raise CountError(f"roles of the {warps} warps of {spec.kernel} are unknown: --roles")
    rows = tile.rows * artifact.cluster[0]
    if _launched(backend, arch, head_dims, causal, rows, fields) != spec:
        raise CountError(f"{rows} query tokens run another kernel than {LONG}")
    tiling = Tiling(rows, 64 if arch == "sm_90a" else STEP * artifact.cluster[0])

    def launch(kv_len: int) -> float:
        return emulate(backend, arch, _inputs(rows, kv_len, head_dims), causal, fields)

    return Subject(
        name=spec.kernel,
        arch=arch,
        ptx=artifact.ptx,
        cubin=artifact.cubin,
        symbol=artifact.symbol,
        ctas=artifact.cluster[0],
        warps=warps,
        roles=found,
        work=tile_step(head_dims, ITEM_BYTES, tiling),
        launch=launch,
        units=lambda kv_len: rows / STEP * -(-kv_len // tile.cols) * tile.cols / STEP,
        keys=tile.cols,
        softmax_rows=64 if arch == "sm_90a" else STEP,
    )


def emulate(backend: str, arch: str, operands: Operands, causal: bool, tile_fields: TileFields) -> float:
    """Emulates a request, recording events; returns the largest error of its output against the fp64 reference."""
    problem = single_request.problem(single_request.Call(*operands, causal=causal))
    with other_tiles(tile_fields), using(arch, checks=False, events=True, kernels=backend, sms=1):
        emulated.EmulatedRun(problem.settings)(problem)
    truth = torch.empty_like(problem.out, dtype=torch.float64)
    attention.run(problem._replace(out=truth))
    return float((problem.out - truth).abs().max())


def _inputs(qo_len: int, kv_len: int, head_dims: Dims) -> Operands:
    generator = torch.Generator().manual_seed(1)

    def normal(tokens: int, head_dim: int) -> torch.Tensor:
        return torch.randn((tokens, 1, head_dim), generator=generator).bfloat16()

    d_qk, d_vo = head_dims
    return normal(qo_len, d_qk), normal(kv_len, d_qk), normal(kv_len, d_vo)


def _launched(
    backend: str, arch: str, head_dims: Dims, causal: bool, qo_len: int, tile_fields: TileFields
) -> KernelSpec:
    """Returns the spec of the first kernel that a request launches."""
    problem = single_request.problem(single_request.Call(*_inputs(qo_len, LONG, head_dims), causal=causal))
    with other_tiles(tile_fields), using(arch, kernels=backend, sms=1):
        return emulated.launches(problem, named(arch), 1)[0][0]
