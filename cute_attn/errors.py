"""Errors a caller can act on. Types keep FlashInfer's where callers catch them (KeyError for a bad layout, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArtifactError",
    "LayoutError",
    "NotPlannedError",
    "NotSupported",
    "Refusal",
    "RuntimeArgumentError",
    "WorkspaceError",
]


class ArgumentError(ValueError):
    """An argument has a value, shape, dtype or device that no backend accepts.

    The message names the argument, its value and what is accepted.
    """


class LayoutError(ArgumentError, KeyError):
    """`kv_layout`, `pos_encoding_mode` or another string that FlashInfer looks up in a table is not in it."""

    __str__ = ArgumentError.__str__  # KeyError would print the repr of the message


class RuntimeArgumentError(ArgumentError, RuntimeError):
    """A bad argument that FlashInfer finds in compiled code, where every error is a RuntimeError."""


class WorkspaceError(RuntimeArgumentError):
    """A workspace buffer is too small for the plan. The message names the bytes needed."""


class ArgumentTypeError(TypeError, ValueError):
    """An argument has the wrong Python type, or one argument was given under two names."""


class Refusal(NamedTuple):
    """Why one backend does not take a problem."""

    backend: str
    feature: str
    reason: str
    instead: str  # what to use

    def __str__(self) -> str:
        return f"{self.backend} refuses {self.feature}: {self.reason}. Instead: {self.instead}."


class NotSupported(NotImplementedError, ValueError):
    """Arguments are valid, but the backend (or every backend) refuses a feature. `refusals` holds each reason."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self.refusals = tuple(refusals)
        super().__init__("\n".join(str(r) for r in self.refusals))


class ArtifactError(RuntimeError):
    """A compiled kernel is missing, damaged or does not fit the device."""


class NotPlannedError(RuntimeError, AttributeError):
    """`run` of a batch wrapper before `plan`, where FlashInfer raises AttributeError."""
