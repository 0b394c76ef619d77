"""What keys that a row does not see may hold: anything in K, finite numbers in V; other requests may hold anything. All
tests of batches have NaN behind the tokens of a request: `batch_case`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_attn import single_prefill_with_kv_cache
from cute_attn.errors import ArgumentError
from tests.gpu import marks
from tests.support.batch_case import E4M3, BatchCase, call, decode, heads, make, paged, ragged
from tests.support.dense_attention import random
from tests.support.executors import REFERENCE, Executor
from tests.support.formula import visible

SPECIAL = (torch.nan, torch.inf, -torch.inf)
BY_KV_HEAD = torch.tensor([[torch.nan, torch.inf], [-torch.inf, torch.nan]])  # no CTA and no row reads two of them
SIZES: dict[str, Any] = {**heads(4, 2), "dtype": "bfloat16"}
COLUMN = 7

Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v of all tokens


def executors(case: BatchCase) -> list[Any]:
    """Returns the reference, and the emulator and the GPU with the kernels of each family."""
    found = [pytest.param(case, REFERENCE, id=f"{case.id}-reference")]
    for family in ("fa2", "xqa") if "decode" in case.kind else ("fa2", "fa3", "fa4"):
        emulated = Executor(f"emulator-{family}", "emulator", "cpu", "sm_100a" if family == "fa4" else "sm_90a", family)
        found.append(pytest.param(case, emulated, id=f"{case.id}-{emulated.name}", marks=pytest.mark.emulator))
        on_gpu = Executor(f"cuda-{family}", family, "cuda")
        found.append(pytest.param(case, on_gpu, id=f"{case.id}-{on_gpu.name}", marks=marks.OF[family]))
    return found


def everywhere(*cases: BatchCase) -> Any:
    return pytest.mark.parametrize(("case", "on"), [param for case in cases for param in executors(case)])


def numbers_of(case: BatchCase) -> Numbers:
    q = random(case.rows, 4, 64, dtype=torch.float32, seed=1)
    k, v = random(2, sum(case.kv_lens), 2, 64, dtype=torch.float32, seed=2)
    return q, k, v


def solved(case: BatchCase, on: Executor, numbers: Numbers, **changes: Any) -> torch.Tensor:
    """Returns out and, in the last column, lse. `changes`: of the inputs."""
    inputs = dataclasses.replace(make(case, on.device, numbers), **changes)
    with on.active():
        out, lse = call(case, inputs, backend=on.backend)
    assert lse is not None
    return torch.cat((out.float(), lse[..., None]), -1).cpu().view(case.rows, 4, -1)


def single(qo_len: int, kv_len: int, **options: Any) -> BatchCase:
    kind = "single_decode" if qo_len == 1 else "single_prefill"
    return BatchCase(kind, (qo_len,), (kv_len,), **SIZES, **options)


HIDDEN = {  # keys of the last request, from some or all of its rows
    single(70, 140, mask="causal"): slice(100, 140),
    single(70, 140, mask="causal", seed=1): slice(139, 140),
    single(70, 140, window_left=3): slice(40, 41),
    single(70, 140, mask="custom"): slice(70, 75),  # masks hide the middle third
    single(1, 700, window_left=50): slice(0, 649),
    decode((37, 16, 130), window_left=20, **SIZES): slice(0, 109),
    decode((37, 16, 130), window_left=20, kv_dtype=E4M3, **SIZES): slice(0, 109),
}


@everywhere(*HIDDEN)
def test_hidden_keys(case: BatchCase, on: Executor) -> None:
    """K is not read. A V that is not finite stays within its kv head and column, and spoils them on the reference."""
    q, k, v = numbers_of(case)
    clean, last = solved(case, on, (q, k, v)), sum(case.kv_lens[:-1])
    keys = range(last, last + case.kv_lens[-1])[HIDDEN[case]]
    keep = make(case, numbers=(q, k, v)).requests[-1].keep
    of_last = visible(case, keep, case.qo_lens[-1], case.kv_lens[-1])[:, HIDDEN[case]]
    unseen = torch.ones(case.rows, dtype=torch.bool)
    unseen[case.rows - case.qo_lens[-1] :] = ~of_last.any(1)
    assert unseen[-case.qo_lens[-1] :].any()
    for specials in BY_KV_HEAD:
        hidden = k.clone()
        hidden[keys] = specials[:, None]
        assert torch.equal(solved(case, on, (q, hidden, v))[unseen], clean[unseen]), specials
    elsewhere = torch.ones_like(clean, dtype=torch.bool)
    elsewhere[-case.qo_lens[-1] :, 2:, COLUMN] = False
    for special in SPECIAL if case.kv_dtype is None else SPECIAL[:1]:  # fp8 has no infinity
        spoilt = v.clone()
        spoilt[keys, 1, COLUMN] = special
        out = solved(case, on, (q, k, spoilt))
        assert torch.equal(out[elsewhere], clean[elsewhere])
        if on is REFERENCE:
            assert out[-case.qo_lens[-1] :, 2:, COLUMN][unseen[-case.qo_lens[-1] :]].isnan().all()


@everywhere(
    paged((5, 4, 11), (37, 16, 130), mask="causal", **SIZES),
    paged((5, 4, 11), (37, 16, 130), mask="causal", kv_dtype=E4M3, **SIZES),
    paged((5, 4, 11), (37, 16, 130), mask="causal", fixed_split_size=48, **SIZES),  # the last ends within a tile
    ragged((13, 7, 20), (37, 53, 60), mask="causal", **SIZES),
    decode((37, 16, 130), **SIZES),
)
def test_other_requests_may_hold_anything(case: BatchCase, on: Executor) -> None:
    """Also those in the same query tile."""
    numbers = numbers_of(case)
    clean = solved(case, on, numbers)
    rows, keys = (range(lens[0], lens[0] + lens[1]) for lens in (case.qo_lens, case.kv_lens))
    for x, of_other in zip(numbers, (rows, keys, keys), strict=True):
        x[of_other] = torch.tensor(SPECIAL).repeat(22)[: x.shape[-1]]
    out = solved(case, on, numbers)
    for others in (slice(0, rows.start), slice(rows.stop, None)):
        assert torch.equal(out[others], clean[others])
    assert out[rows].isnan().any()


# ---- sinks


@everywhere(single(70, 140, mask="causal"), single(1, 700))
def test_a_sink_of_minus_infinity_is_none(case: BatchCase, on: Executor) -> None:
    numbers, near = numbers_of(case), 1e-5 if case.kind == "single_prefill" else 1e-2
    none = torch.full((4,), -torch.inf, device=on.device)
    clean, out = solved(case, on, numbers), solved(case, on, numbers, sinks=none)
    torch.testing.assert_close(out, clean, rtol=near, atol=near)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_other_sinks_without_a_finite_weight_are_refused_where_they_can_be_read(value: float) -> None:
    q, k, v = numbers_of(single(5, 9))
    with pytest.raises(ArgumentError, match=r"sinks must be finite or -inf.*got (inf|nan) for head 2"):
        single_prefill_with_kv_cache(q.half(), k.half(), v.half(), sinks=torch.tensor([0.0, 1.0, value, 0.0]))
