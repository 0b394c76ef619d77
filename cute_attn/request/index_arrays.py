"""Index arrays of batches whose lengths the host has."""

from __future__ import annotations

import numpy as np
import torch


def int32(numbers: np.ndarray) -> torch.Tensor:
    """Return numbers as plans and buffers of CUDA graphs take them, in memory of their own."""
    return torch.from_numpy(numbers.astype(np.int32))


def bounds(counts: np.ndarray) -> np.ndarray:
    """Return where the elements of each request begin, and where the last ones end: `[len(counts) + 1]`."""
    return np.concatenate(([0], np.cumsum(counts)))


def last_page_len(kv_len: np.ndarray, num_pages: np.ndarray, page_size: int) -> np.ndarray:
    """Return the tokens in the last page of each request; 0 of a request without keys."""
    return kv_len - np.maximum(num_pages - 1, 0) * page_size
