"""Launches that differ from an earlier one in some parameters only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cute_attn.kernels.host.params import Rebinder, Values
from cute_attn.kernels.host.prepared import Grid
from cute_attn.runtime.launch import Launch


def bound(launch: Launch, values: Values, grid: Grid, fields: Sequence[str]) -> Callable[..., None]:
    """Returns a function of a stream and values of `fields` that launches with this grid and otherwise these values."""
    bind: Callable[[Values, Grid, Sequence[str]], Callable[..., None]] | None = getattr(launch, "bound", None)
    if bind is not None:
        return bind(values, grid, fields)
    rebound = Rebinder([param.name for param in launch.artifact.params], fields).bind(values)  # on the emulator

    def fire(stream: int, *changed: int | bytes) -> None:
        launch.fire(rebound(*changed), grid, stream)

    return fire
