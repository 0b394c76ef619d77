"""Calls under torch's default device and dtype: neither is the library's business.

The default device is "meta", which stands for a GPU: what is made there by mistake has no values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.integrations import aten_flash, workspaces
from cute_attn.integrations.sglang import metadata
from cute_attn.runtime import staging
from tests.support.batch_case import call, decode, heads, make, paged, ragged
from tests.support.dense_attention import assert_near, attention, random
from tests.support.executors import REFERENCE, Executor, emulated
from tests.support.right import assert_right

EXECUTORS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(emulated("sm_90a"), id="fa2", marks=pytest.mark.emulator),
    pytest.param(emulated("sm_90a", "fa3"), id="fa3", marks=pytest.mark.emulator),
]
ANY_KERNELS = pytest.param(emulated("sm_90a", "auto"), id="emulator", marks=pytest.mark.emulator)
CASES = [
    paged((5, 0, 7), (20, 3, 13), page_size=4, mask="custom", **heads(4, 2)),
    paged((5, 7), (20, 13), page_size=16, mask="causal", **heads(4, 2)),
    ragged((5, 0, 7), (20, 3, 13), mask="packed", **heads(4, 2)),
    decode((20, 3, 13), page_size=4, k_scale=0.5, **heads(4, 2)),
]
IDS = ["paged custom", "paged", "ragged", "decode"]
DTYPES = [torch.float64, torch.bfloat16]


@contextlib.contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """Set what torch makes tensors of and where, as model code does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_batches(case: Any, executor: Executor, dtype: torch.dtype) -> None:
    inputs = make(case)
    with executor.active(), defaults(dtype):
        out, lse = call(case, inputs, backend=executor.backend)
    assert_right(case, inputs, out, lse)


def block_sparse(backend: str) -> Any:
    wrapper = cute_attn.BlockSparseAttentionWrapper(WORKSPACE, backend)
    wrapper.plan(INDPTR, BLOCK, 6, 32, 6, 16, 4, 2, 64)
    return wrapper.run(Q, K, V, return_lse=True)


def variable_block_sparse(backend: str) -> Any:
    wrapper = cute_attn.VariableBlockSparseAttentionWrapper(WORKSPACE, backend)
    wrapper.plan(MAP, ROWS, COLUMNS, 4, 2, 64)
    out, lse = wrapper.run(*(x.transpose(0, 1) for x in (Q, K, V)), return_lse=True)
    return out.transpose(0, 1), lse.t()


def single(backend: str) -> Any:
    return cute_attn.single_prefill_with_kv_cache(Q, K[16:], V[16:], return_lse=True, backend=backend)


def batch_attention(backend: str) -> Any:
    wrapper = cute_attn.BatchAttention("NHD", device="cpu")
    wrapper._backend = backend
    wrapper.plan(ROW_BOUNDS, INDPTR, BLOCK, LENGTH, 4, 2, 64, 64, 16, q_data_type=Q.dtype, kv_data_type=Q.dtype)
    return wrapper.run(Q, (K.view(2, 16, 2, 64), V.view(2, 16, 2, 64)))


def decode_call(backend: str) -> Any:
    cache = (K.view(2, 16, 2, 64), V.view(2, 16, 2, 64))
    out = cute_attn.xqa_batch_decode_with_kv_cache(
        *(Q[:1], cache, WORKSPACE.zero_(), BLOCK[None], LENGTH, 16, 0.125), backend=backend
    )
    return out, None


def context_call(backend: str) -> Any:
    cache = (K.view(2, 16, 2, 64).transpose(1, 2), V.view(2, 16, 2, 64).transpose(1, 2))
    cache = tuple(x.contiguous() for x in cache)
    out = cute_attn.trtllm_batch_context_with_kv_cache(
        *(Q[:1], cache, WORKSPACE, BLOCK[None], LENGTH, 1, 16, 0.125, 1.0, 1, ONE_ROW, KEY_BOUNDS)
    )
    return out, None


WORKSPACE = torch.zeros(16 << 20, dtype=torch.uint8)
Q, K, V = (random(n, h, 64, seed=h + n) for n, h in ((6, 4), (32, 2), (32, 2)))
INDPTR, BLOCK, LENGTH, ROW_BOUNDS, ONE_ROW, KEY_BOUNDS = (
    torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [16], [0, 6], [0, 1], [0, 16])
)
MAP = torch.tensor([[[False, True]], [[False, True]]])
ROWS, COLUMNS = torch.full((2, 1), 6, dtype=torch.int32), torch.full((2, 2), 16, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("executor", [EXECUTORS[0], ANY_KERNELS])
@pytest.mark.parametrize(
    "run", [block_sparse, variable_block_sparse, single, batch_attention, decode_call, context_call]
)
def test_the_last_16_keys(run: Callable[[str], Any], executor: Executor, dtype: torch.dtype) -> None:
    """Every call sees keys 16 to 31."""
    with executor.active(), defaults(dtype):
        out, lse = run(executor.backend)
    expected = attention(Q[: len(out)], K[16:], V[16:], torch.ones(len(out), 16, dtype=torch.bool))
    assert_near(out, lse, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_sdpa(dtype: torch.dtype) -> None:
    for kept in (aten_flash._uniform_lengths, aten_flash._page_per_request, workspaces._of, workspaces.too_small):
        kept.cache_clear()
    q, k, v = (torch.stack((x, x)).transpose(1, 2) for x in (Q, K, V))
    with defaults(dtype):
        out = aten_flash.scaled_dot_product_flash_attention(q, k, v)[0]
    expected = attention(Q, K, V, torch.ones(6, 32, dtype=torch.bool))
    for request in out:
        assert_near(request.transpose(0, 1), None, expected)


def test_lengths_of_sglang() -> None:
    with defaults(torch.float64):
        lengths = metadata.lengths([1, 2], [3, 4], 4)
    assert [x.tolist() for x in lengths[:3]] == [[0, 1, 3], [0, 1, 2], [3, 4]]


def test_pinned_memory_is_asked_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch pins nothing else."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(staging.torch, "empty", lambda size, **options: asked.update(options))
    staging.CudaCopies(torch.device("cuda", 0)).buffer(8)
    assert asked == {"dtype": torch.int32, "device": "cpu", "pin_memory": True}
