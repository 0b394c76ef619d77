"""What public functions do under Dynamo: hand their arguments to the operator that stands for them.

Dynamo traces this module; only the import of `register` inside the functions runs as it is. `values` are the arguments
of the public function in the order of its signature, without `self` and `*args`.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.errors import ArgumentError
from cute_attn.ops.declare import DTYPE, NUMBER, TENSORS, UNUSED
from cute_attn.request import checks


def call(name: str, *values: Any) -> Any:
    """Call the operator of a function and return what the function returns."""
    from cute_attn.ops import register

    return register.OPERATORS[name](*_flat(register.KINDS[name], values))


def attention(name: str, values: tuple[Any, ...], out: Any, lse: Any, return_lse: Any) -> Any:
    """Call the operator of a function that computes attention; return out, or the pair of it and lse."""
    return _results(call(name, *values), out, lse, return_lse)


def run(
    name: str, wrapper: Any, operands: tuple[Any, ...], values: tuple[Any, ...], given: tuple[Any, Any, Any]
) -> Any:
    """Call the operator of a wrapper's method.

    `operands`: its `*args`, tensors and perhaps a number after them. `given`: out, lse, return_lse.
    """
    from cute_attn.ops import register

    _refuse_grad("args", operands)
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    numbers = [value for value in operands if value is not None and not isinstance(value, torch.Tensor)]
    flat = _flat(register.KINDS[name], values)
    number = numbers[0] if numbers else None
    fresh = register.OPERATORS[name](wrapper._handle, wrapper._o_dtype, tensors, number, *flat)
    return _results(fresh, *given)


def _results(fresh: Any, out: Any, lse: Any, return_lse: Any) -> Any:
    result = fresh[0] if out is None else out
    if return_lse:
        return result, fresh[1] if lse is None else lse
    return result


def _flat(kinds: str, values: tuple[Any, ...]) -> list[Any]:
    """Return the arguments of an operator for those of a public function."""
    flat: list[Any] = []
    for parameter, value in zip(kinds.split(" "), values, strict=True):
        name, kind = parameter.split(":")
        is_tensor = isinstance(value, torch.Tensor)
        _refuse_grad(name, value)
        if kind == UNUSED:
            if value is not None:
                raise ArgumentError(f"{name} must be None under torch.compile")
        elif kind == TENSORS:
            flat.append([value] if is_tensor else None if value is None else list(value))
        elif kind == NUMBER:
            flat.append(None if is_tensor else value)
            flat.append(value if is_tensor else None)
        elif kind == DTYPE:
            flat.append(None if isinstance(value, str) else value)
            flat.append(value if isinstance(value, str) else None)
        else:
            flat.append(value)
    return flat


def _refuse_grad(name: str, value: Any) -> None:
    """Refuse a tensor, or one in a pair or list, that torch wants a derivative of: operators have none."""
    if isinstance(value, torch.Tensor):
        checks.check_grad(name, value)
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            _refuse_grad(f"{name}[{i}]", part)
