"""Base of the batch wrappers: the workspace, the plan, and in CUDA-graph mode buffers that keep their addresses.

The subclasses declare the public methods; what they share is here. `plan` leaves a complete `BatchPlan` or none: after
an error the previous plan is still in force, and a new plan contains nothing of an older one.

Runs settle what their plan left open (`variants.py`). A plan schedules what ran under the plan before, so that it
renews every schedule that a captured graph holds; any other variant is scheduled by its first run. One thread at a time
may use a wrapper, except that `run` of one plan may be called from several.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cute_attn.dispatch import backends, capabilities, select
from cute_attn.dispatch.capabilities import Load
from cute_attn.errors import ArgumentError, NotPlannedError, NotSupported, Refusal, RuntimeArgumentError
from cute_attn.ops import handles
from cute_attn.problem import BatchLimits, BatchPlan, DeviceTokens, Features, GraphLimits, Settings, Tokens
from cute_attn.request import batch_plan, batch_run, checks, page_ids
from cute_attn.request.batch_plan import Mask, PlanContext
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.index_arrays import int32
from cute_attn.request.settings import KV_LAYOUTS, MAX_INDEX
from cute_attn.runtime import switches
from cute_attn.runtime.staging import Staging, Uploads, is_capturing
from cute_attn.schedule import batch as batch_schedule
from cute_attn.wrappers import device_plan, run_cache
from cute_attn.wrappers.graph_invariants import GraphInvariants, check_sizes, check_unchanged
from cute_attn.wrappers.not_copied import NotCopied
from cute_attn.wrappers.plan_request import Copy, HostCopy, PlanRequest, differ, index_values, make, same_memory
from cute_attn.wrappers.planned_state import PlannedState
from cute_attn.wrappers.stride_variants import StrideVariants
from cute_attn.wrappers.variants import Variant, Variants

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]
DType = torch.dtype | str
Scale = float | torch.Tensor


class ForwardOptions(NamedTuple):
    """Options of FlashInfer's older `forward`, which replace the planned ones."""

    pos_encoding_mode: Any
    window_left: Any
    logits_soft_cap: Any
    sm_scale: Any
    rope_scale: Any
    rope_theta: Any


class UnsupportedByPlan(NotSupported):
    """The planned backend does not support features that a run adds."""

    def __init__(self, refusals: Sequence[Refusal], features: Features) -> None:
        super().__init__(refusals)
        self.features = features


class BatchWrapper(PlannedState, StrideVariants, NotCopied):
    """What all batch wrappers share. Subclasses declare the constructor, `plan`, `run` and `forward`."""

    kv_source = ""  # set by subclasses: ragged | paged

    def __init__(self, float_workspace_buffer: Any, kv_layout: Any, use_cuda_graph: Any, backend: Any) -> None:
        self._index_buffers: dict[str, torch.Tensor] = {}
        self._uploads: dict[str, Uploads] = {}  # to index buffers, of lengths on the host
        self._mask_buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._set_workspace(float_workspace_buffer)
        self._kv_layout = checks.choice("kv_layout", kv_layout, KV_LAYOUTS)
        self._use_cuda_graph = checks.boolean("use_cuda_graph", use_cuda_graph)
        self._backend = select.checked_name(backend)
        self._fixed_batch_size = 0
        self._handle = handles.new(self)
        self._o_dtype: torch.dtype | None = None  # of the plan in force, for traced runs
        self._replaced: list[Variants] = []  # records that graphs captured under earlier workspaces read
        self._lock = threading.RLock()  # of planning, which a first run may need; a replay takes none

    def _set_workspace(self, float_workspace_buffer: Any) -> None:
        workspace = batch_plan.workspace(float_workspace_buffer)
        checks.apart((("float_workspace_buffer", workspace),), self._index_buffers.items())
        self._workspace = workspace
        self._float_workspace_buffer = float_workspace_buffer  # serving engines read it, and the index buffers
        self.device: torch.device = workspace.device
        self._variants = Variants.on(self.device)
        self._current = self._variants.base
        self._plan: BatchPlan | None = None  # of the current variant; None where a run has more to look at
        self._request: PlanRequest | None = None
        self._graph_invariants: GraphInvariants | None = None
        self._forget_copies()

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
            self._keep_apart((name, buffer))
            self._index_buffers[name], self._uploads[name] = buffer, Uploads(buffer)

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
        self._keep_apart(("custom_mask_buf", bits), ("mask_indptr_buf", bounds))
        self._mask_buffers = bits, bounds

    def _keep_apart(self, *buffers: checks.Named) -> None:
        """Refuse buffers that share memory with others or with the workspace: a plan writes them all."""
        checks.apart(buffers, (("float_workspace_buffer", self._workspace), *self._index_buffers.items()))

    def _graph_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of CUDA graphs by name."""
        masks = zip(("custom_mask_buf", "mask_indptr_buf"), self._mask_buffers or (), strict=False)
        return {**self._index_buffers, **dict(masks)}

    # ---- plan

    def _make_plan(self, request: PlanRequest) -> None:
        """Schedule a batch: what ran under the previous plan, if its settings are the same, else as the plan says."""
        with self._lock:
            request = device_plan.bounded(self, request)
            known = None if self._request is None or differ(self._request, request) else self._variants.settings
            settings, graph = self._checked(request, known)
            request, copies = self._placed(request)
            if known is not None and self._lengths_replaced(request, copies):
                return
            variants, due = self._variants.following(settings, keep=self._use_cuda_graph)
            if device_plan.is_open(request):
                request, due = device_plan.leave_open(self, request), []
            limits = None if graph is None else graph.graph
            for i, variant in enumerate(due):
                try:
                    variant.plan = self._scheduled(variant, request, limits, None, settings)
                except Exception:
                    self._schedule_again(due[:i])
                    raise
            make(copies)
            self._request, self._graph_invariants = request, graph
            self._o_dtype = settings.features.o_dtype
            self._variants, self._current = variants, variants.base
            self._forget_copies()
            self._plan = variants.base.plan

    def _lengths_replaced(self, request: PlanRequest, copies: list[Copy | HostCopy]) -> bool:
        """Replace the lengths of the plan in force, if nothing else changes and its launch can; tell whether."""
        plan, variants, tokens = self._plan, self._variants, request.tokens
        if plan is None or plan is not variants.base.plan or len(variants.by_settings) > 1 or tokens.rows is None:
            return False
        again = getattr(plan.launch, "again", None)
        if again is None or plan.validate != self._validates():
            return False
        if plan.load != _load(plan.settings, tokens, plan.limits):
            return False
        batch_plan.check_rows(tokens, plan.settings.features.num_qo_heads)
        same_launches = again(device_plan.lengths_of(tokens))
        if same_launches is None:
            return False
        make(copies)
        plan.follow(tokens, same_launches)
        self._request, variants.base.used = request, variants.base.used and self._use_cuda_graph
        return True

    def _validates(self) -> bool:
        """Tell whether runs check page numbers before every launch."""
        return self.kv_source == "paged" and switches.validates()

    def _scheduled(
        self,
        variant: Variant,
        request: PlanRequest,
        graph: GraphLimits | None,
        features: Features | None = None,
        settings: Settings | None = None,
    ) -> BatchPlan:
        """Schedule a request with what the variant replaces. `features`: what the backend must support, if runs add to
        what the plan says; `settings`: of the request without the variant, if they are known.
        """
        if variant.overrides:
            request, settings = request._replace(options=request.options._replace(**variant.overrides)), None
        settings, backend, limits, load = self._resolve(request, graph, variant.backend, features, settings)
        launch = device_plan.launch(self, request.tokens, settings, backend, limits, variant)
        if launch is None:
            return self._scheduled(variant, device_plan.on_host(request), graph, features, settings)
        if graph is not None:
            variant.backend = backend.name
        return BatchPlan(
            settings,
            request.tokens,
            limits,
            launch,
            check_supported=functools.partial(_check_supported, backend),
            kv_indices=request.tokens.kv_indices,
            packed_mask=request.mask.packed,
            workspace=self._workspace,
            staging=variant.staging,
            buffers=self._graph_buffers(),
            validate=self._validates(),
            backend=backend.name,
            load=load if features is None else None,
        )

    def _schedule_again(self, variants: Sequence[Variant]) -> None:
        """Restore the records of the plan in force, which a plan that failed has replaced."""
        for variant in variants:
            before = self._variants.sharing(variant.staging)
            assert before.plan is not None
            assert self._request is not None
            before.plan = self._scheduled(before, self._request, before.plan.limits.graph)
            if before is self._current and self._plan is not None:
                self._plan = before.plan

    def _placed(self, request: PlanRequest) -> tuple[PlanRequest, list[Copy | HostCopy]]:
        """Return the request with index array and mask where launches read them, and the copies that put them there.

        With CUDA graphs that is the caller's buffers. Sources that overlap a target are copied aside here, before
        anything is written.
        """
        tokens, mask = request.tokens, request.mask
        if isinstance(tokens, DeviceTokens):
            return device_plan.placed(self, request)
        copies: list[Copy | HostCopy] = []
        if mask.packed is not None:
            tokens = tokens._replace(lengths=tokens.lengths.replace(mask_offset=mask.offsets[:-1]))
        if not self._use_cuda_graph:
            if tokens.kv_indices is not None:
                indices = self._indices_on_device(tokens.kv_indices)
                tokens = tokens if indices is tokens.kv_indices else tokens._replace(kv_indices=indices)
            return (request if tokens is request.tokens else request._replace(tokens=tokens)), copies
        for name, uploads in self._uploads.items():
            numbers = index_values(name, tokens)
            if numbers is not None:
                copies.append(HostCopy(uploads, numbers))
        if tokens.kv_indices is not None:
            buffer = self._indices_buffer()
            if not same_memory(tokens.kv_indices, buffer):
                used = self._aside(tokens.kv_indices[: tokens.kv_end])
                # A copy from pinned memory must end before `plan` returns: the caller may then overwrite it.
                copies.append(Copy(buffer[: tokens.kv_end], used, used.is_cuda or not used.is_pinned()))
            tokens = tokens._replace(kv_indices=buffer)
        if mask.packed is not None and self._mask_buffers is not None:
            bits, bounds = self._mask_buffers
            copies.append(Copy(bits[: mask.packed.numel()], self._aside(mask.packed)))
            copies.append(Copy(bounds, int32(mask.offsets)))
            mask = mask._replace(packed=bits)
        return request._replace(tokens=tokens, mask=mask), copies

    def _aside(self, source: torch.Tensor) -> torch.Tensor:
        """Return a source for a copy into a buffer: int32 page numbers or mask bytes, of which no buffer is a part."""
        if source.dtype == torch.int64:
            return page_ids.as_int32(source, source.device)
        extent = checks.extent(source)
        buffers = (*self._index_buffers.values(), *(self._mask_buffers or ()))
        if any(extent[0] < stop and start < extent[1] for start, stop in map(checks.extent, buffers)):
            return source.clone()
        return source

    def _indices_on_device(self, indices: torch.Tensor) -> torch.Tensor:
        """Return page numbers as kernels read them. The comparison is cheaper than a `to` without effect."""
        if indices.dtype == torch.int32 and indices.device == self.device and indices.is_contiguous():
            return indices
        return page_ids.as_int32(indices, self.device)

    def _settings(self, request: PlanRequest) -> Settings:
        """Return the settings that the options of a request decide. Raises what is wrong with them."""
        options, tokens, mask, splits, page_size, _, newest = request
        own_splits = splits.fixed_split_size is not None or splits.disable_split_kv
        context = PlanContext(
            self.device,
            self._kv_layout,
            self.kv_source,
            mask.packed is not None,
            page_size,
            newest or tokens.q_len is not None,
            own_splits,
            tokens.multi_item,
        )
        return batch_plan.plan_settings(context, *options)

    def _resolve(
        self,
        request: PlanRequest,
        graph: GraphLimits | None,
        backend: str | None = None,
        features: Features | None = None,
        settings: Settings | None = None,
    ) -> tuple[Settings, capabilities.Backend, BatchLimits, Load]:
        """Return settings, backend, limits and load. `backend`: its name, if it is already settled; so `settings`."""
        settings = settings or self._settings(request)
        batch_plan.check_rows(request.tokens, settings.features.num_qo_heads)
        graph = device_plan.limits_of(request, graph)
        limits = BatchLimits(self._workspace.numel(), *request.splits, graph, request.q_len, self._use_cuda_graph)
        load = _load(settings, request.tokens, limits)
        found = select.chosen(features or settings.features, backend or self._backend, load)
        return settings, found, limits, load

    def _checked(
        self, request: PlanRequest, settings: Settings | None = None
    ) -> tuple[Settings, GraphInvariants | None]:
        """Return the settings of a plan and, with CUDA graphs, the invariants of the first plan, which may be this one.
        Raises every error except those of the backend. `settings`: if they are known.
        """
        settings = settings or self._settings(request)
        if not self._use_cuda_graph:
            return settings, None
        tokens = request.tokens
        if tokens.batch_size != self._fixed_batch_size:
            raise ArgumentError(
                f"the batch size must stay {self._fixed_batch_size} with use_cuda_graph=True (the size of the index "
                f"buffers), got {tokens.batch_size}"
            )
        if device_plan.is_open(request):
            return settings, None
        host_lengths = isinstance(tokens, Tokens)
        if host_lengths and tokens.kv_indices is not None and tokens.kv_end > self._indices_buffer().numel():
            raise ArgumentError(
                f"the paged kv indices must fit the {self._indices_buffer().numel()} elements of their buffer, "
                f"got {tokens.kv_end}"
            )
        self._check_mask_buffers(request.mask)
        invariants, first_row = self._graph_invariants, tokens.first_row
        if invariants is None:
            assert tokens.rows is not None
            most_keys = tokens.kv_end
            if tokens.kv_indices is not None:
                most_keys = self._indices_buffer().numel() * settings.page_size
            graph = GraphLimits(tokens.batch_size, tokens.rows, most_keys, request.q_len)
            return settings, GraphInvariants(settings, request.splits, graph, first_row)
        check_sizes(invariants.graph, request.tokens, request.q_len)
        first_row = first_row if host_lengths else invariants.first_row
        check_unchanged(invariants, GraphInvariants(settings, request.splits, invariants.graph, first_row))
        return settings, invariants

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

    # ---- run

    def _planned(self) -> BatchPlan:
        """Return the plan of the current variant, scheduled if it is not yet."""
        if self._request is None:
            raise NotPlannedError(
                f"{type(self).__name__}.plan() must come before run(), and again after reset_workspace_buffer()"
            )
        self._follow_copies()
        device_plan.close(self, None)
        plan = self._current.plan or self._plan_of(self._current)
        self._plan = None if self._copies else plan
        return plan

    def _run(self, arguments: RunArguments) -> Result:
        plan = self._plan
        if plan is None:
            if device_plan.is_open(self._request):
                return device_plan.first_run(self, arguments, self._run)
            plan = self._planned()
        if (replayed := run_cache.try_replay(plan, arguments)) is not None:
            out, lse = replayed
            return out if lse is None or not arguments.return_lse else (out, lse)
        variant = self._current
        if (heads := batch_run.fewer_heads(plan, arguments)) is not None:
            variant = self._variant({**variant.overrides, **heads})
            plan = variant.plan or self._plan_of(variant)
            if (replayed := run_cache.try_replay(plan, arguments)) is not None:
                out, lse = replayed
                return out if lse is None or not arguments.return_lse else (out, lse)
        try:
            problem = batch_run.problem(plan, arguments)
        except UnsupportedByPlan as error:
            plan = self._plan_of_other_backend(variant, error)
            problem = batch_run.problem(plan, arguments)
        if plan.validate:
            page_ids.before_launch(problem, plan.tokens.lengths)
        variant.used = True
        plan.launch(problem)
        if not plan.validate:
            run_cache.cache_run(plan, arguments, problem)
        if arguments.return_lse:
            assert problem.lse is not None
            return problem.out, problem.lse
        return problem.out

    def _run_with_lse(self, arguments: RunArguments, lse_base: Any, lse_layout: Any) -> Result:
        """Run, and convert lse to another base or to `[num_qo_heads, rows]` (layout "HN") by a torch operation."""
        if device_plan.is_open(self._request):
            return device_plan.first_run(self, arguments, self._run_with_lse, lse_base, lse_layout)
        plan = self._plan or self._planned()
        form = batch_run.lse_form(plan, arguments, lse_base, lse_layout)
        if form is None:
            return self._run(arguments)
        buffer = arguments.lse
        out, lse = self._run(arguments._replace(lse=None if form.transposed else buffer, return_lse=True))
        lse = form.convert(lse, buffer)
        return (out, lse) if arguments.return_lse else out

    def _plan_of_other_backend(self, variant: Variant, error: UnsupportedByPlan) -> BatchPlan:
        """Schedule again on a backend that supports what a run adds; later runs stay there.

        Raises `error` if the user named the backend, and in CUDA-graph mode, where captured launches cannot move.
        """
        if self._backend != "auto" or self._use_cuda_graph:
            raise error
        return self._plan_of(variant, error.features)

    def _plan_of(self, variant: Variant, features: Features | None = None) -> BatchPlan:
        """Schedule a variant for the plan in force. An error if a CUDA graph is being captured, whose replays would
        repeat the upload; the planner kernel may be captured.
        """
        assert self._request is not None
        request = device_plan.captured(self, self._request)
        if is_capturing(self.device) and isinstance(request.tokens, Tokens):
            settled = ", ".join(f"{name}={checks.shown(value)}" for name, value in variant.overrides.items())
            raise RuntimeArgumentError(
                f"a run must precede its capture in a CUDA graph, which cannot hold the upload of a schedule: run once "
                f"after plan() before the capture, with the same heads and options ({settled or 'as planned'})"
            )
        with self._lock:
            if variant.plan is not None and features is None:  # another thread was first
                return variant.plan
            graph = None if self._graph_invariants is None else self._graph_invariants.graph
            variant.plan = self._scheduled(variant, request, graph, features)
            if variant is self._current and not self._copies:
                self._plan = variant.plan
            return variant.plan

    def _variant(self, overrides: dict[str, Any]) -> Variant:
        """Return the variant of the plan in force with these options replaced."""
        assert self._request is not None
        request = self._request
        settings = self._settings(request._replace(options=request.options._replace(**overrides)))
        with self._lock:
            variant = self._variants.by_settings.get(settings)
            if variant is None:
                variant = Variant(overrides, Staging(self.device))
                self._variants.add(settings, variant, keep=self._use_cuda_graph)
        return variant

    def _replan(self, forward: ForwardOptions, **changed: Any) -> None:
        """Replace options of the plan for this run and those after it: those of `forward`, all of them."""
        if self._request is None or (self._copies and not device_plan.is_open(self._request)):
            self._planned()
        values = (*forward, *changed.values())
        key = values, tuple(map(type, values))  # types too: 1 == True
        try:
            variant = self._variants.by_options.get(key)
        except TypeError:  # an option has no hash: `_variant` says what is wrong with it
            variant = None
        if variant is None:
            variant = self._variant({**forward._asdict(), **changed})
            self._variants.by_options[key] = variant
        plan = variant.plan or (None if device_plan.is_open(self._request) else self._plan_of(variant))
        self._current, self._plan = variant, None if self._copies else plan

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
            request = device_plan.on_host(request)
            _, invariants = self._checked(request)
            graph = None if invariants is None else invariants.graph
            settings, backend, limits, _ = self._resolve(request, graph, self._variants.base.backend)
            sizes.append(backends.workspace(backend, settings, request.tokens.lengths, limits))

        made_by: Any = type(self)  # engines replace the attribute `plan` of `self`
        probe = object.__new__(made_by)
        probe.__dict__.update(self.__dict__, _make_plan=measure)
        made_by.plan(probe, *args, **kwargs)
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
        replaced = None if self._graph_invariants is None else self._variants
        self._set_workspace(float_workspace_buffer)
        if replaced is not None:
            self._replaced.append(replaced)

    def end_forward(self) -> None:
        """Do nothing. Callers of FlashInfer's older `begin_forward` and `forward` end with it."""


def _check_unused(buffers: dict[str, Any]) -> None:
    for name, value in buffers.items():
        if value is not None:
            checks.tensor(name, value)


def _load(settings: Settings, tokens: Tokens | DeviceTokens, limits: BatchLimits) -> Load:
    """Return what selection knows of a batch. Lengths of keys count where the host knows them, unless a captured launch
    serves others too.
    """
    qo_len = batch_schedule.typical_qo_len(device_plan.choice_lengths(tokens), limits)
    known = limits.graph is None and isinstance(tokens, Tokens)
    batch = select.batch_class(settings, tokens.lengths) if known else None
    return select.load_class(settings.features, qo_len, tokens.batch_size == 1, batch)


def _check_supported(backend: capabilities.Backend, features: Features) -> None:
    refusals = select.reasons_against(backend, features, select.arch_for(features.device, None))
    if refusals:
        raise UnsupportedByPlan(refusals, features)
