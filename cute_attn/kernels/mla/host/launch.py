"""Host code of the kernel for latent attention: from a problem to a spec, a grid and parameters.

Lengths and page numbers are read on the device. Partial results are in the caller's scratch memory, or in torch's where
that is too small; counters are those of the stream, or of a captured launch.
"""

from __future__ import annotations

import torch

from cute_attn.kernels.host.gpu import Gpu, load
from cute_attn.kernels.host.params import UNBOUNDED, Fields
from cute_attn.kernels.host.prepared import prepared
from cute_attn.kernels.mla.spec import CacheForm
from cute_attn.kernels.mla.tiles import choose
from cute_attn.kernels.xqa.host.variant import LaunchConfig, shares
from cute_attn.problem import UNLIMITED, short
from cute_attn.request.mla import MlaProblem, MlaSettings
from cute_attn.runtime import counters
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import Bound, Values, current_stream
from cute_attn.schedule.split_kv import ceil_div

ADDRESSES = (
    *("q_nope", "q_pe", "ckv", "kpe", "o", "lse", "table", "page_starts", "seq_lens", "q_indptr"),
    *("scale_ptr", "v_scale_ptr", "sinks", "ckv_scales", "partials", "counters"),
)
STRIDES = (
    *("q_nope_stride_n", "q_nope_stride_h", "q_pe_stride_n", "q_pe_stride_h", "ckv_stride_page", "ckv_stride_n"),
    *("kpe_stride_page", "kpe_stride_n", "o_stride_n", "o_stride_h", "ckv_scales_stride_page", "ckv_scales_stride_n"),
)
NUMBERS = ("table_stride", "batch", "capacity")


def launch_config(settings: MlaSettings, qo_len: int, arch: Arch, sms: int) -> LaunchConfig:
    """Return the kernel and grid of problems with these settings and query tokens per request."""
    rows = qo_len * settings.num_heads
    kv_dtype = "" if settings.kv_dtype == settings.dtype else short(settings.kv_dtype)
    spec = choose(short(settings.dtype), CacheForm(kv_dtype, settings.rope_bits, settings.grouped), rows, arch)
    row_blocks = max(1, ceil_div(rows, spec.rows))
    return shares(spec, qo_len, row_blocks, 1, sms, UNLIMITED)


def loaded(settings: MlaSettings, qo_len: int, gpu: Gpu) -> tuple[Bound, LaunchConfig]:
    """Return the launches of problems with these settings and query tokens per request."""
    config = launch_config(settings, qo_len, gpu.arch, gpu.sms)
    static: Fields = {
        **config.fields(1, settings.num_heads, settings.page_size),
        "right": 0 if settings.causal else UNBOUNDED - 1,
        "window_left": UNBOUNDED,
        "scale": settings.sm_scale,
        "rope_scale": settings.rope_scale,
        "v_scale": settings.v_scale,
        "lse_scale": settings.lse_scale,
    }
    launch = load(config.spec, gpu.arch.name, gpu.device_index, gpu.pdl(settings.enable_pdl))
    return launch.bind(static, ADDRESSES, STRIDES, NUMBERS), config


def run(problem: MlaProblem, gpu: Gpu) -> None:
    """Launch the kernel on the current stream."""
    lengths, scratch = problem.lengths, problem.scratch
    if not lengths.batch_size or not lengths.qo_len or not problem.q_nope.shape[0]:
        return
    (bound, config), stream = prepared(loaded, problem.settings, lengths.qo_len, gpu), current_stream(gpu.device_index)
    partials, own = scratch.partials, None
    if scratch.partial_bytes < config.partial_bytes:
        own = problem.q_nope.new_empty(config.partial_bytes, dtype=torch.uint8)  # until the launch is in its stream
        partials = own.data_ptr()
    counted = counters.of_device(gpu.device_index, counters.SEMAPHORES).address(stream)
    tensors = (
        *(problem.q_nope, problem.q_pe, problem.ckv, problem.kpe, problem.out, problem.lse),
        *(lengths.kv_indices, lengths.kv_indptr, lengths.kv_len, lengths.qo_indptr),
        *(problem.scale, problem.v_scale, problem.sinks, problem.ckv_scales),
    )
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    bound.fire(stream, (*addresses, partials, counted), (config.grid, _strides(problem), _numbers(problem)))


def _strides(problem: MlaProblem) -> Values:
    """Return the values of STRIDES, in bytes."""
    tensors = problem.q_nope, problem.q_pe, problem.ckv, problem.kpe, problem.out, problem.ckv_scales
    return tuple([0 if x is None else x.stride(axis) * x.itemsize for x in tensors for axis in (0, 1)])


def _numbers(problem: MlaProblem) -> Values:
    """Return the values of NUMBERS."""
    lengths = problem.lengths
    table_stride = lengths.kv_indices.stride(0) if lengths.kv_indptr is None else 0
    return table_stride, lengths.batch_size, lengths.capacity(problem.settings.page_size)
