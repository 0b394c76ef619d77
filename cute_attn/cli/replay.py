"""`replay`: runs a call that `CUTE_ATTN_DUMP` has written, and compares it with the reference."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_attn.errors import ArgumentError
from cute_attn.runtime import arch as archs

if TYPE_CHECKING:
    import torch

BACKENDS = ("gpu", "emulator", "reference")
# Fields of a file's document, of a part of it, of a part's memory and of the error, by type.
DOCUMENT = {dict: ("versions", "parts"), dict | None: ("error",)}
PART = {str: ("module", "function"), str | None: ("owner",), list: ("args", "memory"), dict: ("kwargs",)}
MEMORY = {int: ("bytes", "address"), str: ("device", "left_out"), list: ("names",), bool: ("stored", "zeros")}
ERROR = {str: ("type", "message")}
LOOSEST = 0.12  # of results that come from fp8 inputs
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-3}


class Target(NamedTuple):
    """Where a call is run. `arch`: of the emulator."""

    backend: str
    arch: str = ""

    def __str__(self) -> str:
        return f"{self.backend} ({self.arch})" if self.arch else self.backend


class Outcome(NamedTuple):
    """What a call did: its results, or the error that it raised; and choices of backends."""

    results: list[torch.Tensor]
    error: Exception | None
    choices: list[str]
    filled: list[str]  # arguments for whose values random numbers stand


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="run a call that CUTE_ATTN_DUMP has written, and compare it with the reference",
        description=(
            "Runs the call of FILE and prints its error, or the largest absolute error against the reference, which "
            "computes in fp64 and rounds to the dtype of the result. Exits 0 if they agree, 1 if the call raises or "
            "differs, 2 if FILE cannot be read."
        ),
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help="gpu: as it was called; emulator: a GPU's kernels on CPU tensors; reference: torch on CPU tensors "
        "(default: gpu where the call was on one and one is here, else reference)",
    )
    parser.add_argument("--arch", metavar="ARCH", help=f"of the emulator: one of {', '.join(archs.ARCHS)}")


def run(options: argparse.Namespace) -> int:
    with opened(options.file) as archive:
        document = read(options.file, archive)
        call = document["parts"]["call"]
        target = target_of(options, call)
        if target.backend == "emulator" and not takes_backend(
            public(call["module"], call["owner"] or call["function"])
        ):
            raise ArgumentError(f"{_name(call)} takes no backend, so that the emulator cannot run it: --backend gpu")
        print(f"{_name(call)} of cute_attn {document['versions'].get('cute_attn')}, recorded with", end=" ")
        print(", ".join(f"{name} {value}" for name, value in document["versions"].items() if name != "cute_attn"))
        if document["error"]:
            print(f"recorded error: {document['error']['type']}: {document['error']['message']}")
        outcome = execute(document, archive, target)
        if outcome.choices:
            print(f"backend: {outcome.choices[-1]}")  # the choice for the lengths of the call
        if outcome.filled:
            print(f"random numbers stand for values that the file leaves out: {', '.join(outcome.filled)}")
        if outcome.error is not None:
            print(f"{target}: raises {type(outcome.error).__name__}: {outcome.error}")
            return 1
        if target.backend == "reference" or not outcome.results:
            print(f"{target}: runs")
            return 0
        truth = execute(document, archive, Target("reference"))
    if truth.error is not None:
        print(f"{target}: runs; the reference raises {type(truth.error).__name__}: {truth.error}")
        return 1
    return compared(target, outcome.results, truth.results)


def compared(target: Target, results: Sequence[torch.Tensor], truths: Sequence[torch.Tensor]) -> int:
    """Prints the error of each result; returns the exit code."""
    agree = True
    for number, (result, truth) in enumerate(zip(results, truths, strict=True)):
        absolute, relative = errors(result, truth)
        dtype = str(result.dtype).removeprefix("torch.")
        limit = TOLERANCE.get(dtype, LOOSEST)
        agree &= relative <= limit
        verdict = "ok" if relative <= limit else f"WRONG, {relative:.1e} of 1 + |reference|"
        print(f"{target}: result {number} ({dtype}): max abs error {absolute:.2e} against the reference: {verdict}")
    return 0 if agree else 1


def errors(result: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Returns the largest absolute error, and the largest relative to 1 + |truth|; infinite where only one is a NaN."""
    a, b = result.detach().cpu().double().flatten(), truth.detach().double().flatten()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(same, 0).nan_to_num(float("inf"), posinf=float("inf"))
    relative = (difference / (1 + b.abs())).masked_fill(same, 0).nan_to_num(float("inf"), posinf=float("inf"))
    return (float(difference.max()), float(relative.max())) if len(a) else (0.0, 0.0)


def opened(path: Path) -> zipfile.ZipFile:
    with _reading(f"{path} is no file of CUTE_ATTN_DUMP"):
        return zipfile.ZipFile(path)


@contextlib.contextmanager
def _reading(problem: str) -> Iterator[None]:
    """Makes any error of reading a damaged file an ArgumentError: zipfile, json and torch raise those of many types."""
    try:
        yield
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(f"{problem}: {type(error).__name__}: {error}") from error


def read(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    """Returns the document of a file; ArgumentError if it is not one that this version reads."""
    from cute_attn.observe.dump import FORMAT

    with _reading(f"{path} is no file of CUTE_ATTN_DUMP"):
        document: dict[str, Any] = json.loads(archive.read("call.json"))
        if document["format"] != FORMAT:
            raise ArgumentError(f"{path} has format {document['format']!r}; this version of cute_attn reads {FORMAT}")
        _check("the document", document, DOCUMENT)
        if document["error"] is not None:
            _check("error", document["error"], ERROR)
        for name in {"call", *document["parts"]}:
            part = document["parts"][name]
            _check(f"part {name}", part, PART)
            for memory in part["memory"]:
                _check(f"memory of part {name}", memory, MEMORY)
                ", ".join(memory["names"])  # a TypeError unless they are texts
    return document


def _check(what: str, found: Any, fields: Mapping[Any, tuple[str, ...]]) -> None:
    """Raises a TypeError unless `found` has all the fields."""
    for kind, names in fields.items():
        for name in names:
            if not isinstance(found, dict) or name not in found or not isinstance(found[name], kind):
                raise TypeError(f"{what} has no {name} of type {getattr(kind, '__name__', kind)}")


def target_of(options: argparse.Namespace, call: dict[str, Any]) -> Target:
    """Returns where to run a call."""
    import torch

    on_gpu = any(memory["device"].startswith("cuda") for memory in call["memory"])
    backend = options.backend
    if backend is None:
        backend = "emulator" if options.arch else "gpu" if on_gpu and torch.cuda.is_available() else "reference"
    if options.arch and backend != "emulator":
        raise ArgumentError(f"--arch belongs to the emulator, but --backend is {backend}")
    if backend == "gpu" and not torch.cuda.is_available():
        raise ArgumentError("--backend gpu: torch finds no GPU here; --arch sm_90a runs the kernels on the emulator")
    return Target(backend, archs.of_gpu(options.arch or "sm_90a").name if backend == "emulator" else "")


def takes_backend(function: Callable[..., Any]) -> bool:
    """Tells whether a function, or the constructor of a wrapper, can run on the reference and on the emulator.
    `concat_mla_k` has a `backend` of other names.
    """
    backend = inspect.signature(function).parameters.get("backend")
    return backend is not None and backend.default != "default"


def execute(document: dict[str, Any], archive: zipfile.ZipFile, target: Target) -> Outcome:
    """Makes and plans the wrapper, if there is one, and runs the call."""
    import torch

    from cute_attn import emulator
    from cute_attn.observe import snapshot
    from cute_attn.observe.dump import PLANS

    parts, call = document["parts"], document["parts"]["call"]
    with _reading(f"arguments in {archive.filename} cannot be read"):
        arguments = {name: _arguments(name, part, archive, target) for name, part in parts.items()}
    made = public(call["module"], parts["made"]["owner"]) if "made" in parts else None
    functions = {name: _function(part, made is not None) for name, part in parts.items() if name != "made"}
    filled = [name for _, _, reader in arguments.values() for name in reader.filled]
    choices: list[str] = []
    emulated: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if target.backend == "emulator":
        emulated = emulator.using(target.arch, kernels=_asked_backend(parts))
    try:
        with _listening(choices), emulated:
            wrapper = [] if made is None else [_call(made, [], arguments["made"], target)]
            if "planned" in parts:
                _call(functions["planned"], wrapper, arguments["planned"], target)
            result = _call(functions["call"], wrapper, arguments["call"], target)
            if target.backend == "gpu":
                torch.cuda.synchronize()
    except Exception as error:
        return Outcome([], error, choices, filled)
    args, kwargs, _ = arguments["call"]
    if call["function"] in ("__init__", *PLANS):
        return Outcome([], None, choices, filled)
    return Outcome(list(snapshot.tensors((args, kwargs) if result is None else result)), None, choices, filled)


def _function(part: dict[str, Any], made: bool) -> Callable[..., Any]:
    """Returns the function of a recorded call, which takes the wrapper first if there is one. `made`: there is."""
    if part["owner"] is None:
        return public(part["module"], part["function"])
    cls = public(part["module"], part["owner"])
    if part["function"] == "__init__":
        return cls
    name = part["function"]
    if not made:
        raise ArgumentError(f"the file does not say how the {part['owner']} was made")
    if name.startswith("_") or not inspect.isfunction(getattr(cls, name, None)):
        raise ArgumentError(f"the file names {name!r}, which is no public method of {part['owner']}")
    method: Callable[..., Any] = getattr(cls, name)
    return method


def public(module: Any, name: Any) -> Any:
    """Returns a public function or class; ArgumentError for any other name."""
    from cute_attn.observe.hooks import MODULES

    found = MODULES.get(module) if isinstance(module, str) else None
    if found is None or name not in found.__all__:
        raise ArgumentError(f"the file names {module}.{name}, which is no public function of cute_attn")
    return getattr(found, name)


Arguments = tuple[list[Any], dict[str, Any], Any]


def _arguments(name: str, part: dict[str, Any], archive: zipfile.ZipFile, target: Target) -> Arguments:
    """Returns positional and keyword arguments of a part, and the reader that made them."""
    import torch

    from cute_attn.observe.snapshot import Reader

    def device(recorded: str) -> torch.device:
        return torch.device("cuda" if target.backend == "gpu" and recorded.startswith("cuda") else "cpu")

    reader = Reader(part["memory"], lambda number: archive.read(f"{name}/{number}.bin"), device)
    args = [reader.decode(value) for value in part["args"]]
    return args, {key: reader.decode(value) for key, value in part["kwargs"].items()}, reader


def _call(function: Callable[..., Any], wrapper: list[Any], arguments: Arguments, target: Target) -> Any:
    args, kwargs, _ = arguments
    bound = inspect.signature(function).bind_partial(*wrapper, *args)  # keywords may have names of no parameter
    if target.backend != "gpu" and takes_backend(function):
        (bound.arguments if "backend" in bound.arguments else kwargs)["backend"] = target.backend
    return function(*bound.args, **kwargs)


def _asked_backend(parts: dict[str, Any]) -> str:
    """Returns the backend of a GPU that the call asked for, or "auto"."""
    from cute_attn.dispatch.families import FAMILIES

    values = [value for part in parts.values() for value in (*part["args"], part["kwargs"].get("backend"))]
    return next((value for value in values if isinstance(value, str) and value in FAMILIES), "auto")


@contextlib.contextmanager
def _listening(choices: list[str]) -> Iterator[None]:
    """Collects what selection logs of its choices."""

    def note(record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("emulator:"):  # says nothing of the kernels
            choices.append(record.getMessage())
        return False  # nobody else hears of it

    logger = logging.getLogger("cute_attn.dispatch.select")
    level = logger.level
    logger.addFilter(note)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeFilter(note)
        logger.setLevel(level)


def _name(call: dict[str, Any]) -> str:
    return call["function"] if call["owner"] is None else f"{call['owner']}.{call['function']}"
