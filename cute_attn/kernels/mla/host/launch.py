"""Host code of the kernel for latent attention: from a problem to a spec, a grid and parameters.

Lengths and page numbers are read on the device, as by XQA's calls without a plan, with whose memory these launches run:
partial results are in the caller's scratch memory, or in torch's where that is too small; counters are those of the
stream, or of a captured launch.
"""

from __future__ import annotations

from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import Fire, OptionalBounds, fire_first, launch_nothing, optional_tensors
from cute_attn.kernels.host.params import UNBOUNDED, Fields
from cute_attn.kernels.host.prepared import prepared
from cute_attn.kernels.mla.spec import CacheForm
from cute_attn.kernels.mla.tiles import choose
from cute_attn.kernels.xqa.host.prepared import fire_in_scratch
from cute_attn.kernels.xqa.host.variant import LaunchConfig, shares
from cute_attn.problem import UNLIMITED, short
from cute_attn.request.mla import MlaProblem, MlaScales, MlaSettings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule.split_kv import ceil_div

ADDRESSES = (
    *("q_nope", "ckv", "kpe", "o", "lse", "counters", "partials", "capacity"),
    *("table", "seq_lens", "q_indptr", "page_starts"),
)
STRIDES = (
    *("q_nope_stride_n", "q_nope_stride_h", "q_pe_stride_n", "q_pe_stride_h", "ckv_stride_page", "ckv_stride_n"),
    *("kpe_stride_page", "kpe_stride_n", "o_stride_n", "o_stride_h", "ckv_scales_stride_page", "ckv_scales_stride_n"),
)
NUMBERS = ("table_stride", "batch")


def launch_config(settings: MlaSettings, qo_len: int, arch: Arch, sms: int) -> LaunchConfig:
    """Return the kernel and grid of problems with these settings and query tokens per request."""
    rows = qo_len * settings.num_heads
    kv_dtype = "" if settings.kv_dtype == settings.dtype else short(settings.kv_dtype)
    spec = choose(short(settings.dtype), CacheForm(kv_dtype, settings.rope_bits, settings.grouped), rows, arch)
    row_blocks = max(1, ceil_div(rows, spec.rows))
    return shares(spec, qo_len, row_blocks, 1, sms, UNLIMITED)


def loaded(settings: MlaSettings, qo_len: int, gpu: Gpu) -> tuple[OptionalBounds, LaunchConfig]:
    """Return the launches of problems with these settings and query tokens per request."""
    config = launch_config(settings, qo_len, gpu.arch, gpu.sms)
    static: Fields = {
        **config.fields(1, settings.num_heads, settings.page_size),
        "right": 0 if settings.causal else UNBOUNDED - 1,
        "window_left": UNBOUNDED,
        "lse_scale": settings.lse_scale,
    }
    launch = gpu.loaded(config.spec, settings.enable_pdl)
    return OptionalBounds(launch, static, (ADDRESSES, STRIDES, NUMBERS, MlaScales._fields)), config


def run(problem: MlaProblem, gpu: Gpu) -> Fire:
    """Launch the kernel on the current stream, and return what runs calls that differ in addresses."""
    settings, lengths = problem.settings, problem.lengths
    if not lengths.batch_size or not lengths.qo_len or not problem.q.shape[0]:
        return launch_nothing
    bounds, config = prepared(loaded, settings, lengths.qo_len, gpu)
    tensors = problem.q, problem.extras.q_pe, problem.k, problem.kpe, problem.out, problem.extras.ckv_scales
    strides = tuple([0 if x is None else x.stride(axis) * x.itemsize for x in tensors for axis in (0, 1)])
    table_stride = lengths.kv_indices.stride(0) if lengths.kv_indptr is None else 0
    settled = config.grid, strides, (table_stride, lengths.batch_size), problem.scales
    bound, longest = bounds.of(optional_tensors(problem)[0]), lengths.capacity(settings.page_size)
    return fire_first(fire_in_scratch(bound, config, problem.scratch, longest, settled, gpu.device_index), problem)
