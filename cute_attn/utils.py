"""Helpers under FlashInfer's module name: what serving engines import from `flashinfer.utils` for attention."""

from __future__ import annotations

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import checks
from cute_attn.request.trtllm_options import FP4Tensor

__all__ = [
    "FP4Tensor",
    "device_support_pdl",
    "get_compute_capability",
    "get_device_sm_count",
    "get_trtllm_gen_multi_ctas_kv_counter_bytes",
]


def get_device_sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU.

    Parameters
    ----------
    device : a device, or its name. A CUDA device without index is the current one.

    Returns
    -------
    Multiprocessors; 0 for the CPU, which has none.

    Raises
    ------
    ArgumentError (another device).
    """
    device = checks.usable_device("device", device)
    return 0 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU.

    Parameters
    ----------
    device : a CUDA device, or its name. Without index: the current one.

    Returns
    -------
    (major, minor).

    Raises
    ------
    ArgumentError (no CUDA device).
    """
    device = checks.usable_device("device", device)
    if device.type != "cuda":
        raise ArgumentError(f"device must be a cuda device, got {device}")
    return torch.cuda.get_device_capability(device)


def device_support_pdl(device: torch.device) -> bool:
    """Tell whether a device has programmatic dependent launch, which kernels here use where `enable_pdl` is None.

    Parameters
    ----------
    device : a device, or its name. A CUDA device without index is the current one.

    Returns
    -------
    True from compute capability 9.0 on; False for the CPU.

    Raises
    ------
    ArgumentError (another device).
    """
    device = checks.usable_device("device", device)
    return device.type == "cuda" and get_compute_capability(device) >= (9, 0)


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """Return the bytes of the counter buffer that callers of FlashInfer's TRT-LLM functions allocate.

    Functions here accept the buffer as `multi_ctas_kv_counter_buffer` and do not use it: they count in memory of their
    own, and a buffer of any size will do.

    Parameters
    ----------
    batch_size, num_qo_heads, sm_count : int, at least 0.

    Returns
    -------
    4 bytes for each request and head, or for each multiprocessor if those are more, in multiples of 32 bytes.

    Raises
    ------
    ArgumentTypeError (not an int), ArgumentError (below 0).
    """
    for name, value in (("batch_size", batch_size), ("num_qo_heads", num_qo_heads), ("sm_count", sm_count)):
        checks.at_least(name, value, 0)
    counters = max(batch_size * num_qo_heads, sm_count)
    return -(-counters // 8) * 8 * 4
