"""Host code of the lengths kernel."""

from __future__ import annotations

from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.prepared import prepared
from cute_attn.kernels.xqa.lengths.spec import THREADS, LengthsSpec
from cute_attn.problem import DeviceLengths
from cute_attn.runtime.launch import Bound, current_stream

FIELDS = ("indptr", "last_page_len", "seq_lens", "page_starts", "batch", "page_size", "num_indices")


def write(lengths: DeviceLengths, page_size: int, addresses: tuple[int, int], gpu: Gpu) -> None:
    """Launches the kernel on the current stream. `addresses`: of keys and first pages, an int32 number per request."""
    batch, last = lengths.batch_size, lengths.last_page_len
    assert last is not None  # of paged requests
    if not batch:
        return
    values = lengths.kv_indptr.data_ptr(), last.data_ptr(), *addresses, batch, page_size, lengths.max_kv
    prepared(_bound, gpu).fire(current_stream(gpu.device_index), values, ((-(-batch // THREADS), 1, 1),))


def _bound(gpu: Gpu) -> Bound:
    """Returns launches of the kernel by values of FIELDS."""
    return load(LengthsSpec(), gpu.arch.name, gpu.device_index, gpu.arch.pdl).bind({}, FIELDS)
