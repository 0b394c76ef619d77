"""Host code of the append kernel: from a request to a spec, its parameters and a grid."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from cute_attn.kernels.append.spec import BLOCK, COPY, NVFP4, THREADS, VECTOR, AppendSpec
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.params import Fields, ParamPacker, Values, divisor
from cute_attn.request.append import Append
from cute_attn.request.page_table import OwnRows, PageTable, SlotMapping
from cute_attn.runtime.launch import Launch, current_stream

LARGEST = (1 << 31) - THREADS  # units of a launch, slots and indices: the kernel counts in 32 bits
SLOTS = {PageTable: "pages", SlotMapping: "mapped", OwnRows: "rows"}
KINDS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
INDEX_DTYPES = (torch.int32, torch.int64)

_PLACE = ("", "_page", "_token", "_head")
_OPERAND = (
    *("source", "source_row", "source_head", "source_step"),
    *("cache" + name for name in _PLACE),
    *("sf" + name for name in _PLACE),
    *("scale", "scale_address", "units", "units_multiplier", "units_shift"),
)
_SHARED = ("rows", "heads", "heads_multiplier", "heads_shift", "page_size", "page_size_multiplier", "page_size_shift")
_PAGES = ("batch_indices", "positions", "kv_indices", "kv_indptr")
_INDEX = ("", "_step", "_wide")
NAMES = (
    *(side + name for side in ("k_", "v_") for name in _OPERAND),
    *(*_SHARED, "num_pages"),
    *(name + suffix for name in _PAGES for suffix in _INDEX),
    *("batch_size", "num_indices"),
    *("slot_mapping" + suffix for suffix in _INDEX),
    "num_slots",
)
ABSENT: Values = (0,) * 12 + (1.0, 0, 0, 0, 0)  # an operand without units
NO_INDEX: Values = (0, 0, 0)


def fits(append: Append) -> bool:
    """Tells whether the kernel can run a request.

    Quantised rows need whole blocks, counts must fit 32 bits, and rows with gaps between elements are copied element by
    element, which must have the same size in keys and values.
    """
    nnz = append.rows[0].shape[0]
    num_slots = append.caches[0].shape[0] * append.caches[0].shape[1]
    elements = max(nnz * x.shape[1] * x.shape[2] for x in append.rows)
    if append.stored == COPY:
        whole = all(map(_unit_stride, append.rows)) or len({x.itemsize for x in append.rows}) == 1
    else:
        whole = all(x.shape[2] % BLOCK == 0 for x in append.rows)
    indices = (x.numel() for x in append.slots if isinstance(x, torch.Tensor))
    return whole and max(elements, num_slots, *indices, 0) < LARGEST


def run(append: Append, gpu: Gpu) -> None:
    """Launches the kernel on the current stream. The request must fit it, and have something to write."""
    chosen = spec(append)
    launch, pack = _prepared(chosen, gpu)
    unit = chosen.access if append.stored == COPY else BLOCK * append.rows[0].itemsize
    nnz, heads = append.rows[0].shape[:2]
    units = [x.shape[2] * x.itemsize // unit for x in append.rows]
    items = nnz * heads * max(units)
    if not items:
        return
    operands = [_operand(append, i, chosen.access, units[i]) for i in range(len(units))]
    values = pack(operands, _shared(append), _indices(append))
    launch.fire(values, (-(-items // THREADS), len(operands), 1), current_stream(gpu.device_index))


def spec(append: Append) -> AppendSpec:
    """Returns the kernel of a request: the widest accesses that addresses and strides allow."""
    slots = SLOTS[type(append.slots)]
    if append.stored == COPY:
        return AppendSpec(slots=slots, access=min(_copy_access(*pair) for pair in _pairs(append)))
    kind = KINDS[append.rows[0].dtype]
    stored = 8 if append.stored == NVFP4 else VECTOR  # bytes of a block
    vector = all(
        _unit_stride(rows) and _alignment(rows) >= VECTOR and _alignment(cache) >= stored
        for rows, cache in _pairs(append)
    )
    return AppendSpec(append.stored, kind, slots, VECTOR if vector else append.rows[0].itemsize)


def _pairs(append: Append) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(append.rows, append.caches, strict=True))


def _copy_access(rows: torch.Tensor, cache: torch.Tensor) -> int:
    size = rows.itemsize
    if not _unit_stride(rows):
        return size
    row_bytes = rows.shape[2] * size
    return min(_alignment(rows), _alignment(cache), row_bytes & -row_bytes or VECTOR)


def _unit_stride(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def _alignment(x: torch.Tensor) -> int:
    """Returns the largest power of two, at most 16, that divides the addresses of all rows of the last axis."""
    bits, size = x.data_ptr() | VECTOR, x.itemsize
    for extent, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if extent > 1:
            bits |= stride * size
    return bits & -bits


@functools.lru_cache(256)
def _prepared(chosen: AppendSpec, gpu: Gpu) -> tuple[Launch, Callable[[list[Values], Values, Values], Values]]:
    """Returns the loaded kernel, and a function that orders its parameters."""
    launch = load(chosen, gpu.arch.name, gpu.device_index, gpu.arch.pdl)
    packer = ParamPacker.of(launch, {}, (NAMES,))

    def pack(operands: list[Values], shared: Values, indices: Values) -> Values:
        k, *others = operands
        return packer.values((*k, *(others[0] if others else ABSENT), *shared, *indices))

    return launch, pack


def _operand(append: Append, i: int, access: int, units: int) -> Values:
    """Returns the parameters of keys or of values, which have so many units per head."""
    rows, cache = append.rows[i], append.caches[i]
    size, (row, head, step) = rows.itemsize, rows.stride()
    step = access if append.stored == COPY and _unit_stride(rows) else step * size
    given = append.scales[i]
    scale, address = (1.0, given.data_ptr()) if isinstance(given, torch.Tensor) else (given, 0)
    scales = _place(append.block_scales[i]) if append.block_scales else (0, 0, 0, 0)
    of_units = tuple(_divisor(max(units, 1)).values())[1:]
    return (rows.data_ptr(), row * size, head * size, step, *_place(cache), *scales, scale, address, units, *of_units)


def _place(cache: torch.Tensor) -> Values:
    size, (page, token, head, _) = cache.itemsize, cache.stride()
    return cache.data_ptr(), page * size, token * size, head * size


@functools.lru_cache(1024)
def _divisor(value: int) -> Fields:
    return divisor("n", value)


def _shared(append: Append) -> Values:
    nnz, heads = append.rows[0].shape[:2]
    num_pages, page_size = append.caches[0].shape[:2]
    return (nnz, *_divisor(max(heads, 1)).values(), *_divisor(page_size).values(), num_pages)


def _indices(append: Append) -> Values:
    """Returns the parameters that say where rows go."""
    slots = append.slots
    num_pages, page_size = append.caches[0].shape[:2]
    if isinstance(slots, PageTable):
        pages = (value for x in slots[:4] for value in _index(x))
        return (*pages, slots.kv_indptr.shape[0] - 1, slots.kv_indices.shape[0], *NO_INDEX, 0)
    mapping = _index(slots.slot_mapping) if isinstance(slots, SlotMapping) else NO_INDEX
    return (*(NO_INDEX * len(_PAGES)), 0, 0, *mapping, num_pages * page_size)


def _index(x: torch.Tensor) -> Values:
    return x.data_ptr(), x.stride(0) * x.itemsize, int(x.dtype == torch.int64)


def with_index_dtypes(append: Append) -> Append:
    """Returns the request with indices that the kernel reads: int32 or int64."""
    if all(x.dtype in INDEX_DTYPES for x in append.slots):
        return append
    return append._replace(slots=type(append.slots)(*(x if x.dtype in INDEX_DTYPES else x.int() for x in append.slots)))
