"""Attention with q, k and v in fp8: cases, their calls, and a bound on the error that holds for every element.

Probabilities are rounded to e4m3: by at most 1/16 of each, so o by at most 1/16 of what absolute values add up to.
e4m3 runs out of exponents: a key is off by 2^-16 of what all add up to at most, one of those that follow closely on the
highest score by 2^-13.
Values of one sign average that out, and show how much tensor cores drop of sums in 14 bits.
Scores are sums of fp8 products in the few bits that Hopper keeps, and so is the lse: of 1000 it was off by
1.7 on an H200.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cute_attn.problem import Features
from cute_attn.reference import attention as reference
from tests.support import batch_case
from tests.support.batch_case import BatchCase

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CLOSE = 1152  # keys


@dataclass(frozen=True)
class Fp8Case:
    """`page_size` 0: ragged keys, or with `single` one dense request. `scales`: "none", "numbers" (of a batch), "heads"
    or "signed" (heads, some below 0). `mean`: of v.
    """

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (2, 1)
    page_size: int = 0
    single: bool = False
    head_dim: int = 128
    causal: bool = False
    window_left: int = -1
    custom_mask: bool = False
    scales: str = "heads"
    dtype: torch.dtype = E4M3
    o_dtype: torch.dtype = torch.bfloat16
    sm_scale: float = 128**-0.5
    soft_cap: float = 0.0
    alibi: bool = False
    mean: float = 0.0
    sinks: bool = False
    spike: float = 0.0  # how far one key stands out for the first query
    spike_key: int = 5  # the kernel comes to the last keys first
    fixed_split_size: int | None = None  # of a batch: tokens, or pages
    seed: int = 0

    @property
    def id(self) -> str:
        own = ("scales", "mean", "sinks", "spike", "spike_key")
        shown = (f"{name}={x}" for name in own if (x := getattr(self, name)) != getattr(Fp8Case, name))
        return "-".join([self.batch.id, *shown])

    def features(self, device: torch.device) -> Features:
        return batch_case.features(self.batch, device)

    @property
    def batch(self) -> BatchCase:
        """Where its tokens lie, and the options of its plan."""
        q_dtype, o_dtype = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.o_dtype))
        dims = self.head_dim, self.head_dim
        kind = "single_prefill" if self.single else "paged" if self.page_size else "ragged"
        return BatchCase(
            *(kind, self.qo_lens, self.kv_lens, *self.heads, *dims),
            page_size=self.page_size or 1,
            dtype=q_dtype,
            o_dtype=o_dtype,
            mask="custom" if self.custom_mask else "causal" if self.causal else "none",
            window_left=self.window_left,
            logits_soft_cap=self.soft_cap,
            pos_encoding_mode="ALIBI" if self.alibi else "NONE",
            sm_scale=self.sm_scale,
            fixed_split_size=self.fixed_split_size,
        )


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor  # tokens of all requests
    v: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q's, k's, v's, a number a head
    keep: torch.Tensor | None
    sinks: torch.Tensor | None


def make(case: Fp8Case, device: torch.device | str) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    (num_qo_heads, num_kv_heads), tokens = case.heads, sum(case.kv_lens)

    def normal(rows: int, num_heads: int, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(rows, num_heads, case.head_dim, generator=generator) + mean).to(case.dtype).to(device)

    def scale(heads: int) -> torch.Tensor:
        if case.scales == "none":
            return torch.ones(heads)
        numbers = torch.rand(1 if case.scales == "numbers" else heads, generator=generator) + 0.5
        if case.scales == "signed":
            numbers[::2] *= -1
        return numbers.expand(heads).clone()

    q, k = normal(sum(case.qo_lens), num_qo_heads), normal(tokens, num_kv_heads)
    v = normal(tokens, num_kv_heads, case.mean)
    if case.spike:
        k[case.spike_key] = (q[0, :1].float().sign() * case.spike).to(case.dtype)
    scale_q, scale_k, scale_v = (scale(heads).to(device) for heads in (num_qo_heads, num_kv_heads, num_kv_heads))
    keep = torch.rand(case.qo_lens[0], tokens, generator=generator) < 0.6 if case.custom_mask else None
    sinks = torch.randn(num_qo_heads, generator=generator).to(device) if case.sinks else None
    return Inputs(q, k, v, (scale_q, scale_k, scale_v), None if keep is None else keep.to(device), sinks)


def call(case: Fp8Case, inputs: Inputs, backend: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse)."""
    numbers = tuple(x.cpu().float() for x in (inputs.q, inputs.k, inputs.v))
    placed = batch_case.make(case.batch, inputs.q.device, numbers)
    masks = {} if inputs.keep is None else {"custom_mask": inputs.keep}
    placed = dataclasses.replace(placed, sinks=inputs.sinks, masks=masks)
    if case.scales == "numbers":
        named = zip(("q_scale", "k_scale", "v_scale"), (float(x[0]) for x in inputs.scales), strict=True)
        return batch_case.call(case.batch, placed, backend=backend, **dict(named))
    per_head = inputs.scales if case.scales in ("heads", "signed") else ()
    return batch_case.call(case.batch, placed, backend=backend, head_scales=per_head)


def requests(case: Fp8Case) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of every request."""
    row = key = 0
    for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True):
        yield slice(row, row + qo_len), slice(key, key + kv_len)
        row, key = row + qo_len, key + kv_len


def check(case: Fp8Case, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Every element of o within its bound, the lse, and nothing where a row sees nothing."""
    assert out.dtype == case.o_dtype
    group = case.heads[0] // case.heads[1]
    scale_q, scale_k, scale_v = (x.double() for x in inputs.scales)
    slopes = reference.alibi_slopes(case.heads[0], inputs.q.device) if case.alibi else None
    logits = reference.Logits(case.sm_scale * scale_q * scale_k.repeat_interleave(group), case.soft_cap, slopes)
    mask = reference.Mask(case.causal, case.window_left, inputs.keep)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[case.o_dtype]
    for rows, keys in requests(case):
        q, k, v = inputs.q[rows], inputs.k[keys], inputs.v[keys].double()
        common = {"logits": logits, "mask": mask, "sinks": inputs.sinks}
        o, expected = reference.attention(q, k, v, v_scale=scale_v.repeat_interleave(group), **common)
        size, _ = reference.attention(q, k, v.abs(), v_scale=scale_v.abs().repeat_interleave(group), **common)
        largest = v.abs().sort(0, descending=True).values
        lost = 2**-13 * largest[:CLOSE].sum(0) + 2**-16 * largest.sum(0)
        lost = lost.mul(scale_v.abs()[:, None]).repeat_interleave(group, 0)
        bound = (size / 16 + lost) * 1.02 + rounding * (o.abs() + size / 16) + 1e-6
        error = (out[rows].double() - o).abs()
        worst = (error / bound).max().item() if error.numel() else 0.0
        assert worst <= 1, f"{case.id}: an element is off by {worst:.3g} times what rounding explains"
        assert bool(((lse[rows] == -math.inf) == (expected == -math.inf)).all())
        seen = expected > -math.inf
        torch.testing.assert_close(lse[rows].double()[seen], expected[seen], rtol=2**-8, atol=4e-3)
        if o.any():
            relative = ((out[rows].double() - o).norm() / o.norm()).item()
            limit = 2**-6 if case.mean >= 2 else 0.04
            assert relative < limit, f"{case.id}: relative error {relative:.3g}"


def solve(case: Fp8Case, backend: str, device: torch.device | str = "cpu") -> None:
    """Make a case, call it and compare."""
    inputs = make(case, device)
    check(case, inputs, *call(case, inputs, backend))


SMALL: tuple[Fp8Case, ...] = (
    Fp8Case((1,), (1,), single=True, scales="none"),
    Fp8Case((65,), (129,), single=True, causal=True),
    Fp8Case((130,), (300,), single=True, scales="signed", dtype=E5M2),
    Fp8Case((300,), (100,), (2, 2), single=True, causal=True, o_dtype=torch.float16),
    Fp8Case((200,), (500,), single=True, causal=True, window_left=40, o_dtype=torch.float32),
    Fp8Case((70,), (250,), (4, 2), single=True, custom_mask=True, scales="none"),
    Fp8Case((100,), (200,), (4, 2), single=True, sm_scale=-0.1, scales="none"),
    Fp8Case((20,), (200,), single=True, sm_scale=0.0, scales="none", mean=1.0),
    Fp8Case((70, 0, 37, 1), (300, 20, 64, 0), causal=True, scales="numbers"),
    Fp8Case((70, 5), (150, 333), (4, 2), window_left=30, scales="signed", sinks=True),
    Fp8Case((150, 0, 3, 1), (300, 20, 64, 0), (4, 1), 16, causal=True),
    Fp8Case((70, 5), (150, 33), page_size=5, scales="none", dtype=E5M2),
    Fp8Case((70,), (250,), single=True, head_dim=80, causal=True),
    Fp8Case((70, 5), (150, 33), (2, 2), page_size=16, head_dim=112, o_dtype=torch.float32),
    Fp8Case((70,), (400,), page_size=64, scales="signed", mean=1.0, causal=True),
    Fp8Case((70,), (400,), single=True, spike=2.0, scales="none"),
    Fp8Case((70,), (400,), page_size=16, spike=28.0, scales="none"),
)
# Other head dimensions, modified scores
VARIED: tuple[Fp8Case, ...] = (
    Fp8Case((130,), (300,), (4, 2), single=True, head_dim=64, causal=True, scales="signed"),
    Fp8Case((70, 0, 37, 1), (300, 20, 64, 0), head_dim=64, causal=True, sinks=True),
    Fp8Case((70, 5), (150, 333), (4, 2), 16, head_dim=64, window_left=30, o_dtype=torch.float32),
    Fp8Case((70,), (400,), (1, 1), single=True, head_dim=64, spike=28.0, scales="none", dtype=E5M2),
    Fp8Case((130,), (300,), (4, 2), single=True, head_dim=256, causal=True, scales="signed"),
    Fp8Case((70, 0, 37, 1), (300, 20, 64, 0), head_dim=256, causal=True, sinks=True),
    Fp8Case((70, 5), (150, 333), (4, 2), 16, head_dim=256, window_left=30, o_dtype=torch.float32),
    Fp8Case((70,), (400,), (1, 1), single=True, head_dim=256, spike=28.0, scales="none", dtype=E5M2),
    Fp8Case((90,), (300,), (4, 2), single=True, causal=True, scales="signed", soft_cap=20.0, alibi=True),
    Fp8Case((70, 0, 37, 1), (300, 20, 64, 0), causal=True, scales="numbers", soft_cap=5.0),
    Fp8Case((70, 5), (150, 333), (4, 1), 16, alibi=True, sinks=True, sm_scale=-0.1),
    Fp8Case((70,), (250,), (4, 2), single=True, custom_mask=True, scales="none", soft_cap=30.0, alibi=True),
    Fp8Case((70,), (400,), (1, 1), single=True, spike=28.0, scales="none", alibi=True),
    Fp8Case((70, 5), (150, 333), (4, 2), 16, head_dim=64, soft_cap=20.0, window_left=100),
    Fp8Case((70, 5), (150, 333), (4, 2), head_dim=256, soft_cap=20.0, alibi=True, causal=True, scales="signed"),
)
LONG: tuple[Fp8Case, ...] = (
    Fp8Case((20,), (3000,), (1, 1), single=True, mean=2.0, scales="none"),
    Fp8Case((20,), (3000,), (1, 1), single=True, head_dim=256, mean=2.0, scales="none"),
    # A key 10 nats above thousands, first or halfway
    Fp8Case((3,), (8193,), (1, 1), single=True, sm_scale=0.02, spike=4.9, spike_key=-1, mean=1.0, scales="none"),
    Fp8Case((3,), (5000,), (1, 1), single=True, sm_scale=0.02, spike=4.9, spike_key=3000, mean=1.0, scales="none"),
)
CUT: tuple[Fp8Case, ...] = (
    Fp8Case((3,), (900,), (8, 2), single=True, causal=True, scales="signed"),
    Fp8Case((5,), (1100,), page_size=16, causal=True),
    Fp8Case((20,), (1300,), (1, 1), single=True, head_dim=256, scales="none", mean=2.0),
)
LARGE: tuple[Fp8Case, ...] = (
    Fp8Case((4096,), (4096,), (16, 16), single=True),
    Fp8Case((2048,), (9000,), (8, 1), single=True, causal=True, scales="signed"),
    Fp8Case((512,), (65536,), (2, 2), single=True, scales="none"),
    Fp8Case((512,), (65536,), (2, 2), single=True, scales="none", mean=2.0),
    *(Fp8Case((1000,), (5000,), (4, 4), single=True, spike=spike) for spike in (1.0, 3.0, 8.0, 28.0, 100.0)),
    Fp8Case((1000, 700), (5000, 3000), (4, 4), spike=28.0, causal=True, sm_scale=1.0),
    Fp8Case((300, 1, 77, 0), (500, 40, 1000, 9), (8, 2), causal=True),
    Fp8Case((129, 5000), (4000, 5001), (8, 4), 16, causal=True, scales="numbers"),
    Fp8Case((300, 1, 77), (500, 40, 1000), (4, 4), 1, scales="signed"),
    Fp8Case((400, 500), (1500, 900), (4, 4), 64, causal=True, window_left=200, dtype=E5M2),
    Fp8Case((3, 2), (9000, 100), (8, 2), 16, causal=True),
    Fp8Case((700,), (900,), (12, 4), single=True, custom_mask=True),
    *(
        case
        for head_dim in (64, 256)
        for case in (
            Fp8Case((4096,), (4096,), (8, 8), single=True, head_dim=head_dim),
            Fp8Case((512,), (65536,), (2, 2), single=True, head_dim=head_dim, scales="none", mean=2.0),
            Fp8Case((1000, 700), (5000, 3000), (4, 4), head_dim=head_dim, spike=28.0, causal=True, sm_scale=1.0),
            Fp8Case((129, 5000), (4000, 5001), (8, 4), 16, head_dim=head_dim, causal=True, scales="signed"),
            Fp8Case((3, 2), (9000, 100), (8, 2), 1, head_dim=head_dim, causal=True, soft_cap=30.0),
            Fp8Case((700,), (900,), (12, 4), single=True, head_dim=head_dim, custom_mask=True, alibi=True),
        )
    ),
    Fp8Case((1000, 700), (5000, 3000), (4, 4), causal=True, scales="signed", soft_cap=30.0),
    Fp8Case((400, 500), (1500, 900), (4, 4), 64, causal=True, window_left=200, alibi=True),
)
