"""One case of the single-request matrix: its tensors, its call, its tolerances and the verdict on a result.

The same case has the same numbers on every machine and device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cute_attn.problem import Features, Problem, Settings
from cute_attn.reference import attention as reference
from cute_attn.request.bit_packing import packbits

LOG2E = math.log2(math.e)
LSE_ROUNDING = 2**-22  # fp32 logits of the lse's size are rounded by 2^-24 of it, a few times over
GUARD = 4096  # poisoned elements before and after every tensor
EMPTY_ROW_STEP = 7  # rows 0, 7, 14, ... of a custom mask see nothing


class Numbers:
    """What follows from the numbers of a case, single request or batch."""

    head_dim_qk: int
    dtype: str
    o_dtype: str | None
    window_left: int
    logits_soft_cap: float
    pos_encoding_mode: str
    rope_scale: float
    rope_theta: float
    sm_scale: float | None
    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    tensor_scales: bool

    @property
    def q_gain(self) -> float:
        """Standard deviation of q: high enough for a few keys to carry a row, so that losing one shows.

        Not so under a soft cap: tanh.approx is off by 2^-11 of its value, which at a gain of 2.5 would move
        o by 4e-3, twice the tolerance of fp16. For the same reason ALiBi, whose logits reach any cap, comes
        only with a cap of 3.
        """
        return 1.0 if self.logits_soft_cap > 0 else 2.5

    @property
    def scale(self) -> float:
        """What multiplies q·k."""
        default = 1 / math.sqrt(self.head_dim_qk)
        scales = (default if self.sm_scale is None else self.sm_scale, self.q_scale, self.k_scale)
        return math.prod(s for s in scales if s is not None)

    def settings(self, features: Features, **rest: Any) -> Settings:
        """What the reference is told of the numbers."""
        same = {name: getattr(self, name) for name in ("window_left", "logits_soft_cap", "rope_scale", "rope_theta")}
        v_scale = 1.0 if self.v_scale is None else self.v_scale
        return Settings(features, sm_scale=self.scale, v_scale=v_scale, **same, **rest)

    def scale_arguments(self, device: torch.device, *names: str) -> dict[str, Any]:
        """Scales of q, k or v as a call gets them."""
        given = {name: getattr(self, name) for name in names}
        if not self.tensor_scales:
            return given
        return {
            name: None if x is None else torch.tensor([x], dtype=torch.float32, device=device)
            for name, x in given.items()
        }


@dataclass(frozen=True)
class Case(Numbers):
    """One call of `single_prefill_with_kv_cache` or, with kind "decode", of `single_decode_with_kv_cache`.

    `mask`: "custom" is a bool mask, "packed" the same packed by `packbits(..., "little")`.
    `storage`, how q, k and v lie in memory (everything in between is NaN):
      dense        contiguous in their own layout
      packed_qkv   slices of one [token, head, dim] buffer
      padded       16 bytes after every head, 48 more after every token (or head, where heads come first)
      odd          q alone: 1 element after every head and token, and before the first, so that only a copy of
                   q has the 16-byte alignment that kernels need (of k and v it is demanded); the packed mask
                   starts at an odd address
      transposed   q with heads first, k and v in the order that `kv_layout` is not
      expanded     all kv heads are one (stride 0)
    """

    kind: str
    qo_len: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype: str = "float16"
    kv_dtype: str | None = None  # an fp8 dtype; not with "packed_qkv"
    o_dtype: str | None = None
    kv_layout: str = "NHD"
    mask: str = "none"
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    sm_scale: float | None = None
    q_scale: float | None = None  # decode only
    k_scale: float | None = None
    v_scale: float | None = None
    tensor_scales: bool = False  # the three scales travel as one-element fp32 tensors
    storage: str = "dense"
    return_lse: bool = True
    seed: int = 0

    @property
    def id(self) -> str:
        dims = f"d{self.head_dim_qk}"
        if self.head_dim_vo != self.head_dim_qk:
            dims += f"x{self.head_dim_vo}"
        heads = f"h{self.num_qo_heads}x{self.num_kv_heads}"
        parts = [self.kind, f"q{self.qo_len}", f"k{self.kv_len}", heads, dims, self.dtype]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is not dataclasses.MISSING and field.name != "dtype" and value != field.default:
                parts.append(value if field.name in ("kv_layout", "mask", "storage") else f"{field.name}={value}")
        return "-".join(parts)


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None


# ------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class _Placement:
    """Where a `[n, h, d]` tensor of unit last stride lies in a buffer."""

    offset: int
    stride_n: int
    stride_h: int

    def end(self, shape: tuple[int, int, int]) -> int:
        n, h, d = shape
        return self.offset + max(0, n - 1) * self.stride_n + max(0, h - 1) * self.stride_h + d


def _placement(shape: tuple[int, int, int], case: Case, kv: bool) -> _Placement:
    n, h, d = shape
    storage, heads_first = case.storage, kv and case.kv_layout == "HND"
    if storage == "expanded" and kv:
        return _Placement(GUARD, d, 0)
    gap, tail, shift = 0, 0, 0
    if storage == "padded":
        gap, tail = (16, 48) if kv and case.kv_dtype else (8, 24)
    elif storage == "odd" and not kv:
        gap, tail, shift = 1, 1, 1
    if heads_first != (storage == "transposed"):
        return _Placement(GUARD + shift, d + gap, n * (d + gap) + tail)
    return _Placement(GUARD + shift, h * (d + gap) + tail, d + gap)


def _poisoned(
    values: list[torch.Tensor], placements: list[_Placement], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Views of one buffer that hold `values`; every other element of the buffer is NaN."""
    shapes = [(v.shape[0], v.shape[1], v.shape[2]) for v in values]
    size = max(p.end(s) for p, s in zip(placements, shapes, strict=True)) + GUARD
    buffer = torch.full((size,), math.nan, dtype=dtype)
    strides = [(p.stride_n, p.stride_h, 1) for p in placements]
    for value, shape, stride, place in zip(values, shapes, strides, placements, strict=True):
        heads = 1 if place.stride_h == 0 else shape[1]
        torch.as_strided(buffer, (shape[0], heads, shape[2]), stride, place.offset).copy_(value[:, :heads])
    buffer = buffer.to(device)
    return [
        torch.as_strided(buffer, shape, stride, place.offset)
        for shape, stride, place in zip(shapes, strides, placements, strict=True)
    ]


def _place_qkv(case: Case, values: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    dtype, kv_dtype = getattr(torch, case.dtype), getattr(torch, case.kv_dtype or case.dtype)
    if case.storage == "packed_qkv":
        heads = case.num_qo_heads + 2 * case.num_kv_heads
        d = max(case.head_dim_qk, case.head_dim_vo)
        first_head = (0, case.num_qo_heads, case.num_qo_heads + case.num_kv_heads)
        return _poisoned(values, [_Placement(GUARD + h * d, heads * d, d) for h in first_head], dtype, device)
    views = []
    for i, value in enumerate(values):
        shape = (value.shape[0], value.shape[1], value.shape[2])
        views += _poisoned([value], [_placement(shape, case, i > 0)], kv_dtype if i else dtype, device)
    return views


def random_mask(qo_len: int, kv_len: int, generator: torch.Generator) -> torch.Tensor:
    """Six keys in ten, but none in the middle third of the keys, and none at all for some rows."""
    keep = torch.rand(qo_len, kv_len, generator=generator) < 0.6
    keep[:, kv_len // 3 : 2 * kv_len // 3] = False
    if qo_len > 1:
        keep[::EMPTY_ROW_STEP] = False
    return keep


def make(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Tensors of a case, on `device`. Memory outside the elements is NaN, mask bits outside them are 1."""
    device = torch.device(device)
    generator = torch.Generator().manual_seed(case.seed)
    q = torch.randn(case.qo_len, case.num_qo_heads, case.head_dim_qk, generator=generator) * case.q_gain
    k = torch.randn(case.kv_len, case.num_kv_heads, case.head_dim_qk, generator=generator)
    v = torch.randn(case.kv_len, case.num_kv_heads, case.head_dim_vo, generator=generator)
    q, k, v = _place_qkv(case, [q, k, v], device)
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if case.mask not in ("custom", "packed"):
        return Inputs(q, k, v)
    keep = random_mask(case.qo_len, case.kv_len, generator)
    if case.mask == "custom":
        wide = torch.ones(case.qo_len, case.kv_len + 3, dtype=torch.bool)
        wide[:, : case.kv_len] = keep
        return Inputs(q, k, v, custom_mask=wide.to(device)[:, : case.kv_len])
    packed = packbits(torch.nn.functional.pad(keep.flatten(), (0, -keep.numel() % 8), value=True), "little")
    shift = GUARD + (case.storage == "odd")
    wide = torch.full((packed.numel() + 2 * GUARD,), 0xFF, dtype=torch.uint8)
    wide[shift : shift + packed.numel()] = packed
    return Inputs(q, k, v, packed_custom_mask=wide.to(device)[shift : shift + packed.numel()])


# --------------------------------------------------------------------------------------------- calls


def call(case: Case, inputs: Inputs, **extra: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of the public API; lse is None without `return_lse`. `extra` is passed on (backend=...)."""
    import cute_attn

    arguments: dict[str, Any] = {
        name: getattr(case, name)
        for name in (
            "kv_layout",
            "window_left",
            "logits_soft_cap",
            "pos_encoding_mode",
            "sm_scale",
            "return_lse",
        )
    }
    arguments |= {"rope_scale": case.rope_scale, "rope_theta": case.rope_theta}
    scales = ("k_scale", "v_scale") if case.kind == "prefill" else ("q_scale", "k_scale", "v_scale")
    arguments |= case.scale_arguments(inputs.q.device, *scales)
    if case.kind == "decode":
        result = cute_attn.single_decode_with_kv_cache(inputs.q[0], inputs.k, inputs.v, **arguments, **extra)
    else:
        arguments["o_dtype"] = None if case.o_dtype is None else getattr(torch, case.o_dtype)
        arguments["custom_mask"] = inputs.custom_mask
        arguments["packed_custom_mask"] = inputs.packed_custom_mask
        arguments["causal"] = case.mask == "causal"
        result = cute_attn.single_prefill_with_kv_cache(inputs.q, inputs.k, inputs.v, **arguments, **extra)
    return result if case.return_lse else (result, None)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its kin give NaN, and the largest number for integers, on every device."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def features(case: Case, device: torch.device) -> Features:
    """The features of a case on a device, without its tensors."""
    dtype = getattr(torch, case.dtype)
    scored = case.q_scale is not None or case.k_scale is not None
    unknown_sign = device.type == "cuda" and case.tensor_scales and scored  # read by the kernel alone
    return Features(
        device=device,
        q_dtype=dtype,
        kv_dtype=getattr(torch, case.kv_dtype or case.dtype),
        o_dtype=getattr(torch, case.o_dtype or case.dtype),
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim_qk=case.head_dim_qk,
        head_dim_vo=case.head_dim_vo,
        custom_mask=case.mask in ("custom", "packed"),
        soft_cap=case.logits_soft_cap > 0,
        pos_encoding_mode=case.pos_encoding_mode,
        positive_scale=case.scale > 0 and not unknown_sign,
        expanded=case.storage == "expanded" and case.num_kv_heads > 1,
        decode=case.kind == "decode",
    )


def problem(case: Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> Problem:
    """The normalised form of a case. `out` is `[qo_len, num_qo_heads, head_dim_vo]`, of any float dtype."""
    packed = inputs.packed_custom_mask
    if inputs.custom_mask is not None:
        packed = packbits(inputs.custom_mask.reshape(-1), "little")
    of_out = features(case, inputs.q.device)._replace(o_dtype=out.dtype)
    settings = case.settings(of_out, kv_layout=case.kv_layout, causal=case.mask == "causal")
    return Problem(settings, case.qo_len, case.kv_len, inputs.q, inputs.k, inputs.v, out, lse, packed_mask=packed)


# ------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True)
class Result:
    """The largest errors in the units of `tolerance`; infinite for NaN and for an inexact empty row."""

    ok: bool
    o_error: float
    lse_error: float
    detail: str  # what is wrong first, empty if ok


def lse_rounding(case: Numbers) -> float:
    """Of an lse, relative to it. Hopper keeps few bits of sums of fp8 products: see `tests.support.fp8_case`."""
    return 2**-8 if case.dtype == "float8_e4m3fn" else LSE_ROUNDING


def tolerance(case: Numbers) -> tuple[float, float]:
    """(o, lse): |o - ref| <= o * (1 + |ref|); |lse - ref| <= lse + lse_rounding * |ref|.

    lse is wider where the arithmetic has a reason to be:
    - tanh.approx.f32 is off by up to 2^-11 of its value, so a capped logit by up to 2^-11 * cap.
    - RoPE: rotated q and k are rounded to 16 bits, and fp32 angles tip some roundings the other way. If all
      did, an element would be off by ulp / 5 of its value (standard deviation) and, over the sum of q·k, a
      logit of standard deviation s by s * sqrt(2) * ulp / 5. Four of these.
    """
    o = 1.6e-2 if "bfloat16" in (case.dtype, case.o_dtype) else 2e-3
    if case.dtype == "float8_e4m3fn":
        o += 2**-4  # the rounding of probabilities to e4m3; `tests.support.fp8_case` has a bound for each element
    o += {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}.get(case.o_dtype or "", 0.0)
    lse = 1e-3
    if case.logits_soft_cap > 0:
        lse += LOG2E * 2**-11 * case.logits_soft_cap
    if case.pos_encoding_mode == "ROPE_LLAMA":
        ulp = 2**-7 if case.dtype == "bfloat16" else 2**-10
        logit_std = case.q_gain * abs(case.scale) * math.sqrt(case.head_dim_qk)
        lse += LOG2E * 4 * logit_std * math.sqrt(2) * ulp / 5
    return o * max(1.0, abs(case.v_scale or 1.0)), lse


def check(case: Case, out: torch.Tensor, lse: torch.Tensor | None) -> Result:
    """Compare a result with the fp64 reference, computed on out's device from newly made tensors.

    Rows that see no key must have o == 0 and lse == -inf exactly. `out` and `lse` have the API's shapes.
    """
    wrong_form = _wrong_form(case, out, lse)
    if wrong_form:
        return Result(False, math.inf, math.inf, wrong_form)
    shape = (case.qo_len, case.num_qo_heads)
    o_ref = torch.empty(*shape, case.head_dim_vo, dtype=torch.float64, device=out.device)
    lse_ref = torch.empty(shape, dtype=torch.float64, device=out.device)
    reference.run(problem(case, make(case, out.device), o_ref, lse_ref), torch.float64)
    return verdict(case, (out.reshape(o_ref.shape), None if lse is None else lse.reshape(shape)), (o_ref, lse_ref))


def verdict(
    case: Numbers, found: tuple[torch.Tensor, torch.Tensor | None], expected: tuple[torch.Tensor, torch.Tensor]
) -> Result:
    """Compare o and lse with those of the reference, of the same shapes."""
    (out, lse), (o_ref, lse_ref) = found, expected
    empty = lse_ref == -math.inf
    o_tol, lse_tol = tolerance(case)
    o_error, detail = _compare("o", out, o_ref, 1 + o_ref.abs(), o_tol, empty[..., None])
    if lse is None:
        return Result(not detail, o_error, 0.0, detail)
    unit = 1 + lse_rounding(case) / lse_tol * lse_ref.masked_fill(empty, 0.0).abs()
    lse_error, lse_detail = _compare("lse", lse, lse_ref, unit, lse_tol, empty)
    detail = "; ".join(filter(None, (detail, lse_detail)))
    return Result(not detail, o_error, lse_error, detail)


def _compare(
    name: str, value: torch.Tensor, ref: torch.Tensor, unit: torch.Tensor, tol: float, exact: torch.Tensor
) -> tuple[float, str]:
    """Largest |value - ref| / unit, infinite for NaN and where an `exact` element differs; what is wrong."""
    value = value.to(ref.dtype)
    error = ((value - ref).abs() / unit).masked_fill(exact, math.inf)
    error = torch.where(value == ref, 0.0, error.masked_fill(error.isnan(), math.inf))
    if error.numel() == 0:
        return 0.0, ""
    largest, bad = float(error.max()), error > tol
    if not bool(bad.any()):
        return largest, ""
    first = tuple(bad.nonzero()[0].tolist())
    return largest, (
        f"{name}{list(first)} is {float(value[first]):.6g}, reference {float(ref[first]):.6g}; "
        f"{int(bad.sum())} of {bad.numel()} off by more than {tol:.2g}, at most by {largest:.3g}"
    )


def _wrong_form(case: Case, out: torch.Tensor, lse: torch.Tensor | None) -> str:
    rows = (case.num_qo_heads,) if case.kind == "decode" else (case.qo_len, case.num_qo_heads)
    expected = [("out", out, (*rows, case.head_dim_vo), getattr(torch, case.o_dtype or case.dtype))]
    if lse is not None:
        expected.append(("lse", lse, rows, torch.float32))
    wrong = [
        f"{name} is {x.dtype} {tuple(x.shape)}, not {dtype} {shape}"
        for name, x, shape, dtype in expected
        if tuple(x.shape) != shape or x.dtype != dtype
    ]
    if case.return_lse != (lse is not None):
        wrong.append(f"return_lse={case.return_lse}, lse is {type(lse).__name__}")
    return "; ".join(wrong)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, shape and dense strides, one element off: at an address that kernels of 16 bits cannot read."""
    view = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    assert view.data_ptr() % 16 == x.itemsize
    return view.copy_(x)
