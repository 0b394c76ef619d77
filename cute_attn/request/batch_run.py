"""Tensors of one run of a planned batch to a `BatchProblem`.

The layers of a model run the same plan with tensors that differ in their addresses only. So what shapes, strides and
dtypes decide is checked once a plan and remembered (`Plan.forms`), and so are the settings that scales make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import BatchLimits, BatchProblem, Features, Settings
from cute_attn.request import checks
from cute_attn.request import settings as request_settings
from cute_attn.request import single as single_request
from cute_attn.request.batch_plan import Tokens
from cute_attn.request.caches import is_large

REMEMBERED = 256  # scales of a model's layers


# The arguments of a run as the user gave them: those of `Run`, but with k and v in one: a pair, or a tensor of both.
Given = tuple[Any, ...]


class Run(NamedTuple):
    """The arguments of a run, k and v told apart."""

    q: Any
    k: Any
    v: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    out: Any
    lse: Any
    return_lse: Any
    enable_pdl: Any
    window_left: Any
    sinks: Any
    kv_cache_sf: Any
    head_scales: tuple[Any, Any, Any] | None


class Form(NamedTuple):
    """What dtypes, shapes and strides of q, k and v decide."""

    readable: bool  # rows are 16-byte aligned where q, k and v start so
    spans: tuple[int, int, int]  # bytes from the first element to past the last


@dataclass
class Plan:
    """What a plan settles for its runs."""

    settings: Settings
    tokens: Tokens
    limits: BatchLimits
    launch: Callable[[BatchProblem], None]
    allowed: Callable[[Features], None]  # raises if the planned backend does not take features that a run adds
    kv_indices: torch.Tensor | None
    packed_mask: torch.Tensor | None
    workspace: torch.Tensor
    validate: bool
    page_axes: tuple[str, ...] = ()  # of k and v, for messages
    forms: dict[Any, Form] = field(default_factory=dict)  # of q, k and v
    accepted: dict[Any, Any] = field(default_factory=dict)  # runs that were right, by what they had in common (`rerun`)
    scale_forms: set[Any] = field(default_factory=set)  # of NVFP4 block scales
    rows: int = 0
    first_row: int = 0

    def __post_init__(self) -> None:
        features = self.settings.features
        self.rows, self.first_row = self.tokens.rows, int(self.tokens.lengths.qo_indptr[0])
        self.packing = 2 if features.kv_block_scales else 1

    @functools.cached_property
    def taken(self) -> list[single_request.Taken]:
        """Memory of the plan that a run must not write."""
        kept = ("kv_indices", self.kv_indices), ("packed_mask", self.packed_mask), ("the workspace", self.workspace)
        return [(name, checks.extent(tensor)) for name, tensor in kept if tensor is not None]

    @functools.cached_property
    def run_settings(self) -> Callable[..., Settings]:
        """`_run_settings`, remembered."""
        return functools.lru_cache(REMEMBERED, typed=True)(self._run_settings)

    def _run_settings(
        self, q_scale: Any, k_scale: Any, v_scale: Any, enable_pdl: Any, device_scale: bool, sinks: bool, per_head: bool
    ) -> Settings:
        """The planned settings with what a run adds: None adds nothing."""
        s = self.settings
        q_factor, k_factor, v_factor = (
            1.0 if value is None else checks.real(name, value)
            for name, value in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale))
        )
        sm_scale = checks.real("sm_scale * q_scale * k_scale", s.sm_scale * q_factor * k_factor)
        if enable_pdl is not None:
            checks.boolean("enable_pdl", enable_pdl)
        features = s.features._replace(
            positive_scale=sm_scale >= request_settings.LEAST_SCALE and not device_scale,
            sinks=sinks,
            per_head_scales=per_head,
        )
        if features != s.features:
            self.allowed(features)
        return s._replace(features=features, sm_scale=sm_scale, v_scale=s.v_scale * v_factor, enable_pdl=enable_pdl)


def problem(plan: Plan, run: Run) -> BatchProblem:
    """Check every tensor and allocate the outputs that the caller did not bring."""
    q, k, v, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks, sf, head_scales = run
    if not isinstance(q, torch.Tensor):
        checks.tensor("q", q)
    form = (
        *(q.shape, q.stride(), q.dtype, q.device),
        *(k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device),
    )
    known = plan.forms.get(form)
    if known is None:
        known = plan.forms[form] = _check_form(plan, q, k, v)
    if not known.readable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % single_request.ALIGNMENT:
        q = _readable(q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        single_request.refuse_grad(q=q, k=k, v=v)
    if return_lse is not True and return_lse is not False:
        checks.boolean("return_lse", return_lse)

    settings = plan.settings
    score_scales: single_request.Scales = ()
    v_scales: single_request.Scales = ()
    if not (q_scale is k_scale is v_scale is enable_pdl is window_left is sinks is head_scales is None):
        _check_window(window_left, settings)
        q_scale, of_q = single_request.scale("q_scale", q_scale, q.device)
        k_scale, of_k = single_request.scale("k_scale", k_scale, q.device)
        v_scale, v_scales = single_request.scale("v_scale", v_scale, q.device)
        score_scales = of_q + of_k
        settings = _run_settings(
            plan, q_scale, k_scale, v_scale, enable_pdl, bool(score_scales), sinks is not None, head_scales is not None
        )
    features = settings.features
    if sinks is not None:
        sinks = single_request.per_head("sinks", sinks, features)
    if features.kv_block_scales or sf is not None:
        sf = _block_scales(plan, sf, k, v)

    rows, heads = plan.rows, features.num_qo_heads
    if out is not None or lse is not None:
        _check_outputs(plan, run, known, features)
    if out is None:
        out = q.new_empty(rows, heads, features.head_dim_vo, dtype=features.o_dtype)
        if plan.first_row:
            out[: plan.first_row] = 0
    if lse is None and return_lse:
        lse = q.new_empty(rows, heads, dtype=torch.float32)
        if plan.first_row:
            lse[: plan.first_row] = -torch.inf
    return BatchProblem(
        settings,
        q,
        k,
        v,
        out,
        lse,
        plan.kv_indices,
        plan.packed_mask,
        score_scales,
        v_scales[0] if v_scales else None,
        sinks,
        None if head_scales is None else single_request.head_scales(head_scales, features),
        sf,
        plan.workspace,
    )


def _run_settings(plan: Plan, *key: Any) -> Settings:
    """Remembered unless a scale is an object that may change its value, or has no hash."""
    if all(isinstance(value, request_settings.IMMUTABLE) for value in key):
        return plan.run_settings(*key)
    return plan._run_settings(*key)


# ---- q, k, v


def pages(plan: Plan, cache: Any, name: str = "paged_kv_cache") -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of a paged cache: a pair of 4-D tensors, or a 5-D one. Pages of one token may lack their axis."""
    token = 2 if plan.settings.kv_layout == "HND" else 1
    short = plan.settings.page_size == 1
    if isinstance(cache, torch.Tensor):
        if cache.dim() == 4 and short:
            cache = cache.unsqueeze(token + 1)
        if cache.dim() != 5 or cache.shape[1] != 2:
            axes = ", ".join(plan.page_axes)
            raise ArgumentError(
                f"{name} must have shape [pages, 2, {axes}], or be a pair (k, v); got {checks.describe(cache)}"
            )
        k, v = cache.unbind(1)
        return k, v
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise ArgumentTypeError(f"{name} must be a tensor or a pair (k, v), got {checks.describe(cache)}")
    k, v = cache
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        for half, value in (("k", k), ("v", v)):
            checks.tensor(f"{half} of {name}", value)
    if short and k.dim() == v.dim() == 3:
        return k.unsqueeze(token), v.unsqueeze(token)
    return k, v


def _check_form(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Form:
    """Everything about q, k and v but their addresses."""
    f = plan.settings.features
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.device != plan.workspace.device:
            raise ArgumentError(
                f"{name} must be on the workspace's device {plan.workspace.device}, got {checks.describe(x)}"
            )
        planned = f.q_dtype if name == "q" else f.kv_dtype
        if x.dtype != planned:
            raise ArgumentError(
                f"{name} must have the planned dtype {checks.short(planned)} "
                f"({'q' if name == 'q' else 'kv'}_data_type), got {checks.short(x.dtype)}"
            )
    if plan.rows != (q.shape[0] if q.dim() else -1):
        raise ArgumentError(f"q must have the planned {plan.rows} rows (qo_indptr[-1]), got {checks.describe(q)}")
    checks.shape("q", q, (plan.rows, f.num_qo_heads, f.head_dim_qk), "[rows, num_qo_heads, head_dim_qk]")
    for name, x, head_dim in (("k", k, f.head_dim_qk), ("v", v, f.head_dim_vo)):
        _check_cache_shape(plan, name, x, head_dim // plan.packing)
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ArgumentError(
                f"{name} must have stride 1 on its last axis, got strides {x.stride()}; "
                f"a copy of a cache is never made silently: pass {name}.contiguous()"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ArgumentError(
            f"k and v must agree in all axes but the last, got {checks.describe(k)} and {checks.describe(v)}"
        )
    steps = (stride * x.element_size() for x in (q, k, v) for stride in single_request.steps(x))
    expanded, large = single_request.expanded(q, k, v), f.kv_source == "paged" and (is_large(k) or is_large(v))
    if expanded or large:
        plan.allowed(f._replace(expanded=expanded, large_cache=large))
    readable = not any(step % single_request.ALIGNMENT for step in steps) and (q.stride(-1) == 1 or q.shape[-1] == 1)
    of_q, of_k, of_v = (stop - start for start, stop in map(checks.extent, (q, k, v)))
    return Form(readable, (of_q, of_k, of_v))


def _check_cache_shape(plan: Plan, name: str, x: torch.Tensor, width: int) -> None:
    settings, f = plan.settings, plan.settings.features
    token = 1 if settings.kv_layout == "HND" else 0
    if f.kv_source == "ragged":
        least = plan.tokens.kv_end
        if x.dim() != 3 or x.shape[1 - token] != f.num_kv_heads or x.shape[2] != width or x.shape[token] < least:
            axes = (f"{least} or more", str(f.num_kv_heads))
            expected = ", ".join((*(axes[::-1] if token else axes), str(width)))
            raise ArgumentError(
                f"{name} must have shape [{', '.join(plan.page_axes)}] = [{expected}] "
                f"(kv_layout {settings.kv_layout!r}), got {checks.describe(x)}"
            )
        return
    tail = (f.num_kv_heads, settings.page_size) if token else (settings.page_size, f.num_kv_heads)
    if x.dim() != 4 or x.shape[1:] != (*tail, width):
        raise ArgumentError(
            f"{name} of paged_kv_cache must have shape [pages, {', '.join(plan.page_axes)}] = "
            f"[any, {', '.join(map(str, (*tail, width)))}] (kv_layout {settings.kv_layout!r}), got {checks.describe(x)}"
        )


def _readable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q as kernels can read it, copied if need be; a cache is refused: it is not copied silently."""
    for name, x in (("k", k), ("v", v)):
        single_request.check_alignment(name, x)
    return single_request.readable(q)


# ---- the rest


def divided_by(name: str, divisor: Any, scale: Any) -> Any:
    """`scale` (None: 1) over the number `divisor`."""
    divisor = checks.positive(name, divisor)
    if scale is None:
        return 1.0 / divisor
    return scale / divisor if isinstance(scale, torch.Tensor) else checks.real("v_scale", scale) / divisor


def _check_window(window_left: Any, settings: Settings) -> None:
    """A run may repeat the planned window, no more: it decides the schedule."""
    if window_left is None:
        return
    asked = max(-1, checks.integer("window_left", window_left))
    if asked != settings.window_left:
        raise ArgumentError(
            f"window_left of run() must be None or the planned {settings.window_left}, got {window_left}: "
            "pass it to plan()"
        )


def _block_scales(plan: Plan, given: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of an NVFP4 cache, in the forms of the cache itself."""
    f = plan.settings.features
    if not f.kv_block_scales or given is None:
        raise ArgumentError(
            "kv_cache_sf (k_sf, v_sf) must come with kv_data_type uint8 (NVFP4), and only with it; "
            f"got kv_cache_sf {'None' if given is None else 'given'} and kv_data_type {checks.short(f.kv_dtype)}"
        )
    if f.kv_source == "paged":
        given = pages(plan, given, "kv_cache_sf")
    if not isinstance(given, tuple | list) or not all(isinstance(x, torch.Tensor) for x in given):
        return single_request.block_scales(given, k, v)  # says what is wrong
    form = k.shape, *((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % single_request.ALIGNMENT) for x in given)
    if form not in plan.scale_forms:
        single_request.block_scales(given, k, v)
        if any(number % x.shape[-1] for x in given for number in (x.data_ptr(), *single_request.steps(x))):
            plan.allowed(f._replace(loose_scales=True))
        plan.scale_forms.add(form)
    return given[0].view(torch.float8_e4m3fn), given[1].view(torch.float8_e4m3fn)


def _check_outputs(plan: Plan, run: Run, form: Form, features: Features) -> None:
    starts = run.q.data_ptr(), run.k.data_ptr(), run.v.data_ptr()
    inputs = zip(("q", "k", "v"), starts, form.spans, strict=True)
    taken = [*plan.taken, *((name, (start, start + span)) for name, start, span in inputs)]
    if run.sinks is not None:
        taken.append(("sinks", checks.extent(run.sinks)))
    single_request.check_outputs(run.out, run.lse, features, (plan.rows, features.num_qo_heads), "rows", taken)
