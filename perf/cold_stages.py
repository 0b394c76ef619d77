"""Where the seconds of a first call go: functions of cute_attn and of its compiler, timed one inside the other.

`perf.first_calls` installs it in processes of their own, because it replaces functions. A function that another version
lacks is left out; its seconds then count for the stage around it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

REST = "checks, launch, kernel"
PASSES = "MLIR passes"
TIMED = (  # module, function, stage; a stage does not contain those inside it
    ("cute_attn.runtime.artifacts", "_stored", "look-up in bundles and cache"),
    ("cute_attn.runtime.artifacts", "dsl_import_error", "import of CuTe DSL"),
    ("cute_attn.runtime.artifacts", "compile_spec", "import of our device code"),
    ("cute_attn.runtime.compile", "_compile", "tracing of our device code"),
    ("cute_attn.runtime.compile", "_artifact", "artifact, written to the cache"),
    ("cute_attn.runtime.cache", "store", "artifact, written to the cache"),
    ("cute_attn.runtime.launch", "Launch.__init__", "loading onto the GPU"),
)
BINARY = "NVVM and ptxas"
STAGES = (*dict.fromkeys(stage for _, _, stage in TIMED[:4]), PASSES, BINARY, TIMED[4][2], TIMED[6][2], REST)
_BINARY_SHARE = re.compile(r"\(\s*([\d.]+)%\)\s+CudaToBinaryPass")


class Stages:
    """Seconds by stage since the latest `take`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inside = [0.0]  # of every open stage: seconds of the stages within it

    def take(self, total: float) -> dict[str, float]:
        """Returns the seconds of each stage of a call that took `total`, in their order, and forgets them."""
        taken, self._seconds, self._inside = self._seconds, {}, [0.0]
        taken[REST] = total - sum(taken.values())
        return {stage: taken[stage] for stage in STAGES if stage in taken}

    @contextlib.contextmanager
    def stage(self, name: str, shares: Callable[[], Mapping[str, float]] = dict) -> Iterator[None]:
        """Counts the seconds of the block for a stage, less those of stages within it; afterwards `shares` tells which
        part of them belongs to other stages.
        """
        start = self._clock()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = self._clock() - start
            own = took - self._inside.pop()
            self._inside[-1] += took
            for other, share in shares().items():
                self._add(other, own * share)
                own -= own * share
            self._add(name, own)

    def install(self) -> None:
        """Replaces the functions that are timed, for the life of the process."""
        for module, path, name in TIMED:
            self._replace(importlib.import_module(module), path, name)
        artifacts: Any = importlib.import_module("cute_attn.runtime.artifacts")
        imports = artifacts.dsl_import_error

        def imported() -> str | None:
            found: str | None = imports()
            if found is None:
                self._time_passes()
            return found

        artifacts.dsl_import_error = imported

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _replace(self, owner: Any, path: str, name: str) -> None:
        *classes, function = path.split(".")
        for part in classes:
            owner = getattr(owner, part, None)
        original = getattr(owner, function, None)
        if original is not None:
            setattr(owner, function, self._timed(original, name))

    def _timed(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return original(*args, **kwargs)

        return timed

    def _time_passes(self) -> None:
        """Times the passes of the DSL's compiler; its own report, on stderr, tells the share of the one that calls
        libNVVM and ptxas.
        """
        compiler = getattr(importlib.import_module("cutlass.base_dsl.compiler"), "Compiler", None)
        original = getattr(compiler, "compile", None)
        if original is None or hasattr(original, "__wrapped__"):
            return

        @functools.wraps(original)
        def timed(provider: Any, *args: Any, **kwargs: Any) -> Any:
            with self.stage(PASSES, lambda: _shares(report())), _stderr() as report, _reports(provider):
                return original(provider, *args, **kwargs)

        compiler.compile = timed  # type: ignore[union-attr]


def _shares(report: str) -> dict[str, float]:
    found = _BINARY_SHARE.search(report)
    return {BINARY: float(found[1]) / 100} if found else {}


@contextlib.contextmanager
def _reports(provider: Any) -> Iterator[None]:
    """Makes pass managers of a compiler report how long each pass took."""
    manager = provider.passmanager

    class PassManager:
        @staticmethod
        def parse(pipeline: str) -> Any:
            parsed = manager.PassManager.parse(pipeline)
            parsed.enable_timing()
            return parsed

    provider.passmanager = type("passmanager", (), {"PassManager": PassManager})
    try:
        yield
    finally:
        provider.passmanager = manager


@contextlib.contextmanager
def _stderr() -> Iterator[Callable[[], str]]:
    """Catches what is written to stderr, also by C++; the function returns it afterwards."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        caught: list[str] = []
        try:
            yield lambda: caught[0]
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            caught.append(file.read().decode(errors="replace"))
