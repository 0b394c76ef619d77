"""One call of a matrix, a batch or a single request, its tolerances and the verdict on a result. Its tensors and its
calls: `batch_case`.

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

LOG2E = math.log2(math.e)
LSE_ROUNDING = 2**-22  # fp32 logits of the lse's size are rounded by 2^-24 of it, a few times over


@dataclass(frozen=True)
class BatchCase:
    """One call. `kind`: the wrapper of a batch, "paged" or "ragged" prefill, or "decode", where all qo_lens are equal;
    or the function of a single request, "single_prefill" or "single_decode".

    `mask`: "custom" bool, "packed" with a byte of its own for every request; "items": multi-item
    scoring, with prefixes of about a third of the keys and items of up to `longest_item` tokens.
    `cache`: pair | list | one (a 5-D tensor) | strided (gaps of 16 bytes after heads, tokens and pages) | halves (of 8
    bytes: k and v of an fp8 dtype); ragged k and v: pair, strided, halves.
    `slack`: indptr arrays start at 2, and there are rows and index entries that no request has.
    `head_scales`: of q, k and v, a number per head: "heads", or "signed" with some below 0.
    `v_mean`: of v. `spike`: by how much the key `spike_key` stands out for the first query.
    `storage`, how q, k and v of a single request lie in memory (everything in between is NaN):
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
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int = 2
    num_kv_heads: int = 1
    head_dim_qk: int = 64
    head_dim_vo: int = 64
    page_size: int = 1
    dtype: str = "float16"
    kv_dtype: str | None = None  # an fp8 dtype, or "nvfp4"
    o_dtype: str | None = None
    kv_layout: str = "NHD"
    cache: str = "pair"
    storage: str = "dense"
    mask: str = "none"
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    sm_scale: float | None = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    tensor_scales: bool = False  # the three scales travel as one-element fp32 tensors
    head_scales: str = ""
    v_mean: float = 0.0
    spike: float = 0.0
    spike_key: int = 5  # kernels come to the last keys first
    sinks: bool = False
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    longest_item: int = 9
    lse_base: str = "log2"
    return_lse: bool = True
    indices: str = "int32"
    slack: bool = False
    seed: int = 0

    @property
    def single(self) -> bool:
        return self.kind.startswith("single")

    @property
    def fp8(self) -> bool:
        """Whether q, k and v are in fp8."""
        return self.dtype.startswith("float8")

    @property
    def paged(self) -> bool:
        return self.kind in ("paged", "decode")

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of keys and values; bytes for NVFP4."""
        dtype: torch.dtype = getattr(torch, {"nvfp4": "uint8"}.get(self.kv_dtype or "", self.kv_dtype or self.dtype))
        return dtype

    @property
    def rows(self) -> int:
        return self.first + sum(self.qo_lens)

    @property
    def num_pages(self) -> int:
        return sum(-(-n // self.page_size) for n in self.kv_lens)

    @property
    def first(self) -> int:
        return 2 if self.slack and self.kind != "decode" else 0

    @property
    def id(self) -> str:
        lens = f"{len(self.qo_lens)}x{max(self.qo_lens, default=0)}x{max(self.kv_lens, default=0)}"
        heads, dims = f"h{self.num_qo_heads}x{self.num_kv_heads}", f"d{self.head_dim_qk}x{self.head_dim_vo}"
        others = dataclasses.fields(self)[7:]
        given = (f"{field.name}={x}" for field in others if (x := getattr(self, field.name)) != field.default)
        return "-".join([self.kind, lens, heads, dims, *given])

    @property
    def q_gain(self) -> float:
        """Standard deviation of q: high enough for a few keys to carry a row, so that losing one shows. The bound for
        fp8 q is tight enough without.

        Not so under a soft cap: tanh.approx is off by 2^-11 of its value, which at a gain of 2.5 would move
        o by 4e-3, twice the tolerance of fp16. For the same reason ALiBi, whose logits reach any cap, comes
        only with a cap of 3.
        """
        return 1.0 if self.logits_soft_cap > 0 or self.fp8 else 2.5

    @property
    def scale(self) -> float:
        """What multiplies q·k."""
        default = 1 / math.sqrt(self.head_dim_qk)
        scales = (default if self.sm_scale is None else self.sm_scale, self.q_scale, self.k_scale)
        return math.prod(s for s in scales if s is not None)

    def scale_arguments(self, device: torch.device, *names: str) -> dict[str, Any]:
        """Scales of q, k or v as a call gets them."""
        given = {name: getattr(self, name) for name in names}
        if not self.tensor_scales:
            return given
        return {
            name: None if x is None else torch.tensor([x], dtype=torch.float32, device=device)
            for name, x in given.items()
        }


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its kin give NaN, and the largest number for integers, on every device."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# ------------------------------------------------------------------------------------------- verdict


def tolerance(case: BatchCase) -> tuple[float, float]:
    """(o, lse): |o - ref| <= o * (1 + |ref|), with fp8 q `fp8_bound` alone; |lse - ref| <= lse + rounding * |ref|.

    lse is wider where the arithmetic has a reason to be:
    - tanh.approx.f32 is off by up to 2^-11 of its value, so a capped logit by up to 2^-11 * cap.
    - RoPE: rotated q and k are rounded to 16 bits, and fp32 angles tip some roundings the other way. If all
      did, an element would be off by ulp / 5 of its value (standard deviation) and, over the sum of q·k, a
      logit of standard deviation s by s * sqrt(2) * ulp / 5. Four of these.
    """
    if case.fp8:
        return 1.0, 4e-3
    o = 1.6e-2 if "bfloat16" in (case.dtype, case.o_dtype) else 2e-3
    o += {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}.get(case.o_dtype or "", 0.0)
    lse = 1e-3
    if case.logits_soft_cap > 0:
        lse += LOG2E * 2**-11 * case.logits_soft_cap
    if case.pos_encoding_mode == "ROPE_LLAMA":
        ulp = 2**-7 if case.dtype == "bfloat16" else 2**-10
        logit_std = case.q_gain * abs(case.scale) * math.sqrt(case.head_dim_qk)
        lse += LOG2E * 4 * logit_std * math.sqrt(2) * ulp / 5
    return o * max(1.0, abs(case.v_scale or 1.0)), lse


def verdict(
    case: BatchCase,
    found: tuple[torch.Tensor, torch.Tensor | None],
    expected: tuple[torch.Tensor, torch.Tensor],
    bound: torch.Tensor | None = None,
) -> str:
    """What is wrong with o and lse beside those of the formula, of the same shapes; "" if nothing is.

    `bound`: of the error of each element of o.
    """
    (out, lse), (o_ref, lse_ref) = found, expected
    empty = lse_ref == -math.inf
    o_tol, lse_tol = tolerance(case)
    wrong = [off("o", out, o_ref, 1 + o_ref.abs() if bound is None else bound, o_tol, empty[..., None])]
    if lse is not None:
        rounding = 2**-8 if case.fp8 else LSE_ROUNDING  # Hopper keeps few bits of sums of fp8 products
        unit = 1 + rounding / lse_tol * lse_ref.masked_fill(empty, 0.0).abs()
        wrong.append(off("lse", lse, lse_ref, unit, lse_tol, empty))
    return "; ".join(filter(None, wrong))


def off(name: str, value: torch.Tensor, ref: torch.Tensor, unit: torch.Tensor, tol: float, exact: torch.Tensor) -> str:
    """Where |value - ref| exceeds tol * unit, as it does for NaN and where an `exact` element differs."""
    value = value.to(ref.dtype)
    error = ((value - ref).abs() / unit).masked_fill(exact, math.inf)
    error = torch.where(value == ref, 0.0, error.masked_fill(error.isnan(), math.inf))
    bad = error > tol
    if not bool(bad.any()):
        return ""
    first = tuple(bad.nonzero()[0].tolist())
    return (
        f"{name}{list(first)} is {float(value[first]):.6g}, reference {float(ref[first]):.6g}; "
        f"{int(bad.sum())} of {bad.numel()} off by more than {tol:.2g}, at most by {float(error.max()):.3g}"
    )


def shifted(x: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The same values, shape and dense strides, so many bytes behind a multiple of 16, or one element: at an address
    that kernels of 16 bits cannot read.
    """
    offset = offset or x.itemsize
    memory = torch.zeros(x.nbytes + offset, dtype=torch.uint8, device=x.device)
    view = memory[offset:].view(x.dtype).view(x.shape)
    assert not view.data_ptr() or view.data_ptr() % 16 == offset
    return view.copy_(x)
