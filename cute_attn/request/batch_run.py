"""Check the tensors of one run of a planned batch and make a `BatchProblem` of them.

The layers of a model run the same plan with tensors that differ in their addresses only. So what shapes, strides and
dtypes decide is checked once per plan and cached in the `BatchPlan`, and so are the settings that scales change.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import BatchPlan, BatchProblem, DeviceTokens, MemoryRange, Settings
from cute_attn.request import checks
from cute_attn.request.caches import is_large
from cute_attn.request.once import IMMUTABLE
from cute_attn.request.settings import LSE_BASES, MIN_SCALE
from cute_attn.request.single import (
    ALIGNMENT,
    BLOCK_SCALES,
    HEAD_SCALES,
    SCALES,
    Scales,
    check_block_scales,
    check_head_scales,
    check_outputs,
    check_per_head,
    check_unit_stride,
    has_loose_scales,
    has_readable_rows,
    is_expanded,
    is_half_aligned,
    kv_alignment,
    readable_query,
    split_scale,
)

CACHE_SIZE = 256  # settings of a plan's runs: more than the scales of a model's layers
LSE_LAYOUTS = ("NH", "HN")


class RunArguments(NamedTuple):
    """The arguments of a `run` as the user gave them."""

    q: Any
    kv_cache: Any  # paged: one tensor, or a pair; ragged: the pair (k, v)
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
    head_scales: tuple[Any, Any, Any] | None  # scale_q, scale_k, scale_v


def problem(plan: BatchPlan, arguments: RunArguments) -> BatchProblem:
    """Check every tensor and allocate the outputs that the caller did not pass."""
    q, cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks, sf, head_scales = (
        arguments
    )
    k, v = _ragged_pair(cache) if plan.settings.features.kv_source == "ragged" else pages(plan, cache)
    checks.tensor("q", q)
    key = (
        *(q.shape, q.stride(), q.dtype, q.device),
        *(k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device),
    )
    readable = plan.layouts.get(key)
    if readable is None:
        readable = plan.layouts[key] = _check_layout(plan, q, k, v)
    half_aligned = False
    if not readable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        q = readable_query(q, ("k", k), ("v", v), alignment=kv_alignment(k))
        half_aligned = is_half_aligned(k, v)
    if q.requires_grad or k.requires_grad or v.requires_grad or forward_ad._current_level >= 0:
        checks.refuse_grad(q=q, k=k, v=v)
    if return_lse is not True and return_lse is not False:
        checks.boolean("return_lse", return_lse)

    settings = plan.settings
    score_scales: Scales = ()
    v_scales: Scales = ()
    added = not (q_scale is k_scale is v_scale is enable_pdl is window_left is sinks is head_scales is None)
    if added or half_aligned:
        _check_window(window_left, settings)
        q_scale, of_q = split_scale("q_scale", q_scale, q.device)
        k_scale, of_k = split_scale("k_scale", k_scale, q.device)
        v_scale, v_scales = split_scale("v_scale", v_scale, q.device)
        score_scales = of_q + of_k
        settings = _run_settings(
            *(plan, q_scale, k_scale, v_scale, enable_pdl, bool(score_scales)),
            *(sinks is not None, head_scales is not None, half_aligned),
        )
    features = settings.features
    if sinks is not None:
        sinks = check_per_head("sinks", sinks, features)
    if features.kv_block_scales or sf is not None:
        sf = _block_scales(plan, sf, k, v)

    rows, heads = plan.rows, features.num_qo_heads
    if out is not None or lse is not None:
        check_outputs(out, lse, features, (rows, heads), "rows")
        _keep_apart(plan, arguments, (k, v))
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
        None if head_scales is None else check_head_scales(head_scales, features),
        sf,
        plan.workspace,
    )


def fewer_heads(plan: BatchPlan, arguments: RunArguments) -> dict[str, int] | None:
    """Return the options of a plan for a run whose q, or k and v, have fewer heads than planned; else None."""
    f = plan.settings.features
    q, cache = arguments.q, arguments.kv_cache
    if not isinstance(q, torch.Tensor) or q.dim() != 3:
        return None
    k, _ = _ragged_pair(cache) if f.kv_source == "ragged" else pages(plan, cache)
    if k.dim() != (3 if f.kv_source == "ragged" else 4):
        return None
    num_qo_heads, num_kv_heads = q.shape[1], k.shape[-3 if plan.settings.kv_layout == "HND" else -2]
    if (num_qo_heads, num_kv_heads) == (f.num_qo_heads, f.num_kv_heads):
        return None
    if not (0 < num_qo_heads <= f.num_qo_heads and 0 < num_kv_heads <= f.num_kv_heads) or num_qo_heads % num_kv_heads:
        return None  # `problem` says what is wrong
    return {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads}


class LseForm(NamedTuple):
    """How a run returns lse, where not as kernels write it."""

    factor: float  # of the planned base
    transposed: bool  # [num_qo_heads, rows]

    def convert(self, lse: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
        """Return lse in this form, in the caller's buffer if there is one, else in place or in a new tensor."""
        if not self.transposed:
            return lse.mul_(self.factor)
        if buffer is None:
            buffer = lse.new_empty(lse.shape[::-1])
        return torch.mul(lse.t(), self.factor, out=buffer)


def lse_form(plan: BatchPlan, arguments: RunArguments, lse_base: Any, lse_layout: Any) -> LseForm | None:
    """Check `lse_base`, `lse_layout` and a buffer of layout "HN", and return what is to be done. None: nothing."""
    transposed = checks.choice("lse_layout", lse_layout, LSE_LAYOUTS) == "HN"
    base = plan.settings.lse_scale
    wanted = base if lse_base is None else LSE_BASES[checks.choice("lse_base", lse_base, tuple(LSE_BASES))]
    lse, returned = arguments.lse, checks.boolean("return_lse", arguments.return_lse)
    if (wanted == base and not transposed) or (lse is None and not returned):
        return None
    if transposed and lse is not None:
        _check_transposed_lse(plan, arguments)
    return LseForm(wanted / base, transposed)


def _check_transposed_lse(plan: BatchPlan, arguments: RunArguments) -> None:
    q = checks.tensor("q", arguments.q)
    lse = checks.tensor("lse", arguments.lse)
    checks.stored("lse", lse)
    heads = q.shape[1] if q.dim() == 3 else plan.settings.features.num_qo_heads
    checks.shape("lse", lse, (heads, plan.rows), "[num_qo_heads, rows] (lse_layout 'HN')")
    checks.dtype("lse", lse.dtype, (torch.float32,))
    checks.device("lse", lse, q.device)
    if not lse.is_contiguous():
        raise ArgumentError(f"lse must be contiguous, got strides {lse.stride()} for shape {tuple(lse.shape)}")
    checks.check_grad("lse", lse)
    _keep_apart(plan, arguments, arguments.kv_cache)


# ---- settings


def _run_settings(plan: BatchPlan, *options: Any) -> Settings:
    """Return `_add_run_options`, cached unless an option may change its value or has no hash."""
    if not all(isinstance(option, IMMUTABLE) for option in options):
        return _add_run_options(plan, *options)
    if plan.run_settings is None:  # typed: 1, 1.0 and True are equal, but no option takes all three
        cached = functools.lru_cache(CACHE_SIZE, typed=True)
        plan.run_settings = cached(functools.partial(_add_run_options, plan))
    return plan.run_settings(*options)


def _add_run_options(
    plan: BatchPlan,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    enable_pdl: Any,
    device_scale: bool,
    sinks: bool,
    per_head: bool,
    half_aligned: bool,
) -> Settings:
    """Return the planned settings with what a run adds; None adds nothing.

    `device_scale`: a factor of the scores is a tensor on the device. `sinks`, `per_head`: the run has sinks, or
    per-head scales. `half_aligned`: see `Features.half_aligned_kv`.
    """
    s = plan.settings
    q_factor, k_factor, v_factor = (
        checks.real_or(name, value, 1.0)
        for name, value in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale))
    )
    sm_scale = checks.real("sm_scale * q_scale * k_scale", s.sm_scale * q_factor * k_factor)
    if enable_pdl is not None:
        checks.boolean("enable_pdl", enable_pdl)
    features = s.features._replace(
        positive_scale=sm_scale >= MIN_SCALE and not device_scale,
        sinks=sinks,
        per_head_scales=per_head,
        half_aligned_kv=half_aligned,
    )
    if features != s.features:
        plan.check_supported(features)
    return s._replace(features=features, sm_scale=sm_scale, v_scale=s.v_scale * v_factor, enable_pdl=enable_pdl)


# ---- q, k, v


def _ragged_pair(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = cache
    return checks.tensor("k", k), checks.tensor("v", v)


def pages(plan: BatchPlan, cache: Any, name: str = "paged_kv_cache") -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v of a paged cache: a pair of 4-D tensors, or a 5-D one. Pages of one token may lack their axis."""
    token = 2 if plan.settings.kv_layout == "HND" else 1
    short = plan.settings.page_size == 1
    if isinstance(cache, torch.Tensor):
        checks.stored(name, cache)
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
    checks.tensor(f"k of {name}", k)
    checks.tensor(f"v of {name}", v)
    if short and k.dim() == v.dim() == 3:
        return k.unsqueeze(token), v.unsqueeze(token)
    return k, v


def _check_layout(plan: BatchPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Check everything about q, k and v except their addresses, and tell whether kernels can read rows of such."""
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
        meaning = "qo_indptr[-1]"
        if plan.tokens.q_len is not None:
            meaning = f"batch size {plan.tokens.batch_size} * q_len_per_req {plan.tokens.q_len} of plan()"
        raise ArgumentError(f"q must have the planned {plan.rows} rows ({meaning}), got {checks.describe(q)}")
    checks.shape("q", q, (plan.rows, f.num_qo_heads, f.head_dim_qk), "[rows, num_qo_heads, head_dim_qk]")
    for name, x, head_dim in (("k", k, f.head_dim_qk), ("v", v, f.head_dim_vo)):
        _check_cache_shape(plan, name, x, head_dim // plan.elements_per_byte)
        check_unit_stride(name, x)
    if k.shape[:-1] != v.shape[:-1]:
        raise ArgumentError(
            f"k and v must agree in all axes but the last, got {checks.describe(k)} and {checks.describe(v)}"
        )
    expanded, large = is_expanded(q, k, v), f.kv_source == "paged" and (is_large(k) or is_large(v))
    if expanded or large:
        plan.check_supported(f._replace(expanded=expanded, large_cache=large))
    return has_readable_rows(q, k, v)


def _check_cache_shape(plan: BatchPlan, name: str, x: torch.Tensor, width: int) -> None:
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


# ---- scales, window and outputs


def divided_by(name: str, divisor: Any, scale: Any) -> Any:
    """Return `scale` (None: 1) divided by the number `divisor`, which must be > 0."""
    divisor = checks.positive(name, divisor)
    if scale is None:
        return 1.0 / divisor
    if not isinstance(scale, torch.Tensor):
        return checks.real("v_scale", scale) / divisor
    return scale.float() / divisor if scale.is_floating_point() else scale  # whose dtype is refused


def _check_window(window_left: Any, settings: Settings) -> None:
    """Refuse any window but the planned one: the schedule depends on it."""
    if window_left is None:
        return
    window = max(-1, checks.whole("window_left", window_left))
    if window != settings.window_left:
        raise ArgumentError(
            f"window_left of run() must be None or the planned {settings.window_left}, got {window_left}: "
            "pass it to plan()"
        )


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
    if not isinstance(scales, tuple | list) or not all(isinstance(x, torch.Tensor) for x in scales):
        return check_block_scales(scales, k, v)  # raises the error
    for x in scales:
        checks.check_grad("kv_cache_sf", x)
    layout = (
        k.shape,
        *((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT) for x in scales),
    )
    if layout not in plan.block_scale_layouts:
        check_block_scales(scales, k, v)
        if has_loose_scales(*scales):
            plan.check_supported(f._replace(loose_scales=True))
        plan.block_scale_layouts.add(layout)
    return scales[0].view(torch.float8_e4m3fn), scales[1].view(torch.float8_e4m3fn)


def _keep_apart(plan: BatchPlan, arguments: RunArguments, kv: Any) -> None:
    """Refuse `out` and `lse` that share memory with what the plan keeps, `kv`, and what else may be a tensor."""
    read = [(name, getattr(arguments, name)) for name in ("q", *SCALES, "sinks")]
    read += checks.named(("k", "v"), kv) or [("the cache", kv)]
    read += checks.named(BLOCK_SCALES, arguments.kv_cache_sf) or [("kv_cache_sf", arguments.kv_cache_sf)]
    read += checks.named(HEAD_SCALES, arguments.head_scales)
    checks.apart((("out", arguments.out), ("lse", arguments.lse)), read, protected_memory(plan))


def protected_memory(plan: BatchPlan) -> list[MemoryRange]:
    """Return the memory of the plan, which a run must not write, by name."""
    if plan.protected is None:
        on_device = plan.tokens.device._asdict().items() if isinstance(plan.tokens, DeviceTokens) else ()
        kept = [
            ("kv_indices", plan.kv_indices),
            ("packed_mask", plan.packed_mask),
            ("the workspace", plan.workspace),
            ("the schedule", plan.staging and plan.staging.memory),
            *on_device,
            *plan.buffers.items(),
        ]
        plan.protected = [(name, checks.extent(x)) for name, x in kept if isinstance(x, torch.Tensor) and x.numel()]
    return plan.protected
