"""What serving engines read of a wrapper under FlashInfer's attribute names: options, sizes, memory, index buffers.

All of it is read-only. Without CUDA graphs, an index buffer is a copy made when it is read; a run notices that the copy
was written, and plans its lengths first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from cute_attn.errors import NotPlannedError, RuntimeArgumentError
from cute_attn.problem import BatchLengths
from cute_attn.request import checks
from cute_attn.request.batch_plan import PlanRequest
from cute_attn.request.index_arrays import IndexArrays, int32
from cute_attn.runtime import capture
from cute_attn.runtime.staging import is_capturing
from cute_attn.wrappers.graph import KINDS, MASK, MASK_OFFSETS
from cute_attn.wrappers.plan import Plan

T = TypeVar("T")


class IndexCopy(NamedTuple):
    """A copy of planned lengths that a caller holds, and torch's count of changes when it was last read."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> IndexCopy:
        return cls(tensor, tensor._version)


# ---- readers, each of a `BatchWrapper`


def _plan(wrapper: Any) -> Plan:
    plan: Plan | None = wrapper._plan
    if plan is None:  # an AttributeError: hasattr() is False
        raise NotPlannedError(f"{type(wrapper).__name__} has no plan yet")
    return plan


def _of_plan(path: str) -> Callable[[Any], Any]:
    read = operator.attrgetter(path)
    return lambda wrapper: read(_plan(wrapper))


def _staged(wrapper: Any, name: str) -> torch.Tensor:
    """Return memory of the schedule as bytes."""
    if wrapper._plan is None:
        return torch.empty(0, dtype=torch.uint8, device=wrapper._place.device)
    memory: torch.Tensor = getattr(wrapper._plan.base.staging, name)
    return memory.view(torch.uint8)


def _held(what: str, of_plan: Callable[[PlanRequest], torch.Tensor | None]) -> Callable[[Any], torch.Tensor | None]:
    """Return a reader of the caller's buffer with CUDA graphs, else of what the plan has. None without either."""

    def read(wrapper: Any) -> torch.Tensor | None:
        graph, plan = wrapper._place.graph, wrapper._plan
        if graph is not None:
            return graph.holding.get(what)
        return None if plan is None else of_plan(plan.request)

    return read


QUERIES = "_qo_indptr_buf"
RAGGED = (QUERIES, "_kv_indptr_buf")
PAGED = (QUERIES, "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf")


def _lengths(name: str) -> Callable[[Any], torch.Tensor | None]:
    what = KINDS[name[1:]].holds

    def read(wrapper: Any) -> torch.Tensor | None:
        place, plan = wrapper._place, wrapper._plan
        if name not in (PAGED if place.kv_source == "paged" else RAGGED):
            return None
        if place.graph is not None and (buffer := place.graph.holding.get(what)) is not None:
            return buffer
        if name in wrapper._copies:
            return wrapper._copies[name].tensor
        if plan is None:
            return None
        lengths = plan.request.lengths
        tensor = _on_device(getattr(lengths.host, what), place.device)
        of_decode = lengths.q_len is not None and name == QUERIES
        if place.graph is None and not of_decode:  # whose plan says how many tokens every request has
            wrapper._copies[name] = IndexCopy.of(tensor)
        return tensor

    return read


OPTIONS = (
    *("num_qo_heads", "num_kv_heads", "causal", "window_left", "sm_scale"),
    *("pos_encoding_mode", "rope_scale", "rope_theta"),
)
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    # options, as `plan` or the latest `forward` got them
    **{f"_{name}": _of_plan(f"request.options.{name}") for name in OPTIONS},
    "_logits_soft_cap": lambda wrapper: _plan(wrapper).request.options.logits_soft_cap or 0.0,
    "_page_size": _of_plan("request.page_size"),
    "_q_len_per_req": _of_plan("request.lengths.q_len"),
    **{f"_cached_{x}_data_type": _of_plan(f"settings.features.{x}_dtype") for x in ("q", "kv", "o")},
    # sizes
    "_batch_size": _of_plan("request.lengths.batch_size"),
    "_qo_indptr_last": lambda wrapper: int(_plan(wrapper).request.lengths.host.qo_indptr[-1]),
    "_max_q_len": _of_plan("request.lengths.host.longest_qo"),
    "_max_kv_len": _of_plan("request.lengths.host.longest_kv"),
    "_fixed_batch_size": lambda wrapper: 0 if wrapper._place.graph is None else wrapper._place.graph.batch_size,
    # of captured launches; None without CUDA graphs and before the first plan
    "_max_total_num_rows": lambda wrapper: (
        None if wrapper._plan is None or wrapper._plan.fixed is None else wrapper._plan.fixed.limits.max_rows
    ),
    # memory; the schedule's on the device is good for `reset_workspace_buffer`, and nothing else may write it
    "_workspace": lambda wrapper: wrapper._place.workspace,
    "_workspace_size": lambda wrapper: wrapper._place.workspace.numel(),
    "_int_workspace_buffer": lambda wrapper: _staged(wrapper, "uploaded"),
    "_pin_memory_int_workspace_buffer": lambda wrapper: _staged(wrapper, "host_memory"),
    "_custom_mask_buf": _held(MASK, lambda request: request.mask.packed),
    "_mask_indptr_buf": _held(
        MASK_OFFSETS, lambda r: None if r.mask.packed is None else _on_device(r.mask.offsets, r.mask.packed.device)
    ),
    # index buffers; None for those that wrappers of a kind do not have
    **{name: _lengths(name) for name in (*RAGGED, *PAGED[1:])},
    "_paged_kv_indices_buf": _held("kv_indices", lambda request: request.lengths.kv_indices),
    # the plan in force; None before the first
    "_plan_info": lambda wrapper: None if wrapper._plan is None else wrapper._planned(),
}


def readable(wrapper: type[T]) -> type[T]:
    """Decorate a class of wrappers: the attributes are properties of it."""
    for name, read in ATTRIBUTES.items():
        setattr(wrapper, name, property(read))
    return wrapper


class EngineHooks:
    """Methods that engines call for what only FlashInfer's kernels need."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: every kernel takes k and v of different strides. FlashInfer compiles another one for them.

        Parameters
        ----------
        variant : "independent".

        Raises
        ------
        LayoutError (another variant).
        """
        checks.choice("variant", variant, ("independent",))


# ---- lengths that a caller writes


def written_lengths(request: PlanRequest, copies: dict[str, IndexCopy], device: torch.device) -> BatchLengths | None:
    """Return the lengths of a plan as far as copies hold others, if one was written. Costs a synchronisation per
    copy on a GPU.
    """
    written = [name for name, (tensor, version) in copies.items() if tensor._version != version]
    if not written:
        return None
    name, lengths = written[0], request.lengths
    if is_capturing(device):
        raise RuntimeArgumentError(
            f"{name} was written after plan(), and its lengths must be scheduled by a run before the capture of a CUDA "
            "graph"
        )
    if request.mask.packed is not None or lengths.key_bounds is not None:
        raise RuntimeArgumentError(f"{name} must not be written: the mask belongs to the planned lengths")

    def array(name: str) -> torch.Tensor:
        return copies[name].tensor if name in copies else torch.from_numpy(getattr(lengths.host, KINDS[name[1:]].holds))

    if lengths.kv_indices is None:
        return IndexArrays(RAGGED, array(RAGGED[0]), array(RAGGED[1])).on_host()
    pages = lengths.kv_indices, array(PAGED[3]), request.page_size, lengths.q_len
    return IndexArrays(PAGED, array(PAGED[0]), array(PAGED[1]), *pages).on_host()


def _on_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    with capture.lasting():  # an inference tensor does not count its changes either
        return int32(numbers).to(device)
