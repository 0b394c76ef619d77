"""Our kernels as subjects of the model: any family with a tile, launched on the emulator by its own host code."""

from __future__ import annotations

from typing import Any

import torch

import cute_attn
from cute_attn.dispatch import emulator as emulated
from cute_attn.emulator import using
from cute_attn.kernels.programs import program
from cute_attn.request import single as single_request
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import named
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.spec import KernelSpec
from perf.sass.count import CountError, Subject
from perf.sass.work import ROLES, STEP, Roles, Tiling, tile_step

LONG = 2048  # query tokens and keys of a problem whose tile is that of long problems
ITEM_BYTES = 2


def subject(backend: str, arch: str, head_dims: tuple[int, int], causal: bool, roles: Roles | None = None) -> Subject:
    """Returns what counts the kernel that `backend` ("auto", "fa4", ...) launches for a long dense request in bfloat16:
    one head, the query rows of one cluster, a GPU of one SM, so that keys are not split."""
    spec = _launched(backend, arch, head_dims, causal, LONG)
    tile = getattr(spec, "tile", None)
    if tile is None:
        raise CountError(f"{spec.kernel} has no tile")
    artifact = artifacts.get(spec, arch, program)
    warps = artifact.block[0] // 32
    found = roles or ROLES.get((spec.kernel, warps))
    if found is None:
        raise CountError(f"roles of the {warps} warps of {spec.kernel} are unknown: --roles")
    rows = tile.rows * artifact.cluster[0]
    if _launched(backend, arch, head_dims, causal, rows) != spec:
        raise CountError(f"{rows} query tokens run another kernel than {LONG}")
    tiling = Tiling(rows, 64 if arch == "sm_90a" else STEP * artifact.cluster[0])
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
        launch=lambda kv_len: _launch(backend, artifact, rows, kv_len, head_dims, causal),
        units=lambda kv_len: rows / STEP * -(-kv_len // tile.cols) * tile.cols / STEP,
        keys=tile.cols,
        softmax_rows=64 if arch == "sm_90a" else STEP,
    )


def _inputs(qo_len: int, kv_len: int, head_dims: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(tokens: int, head_dim: int) -> torch.Tensor:
        return torch.randn((tokens, 1, head_dim), generator=generator).bfloat16()

    d_qk, d_vo = head_dims
    return normal(qo_len, d_qk), normal(kv_len, d_qk), normal(kv_len, d_vo)


def _launched(backend: str, arch: str, head_dims: tuple[int, int], causal: bool, qo_len: int) -> KernelSpec:
    """Returns the spec of the first kernel that a request launches."""
    problem = single_request.problem(single_request.Call(*_inputs(qo_len, LONG, head_dims), causal=causal))
    with using(arch, kernels=backend, sms=1):
        return emulated.launches(problem, named(arch), 1)[0][0]


def _launch(
    backend: str, artifact: Artifact, rows: int, kv_len: int, head_dims: tuple[int, int], causal: bool
) -> float:
    """Emulates a request, recording events; returns the largest error of its output."""
    q, k, v = _inputs(rows, kv_len, head_dims)

    def attention(name: str) -> Any:
        out: Any = cute_attn.single_prefill_with_kv_cache(q, k, v, causal=causal, backend=name)
        return out.float()

    with using(artifact.arch, checks=False, events=True, kernels=backend, sms=1):
        out = attention("emulator")
    return float((out - attention("reference")).abs().max())
