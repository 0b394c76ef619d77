"""Loaded decode kernels, and their parameters from settings, grid and tensors."""

from __future__ import annotations

import functools

from cute_attn.kernels.host.batch import MAX_SETTINGS
from cute_attn.kernels.host.combine import CombineKernel
from cute_attn.kernels.host.fastdiv import magic
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.output import OUTPUT_FIELDS, OutputTarget, Target
from cute_attn.kernels.host.params import (
    ADDRESS_FIELDS,
    UNBOUNDED,
    Fields,
    ParamPacker,
    Values,
    block_scale_values,
    divisor,
    kv_axes,
    optional,
    two_addresses,
)
from cute_attn.kernels.host.prepared import Replay
from cute_attn.kernels.xqa.host.grid import LaunchConfig
from cute_attn.problem import BatchProblem, DecodeProblem, Problem, Request, Settings, draft_mask_bytes

CHUNK = 16  # bytes; page and token strides of k and v count chunks
ONE_PAGE = 1 << 30  # page size of keys that are not paged: more tokens than any request has

TENSOR_FIELDS = (
    *("q", "k", "v", "scale_ptr", "more_scale_ptr"),
    *("q_stride_n", "q_stride_h", "k_stride_n", "k_stride_h", "v_stride_n", "v_stride_h"),
)
REQUEST_FIELDS = ("table", "table_stride", "page_starts", "seq_lens", "q_indptr", "mask", "batch", "capacity")
SCRATCH_FIELDS = ("counters", "partials")
PAGE_FIELDS = ("k_stride_page", "v_stride_page")
AHEAD_FIELDS = ("entries", "pages")
BLOCK_SCALE_FIELDS = (
    *("k_sf", "k_sf_stride_page", "k_sf_stride_n", "k_sf_stride_h"),
    *("v_sf", "v_sf_stride_page", "v_sf_stride_n", "v_sf_stride_h"),
)


class PreparedKernel:
    """A loaded kernel for requests of the same settings and at most `config.qo_len` query tokens: single requests,
    planned batches, and decode calls without a plan.
    """

    def __init__(self, settings: Settings, config: LaunchConfig, gpu: Gpu) -> None:
        features, spec, grid = settings.features, config.spec, config.grid
        self.config, self.output = config, OutputTarget(settings)
        self.attention = load(spec, gpu.arch.name, gpu.device_index, gpu.pdl(settings))
        self.combine: CombineKernel | None = None  # CTAs merge their partial results themselves
        self.paged = features.kv_source == "paged"
        self.token, self.head = kv_axes(settings)
        self.itemsize = features.q_dtype.itemsize
        self.kv_itemsize = features.kv_dtype.itemsize  # of NVFP4: one byte, which holds two elements
        shares_multiplier, shares_shift = magic(grid[1])
        static: Fields = {
            "mask_row_bytes": draft_mask_bytes(config.qo_len),
            "q_len": config.qo_len,
            "window_left": UNBOUNDED if settings.window_left < 0 else min(settings.window_left, UNBOUNDED),
            "num_kv_heads": features.num_kv_heads,
            **divisor("row_blocks", config.row_blocks),
            "units_per_cta_group": features.num_kv_heads * config.row_blocks // grid[0],
            "shares_multiplier": shares_multiplier,
            "shares_shift": shares_shift,
            **divisor("group", features.num_qo_heads // features.num_kv_heads),
            **divisor("page_size", settings.page_size if self.paged else ONE_PAGE, stem="page"),
            "overhead": spec.segment_overhead,
            "min_share": config.min_share,
            "scale": settings.sm_scale,
            "lse_scale": settings.lse_scale,
        }
        self.ahead = spec.prefetch != "none"
        if self.ahead:
            static["resident"] = gpu.sms * spec.ctas
        extras, absent = optional({PAGE_FIELDS: self.paged, BLOCK_SCALE_FIELDS: features.kv_block_scales})
        ahead = AHEAD_FIELDS if self.ahead else ()
        self.number_fields: tuple[str, ...] = REQUEST_FIELDS + SCRATCH_FIELDS
        dynamic = (*TENSOR_FIELDS, OUTPUT_FIELDS, self.number_fields, extras + ahead)
        packer = ParamPacker.of(self.attention, static | absent, dynamic)
        self.pack = packer.values
        self.replay_fields: tuple[str, ...] = ADDRESS_FIELDS

    def values(self, problem: Request | BatchProblem, target: Target, numbers: Values, stream: int) -> Values:
        """Returns the parameters of a launch. `numbers`: values of REQUEST_FIELDS, then of SCRATCH_FIELDS. A field that
        a launch does not use is 0: of `table_stride` and `page_starts` one is, and without draft tokens `q_indptr` and
        `mask` are.
        """
        q, k, v, scales = problem.q, problem.k, problem.v, problem.scale_tensors
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        size, token, head = self.kv_itemsize, self.token, self.head
        scale, more_scale = two_addresses(scales) if scales else (0, 0)
        extras: Values = ()
        if self.paged:
            extras = k_strides[0] * size // CHUNK, v_strides[0] * size // CHUNK
        if problem.block_scales is not None:
            extras += block_scale_values(problem.block_scales, self.paged, token, head)
        if self.ahead:
            extras += bounds(problem)
        return self.pack(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            scale,
            more_scale,
            q_strides[0] * self.itemsize,
            q_strides[-2] * self.itemsize,
            k_strides[token] * size // CHUNK,
            k_strides[head] * size,
            v_strides[token] * size // CHUNK,
            v_strides[head] * size,
            target,
            numbers,
            extras,
        )

    def replay(self, problem: Problem | BatchProblem) -> Replay:
        """Returns a function that returns the addresses of tensors."""
        return lambda q, k, v, out, lse, stream: (q, k, v, out, lse)


def bounds(problem: Request | BatchProblem) -> Values:
    """Returns the values of AHEAD_FIELDS: entries of the page table, and pages of the cache; 1 and 1 without pages."""
    if isinstance(problem, Problem):
        return 1, 1
    if isinstance(problem, DecodeProblem):
        rows, width = problem.block_tables.shape
        return (rows - 1) * problem.block_tables.stride(0) + width, problem.k.shape[0]
    assert problem.kv_indices is not None
    return problem.kv_indices.shape[0], problem.k.shape[0]


prepared_kernel = functools.lru_cache(MAX_SETTINGS)(PreparedKernel)
