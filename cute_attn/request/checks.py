"""Checks of single arguments. Each names the argument, the value it got and what is accepted."""

from __future__ import annotations

import numbers
import operator
import reprlib
from collections.abc import Sequence
from typing import Any

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError, LayoutError
from cute_attn.problem import short

Extent = tuple[int, int]  # addresses of the first byte and past the last

LARGEST = 1e38  # times log2(e) it is still an fp32 number

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def describe(value: object) -> str:
    """Show a value in an error message: tensors by dtype, shape and device, others in at most 80 characters."""
    if isinstance(value, torch.Tensor):
        return f"a {short(value.dtype)} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


def boolean(name: str, value: Any) -> bool:
    """Check for True or False; numbers are refused."""
    if type(value) is bool:
        return value
    raise ArgumentTypeError(f"{name} must be True or False, got {describe(value)}")


def integer(name: str, value: Any) -> int:
    """Check for an integer of any type (numpy's too) except bool."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | torch.Tensor):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ArgumentTypeError(f"{name} must be an int, got {describe(value)}")


def real(name: str, value: Any) -> float:
    """Check for a finite number that fp32 can hold, with room for a constant factor."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ArgumentTypeError(f"{name} must be a number, got {describe(value)}")
        value = float(value)
    if not -LARGEST <= value <= LARGEST:  # false for NaN
        raise ArgumentError(f"{name} must be finite and within +-{LARGEST}, got {value!r}")
    return value + 0.0  # -0.0 becomes 0.0: they are equal as keys of caches


def real_or(name: str, value: Any, default: float) -> float:
    """Check `real`; None stands for `default`."""
    return default if value is None else real(name, value)


def positive(name: str, value: Any) -> float:
    """Check for a finite number > 0."""
    value = real(name, value)
    if value <= 0:
        raise ArgumentError(f"{name} must be > 0, got {value!r}")
    return value


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Check for one of `choices`; LayoutError otherwise."""
    if isinstance(value, str) and value in choices:
        return value
    raise LayoutError(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe(value)}")


def tensor(name: str, value: Any) -> torch.Tensor:
    """Check for a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {describe(value)}")


def strided(name: str, value: torch.Tensor) -> None:
    """Check that a tensor has memory and strides, which sparse tensors do not have."""
    if value.layout is not torch.strided:
        raise ArgumentError(
            f"{name} must be a dense tensor, got one of layout {str(value.layout).removeprefix('torch.')}"
        )


def shape(name: str, value: torch.Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Check a shape. `meaning`: its axes by name, for the message."""
    if value.shape != expected:
        raise ArgumentError(f"{name} must have shape {meaning} = {expected}, got {describe(value)}")


def device(name: str, value: torch.Tensor, expected: torch.device) -> None:
    """Check that a tensor is on q's device."""
    if value.device != expected:
        raise ArgumentError(f"{name} must be on q's device {expected}, got {describe(value)}")


def dtype(name: str, value: torch.dtype, accepted: Sequence[torch.dtype]) -> None:
    """Check that a dtype is one of `accepted`."""
    if not isinstance(value, torch.dtype) or value not in accepted:
        raise ArgumentError(f"{name} must have dtype {' or '.join(map(short, accepted))}, got {short(value)}")


def dense(name: str, value: torch.Tensor) -> None:
    """Check a buffer to write: no two elements share memory, and the last axis has unit stride."""
    if value.is_contiguous():
        return
    needed = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < needed:
            raise ArgumentError(
                f"{name} must not overlap itself, got strides {value.stride()} for shape {tuple(value.shape)}"
            )
        needed = max(needed, stride * size)
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentError(f"{name} must have stride 1 on its last axis, got strides {value.stride()}")


def extent(value: torch.Tensor) -> Extent:
    """Return the address of a tensor's first byte and the one past its last."""
    start = value.data_ptr()
    if value.is_contiguous():
        return start, start + value.nbytes
    if value.numel() == 0:
        return start, start
    last = sum(stride * (count - 1) for stride, count in zip(value.stride(), value.shape, strict=True))
    return start, start + (last + 1) * value.element_size()


def no_overlap(name: str, written: Extent, other_name: str, other: Extent) -> None:
    """Refuse a buffer to write whose extent crosses another. Interleaved views of one storage count as overlap."""
    if written[0] < other[1] and other[0] < written[1]:
        raise ArgumentError(f"{name} must not share memory with {other_name}: their address ranges overlap")
