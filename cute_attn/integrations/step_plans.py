"""Plans that the layers of an engine's step share: the first layer of a kind makes one, the others run it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class StepPlans:
    """Wrappers by kind of layer, which are kept between steps. `make`: returns a new one."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self.wrappers: dict[Hashable, Any] = {}
        self._steps: dict[Hashable, object] = {}  # of the plan in force

    def of(self, kind: Hashable, step: object, plan: Callable[[Any], Any]) -> Any:
        """Return the wrapper of a kind for a step, which is any object; `plan` plans it, unless it is planned."""
        if self._steps.get(kind) is not step:
            if kind not in self.wrappers:
                self.wrappers[kind] = self._make(kind)
            self._steps[kind] = None  # while it fails
            plan(self.wrappers[kind])
            self._steps[kind] = step
        return self.wrappers[kind]
