"""Declarations of operators: the public function, its fake results and what it writes.

The schema follows from the annotations of the function, by the table `TYPES`. A union of a number and a tensor becomes
two arguments, one of them None, the second with an underscore; a cache a list of one tensor or two.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from cute_attn.errors import RuntimeArgumentError

F = TypeVar("F", bound=Callable[..., Any])
Fake = Callable[[dict[str, Any]], Any]

# Kinds of parameters, and for each annotation, without " | None", the types of the operator's arguments.
PLAIN, TENSORS, EITHER, UNUSED = "plain", "tensors", "either", "unused"
TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bool": (PLAIN, ("bool",)),
    "int": (PLAIN, ("SymInt",)),
    "float": (PLAIN, ("float",)),
    "str": (PLAIN, ("str",)),
    "torch.dtype": (PLAIN, ("ScalarType",)),
    "torch.dtype | str": (EITHER, ("ScalarType?", "str?")),
    "torch.Tensor": (PLAIN, ("Tensor",)),
    "torch.Tensor | FP4Tensor": (PLAIN, ("Tensor",)),  # an FP4Tensor is refused
    "float | torch.Tensor": (EITHER, ("float?", "Tensor?")),
    "Scale": (EITHER, ("float?", "Tensor?")),
    "Cache": (TENSORS, ("Tensor[]",)),
    "torch.Tensor | Pair": (TENSORS, ("Tensor[]",)),
    "torch.Tensor | list[torch.Tensor]": (TENSORS, ("Tensor[]",)),
    "torch.Tensor | tuple[torch.Tensor, torch.Tensor]": (TENSORS, ("Tensor[]",)),
    "tuple[torch.Tensor, torch.Tensor]": (TENSORS, ("Tensor[]",)),
    "Any": (UNUSED, ()),  # refused unless None
}
RETURNS = {"None": "()", "torch.Tensor": "Tensor"}  # by annotations; of all others out and lse


class Parameter(NamedTuple):
    """A parameter of a public function, and the arguments of the operator for it."""

    name: str
    kind: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, parameter: inspect.Parameter, alias: int | None) -> Parameter:
        """Return a parameter of a signature. `alias`: a number of its own if it is written."""
        name, annotation = parameter.name, parameter.annotation
        kind, types = TYPES[annotation.removesuffix(" | None")]
        if annotation.endswith(" | None") and len(types) == 1:
            types = (f"{types[0]}?",)
        if alias is not None:
            types = tuple(text.replace("Tensor", f"Tensor(a{alias}!)") for text in types)
        return cls(name, kind, tuple(f"{text} {name}{'_' * i}" for i, text in enumerate(types)))


class Declaration(NamedTuple):
    """An operator that is registered when it is first traced."""

    name: str
    function: Callable[..., Any]
    fake: Fake  # from arguments by name to what the operator returns
    mutates: tuple[str, ...]  # as far as the function has them
    returns: str
    is_method: bool  # of a wrapper: the operator first takes its handle, the dtype of out and `*args` of the run

    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters that the operator takes, without `self` and `*args`."""
        signature = inspect.signature(self.function).parameters.values()
        written = {name: i for i, name in enumerate(self.mutates)}
        named = [p for p in signature if p.name != "self" and p.kind is not p.VAR_POSITIONAL]
        return tuple(Parameter.of(p, written.get(p.name)) for p in named)


DECLARED: dict[str, Declaration] = {}


def operator(
    name: str, fake: Fake = lambda arguments: None, mutates: tuple[str, ...] = ("out", "lse")
) -> Callable[[F], F]:
    """Decorate a public function, which stays as it is, to declare the operator that stands for it under Dynamo.

    `name`: in the namespace `cute_attn`. `fake`: from the arguments, a dict by name, to what the operator returns,
    without data. `mutates`: the arguments that are written.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        returns = RETURNS.get(signature.return_annotation, "(Tensor, Tensor)")
        DECLARED[name] = Declaration(name, function, fake, mutates, returns, "self" in signature.parameters)
        return function

    return decorate


_wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle_of(wrapper: Any) -> int:
    """Return a number for a wrapper, which is not kept alive by it."""
    handle = next(_numbers)
    _wrappers[handle] = wrapper
    return handle


def wrapper_of(handle: int) -> Any:
    """Return the wrapper that a handle stands for; RuntimeArgumentError if it no longer exists."""
    found = _wrappers.get(handle)
    if found is None:
        raise RuntimeArgumentError(
            f"handle {handle} stands for no batch wrapper of this process: keep the wrapper as long as compiled "
            "functions run it"
        )
    return found
