"""Checks of single arguments. Each names the argument, the value it got and what is accepted."""

from __future__ import annotations

import contextlib
import numbers
import operator
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from cute_attn.errors import ArgumentError, ArgumentTypeError, LayoutError, NotSupported, Refusal, RuntimeArgumentError
from cute_attn.problem import short

Extent = tuple[int, int]  # addresses of the first byte and past the last
Named = tuple[str, Any]  # a tensor, or what stands for none, under its name in messages

LARGEST_INT = (1 << 63) - 1  # torch takes no more
MOST_STEPS: Any = 1000  # of a search for bytes that two tensors share, microseconds; numpy's stubs know -1 and 0 alone
LARGEST = 1e38  # times log2(e) it is still an fp32 number


class _BoundedRepr(reprlib.Repr):
    """A repr of at most some hundred characters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 4
        self.maxstring = self.maxother = 80

    def repr_Tensor(self, x: torch.Tensor, level: int) -> str:  # noqa: N802, reprlib looks for the name of the type
        return describe(x)

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 128 else f"an int of {x.bit_length()} bits"


_bounded = _BoundedRepr()


def describe(value: object) -> str:
    """Show a value in an error message: tensors by dtype, shape and device, anything else by a bounded repr."""
    if isinstance(value, torch.Tensor):
        return f"a {short(value.dtype)} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{shown(value)} ({type(value).__name__})"


def shown(value: object) -> str:
    """Return a repr of bounded length: of a list, a tuple, a dict or a set the first elements."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    return _bounded.repr(value)


def refuse(feature: str, reason: str, instead: str, who: str = "every backend") -> None:
    """Raise NotSupported for a feature that no backend has, or that `who` has not."""
    raise NotSupported([Refusal(who, feature, reason, instead)])


def refuse_given(reason: str, instead: str = "", off: bool | None = False, **options: Any) -> None:
    """Refuse options that are neither None nor `off`. `instead`: what to use; default None for the option."""
    for name, value in options.items():
        if value is not None and value is not off:
            refuse(f"{name}={shown(value)}", reason, instead or f"{name}=None")


def wrong(text: str, value: object, kind: type[ArgumentError | ArgumentTypeError] = ArgumentError) -> Exception:
    """Return the error for an argument. `text`: its name and what is accepted."""
    return kind(f"{text}, got {describe(value)}")


def boolean(name: str, value: Any) -> bool:
    """Check for True or False; numbers are refused."""
    if type(value) is bool:
        return value
    raise wrong(f"{name} must be True or False", value, ArgumentTypeError)


def as_planned(agrees: bool, name: str, value: Any, planned: Any, also: str = "") -> None:
    """Refuse an option of a run unless it `agrees` with the plan, whose schedule or code depends on it. `also`: what
    else is accepted.
    """
    if not agrees:
        raise ArgumentError(f"{name} of run() must be {also}the planned {planned}, got {value}: pass it to plan()")


def fp16_hint(use_fp16_qk_reduction: Any = False, allow_fp16_qk_reduction: Any = None) -> None:
    """Check a hint that changes nothing, and FlashInfer's older name of it, None where not given."""
    boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
    if allow_fp16_qk_reduction is None:
        return
    boolean("allow_fp16_qk_reduction", allow_fp16_qk_reduction)
    if use_fp16_qk_reduction:
        raise ArgumentTypeError(
            "allow_fp16_qk_reduction and use_fp16_qk_reduction are two names of one argument: give one of them"
        )


def integer(name: str, value: Any) -> int:
    """Check for an integer of any type (numpy's too) except bool, of 64 bits."""
    return at_least(name, value, -LARGEST_INT)


def at_least(name: str, value: Any, least: int, most: int = LARGEST_INT) -> int:
    """Check for an integer within `least`..`most`."""
    value = whole(name, value)
    if not least <= value <= most:
        bound = f"least {least}" if value < least else f"most {most}"
        raise ArgumentError(f"{name} must be at {bound}, got {shown(value)}")
    return value


def whole(name: str, value: Any) -> int:
    """Check for an integer of any type and size."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | torch.Tensor):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise wrong(f"{name} must be an int", value, ArgumentTypeError)


def real(name: str, value: Any, default: float | None = None) -> float:
    """Check for a finite number that fp32 can hold, with room for a constant factor. None stands for a default."""
    if value is None and default is not None:
        return default
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise wrong(f"{name} must be a number", value, ArgumentTypeError)
        try:
            value = float(value)
        except OverflowError:  # an int beyond float64
            value = float("inf")
    if not -LARGEST <= value <= LARGEST:  # false for NaN
        raise ArgumentError(f"{name} must be finite and within +-{LARGEST}, got {value!r}")
    return value + 0.0  # -0.0 becomes 0.0: they are equal as keys of caches


def positive(name: str, value: Any, default: float | None = None) -> float:
    """Check for a number > 0, else as `real` does."""
    value = real(name, value, default)
    if value <= 0:
        raise ArgumentError(f"{name} must be > 0, got {value!r}")
    return value


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Check for one of `choices`; LayoutError otherwise."""
    if isinstance(value, str) and value in choices:
        return value
    raise LayoutError(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe(value)}")


def tensor(name: str, value: Any) -> torch.Tensor:
    """Check for a tensor whose memory holds its values: see `stored`."""
    if isinstance(value, torch.Tensor):
        return stored(name, value)
    raise wrong(f"{name} must be a torch.Tensor", value, ArgumentTypeError)


def stored(name: str, value: torch.Tensor) -> torch.Tensor:
    """Refuse a tensor whose values are not the numbers at its address: sparse, negative views, conjugate views."""
    if value.layout is not torch.strided:
        raise ArgumentError(f"{name} must be a strided tensor, got layout {value.layout}: pass {name}.to_dense()")
    if value.is_neg():  # also the imaginary part of a conjugate view
        raise ArgumentError(f"{name} must not be a negative view (is_neg()): pass {name}.resolve_neg()")
    if value.is_conj():
        raise ArgumentError(f"{name} must not be a conjugate view (is_conj()): pass {name}.resolve_conj()")
    return value


def readable(name: str, value: Any) -> torch.Tensor:
    """Check for a tensor whose values the host can read."""
    value = tensor(name, value)
    if not (value.is_cpu or value.is_cuda):
        raise wrong(f"{name} must be on a cpu or cuda device", value)
    return value


def check_grad(name: str, value: torch.Tensor, more: str = "") -> None:
    """Refuse a tensor that torch wants a derivative of, so that nobody relies on one: none is computed. `more`: advice.

    Callers with several tensors and no time look at `forward_ad._current_level` and `requires_grad` themselves first.
    """
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} requires grad, and cute_attn computes no gradients: "
            f"call it under torch.no_grad() or pass {name}.detach(){more}"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        raise ArgumentError(
            f"{name} has a tangent of forward-mode AD, and cute_attn computes no gradients: pass {name}.detach(){more}"
        )


def writable(name: str, value: torch.Tensor) -> None:
    """Refuse a tensor that torch does not let operations write in place, as where two elements share memory."""
    if value.requires_grad and value.is_leaf and torch.is_grad_enabled():
        raise ArgumentError(f"{name} is written and must not require grad: pass {name}.detach()")
    if value.is_cpu and value.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(f"{name} is written and must not be an inference tensor outside of torch.inference_mode()")
    if value.is_contiguous():
        return
    needed = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < needed:
            raise ArgumentError(
                f"{name} must not overlap itself, got strides {value.stride()} for shape {tuple(value.shape)}"
            )
        needed = max(needed, stride * size)


def shape(name: str, value: torch.Tensor, expected: tuple[int | None, ...], meaning: str) -> None:
    """Check a shape, in which None stands for any size. `meaning`: `[its axes by name]`, for the message."""
    if value.shape == expected:
        return
    fits = [size is None or size == given for size, given in zip(expected, value.shape, strict=False)]
    if value.dim() != len(expected) or not all(fits):
        axes = meaning[1:].partition("]")[0].split(", ")
        sizes = ", ".join(str(axis if size is None else size) for axis, size in zip(axes, expected, strict=False))
        sizes = f"[{sizes}]" if None in expected else str(expected)
        raise wrong(f"{name} must have shape {meaning if sizes in meaning else f'{meaning} = {sizes}'}", value)


def first(wrong: Any) -> int | None:
    """Return the number of the first element of an array on the host that is true; None if there is none."""
    wrong = np.asarray(wrong)
    return int(wrong.argmax()) if wrong.any() else None


def each_within(name: str, values: np.ndarray, most: int | np.ndarray, what: str = "") -> None:
    """Check numbers of all requests: none is negative or beyond `most`, one number or one for each. `what`: what that
    is, for the message.
    """
    if (i := first((values < 0) | (values > most))) is not None:
        bound = np.broadcast_to(most, values.shape)[i]
        raise ArgumentError(f"{name} must be within 0..{bound}{what}; request {i} has {values[i]}")


def increasing(name: str, bounds: np.ndarray, most: int, what: str = "") -> None:
    """Check bounds of all requests, of which there is one: they do not decrease, and stay within 0..`most`. `what`:
    what that is, for the message.
    """
    if (i := first(bounds[1:] < bounds[:-1])) is not None:
        raise RuntimeArgumentError(f"{name} must not decrease, got {bounds[i + 1]} after {bounds[i]} (request {i})")
    if bounds[0] < 0 or bounds[-1] > most:
        raise ArgumentError(f"{name} must stay within 0..{most}{what}, got {bounds[0]}..{bounds[-1]}")


def device(name: str, value: torch.Tensor, expected: torch.device, whose: str = "q's device") -> None:
    """Check that a tensor is on a device. `whose`: what the message calls that."""
    if value.device != expected:
        raise wrong(f"{name} must be on {whose} {expected}", value)


def usable_device(name: str, value: Any) -> torch.device:
    """Check for a device, or its name, whose tensors calls take."""
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise wrong(f"{name} must be a cpu or cuda device, or its name", value) from error
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{name} must be a cpu or cuda device, got {value}")
    return found


def dtype(name: str, value: torch.dtype, accepted: Sequence[torch.dtype]) -> None:
    """Check that a dtype is one of `accepted`."""
    if not isinstance(value, torch.dtype) or value not in accepted:
        raise ArgumentError(f"{name} must have dtype {' or '.join(map(short, accepted))}, got {short(value)}")


def operand(
    name: str,
    value: Any,
    dtypes: Sequence[torch.dtype],
    expected: tuple[int | None, ...],
    meaning: str,
    on: torch.device | None = None,
    whose: str = "q's device",
) -> torch.Tensor:
    """Check for a tensor of a dtype, a shape (see `shape`) and a device (None: any that the host can read), which torch
    wants no derivative of.
    """
    value = readable(name, value) if on is None else tensor(name, value)
    dtype(name, value.dtype, dtypes)
    shape(name, value, expected, meaning)
    if on is not None:
        device(name, value, on, whose)
    check_grad(name, value)
    return value


def named_dtype(value: Any) -> Any:
    """Return the dtype of torch that a string names; anything else, and a string that names none, as it is."""
    return getattr(torch, value.removeprefix("torch."), value) if isinstance(value, str) else value


def dtype_of(name: str, value: Any) -> torch.dtype:
    """Check for a dtype of torch, or its name."""
    found = named_dtype(value)
    if isinstance(found, torch.dtype):
        return found
    if isinstance(value, str):
        raise ArgumentError(f"{name} must name a dtype of torch, got {shown(value)}")
    raise wrong(f"{name} must be a torch.dtype or its name", value, ArgumentTypeError)


def contiguous(name: str, value: torch.Tensor) -> None:
    """Check that the elements of a buffer lie in order and without gaps."""
    if not value.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, got strides {value.stride()} for shape {tuple(value.shape)}")


def dense(name: str, value: torch.Tensor) -> None:
    """Check a buffer to write: no two elements share memory, and the last axis has unit stride."""
    writable(name, value)
    if not value.is_contiguous() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentError(f"{name} must have stride 1 on its last axis, got strides {value.stride()}")


def extent(value: torch.Tensor) -> Extent:
    """Return the address of a tensor's first byte and the one past its last."""
    start = value.data_ptr()
    if start == 0:  # an empty tensor, or one of the meta device
        return 0, 0
    if value.is_contiguous():
        return start, start + value.nbytes
    if value.numel() == 0:
        return start, start
    last = sum(stride * (count - 1) for stride, count in zip(value.stride(), value.shape, strict=True))
    return start, start + (last + 1) * value.element_size()


def named(names: Sequence[str], given: Any) -> list[Named]:
    """Return what a tuple or a list has, by name; nothing of what is neither, which other checks refuse."""
    return list(zip(names, given, strict=False)) if isinstance(given, tuple | list) else []


def apart(written: Iterable[Named], read: Iterable[Named] = ()) -> None:
    """Refuse buffers to write that share memory with what a call reads, or with each other. Tensors that alternate in
    one storage, whose address ranges cross, share none; where finding that out takes too long, they count as sharing.
    What is no strided tensor is passed over: it has no memory.
    """
    taken = [(name, x, extent(x)) for name, x in read if isinstance(x, torch.Tensor) and x.layout is torch.strided]
    for name, x in written:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            continue
        start, stop = own = extent(x)
        for other_name, other, (other_start, other_stop) in taken:
            if not (start < other_stop and other_start < stop):
                continue
            if np.may_share_memory(_placed(x), _placed(other), max_work=MOST_STEPS):
                raise ArgumentError(f"{name} must not share memory with {other_name}: they have bytes in common")
        taken.append((name, x, own))


def _placed(x: torch.Tensor) -> np.ndarray:
    """Return an array at the addresses of a tensor on any device, whose elements nobody may read."""
    size = x.element_size()
    strides = tuple(stride * size for stride in x.stride())
    where = {"data": (x.data_ptr(), False), "shape": tuple(x.shape), "strides": strides, "typestr": f"|V{size}"}
    return np.asarray(SimpleNamespace(__array_interface__={**where, "version": 3}))


# ---- errors of functions that call others name arguments as their own callers gave them


_WORDS = ("q", "k", "v", "out", "query", "mask")  # may stand for something else inside of a message, except behind:
_BEFORE_NAMES = (" share memory with ", ", the rows of ")


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Return a context whose errors have other names, or beginnings: `rename`."""
    try:
        yield
    except (ArgumentError, ArgumentTypeError) as error:
        rename(error, names)
        raise


def rename(error: ArgumentError | ArgumentTypeError, names: Mapping[str, str]) -> None:
    """Replace names, or beginnings of messages, in an error that is on its way to the caller."""

    def new(found: re.Match[str]) -> str:
        before = found.string[: found.start()]
        is_word = before and found[0] in _WORDS and not before.endswith(_BEFORE_NAMES)
        return found[0] if is_word else names[found[0]]

    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    error.args = (re.sub(rf"(?<![\w.])(?:{longest_first})(?!\w)", new, str(error)),)
