"""Block-sparse attention against attention under the dense mask, by its formula."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import cute_attn
from cute_attn import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from tests.support.dense_attention import EVERYWHERE, assert_near, attention, random
from tests.support.executors import Executor

DIM = 64


class Blocks:
    """A random BSR mask of M x N in blocks of R x C, with an element mask. The second row of blocks is empty."""

    def __init__(self, m: int, n: int, r: int, c: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size = m, n, r, c
        rows = -(-m // r)
        listed = torch.rand(rows, n // c, generator=generator) < 0.4
        listed[1:2] = False
        self.indptr = torch.tensor([0, *listed.sum(1).tolist()]).cumsum(0).int()
        self.indices = torch.cat([row.nonzero().flatten().flip(0) for row in listed]).int()  # in any order
        self.mask = torch.rand(int(self.indptr[-1]), r, c, generator=generator) < 0.6
        self.listed = listed

    def keep(self, mask: bool = False, causal: bool = False) -> torch.Tensor:
        m, n, r, c = self.size
        rows = torch.arange(len(self.listed)).repeat_interleave(self.indptr.diff())
        blocks = torch.zeros(*self.listed.shape, r, c, dtype=torch.bool)
        blocks[rows, self.indices.long()] = self.mask if mask else torch.tensor(True)
        dense = blocks.transpose(1, 2).flatten(2).flatten(0, 1)[:m]
        return dense.tril(n - m) if causal else dense


def operands(m: int, n: int, heads: tuple[int, int], device: str, dtype: torch.dtype = torch.float16) -> Any:
    q = random(m, heads[0], DIM, dtype=dtype, device=device, seed=1)
    return q, *(random(n, heads[1], DIM, dtype=dtype, device=device, seed=seed) for seed in (2, 3))


def made(executor: Executor) -> BlockSparseAttentionWrapper:
    workspace = torch.zeros(8 << 20, dtype=torch.uint8, device=executor.device)
    return BlockSparseAttentionWrapper(workspace, executor.backend)


SIZES = [(50, 64, 16, 16), (40, 60, 7, 4), (33, 32, 1, 1), (70, 128, 64, 64)]


@EVERYWHERE
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_blocks(size: tuple[int, int, int, int], masked: bool, executor: Executor) -> None:
    blocks, heads = Blocks(*size), (4, 2)
    q, k, v = operands(size[0], size[1], heads, executor.device)
    indptr, indices = blocks.indptr.to(executor.device), blocks.indices.to(executor.device)
    mask = blocks.mask.to(executor.device) if masked else None
    wrapper = made(executor)
    wrapper.plan(indptr, indices, *size, *heads, DIM, mask=mask)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert_near(out, lse, attention(q, k, v, blocks.keep(masked)))


@EVERYWHERE
def test_options(executor: Executor) -> None:
    """Causality counts rows and columns of the matrix; out and lse of the caller; bf16 with an output of its own."""
    size, heads = (48, 64, 8, 16), (2, 1)
    blocks = Blocks(*size, seed=4)
    q, k, v = operands(size[0], size[1], heads, executor.device, torch.bfloat16)
    options = {"sm_scale": 0.3, "logits_soft_cap": 4.0, "q_data_type": "bfloat16", "o_data_type": torch.bfloat16}
    out = torch.empty(size[0], heads[0], DIM, dtype=torch.bfloat16, device=executor.device)
    lse = torch.empty(size[0], heads[0], device=executor.device)
    wrapper = made(executor)
    wrapper.plan(blocks.indptr, blocks.indices, *size, *heads, DIM, causal=True, **options)
    got = wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert_near(out, lse, attention(q, k, v, blocks.keep(causal=True), 0.3, 4.0))


def test_packed_masks_are_masks() -> None:
    size, heads = (22, 24, 5, 3), (2, 2)
    blocks = Blocks(*size)
    q, k, v = operands(22, 24, heads, "cpu")
    wrapper = BlockSparseAttentionWrapper(torch.zeros(1 << 16))
    wrapper.plan(blocks.indptr, blocks.indices, *size, *heads, DIM, mask=blocks.mask)
    expected = wrapper.run(q, k, v)
    # The last row of blocks has 2 rows of 5: its bits end with them.
    whole = cute_attn.convert_bsr_mask_layout(blocks.mask, blocks.indptr)
    kept = whole[: whole.numel() - 3 * 3 * int(blocks.indptr[-1] - blocks.indptr[-2])]
    sizes = torch.tensor([5, 5, 5, 5, 2]) * 3 * blocks.indptr.diff()
    packed = cute_attn.segment_packbits(kept, torch.tensor([0, *sizes.cumsum(0)]), bitorder="little")[0]
    wrapper.plan(blocks.indptr, blocks.indices, *size, *heads, DIM, packed_mask=packed)
    assert torch.equal(wrapper.run(q, k, v), expected)
    assert torch.equal(wrapper.forward(q, k, v), expected)
    assert not torch.equal(wrapper.forward(q, k, v, sm_scale=0.5), expected)


def test_fp8_takes_scales_per_head() -> None:
    blocks, heads = Blocks(16, 32, 4, 8), (4, 2)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in operands(16, 32, heads, "cpu"))
    wrapper = BlockSparseAttentionWrapper(torch.zeros(1 << 16))
    wrapper.plan(blocks.indptr, blocks.indices, 16, 32, 4, 8, *heads, DIM, q_data_type=torch.float8_e4m3fn)
    scale_v = torch.tensor([2.0, 0.5])
    out = wrapper.run(q, k, v, None, None, scale_v)
    scaled = v.float() * scale_v[:, None]
    assert_near(out, None, attention(q.float(), k.float(), scaled, blocks.keep()))


# ---- blocks of different sizes


class Variable:
    """Random cuts of M rows and N columns into blocks, others for each kv head."""

    def __init__(self, m: int, n: int, kv_heads: int, shape: tuple[int, int], unit: int = 1) -> None:
        rng = np.random.default_rng(m + n)

        def cut(length: int, blocks: int) -> np.ndarray:
            cuts = np.sort(rng.choice(np.arange(1, length), blocks - 1, replace=False))
            return np.diff(np.concatenate(([0], cuts, [length])))

        self.rows = torch.from_numpy(np.stack([cut(m, shape[0]) for _ in range(kv_heads)])).int()
        self.columns = torch.from_numpy(np.stack([unit * cut(n // unit, shape[1]) for _ in range(kv_heads)])).int()
        self.seen = torch.from_numpy(rng.random((kv_heads, *shape)) < 0.5)
        self.seen[0, 1] = False  # rows that see nothing

    def keep(self) -> torch.Tensor:
        heads = zip(self.seen, self.rows.long(), self.columns.long(), strict=True)
        return torch.stack([s.repeat_interleave(r, 0).repeat_interleave(c, 1) for s, r, c in heads])


@EVERYWHERE
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("group", [1, 3])
def test_variable_blocks(group: int, unit: int, causal: bool, executor: Executor) -> None:
    m, n, kv_heads = 45, 96, 2
    mask, heads = Variable(m, n, kv_heads, (4, 5), unit), group * kv_heads
    q, k, v = (x.transpose(0, 1).contiguous() for x in operands(m, n, (heads, kv_heads), executor.device))
    arrays = (x.to(executor.device) for x in (mask.seen, mask.rows, mask.columns))
    workspace = torch.zeros(8 << 20, dtype=torch.uint8, device=executor.device)
    wrapper = VariableBlockSparseAttentionWrapper(workspace, executor.backend)
    wrapper.plan(*arrays, heads, kv_heads, DIM, causal=causal)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    buffer = torch.empty(kv_heads * m, group, DIM, dtype=torch.float16, device=executor.device)
    again = wrapper.run(q, k, v, out=buffer)
    assert wrapper._planned().settings.page_size % unit == 0
    assert out.shape == q.shape
    keep = mask.keep().tril(n - m) if causal else mask.keep()
    expected = attention(*(x.transpose(0, 1) for x in (q, k, v)), keep)
    assert_near(out.transpose(0, 1), lse.transpose(0, 1), expected)
    assert torch.equal(again, out)
    assert torch.equal(buffer.unflatten(0, (kv_heads, m)).transpose(1, 2).flatten(0, 1), out)


def test_variable_forward_replaces_options() -> None:
    mask = Variable(20, 32, 2, (2, 3))
    q, k, v = (x.transpose(0, 1).contiguous() for x in operands(20, 32, (2, 2), "cpu"))
    wrapper = VariableBlockSparseAttentionWrapper(torch.zeros(1 << 16))
    wrapper.plan(mask.seen, mask.rows, mask.columns, 2, 2, DIM, sm_scale=0.5)
    expected = attention(*(x.transpose(0, 1) for x in (q, k, v)), mask.keep(), 0.2, 3.0)
    assert_near(wrapper.forward(q, k, v, sm_scale=0.2, logits_soft_cap=3.0).transpose(0, 1), None, expected)


def test_no_rows_no_columns_and_no_blocks() -> None:
    wrapper = VariableBlockSparseAttentionWrapper(torch.zeros(1 << 16))
    for rows, columns in ((0, 8), (6, 0), (0, 0)):
        sizes = torch.tensor([[rows, 0]]), torch.tensor([[columns]])
        wrapper.plan(torch.ones(1, 2, 1), *sizes, 1, 1, DIM, causal=True)
        out, lse = wrapper.run(random(1, rows, DIM), *(random(1, columns, DIM) for _ in range(2)), return_lse=True)
        assert out.shape == (1, rows, DIM)
        assert bool((lse == -torch.inf).all()) == (columns == 0 or rows == 0)


def test_a_wrapper_leaves_its_memory_with_its_last_reference() -> None:
    """No cycle of references keeps the workspace, masks and indices until the next garbage collection."""
    blocks, workspace = Blocks(16, 32, 8, 8), torch.zeros(8 << 20, dtype=torch.uint8)
    wrapper, left = BlockSparseAttentionWrapper(workspace), weakref.ref(workspace)
    gc.disable()
    try:
        wrapper.plan(blocks.indptr, blocks.indices, *blocks.size, 2, 1, DIM)
        del wrapper, workspace
        assert left() is None
    finally:
        gc.enable()
