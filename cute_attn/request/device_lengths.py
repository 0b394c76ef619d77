"""Lengths of paged decode batches on a GPU, which a plan does not wait for: what they say is checked nowhere, unless
`CUTE_ATTN_VALIDATE=1`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cute_attn.errors import ArgumentError, RuntimeArgumentError
from cute_attn.problem import DeviceLengths, Tokens
from cute_attn.request import batch_plan, checks
from cute_attn.request.batch_plan import INDEX_DTYPES, Pages


def is_on(device: torch.device, x: torch.Tensor) -> bool:
    """Tell whether a tensor is on the GPU of a wrapper."""
    return x.is_cuda and x.device == device


def paged(
    qo_indptr: np.ndarray, pages: Pages, page_size: int, names: Sequence[str], device: torch.device
) -> Tokens | None:
    """Check all but the numbers of the page arrays of a batch; None if they are not on the wrapper's GPU. Arguments:
    those of `batch_plan.paged`.
    """
    indptr, last = pages.indptr, pages.last_page_len
    for name, x in ((names[1], indptr), (names[3], last)):
        checks.tensor(name, x)
        if not is_on(device, x):
            return None
        checks.dtype(name, x.dtype, INDEX_DTYPES)
        if x.dim() != 1:
            raise ArgumentError(f"{name} must have 1 dimension, got {checks.describe(x)}")
    if indptr.numel() == 0:
        return None
    batch_size = indptr.numel() - 1
    if last.numel() != batch_size:
        raise ArgumentError(f"{names[3]} must have shape [batch_size] = ({batch_size},), got {last.numel()} elements")
    batch_plan.check_indices(names, pages.indices, 0, 0)
    versions = None if indptr.is_inference() or last.is_inference() else (indptr._version, last._version)

    def read() -> Tokens:
        if versions is not None and versions != (indptr._version, last._version):
            raise RuntimeArgumentError(
                f"{names[1]} and {names[3]} must not be written after plan() if what comes then needs lengths on the "
                "host: a schedule for other heads or options, or an attribute of the wrapper"
            )
        return batch_plan.paged(qo_indptr, pages, page_size, names)

    lengths = DeviceLengths.of(qo_indptr, (indptr, last), page_size, pages.indices.numel(), read)
    return Tokens(lengths, np.empty(0, np.int64), None, pages.indices)
