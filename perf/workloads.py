"""Problems, batches and single requests, with their work and their inputs. Peers run ragged batches of equal lengths as
dense batches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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
class BatchWorkload:
    """Batch of requests of `qo_lens` and `kv_lens` tokens; causal is bottom-right aligned. `page_size` 0: ragged.
    `window_left`: -1, none, or the bound of decode and of causal prefill. `single`: one request, through the functions
    for single requests.
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
    single: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "qo_lens", tuple(self.qo_lens))  # they are lists if they come from JSON
        object.__setattr__(self, "kv_lens", tuple(self.kv_lens))
        if self.phase != "batch decode" and self.window_left >= 0 and not self.causal:
            raise ValueError(f"windows of prefill are those of causal rows, got {self.name}")

    @property
    def name(self) -> str:
        heads = f"h{self.num_qo_heads}/{self.num_kv_heads}"
        pages = f"page{self.page_size}" if self.page_size else "ragged"
        batch = "" if self.single else f"{pages} b{len(self.qo_lens)} "
        lengths = f"q{_lengths(self.qo_lens)} kv{_lengths(self.kv_lens)}"
        mask = "causal" if self.causal else "full"
        kv = "" if self.kv_dtype == self.dtype else f" kv-{self.kv_dtype}"
        window = f" window{self.window_left}" if self.window_left >= 0 else ""
        dims = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v else str(self.head_dim)
        return f"d{dims} {heads} {batch}{lengths} {mask} {self.dtype}{kv}{window}" + " sinks" * self.sinks

    @property
    def phase(self) -> str:
        if max(self.qo_lens) == 1:
            return "decode" if self.single else "batch decode"
        if self.single:
            return "prefill"
        if self.page_size and self.causal and self.equal and self.qo_lens[0] <= MOST_DRAFTS:
            return "speculative decode"
        return "paged prefill" if self.page_size else "ragged prefill"

    @property
    def metric(self) -> Metric:
        """Speed and its ceiling: read bandwidth for decode, the bf16 GEMM for prefill."""
        if self.phase.endswith("decode"):
            return Metric("GB/s", self.bytes / 1e9, "read")
        return Metric("TFLOP/s", self.flops / 1e12, "gemm")

    def num_sets(self, l2_bytes: int) -> int:
        """Returns how many copies of the inputs exceed twice the L2, so that a set has left it before its next use."""
        return int(2 * l2_bytes // self.bytes + 1)

    def pairs(self, request: int) -> int:
        """Returns the number of (query, key) pairs per head of a request: row i sees min(kv_len, max(0, i + kv_len -
        qo_len + 1)) keys, and window_left + 1 at most.
        """
        qo_len, kv_len = self.qo_lens[request], self.kv_lens[request]
        if not self.causal:
            return qo_len * kv_len
        if self.window_left >= 0:
            return sum(max(0, min(last, self.window_left) + 1) for last in range(kv_len - qo_len, kv_len))
        rows = min(qo_len, kv_len)  # if kv_len < qo_len, the first rows see no keys
        return rows * (kv_len - rows) + rows * (rows + 1) // 2

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
        """Operations of the two matrix products: 2 * pairs * (head_dim + head_dim_vo) per query head."""
        pairs = sum(map(self.pairs, range(len(self.qo_lens))))
        return 2 * pairs * (self.head_dim + self.head_dim_vo) * self.num_qo_heads

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
        """Returns two short requests, or one if it is single, that need the same kernels."""
        qo_lens, kv_lens = (min(max(self.qo_lens), length),), (length,)
        number = 1 if self.single else 2
        return dataclasses.replace(self, qo_lens=qo_lens * number, kv_lens=kv_lens * number)


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


def one_request(
    qo_len: int, kv_len: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, head_dim_vo: int,
    causal: bool = False, dtype: str = "bfloat16",
) -> BatchWorkload:  # fmt: skip
    """Returns a single request."""
    heads, head_dim_v = (num_qo_heads, num_kv_heads), 0 if head_dim_vo == head_dim else head_dim_vo
    shape = (qo_len,), (kv_len,), *heads, head_dim, 0
    return BatchWorkload(*shape, causal, dtype, dtype, head_dim_v=head_dim_v, single=True)
