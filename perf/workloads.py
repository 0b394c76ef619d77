"""Problems, single requests and batches, with their work and their inputs. Peers run ragged batches of equal lengths as
dense batches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from cute_attn.reference import attention as reference

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "nvfp4": torch.uint8,
}
NVFP4_BITS, NVFP4_BLOCK = 4.5, 16  # bits per element with its share of the block scale; elements per block
MOST_DRAFTS = 16  # query tokens per request of speculative decoding; beyond that it is a prefill
NVFP4_SCALES = (0x20, 0x30)  # e4m3 codes of 1/8 to 1/2: values about as large as normally distributed ones


class Metric(NamedTuple):
    """Speed as `work / seconds` in `unit`, compared with one of the ceilings of the run."""

    unit: str
    work: float
    ceiling: str

    def value(self, microseconds: float) -> float:
        return self.work / (microseconds * 1e-6)


class Measured:
    """What single requests and batches have: a speed, and copies of their inputs."""

    @property
    def metric(self: Any) -> Metric:
        """Speed and its ceiling: read bandwidth for decode, the bf16 GEMM for prefill."""
        if self.phase.endswith("decode"):
            return Metric("GB/s", self.bytes / 1e9, "read")
        return Metric("TFLOP/s", self.flops / 1e12, "gemm")

    def num_sets(self: Any, l2_bytes: int) -> int:
        """Returns how many copies of the inputs exceed twice the L2, so that a set has left it before its next use."""
        return int(2 * l2_bytes // self.bytes + 1)


@dataclass(frozen=True)
class Workload(Measured):
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

    def short(self, length: int) -> Workload:
        """Returns a short problem that needs the same kernels."""
        return dataclasses.replace(self, qo_len=min(self.qo_len, length), kv_len=length, causal=False)


class Inputs(NamedTuple):
    """q `[qo_len, num_qo_heads, head_dim_qk]`, k and v `[kv_len, num_kv_heads, head_dim_*]`, contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


# ---- batches


class BatchInputs(NamedTuple):
    """q `[nnz, num_qo_heads, head_dim]`; k, v `[nnz_kv, num_kv_heads, head_dim]`, or pages in random order
    `[num_pages, page_size, num_kv_heads, head_dim]`, where request i has pages
    `indices[kv_indptr[i]:kv_indptr[i + 1]]`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indices: torch.Tensor | None
    block_scales: tuple[torch.Tensor, torch.Tensor] | None = None  # e4m3, of NVFP4 k and v
    sinks: torch.Tensor | None = None  # fp32 [num_qo_heads]


@dataclass(frozen=True)
class BatchWorkload(Measured):
    """Batch of requests of `qo_lens` and `kv_lens` tokens; causal is bottom-right aligned. `page_size` 0: ragged.
    `window_left`: -1, none, or the bound of decode and of causal prefill.
    """

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 0
    causal: bool = False
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window_left: int = -1
    sinks: bool = False
    head_dim_v: int = 0  # 0: head_dim

    def __post_init__(self) -> None:
        object.__setattr__(self, "qo_lens", tuple(self.qo_lens))  # they are lists if they come from JSON
        object.__setattr__(self, "kv_lens", tuple(self.kv_lens))
        if self.phase != "batch decode" and self.window_left >= 0 and not self.causal:
            raise ValueError(f"windows of prefill are those of causal rows, got {self.name}")

    @property
    def name(self) -> str:
        heads = f"h{self.num_qo_heads}/{self.num_kv_heads}"
        pages = f"page{self.page_size}" if self.page_size else "ragged"
        lengths = f"b{len(self.qo_lens)} q{_lengths(self.qo_lens)} kv{_lengths(self.kv_lens)}"
        mask = "causal" if self.causal else "full"
        kv = "" if self.kv_dtype == self.dtype else f" kv-{self.kv_dtype}"
        window = f" window{self.window_left}" if self.window_left >= 0 else ""
        dims = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v else str(self.head_dim)
        return f"d{dims} {heads} {pages} {lengths} {mask} {self.dtype}{kv}{window}" + " sinks" * self.sinks

    @property
    def phase(self) -> str:
        if max(self.qo_lens) == 1:
            return "batch decode"
        if self.page_size and self.causal and self.equal and self.qo_lens[0] <= MOST_DRAFTS:
            return "speculative decode"
        return "paged prefill" if self.page_size else "ragged prefill"

    @property
    def requests(self) -> list[Workload]:
        window = self.window_left if self.causal else -1
        heads, dims = (self.num_qo_heads, self.num_kv_heads), (self.head_dim, self.head_dim_vo)
        one = (*heads, *dims, self.causal, self.dtype, window)
        return [Workload(qo_len, kv_len, *one) for qo_len, kv_len in zip(self.qo_lens, self.kv_lens, strict=True)]

    @property
    def head_dim_vo(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def equal(self) -> bool:
        return len(set(zip(self.qo_lens, self.kv_lens, strict=True))) == 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_kv_dtype(self) -> torch.dtype:
        return DTYPES[self.kv_dtype]

    @property
    def flops(self) -> int:
        return sum(w.flops for w in self.requests)

    @property
    def bytes(self) -> int:
        """Number of bytes if q, k and v are read once and o is written once."""
        bits = NVFP4_BITS if self.kv_dtype == "nvfp4" else 8 * self.torch_kv_dtype.itemsize
        dims = self.head_dim + self.head_dim_vo
        kv = round(dims * sum(map(self.seen, self.kv_lens)) * self.num_kv_heads * bits / 8)
        return kv + dims * sum(self.qo_lens) * self.num_qo_heads * self.torch_dtype.itemsize

    @property
    def qo_indptr(self) -> list[int]:
        return list(accumulate(self.qo_lens, initial=0))

    @property
    def kv_indptr(self) -> list[int]:
        """Offsets of the requests in rows of k and v, or in pages."""
        return list(accumulate(map(self.pages, self.kv_lens), initial=0))

    @property
    def last_page_len(self) -> list[int]:
        return [(n - 1) % self.page_size + 1 for n in self.kv_lens]

    def seen(self, kv_len: int) -> int:
        """Returns how many keys of a request its query tokens see, masks but the window of decode aside."""
        decode = self.window_left >= 0 and not self.causal
        return min(kv_len, self.window_left + 1) if decode else kv_len

    def pages(self, kv_len: int) -> int:
        return -(-kv_len // max(1, self.page_size))

    def inputs(self, device: torch.device, seed: int = 0) -> BatchInputs:
        """Returns normally distributed q, k, v; random codes for NVFP4."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            wide = torch.float16 if dtype.itemsize == 1 else dtype
            return torch.randn(shape, generator=generator, device=device, dtype=wide).to(dtype)

        def codes(last: int, low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, (*kv, last), generator=generator, device=device, dtype=torch.uint8)

        rows = self.kv_indptr[-1]
        page = (self.page_size,) if self.page_size else ()
        kv = (rows, *page, self.num_kv_heads)
        indices = torch.randperm(rows, generator=generator, device=device, dtype=torch.int32) if page else None
        q = normal(self.qo_indptr[-1], self.num_qo_heads, self.head_dim, dtype=self.torch_dtype)
        sinks = normal(self.num_qo_heads, dtype=torch.float32) if self.sinks else None
        if self.kv_dtype == "nvfp4":
            k, v = (codes(self.head_dim // 2, 0, 256) for _ in range(2))
            k_sf, v_sf = (codes(self.head_dim // NVFP4_BLOCK, *NVFP4_SCALES).view(torch.float8_e4m3fn) for _ in "kv")
            return BatchInputs(q, k, v, indices, (k_sf, v_sf), sinks)
        k, v = (normal(*kv, dim, dtype=self.torch_kv_dtype) for dim in (self.head_dim, self.head_dim_vo))
        return BatchInputs(q, k, v, indices, None, sinks)

    def of_one(self, x: Inputs) -> BatchInputs:
        """Returns the inputs of a single request as those of a batch of one, whose pages are in order."""
        if not self.page_size:
            return BatchInputs(x.q, x.k, x.v, None)
        k, v = (t.view(-1, self.page_size, *t.shape[1:]) for t in (x.k, x.v))
        return BatchInputs(x.q, k, v, torch.arange(len(k), dtype=torch.int32, device=k.device))

    def tokens(self, x: BatchInputs, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k and v of one request that are seen, `[tokens, num_kv_heads, head_dim]` in fp64."""
        begin, end = self.kv_indptr[request], self.kv_indptr[request + 1]
        chosen = slice(begin, end) if x.indices is None else x.indices[begin:end].long()

        def rows(t: torch.Tensor) -> torch.Tensor:
            own = t.view(torch.uint8)[chosen].view(t.dtype) if t.element_size() == 1 else t[chosen]
            tokens = own.reshape(-1, self.num_kv_heads, t.shape[-1])[: self.kv_lens[request]]
            return tokens[len(tokens) - self.seen(len(tokens)) :]

        k, v = rows(x.k), rows(x.v)
        if x.block_scales is not None:
            k, v = (reference.nvfp4_values(t, rows(s)) for t, s in zip((k, v), x.block_scales, strict=True))
        return k.double(), v.double()

    def short(self, length: int) -> BatchWorkload:
        """Returns a batch of two short requests that needs the same kernels."""
        qo_lens = (min(max(self.qo_lens), length),) * 2
        return dataclasses.replace(self, qo_lens=qo_lens, kv_lens=(length,) * 2)


def _lengths(lengths: tuple[int, ...]) -> str:
    shortest, longest = min(lengths), max(lengths)
    return str(longest) if shortest == longest else f"{shortest}-{longest}"


def equal(
    batch_size: int, qo_len: int, kv_len: int, heads: tuple[int, int], head_dim: int, page_size: int = 0,
    causal: bool = False, kv_dtype: str = "bfloat16", window_left: int = -1, sinks: bool = False,
) -> BatchWorkload:  # fmt: skip
    """Returns a batch of equal requests in bfloat16."""
    lengths = (qo_len,) * batch_size, (kv_len,) * batch_size
    return BatchWorkload(
        *lengths, *heads, head_dim, page_size, causal, kv_dtype=kv_dtype, window_left=window_left, sinks=sinks
    )


def as_batch(w: AnyWorkload, page_size: int = 0) -> BatchWorkload:
    """Returns a single request as a batch of one."""
    if isinstance(w, BatchWorkload):
        return w
    heads, lengths, head_dim_v = (w.num_qo_heads, w.num_kv_heads), ((w.qo_len,), (w.kv_len,)), w.head_dim_vo
    batch = BatchWorkload(*lengths, *heads, w.head_dim_qk, page_size, w.causal, head_dim_v=head_dim_v)
    return dataclasses.replace(batch, dtype=w.dtype, kv_dtype=w.dtype)


AnyWorkload = Workload | BatchWorkload
AnyInputs = Inputs | BatchInputs
