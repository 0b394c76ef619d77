"""Parameter block of the decode kernel: from tensors and settings to numbers by field name."""

from __future__ import annotations

import torch

from cute_attn.kernels.host import fastdiv
from cute_attn.kernels.host.params import UNBOUNDED, two_addresses
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.problem import BatchProblem, DecodeProblem, Problem, Settings, draft_mask_bytes

CHUNK = 16  # bytes, in which the kernel counts K and V
ONE_PIECE = 1 << 30  # tokens of the only page of keys that lie in one piece: more than any request has
SEGMENT_OVERHEAD = 4  # what starting and finishing a segment costs, in tiles

RERUN_FIELDS = ("q", "k", "v", "o", "lse")  # what differs between runs of a plan
FIELDS = (  # of the kernel's `XqaParams`, in order
    *RERUN_FIELDS,
    *("k_sf", "v_sf", "table", "page_starts", "seq_lens", "q_indptr", "mask", "sinks"),
    *("scale_ptr", "more_scale_ptr", "v_scale_ptr", "partials", "counters"),
    *("q_stride_n", "q_stride_h", "o_stride_n", "o_stride_h"),
    *("k_stride_h", "v_stride_h", "k_sf_stride_h", "v_sf_stride_h"),
    *("k_stride_page", "k_stride_n", "v_stride_page", "v_stride_n"),
    *("k_sf_stride_page", "k_sf_stride_n", "v_sf_stride_page", "v_sf_stride_n"),
    *("mask_row_bytes", "batch", "capacity", "table_stride", "q_len", "window_left", "num_kv_heads"),
    *("row_blocks", "row_blocks_multiplier", "row_blocks_shift"),
    *("units_per_cta_group", "shares_multiplier", "shares_shift"),
    *("group", "group_multiplier", "group_shift"),
    *("page_size", "page_multiplier", "page_shift"),
    *("overhead", "min_share", "scale", "v_scale", "lse_scale"),
)

Block = dict[str, int | float]  # fields by name

# Where the requests of a launch are: `batch`, `seq_lens` and `capacity` (no request has more keys); `table` with either
# a `table_stride` or `page_starts`; with draft tokens perhaps `q_indptr` and `mask`. Fields left out are 0.
Requests = Block


class Parameters:
    """Parameter blocks of launches of the same settings and query tokens per request, whose other numbers are computed
    once. `grid`: (CTA groups, CTAs per group, 1).
    """

    def __init__(self, settings: Settings, qo_len: int, spec: XqaSpec, grid: tuple[int, int, int]) -> None:
        f = settings.features
        self.q_itemsize, self.o_itemsize = f.q_dtype.itemsize, f.o_dtype.itemsize
        self.kv_itemsize = f.kv_dtype.itemsize  # of NVFP4: a byte, which holds two elements
        self.paged = f.kv_source == "paged"
        axes = (1, 0) if settings.kv_layout == "HND" else (0, 1)
        self.token, self.head = (axis + int(self.paged) for axis in axes)  # axes of k and v
        group = f.num_qo_heads // f.num_kv_heads
        row_blocks = count_row_blocks(qo_len * group, spec)
        page_size = settings.page_size if self.paged else ONE_PIECE
        numbers: Block = {
            "mask_row_bytes": draft_mask_bytes(qo_len),
            "q_len": qo_len,
            "window_left": UNBOUNDED if settings.window_left < 0 else min(settings.window_left, UNBOUNDED),
            "num_kv_heads": f.num_kv_heads,
            **_divisor("row_blocks", "row_blocks", row_blocks),
            "units_per_cta_group": f.num_kv_heads * row_blocks // grid[0],
            **_divisor("", "shares", grid[1]),
            **_divisor("group", "group", group),
            **_divisor("page_size", "page", page_size),
            "overhead": SEGMENT_OVERHEAD,
            "min_share": spec.warps,  # a tile per warp
            "scale": settings.sm_scale,
            "v_scale": settings.v_scale,
            "lse_scale": settings.lse_scale,
        }
        self.block: Block = dict.fromkeys(FIELDS, 0) | numbers

    def of(
        self, problem: Problem | BatchProblem | DecodeProblem, requests: Requests, counters: int, partials: int
    ) -> Block:
        """The block of one launch, in the order of `FIELDS`; `counters`, `partials`: addresses."""
        q, k, v, out, lse, sinks = problem.q, problem.k, problem.v, problem.out, problem.lse, problem.sinks
        q_strides, o_strides, size = q.stride(), out.stride(), self.kv_itemsize
        k_page, k_token, k_head = self.strides(k)
        v_page, v_token, v_head = self.strides(v)
        block = self.block | requests
        block |= {
            "q": q.data_ptr(),
            "k": k.data_ptr(),
            "v": v.data_ptr(),
            "o": out.data_ptr(),
            "lse": 0 if lse is None else lse.data_ptr(),
            "sinks": 0 if sinks is None else sinks.data_ptr(),
            "partials": partials,
            "counters": counters,
            "q_stride_n": q_strides[0] * self.q_itemsize,
            "q_stride_h": q_strides[-2] * self.q_itemsize,
            "o_stride_n": o_strides[0] * self.o_itemsize,
            "o_stride_h": o_strides[-2] * self.o_itemsize,
            "k_stride_h": k_head * size,
            "v_stride_h": v_head * size,
            "k_stride_page": k_page * size // CHUNK,
            "k_stride_n": k_token * size // CHUNK,
            "v_stride_page": v_page * size // CHUNK,
            "v_stride_n": v_token * size // CHUNK,
        }
        if problem.scale_tensors:
            block["scale_ptr"], block["more_scale_ptr"] = two_addresses(problem.scale_tensors)
        if problem.v_scale_tensor is not None:
            block["v_scale_ptr"] = problem.v_scale_tensor.data_ptr()
        if problem.block_scales is not None:
            block |= self.block_scales(*problem.block_scales)
        return block

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Elements to the next page, token and head of k or v, or of their block scales."""
        strides = x.stride()
        return strides[0] if self.paged else 0, strides[self.token], strides[self.head]

    def block_scales(self, k: torch.Tensor, v: torch.Tensor) -> Block:
        """Addresses and strides of K's and V's block scales, a byte each."""
        (k_page, k_token, k_head), (v_page, v_token, v_head) = self.strides(k), self.strides(v)
        return {
            "k_sf": k.data_ptr(),
            "v_sf": v.data_ptr(),
            "k_sf_stride_h": k_head,
            "v_sf_stride_h": v_head,
            "k_sf_stride_page": k_page,
            "k_sf_stride_n": k_token,
            "v_sf_stride_page": v_page,
            "v_sf_stride_n": v_token,
        }


def count_row_blocks(packed_rows: int, spec: XqaSpec) -> int:
    """Blocks of query rows that a kv head of a request has."""
    return -(-packed_rows // spec.rows)


def _divisor(name: str, prefix: str, value: int) -> Block:
    """A divisor, where the kernel wants it itself, and the numbers that divide by it."""
    multiplier, shift = fastdiv.magic(value)
    numbers: Block = {f"{prefix}_multiplier": multiplier, f"{prefix}_shift": shift}
    return {name: value, **numbers} if name else numbers
