"""Puts observers around public functions and the methods of public classes.

Only the outermost call is observed: public functions and wrappers use each other. Calls that Dynamo traces are not; the
operators that stand for them are, each time a compiled function runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

import cute_attn.attention
import cute_attn.cascade
import cute_attn.concat_ops
import cute_attn.decode
import cute_attn.exports
import cute_attn.flash_mla
import cute_attn.mla
import cute_attn.page
import cute_attn.prefill
import cute_attn.quantization
import cute_attn.sparse
import cute_attn.xqa
from cute_attn.ops import declare
from cute_attn.runtime import switches

# Modules under FlashInfer's and FlashMLA's names, which hold all that is public; `utils` only describes devices. A name
# that is asked of `cute_attn` would stay there as it is now, without an observer.
PUBLIC = (
    *("attention", "cascade", "concat_ops", "decode", "flash_mla", "mla", "page", "prefill", "quantization"),
    *("sparse", "xqa"),
)
MODULES = {name: sys.modules[f"cute_attn.{name}"] for name in PUBLIC}


class Call(NamedTuple):
    """A public call. `owner`: the public class of a method, else None. `target`: the function itself."""

    module: str  # "decode": the public module of function or class
    owner: type | None
    function: str
    args: tuple[Any, ...]  # with the wrapper first, for a method
    kwargs: dict[str, Any]
    target: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.function if self.owner is None else f"{self.owner.__name__}.{self.function}"


Place = Callable[[tuple[Any, ...], dict[str, Any], Callable[..., Any]], Call]  # from the last fields of a call
Observer = Callable[[Call, Callable[[], Any]], Any]  # runs the second argument, and returns what it returns


class _Depth(threading.local):
    inside = False


_depth = _Depth()


def public_names() -> Iterator[tuple[str, str, Any]]:
    """Yields (module, name, object) of every public function and class, each once."""
    seen: set[int] = set()
    for module_name, module in MODULES.items():
        for name in module.__all__:
            member = getattr(module, name)
            if callable(member) and id(member) not in seen:
                seen.add(id(member))
                yield module_name, name, member


def install(observers: Sequence[Observer]) -> None:
    """Observes all public calls from now on."""
    if not observers:
        return
    names = list(public_names())
    classes = {member: module for module, _, member in names if hasattr(member, "run")}  # of records are no calls
    functions = [(module, name, member) for module, name, member in names if not inspect.isclass(member)]
    methods = [(cls, name, method) for cls in classes for name, method in _methods(cls, set(classes))]
    places: list[tuple[Callable[..., Any], Place]] = [
        *((function, functools.partial(Call, module, None, name)) for module, name, function in functions),
        *((method, functools.partial(_method_call, classes, name)) for _, name, method in methods),
    ]
    for cls, name, method in methods:  # some are one function under two names
        setattr(cls, name, _observed(method, observers, functools.partial(_method_call, classes, name)))
    observed = {id(function): _observed(function, observers, place) for function, place in places[: len(functions)]}
    for module in (cute_attn.exports, *MODULES.values()):  # where the originals are
        for name, member in list(vars(module).items()):
            if not inspect.isclass(member) and id(member) in observed:
                setattr(module, name, observed[id(member)])
    _replace_operators(observers, places)


def _methods(cls: type, public: set[type]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields constructor and public methods of a class, without those that it inherits from another public class."""
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        source = next(base for base in cls.__mro__ if name in base.__dict__)
        if source is cls or source not in public:
            yield name, method


def _method_call(classes: dict[type, str], name: str, args: tuple[Any, ...], *others: Any) -> Call:
    """Returns a call with the public class of the wrapper, from which a user's may derive."""
    owner = next(cls for cls in type(args[0]).__mro__ if cls in classes)
    return Call(classes[owner], owner, name, args, *others)


def _observed(function: Callable[..., Any], observers: Sequence[Observer], place: Place) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _depth.inside:
            return function(*args, **kwargs)
        call = place(args, kwargs, function)
        proceed = functools.partial(function, *args, **kwargs)
        for observer in observers:
            proceed = functools.partial(observer, call, proceed)
        _depth.inside = True
        try:
            return proceed()
        finally:
            _depth.inside = False

    return observed


def _replace_operators(observers: Sequence[Observer], places: Sequence[tuple[Callable[..., Any], Place]]) -> None:
    """Observes what the operators of torch.compile run: public functions, some without their outer decorators."""
    public = {id(function) for function, _ in places}
    inner: dict[int, Place] = {}
    for function, place in places:
        layer: Callable[..., Any] | None = function
        while layer is function or (layer is not None and id(layer) not in public):
            inner.setdefault(id(layer), place)
            layer = getattr(layer, "__wrapped__", None)
    for operator, declaration in declare.DECLARED.items():
        if id(declaration.function) in inner:
            function = _observed(declaration.function, observers, inner[id(declaration.function)])
            declare.DECLARED[operator] = declaration._replace(function=function)


# ---- NVTX ranges around public calls, for Nsight Systems


def has_nvtx() -> bool:
    """Tells whether torch has NVTX; a warning says if not."""
    try:
        torch.cuda.nvtx.range_push("cute_attn")
        torch.cuda.nvtx.range_pop()
    except (RuntimeError, AttributeError) as error:
        warnings.warn(f"{switches.NVTX} has no effect: this build of torch has no NVTX ({error})", stacklevel=2)
        return False
    return True


def nvtx_ranges(call: Call, proceed: Callable[[], Any]) -> Any:
    """Runs a call inside a range of its name: "cute_attn.single_decode_with_kv_cache", "cute_attn.Wrapper.run"."""
    torch.cuda.nvtx.range_push(f"cute_attn.{call.name}")
    try:
        return proceed()
    finally:
        torch.cuda.nvtx.range_pop()
