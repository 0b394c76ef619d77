"""Host side of the Hopper kernel: order of tiles, tensor maps and the parameter block of its launches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from cute_attn import plan
from cute_attn.kernels import divisor
from cute_attn.kernels.spec import Fa3Spec
from cute_attn.runtime import artifacts, tensormap
from cute_attn.runtime.launch import Launch, current_stream

LOG2E = math.log2(math.e)
UNBOUNDED = 1 << 30  # no causal or window bound: beyond any kv index, and row + UNBOUNDED fits 32 bits
SECTION_BYTES = 32 << 20  # keys and values that shall stay in L2 together


@dataclass(frozen=True)
class Dense:
    """A batch of equal lengths: q, out [batch, qo_len, heads, d], k, v [batch, kv_len, heads, d], any strides."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    causal: bool
    sm_scale: float
    window_left: int = -1


class Runner:
    """Launches one kernel on one device."""

    def __init__(self, spec: Fa3Spec, device_index: int) -> None:
        self.spec, self.device_index = spec, device_index
        self.launch = Launch(artifacts.get(spec, "sm_90a"), device_index, pdl=True)
        device = torch.device("cuda", device_index)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, problem: Dense) -> None:
        values, grid = self.prepared(problem)
        self.launch.fire(values, grid, current_stream(self.device_index))

    def prepared(self, problem: Dense) -> tuple[tuple[bytes | int | float, ...], tuple[int, int, int]]:
        q, k, v = problem.q, problem.k, problem.v
        tile = self.spec.tile
        maps = tensor_map(q, tile.rows), tensor_map(k, tile.cols), tensor_map(v, tile.cols)
        values, total = numbers(self.spec, problem, self.counter.data_ptr())
        return (*maps, *values), (min(total, self.sms), 1, 1)


def numbers(spec: Fa3Spec, problem: Dense, counter: int) -> tuple[tuple[int | float, ...], int]:
    """Kernel parameters in the order of `Fa3Params`, and how many tiles there are."""
    (batch, qo_len, num_qo_heads, head_dim), (_, kv_len, num_kv_heads, _) = problem.q.shape, problem.k.shape
    out, group = problem.out, num_qo_heads // num_kv_heads
    strides = [stride * out.element_size() for stride in out.stride()]
    blocks, heads = plan.ceil_div(qo_len, spec.tile.rows), batch * num_qo_heads
    kv_bytes = kv_len * (head_dim + problem.v.shape[-1]) * problem.k.element_size()
    section = section_heads(heads, group, kv_bytes)
    position = kv_len - qo_len
    values = (
        out.data_ptr(),
        0 if problem.lse is None else problem.lse.data_ptr(),
        counter,
        *(0, 0, 0, 0),
        *strides[:3],
        qo_len,
        kv_len,
        position if problem.causal else UNBOUNDED,
        position - problem.window_left if 0 <= problem.window_left < kv_len else -UNBOUNDED,
        blocks * heads,
        blocks - 1,
        *_divisor(section * blocks),
        *_divisor(section),
        *_divisor(num_qo_heads),
        *_divisor(group),
        problem.sm_scale * LOG2E,
        1.0,
    )
    return values, blocks * heads


def section_heads(heads: int, group: int, kv_bytes: int) -> int:
    """Query heads (of all requests) worked on side by side: a divisor of their number, if possible of whole groups."""
    wanted = max(1, SECTION_BYTES // max(kv_bytes, 1)) * group
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= wanted)


def tensor_map(x: torch.Tensor, box_rows: int) -> bytes:
    """Map of [batch, tokens, heads, d] as (d, tokens, heads, batch)."""
    batch, tokens, heads, head_dim = x.shape
    strides = x.stride(1), x.stride(2), x.stride(0)
    sizes = head_dim, max(tokens, 1), heads, batch
    dtype = str(x.dtype).removeprefix("torch.")
    return _encoded(dtype, x.data_ptr(), sizes, tuple(max(s * 2, 16) for s in strides), box_rows)


@functools.lru_cache(1024)
def _encoded(dtype: str, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box_rows: int) -> bytes:
    return tensormap.encode(dtype, address, sizes, strides, box_rows)


def _divisor(value: int) -> tuple[int, int, int]:
    return value, *divisor.magic(value)
