"""Timeline of a launch in virtual time: events of each warp, as text or as an HTML picture.

In virtual time each instruction of a warp counts one, and a warp that waits resumes at the time at which its condition
held. It shows which warp waits for which, not how long anything takes on a GPU.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cute_attn.emulator.program import Block
    from cute_attn.emulator.warp_batch import WarpBatch

COLOURS = {"matrix": "#3b6fb6", "copy": "#4d9a6a", "other": "#8d8d8d", "wait": "#f0d9c8"}
_MATRIX = ("mma.", "wgmma.mma", "tcgen05.mma")
_COPY = ("cp.async", "cp.reduce", "ldmatrix", "stmatrix")
ROW, LEFT, WIDTH = 16, 150, 1500


@dataclass
class Event:
    """Executed block or pause. `kind`: "matrix", "copy" or "other" by the instructions of a block, "wait" for a
    pause."""

    cta: tuple[int, int, int]
    warps: tuple[int, ...]
    start: float
    end: float
    kind: str
    what: str
    line: int


class Recorder:
    """Recorder of one launch's events, in the order in which the emulator executed them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ends: dict[int, float] = {}  # where each batch's last event ended
        self.kinds: dict[int, str] = {}
        self.waits: dict[int, str] = {}

    def before(self, batch: WarpBatch) -> None:
        """Record the pause, if any, of a batch that is about to run. A loop around a failing test is one pause."""
        if batch.spin_since is not None:
            return
        now = _time(batch)
        start = self.ends.get(id(batch), now)
        if now > start:
            what = self.waits.get(id(batch), "another CTA")
            self.events.append(Event(batch.cta.index, tuple(map(int, batch.warps)), start, now, "wait", what, 0))
            self.ends[id(batch)] = now

    def after(self, batch: WarpBatch, block: Block, start: float) -> None:
        """Record that a batch ran `block` from `start` on."""
        if batch.spin_since is not None:
            self.waits[id(batch)] = batch.spinning or self.waits.get(id(batch), "")
            return
        inst = block.insts[0][0]
        now = _time(batch)
        paused = now - block.count - start
        warps = tuple(map(int, batch.warps))
        if paused > 0:
            self.events.append(Event(batch.cta.index, warps, start, start + paused, "wait", inst.text, inst.line))
        self.events.append(Event(batch.cta.index, warps, start + paused, now, self._kind(block), inst.text, inst.line))
        self.ends[id(batch)] = now
        if batch.wait is not None:
            self.waits[id(batch)] = batch.wait.what
        elif batch.spinning:
            self.waits[id(batch)] = batch.spinning

    def _kind(self, block: Block) -> str:
        found = self.kinds.get(block.index)
        if found is None:
            opcodes = [inst.op for inst, _, _ in block.insts]
            found = "other"
            for kind, prefixes in (("copy", _COPY), ("matrix", _MATRIX)):
                if any(op.startswith(prefixes) for op in opcodes):
                    found = kind
            self.kinds[block.index] = found
        return found


def _time(batch: WarpBatch) -> float:
    clocks = batch.cta.clocks
    return 0.0 if clocks is None else float(clocks.time[batch.agents].max())


def trace(events: Sequence[Event]) -> str:
    """Format events as text, one line per event."""
    lines = [
        f"{e.start:9.0f} {e.end:9.0f}  CTA {e.cta} warps {','.join(map(str, e.warps)):<24} {e.kind:<6} "
        f"{f'line {e.line}: ' if e.line else ''}{e.what}"
        for e in events
    ]
    return "\n".join(lines) + "\n"


def picture(events: Sequence[Event], title: str, most_ctas: int = 4) -> str:
    """Draw events as an HTML page: one row per warp, time to the right, a tooltip on every bar."""
    ctas = sorted({e.cta for e in events})[:most_ctas]
    shown = [e for e in events if e.cta in ctas]
    end = max((e.end for e in shown), default=1.0)
    rows = sorted({(e.cta, warp) for e in shown for warp in e.warps})
    place = {row: i for i, row in enumerate(rows)}
    scale = WIDTH / end
    bars, labels = [], []
    for (cta, warp), i in place.items():
        y = ROW * (i + 1) + 12 * ctas.index(cta)
        labels.append(f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">CTA {_index(cta)} warp {warp}</text>')
    for e in _merged(shown):
        for warp in e.warps:
            y = ROW * (place[e.cta, warp] + 1) + 12 * ctas.index(e.cta)
            text = html.escape(f"{e.start:.0f} to {e.end:.0f}: {e.kind}, {e.what}")
            x, width = LEFT + e.start * scale, max((e.end - e.start) * scale, 0.5)
            bars.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 3}" fill="{COLOURS[e.kind]}">'
                f"<title>{text}</title></rect>"
            )
    height = ROW * (len(rows) + 3) + 12 * len(ctas)
    legend = " ".join(f'<span style="background:{c}">&nbsp;&nbsp;&nbsp;</span> {k}' for k, c in COLOURS.items())
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:13px sans-serif;margin:20px}text{font:11px sans-serif}</style>"
        f"<h3>{html.escape(title)}</h3><p>{legend} &nbsp; virtual time 0 to {end:.0f}, in warp instructions</p>"
        f'<svg width="{LEFT + WIDTH + 20}" height="{height}">{"".join(labels)}{"".join(bars)}</svg>\n'
    )


def _index(cta: tuple[int, int, int]) -> str:
    return ",".join(map(str, cta))


def _merged(events: Sequence[Event]) -> list[Event]:
    """Merge adjacent blocks of one kind into one event."""
    last: dict[tuple[tuple[int, int, int], tuple[int, ...]], Event] = {}
    found: list[Event] = []
    for e in events:
        before = last.get((e.cta, e.warps))
        if before is not None and before.kind == e.kind != "wait" and before.end == e.start:
            before.end = e.end
            continue
        copy = Event(e.cta, e.warps, e.start, e.end, e.kind, e.what, e.line)
        last[e.cta, e.warps] = copy
        found.append(copy)
    return found
