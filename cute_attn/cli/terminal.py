"""Plain text for terminals: aligned tables and a progress bar."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType


def table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Returns a table with columns as wide as their widest cell; the first `left` ones are left-aligned, the others
    right-aligned.
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        aligned = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(aligned).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_bytes(num_bytes: int) -> str:
    """Formats a number of bytes in powers of 1024: "512 B", "1.5 KB", "3.2 MB"."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def format_seconds(seconds: float) -> str:
    """Formats a duration: "8 s", "2 min 5 s", "1 h 2 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def printable(text: str) -> str:
    """Returns a line in which nothing controls the terminal: names of files may hold any bytes."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class ProgressBar:
    """Progress bar on stderr, with an estimate of the time left; silent if stderr is not a terminal."""

    WIDTH = 30
    INSTANT = 0.05  # seconds: items that come faster were there before, and say nothing of those to come

    def __init__(self, total: int) -> None:
        self.total, self.done, self.instant = total, 0, 0
        self.started = self.latest = time.monotonic()
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> ProgressBar:
        self._draw("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def step(self, label: str, items: int = 1) -> None:
        """Counts finished items, one by default, and shows `label`."""
        now = time.monotonic()
        self.instant += items if now - self.latest < self.INSTANT else 0
        self.done, self.latest = self.done + items, now
        self._draw(label)

    def seconds_left(self) -> float | None:
        """Returns the estimate; None while there is nothing to go by."""
        timed = self.done - self.instant
        return None if timed < 1 else self.seconds / timed * (self.total - self.done)

    def _draw(self, label: str) -> None:
        if not self.shown:
            return
        filled = self.WIDTH * self.done // max(self.total, 1)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        left = self.seconds_left()
        times = format_seconds(self.seconds) + ("" if left is None else f", {format_seconds(left)} left")
        line = f"[{bar}] {self.done}/{self.total} {times}  {label}"
        print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM end this process and its compile processes at once, wherever the signal goes.

    Compile processes inherit the handler, and end without a traceback. Left alone, they would compile all that waits.
    """
    parent = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() != parent:
            os._exit(128 + number)
        for worker in multiprocessing.active_children():
            worker.kill()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
