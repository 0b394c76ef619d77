"""Wrappers are not copied: a copy would share schedules and the number that stands for it in traced graphs."""

from __future__ import annotations

from typing import NoReturn

from cute_attn.errors import ArgumentTypeError


class NotCopied:
    """A wrapper that `copy` and `pickle` refuse."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse `copy.copy`, `copy.deepcopy` and pickling."""
        raise ArgumentTypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it holds the schedules that its launches read. "
            "Construct another wrapper and plan it"
        )
