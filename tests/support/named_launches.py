"""Kernels that are nothing but the names of their parameters: what host code hands to a launch, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from cute_attn.runtime.spec import KernelSpec


class NamedLaunches:
    """`load` takes the place of the function that loads kernels. `specs`: what it loaded; `blocks`: the parameters of
    every launch.
    """

    def __init__(self, names_of: Callable[[KernelSpec], Sequence[str]]) -> None:
        self.names_of = names_of
        self.specs: list[Any] = []
        self.blocks: list[dict[str, Any]] = []

    def load(self, spec: KernelSpec, *where: Any) -> Any:
        self.specs.append(spec)
        params = [SimpleNamespace(name=name) for name in self.names_of(spec)]
        return SimpleNamespace(artifact=SimpleNamespace(params=params), bind=self._bind)

    def _bind(self, static: dict[str, Any], *groups: Sequence[str]) -> Any:
        def fire(stream: int, moving: tuple[Any, ...], settled: tuple[Any, ...]) -> None:
            given = zip(groups, (moving, *settled[1:]), strict=True)
            moved = {name: x for names, values in given for name, x in zip(names, values, strict=True)}
            self.blocks.append(static | moved)

        return SimpleNamespace(fire=fire)
