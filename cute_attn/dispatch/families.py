"""The kernel families behind the GPU backends' names: what runs single requests, and what plans batches."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from cute_attn.kernels.fa2.host import batch as fa2_batch
from cute_attn.kernels.fa2.host import single as fa2_single
from cute_attn.kernels.fa3.host import batch as fa3_batch
from cute_attn.kernels.fa3.host import single as fa3_single
from cute_attn.kernels.xqa.host import batch as xqa_batch
from cute_attn.kernels.xqa.host import single as xqa_single


class Family(NamedTuple):
    """Host code of a kernel family."""

    single: ModuleType
    batch: ModuleType


FAMILIES = {
    "fa2": Family(fa2_single, fa2_batch),
    "fa3": Family(fa3_single, fa3_batch),
    "xqa": Family(xqa_single, xqa_batch),
}
