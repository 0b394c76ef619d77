"""Problems of single requests, their work and their inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Metric(NamedTuple):
    """Speed as `work / seconds` in `unit`, compared with one of the ceilings of the run."""

    unit: str
    work: float
    ceiling: str

    def value(self, microseconds: float) -> float:
        return self.work / (microseconds * 1e-6)


@dataclass(frozen=True)
class Workload:
    """One request of dense attention. Lengths are in tokens; causal is bottom-right aligned. `window_left` (-1: none)
    bounds causal rows.
    """

    qo_len: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    causal: bool = False
    dtype: str = "bfloat16"
    window_left: int = -1

    @property
    def name(self) -> str:
        dims = str(self.head_dim_qk)
        if self.head_dim_vo != self.head_dim_qk:
            dims += f"/{self.head_dim_vo}"
        mask = "causal" if self.causal else "full"
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}"
        return f"d{dims} h{heads} q{self.qo_len} kv{self.kv_len} {mask} {self.dtype}"

    @property
    def phase(self) -> str:
        return "decode" if self.qo_len == 1 else "prefill"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float16 if self.dtype == "float16" else torch.bfloat16

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs per head: row i sees min(kv_len, max(0, i + kv_len - qo_len + 1)) keys, and
        window_left + 1 at most.
        """
        if not self.causal:
            return self.qo_len * self.kv_len
        if self.window_left >= 0:
            lasts = range(self.kv_len - self.qo_len, self.kv_len)
            return sum(max(0, min(last, self.window_left) + 1) for last in lasts)
        rows = min(self.qo_len, self.kv_len)  # if kv_len < qo_len, the first rows see no keys
        return rows * (self.kv_len - rows) + rows * (rows + 1) // 2

    @property
    def flops(self) -> int:
        """Operations of the two matrix products: 2 * pairs * (head_dim_qk + head_dim_vo) per query head."""
        return 2 * self.pairs * (self.head_dim_qk + self.head_dim_vo) * self.num_qo_heads

    @property
    def bytes(self) -> int:
        """Number of bytes if q, k and v are read once and o is written once."""
        dims = self.head_dim_qk + self.head_dim_vo
        elements = (self.qo_len * self.num_qo_heads + self.kv_len * self.num_kv_heads) * dims
        return elements * self.torch_dtype.itemsize

    @property
    def metric(self) -> Metric:
        """Speed and its ceiling: read bandwidth for decode, the bf16 GEMM for prefill."""
        if self.phase == "decode":
            return Metric("GB/s", self.bytes / 1e9, "read")
        return Metric("TFLOP/s", self.flops / 1e12, "gemm")

    def inputs(self, device: torch.device, seed: int = 0) -> Inputs:
        """Returns normally distributed q, k, v."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=self.torch_dtype)

        return Inputs(
            normal(self.qo_len, self.num_qo_heads, self.head_dim_qk),
            normal(self.kv_len, self.num_kv_heads, self.head_dim_qk),
            normal(self.kv_len, self.num_kv_heads, self.head_dim_vo),
        )

    def num_sets(self, l2_bytes: int) -> int:
        """Returns how many copies of the inputs exceed twice the L2, so that a set has left it before its next use."""
        return 2 * l2_bytes // self.bytes + 1

    def short(self, length: int) -> Workload:
        """Returns a short problem that needs the same kernels."""
        return dataclasses.replace(self, qo_len=min(self.qo_len, length), kv_len=length, causal=False)


class Inputs(NamedTuple):
    """q `[qo_len, num_qo_heads, head_dim_qk]`, k and v `[kv_len, num_kv_heads, head_dim_*]`, contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
