"""Attention with q, k and v in fp8: cases. The bound on the error that holds for every element: `formula.check`."""

from __future__ import annotations

from typing import Any

from tests.support.batch_case import E4M3, E5M2
from tests.support.case import BatchCase
from tests.support.matrix import ALIBI, CAUSAL, CUSTOM, prefill

FP8: dict[str, Any] = {"dtype": E4M3, "o_dtype": "bfloat16", "head_scales": "heads"}
NUMBERS: dict[str, Any] = {"head_scales": "", "q_scale": 0.7, "k_scale": 1.3, "v_scale": 0.9}
PLAIN: dict[str, Any] = {"head_scales": ""}
SIGNED: dict[str, Any] = {"head_scales": "signed"}


def fp8(
    qo_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    heads: tuple[int, int] = (2, 1),
    page_size: int = 0,
    head_dim: int = 128,
    **rest: Any,
) -> BatchCase:
    """`page_size` 0: ragged keys."""
    kind, dims = "paged" if page_size else "ragged", (head_dim, head_dim)
    return BatchCase(kind, qo_lens, kv_lens, *heads, *dims, page_size=page_size or 1, **{**FP8, **rest})


def single(qo_len: int, kv_len: int, heads: tuple[int, int] = (2, 1), head_dim: int = 128, **rest: Any) -> BatchCase:
    """One dense request."""
    return prefill(qo_len, kv_len, heads, head_dim, **{**FP8, **rest})


SMALL: tuple[BatchCase, ...] = (
    single(1, 1, **PLAIN),
    single(65, 129, **CAUSAL),
    single(130, 300, **SIGNED, dtype=E5M2),
    single(300, 100, (2, 2), **CAUSAL, o_dtype="float16"),
    single(200, 500, **CAUSAL, window_left=40, o_dtype="float32"),
    single(70, 250, (4, 2), **CUSTOM, **PLAIN),
    single(100, 200, (4, 2), sm_scale=-0.1, **PLAIN),
    single(20, 200, sm_scale=0.0, **PLAIN, v_mean=1.0),
    fp8((70, 0, 37, 1), (300, 20, 64, 0), **CAUSAL, **NUMBERS),
    fp8((70, 5), (150, 333), (4, 2), window_left=30, **SIGNED, sinks=True),
    fp8((150, 0, 3, 1), (300, 20, 64, 0), (4, 1), 16, **CAUSAL),
    fp8((70, 5), (150, 33), page_size=5, **PLAIN, dtype=E5M2),
    single(70, 250, head_dim=80, **CAUSAL),
    fp8((70, 5), (150, 33), (2, 2), page_size=16, head_dim=112, o_dtype="float32"),
    fp8((70,), (400,), page_size=64, **SIGNED, v_mean=1.0, **CAUSAL),
    single(70, 400, spike=2.0, **PLAIN),
    fp8((70,), (400,), page_size=16, spike=28.0, **PLAIN),
)
# Other head dimensions, modified scores
VARIED: tuple[BatchCase, ...] = (
    single(130, 300, (4, 2), head_dim=64, **CAUSAL, **SIGNED),
    fp8((70, 0, 37, 1), (300, 20, 64, 0), head_dim=64, **CAUSAL, sinks=True),
    fp8((70, 5), (150, 333), (4, 2), 16, head_dim=64, window_left=30, o_dtype="float32"),
    single(70, 400, (1, 1), head_dim=64, spike=28.0, **PLAIN, dtype=E5M2),
    single(130, 300, (4, 2), head_dim=256, **CAUSAL, **SIGNED),
    fp8((70, 0, 37, 1), (300, 20, 64, 0), head_dim=256, **CAUSAL, sinks=True),
    fp8((70, 5), (150, 333), (4, 2), 16, head_dim=256, window_left=30, o_dtype="float32"),
    single(70, 400, (1, 1), head_dim=256, spike=28.0, **PLAIN, dtype=E5M2),
    single(90, 300, (4, 2), **CAUSAL, **SIGNED, logits_soft_cap=20.0, **ALIBI),
    fp8((70, 0, 37, 1), (300, 20, 64, 0), **CAUSAL, **NUMBERS, logits_soft_cap=5.0),
    fp8((70, 5), (150, 333), (4, 1), 16, **ALIBI, sinks=True, sm_scale=-0.1),
    single(70, 250, (4, 2), **CUSTOM, **PLAIN, logits_soft_cap=30.0, **ALIBI),
    single(70, 400, (1, 1), spike=28.0, **PLAIN, **ALIBI),
    fp8((70, 5), (150, 333), (4, 2), 64, head_dim=64, logits_soft_cap=20.0, window_left=100),
    fp8((70, 5), (150, 333), (4, 2), head_dim=256, logits_soft_cap=20.0, **ALIBI, **CAUSAL, **SIGNED),
)
LONG: tuple[BatchCase, ...] = (
    single(20, 3000, (1, 1), v_mean=2.0, **PLAIN),
    single(20, 3000, (1, 1), head_dim=256, v_mean=2.0, **PLAIN),
    # A key 10 nats above thousands, first or halfway
    single(3, 8193, (1, 1), sm_scale=0.02, spike=4.9, spike_key=-1, v_mean=1.0, **PLAIN),
    single(3, 5000, (1, 1), sm_scale=0.02, spike=4.9, spike_key=3000, v_mean=1.0, **PLAIN),
)
CUT: tuple[BatchCase, ...] = (
    single(3, 900, (8, 2), **CAUSAL, **SIGNED),
    fp8((5,), (1100,), page_size=16, **CAUSAL),
    single(20, 1300, (1, 1), head_dim=256, **PLAIN, v_mean=2.0),
)
LARGE: tuple[BatchCase, ...] = (
    single(4096, 4096, (16, 16)),
    single(2048, 9000, (8, 1), **CAUSAL, **SIGNED),
    single(512, 65536, (2, 2), **PLAIN),
    single(512, 65536, (2, 2), **PLAIN, v_mean=2.0),
    *(single(1000, 5000, (4, 4), spike=spike) for spike in (1.0, 3.0, 8.0, 28.0, 100.0)),
    fp8((1000, 700), (5000, 3000), (4, 4), spike=28.0, **CAUSAL, sm_scale=1.0),
    fp8((300, 1, 77, 0), (500, 40, 1000, 9), (8, 2), **CAUSAL),
    fp8((129, 5000), (4000, 5001), (8, 4), 16, **CAUSAL, **NUMBERS),
    fp8((300, 1, 77), (500, 40, 1000), (4, 4), 1, **SIGNED),
    fp8((400, 500), (1500, 900), (4, 4), 64, **CAUSAL, window_left=200, dtype=E5M2),
    fp8((3, 2), (9000, 100), (8, 2), 16, **CAUSAL),
    single(700, 900, (12, 4), **CUSTOM),
    *(
        case
        for head_dim in (64, 256)
        for case in (
            single(4096, 4096, (8, 8), head_dim=head_dim),
            single(512, 65536, (2, 2), head_dim=head_dim, **PLAIN, v_mean=2.0),
            fp8((1000, 700), (5000, 3000), (4, 4), head_dim=head_dim, spike=28.0, **CAUSAL, sm_scale=1.0),
            fp8((129, 5000), (4000, 5001), (8, 4), 16, head_dim=head_dim, **CAUSAL, **SIGNED),
            fp8((3, 2), (9000, 100), (8, 2), 1, head_dim=head_dim, **CAUSAL, logits_soft_cap=30.0),
            single(700, 900, (12, 4), head_dim=head_dim, **CUSTOM, **ALIBI),
        )
    ),
    fp8((1000, 700), (5000, 3000), (4, 4), **CAUSAL, **SIGNED, logits_soft_cap=30.0),
    fp8((400, 500), (1500, 900), (4, 4), 64, **CAUSAL, window_left=200, **ALIBI),
)
