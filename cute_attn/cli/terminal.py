"""Plain text for terminals: aligned tables and a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
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


class ProgressBar:
    """Progress bar on stderr; silent if stderr is not a terminal."""

    WIDTH = 30

    def __init__(self, total: int) -> None:
        self.total, self.done, self.started = total, 0, time.monotonic()
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> ProgressBar:
        self._draw("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def step(self, label: str, items: int = 1) -> None:
        """Counts finished items, one by default, and shows `label`."""
        self.done += items
        self._draw(label)

    def _draw(self, label: str) -> None:
        if not self.shown:
            return
        filled = self.WIDTH * self.done // max(self.total, 1)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        seconds = time.monotonic() - self.started
        line = f"[{bar}] {self.done}/{self.total} {seconds:4.0f} s  {label}"
        print(f"\r\x1b[K{line[:110]}", end="", file=sys.stderr, flush=True)
