"""Work in several threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_threads(work: Callable[[T], object], arguments: Collection[T]) -> None:
    """Call `work` with each argument, in a thread of its own; all begin together. Raises what they raise. Threads take
    turns every few bytecodes, so that a check and the act after it come apart.
    """
    start, interval = threading.Barrier(len(arguments)), sys.getswitchinterval()

    def begin(argument: T) -> None:
        start.wait()
        work(argument)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(arguments)) as pool:
            for future in [pool.submit(begin, argument) for argument in arguments]:
                future.result()
    finally:
        sys.setswitchinterval(interval)
