"""Declarations of operators: the public function, its fake results and what it writes.

The schema follows from the annotations of the function: `PARAMETERS` maps each to what an operator takes. A union of a
number and a tensor becomes two arguments, one of them None; a cache a list of one tensor or two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
Fake = Callable[[dict[str, Any]], Any]

# Kinds of parameters, and the arguments of an operator for one: `{}` stands for the name.
PLAIN, TENSOR, TENSORS, NUMBER, DTYPE, UNUSED = "plain", "tensor", "tensors", "number", "dtype", "unused"
ARGUMENTS = {
    TENSOR: ("Tensor? {}",),
    TENSORS: ("Tensor[]? {}",),
    NUMBER: ("float? {}", "Tensor? {}_tensor"),
    DTYPE: ("ScalarType? {}", "str? {}_name"),
    UNUSED: (),
}
PARAMETERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bool": (PLAIN, ("bool {}",)),
    "bool | None": (PLAIN, ("bool? {}",)),
    "int": (PLAIN, ("SymInt {}",)),
    "int | None": (PLAIN, ("SymInt? {}",)),
    "float": (PLAIN, ("float {}",)),
    "float | None": (PLAIN, ("float? {}",)),
    "str": (PLAIN, ("str {}",)),
    "str | None": (PLAIN, ("str? {}",)),
    "torch.dtype": (PLAIN, ("ScalarType {}",)),
    "torch.dtype | None": (PLAIN, ("ScalarType? {}",)),
    "torch.dtype | str | None": (DTYPE, ARGUMENTS[DTYPE]),
    "Any": (UNUSED, ARGUMENTS[UNUSED]),
}
for _kind, _annotations in {
    TENSOR: ("torch.Tensor", "torch.Tensor | None", "torch.Tensor | FP4Tensor | None"),
    TENSORS: (
        *("Cache", "Cache | None", "torch.Tensor | Pair", "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"),
        *("tuple[torch.Tensor, torch.Tensor] | None", "torch.Tensor | list[torch.Tensor] | None"),
    ),
    NUMBER: ("float | torch.Tensor", "float | torch.Tensor | None", "Scale", "Scale | None"),
}.items():
    PARAMETERS |= dict.fromkeys(_annotations, (_kind, ARGUMENTS[_kind]))


class Parameter(NamedTuple):
    """A parameter of a public function and the arguments of the operator for it."""

    name: str
    kind: str
    arguments: tuple[str, ...]  # with a name in place of `{}`
    default: Any

    @classmethod
    def of(cls, parameter: inspect.Parameter, mutable: int | None) -> Parameter:
        """Return the parameter of a signature; `mutable`: number of its alias set, if it is written."""
        kind, arguments = PARAMETERS[parameter.annotation]
        if mutable is not None:
            arguments = tuple(text.replace("Tensor", f"Tensor(a{mutable}!)") for text in arguments)
        return cls(parameter.name, kind, tuple(text.format(parameter.name) for text in arguments), parameter.default)


class Declaration(NamedTuple):
    """An operator that is registered when it is first traced."""

    name: str
    function: Callable[..., Any]
    fake: Fake  # from arguments by name to what the operator returns
    mutates: tuple[str, ...]
    returns: str
    is_method: bool

    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters that the operator takes, without `self` and `*args`."""
        signature = inspect.signature(self.function).parameters.values()
        written = {name: i for i, name in enumerate(self.mutates)}
        named = [p for p in signature if p.name != "self" and p.kind is not p.VAR_POSITIONAL]
        return tuple(Parameter.of(p, written.get(p.name)) for p in named)

    def before_operands(self) -> list[str]:
        """Return the parameters that a call with `*args` passes by position."""
        names = list(inspect.signature(self.function).parameters)
        return names[1 : names.index("args")] if "args" in names else []


DECLARED: dict[str, Declaration] = {}


def operator(
    name: str,
    fake: Fake,
    mutates: tuple[str, ...] = ("out", "lse"),
    returns: str = "(Tensor, Tensor)",
    is_method: bool = False,
) -> Callable[[F], F]:
    """Decorate a public function, which stays as it is, to declare the operator that stands for it under Dynamo.

    Parameters
    ----------
    name : of the operator in the namespace `cute_attn`.
    fake : from the arguments, a dict by name, to what the operator returns, without data.
    mutates : the arguments that are written.
    returns : of the schema.
    is_method : the function is a method of a batch wrapper: the operator takes its handle first, then the dtype of out
        and the positional arguments of the run.
    """

    def decorate(function: F) -> F:
        DECLARED[name] = Declaration(name, function, fake, mutates, returns, is_method)
        return function

    return decorate
