"""What public functions do under Dynamo: hand their arguments to the operator that stands for them.

Their first statement is `if is_dynamo_compiling(): return trace.operator("name")(locals())`: what `locals()` returns
there are the arguments by name. Dynamo traces this module; only the imports inside of `operator` run as they are,
and run before `locals()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.ops.declare import EITHER, TENSORS, UNUSED
from cute_attn.request import checks

Arguments = dict[str, Any]
R = TypeVar("R")


def operator(name: str) -> Callable[[Arguments], R]:
    """Return what calls the operator of a function, or of a wrapper's method, and returns what that returns."""
    from cute_attn.ops import dynamo_locals, register  # noqa: F401, the former teaches Dynamo

    return functools.partial(_call, register.OPERATORS[name], register.KINDS[name])


def _call(run: Any, kinds: str, arguments: Arguments) -> Any:
    flat = _flat(kinds, arguments)
    if "self" in arguments:
        wrapper, operands = arguments["self"], _operands(arguments.get("args", ()))
        fresh = run(wrapper._handle, wrapper._o_dtype, *operands, *flat)
    else:
        fresh = run(*flat)
    if "out" not in arguments and "return_lse" not in arguments:
        return fresh
    out, lse = arguments.get("out"), arguments.get("lse")
    result = fresh[0] if out is None else out
    if arguments.get("return_lse", True):
        return result, fresh[1] if lse is None else lse
    return result


def _operands(args: tuple[Any, ...]) -> tuple[list[torch.Tensor], Any]:
    """Return the `*args` of a run as an operator takes them: tensors, and perhaps a number after them."""
    _refuse_grad("args", args)
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    rest = args[len(tensors) :]
    if len(rest) > 1 or (rest and isinstance(rest[0], torch.Tensor)):
        raise ArgumentTypeError("after keys and values torch.compile takes tensors, and one number after them")
    return tensors, rest[0] if rest else None


def _flat(kinds: str, arguments: Arguments) -> list[Any]:
    """Return the arguments of an operator for those of a public function."""
    flat: list[Any] = []
    for parameter in kinds.split(" "):
        name, kind = parameter.split(":")
        value = arguments[name]
        is_tensor = isinstance(value, torch.Tensor)
        _refuse_grad(name, value)
        if kind == UNUSED:
            if value is not None:
                raise ArgumentError(f"{name} must be None under torch.compile")
        elif kind == TENSORS:
            flat.append([value] if is_tensor else None if value is None else list(value))
        elif kind == EITHER:
            flat += (None, value) if is_tensor or isinstance(value, str) else (value, None)
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
