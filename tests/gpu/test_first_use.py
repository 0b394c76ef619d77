"""The first call of a process is captured in a CUDA graph: kernels, counters and page tables are made meanwhile."""

from __future__ import annotations

import pytest

from tests.gpu import marks
from tests.support import subprocesses

pytestmark = marks.GPU

CODE = """
import torch
import cute_attn

torch.manual_seed(0)
q = torch.randn({qo_len}, 8, 128, dtype=torch.bfloat16, device="cuda")
k, v = torch.randn(2, 3000, 2, 128, dtype=torch.bfloat16, device="cuda")
out = torch.full_like(q, torch.nan)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode={mode!r}):
    {call}
for _ in range(2):
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    expected = cute_attn.single_prefill_with_kv_cache(q, k, v, causal=True, backend="reference")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
print("right")
"""
PREFILL = "cute_attn.single_prefill_with_kv_cache(q, k, v, causal=True, out=out, backend={backend!r})"
DECODE = "cute_attn.single_decode_with_kv_cache(q[0], k, v, out=out[0], backend={backend!r})"


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize(
    ("qo_len", "call"),
    [
        pytest.param(300, PREFILL.format(backend="fa3"), id="fa3", marks=marks.FA3_GPU),
        pytest.param(300, PREFILL.format(backend="fa4"), id="fa4", marks=marks.FA4_GPU),
        pytest.param(300, PREFILL.format(backend="fa2"), id="fa2"),
        pytest.param(1, DECODE.format(backend="fa2"), id="fa2-split"),
        pytest.param(1, DECODE.format(backend="xqa"), id="xqa"),
    ],
)
def test_first_call_is_captured(qo_len: int, call: str, mode: str) -> None:
    assert subprocesses.run(CODE.format(qo_len=qo_len, mode=mode, call=call)).split() == ["right"]
