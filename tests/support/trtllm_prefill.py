"""Calls of the TRT-LLM prefill functions from the cases of the batch matrix."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.support.batch_case import NO_PAGE, WORKSPACE, BatchCase, BatchInputs, make


def lengths(case: BatchCase, device: str) -> dict[str, Any]:
    """Lengths as engines pass them, on the device."""
    bounds = {
        name: torch.tensor([0, *values], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        for name, values in (("cum_seq_lens_q", case.qo_lens), ("cum_seq_lens_kv", case.kv_lens))
    }
    return bounds | {
        "seq_lens": torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
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


def tables(case: BatchCase, inputs: BatchInputs) -> torch.Tensor:
    """The page table, which has no pages beyond those of a request's keys."""
    starts = inputs.kv_indptr.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    table = torch.full((len(counts), max([*counts, 1]) + 1), NO_PAGE, dtype=torch.int32)
    for i, (start, count) in enumerate(zip(starts, counts, strict=False)):
        table[i, :count] = inputs.kv_indices[start : start + count].int()
    return table.to(inputs.q.device)


def workspace(device: str) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def context_arguments(case: BatchCase, device: str = "cpu") -> tuple[BatchInputs, dict[str, Any]]:
    """A paged case and the keywords of `trtllm_batch_context_with_kv_cache`."""
    inputs = make(case, device)
    arguments = {
        "query": inputs.q,
        "kv_cache": inputs.kv[0],
        "workspace_buffer": workspace(device),
        "block_tables": tables(case, inputs),
        "kv_layout": case.kv_layout,
        "causal": case.mask == "causal",
        "return_lse": case.return_lse,
    }
    return inputs, arguments | lengths(case, device) | numbers(case, inputs)
