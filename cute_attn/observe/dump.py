"""Writes public calls to files: `CUTE_ATTN_DUMP=DIR` those that raise, `CUTE_ATTN_DUMP=DIR:all` every one.

A file is a zip of `call.json` and the memory of the tensors. It holds data only: reading one runs no code of it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import logging
import os
import platform
import tempfile
import time
import traceback
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cute_attn.observe.hooks import Call
from cute_attn.observe.snapshot import PLAIN, REPR_LENGTH, Snapshot
from cute_attn.runtime import dsl, switches
from cute_attn.runtime.staging import is_capturing

FORMAT = 1
PLANS = ("plan", "begin_forward", "fast_decode_plan", "fast_prefill_plan")
STATE_BYTES = 64 << 20  # of a wrapper's plan that are kept on the host
DEFAULT_MB = 1024

logger = logging.getLogger(__name__)
_numbers = itertools.count(1)


def from_environment(text: str, version: str) -> Dumper:
    """Returns the observer for the value of `CUTE_ATTN_DUMP`. `version`: of the library."""
    directory, colon, mode = text.rpartition(":")
    every = bool(colon) and mode == "all"
    return Dumper(Path(directory if every else text), every, _max_bytes(), version)


def _max_bytes() -> int:
    text = os.environ.get(switches.DUMP_MAX_MB) or str(DEFAULT_MB)
    try:
        megabytes = int(text)
    except ValueError:  # also of digits that are too many, or of no number
        megabytes = -1
    if megabytes < 0:
        name, shown = switches.DUMP_MAX_MB, text[:REPR_LENGTH]
        logger.warning("%s must be a number of megabytes, got %r: %d is used", name, shown, DEFAULT_MB)
        megabytes = DEFAULT_MB
    return megabytes << 20


class Part(NamedTuple):
    """A call as JSON, and the memory of its arguments."""

    call: dict[str, Any]
    snapshot: Snapshot


class Dumper:
    """Observer that writes files into `directory`, with at most `max_bytes` of values in each."""

    def __init__(self, directory: Path, every: bool, max_bytes: int, version: str) -> None:
        self.directory, self.every, self.max_bytes, self.version = directory, every, max_bytes, version
        # How a wrapper came to be: the calls of its constructor, "made", and of its latest plan, "planned".
        self.states: weakref.WeakKeyDictionary[Any, dict[str, Part]] = weakref.WeakKeyDictionary()

    def __call__(self, call: Call, proceed: Callable[[], Any]) -> Any:
        state, made = None, call.function == "__init__"
        of_wrapper = call.args and not made and (call.owner is not None or call.function in PLANS)
        wrapper = call.args[0] if of_wrapper else None  # that the call plans or runs
        if self.every:
            self._write_safely(call, wrapper, None)
        # A plan may write its arguments, and a caller them afterwards: they are read before.
        if made or call.function in PLANS:
            state = _encoded(call, scratch=made)
            state.snapshot.copy(0 if _capturing() else STATE_BYTES)  # to the host
        try:
            result = proceed()
        except Exception as error:
            if not self.every:
                self._write_safely(call, wrapper, error)
            raise
        if state is not None and made:
            self.states[call.args[0]] = {"made": state}
        elif state is not None and wrapper is not None and wrapper in self.states:
            self.states[wrapper]["planned"] = state
        return result

    def _write_safely(self, call: Call, wrapper: Any, error: Exception | None) -> None:
        """Writes a file. What goes wrong is logged: a dump must not change what the program does."""
        if _capturing():
            logger.warning("%s is not dumped: it is being captured in a CUDA graph", call.name)
            return
        try:
            path, left_out = self._write(call, wrapper, error)
        except Exception as problem:
            logger.warning("%s could not be dumped: %s", call.name, problem)
            return
        level = logging.DEBUG if error is None else logging.WARNING
        logger.log(level, "%s was dumped: python -m cute_attn replay %s", call.name, path)
        for entry in left_out:
            names, size = ", ".join(entry["names"]), entry["bytes"] / 2**20
            logger.warning("%s: values of %s (%.1f MB) are left out: %s", path, names, size, entry["left_out"])

    def _write(self, call: Call, wrapper: Any, error: Exception | None) -> tuple[Path, list[dict[str, Any]]]:
        parts = {"call": _encoded(call)}
        parts["call"].snapshot.copy(self.max_bytes)
        parts |= {} if wrapper is None else self.states.get(wrapper, {})
        if call.function in PLANS:
            parts.pop("planned", None)
        memory = {name: part.snapshot.index() for name, part in parts.items()}
        document = {
            "format": FORMAT,
            "error": None if error is None else _described(error),
            "versions": {"cute_attn": self.version, **versions()},
            "parts": {name: {**part.call, "memory": memory[name]} for name, part in parts.items()},
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers)}"
        path = self.directory / f"{stamp}-{call.name}.zip"
        handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr("call.json", json.dumps(document, indent=1))
                for name, part in parts.items():
                    for i, found in enumerate(part.snapshot.memories):
                        if found.data is not None:
                            archive.writestr(f"{name}/{i}.bin", found.data.numpy().data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return path, [entry for entries in memory.values() for entry in entries if entry["left_out"]]


def _capturing() -> bool:
    return torch.cuda.is_available() and is_capturing(torch.device("cuda", torch.cuda.current_device()))


def _encoded(call: Call, scratch: bool = False) -> Part:
    """Returns a call without the wrapper, and without keywords at their defaults: operators pass all keywords,
    of which some exclude each other. Workspaces keep their size only.
    """
    snapshot = Snapshot()
    first = 1 if call.owner is not None or call.function in PLANS else 0
    parameters = inspect.signature(call.target).parameters
    names = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def encode(name: str, value: Any) -> Any:
        return snapshot.encode(value, name, scratch or "workspace" in name)

    args = call.args[first:]
    positional = zip((*names[first:], *("*",) * len(args)), args, strict=False)
    given = {key: value for key, value in call.kwargs.items() if not _is_default(parameters.get(key), value)}
    document = {
        "module": call.module,
        "owner": None if call.owner is None else call.owner.__name__,
        "function": call.function,
        "args": [encode(name, value) for name, value in positional],
        "kwargs": {name: encode(name, value) for name, value in given.items()},
    }
    return Part(document, snapshot)


def _is_default(parameter: inspect.Parameter | None, value: Any) -> bool:
    if parameter is None or type(value) not in PLAIN:
        return False
    return type(parameter.default) is type(value) and bool(parameter.default == value)


def _described(error: Exception) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error))[-20 * REPR_LENGTH :],
    }


def versions() -> dict[str, str]:
    """Returns versions of what the library runs on, and the GPU."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dsl": dsl.version() or "not installed",
    }
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found
