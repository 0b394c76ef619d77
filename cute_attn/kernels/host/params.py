"""Kernel parameters by field name, and the fields that the kernels of several families share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from cute_attn.kernels.host import fastdiv
from cute_attn.problem import Settings
from cute_attn.runtime.launch import Launch

LOG2E = math.log2(math.e)
UNBOUNDED = 1 << 30  # no causal or window bound: beyond any kv index, and row + UNBOUNDED fits 32 bits

Value = int | float | bytes
Values = tuple[Value, ...]
Fields = dict[str, int | float]
Entry = str | tuple[str, ...]  # a field, or fields whose values are given as one tuple

PARTIAL_FIELDS = ("o_partial", "lse_partial")
BATCH_FIELDS = ("items", *PARTIAL_FIELDS, "kv_indices")  # addresses of a batch's records, partials and page numbers
MAX_ORDERS = 512  # of parameters, of all kernels

NO_BATCH = dict.fromkeys(BATCH_FIELDS, 0)
ADDRESS_FIELDS = ("q", "k", "v", "o", "lse")  # tensors of which each run of a plan may have others


class ParamPacker:
    """Orders values by the parameters of one kernel: static fields are given once, dynamic fields per launch.

    `values` takes one argument per entry of `dynamic`: a number for a field, a tuple for a group of fields. The
    constructor raises a ValueError unless every parameter has exactly one value.
    """

    def __init__(self, names: Sequence[str], static: Mapping[str, Value], dynamic: Sequence[Entry]) -> None:
        self.names = tuple(names)
        self.values: Callable[..., Values] = _packing(self.names, tuple(static), tuple(dynamic))(*static.values())

    @classmethod
    def of(cls, launch: Launch, static: Mapping[str, Value], dynamic: Sequence[Entry]) -> ParamPacker:
        """Returns the packer of a loaded kernel."""
        return cls([param.name for param in launch.artifact.params], static, dynamic)


# This generates Python source because the generated function orders 54 parameters in 0.56 us per launch, where
# `operator.itemgetter` takes 0.77 us (`timeit`, Python 3.11, Xeon).
@functools.lru_cache(MAX_ORDERS)
def _packing(
    names: tuple[str, ...], static: tuple[str, ...], dynamic: tuple[Entry, ...]
) -> Callable[..., Callable[..., Values]]:
    """Returns a function from values of `static` to a function from values of `dynamic` to all values."""
    given = [*static, *(name for entry in dynamic for name in ((entry,) if isinstance(entry, str) else entry))]
    if sorted(given) != sorted(names):
        raise ValueError(
            f"kernel parameters without a value: {sorted({*names} - {*given})}, "
            f"values without a parameter: {sorted({*given} - {*names})}, "
            f"named more than once: {sorted({name for name in given if given.count(name) > 1})}"
        )
    groups = {f"_group{i}": entry for i, entry in enumerate(dynamic) if not isinstance(entry, str)}
    arguments = [entry if isinstance(entry, str) else f"_group{i}" for i, entry in enumerate(dynamic)]
    lines = (
        f"def bind({', '.join(static)}):",
        f" def values({', '.join(arguments)}):",
        *(f"  {', '.join(group)}, = {name}" for name, group in groups.items() if group),
        f"  return ({', '.join(names)},)",
        " return values",
    )
    space: dict[str, Callable[..., Callable[..., Values]]] = {}
    exec("\n".join(lines), space)
    return space["bind"]


def divisor(name: str, value: int, stem: str | None = None) -> Fields:
    """Returns a divisor with the multiplier and shift that divide by it. `stem`: prefix of the names of these two, by
    default `name`.
    """
    multiplier, shift = fastdiv.magic(value)
    return {name: value, f"{stem or name}_multiplier": multiplier, f"{stem or name}_shift": shift}


def optional(groups: Mapping[tuple[str, ...], bool]) -> tuple[tuple[str, ...], Fields]:
    """Returns the fields of the groups that launches give values for, in order, and zeros for those of all others."""
    dynamic = tuple(name for fields, used in groups.items() if used for name in fields)
    return dynamic, {name: 0 for fields, used in groups.items() if not used for name in fields}


def mask_bounds(settings: Settings) -> Fields:
    """Returns the bounds of the visible keys relative to the end of the keys: row + bound + 1 must fit 32 bits."""
    window_left = settings.window_left
    return {
        "right": 0 if settings.causal else UNBOUNDED - 1,
        "left": -min(window_left, UNBOUNDED) if window_left >= 0 else -UNBOUNDED,
    }


def score_fields(settings: Settings, scores: tuple[str, ...]) -> Fields:
    """Returns scale and soft cap. Without score steps the scale includes log2(e), for exp2 in place of exp."""
    return {"scale": settings.sm_scale * (1.0 if scores else LOG2E), "soft_cap": settings.logits_soft_cap}


def rope_fields(settings: Settings) -> Fields:
    """Returns the turns per position of pair 0, and the factor from a pair's to the next one's."""
    return {
        "rope_base": 1.0 / (2.0 * math.pi * settings.rope_scale),
        "rope_ratio": settings.rope_theta ** (-2.0 / settings.features.head_dim_qk),
    }


def kv_axes(settings: Settings) -> tuple[int, int]:
    """Returns the axes of tokens and of heads in k and v."""
    paged = int(settings.features.kv_source == "paged")
    return (1 + paged, paged) if settings.kv_layout == "HND" else (paged, 1 + paged)


def block_scale_values(scales: tuple[torch.Tensor, ...], paged: bool, token: int, head: int) -> Values:
    """Returns address and strides of a page, a token and a head of K's and then V's block scales of one byte each.
    `token`, `head`: their axes.
    """
    values: Values = ()
    for x in scales:
        strides = x.stride()
        values += x.data_ptr(), strides[0] if paged else 0, strides[token], strides[head]
    return values


def batch_fields(settings: Settings) -> tuple[str, ...]:
    """Returns the fields of a batch's numbers: under multi-item scoring the mask is in the records."""
    return (*BATCH_FIELDS, "mask") if settings.features.multi_item else BATCH_FIELDS


def mask_fields(settings: Settings) -> dict[tuple[str, ...], bool]:
    """Returns the fields of a mask that `batch_fields` does not have, and whether launches give values for them."""
    if settings.features.multi_item:
        return {("mask_bytes",): False}
    return {("mask", "mask_bytes"): settings.features.custom_mask}


def two_addresses(tensors: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Returns the addresses of one or two tensors; the second is 0 where there is one."""
    first, *second = (tensor.data_ptr() for tensor in tensors)
    return first, second[0] if second else 0
