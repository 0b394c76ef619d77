"""Checks of operands that single requests, runs of batches and decode calls share: q, k, v, scales, sinks and outputs.

Shapes and dtypes are checked by the modules that make problems, since plans know more of them than single calls. What
strides and addresses decide is the same for all: `placement` measures it, `readable` refuses or copies what kernels
cannot read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import NO_EXTRAS, Extras, Features, Scratch
from cute_attn.request import checks
from cute_attn.request.settings import NVFP4_BLOCK

KERNEL_DEVICES = ("cuda",)  # devices whose kernels read memory in aligned chunks
ALIGNMENT = 16  # bytes: kernels move q, k, v and out in chunks of this size
NARROW_ALIGNMENT = 8  # bytes: some move k and v of fp8 dtypes and NVFP4 in halves of a chunk
SCALES_ALIGNMENT = 4  # bytes, likewise for the block scales of NVFP4
BLOCK_SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8)
NAMES = ("q", "k", "v")
SCALES = ("q_scale", "k_scale", "v_scale")
HEAD_SCALES = ("scale_q", "scale_k", "scale_v")
BLOCK_SCALES = ("k_sf of kv_cache_sf", "v_sf of kv_cache_sf")

T = TypeVar("T")


# ---- q, k, v


class KvLayout(NamedTuple):
    """Axes of k and v, counted from the last one: alike for single requests, ragged batches and pages."""

    tokens: int
    heads: int

    def axes(self, tokens: T, heads: T, width: T) -> tuple[T, T, T]:
        """Return sizes or names of the last three axes, in their order."""
        return (tokens, heads, width) if self.tokens < self.heads else (heads, tokens, width)


LAYOUTS = {"NHD": KvLayout(-3, -2), "HND": KvLayout(-2, -3)}


class Placement(NamedTuple):
    """What strides and addresses of q, k and v decide."""

    readable: bool  # rows are 16-byte aligned, and last axes have unit stride: nothing is to be refused or copied
    expanded: bool  # see `Features`
    half_aligned: bool  # see `Features.half_aligned_kv`


def placement(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Placement:
    """Measure q, k and v, whose shapes are checked. Raises RuntimeError if one has no memory."""
    q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    joined = q.data_ptr() | k.data_ptr() | v.data_ptr() | q_strides[0] | q_strides[-2]
    joined |= k_strides[0] | k_strides[1] | k_strides[-2] | v_strides[0] | v_strides[1] | v_strides[-2]
    # 16 elements are a multiple of 16 bytes in any dtype: common strides need no further check.
    uncommon = joined % ALIGNMENT or not q_strides[-1] == k_strides[-1] == v_strides[-1] == 1
    expanded = (0 in q_strides or 0 in k_strides or 0 in v_strides) and any(
        stride == 0 and count > 1 for x in (q, k, v) for stride, count in zip(x.stride(), x.shape, strict=True)
    )
    if not uncommon:
        return Placement(True, expanded, False)
    half_aligned = k.itemsize == 1 and not (aligned(k) and aligned(v))
    return Placement(False, expanded, half_aligned)


def readable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    placed: Placement,
    names: Sequence[str] = NAMES,
    kv_alignment: int | None = None,
) -> torch.Tensor:
    """Return q as kernels can read it, copied where needed. k and v are refused instead: their rows must start at
    multiples of `kv_alignment` bytes, by default those that some backend can read. So are tensors that need gradients.
    """
    if q.requires_grad or k.requires_grad or v.requires_grad or forward_ad._current_level >= 0:
        for name, x in zip(names, (q, k, v), strict=True):
            checks.check_grad(name, x)
    if placed.readable:
        return q
    if kv_alignment is None:
        kv_alignment = NARROW_ALIGNMENT if k.itemsize == 1 else ALIGNMENT
    for name, x in zip(names[1:], (k, v), strict=True):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ArgumentError(
                f"{name} must have stride 1 on its last axis, got strides {x.stride()}; "
                f"a copy of a cache is never made silently: pass {name}.contiguous()"
            )
        _check_alignment(name, x, kv_alignment)
    if (q.stride(-1) != 1 and q.shape[-1] > 1) or (q.device.type in KERNEL_DEVICES and not aligned(q)):
        return q.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps a misaligned address
    return q


def aligned(tensor: torch.Tensor, alignment: int = ALIGNMENT) -> bool:
    """Tell whether every row (along the last axis) starts at a multiple of `alignment` bytes."""
    start, size = tensor.data_ptr(), tensor.itemsize
    if math.gcd(start, size * math.gcd(*tensor.stride()[:-1])) % alignment == 0:
        return True
    return math.gcd(start, size * math.gcd(*outer_strides(tensor))) % alignment == 0


def outer_strides(x: torch.Tensor) -> list[int]:
    """Return the strides of all axes but the last, without axes of size 1, whose strides are never used."""
    return [stride for stride, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1]


def _check_alignment(name: str, tensor: torch.Tensor, alignment: int = ALIGNMENT) -> None:
    """Refuse a GPU tensor whose rows do not start at multiples of `alignment` bytes."""
    if tensor.device.type in KERNEL_DEVICES and not aligned(tensor, alignment):
        raise ArgumentError(
            f"{name} must start at a multiple of {alignment} bytes and have strides that are multiples of "
            f"{alignment // tensor.element_size()} elements on all but its last axis; got address % {alignment} = "
            f"{tensor.data_ptr() % alignment} and strides {tensor.stride()}"
        )


# ---- scales and sinks


class Scales(NamedTuple):
    """Scales of a call: numbers, and one-element fp32 tensors on the device."""

    q: Any = None
    k: Any = None
    v: Any = None
    of_scores: tuple[torch.Tensor, ...] = ()
    of_v: torch.Tensor | None = None


NO_SCALES = Scales()


def split_scales(device: torch.device, q: Any, k: Any, v: Any, names: Sequence[str] = SCALES) -> Scales:
    """Separate numbers from tensors on the device. `names`: those of the caller."""
    q, of_q = split_scale(names[0], q, device)
    k, of_k = split_scale(names[1], k, device)
    v, of_v = split_scale(names[2], v, device)
    return Scales(q, k, v, tuple(x for x in (of_q, of_k) if x is not None), of_v)


def split_scale(name: str, value: Any, device: torch.device) -> tuple[Any, torch.Tensor | None]:
    """Return a scale as a number and a factor of it on the device, or None: a CPU tensor is read here, a GPU tensor by
    the kernel.
    """
    if not isinstance(value, torch.Tensor):
        return value, None
    if value.numel() != 1 or not value.dtype.is_floating_point:
        accepted = "a number or a floating-point tensor of one element"
        raise checks.wrong(f"{name} must be {accepted}", value, ArgumentTypeError)
    checks.check_grad(name, checks.stored(name, value))
    if value.device.type == "cpu":
        return value.item(), None
    checks.device(name, checks.stored(name, value), device)
    return 1.0, value.to(torch.float32)


def scaled(name: str, scale: Any, factor: float) -> Any:
    """Return a scale (None: 1) times a number, of tensors in fp32: narrower products would be rounded."""
    if not isinstance(scale, torch.Tensor):
        return checks.real(name, scale, 1.0) * factor
    return scale.float() * factor if scale.is_floating_point() else scale  # whose dtype is refused


def number_or_tensor(name: str, value: Any, device: torch.device) -> float | torch.Tensor:
    """Check a scale that must be given, and return a number or an fp32 tensor on the device: products of narrower ones
    would be rounded, and might overflow.
    """
    number, factor = split_scale(name, value, device)
    return checks.real(name, number) if factor is None else factor


def check_block_scales(scales: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the block scales of NVFP4 k and v: one e4m3 number per 16 values, which take 8 bytes."""
    if not isinstance(scales, tuple | list) or len(scales) != 2:
        raise checks.wrong("kv_cache_sf must be a pair (k_sf, v_sf)", scales, ArgumentTypeError)
    k_sf, v_sf = scales
    return _block_scale(BLOCK_SCALES[0], k_sf, k), _block_scale(BLOCK_SCALES[1], v_sf, v)


def _block_scale(name: str, value: Any, cache: torch.Tensor) -> torch.Tensor:
    expected = *cache.shape[:-1], 2 * cache.shape[-1] // NVFP4_BLOCK
    meaning = "[..., head_dim / 16], the leading axes of k and v,"
    value = checks.operand(name, value, BLOCK_SCALE_DTYPES, expected, meaning, cache.device)
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        raise ArgumentError(f"{name}: its innermost stride must be 1, got strides {value.stride()}")
    if value.shape[-1] % SCALES_ALIGNMENT == 0:
        _check_alignment(name, value, SCALES_ALIGNMENT)
    return value.view(torch.float8_e4m3fn)


def has_loose_scales(k_sf: torch.Tensor, v_sf: torch.Tensor) -> bool:
    """Tell whether the block scales of some token do not start at a multiple of their size, or of 16 bytes."""
    return not all(aligned(x, min(max(1, x.shape[-1]), ALIGNMENT)) for x in (k_sf, v_sf))


def check_head_scales(
    scales: tuple[Any, Any, Any], features: Features
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the per-head scales of fp8 attention; None stands for ones."""
    counts = features.num_qo_heads, features.num_kv_heads, features.num_kv_heads
    scale_q, scale_k, scale_v = (
        torch.ones(count, dtype=torch.float32, device=features.device)
        if value is None
        else per_head(name, value, count, features.device)
        for name, value, count in zip(HEAD_SCALES, scales, counts, strict=True)
    )
    return scale_q, scale_k, scale_v


def per_head(name: str, value: Any, heads: int, device: torch.device) -> torch.Tensor:
    """Check one number per kv head (scale_k, scale_v) or per query head (all others). Return contiguous fp32."""
    value = checks.tensor(name, value)
    checks.shape(name, value, (heads,), "[num_kv_heads]" if name in ("scale_k", "scale_v") else "[num_qo_heads]")
    checks.device(name, value, device)
    checks.check_grad(name, value)
    if not value.dtype.is_floating_point:
        raise checks.wrong(f"{name} must have a floating-point dtype", value)
    if name == "sinks" and value.device.type == "cpu":  # they would turn every row of their head to NaN
        for head, sink in enumerate(value.tolist()):
            if not sink < math.inf:
                raise ArgumentError(f"sinks must be finite or -inf (no sink), got {sink} for head {head}")
    if value.dtype == torch.float32 and value.is_contiguous():
        return value
    return value.to(torch.float32).contiguous()


def check_bounds(name: str, bounds: Sequence[int], most: int) -> None:
    """Check the bounds of each request's rows of q: from 0 on, not decreasing, no request longer than announced."""
    if bounds[0] != 0:
        raise ArgumentError(f"{name} must start at 0, got {bounds[0]}")
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if not 0 <= end - begin <= most:
            raise ArgumentError(
                f"{name} must not decrease, nor give a request more than {most} rows: "
                f"got {end} after {begin} (request {i})"
            )


def extras(
    scales: Scales,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    head_scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    block_scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> Extras:
    """Return the optional tensors of a problem, which are checked."""
    if not scales.of_scores and scales.of_v is mask is sinks is head_scales is block_scales is None:
        return NO_EXTRAS
    scale0, scale1, *_ = *scales.of_scores, None, None
    heads, blocks = head_scales or (None, None, None), block_scales or (None, None)
    return Extras(scale0, scale1, scales.of_v, sinks, mask, *heads, *blocks)


# ---- outputs and workspaces


def outputs(
    q: torch.Tensor,
    given: tuple[Any, Any, Any],
    element: tuple[int, torch.dtype],
    rows: tuple[int, ...],
    axes: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse. `given`: the caller's buffers, which are checked, and whether lse is wanted. `element`: last
    axis and dtype of out. `rows`: all axes of lse, which `axes` names. Callers compare the buffers with what they read:
    `checks.apart`.
    """
    out, lse, return_lse = given
    width, dtype = element
    if out is None:
        out = q.new_empty(*rows, width, dtype=dtype)
    else:
        checks.operand("out", out, (dtype,), (*rows, width), f"[{axes}, head_dim_vo]", q.device)
        checks.dense("out", out)
        strides = out.stride()
        if (out.data_ptr() | strides[0] | strides[-2]) % ALIGNMENT:
            _check_alignment("out", out)
    if lse is None:
        return out, q.new_empty(*rows, dtype=torch.float32) if return_lse else None
    checks.operand("lse", lse, (torch.float32,), rows, f"[{axes}]", q.device)
    checks.writable("lse", lse)
    checks.contiguous("lse", lse)
    return out, lse


def flat_tokens(name: str, buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of an output, with all its tokens on one axis."""
    try:
        return buffer.view(shape)
    except RuntimeError as error:
        raise ArgumentError(
            f"{name} must have tokens at equal distances, got {checks.describe(buffer)} with strides {buffer.stride()}"
        ) from error


def scratch_memory(name: str, value: Any) -> tuple[torch.Tensor, int]:
    """Return a buffer and the bytes of it that a launch may use: none if they are not aligned."""
    buffer = checks.tensor(name, value)
    checks.contiguous(name, buffer)
    return buffer, 0 if buffer.data_ptr() % ALIGNMENT else buffer.nbytes


def partials_in(name: str, value: Any) -> Scratch:
    """Return scratch memory whose partial results are in a buffer of the caller, and counters the launch's own."""
    buffer, size = scratch_memory(name, value)
    return Scratch(buffer, buffer, buffer.data_ptr(), buffer.data_ptr(), 0, size)


def check_workspace(name: str, value: torch.Tensor) -> None:
    """Check memory for partial results and counters."""
    checks.contiguous(name, value)
    if value.data_ptr() % ALIGNMENT:
        raise ArgumentError(
            f"{name} must start at a multiple of {ALIGNMENT} bytes, "
            f"got address % {ALIGNMENT} = {value.data_ptr() % ALIGNMENT}"
        )
