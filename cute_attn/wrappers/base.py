"""Base of the batch wrappers: the workspace, the plan, and in CUDA-graph mode buffers that keep their addresses.

The subclasses declare the public methods; what they share is here. `plan` leaves a complete `BatchPlan` or none: after
an error the previous plan is still in force, and a new plan contains nothing of an older one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.dispatch import backends, capabilities, select
from cute_attn.errors import ArgumentError, NotPlannedError, NotSupported, Refusal, RuntimeArgumentError
from cute_attn.problem import BatchLimits, BatchPlan, Features, GraphLimits, Settings, Tokens
from cute_attn.request import batch_plan, batch_run, checks, page_ids
from cute_attn.request.batch_plan import Mask, PlanContext, PlanOptions, Splits
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.settings import KV_LAYOUTS, MAX_INDEX
from cute_attn.runtime import switches
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule
from cute_attn.wrappers import run_cache

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]
DType = torch.dtype | str
Scale = float | torch.Tensor


class PlanRequest(NamedTuple):
    """The checked arguments of a `plan`."""

    options: PlanOptions
    tokens: Tokens
    mask: Mask
    splits: Splits
    page_size: int


class ForwardOptions(NamedTuple):
    """Options of FlashInfer's older `forward`, which replace the planned ones."""

    pos_encoding_mode: Any
    window_left: Any
    logits_soft_cap: Any
    sm_scale: Any
    rope_scale: Any
    rope_theta: Any


class GraphInvariants(NamedTuple):
    """What a captured graph has fixed, so that later plans must not change it."""

    settings: Settings
    splits: Splits
    backend: str
    graph: GraphLimits
    first_row: int  # `run` fills the rows of out and lse before it with torch


class UnsupportedByPlan(NotSupported):
    """The planned backend does not support features that a run adds."""

    def __init__(self, refusals: Sequence[Refusal], features: Features) -> None:
        super().__init__(refusals)
        self.features = features


class BatchWrapper:
    """What all batch wrappers share. Subclasses declare the constructor, `plan`, `run` and `forward`."""

    kv_source = ""  # set by subclasses: ragged | paged

    def __init__(self, float_workspace_buffer: Any, kv_layout: Any, use_cuda_graph: Any, backend: Any) -> None:
        self._set_workspace(float_workspace_buffer)
        self._kv_layout = checks.choice("kv_layout", kv_layout, KV_LAYOUTS)
        self._use_cuda_graph = checks.boolean("use_cuda_graph", use_cuda_graph)
        self._backend = select.checked_name(backend)
        self._fixed_batch_size = 0
        self._index_buffers: dict[str, torch.Tensor] = {}
        self._mask_buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._replaced: list[Staging] = []  # records that graphs captured under earlier workspaces read

    def _set_workspace(self, float_workspace_buffer: Any) -> None:
        self._workspace = batch_plan.workspace(float_workspace_buffer)
        self._float_workspace_buffer = float_workspace_buffer  # serving engines read it, and the index buffers
        self.device: torch.device = self._workspace.device
        self._staging = Staging(self.device)
        self._plan: BatchPlan | None = None
        self._graph_invariants: GraphInvariants | None = None

    # ---- CUDA graphs: buffers

    def _set_index_buffers(self, named: dict[str, tuple[Any, int | None]]) -> None:
        """Keep the index buffers of CUDA-graph mode; without CUDA graphs they are only checked to be tensors.

        `named`: for each buffer the number of elements beyond one per request, or None for any size. The first
        buffer with a number sets the batch size.
        """
        if not self._use_cuda_graph:
            _check_unused({name: value for name, (value, _) in named.items()})
            return
        for name, (value, more) in named.items():
            buffer = batch_plan.graph_buffer(name, value, torch.int32, self.device)
            if more is not None and not self._index_buffers:
                self._fixed_batch_size = buffer.numel() - more
            size = buffer.numel() if more is None else self._fixed_batch_size + more
            if buffer.numel() != size:
                raise ArgumentError(
                    f"{name} must have {size} elements for batch size {self._fixed_batch_size}, got {buffer.numel()}"
                )
            self._index_buffers[name] = buffer

    def _set_mask_buffers(self, custom_mask_buf: Any, mask_indptr_buf: Any) -> None:
        """Keep the mask buffers of CUDA-graph mode: both or neither."""
        if not self._use_cuda_graph:
            _check_unused({"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf})
            return
        if custom_mask_buf is None and mask_indptr_buf is None:
            return
        bits = batch_plan.graph_buffer("custom_mask_buf", custom_mask_buf, torch.uint8, self.device)
        bounds = batch_plan.graph_buffer("mask_indptr_buf", mask_indptr_buf, torch.int32, self.device)
        if bounds.numel() != self._fixed_batch_size + 1:
            raise ArgumentError(
                f"mask_indptr_buf must have {self._fixed_batch_size + 1} elements (batch size + 1), got {len(bounds)}"
            )
        self._mask_buffers = bits, bounds

    # ---- plan

    def _make_plan(self, request: PlanRequest, features: Features | None = None) -> None:
        """Schedule a batch. `features`: what the backend must support, if runs add to what the plan says."""
        settings, backend, limits, invariants = self._resolve(request, features)
        tokens, mask = request.tokens, request.mask
        if mask.packed is not None:
            tokens = tokens._replace(lengths=tokens.lengths._replace(mask_offset=mask.offsets[:-1]))
        launch = backends.plan(backend, settings, tokens.lengths, limits, self._staging)
        if invariants is not None:
            tokens, mask = self._fill_buffers(tokens, mask)
            self._graph_invariants = invariants
        elif tokens.kv_indices is not None:
            tokens = tokens._replace(kv_indices=self._indices_on_device(tokens.kv_indices))
        self._plan = BatchPlan(
            settings,
            tokens,
            limits,
            launch,
            check_supported=functools.partial(_check_supported, backend),
            kv_indices=tokens.kv_indices,
            packed_mask=mask.packed,
            workspace=self._workspace,
            validate=switches.is_on(switches.VALIDATE) and self.kv_source == "paged",
            page_axes=self._page_axes,
        )
        self._request = request._replace(tokens=tokens, mask=mask)  # with the buffers that the plan reads

    def _indices_on_device(self, indices: torch.Tensor) -> torch.Tensor:
        """Return page numbers as kernels read them. The comparison is cheaper than a `to` without effect."""
        if indices.dtype == torch.int32 and indices.device == self.device and indices.is_contiguous():
            return indices
        return indices.to(self.device, torch.int32).contiguous()

    def _resolve(
        self, request: PlanRequest, features: Features | None = None
    ) -> tuple[Settings, capabilities.Backend, BatchLimits, GraphInvariants | None]:
        """Return settings, backend, limits and graph invariants. Raises every error except the backend's own."""
        options, tokens, mask, splits, page_size = request
        has_mask, decode = mask.packed is not None, tokens.q_len is not None
        own_splits = splits.fixed_split_size is not None or splits.disable_split_kv
        multi_item = tokens.lengths.key_bounds is not None
        context = PlanContext(
            self.device, self._kv_layout, self.kv_source, has_mask, page_size, decode, own_splits, multi_item
        )
        settings = batch_plan.plan_settings(options, context)
        batch_plan.check_rows(tokens, settings.features.num_qo_heads)
        limits = BatchLimits(self._workspace.numel(), *splits, max_qo_len=tokens.q_len)
        name = self._backend if self._graph_invariants is None else self._graph_invariants.backend
        rows = select.rows_class(settings.features, batch_schedule.typical_qo_len(tokens.lengths, limits))
        backend = select.chosen(features or settings.features, name, rows)
        if not self._use_cuda_graph:
            return settings, backend, limits, None
        invariants = self._check_graph_invariants(settings, splits, backend.name, tokens, mask)
        return settings, backend, limits._replace(graph=invariants.graph), invariants

    @functools.cached_property
    def _page_axes(self) -> tuple[str, ...]:
        tokens = "page_size" if self.kv_source == "paged" else "kv_indptr[-1]"
        axes = (tokens, "num_kv_heads") if self._kv_layout == "NHD" else ("num_kv_heads", tokens)
        return (*axes, "head_dim")

    def _check_graph_invariants(
        self, settings: Settings, splits: Splits, backend: str, tokens: Tokens, mask: Mask
    ) -> GraphInvariants:
        """Return the invariants of the first plan, which may be this one, after checking that this plan keeps them."""
        if tokens.batch_size != self._fixed_batch_size:
            raise ArgumentError(
                f"the batch size must stay {self._fixed_batch_size} with use_cuda_graph=True (the size of the index "
                f"buffers), got {tokens.batch_size}"
            )
        if tokens.kv_indices is not None and tokens.kv_end > self._indices_buffer().numel():
            raise ArgumentError(
                f"the paged kv indices must fit the {self._indices_buffer().numel()} elements of their buffer, "
                f"got {tokens.kv_end}"
            )
        self._check_mask_buffers(mask)
        invariants, first_row = self._graph_invariants, int(tokens.lengths.qo_indptr[0])
        if invariants is None:
            most_keys = tokens.kv_end
            if tokens.kv_indices is not None:
                most_keys = self._indices_buffer().numel() * settings.page_size
            graph = GraphLimits(tokens.batch_size, tokens.rows, most_keys, tokens.q_len)
            return GraphInvariants(settings, splits, backend, graph, first_row)
        _check_unchanged(invariants, GraphInvariants(settings, splits, backend, invariants.graph, first_row))
        if tokens.rows > invariants.graph.max_rows:
            raise ArgumentError(
                f"qo_indptr[-1] must not exceed {invariants.graph.max_rows}, that of the first plan, with "
                f"use_cuda_graph=True: captured launches have no room for more; got {tokens.rows}"
            )
        if tokens.kv_indices is None and tokens.kv_end > invariants.graph.max_kv_tokens:
            raise ArgumentError(
                f"kv_indptr[-1] must not exceed {invariants.graph.max_kv_tokens}, that of the first plan, with "
                f"use_cuda_graph=True: captured launches have no room for more; got {tokens.kv_end}"
            )
        if invariants.graph.max_qo_len != tokens.q_len:
            raise ArgumentError(
                f"q_len_per_req must stay {invariants.graph.max_qo_len} with use_cuda_graph=True, got {tokens.q_len}"
            )
        return invariants

    def _check_mask_buffers(self, mask: Mask) -> None:
        if mask.packed is None:
            return
        if self._mask_buffers is None:
            raise ArgumentError("a custom mask with use_cuda_graph=True needs custom_mask_buf and mask_indptr_buf")
        room = self._mask_buffers[0].numel()
        if mask.offsets[-1] > min(room, MAX_INDEX):
            raise ArgumentError(f"the packed mask must fit the {room} bytes of custom_mask_buf, got {mask.offsets[-1]}")

    def _indices_buffer(self) -> torch.Tensor:
        return next(buffer for name, buffer in self._index_buffers.items() if "indices" in name)

    def _fill_buffers(self, tokens: Tokens, mask: Mask) -> tuple[Tokens, Mask]:
        """Copy a plan's index arrays and mask to the addresses that captured launches read."""
        for name, buffer in self._index_buffers.items():
            numbers = _index_values(name, tokens)
            if numbers is not None:
                buffer.copy_(torch.from_numpy(numbers.astype(np.int32)), non_blocking=True)
        if tokens.kv_indices is not None:
            buffer = self._indices_buffer()
            if buffer.data_ptr() != tokens.kv_indices.data_ptr():
                used = tokens.kv_indices[: tokens.kv_end]
                # A copy from pinned memory must end before `plan` returns: the caller may then overwrite it.
                buffer[: tokens.kv_end].copy_(used, non_blocking=not used.is_pinned())
            tokens = tokens._replace(kv_indices=buffer)
        if mask.packed is not None and self._mask_buffers is not None:
            bits, bounds = self._mask_buffers
            bits[: mask.packed.numel()].copy_(mask.packed)
            bounds.copy_(torch.from_numpy(mask.offsets.astype(np.int32)))
            mask = mask._replace(packed=bits)
        return tokens, mask

    # ---- run

    def _planned(self) -> BatchPlan:
        if self._plan is None:
            raise NotPlannedError(
                f"{type(self).__name__}.plan() must come before run(), and again after reset_workspace_buffer()"
            )
        return self._plan

    def _run(self, arguments: RunArguments) -> Result:
        plan = self._plan or self._planned()
        if (replayed := run_cache.try_replay(plan, arguments)) is not None:
            out, lse = replayed
            return out if lse is None or not arguments.return_lse else (out, lse)
        try:
            problem = batch_run.problem(plan, arguments)
        except UnsupportedByPlan as error:
            plan = self._replan_on_other_backend(error)
            problem = batch_run.problem(plan, arguments)
        if plan.validate:
            page_ids.before_launch(problem, plan.tokens.lengths)
        plan.launch(problem)
        if not plan.validate:
            run_cache.cache_run(plan, arguments, problem)
        if arguments.return_lse:
            assert problem.lse is not None
            return problem.out, problem.lse
        return problem.out

    def _replan_on_other_backend(self, error: UnsupportedByPlan) -> BatchPlan:
        """Plan again on a backend that supports what a run adds; later runs stay there.

        Raises `error` if the user named the backend, and in CUDA-graph mode, where captured launches cannot move.
        """
        if self._backend != "auto" or self._use_cuda_graph:
            raise error
        self._make_plan(self._request, error.features)
        return self._planned()

    def _replan(self, forward: ForwardOptions, **changed: Any) -> None:
        """Plan again with the options of `forward`, for this run and those after it, unless they are planned."""
        self._planned()
        request = self._request
        options = request.options._replace(**forward._asdict(), **changed)
        if list(map(type, options)) == list(map(type, request.options)) and options == request.options:
            return  # types too: 1 == True
        self._make_plan(request._replace(options=options))

    # ---- members of every wrapper

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph=True`."""
        return self._use_cuda_graph

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Compute the memory that a plan would use. Makes no plan; the one in force stays.

        Parameters
        ----------
        args, kwargs : the arguments of `plan`.

        Returns
        -------
        (float_bytes, int_bytes) : bytes of the float workspace that the schedule would use if there were no limit, and
        bytes of the schedule's records, which are in memory that the wrapper allocates; (0, 0) on the reference
        backend. A smaller float workspace only means fewer splits, except with `fixed_split_size`, where `plan` then
        raises WorkspaceError.

        Raises
        ------
        The errors of `plan`, but not WorkspaceError.
        """
        sizes: list[tuple[int, int]] = []

        def measure(request: PlanRequest) -> None:
            settings, backend, limits, _ = self._resolve(request)
            sizes.append(backends.workspace(backend, settings, request.tokens.lengths, limits))

        probe: Any = copy.copy(self)
        probe._make_plan = measure
        probe.plan(*args, **kwargs)
        return sizes[0]

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replace the workspace. There is no plan afterwards: call `plan` before the next `run`.

        Graphs captured before keep reading the old workspace, which the caller must keep alive, and the old schedule,
        which the wrapper keeps. Later plans do not reach them, but overwrite the index buffers that they read: capture
        them again.

        Parameters
        ----------
        float_workspace_buffer : as for the constructor; with `use_cuda_graph=True` on the index buffers' device.
        int_workspace_buffer : a tensor on the same device, not used. FlashInfer keeps schedules in it; here the wrapper
            allocates that memory, as much as a plan needs.

        Raises
        ------
        ArgumentTypeError (not a tensor), ArgumentError (not contiguous, not 16-byte aligned, another device).
        """
        device = batch_plan.workspace(float_workspace_buffer).device
        if self._use_cuda_graph and device != self.device:
            raise ArgumentError(
                f"float_workspace_buffer must be on the index buffers' device {self.device}, got {device}"
            )
        if int_workspace_buffer is not None:
            checks.tensor("int_workspace_buffer", int_workspace_buffer)
            if int_workspace_buffer.device != device:
                raise ArgumentError(
                    f"int_workspace_buffer must be on the workspace's device {device}, "
                    f"got {checks.describe(int_workspace_buffer)}"
                )
        if self._graph_invariants is not None:
            self._replaced.append(self._staging)
        self._set_workspace(float_workspace_buffer)

    def end_forward(self) -> None:
        """Do nothing. Callers of FlashInfer's older `begin_forward` and `forward` end with it."""


def _check_unused(buffers: dict[str, Any]) -> None:
    for name, value in buffers.items():
        if value is not None:
            checks.tensor(name, value)


def _check_supported(backend: capabilities.Backend, features: Features) -> None:
    refusals = select.reasons_against(backend, features, select.arch_for(features.device, None))
    if refusals:
        raise UnsupportedByPlan(refusals, features)


def _check_unchanged(invariants: GraphInvariants, now: GraphInvariants) -> None:
    """Refuse a plan that changes more than lengths: captured launches contain all other numbers."""
    before, after = _invariants_by_name(invariants), _invariants_by_name(now)
    for name, value in after.items():
        if before[name] != value:
            raise RuntimeArgumentError(
                f"{name} must stay {before[name]!r} with use_cuda_graph=True: a captured graph would not see the "
                f"change to {value!r}; use another wrapper, or call reset_workspace_buffer() and capture again"
            )


def _invariants_by_name(invariants: GraphInvariants) -> dict[str, Any]:
    settings = invariants.settings._asdict()
    features: Features = settings.pop("features")
    named = features._asdict()
    del named["own_splits"]  # follows from the splits, which are compared too
    return {
        **named,
        **settings,
        **invariants.splits._asdict(),
        "backend": invariants.backend,
        "qo_indptr[0]": invariants.first_row,
    }


def _index_values(name: str, tokens: Tokens) -> np.ndarray | None:
    """Return what an index buffer receives; None for the buffer of page numbers, which is copied on the device."""
    if "last_page_len" in name:
        return tokens.last_page_len
    if "indices" in name:
        return None
    return tokens.lengths.qo_indptr if name.startswith("qo") else tokens.kv_indptr
