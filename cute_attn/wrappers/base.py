"""Base of the batch wrappers: the workspace, and the plan in force, which runs use.

The subclasses declare the public methods; what they share is here. `plan` leaves a complete plan or none: after an
error the previous one is still in force. Runs complete it (`plan.py`): the first one may tell the number of rows, and
`forward` or fewer heads than planned take a plan with other options. One thread at a time may use a wrapper, except
that `run` of one plan may be called from several.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, cast

import torch

from cute_attn.dispatch import select
from cute_attn.errors import ArgumentError, ArgumentTypeError, NotPlannedError
from cute_attn.ops import declare
from cute_attn.problem import BatchPlan
from cute_attn.request import batch_plan, batch_run, caches, checks, positional
from cute_attn.request.batch_plan import PlanRequest
from cute_attn.request.batch_run import LseForm, RunArguments
from cute_attn.request.settings import KV_LAYOUTS
from cute_attn.wrappers import calls, engine_attributes
from cute_attn.wrappers.engine_attributes import EngineHooks, IndexCopy
from cute_attn.wrappers.graph import GraphBuffers
from cute_attn.wrappers.plan import Plan, UnsupportedByPlan, make_plan, measure
from cute_attn.wrappers.plan_request import Place
from cute_attn.wrappers.signatures import EndsForward

P = ParamSpec("P")

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]
DType = torch.dtype | str
Scale = float | torch.Tensor

# Arguments of `forward` that are not those of `run`: options of `plan`, and hints.
FORWARD_OPTIONS = frozenset(
    ("causal", "pos_encoding_mode", "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")
)
FP16_HINTS = "use_fp16_qk_reduction", "allow_fp16_qk_reduction"
OLDER_FORM = """

The options of `plan` below replace the planned ones, given or by default, for this run and those after it{example}.
Where they differ, the batch is scheduled again.

Parameters
----------
{parameters}

Returns
-------
What `run` returns: out, or the pair (out, lse).

Raises
------
NotPlannedError (no plan yet), and the errors of `plan` and `run`.
"""


def makes_plan(request_of: Callable[P, PlanRequest]) -> Callable[P, None]:
    """Decorate a method that checks the arguments of `plan` and returns what they ask for: the result makes the plan,
    and `workspace_size` measures it.
    """
    checked: Callable[..., PlanRequest] = request_of

    @functools.wraps(request_of)
    def plan(self: BatchWrapper, *args: Any, **kwargs: Any) -> None:
        self._make_plan(checked(self, *args, **kwargs))

    plan.__dict__["request_of"] = request_of
    plan.__dict__["__signature__"] = inspect.signature(request_of).replace(return_annotation=None)
    return cast("Callable[P, None]", plan)


def older_form(forward: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate FlashInfer's older form of `run`: its docstring goes on with what all of them do."""
    texts = dict.fromkeys(FORWARD_OPTIONS, "options of `plan`, with the same defaults.")
    texts |= dict.fromkeys(FP16_HINTS, "a hint; scores are always accumulated in fp32.")
    named: dict[str, list[str]] = {}
    _, *names = inspect.signature(forward).parameters
    for name in names:
        named.setdefault(texts.get(name, "as for `run`."), []).append(name)
    parameters = "\n".join(f"{', '.join(alike)} : {text}" for text, alike in named.items())
    example = ": after\n`plan(causal=True)`, `forward` without `causal` is not causal" if "causal" in names else ""
    forward.__doc__ = f"{forward.__doc__}{OLDER_FORM.format(parameters=parameters, example=example)}"
    return forward


def kept_options(wrapper: Any, made_by: type[BatchWrapper]) -> dict[str, Any]:
    """Check the wrapper of a `fast_..._plan`, and return the options of its plan, which may stay; none without one."""
    if not isinstance(wrapper, made_by):
        raise ArgumentTypeError(f"wrapper must be a {made_by.__name__}, got {checks.describe(wrapper)}")
    return {} if wrapper._plan is None else wrapper._plan.base.request.options._asdict()


@engine_attributes.readable
class BatchWrapper(EngineHooks, EndsForward):
    """What all batch wrappers share. Subclasses declare the constructor, `plan`, `run` and `forward`."""

    kv_source = ""  # set by subclasses: ragged | paged
    older_order = ""  # what followed the keys and values of `run` in FlashInfer's older releases

    def __init__(self, float_workspace_buffer: Any, kv_layout: Any, use_cuda_graph: Any, backend: Any) -> None:
        workspace = batch_plan.workspace(float_workspace_buffer)
        self._float_workspace_buffer = float_workspace_buffer  # serving engines read it
        self._kv_layout = checks.choice("kv_layout", kv_layout, KV_LAYOUTS)
        self._use_cuda_graph = checks.boolean("use_cuda_graph", use_cuda_graph)
        self._backend = select.checked_name(backend)
        self._place = Place(workspace, self._kv_layout, self.kv_source, self._backend)
        self._handle = declare.handle_of(self)
        self._o_dtype: torch.dtype | None = None  # of the latest plan, for traced runs
        self._copies: dict[str, IndexCopy] = {}  # of planned lengths, which a caller may write before a run
        self._replaced: list[Plan] = []  # whose schedules graphs captured under earlier workspaces read
        self._lock = threading.RLock()  # of planning, which a first run may need; a replay takes none
        self._keep(None)

    def _set_graph_buffers(self, **given: Any) -> None:
        """Keep the buffers of CUDA-graph mode (`GraphBuffers`); without CUDA graphs they are only checked to be
        tensors.
        """
        if self._use_cuda_graph:
            self._place = self._place._replace(graph=GraphBuffers(self._place.workspace, given))
            return
        for name, value in given.items():
            if value is not None:
                checks.tensor(name, value)

    @property
    def device(self) -> torch.device:
        """The workspace's device."""
        return self._place.device

    # ---- plan

    def _make_plan(self, request: PlanRequest) -> None:
        """Make the plan of a checked request, and put it in force."""
        with self._lock:
            self._keep(make_plan(self._place, request, self._plan))
            self._copies = {}

    def _keep(self, plan: Plan | None) -> None:
        """Put a plan in force. Nothing else does."""
        self._plan = plan
        if plan is not None:
            self._o_dtype = plan.settings.features.o_dtype

    def _in_force(self) -> Plan:
        """Return the plan in force, with the lengths that a caller may have written into copies of them."""
        plan = self._plan
        if plan is None:
            raise NotPlannedError(
                f"{type(self).__name__}.plan() must come before run(), and again after reset_workspace_buffer()"
            )
        if not self._copies:
            return plan
        with self._lock:
            lengths = engine_attributes.written_lengths(plan.request, self._copies, self.device)
            if lengths is not None:
                base = make_plan(self._place, plan.base.request.with_lengths(lengths), plan)
                plan = base.with_options(**plan.overrides)
                self._keep(plan)
                self._copies = {name: IndexCopy.of(tensor) for name, (tensor, _) in self._copies.items()}
        return plan

    def _planned(self) -> BatchPlan:
        """Return the batch of the plan in force, scheduled. Reads the lengths of an open plan."""
        with self._lock:
            plan = self._in_force()
            if plan.is_open:
                lengths = plan.request.lengths.host
                plan = plan.with_rows(lengths.rows, lengths.kv_end)
                self._keep(plan)
        return self._scheduled(plan)

    def _scheduled(self, plan: Plan) -> BatchPlan:
        """Return the batch of a plan that is not open, scheduled if it is not yet."""
        if plan.batch is None:
            with self._lock:
                if plan.batch is None:  # no other thread was first
                    plan.schedule_for_run()
        assert plan.batch is not None
        return plan.batch

    def _replan(self, **options: Any) -> None:
        """Replace options of the plan for this run and those after it: those of `forward`, all of them."""
        with self._lock:
            plan = self._in_force().with_options(**options)
            if not plan.is_open:
                self._scheduled(plan)
            self._keep(plan)

    # ---- run

    def _forward(self, given: dict[str, Any]) -> Result:
        """Run with other options than the planned ones. `given`: the arguments of `forward` by name, and `self`."""
        checks.fp16_hint(**{name: given.pop(name) for name in FP16_HINTS if name in given})
        self._replan(**{name: given.pop(name) for name in FORWARD_OPTIONS if name in given})
        del given["self"]
        made: Any = self
        return cast(Result, made.run(**given))

    _run = calls.run

    def _checked_run(
        self, plan: Plan, arguments: RunArguments, call: calls.RunCall, lse_form: LseForm | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Check the arguments of a run, and run."""
        batch, given_arguments = self._scheduled(plan), arguments
        arguments, before = self._launched(arguments)
        if (heads := batch_run.fewer_heads(batch, arguments)) is not None:
            with self._lock:
                plan = plan.with_options(**{**plan.overrides, **heads})
            batch = self._scheduled(plan)
            call = calls.call_of_run(batch, given_arguments, lse_form)
            if (replayed := calls.replay_run(batch, call)) is not None:
                return replayed
        convert, buffer = None, arguments.lse
        if lse_form is not None:
            factor, by_heads = batch_run.lse_form(batch, arguments, *lse_form)
            if by_heads or factor != 1:
                convert = functools.partial(calls.lse_in_form, factor, by_heads)
                arguments = arguments._replace(lse=None if by_heads else buffer, return_lse=True)
        try:
            problem = batch_run.problem(batch, arguments)
        except UnsupportedByPlan as error:
            batch = self._moved(plan, error)
            problem = batch_run.problem(batch, arguments)
        if batch.validate:
            caches.check_pages(problem, batch.lengths.host)
        plan.used = True
        fire = batch.launch(problem)
        key, given = call
        if not (batch.validate or given is None or batch.lengths.first_row):  # rows before it are filled, by no launch
            result = problem.out, problem.lse
            calls.enter(batch.cached_runs, key, fire, given, problem, result, before=before, convert=convert)
        lse = problem.lse
        if convert is not None:
            assert lse is not None
            lse = convert(lse, buffer)
        return problem.out, lse

    def _launched(self, arguments: RunArguments) -> tuple[RunArguments, calls.Before | None]:
        """Return the arguments of a run as the plan has them, and what makes the tensors of runs like it."""
        if arguments.head_scales is not None:
            positional.check_head_scales(arguments.head_scales, self.older_order)
        return arguments, None

    def _moved(self, plan: Plan, error: UnsupportedByPlan) -> BatchPlan:
        """Schedule a plan again on a backend that supports what a run adds; later runs stay there.

        Raises `error` if the user named the backend, and in CUDA-graph mode, where captured launches cannot move.
        """
        if self._backend != "auto" or self._use_cuda_graph:
            raise error
        with self._lock:
            plan.schedule_for_run(error.features)
        return self._scheduled(plan)

    def _first_run(self, arguments: RunArguments, lse_form: LseForm | None) -> Result:
        """Run an open plan, completed with the rows of q, and of ragged k. A run that fails completes nothing."""
        with self._lock:
            plan = self._in_force()
            if not plan.is_open:  # another thread was first
                return self._run(arguments, lse_form)
            q, keys = checks.tensor("q", arguments.q), 0
            if self.kv_source == "ragged":
                k = checks.tensor("k", arguments.kv_cache[0])
                keys = k.shape[1 if self._kv_layout == "HND" else 0] if k.dim() == 3 else 0
            self._keep(plan.with_rows(q.shape[0] if q.dim() else 0, keys))
            try:
                return self._run(arguments, lse_form)
            except Exception:
                self._keep(plan)
                raise

    # ---- members of every wrapper

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph=True`."""
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """Name of the backend that the plan chose; the constructor's `backend` before a plan."""
        return self._backend if self._plan is None else self._planned().backend

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Compute the memory that a plan would use. Makes no plan; the one in force stays.

        Parameters
        ----------
        args, kwargs : the arguments of `plan`.

        Returns
        -------
        (float_bytes, int_bytes) : the most bytes of the float workspace that the schedule may use if there is no limit,
        and bytes of the schedule's records, which are in memory that the wrapper allocates; (0, 0) on the reference
        backend. A smaller float workspace only means fewer splits, except with `fixed_split_size`, where `plan` then
        raises WorkspaceError.

        Raises
        ------
        The errors of `plan`, but not WorkspaceError.
        """
        made_by: Any = type(self)  # engines replace the attribute `plan` of `self`
        return measure(self._place, made_by.plan.request_of(self, *args, **kwargs), self._plan)

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
        workspace, graph = batch_plan.workspace(float_workspace_buffer), self._place.graph
        if graph is not None and workspace.device != self.device:
            raise ArgumentError(
                f"float_workspace_buffer must be on the index buffers' device {self.device}, got {workspace.device}"
            )
        if int_workspace_buffer is not None:
            buffer = checks.tensor("int_workspace_buffer", int_workspace_buffer)
            checks.device("int_workspace_buffer", buffer, workspace.device, "the workspace's device")
        if graph is not None:
            checks.apart((("float_workspace_buffer", workspace),), graph.buffers.items())
        if self._plan is not None and self._plan.fixed is not None:
            self._replaced.append(self._plan)
        self._float_workspace_buffer, self._copies = float_workspace_buffer, {}
        self._place = self._place._replace(workspace=workspace)
        self._keep(None)
