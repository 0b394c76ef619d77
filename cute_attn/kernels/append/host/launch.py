"""Host code of the append kernel: from a request to a spec, its parameters and a grid.

Everything but addresses and scales is memoised by the tensors' layouts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from cute_attn.kernels.append.spec import BLOCK, COPY, NVFP4, THREADS, VECTOR, AppendSpec
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import Fire
from cute_attn.kernels.host.params import Fields, divisor
from cute_attn.kernels.host.prepared import prepared
from cute_attn.problem import short
from cute_attn.request.append import Append, OwnRows, PageTable, SlotMapping
from cute_attn.runtime.launch import Bound, Settled, current_stream

LARGEST = (1 << 31) - THREADS  # units of a launch, slots and indices: the kernel counts in 32 bits
INDEX_DTYPES = (torch.int32, torch.int64)
SLOTS = {PageTable: "pages", SlotMapping: "mapped", OwnRows: "rows"}
# Tensors of indices that the kernel reads, in the order of the request's slots.
INDICES = {"pages": ("batch_indices", "positions", "kv_indices", "kv_indptr"), "mapped": ("slot_mapping",), "rows": ()}
SIDES = ("k", "v")


class Layout(NamedTuple):
    """What memory layout a tensor has. `low`: its address modulo 16."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    low: int

    @property
    def unit_stride(self) -> bool:
        return self.strides[-1] == 1 or self.shape[-1] <= 1

    @property
    def alignment(self) -> int:
        """Returns the largest power of two, at most 16, that divides the addresses of all rows of the last axis."""
        bits = self.low | VECTOR
        for extent, stride in zip(self.shape[:-1], self.strides[:-1], strict=True):
            bits |= stride * self.dtype.itemsize if extent > 1 else 0
        return bits & -bits

    def stride_bytes(self, *axes: int) -> tuple[int, ...]:
        return tuple(self.strides[axis] * self.dtype.itemsize for axis in axes)


class Layouts(NamedTuple):
    """Layouts of a request's tensors."""

    stored: str
    slots: str
    rows: tuple[Layout, ...]
    caches: tuple[Layout, ...]
    block_scales: tuple[Layout, ...]
    indices: tuple[Layout, ...]


def run(append: Append, gpu: Gpu) -> Fire | None:
    """Launches the kernel on the current stream, and returns what runs requests of keys and values that differ in
    addresses; v of a cache that has one address lies as far behind k as here. None, and nothing happens, where the
    kernel cannot run the request.
    """
    slots = SLOTS[type(append.slots)]
    names = INDICES[slots]
    indices = [x if x.dtype in INDEX_DTYPES else x.int() for x in append.slots[: len(names)]]
    groups = append.rows, append.caches, append.block_scales, indices
    addresses = [x.data_ptr() for group in groups for x in group]
    plain = [tuple([(x.shape, x.stride(), x.dtype, x.data_ptr() & 15) for x in group]) for group in groups]
    found = prepared(_launches, gpu, append.stored, slots, *plain)
    if found is None:
        return None
    (launch, settled), device = found, gpu.device_index
    places = tuple([x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in append.scales])
    numbers = tuple([1.0 if isinstance(x, torch.Tensor) else x for x in append.scales])
    launch.fire(current_stream(device), (*addresses, *numbers, *places), settled)
    behind, *behind_sf = (pair[-1].data_ptr() - pair[0].data_ptr() for pair in groups[1:3] if pair)

    def fire(k: int, v: int, _: int, k_cache: int, v_cache: int, tensors: tuple[Any, ...]) -> None:
        scales, *read = tensors[5:]  # on the device; addresses of block scales, those of v first, and of indices
        caches: tuple[int, ...] = k_cache, v_cache or k_cache + behind
        if behind_sf:
            v_sf, k_sf, *read = read
            caches += k_sf, v_sf if v_sf != k_sf else k_sf + behind_sf[0]
        of_scales = iter(scales)
        at = [next(of_scales).data_ptr() if place else 0 for place in places]
        launch.fire(current_stream(device), (k, v, *caches, *read, *numbers, *at), settled)

    return fire


def fits(layouts: Layouts) -> bool:
    """Tells whether the kernel can run a request.

    Quantised rows need whole blocks, counts must fit 32 bits, and rows with gaps between elements are copied element by
    element, which must have the same size in keys and values.
    """
    num_slots = layouts.caches[0].shape[0] * layouts.caches[0].shape[1]
    if layouts.stored == COPY:
        one_size = len({x.dtype.itemsize for x in layouts.rows}) == 1
        whole = one_size or all(x.unit_stride for x in layouts.rows)
    else:
        whole = all(x.shape[2] % BLOCK == 0 for x in layouts.rows)
    counts = (math.prod(x.shape) for x in (*layouts.rows, *layouts.indices))
    return whole and max(num_slots, *counts) < LARGEST


def spec(layouts: Layouts) -> AppendSpec:
    """Returns the kernel of a request: the widest accesses that addresses and strides allow."""
    pairs = list(zip(layouts.rows, layouts.caches, strict=True))
    if layouts.stored == COPY:
        access = min(_copy_access(*pair) for pair in pairs)
        return AppendSpec(slots=layouts.slots, access=access, per_thread=_per_thread(layouts, access))
    stored = BLOCK // 2 if layouts.stored == NVFP4 else BLOCK  # bytes of a block
    vector = all(rows.unit_stride and rows.alignment == VECTOR and cache.alignment >= stored for rows, cache in pairs)
    dtype = layouts.rows[0].dtype
    access = VECTOR if vector else dtype.itemsize
    return AppendSpec(layouts.stored, short(dtype), layouts.slots, access, _per_thread(layouts, access))


def _units(layouts: Layouts, access: int) -> list[int]:
    """Returns the units of a head's row of keys and of values."""
    unit = access if layouts.stored == COPY else BLOCK * layouts.rows[0].dtype.itemsize
    return [x.shape[2] * x.dtype.itemsize // unit for x in layouts.rows]


def _per_thread(layouts: Layouts, access: int) -> int:
    """Returns 2 where threads look slots up and every head's row divides."""
    if layouts.slots == "rows" or access < VECTOR or any(n % 2 for n in _units(layouts, access)):
        return 1
    return 2


def _copy_access(rows: Layout, cache: Layout) -> int:
    if not rows.unit_stride:
        return rows.dtype.itemsize
    row_bytes = rows.shape[2] * rows.dtype.itemsize
    return min(rows.alignment, cache.alignment, row_bytes & -row_bytes or VECTOR)


def _launches(gpu: Gpu, stored: str, slots: str, *plain: Any) -> tuple[Bound, Settled] | None:
    """Returns launches of the kernel by the addresses of rows, caches, block scales and indices, then numbers and
    addresses of scales, and their grid. None: the kernel cannot run the request, or there is nothing to write.

    `plain`: layouts of those tensors, as plain tuples, which calls make and compare in a third of the time.
    """
    layouts = Layouts(stored, slots, *(tuple(map(Layout._make, group)) for group in plain))
    if not fits(layouts) or 0 in (*layouts.rows[0].shape, layouts.caches[0].shape[0]):
        return None
    chosen = spec(layouts)
    units = [n // chosen.per_thread for n in _units(layouts, chosen.access)]
    nnz, heads, _ = layouts.rows[0].shape
    items = nnz * heads * max(units)
    launch = gpu.loaded(chosen)
    names = {param.name for param in launch.artifact.params}
    fields: Fields = {**dict.fromkeys(names, 0), "k_units": 1, "v_units": 1, **_shared(layouts)}
    sides = SIDES[: len(units)]
    for i, side in enumerate(sides):
        fields |= {f"{side}_{name}": value for name, value in _operand(layouts, i, chosen.access, units[i]).items()}
    memory = ("", "_cache", "_sf") if layouts.block_scales else ("", "_cache")
    bound = [side + name for name in memory for side in sides] + [*INDICES[layouts.slots]]
    bound += [side + name for name in ("_scale", "_scale_address") for side in sides]
    static = {name: fields[name] for name in names.difference(bound)}
    return launch.bind(static, bound), ((-(-items // THREADS), len(units), 1),)


def _operand(layouts: Layouts, i: int, access: int, units: int) -> Fields:
    """Returns the parameters of keys or of values. `units`: of a head's row, for each thread's first."""
    rows = layouts.rows[i]
    row, head, step = rows.stride_bytes(0, 1, 2)
    step = access if layouts.stored == COPY and rows.unit_stride else step
    fields: Fields = {"source_row": row, "source_head": head, "source_step": step}
    for name, caches in (("cache", layouts.caches), ("sf", layouts.block_scales)):
        for x in caches[i : i + 1]:
            fields |= zip((f"{name}_page", f"{name}_token", f"{name}_head"), x.stride_bytes(0, 1, 2), strict=True)
    return fields | divisor("units", max(units, 1)) | {"units": units}


def _shared(layouts: Layouts) -> Fields:
    """Returns the parameters that keys and values share."""
    nnz, heads, _ = layouts.rows[0].shape
    num_pages, page_size = layouts.caches[0].shape[:2]
    fields = {"rows": nnz, "num_pages": num_pages, **divisor("heads", heads), **divisor("page_size", page_size)}
    fields["num_slots"] = num_pages * page_size
    for name, x in zip(INDICES[layouts.slots], layouts.indices, strict=True):
        (fields[f"{name}_step"],) = x.stride_bytes(0)
        fields[f"{name}_wide"] = int(x.dtype == torch.int64)
    if layouts.slots == "pages":
        fields |= {"num_indices": layouts.indices[2].shape[0], "batch_size": layouts.indices[3].shape[0] - 1}
    return fields
