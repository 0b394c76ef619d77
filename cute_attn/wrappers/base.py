"""What all batch wrappers are: a workspace, a plan, and in CUDA-graph mode buffers that keep their addresses.

A wrapper's public methods name their arguments; what they have in common is here. `plan` leaves a `Plan`, complete or
not at all: after an error the plan before is still in force, and nothing of an older plan reaches a newer one.
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
from cute_attn.problem import BatchLimits, Features, GraphLimits, Settings
from cute_attn.request import batch_plan, batch_run, checks, page_ids
from cute_attn.request.batch_plan import Mask, Options, Splits, Surroundings, Tokens
from cute_attn.request.batch_run import Given, Plan, Run
from cute_attn.request.settings import KV_LAYOUTS
from cute_attn.runtime import switches
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule
from cute_attn.wrappers import run_cache

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Asked(NamedTuple):
    """What a plan is made of."""

    options: Options
    tokens: Tokens
    mask: Mask
    splits: Splits
    page_size: int


class First(NamedTuple):
    """What a captured graph has frozen."""

    settings: Settings
    splits: Splits
    backend: str
    graph: GraphLimits
    first_row: int  # rows before are filled by torch, in `run`


class NotForPlan(NotSupported):
    """The planned backend does not take features that a run adds."""

    def __init__(self, refusals: Sequence[Refusal], features: Features) -> None:
        super().__init__(refusals)
        self.features = features


class BatchWrapper:
    kv_source = ""  # of the subclass: ragged | paged

    def __init__(self, float_workspace_buffer: Any, kv_layout: Any, use_cuda_graph: Any, backend: Any) -> None:
        self._set_workspace(float_workspace_buffer)
        self._kv_layout = checks.choice("kv_layout", kv_layout, KV_LAYOUTS)
        self._use_cuda_graph = checks.boolean("use_cuda_graph", use_cuda_graph)
        self._backend = select.known(backend)
        self._fixed_batch_size = 0
        self._index_buffers: dict[str, torch.Tensor] = {}
        self._mask_buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._replaced: list[Staging] = []  # what graphs captured under other workspaces read

    def _set_workspace(self, float_workspace_buffer: Any) -> None:
        self._workspace = batch_plan.workspace(float_workspace_buffer)
        self._float_workspace_buffer = float_workspace_buffer  # serving engines look at it, as at the index buffers
        self.device: torch.device = self._workspace.device
        self._staging = Staging(self.device)
        self._plan: Plan | None = None
        self._first: First | None = None

    # ---- CUDA graphs: buffers

    def _take_buffers(self, named: dict[str, tuple[Any, int | None]]) -> None:
        """Index buffers, each with the elements that it must have beside one a request; None: any number. The first
        one tells the batch size. Without CUDA graphs nothing is done with them."""
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

    def _take_mask_buffers(self, custom_mask_buf: Any, mask_indptr_buf: Any) -> None:
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

    def _make_plan(self, asked: Asked, features: Features | None = None) -> None:
        """Schedule a batch. `features`: what the backend shall take, where runs have more than the plan says."""
        settings, backend, limits, first = self._settled(asked, features)
        tokens, mask = asked.tokens, asked.mask
        if mask.packed is not None:
            tokens = tokens._replace(lengths=tokens.lengths._replace(mask_offset=mask.offsets[:-1]))
        launch = backends.plan(backend, settings, tokens.lengths, limits, self._staging)
        if first is not None:
            tokens, mask = self._fill_buffers(tokens, mask)
            self._first = first
        elif tokens.kv_indices is not None:
            tokens = tokens._replace(kv_indices=self._placed(tokens.kv_indices))
        self._plan = Plan(
            settings,
            tokens,
            limits,
            launch,
            functools.partial(_allow, backend),
            tokens.kv_indices,
            mask.packed,
            self._workspace,
            switches.is_on(switches.VALIDATE) and self.kv_source == "paged",
            self._page_axes,
        )
        self._made_from = Asked(asked.options, tokens, mask, asked.splits, asked.page_size)  # as they lie now

    def _placed(self, indices: torch.Tensor) -> torch.Tensor:
        """As kernels read them; looking costs less than `to` with nothing to do."""
        if indices.dtype == torch.int32 and indices.device == self.device and indices.is_contiguous():
            return indices
        return indices.to(self.device, torch.int32).contiguous()

    def _settled(
        self, asked: Asked, features: Features | None = None
    ) -> tuple[Settings, capabilities.Backend, BatchLimits, First | None]:
        """What a plan settles beside the schedule; all errors but the backend's."""
        options, tokens, mask, splits, page_size = asked
        has_mask, decode = mask.packed is not None, tokens.q_len is not None
        own_splits = splits.fixed_split_size is not None or splits.disable_split_kv
        surroundings = Surroundings(
            self.device, self._kv_layout, self.kv_source, has_mask, page_size, decode, own_splits
        )
        settings = batch_plan.settings(options, surroundings)
        batch_plan.check_rows(tokens, settings.features.num_qo_heads)
        limits = BatchLimits(self._workspace.numel(), *splits, max_qo_len=tokens.q_len)
        name = self._backend if self._first is None else self._first.backend
        rows = select.rows_class(settings.features, batch_schedule.rows_of_a_request(tokens.lengths, limits))
        backend = select.chosen(features or settings.features, name, rows)
        if not self._use_cuda_graph:
            return settings, backend, limits, None
        first = self._frozen(settings, splits, backend.name, tokens, mask)
        return settings, backend, limits._replace(graph=first.graph), first

    @functools.cached_property
    def _page_axes(self) -> tuple[str, ...]:
        tokens = "page_size" if self.kv_source == "paged" else "kv_indptr[-1]"
        axes = (tokens, "num_kv_heads") if self._kv_layout == "NHD" else ("num_kv_heads", tokens)
        return (*axes, "head_dim")

    def _frozen(self, settings: Settings, splits: Splits, backend: str, tokens: Tokens, mask: Mask) -> First:
        """The limits of all plans, after checking that this one is within them and alike."""
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
        first, first_row = self._first, int(tokens.lengths.qo_indptr[0])
        if first is None:
            most_keys = tokens.kv_end
            if tokens.kv_indices is not None:
                most_keys = self._indices_buffer().numel() * settings.page_size
            graph = GraphLimits(tokens.batch_size, tokens.rows, most_keys, tokens.q_len)
            return First(settings, splits, backend, graph, first_row)
        _check_unchanged(first, First(settings, splits, backend, first.graph, first_row))
        if tokens.rows > first.graph.max_rows:
            raise ArgumentError(
                f"qo_indptr[-1] must not exceed {first.graph.max_rows}, that of the first plan, with "
                f"use_cuda_graph=True: captured launches have no room for more; got {tokens.rows}"
            )
        if tokens.kv_indices is None and tokens.kv_end > first.graph.max_kv_tokens:
            raise ArgumentError(
                f"kv_indptr[-1] must not exceed {first.graph.max_kv_tokens}, that of the first plan, with "
                f"use_cuda_graph=True: captured launches have no room for more; got {tokens.kv_end}"
            )
        if first.graph.max_qo_len != tokens.q_len:
            raise ArgumentError(
                f"q_len_per_req must stay {first.graph.max_qo_len} with use_cuda_graph=True, got {tokens.q_len}"
            )
        return first

    def _check_mask_buffers(self, mask: Mask) -> None:
        if mask.packed is None:
            return
        if self._mask_buffers is None:
            raise ArgumentError("a custom mask with use_cuda_graph=True needs custom_mask_buf and mask_indptr_buf")
        room = self._mask_buffers[0].numel()
        if mask.offsets[-1] > min(room, batch_plan.MAX_PLACES):
            raise ArgumentError(f"the packed mask must fit the {room} bytes of custom_mask_buf, got {mask.offsets[-1]}")

    def _indices_buffer(self) -> torch.Tensor:
        return next(buffer for name, buffer in self._index_buffers.items() if "indices" in name)

    def _fill_buffers(self, tokens: Tokens, mask: Mask) -> tuple[Tokens, Mask]:
        """Copy a plan's numbers to the addresses that captured launches read."""
        for name, buffer in self._index_buffers.items():
            numbers = _index_values(name, tokens)
            if numbers is not None:
                buffer.copy_(torch.from_numpy(numbers.astype(np.int32)), non_blocking=True)
        if tokens.kv_indices is not None:
            buffer = self._indices_buffer()
            if buffer.data_ptr() != tokens.kv_indices.data_ptr():
                used = tokens.kv_indices[: tokens.kv_end]  # pinned: the caller may write it again after plan()
                buffer[: tokens.kv_end].copy_(used, non_blocking=not used.is_pinned())
            tokens = tokens._replace(kv_indices=buffer)
        if mask.packed is not None and self._mask_buffers is not None:
            bits, bounds = self._mask_buffers
            bits[: mask.packed.numel()].copy_(mask.packed)
            bounds.copy_(torch.from_numpy(mask.offsets.astype(np.int32)))
            mask = mask._replace(packed=bits)
        return tokens, mask

    # ---- run

    def _planned(self) -> Plan:
        if self._plan is None:
            raise NotPlannedError(
                f"{type(self).__name__}.plan() must come before run(), and again after reset_workspace_buffer()"
            )
        return self._plan

    def _run(self, given: Given) -> Result:
        plan = self._plan or self._planned()
        if (found := run_cache.again(plan, given)) is not None:
            out, lse = found
            return out if lse is None or not given[7] else (out, lse)
        run = Run(given[0], *self._keys_and_values(plan, given[1]), *given[2:])
        try:
            problem = batch_run.problem(plan, run)
        except NotForPlan as error:
            plan = self._plan_elsewhere(error)
            problem = batch_run.problem(plan, run)
        if plan.validate:
            page_ids.before_launch(problem, plan.tokens.lengths)
        plan.launch(problem)
        if not plan.validate:
            run_cache.remember(plan, given, problem)
        if run.return_lse:
            assert problem.lse is not None
            return problem.out, problem.lse
        return problem.out

    def _plan_elsewhere(self, error: NotForPlan) -> Plan:
        """The plan on a backend that takes what a run adds; later runs stay there. A graph's launches cannot move, and
        who names a backend wants no other."""
        if self._backend != "auto" or self._use_cuda_graph:
            raise error
        self._make_plan(self._made_from, error.features)
        return self._planned()

    def _keys_and_values(self, plan: Plan, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of what a run was given."""
        return batch_run.pages(plan, cache)

    def _plan_again(self, **changed: Any) -> Plan:
        """The plan with other options, for this run and those after it (`forward`)."""
        plan, asked = self._planned(), self._made_from
        options = asked.options._replace(**changed)
        if list(map(type, options)) == list(map(type, asked.options)) and options == asked.options:  # 1 is not True
            return plan
        self._make_plan(asked._replace(options=options))
        return self._planned()

    # ---- members of every wrapper

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes that `plan` with these arguments would use of a float workspace of any size, and bytes of its schedule.

        A smaller float workspace only means fewer splits, except with `fixed_split_size`, where `plan` then raises
        WorkspaceError. The schedule lies in memory of the wrapper's own.
        """
        sizes: list[tuple[int, int]] = []

        def measure(asked: Asked) -> None:
            settings, backend, limits, _ = self._settled(asked)
            sizes.append(backends.workspace(backend, settings, asked.tokens.lengths, limits))

        probe: Any = copy.copy(self)
        probe._make_plan = measure
        probe.plan(*args, **kwargs)
        return sizes[0]

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replace the workspace; `plan` must follow. Graphs that were captured before use the old one, which the caller
        must then keep, and the schedule of the plan before, which the wrapper keeps; later plans do not reach them, but
        overwrite the index buffers that they read: capture again.

        `int_workspace_buffer` is what FlashInfer keeps its schedules in. Here a wrapper owns that memory, and makes
        more of it when a plan needs more: the argument must be a tensor of the workspace's device, and is not used.
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
        if self._first is not None:
            self._replaced.append(self._staging)
        self._set_workspace(float_workspace_buffer)

    def end_forward(self) -> None:
        """Nothing; older callers end with it."""


def _check_unused(buffers: dict[str, Any]) -> None:
    for name, value in buffers.items():
        if value is not None:
            checks.tensor(name, value)


def _allow(backend: capabilities.Backend, features: Features) -> None:
    refusals = select.reasons_against(backend, features, select.arch_for(features.device, None))
    if refusals:
        raise NotForPlan(refusals, features)


def _check_unchanged(first: First, now: First) -> None:
    """Launches are captured with their numbers, so that later plans may change lengths only."""
    before, after = _flat(first), _flat(now)
    for name, value in after.items():
        if before[name] != value:
            raise RuntimeArgumentError(
                f"{name} must stay {before[name]!r} with use_cuda_graph=True: a captured graph would not see the "
                f"change to {value!r}; take another wrapper, or call reset_workspace_buffer() and capture again"
            )


def _flat(first: First) -> dict[str, Any]:
    settings = first.settings._asdict()
    features: Features = settings.pop("features")
    named = features._asdict()
    del named["own_splits"]  # the splits themselves tell more
    return {**named, **settings, **first.splits._asdict(), "backend": first.backend, "qo_indptr[0]": first.first_row}


def _index_values(name: str, tokens: Tokens) -> np.ndarray | None:
    """What an index buffer gets, but for the pages themselves."""
    if "last_page_len" in name:
        return tokens.last_page_len
    if "indices" in name:
        return None
    return tokens.lengths.qo_indptr if name.startswith("qo") else tokens.kv_indptr
