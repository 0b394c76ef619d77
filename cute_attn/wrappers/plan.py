"""A plan: a batch with one combination of options, and its schedule.

`make_plan` makes one of a request and of the plan before. It raises before anything changes: schedules are written when
all of them are made. `forward`, and runs with fewer heads than planned, use a plan with other options
(`with_options`), which has a schedule at an address of its own. With CUDA graphs a captured launch may read that of any
plan that ran, so the next `make_plan` schedules all of these again.

A plan without a schedule gets it from its first run. One is *open*: lengths of a prefill batch on the GPU, of which the
host knows nothing but the number of requests. The first run tells the number of rows (`with_rows`). The planner kernel
then makes the schedule, from copies of the index arrays; with CUDA graphs every later plan launches it at once, so that
a captured plan schedules again whatever the index arrays hold in a replay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cute_attn.dispatch import backends, select
from cute_attn.dispatch.capabilities import Backend
from cute_attn.errors import NotSupported, Refusal, RuntimeArgumentError
from cute_attn.problem import (
    BatchLengths,
    BatchLimits,
    BatchPlan,
    DeviceLengths,
    Features,
    LaunchSizes,
    Lengths,
    Settings,
)
from cute_attn.request import batch_plan, caches, checks
from cute_attn.request.batch_plan import PlanRequest
from cute_attn.runtime import switches
from cute_attn.runtime.staging import Staging, is_capturing
from cute_attn.wrappers.graph import Copies, GraphInvariants
from cute_attn.wrappers.plan_request import Place

MAX_VARIANTS = 64  # plans of a batch: options that change with every `forward` must not fill memory


class UnsupportedByPlan(NotSupported):
    """The planned backend does not support features that a run adds."""

    def __init__(self, refusals: Sequence[Refusal], features: Features) -> None:
        super().__init__(refusals)
        self.features = features


@dataclass(eq=False, slots=True)
class Plan:
    """A batch with one combination of options. Its settings do not change, and its request in lengths only."""

    place: Place
    request: PlanRequest  # with the options of this plan
    settings: Settings
    fixed: GraphInvariants | None  # by the first plan, with CUDA graphs
    variants: list[Plan]  # all of the batch, each with other settings; first the one with the options of `plan`
    by_options: dict[Any, Plan]  # by the arguments of `with_options`, which cost less
    staging: Staging
    overrides: dict[str, Any] = field(default_factory=dict)  # options of `plan` that runs replaced
    backend: str | None = None  # with CUDA graphs the name of the first schedule's: captured launches cannot move
    used: bool = False  # a run launched it since the last `plan`; with CUDA graphs: ever, so a graph may hold it
    batch: BatchPlan | None = None  # None: not scheduled

    @property
    def base(self) -> Plan:
        """The plan with the options of `plan`."""
        return self.variants[0]

    @property
    def is_open(self) -> bool:
        """Whether a run must tell the number of rows."""
        return self.request.lengths.rows is None

    # ---- other plans of this one

    def with_options(self, **overrides: Any) -> Plan:
        """Return the plan of this batch in which these options, and no others, are replaced."""
        key = (*overrides, *overrides.values(), *map(type, overrides.values()))  # types too: 1 == True
        try:
            return self.by_options[key]
        except (KeyError, TypeError):  # an option without a hash: `_settings` says what is wrong with it
            pass
        base = self.base
        request = base.request.with_options(overrides)
        settings = _settings(self.place, request)
        plan = next((other for other in self.variants if other.settings == settings), None)
        if plan is None:
            self._make_room()
            others = self.fixed, self.variants, self.by_options
            plan = Plan(self.place, request, settings, *others, Staging(self.place.device), overrides)
            self.variants.append(plan)
        self.by_options[key] = plan
        return plan

    def _make_room(self) -> None:
        """Forget the oldest plan if there are too many; with CUDA graphs none that ran."""
        if len(self.variants) < MAX_VARIANTS:
            return
        keep = self.place.graph is not None
        spare = [old for old in self.variants[1:] if not (keep and old.used)]
        if not spare:
            raise RuntimeArgumentError(
                f"runs of a wrapper with use_cuda_graph=True may differ in at most {MAX_VARIANTS} combinations of "
                "heads and options of forward(), which captured graphs may hold; use another wrapper"
            )
        self.variants.remove(spare[0])
        self.by_options.clear()

    def with_rows(self, rows: int, keys: int) -> Plan:
        """Return an open plan completed. `keys`: rows of ragged k and v."""
        lengths, graph = self.request.lengths, self.place.graph
        assert isinstance(lengths, DeviceLengths)
        request = self.base.request._replace(lengths=_with_bounds(lengths, rows, keys))
        fixed = None if graph is None else graph.checked(request, self.base.settings, self.fixed)
        completed = _renewed(self.variants, request, fixed)
        if graph is not None:  # a schedule fixes the size of its memory, also that of a run that fails
            for plan in completed:
                plan.staging = Staging(self.place.device)
        return completed[self.variants.index(self)]

    def with_lengths(self, request: PlanRequest) -> Plan | None:
        """Return this plan as that of a request which differs in lengths only. None, and nothing changes, if its
        launches cannot take them.
        """
        batch, lengths = self.batch, request.lengths
        if batch is None or len(self.variants) > 1 or lengths.rows is None:
            return None
        if batch.validate != _validates(self.place):
            return None
        of_decode = batch.limits.max_qo_len is not None  # whose load depends on no length
        if batch.load is None or not (
            of_decode or batch.load == select.load_of_batch(batch.settings, lengths, batch.limits)
        ):
            return None
        batch_plan.check_rows(lengths, batch.settings.features.num_qo_heads)
        same_launches = batch.launch.again(lengths)
        if same_launches is None:
            return None
        try:
            self.staging.send()
        except Exception:
            self.staging.discard()
            self.batch = None  # whose launches have the numbers of the other lengths
            raise
        batch.follow(lengths, same_launches)
        self.request, self.used = request, self.used and self.place.graph is not None
        return self

    # ---- its schedule

    def schedule_for_run(self, features: Features | None = None) -> None:
        """Schedule the plan. `features`: what the backend must support, if a run adds to what the plan says. An error
        if a CUDA graph is being captured, whose replays would repeat the upload; the planner kernel may be captured.
        """
        lengths, place = self.request.lengths, self.place
        if is_capturing(place.device):
            if isinstance(lengths, BatchLengths):
                settled = ", ".join(f"{name}={checks.shown(value)}" for name, value in self.overrides.items())
                raise RuntimeArgumentError(
                    f"a run must precede its capture in a CUDA graph, which cannot hold the upload of a schedule: run "
                    f"once after plan() before the capture, with the same heads and options ({settled or 'as planned'})"
                )
            if place.graph is not None:
                lengths = place.graph.captured(lengths)
            self.staging.write(self.staging.forget_layout)
        _schedule([self], lengths, features)

    def scheduled(self, lengths: Lengths, features: Features | None = None) -> BatchPlan:
        """Return the batch with a schedule, which `staging.send` writes."""
        batch = self._on_backend(lengths, features)
        if isinstance(lengths, DeviceLengths):
            lengths.check_unchanged()
        batch.launch = backends.plan(batch.backend, self.settings, lengths, batch.limits, self.staging)
        if batch.launch is not None:
            return batch
        assert isinstance(lengths, DeviceLengths)  # the backend needs the lengths on the host
        if is_capturing(self.place.device):
            raise RuntimeArgumentError(
                f"a plan of the {batch.backend} backend with these options reads the index arrays, which the capture "
                "of a CUDA graph cannot: call plan() before the capture"
            )
        return self.scheduled(lengths.host, features)

    def _on_backend(self, lengths: Lengths, features: Features | None = None) -> BatchPlan:
        """Return the batch on the backend that is to run it, without launches."""
        settings, request, place = self.settings, self.request, self.place
        batch_plan.check_rows(lengths, settings.features.num_qo_heads)
        room = _room(request, lengths) if self.fixed is None else self.fixed.limits
        limits = BatchLimits(
            place.workspace.numel(), *request.splits, room, request.max_qo_len, keeps_address=place.graph is not None
        )
        load = select.load_of_batch(settings, lengths, limits)
        backend = select.chosen(features or settings.features, self.backend or place.backend, load)
        return BatchPlan(
            settings,
            lengths,
            limits,
            launch=None,
            check_supported=functools.partial(_check_supported, backend),
            packed_mask=request.mask.packed,
            workspace=place.workspace,
            staging=self.staging,
            buffers={} if place.graph is None else place.graph.buffers,
            validate=_validates(place),
            backend=backend.name,
            load=load if features is None else None,
        )


# ---- plans of requests


def make_plan(place: Place, request: PlanRequest, before: Plan | None) -> Plan:
    """Return the plan of a request. Unless it is open, it is scheduled: with the settings of the plan before for all
    options that ran under that one, else for its own.
    """
    request = _bounded(request, before)
    alike = before is not None and not request.differs(before.base.request)
    settings, fixed = _checked(place, request, before, alike)
    request, copies = _placed(place, request)
    plan = before.with_lengths(request) if before is not None and alike else None
    if plan is None:
        if request.lengths.rows is None:
            request = _left_open(place, request, settings)
        plan = _following(place, request, settings, fixed, before)
        due = [each for each in plan.variants if each.used] or [plan]
        for each in due:
            each.used = each.used and place.graph is not None
        if not plan.is_open:
            _schedule(due, request.lengths)
    for copy in copies:
        copy()
    return plan


def measure(place: Place, request: PlanRequest, before: Plan | None) -> tuple[int, int]:
    """Return the bytes that the schedule of a request would use of an unlimited workspace, and those of its records."""
    lengths = request.lengths.host
    request = request._replace(lengths=lengths)
    settings, fixed = _checked(place, request, before)
    batch = _following(place, request, settings, fixed, before)._on_backend(lengths)
    return backends.workspace(batch.backend, settings, lengths, batch.limits)


def _checked(
    place: Place, request: PlanRequest, before: Plan | None, alike: bool = False
) -> tuple[Settings, GraphInvariants | None]:
    """Return the settings of a request, and with CUDA graphs what the first plan fixes. Raises every error except those
    of the backend. `alike`: the settings are those of the plan before.
    """
    settings = before.base.settings if before is not None and alike else _settings(place, request)
    if place.graph is None:
        return settings, None
    return settings, place.graph.checked(request, settings, None if before is None else before.fixed)


def _settings(place: Place, request: PlanRequest) -> Settings:
    """Return the settings that the options of a request decide. Raises what is wrong with them."""
    splits = request.splits
    return batch_plan.plan_settings(
        request.options,
        place.kv_layout,
        request.page_size,
        device=place.device,
        kv_source=place.kv_source,
        custom_mask=request.mask.packed is not None,
        decode=request.newest,
        own_splits=splits.fixed_split_size is not None or splits.disable_split_kv,
        multi_item=request.lengths.key_bounds is not None,
        key_ranges=place.key_ranges,
    )


def _placed(place: Place, request: PlanRequest) -> tuple[PlanRequest, Copies]:
    """Return the request with page numbers and mask where launches read them, and the copies that put them there."""
    lengths, mask = request.lengths, request.mask
    if mask.packed is not None:
        lengths = lengths.host.replace(mask_offset=mask.offsets[:-1])
        request = request._replace(lengths=lengths)
    if place.graph is not None:
        return place.graph.place(request)
    indices = lengths.kv_indices
    if indices is None:
        return request, ()
    if indices.dtype == torch.int32 and indices.device == place.workspace.device and indices.is_contiguous():
        return request, ()  # cheaper than a `to` without effect
    lengths = lengths.replace(kv_indices=caches.as_int32(indices, place.workspace.device))
    return request._replace(lengths=lengths), ()


def _following(
    place: Place, request: PlanRequest, settings: Settings, fixed: GraphInvariants | None, before: Plan | None
) -> Plan:
    """Return the plan of a request, not scheduled, with those of other options that ran under the plan before, if the
    settings are the same.
    """
    base = None if before is None else before.base
    if before is not None and base is not None and base.settings == settings:
        return _renewed([old for old in before.variants if old.used or old is base], request, fixed)[0]
    plan = Plan(place, request, settings, fixed, [], {}, Staging(place.device) if base is None else base.staging)
    plan.variants.append(plan)
    return plan


def _renewed(plans: Iterable[Plan], request: PlanRequest, fixed: GraphInvariants | None) -> list[Plan]:
    """Return the plans of another request with the options of these, not scheduled."""
    variants: list[Plan] = []
    by_options: dict[Any, Plan] = {}
    for old in plans:
        own = request.with_options(old.overrides)
        kept = old.staging, old.overrides, old.backend, old.used
        variants.append(Plan(old.place, own, old.settings, fixed, variants, by_options, *kept))
    return variants


def _schedule(plans: Sequence[Plan], lengths: Lengths, features: Features | None = None) -> None:
    """Schedule plans of one batch, and write the schedules once all are made."""
    try:
        batches = [plan.scheduled(lengths, features) for plan in plans]
        for plan in plans:
            plan.staging.send()
    except Exception:
        for plan in plans:
            plan.staging.discard()
        raise
    for plan, batch in zip(plans, batches, strict=True):
        plan.batch = batch
        if plan.place.graph is not None:
            plan.backend = batch.backend


# ---- bounds of lengths on the device


def _bounded(request: PlanRequest, before: Plan | None) -> PlanRequest:
    """Return the request with the bounds of captured launches, if the plan before has fixed them."""
    fixed, lengths = None if before is None else before.fixed, request.lengths
    if fixed is None or not isinstance(lengths, DeviceLengths) or lengths.rows is not None:
        return request
    return request._replace(lengths=_with_bounds(lengths, fixed.limits.max_rows, fixed.limits.max_kv_tokens))


def _with_bounds(lengths: DeviceLengths, rows: int, keys: int) -> DeviceLengths:
    """Return lengths with bounds. `keys`: rows of ragged k and v."""
    return lengths.replace(rows=rows, kv_end=keys if lengths.kv_indices is None else lengths.kv_end)


def _room(request: PlanRequest, lengths: Lengths) -> LaunchSizes | None:
    """Return the sizes that launches have room for, where nothing fixes them; None: those that the lengths need."""
    if isinstance(lengths, BatchLengths):
        return None
    assert lengths.rows is not None
    return LaunchSizes(lengths.batch_size, lengths.rows, lengths.kv_end * request.page_size, request.max_qo_len)


def _left_open(place: Place, request: PlanRequest, settings: Settings) -> PlanRequest:
    """Return the request with copies of its index arrays, which the caller may overwrite before the first run. Raises
    what no run could do.
    """
    lengths = request.lengths
    assert isinstance(lengths, DeviceLengths)
    if is_capturing(place.device):
        raise RuntimeArgumentError(
            "plan() must come before the capture of a CUDA graph, and a run, which tells the number of rows"
        )
    select.chosen(settings.features, place.backend, select.load_class(settings, 1, lengths.batch_size))
    copies = {name: x.clone() for name, x in lengths.arrays().items()}
    return request._replace(lengths=lengths.replace(**copies))


# ---- selection


def _check_supported(backend: Backend, features: Features) -> None:
    refusals = select.reasons_against(backend, features, select.arch_for(features.device, None))
    if refusals:
        raise UnsupportedByPlan(refusals, features)


def _validates(place: Place) -> bool:
    """Tell whether runs check page numbers before every launch."""
    return place.kv_source == "paged" and switches.validates()
