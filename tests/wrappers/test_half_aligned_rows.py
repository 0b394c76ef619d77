"""Keys and values in fp8 or NVFP4 whose rows start at multiples of 8 bytes: by head dimension, strides or address."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import NotSupported, emulator
from cute_attn.emulator import Schedule
from cute_attn.request import operands
from tests.support.batch_case import UNEVEN, BatchCase, call, decode, dims, heads, make, paged, ragged
from tests.support.case import shifted
from tests.support.engine_case import BF16, E4M3, Batch, Tokens, assert_close, workspace
from tests.support.executors import Executor
from tests.support.right import assert_right

FP8 = {"kv_dtype": "float8_e4m3fn"}
HALVES = {**FP8, "cache": "halves"}

CASES = (
    # rows of 72, 104 and 40 bytes
    decode((200, 5, 0, 77), kv_dtype="float8_e5m2", dtype="bfloat16", **heads(4, 2), **dims(72)),
    ragged(*UNEVEN, **FP8, mask="custom", **heads(4, 2), **dims(72)),
    paged((9, 40), (33, 118), page_size=5, **FP8, mask="causal", kv_layout="HND", cache="one", **dims(104)),
    paged((9, 4), (33, 18), **FP8, cache="strided", **dims(40, 72)),
    ragged((9, 70), (33, 90), **HALVES, kv_layout="HND", **dims(24)),
    # rows of 136 bytes and more apart, of which 8 belong to no row
    decode((65, 12, 0), **HALVES, dtype="bfloat16", **heads(4, 2), **dims(128)),
    decode((300, 5), page_size=1, **HALVES, fixed_split_size=64, sinks=True, **heads(8, 2), **dims(64)),
    paged(*UNEVEN, **HALVES, mask="causal", pos_encoding_mode="ROPE_LLAMA", **heads(4, 2), **dims(128)),
    paged((70, 3), (90, 33), page_size=3, **HALVES, kv_layout="HND", k_scale=0.5, v_scale=2.0, **dims(256)),
    ragged(*UNEVEN, **HALVES, logits_soft_cap=30.0, mask="packed", **heads(4, 2), **dims(192, 128)),
    decode((65, 12), **HALVES, **heads(8, 2), **dims(512)),
    # NVFP4: 64 bytes of values, 72 bytes apart, as beside their block scales
    paged((30, 10), (39, 32), kv_dtype="nvfp4", cache="halves", mask="causal", **heads(4, 2), **dims(128)),
    decode((39, 32), kv_dtype="nvfp4", cache="halves", kv_layout="HND", **heads(4, 2), **dims(128)),
)


def apart(cache: torch.Tensor, start: int = 8) -> torch.Tensor:
    """The same numbers in rows that are 8 or 12 bytes longer, from byte `start` of each on; NaN between them."""
    width = cache.shape[-1]
    whole = torch.full((*cache.shape[:-1], width + 8 + start % 8), 0x7F, dtype=torch.uint8, device=cache.device)
    rows = whole.view(cache.dtype)[..., start : start + width]
    rows.view(torch.uint8).copy_(cache.view(torch.uint8))
    return rows


def tensors(kv: Any) -> list[torch.Tensor]:
    return [kv] if isinstance(kv, torch.Tensor) else [x for part in kv for x in tensors(part)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_batch(case: BatchCase, executor: Executor) -> None:
    inputs = make(case, executor.device)
    strides = [stride for x in tensors(inputs.kv) for stride in operands.outer_strides(x)]
    assert any(n % 16 for n in (case.head_dim_qk, *strides))
    assert_right(case, inputs, *call(case, inputs, backend=executor.backend))


@pytest.mark.parametrize("rows", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("layout", ["dense", "apart"])
@pytest.mark.parametrize("dim", [72, 128])
def test_single(dim: int, layout: str, rows: int, executor: Executor) -> None:
    tokens = Tokens(Batch((rows,), (700 if rows == 1 else 90,), dim=dim, kv_dtype=E4M3), executor.device)
    k, v = tokens.ragged()
    if layout == "apart":
        k, v = apart(k), apart(v)
    if rows == 1:
        out = cute_attn.single_decode_with_kv_cache(tokens.q[0], k, v, backend=executor.backend)[None]
    else:
        out = cute_attn.single_prefill_with_kv_cache(tokens.q, k, v, causal=True, backend=executor.backend)
    assert_close(out, tokens.expected(dim**-0.5, causal=rows > 1)[0])


@pytest.mark.emulator
@pytest.mark.parametrize("schedule", [Schedule("delayed", 1), Schedule("adversarial", 2)], ids=lambda x: x.kind)
@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=lambda case: case.id)
def test_schedules(case: BatchCase, schedule: Schedule) -> None:
    inputs = make(case)
    with emulator.using("sm_90a", kernels="fa2", schedule=schedule):
        out, lse = call(case, inputs, backend="emulator")
    assert_right(case, inputs, out, lse)


def planned(tokens: Tokens, backend: str) -> Any:
    made = cute_attn.BatchDecodeWithPagedKVCacheWrapper(workspace(tokens.device), backend=backend)
    options = {"q_data_type": BF16, "kv_data_type": tokens.batch.kv_dtype}
    indices = tokens.kv_indptr, tokens.kv_indices, tokens.last_page_len
    made.plan(*indices, *tokens.batch.heads, tokens.batch.dim, tokens.batch.page_size, **options)
    return made


def test_runs_of_one_plan_may_differ_in_alignment(executor: Executor) -> None:
    """A repeated run with the strides of an earlier one is not its replay where only the address of k or v differs."""
    tokens = Tokens(Batch((1, 1), (33, 70), kv_dtype=E4M3), executor.device)
    made, expected = planned(tokens, executor.backend), tokens.expected(128**-0.5)[0]
    k, v = tokens.caches()
    k_8, v_8 = shifted(k, 8), shifted(v, 8)
    for caches in ((k, v), (k_8, v), (k, v), (k, v_8), (apart(k), apart(v)), (k, v), (k_8, v)):
        for _ in range(2):
            assert_close(made.run(tokens.q, caches), expected)


@pytest.mark.emulator
def test_aligned_rows_keep_their_kernel() -> None:
    tokens = Tokens(Batch((1, 1), (33, 70), kv_dtype=E4M3), "cpu")
    with emulator.using("sm_90a", kernels="fa2") as emulation:
        made = planned(tokens, "emulator")
        for caches in (tokens.caches(), tuple(map(apart, tokens.caches())), tokens.caches()):
            made.run(tokens.q, caches)
    copied = [record.spec["kv_copy_bytes"] for record in emulation.records if record.spec["kernel"] == "fa2"]
    assert copied == [16, 8, 16]


@pytest.mark.emulator
@pytest.mark.parametrize("kernels", ["fa3", "xqa"])
def test_other_kernels_refuse(kernels: str) -> None:
    tokens = Tokens(Batch((1, 1), (33, 70), kv_dtype=E4M3), "cpu")
    with emulator.using("sm_90a", kernels=kernels):
        made = planned(tokens, "emulator")
        with pytest.raises(NotSupported, match="refuses k and v of an fp8 dtype or NVFP4 with rows that start at"):
            made.run(tokens.q, tuple(map(apart, tokens.caches())))
        assert_close(made.run(tokens.q, tokens.caches()), tokens.expected(128**-0.5)[0])
