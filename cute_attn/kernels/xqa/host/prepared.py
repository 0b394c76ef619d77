"""Loaded decode kernels, and their parameters from settings, grid and tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import BLOCK_SCALE_FIELDS, STRIDE_FIELDS, Fire, plain_strides
from cute_attn.kernels.host.params import UNBOUNDED, Fields, kv_axes
from cute_attn.kernels.host.prepared import Addresses, PreparedKernel
from cute_attn.kernels.xqa.host.variant import LaunchConfig
from cute_attn.problem import Scratch, Settings, draft_mask_bytes
from cute_attn.runtime import capture, counters
from cute_attn.runtime.arch import MAX_DEVICES
from cute_attn.runtime.launch import CPU, Bound, Settled, Values, current_stream

CHUNK = 16  # bytes; page and token strides of k and v count chunks
ONE_PAGE = 1 << 30  # page size of keys that are not paged: more tokens than any request has

# A field that a launch does not use is 0: of `table_stride` and `page_starts` one is, and without draft tokens
# `q_indptr` and `mask` are. `capacity`, the most keys, is that of a single request, which grows with its cache.
ADDRESS_FIELDS = ("q", "k", "v", "o", "lse", "counters", "partials", "capacity")
TABLE_FIELDS = ("table", "seq_lens", "q_indptr", "mask")  # addresses, which move in calls without a plan alone
REQUEST_FIELDS = ("table_stride", "page_starts", "batch", "entries")  # entries of the page table: 1 without pages


@functools.lru_cache(MAX_DEVICES)
def one_page(device_index: int) -> torch.Tensor:
    """Returns a page table of one row, which holds page 0, and a length that the kernel limits to that of the call.
    They stay allocated, because captured graphs read them after their kernel is dropped from its cache.
    """
    table = torch.tensor([[0], [ONE_PAGE]], dtype=torch.int32, device="cpu")
    if device_index == CPU:
        return table
    device = torch.device("cuda", device_index)
    return capture.outside(device, functools.partial(table.to, device))


class XqaKernel(PreparedKernel):
    """A loaded kernel for requests of the same settings and at most `config.qo_len` query tokens: single requests,
    planned batches, and decode calls without a plan. CTAs merge their partial results themselves.
    """

    def __init__(self, settings: Settings, config: LaunchConfig, gpu: Gpu) -> None:
        features, spec = settings.features, config.spec
        launch = gpu.loaded(spec, settings.enable_pdl)
        self.paged = features.kv_source == "paged"
        page_size = settings.page_size if self.paged else ONE_PAGE
        static: Fields = {
            **config.fields(features.num_kv_heads, features.num_qo_heads // features.num_kv_heads, page_size),
            "dealt": config.dealt,
            "mask_row_bytes": draft_mask_bytes(config.qo_len),
            "window_left": UNBOUNDED if settings.window_left < 0 else min(settings.window_left, UNBOUNDED),
            "lse_scale": settings.lse_scale,
        }
        moving, settled = (TABLE_FIELDS, ()) if features.device_lengths else ((), TABLE_FIELDS)
        if features.kv_source == "dense" and not features.device_lengths:  # a single request, whose keys are one page
            self.counter = counters.of_device(gpu.device_index, counters.SEMAPHORES).address
            table, length = one_page(gpu.device_index)
            static |= dict(zip(TABLE_FIELDS, (table.data_ptr(), length.data_ptr(), 0, 0), strict=True))
            settled = ()
        groups = ADDRESS_FIELDS + moving, (*STRIDE_FIELDS, *BLOCK_SCALE_FIELDS, "pages"), REQUEST_FIELDS + settled
        super().__init__(settings, launch, static, groups)

    def read_strides(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_scales: Values) -> Values:
        """Returns strides, and the pages of the cache."""
        pages = k.shape[0] if self.paged else 1
        return *plain_strides(self.settings, q, k, v, CHUNK), *block_scales, pages

    def addresses(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Addresses:
        """Returns what returns its argument: the values of ADDRESS_FIELDS."""
        return tuple

    def most_keys(self, kv_len: int, k: torch.Tensor, v: torch.Tensor) -> int:
        token, _ = kv_axes(self.settings)
        step = k.itemsize * max(k.stride(token), v.stride(token))  # the kernel counts chunks in 32 bits
        if kv_len * step >= CHUNK << 32:
            k_shape, v_shape = tuple(k.shape), tuple(v.shape)
            raise ArgumentError(f"k and v must span less than {CHUNK << 32} bytes each, got {k_shape} and {v_shape}")
        return ((CHUNK << 32) - 1) // max(1, step)


def fire_in_scratch(
    attention: Bound, config: LaunchConfig, scratch: Scratch, longest: int, settled: Settled, index: int
) -> Fire:
    """Returns a function that runs calls whose lengths and page tables are on device `index`, in their scratch memory.
    `longest`: the most keys of a request.
    """
    own_partials = scratch.partial_bytes < config.partial_bytes
    of_stream: Callable[[int], int] | None = None
    if scratch.counter_bytes < config.counter_bytes:
        of_stream = counters.of_device(index, counters.SEMAPHORES).address

    def fire(q: int, k: int, v: int, out: int, lse: int, tensors: tuple[Any, ...]) -> None:
        # query, k, v, out, lse, `operands.Optional`; addresses of counters, partial results, and so on
        query, _, _, _, _, optional, counted_at, partials_at, table, seq_lens, q_indptr, last = tensors
        stream = current_stream(index)
        if of_stream is not None:
            counted_at = of_stream(stream)
        if own_partials:
            partials = query.new_empty(config.partial_bytes, dtype=torch.uint8)  # until the launch is in its stream
            partials_at = partials.data_ptr()
        moving = q, k, v, out, lse, counted_at, partials_at, longest, table, seq_lens, q_indptr, last
        attention.fire(stream, moving, settled, optional)

    return fire
