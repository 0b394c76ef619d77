"""Check the tensors of one run of a planned batch and make a `BatchProblem` of them.

The layers of a model run the same plan with tensors that differ in their addresses only: such runs are repeated without
coming here (`wrappers.calls`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchPlan, BatchProblem, DeviceLengths, Features, Settings
from cute_attn.request import checks, key_ranges, operands
from cute_attn.request.caches import cache_halves, is_large
from cute_attn.request.key_ranges import KeyRanges
from cute_attn.request.operands import BLOCK_SCALES, HEAD_SCALES, LAYOUTS, NO_SCALES, SCALES
from cute_attn.request.settings import LSE_BASES, MIN_SCALE, once

LSE_LAYOUTS = ("NH", "HN")
NO_WINDOWS = (-1, -1)
LseForm = tuple[Any, Any]  # `lse_base` and `lse_layout` of a run


class RunArguments(NamedTuple):
    """The arguments of a `run` as the user gave them; the defaults change nothing."""

    q: Any
    kv_cache: Any  # paged: one tensor, or a pair; ragged: the pair (k, v)
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    out: Any = None
    lse: Any = None
    return_lse: Any = False
    enable_pdl: Any = None
    window_left: Any = None
    sinks: Any = None
    kv_cache_sf: Any = None
    head_scales: tuple[Any, ...] | None = None  # scale_q, scale_k, scale_v
    ranges: KeyRanges | None = None


run_arguments: Callable[[tuple[Any, ...]], RunArguments] = functools.partial(tuple.__new__, RunArguments)
# ^ of all values, in order: 0.1 us faster than `RunArguments._make`, 0.2 us than the constructor


def problem(plan: BatchPlan, run: RunArguments) -> BatchProblem:
    """Check every tensor and allocate the outputs that the caller did not pass."""
    ragged = plan.settings.features.kv_source == "ragged"
    k, v = _ragged_pair(run.kv_cache) if ragged else pages(plan, run.kv_cache)
    q = checks.tensor("q", run.q)
    _check_operands(plan, q, k, v)
    placed = operands.placement(q, k, v)
    q = operands.readable(q, k, v, placed)
    checks.boolean("return_lse", run.return_lse)
    sf, loose = run.kv_cache_sf, False
    if plan.settings.features.kv_block_scales or sf is not None:
        sf = _block_scales(plan, sf, k, v)
        loose = operands.has_loose_scales(*sf)
    large = not ragged and (is_large(k) or is_large(v))

    settings, scales = plan.settings, NO_SCALES
    planned = run.q_scale is run.k_scale is run.v_scale is run.enable_pdl is run.window_left is run.sinks is None
    usual = not (placed.expanded or placed.half_aligned or large or loose)
    if not (planned and usual and run.head_scales is run.ranges is None):
        if run.window_left is not None:
            planned_window = settings.window_left
            agrees = max(-1, checks.whole("window_left", run.window_left)) == planned_window
            checks.as_planned(agrees, "window_left", run.window_left, planned_window, "None or ")
        scales = operands.split_scales(q.device, run.q_scale, run.k_scale, run.v_scale)
        if plan.run_settings is None:
            plan.run_settings = once(functools.partial(_add_run_options, plan))
        needed = settings.features._replace(
            positive_scale=not scales.of_scores,
            per_head_scales=run.head_scales is not None,
            sinks=run.sinks is not None,
            expanded=placed.expanded,
            large_cache=large,
            loose_scales=loose,
            half_aligned_kv=placed.half_aligned,
        )
        windows = NO_WINDOWS if run.ranges is None else run.ranges.windows()
        settings = plan.run_settings(needed, *windows, scales.q, scales.k, scales.v, run.enable_pdl)
    features = settings.features
    sinks = None if run.sinks is None else operands.per_head("sinks", run.sinks, features.num_qo_heads, q.device)

    rows = plan.rows, features.num_qo_heads
    element = features.head_dim_vo, features.o_dtype
    out, lse = operands.outputs(q, (run.out, run.lse, run.return_lse), element, rows, "rows, num_qo_heads")
    if run.out is not None or run.lse is not None:
        keep_apart(plan, run, (k, v))
    if first := plan.lengths.first_row:
        if run.out is None:
            out[:first] = 0
        if lse is not None and run.lse is None:
            lse[:first] = -torch.inf
    mask = plan.packed_mask if run.ranges is None else run.ranges.tensor(plan.rows, q.device)
    head_scales = None if run.head_scales is None else operands.check_head_scales(run.head_scales, features)
    extras = operands.extras(scales, mask, sinks, head_scales, sf)
    return BatchProblem(settings, q, k, v, out, lse, plan.lengths.kv_indices, extras, plan.workspace)


def fewer_heads(plan: BatchPlan, arguments: RunArguments) -> dict[str, int] | None:
    """Return the options of a plan for a run whose q, or k and v, have fewer heads than planned; else None."""
    f = plan.settings.features
    q, cache = arguments.q, arguments.kv_cache
    if not isinstance(q, torch.Tensor) or q.dim() != 3:
        return None
    k, _ = _ragged_pair(cache) if f.kv_source == "ragged" else pages(plan, cache)
    if k.dim() != (3 if f.kv_source == "ragged" else 4):
        return None
    num_qo_heads, num_kv_heads = q.shape[1], k.shape[LAYOUTS[plan.settings.kv_layout].heads]
    if (num_qo_heads, num_kv_heads) == (f.num_qo_heads, f.num_kv_heads):
        return None
    if not (0 < num_qo_heads <= f.num_qo_heads and 0 < num_kv_heads <= f.num_kv_heads) or num_qo_heads % num_kv_heads:
        return None  # `problem` says what is wrong
    return {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads}


def lse_form(plan: BatchPlan, arguments: RunArguments, lse_base: Any, lse_layout: Any) -> tuple[float, bool]:
    """Check `lse_base`, `lse_layout` and a buffer of layout "HN". Return the factor of the planned base by which the
    run returns lse, and whether it returns `[num_qo_heads, rows]`.
    """
    transposed = checks.choice("lse_layout", lse_layout, LSE_LAYOUTS) == "HN"
    base = plan.settings.lse_scale
    wanted = base if lse_base is None else LSE_BASES[checks.choice("lse_base", lse_base, tuple(LSE_BASES))]
    lse, returned = arguments.lse, checks.boolean("return_lse", arguments.return_lse)
    if lse is None and not returned:
        return 1.0, False
    if transposed and lse is not None:
        q = checks.tensor("q", arguments.q)
        heads = q.shape[1] if q.dim() == 3 else plan.settings.features.num_qo_heads
        axes = "[num_qo_heads, rows] (lse_layout 'HN')"
        checks.operand("lse", lse, (torch.float32,), (heads, plan.rows), axes, q.device)
        checks.contiguous("lse", lse)
        keep_apart(plan, arguments, arguments.kv_cache)
    return wanted / base, transposed


# ---- settings


def _add_run_options(
    plan: BatchPlan,
    needed: Features,
    causal_window_left: int,
    range_window_left: int,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    enable_pdl: Any,
) -> Settings:
    """Return the planned settings with what a run adds; None adds nothing. `needed`: the features of the run, its scale
    positive unless a factor is a tensor on the device.
    """
    s = plan.settings
    q_factor, k_factor, v_factor = (
        checks.real(name, value, 1.0) for name, value in zip(SCALES, (q_scale, k_scale, v_scale), strict=True)
    )
    sm_scale = checks.real("sm_scale * q_scale * k_scale", s.sm_scale * q_factor * k_factor)
    if enable_pdl is not None:
        checks.boolean("enable_pdl", enable_pdl)
    needed = needed._replace(positive_scale=needed.positive_scale and sm_scale >= MIN_SCALE)
    if needed != s.features:
        plan.check_supported(needed)
    return s._replace(
        features=needed._replace(expanded=False, large_cache=False, loose_scales=False),  # which change no launch
        sm_scale=sm_scale,
        v_scale=s.v_scale * v_factor,
        enable_pdl=enable_pdl,
        range_windows=(causal_window_left, range_window_left),
    )


# ---- q, k, v


def _ragged_pair(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = cache
    return checks.tensor("k", k), checks.tensor("v", v)


def pages(plan: BatchPlan, cache: Any, name: str = "paged_kv_cache") -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v of a paged cache: a pair of 4-D tensors, or a 5-D one. Pages of one token may lack their axis."""
    k, v = cache_halves(name, cache)
    if plan.settings.page_size == 1 and k.dim() == v.dim() == 3:
        axis = LAYOUTS[plan.settings.kv_layout].tokens
        return k.unsqueeze(axis), v.unsqueeze(axis)
    return k, v


def _check_operands(plan: BatchPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that q, k and v are what was planned, except their strides and addresses."""
    f, device = plan.settings.features, plan.workspace.device
    if not q.device == k.device == v.device == device or q.dtype != f.q_dtype or not k.dtype == v.dtype == f.kv_dtype:
        for name, x, dtype in (("q", q, f.q_dtype), ("k", k, f.kv_dtype), ("v", v, f.kv_dtype)):
            checks.device(name, x, device, "the workspace's device")
            if x.dtype != dtype:
                option = "q_data_type" if name == "q" else "kv_data_type"
                planned = f"the planned dtype {checks.short(dtype)} ({option})"
                raise ArgumentError(f"{name} must have {planned}, got {checks.short(x.dtype)}")
    if q.shape != (plan.rows, f.num_qo_heads, f.head_dim_qk):
        meaning = "qo_indptr[-1]"
        if plan.lengths.q_len is not None:
            meaning = f"batch size {plan.lengths.batch_size} * q_len_per_req {plan.lengths.q_len} of plan()"
        if plan.rows != (q.shape[0] if q.dim() else -1):
            raise checks.wrong(f"q must have the planned {plan.rows} rows ({meaning})", q)
        checks.shape("q", q, (plan.rows, f.num_qo_heads, f.head_dim_qk), "[rows, num_qo_heads, head_dim_qk]")
    packing = 2 if f.kv_block_scales else 1  # numbers of NVFP4 per byte
    k_shape = _check_kv_shape(plan, "k", k, f.head_dim_qk // packing)
    v_shape = _check_kv_shape(plan, "v", v, f.head_dim_vo // packing)
    if k_shape[0] != v_shape[0] or k_shape[1] != v_shape[1]:
        raise ArgumentError(
            f"k and v must agree in all axes but the last, got {checks.describe(k)} and {checks.describe(v)}"
        )


def _check_kv_shape(plan: BatchPlan, name: str, x: torch.Tensor, width: int) -> torch.Size:
    layout, f, shape = plan.settings.kv_layout, plan.settings.features, x.shape
    axes, heads, paged = LAYOUTS[layout], f.num_kv_heads, f.kv_source == "paged"
    tokens = plan.settings.page_size if paged else plan.lengths.kv_end
    fits = len(shape) == 3 + paged and shape[axes.heads] == heads and shape[-1] == width
    if fits and (shape[axes.tokens] == tokens or (not paged and shape[axes.tokens] > tokens)):
        return shape
    meant = axes.axes("page_size" if paged else "kv_indptr[-1]", "num_kv_heads", "head_dim")
    expected = axes.axes(str(tokens) if paged else f"{tokens} or more", str(heads), str(width))
    names, sizes = ", ".join(("pages",) * paged + meant), ", ".join(("any",) * paged + expected)
    named = f"{name} of paged_kv_cache" if paged else name
    raise checks.wrong(f"{named} must have shape [{names}] = [{sizes}] (kv_layout {layout!r})", x)


# ---- scales and outputs


def _block_scales(plan: BatchPlan, scales: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the block scales of an NVFP4 cache, which have the same forms as the cache."""
    f = plan.settings.features
    if not f.kv_block_scales or scales is None:
        raise ArgumentError(
            "kv_cache_sf (k_sf, v_sf) must come with kv_data_type uint8 (NVFP4), and only with it; "
            f"got kv_cache_sf {'None' if scales is None else 'given'} and kv_data_type {checks.short(f.kv_dtype)}"
        )
    if f.kv_source == "paged":
        scales = pages(plan, scales, "kv_cache_sf")
    return operands.check_block_scales(scales, k, v)


def keep_apart(plan: BatchPlan, arguments: RunArguments, kv: Any) -> None:
    """Refuse `out` and `lse` that share memory with what the plan keeps, `kv`, and what else may be a tensor."""
    read = [(name, getattr(arguments, name)) for name in ("q", *SCALES, "sinks")]
    read += checks.named(("k", "v"), kv) or [("the cache", kv)]
    read += checks.named(BLOCK_SCALES, arguments.kv_cache_sf) or [("kv_cache_sf", arguments.kv_cache_sf)]
    read += checks.named(HEAD_SCALES, arguments.head_scales)
    if arguments.ranges is not None:
        read.append((key_ranges.NAME, arguments.ranges.ranges))
    checks.apart((("out", arguments.out), ("lse", arguments.lse)), [*_kept(plan), *read])


def protected_memory(plan: BatchPlan) -> list[tuple[int, int]]:
    """Return the memory of the plan, which a run must not write: addresses of the first byte and past the last."""
    if plan.protected is None:
        plan.protected = [checks.extent(x) for _, x in _kept(plan) if isinstance(x, torch.Tensor) and x.numel()]
    return plan.protected


def _kept(plan: BatchPlan) -> list[tuple[str, Any]]:
    """Return what the plan keeps, by name."""
    on_device = plan.lengths.arrays().items() if isinstance(plan.lengths, DeviceLengths) else ()
    return [
        ("kv_indices", plan.lengths.kv_indices),
        ("packed_mask", plan.packed_mask),
        ("the workspace", plan.workspace),
        *(("the schedule", x) for x in (plan.staging.memory if plan.staging else ())),
        *on_device,
        *plan.buffers.items(),
    ]
