"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_threads(work: Callable[[T], object], arguments: Collection[T]) -> None:
    """Call `work` with each argument, in a thread of its own; all begin together. Raises what they raise."""
    start = threading.Barrier(len(arguments))

    def begin(argument: T) -> None:
        start.wait()
        work(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        for future in [pool.submit(begin, argument) for argument in arguments]:
            future.result()
