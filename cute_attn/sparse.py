"""Attention under block-sparse masks: the wrappers of FlashInfer's module of this name."""

from __future__ import annotations

import torch

from cute_attn.request import block_sparse
from cute_attn.wrappers.block_sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]


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
    return block_sparse.flattened_bsr(mask, indptr)
