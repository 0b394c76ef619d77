"""Plans of batch wrappers, ours or FlashInfer's, whose host time is measured: `perf.overhead`."""

from __future__ import annotations

from typing import Any

import torch

from perf.batch_peers import WORKSPACE_BYTES
from perf.harness import Call

BATCH_SIZES = (2, 256)
HEADS, HEAD_DIM, PAGE_SIZE, QO_LEN = (32, 8), 128, 16, 100
KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def plan_calls(library: Any, device: torch.device, decode: dict[str, Any], prefill: dict[str, Any]) -> dict[str, Call]:
    """Returns plans of few and of many requests, with index arrays on the host and on the device. `decode`, `prefill`:
    options of the wrappers.
    """
    calls: dict[str, Call] = {}
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    for n in BATCH_SIZES:
        pages = torch.randint(7, 500, (n,), generator=torch.Generator().manual_seed(0))
        kv_indptr = torch.cat((torch.zeros(1, dtype=torch.int64), pages.cumsum(0))).int()
        indices = torch.zeros(int(kv_indptr[-1]), dtype=torch.int32, device=device)
        arrays = torch.arange(n + 1, dtype=torch.int32) * QO_LEN, kv_indptr, torch.full((n,), PAGE_SIZE).int()
        for place, on in {"host": torch.device("cpu"), "GPU": device}.items():
            qo_indptr, indptr, last = (x.to(on) for x in arrays)
            paged = indptr, indices, last, *HEADS, HEAD_DIM, PAGE_SIZE
            for name, dtype in KV_DTYPES.items():
                wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **decode)
                calls[f"plan, decode of {n} requests, {name}, lengths on the {place}"] = _plan(
                    wrapper, *paged, kv=dtype
                )
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **prefill)
            name = f"plan, prefill of {n} requests, lengths on the {place}"
            calls[name] = _plan(wrapper, qo_indptr, *paged, kv=torch.bfloat16, causal=True)
            if device.type == "cpu":
                break
    return calls


def _plan(wrapper: Any, *arguments: Any, kv: torch.dtype, **options: Any) -> Call:
    return lambda: wrapper.plan(*arguments, q_data_type=torch.bfloat16, kv_data_type=kv, **options)
