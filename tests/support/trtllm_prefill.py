"""Calls of the TRT-LLM prefill functions from the cases of the batch matrix."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.batch_case import WORKSPACE, BatchCase, BatchInputs, make
from tests.support.paged_cache import ends, ints


def lengths(case: BatchCase, device: str) -> dict[str, Any]:
    """Lengths as engines pass them, on the device."""
    return {
        "cum_seq_lens_q": ends(case.qo_lens).to(device),
        "cum_seq_lens_kv": ends(case.kv_lens).to(device),
        "seq_lens": ints(case.kv_lens).to(device),
        "max_q_len": max(case.qo_lens, default=0),
        "max_kv_len": max(case.kv_lens, default=0),
        "batch_size": len(case.qo_lens),
    }


def numbers(case: BatchCase, inputs: BatchInputs) -> dict[str, Any]:
    """Scales and sinks."""
    scale = case.head_dim_qk**-0.5 if case.sm_scale is None else case.sm_scale
    scale *= (case.q_scale or 1.0) * (case.k_scale or 1.0)
    scales: tuple[Any, Any] = scale, case.v_scale or 1.0
    if case.tensor_scales:
        scales = tuple(torch.tensor([x], dtype=torch.float32, device=inputs.q.device) for x in scales)
    return {"bmm1_scale": scales[0], "bmm2_scale": scales[1], "sinks": inputs.sinks, "window_left": case.window_left}


def workspace(device: str) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def context_arguments(case: BatchCase, device: str = "cpu") -> tuple[BatchInputs, dict[str, Any]]:
    """A paged case and the keywords of `trtllm_batch_context_with_kv_cache`."""
    inputs = make(case, device)
    arguments = {
        "query": inputs.q,
        "kv_cache": inputs.kv[0],
        "workspace_buffer": workspace(device),
        "block_tables": inputs.tables,
        "kv_layout": case.kv_layout,
        "causal": case.mask == "causal",
        "return_lse": case.return_lse,
    }
    return inputs, arguments | lengths(case, device) | numbers(case, inputs)
