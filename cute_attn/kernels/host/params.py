"""Parameter blocks by field name, and the fields that the kernels of several families share."""

from __future__ import annotations

import functools
import itertools
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
Entry = str | tuple[str, ...]  # a field, or fields whose values come together

PARTIAL_FIELDS = ("o_partial", "lse_partial")
BATCH_FIELDS = ("items", *PARTIAL_FIELDS, "kv_indices")  # addresses of a batch's records, partials and page numbers
NO_BATCH = dict.fromkeys(BATCH_FIELDS, 0)


class ParamPacker:
    """Puts the parameters of one kernel in its order: static fields are given once, dynamic fields per launch.

    An entry of `dynamic` is a field or a group of fields; `values` takes a number or a tuple for each. Which field goes
    where is settled by name at construction.
    """

    def __init__(self, names: Sequence[str], static: Mapping[str, Value], dynamic: Sequence[Entry]) -> None:
        self.names = tuple(names)
        self.values: Callable[..., Values] = _packing(self.names, tuple(static), tuple(dynamic))(*static.values())

    @classmethod
    def of(cls, launch: Launch, static: Mapping[str, Value], dynamic: Sequence[Entry]) -> ParamPacker:
        """The packer of a loaded kernel."""
        return cls([param.name for param in launch.artifact.params], static, dynamic)

    def rebinder(self, fields: Sequence[str]) -> Rebinder:
        """What changes `fields` of packed values."""
        return Rebinder(self.names, fields)


class Rebinder:
    """Changes some fields of packed values, for launches that differ from an earlier one in these only.

    `bind` takes those values, and returns a function from new values of the fields to all values.
    """

    def __init__(self, names: Sequence[str], fields: Sequence[str]) -> None:
        self.bind: Callable[[Values], Callable[..., Values]] = _rebinding(tuple(names), tuple(fields))


# Both functions below write source out, as `namedtuple` does for its constructor: 54 parameters then take 0.56 us per
# launch, against 0.77 us by `itemgetter` (`timeit`, Python 3.11, Xeon).


@functools.cache
def _packing(
    names: tuple[str, ...], static: tuple[str, ...], dynamic: tuple[Entry, ...]
) -> Callable[..., Callable[..., Values]]:
    """A function from values of `static` to a function from those of `dynamic` to all values."""
    given = [*static, *(name for entry in dynamic for name in ((entry,) if isinstance(entry, str) else entry))]
    if sorted(given) != sorted(names):
        raise ValueError(
            f"kernel parameters without a value: {sorted({*names} - {*given})}, "
            f"values without a parameter: {sorted({*given} - {*names})}, "
            f"named more than once: {sorted({name for name in given if given.count(name) > 1})}"
        )
    groups = {f"_group{i}": entry for i, entry in enumerate(dynamic) if not isinstance(entry, str)}
    arguments = [entry if isinstance(entry, str) else f"_group{i}" for i, entry in enumerate(dynamic)]
    return _defined(
        f"def bind({', '.join(static)}):",
        f" def values({', '.join(arguments)}):",
        *(f"  {', '.join(group)}, = {name}" for name, group in groups.items() if group),
        f"  return ({', '.join(names)},)",
        " return values",
    )


@functools.cache
def _rebinding(names: tuple[str, ...], fields: tuple[str, ...]) -> Callable[[Values], Callable[..., Values]]:
    """`Rebinder.bind`. Fields that stay are kept in runs."""
    if not {*fields} <= {*names} or len({*fields}) < len(fields):
        raise ValueError(f"fields to rebind must be distinct parameters of the kernel, got {list(fields)}")
    kept, items, place = list[str](), list[str](), 0
    for stays, run in itertools.groupby(names, lambda name: name not in fields):
        begin, run_names = place, list(run)
        place += len(run_names)
        if stays:
            kept.append(f" kept{begin} = values[{begin}:{place}]")
        items += [f"*kept{begin}"] if stays else run_names
    return _defined("def bind(values):", *kept, f" return lambda {', '.join(fields)}: ({', '.join(items)},)")


def _defined(*lines: str) -> Callable[..., Callable[..., Values]]:
    """The function `bind` of a source."""
    space: dict[str, Callable[..., Callable[..., Values]]] = {}
    exec("\n".join(lines), space)
    return space["bind"]


def divisor(name: str, value: int, stem: str | None = None) -> Fields:
    """A divisor with the multiplier and shift that divide by it. `stem`: prefix of their names, if not `name`."""
    multiplier, shift = fastdiv.magic(value)
    return {name: value, f"{stem or name}_multiplier": multiplier, f"{stem or name}_shift": shift}


def mask_bounds(settings: Settings) -> Fields:
    """Bounds of the visible keys, relative to the end of the keys: row + bound + 1 must fit 32 bits."""
    window_left = settings.window_left
    return {
        "right": 0 if settings.causal else UNBOUNDED - 1,
        "left": -min(window_left, UNBOUNDED) if window_left >= 0 else -UNBOUNDED,
    }


def score_fields(settings: Settings, scores: tuple[str, ...]) -> Fields:
    """Scale and soft cap. Without score steps the scale takes log2(e) with it into the exponent."""
    return {"scale": settings.sm_scale * (1.0 if scores else LOG2E), "soft_cap": settings.logits_soft_cap}


def kv_axes(settings: Settings) -> tuple[int, int]:
    """Axes of tokens and of heads in k and v."""
    paged = int(settings.features.kv_source == "paged")
    return (1 + paged, paged) if settings.kv_layout == "HND" else (paged, 1 + paged)


def two_addresses(tensors: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Addresses of at most two tensors; 0 stands for none."""
    first, *second = (tensor.data_ptr() for tensor in tensors)
    return first, second[0] if second else 0
