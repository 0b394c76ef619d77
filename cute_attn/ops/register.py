"""Registration of all declared operators with torch.library. The import of this module does it.

An operator's implementation is the public function, called with arguments that are put together again. Results that the
caller gave memory for are empty tensors: an operator must not return its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_attn.errors import NotPlannedError, RuntimeArgumentError
from cute_attn.ops import declare
from cute_attn.ops.declare import DECLARED, EITHER, TENSORS, UNUSED, Declaration, Parameter
from cute_attn.runtime.staging import is_capturing

NAMESPACE = "cute_attn"
METHOD_ARGUMENTS = ("SymInt handle", "ScalarType? o_dtype", "Tensor[] operands", "float? operand")


def arguments_by_name(parameters: tuple[Parameter, ...], flat: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of the public function from those of the operator."""
    values, named = iter(flat), {}
    for parameter in parameters:
        if parameter.kind == UNUSED:
            continue
        value = next(values)
        if parameter.kind == EITHER:
            other = next(values)
            value = other if value is None else value
        elif parameter.kind == TENSORS and value is not None:
            value = value[0] if len(value) == 1 else tuple(value)
        named[parameter.name] = value
    return named


def fresh(arguments: dict[str, Any], result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse as an operator does: empty where the caller gave memory, or asked for no lse."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    given = arguments.get("out") is not None
    if lse is None or arguments.get("lse") is not None:
        lse = out.new_empty(0, dtype=torch.float32)
    return out.new_empty(0) if given else out, lse


def implementation(declaration: Declaration) -> Callable[..., Any]:
    """Return what computes an operator: the public function."""
    parameters, function = declaration.parameters(), declaration.function
    names = list(inspect.signature(function).parameters)

    def of_function(*flat: Any) -> Any:
        arguments = arguments_by_name(parameters, flat)
        result = function(**arguments)
        return fresh(arguments, result) if "out" in arguments else result

    def of_method(
        handle: int, o_dtype: torch.dtype, operands: list[torch.Tensor], operand: float | None, *flat: Any
    ) -> Any:
        wrapper = declare.wrapper_of(handle)
        # mode="reduce-overhead" would capture a schedule that the next plan does not renew.
        if not wrapper.is_cuda_graph_enabled and is_capturing(wrapper.device):
            raise RuntimeArgumentError(
                f"a compiled {type(wrapper).__name__}.run() is captured in a CUDA graph, whose replays would not see "
                "later plans: make the wrapper with use_cuda_graph=True"
            )
        arguments = arguments_by_name(parameters, flat)
        leading = [arguments.pop(name) for name in names[1 : names.index("args")]] if "args" in names else []
        more = operands if operand is None else (*operands, operand)
        return fresh(arguments, function(wrapper, *leading, *more, **arguments))

    return of_method if declaration.is_method else of_function


def fake(declaration: Declaration) -> Callable[..., Any]:
    """Return what computes the shapes and dtypes of an operator's results."""
    parameters = declaration.parameters()

    def of_operator(*flat: Any) -> Any:
        if not declaration.is_method:
            return declaration.fake(arguments_by_name(parameters, flat))
        _, o_dtype, _, _, *rest = flat
        if o_dtype is None:
            raise NotPlannedError(
                "plan() must come before run() is traced: dtypes and shapes of results follow from it"
            )
        return declaration.fake({"o_dtype": o_dtype, **arguments_by_name(parameters, rest)})

    return of_operator


def _registered() -> dict[str, Any]:
    operators = {}
    for name, declaration in DECLARED.items():
        leading = METHOD_ARGUMENTS if declaration.is_method else ()
        arguments = *leading, *(argument for parameter in declaration.parameters() for argument in parameter.arguments)
        schema = f"{name}({', '.join(arguments)}) -> {declaration.returns}"
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, implementation(declaration), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake(declaration), lib=_library)
        operators[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operators


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
OPERATORS = _registered()
# "name:kind" of every parameter. A string, because Dynamo guards it as one value in every call of a compiled function.
KINDS = {name: " ".join(f"{p.name}:{p.kind}" for p in DECLARED[name].parameters()) for name in DECLARED}
