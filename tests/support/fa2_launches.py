"""Launches of fa2 and combine kernels that are recorded and do nothing: what host code hands over, by name."""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.host import batch as host_batch
from cute_attn.kernels.host import gpu as loading
from cute_attn.kernels.host import single as host_single
from cute_attn.kernels.host.prepared import prepared as prepared_kernel
from cute_attn.runtime.spec import KernelSpec


class Fa2Params(NamedTuple):
    q: int
    k: int
    v: int
    o: int
    lse: int
    mask: int
    mask_bytes: int
    scale0: int
    scale1: int
    v_scale_ptr: int
    sinks: int
    q_stride_n: int
    q_stride_h: int
    k_stride_n: int
    k_stride_h: int
    v_stride_n: int
    v_stride_h: int
    o_stride_n: int
    o_stride_h: int
    qo_len: int
    kv_len: int
    group: int
    group_multiplier: int
    group_shift: int
    num_qo_heads: int
    num_kv_heads: int
    kv_heads_multiplier: int
    kv_heads_shift: int
    right: int
    left: int
    full_tiles: int
    range_left: int
    tiles_per_split: int
    scale: float
    soft_cap: float
    v_scale: float
    rope_base: float
    rope_ratio: float
    lse_scale: float
    items: int
    o_partial: int
    lse_partial: int
    kv_indices: int
    k_stride_page: int
    v_stride_page: int
    page_size: int
    page_multiplier: int
    page_shift: int
    k_scales: int
    v_scales: int
    k_scales_stride_page: int
    k_scales_stride_n: int
    k_scales_stride_h: int
    v_scales_stride_page: int
    v_scales_stride_n: int
    v_scales_stride_h: int
    scale_q: int
    scale_k: int
    scale_v: int


class CombineParams(NamedTuple):
    o_partial: int
    lse_partial: int
    o: int
    lse: int
    v_scale_ptr: int
    sinks: int
    o_stride_n: int
    o_stride_h: int
    qo_len: int
    num_qo_heads: int
    num_splits: int
    num_rows: int
    warps_per_row: int
    v_scale: float
    lse_scale: float
    merges: int
    num_kv_heads: int
    group: int
    rows_per_merge: int
    slot_rows: int


class SpecAlone:
    """Takes the place of an `Artifact`: a spec, and the names of its kernel's parameters."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        params = Fa2Params if isinstance(spec, Fa2Spec) else CombineParams
        self.params = [types.SimpleNamespace(name=name) for name in params._fields]


class RecordedLaunch:
    """Takes the place of `Launch`. `fired` collects the launches of a test."""

    fired: list[RecordedLaunch]
    static: dict[str, Any]
    groups: tuple[Sequence[str], ...]
    params: Fa2Params | CombineParams

    def __init__(self, artifact: SpecAlone, device_index: int, *, pdl: bool) -> None:
        self.artifact, self.spec, self.device_index, self.pdl = artifact, artifact.spec, device_index, pdl

    def bind(self, static: dict[str, Any], *groups: Sequence[str]) -> RecordedLaunch:
        bound = copy.copy(self)
        bound.static, bound.groups = static, groups
        return bound

    def fire(self, stream: int, moving: tuple[int | float, ...], settled: tuple[Any, ...]) -> None:
        grid, *rest = settled
        values = dict(self.static)
        for fields, given in zip(self.groups, (moving, *rest), strict=True):
            values |= zip(fields, given, strict=True)
        fired = copy.copy(self)
        fired.grid, fired.stream = grid, stream
        fired.params = Fa2Params(**values) if isinstance(self.spec, Fa2Spec) else CombineParams(**values)
        RecordedLaunch.fired.append(fired)


def record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded launches in place of a GPU's, on stream 77."""
    RecordedLaunch.fired = []
    loading.load.cache_clear()  # which hold kernels of other tests
    prepared_kernel.cache_clear()
    monkeypatch.setattr(loading, "Launch", RecordedLaunch)
    monkeypatch.setattr(loading, "artifacts", types.SimpleNamespace(get=lambda spec, arch, program_of: SpecAlone(spec)))
    for host in (host_single, host_batch):
        monkeypatch.setattr(host, "current_stream", lambda index: 77)
