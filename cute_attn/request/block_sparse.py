"""Block-sparse masks as paged batches: a request per row of blocks, whose pages are the blocks of keys that it sees."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchLengths
from cute_attn.request import batch_plan, checks, index_arrays
from cute_attn.request.batch_plan import Mask
from cute_attn.request.index_arrays import IndexArrays
from cute_attn.request.settings import MAX_INDEX, POS_ENCODING_MODES


class Matrix(NamedTuple):
    """The size of a block-sparse mask, and how its columns lie in pages."""

    rows: int  # query tokens (M)
    columns: int  # keys (N)
    page_size: int  # keys per page: C, where blocks are of equal size
    block_rows: int = 0  # R, where blocks are of equal size
    heads: int = 1  # kv heads with blocks of their own: their rows, and their pages, follow one another

    @property
    def pages(self) -> int:
        """Pages of one head."""
        return self.columns // self.page_size


def refuse_positions(pos_encoding_mode: Any) -> None:
    """Refuse encodings of positions: kernels count those of keys among the keys that a row of blocks sees."""
    checks.choice("pos_encoding_mode", pos_encoding_mode, POS_ENCODING_MODES)
    if pos_encoding_mode != "NONE":
        reason = "it counts positions among the keys of a block row"
        instead = "rotated q and k" if pos_encoding_mode == "ROPE_LLAMA" else "a dense wrapper with a custom mask"
        checks.refuse(f"pos_encoding_mode={pos_encoding_mode!r}", reason, instead, "block-sparse attention")


# ---- blocks of equal size


def matrix(rows: Any, columns: Any, block_rows: Any, block_columns: Any) -> Matrix:
    """Check M, N, R and C."""
    m, n = batch_plan.count("M", rows), batch_plan.count("N", columns)
    r, c = batch_plan.count("R", block_rows), batch_plan.count("C", block_columns)
    if n % c:
        raise ArgumentError(f"N must be a multiple of C, got N={n} and C={c}")
    return Matrix(m, n, c, r)


def bsr(indptr: Any, indices: Any, size: Matrix) -> BatchLengths:
    """Check the arrays of a BSR mask. A row of blocks becomes a request, a block of keys a page."""
    bounds = index_arrays.indptr("indptr", indptr)
    count = -(-size.rows // size.block_rows)
    if len(bounds) != count + 1:
        raise ArgumentError(
            f"indptr must have ceil(M / R) + 1 = {count + 1} elements for M={size.rows} and R={size.block_rows}, "
            f"got {len(bounds)}"
        )
    qo_indptr = np.minimum(np.arange(count + 1, dtype=np.int64) * size.block_rows, size.rows)
    full = torch.full((count,), size.page_size, dtype=torch.int64, device="cpu")
    pages = torch.from_numpy(bounds), indices, full, size.page_size
    names = "M and R", "indptr", "indices", "C"
    lengths = IndexArrays(names, torch.from_numpy(qo_indptr), *pages).on_host()
    used = indices[bounds[0] : bounds[-1]]
    least, most = (int(used.min()), int(used.max())) if used.numel() else (0, 0)
    if least < 0 or most >= size.pages:
        raise ArgumentError(f"indices must be within 0..{size.pages - 1} (N / C - 1), got {least}..{most}")
    return lengths


def bsr_mask(
    mask: Any, packed_mask: Any, causal: Any, lengths: BatchLengths, size: Matrix, device: torch.device
) -> Mask:
    """Pack the element mask of a BSR matrix, or with `causal` and without a mask the causal one."""
    causal = checks.boolean("causal", causal)
    if mask is not None:
        mask = checks.tensor("mask", mask)
        block, blocks = (size.block_rows, size.page_size), lengths.kv_end
        if mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[0] < blocks or mask.shape[1:] != block:
            expected = f"[{blocks}, {block[0]}, {block[1]}]"
            raise checks.wrong(f"mask must be a bool tensor of shape [blocks, R, C] = {expected}", mask)
        flat = _flattened(mask, lengths.kv_indptr, lengths.qo_len)
        return batch_plan.mask(flat, packed_mask, lengths, device, "packed_mask")
    if packed_mask is None and causal:
        return batch_plan.mask(causal_mask(lengths, size), None, lengths, device)
    return batch_plan.mask(None, packed_mask, lengths, device, "packed_mask")


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Flatten the mask of a BSR matrix: row by row of each row of blocks, as `packbits` takes it.

    Parameters
    ----------
    mask : `[blocks, R, C]`, of any dtype.
    indptr : int32 or int64 `[rows of blocks + 1]` from 0 to the number of blocks. On a GPU it costs a synchronisation.

    Returns
    -------
    `[blocks * R * C]` of the mask's dtype.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype or value).
    """
    bounds = index_arrays.indptr("indptr", indptr)
    if checks.tensor("mask", mask).dim() != 3 or bounds[0] != 0 or bounds[-1] != mask.shape[0]:
        raise ArgumentError(
            f"mask must have shape [indptr[-1], R, C] with indptr[0] = 0, got {checks.describe(mask)} and indptr "
            f"{bounds[0]}..{bounds[-1]}"
        )
    return _flattened(mask, bounds, np.full(len(bounds) - 1, mask.shape[1]))


def _flattened(mask: torch.Tensor, bounds: np.ndarray, rows: np.ndarray) -> torch.Tensor:
    parts = [
        mask[start:stop, :count].transpose(0, 1).reshape(-1)
        for start, stop, count in zip(bounds.tolist(), bounds[1:].tolist(), rows.tolist(), strict=False)
    ]
    return torch.cat(parts) if parts else mask.flatten()


def causal_mask(lengths: BatchLengths, size: Matrix) -> torch.Tensor:
    """Return the masks [qo_len, kv_len] of all requests, flattened: row i of the matrix sees columns j <= i + N - M."""
    indices = lengths.kv_indices
    assert indices is not None
    offset = torch.arange(size.page_size, device=indices.device)
    parts = [indices.new_zeros(0, dtype=torch.bool)]
    for i, (start, stop) in enumerate(zip(lengths.qo_indptr.tolist(), lengths.qo_indptr[1:].tolist(), strict=False)):
        pages = indices[lengths.kv_indptr[i] : lengths.kv_indptr[i + 1]] % max(1, size.pages)
        columns = (pages[:, None] * size.page_size + offset).flatten()
        rows = torch.arange(stop - start, device=indices.device) + start % max(1, size.rows)
        parts.append((columns <= rows[:, None] + size.columns - size.rows).flatten())
    return torch.cat(parts)


def pages(k: Any, v: Any, size: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v `[N, num_kv_heads, head_dim]` as pages `[N / C, C, num_kv_heads, head_dim]`, without a copy."""
    for name, x in (("k", k), ("v", v)):
        checks.shape(name, checks.tensor(name, x), (size.columns, None, None), "[N, num_kv_heads, head_dim]")
    return k.unflatten(0, (size.pages, size.page_size)), v.unflatten(0, (size.pages, size.page_size))


# ---- blocks of sizes and places that depend on the kv head


def variable(
    block_mask_map: Any, block_row_sz: Any, block_col_sz: Any, num_kv_heads: int
) -> tuple[Matrix, BatchLengths]:
    """Check a mask of blocks of different sizes. A row of blocks of a kv head becomes a request.

    Pages have as many keys as divide the sizes of all blocks of columns.
    """
    selected = checks.readable("block_mask_map", block_mask_map)
    rows = _sizes("block_row_sz", block_row_sz, num_kv_heads)
    columns = _sizes("block_col_sz", block_col_sz, num_kv_heads)
    expected = (num_kv_heads, rows.shape[1], columns.shape[1])
    checks.shape("block_mask_map", selected, expected, "[num_kv_heads, blocks of rows, blocks of columns]")
    size = Matrix(
        int(rows[0].sum()), int(columns[0].sum()), math.gcd(*columns.flatten().tolist()) or 1, heads=num_kv_heads
    )
    if num_kv_heads * size.pages > MAX_INDEX:
        raise ArgumentError(f"block_col_sz must make at most {MAX_INDEX} pages, got {num_kv_heads * size.pages}")
    counts = torch.from_numpy(columns // size.page_size).to(selected.device)
    first = counts.cumsum(1) - counts + torch.arange(num_kv_heads, device=selected.device)[:, None] * size.pages
    head, _, column = selected.nonzero(as_tuple=True)
    length = counts[head, column]
    before = length.cumsum(0) - length
    indices = torch.repeat_interleave(first[head, column] - before, length)
    indices = indices + torch.arange(indices.numel(), device=selected.device)
    per_request = ((selected != 0) * counts[:, None]).sum(-1).flatten().cpu()
    kv_indptr = torch.cat((per_request.new_zeros(1), per_request.cumsum(0)))
    qo_indptr = index_arrays.bounds(rows.flatten())
    full = torch.full((rows.size,), size.page_size, dtype=torch.int64, device="cpu")
    names = "block_row_sz", "block_mask_map", "block_mask_map", "block_col_sz"
    arrays = IndexArrays(names, torch.from_numpy(qo_indptr), kv_indptr, indices, full, size.page_size)
    return size, arrays.on_host()


def _sizes(name: str, value: Any, num_kv_heads: int) -> np.ndarray:
    """Check sizes of blocks [num_kv_heads, blocks] and return them on the host."""
    checks.operand(name, value, index_arrays.DTYPES, (num_kv_heads, None), "[num_kv_heads, blocks]")
    sizes: np.ndarray = value.cpu().numpy().astype(np.int64)
    if (sizes < 0).any():
        raise ArgumentError(f"{name} must not be negative, got {sizes.min()}")
    sums = sizes.sum(1)
    if (sums != sums[0]).any():
        raise ArgumentError(f"{name} must have the same sum for every kv head, got {sums.min()} and {sums.max()}")
    return sizes


def by_kv_head(q: Any, k: Any, v: Any, group: int, size: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Check q `[num_qo_heads, M, head_dim]`, and return k and v `[num_kv_heads, N, head_dim]` as pages `[num_kv_heads *
    N / page_size, page_size, 1, head_dim]`.
    """
    shapes = (("q", q, size.heads * group, size.rows), ("k", k, size.heads, size.columns))
    for name, x, heads, length in (*shapes, ("v", v, size.heads, size.columns)):
        checks.shape(name, checks.tensor(name, x), (heads, length, None), f"[{heads}, {length}, head_dim]")
    k, v = (x.reshape(-1, size.page_size, 1, x.shape[2]) for x in (k, v))
    return k, v


def rows_by_kv_head(
    group: int, size: Matrix, q: torch.Tensor, others: tuple[Any, ...]
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return q as `[num_kv_heads * M, group, head_dim]`, and other tensors of a run as they are."""
    return q.unflatten(0, (size.heads, group)).transpose(1, 2).flatten(0, 1), others


def by_query_head(x: torch.Tensor, size: Matrix) -> torch.Tensor:
    """Return a result `[num_kv_heads * M, group, ...]` as `[num_qo_heads, M, ...]`."""
    return x.unflatten(0, (size.heads, size.rows)).transpose(1, 2).flatten(0, 1).contiguous()
