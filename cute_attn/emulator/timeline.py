"""Timeline of a launch in virtual time: events of each warp, as text or as an HTML picture.

In virtual time each instruction of a warp counts one, and a warp that waits resumes at the time at which its condition
held. It shows which warp waits for which, not how long anything takes on a GPU.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cute_attn.emulator.program import Block
    from cute_attn.emulator.warp_batch import WarpBatch

COLOURS = {"matrix": "#3b76c4", "copy": "#3f9e63", "other": "#8d96a0", "wait": "#e0a96d"}  # legible on light and dark
_KINDS = {"matrix": ("mma.", "wgmma.mma", "tcgen05.mma"), "copy": ("cp.async", "ldmatrix", "stmatrix")}
_WAITS = (
    "mbarrier.test_wait",
    "mbarrier.try_wait",
    "wgmma.wait",
    "cp.async.wait",
    "cp.async.bulk.wait",
    "tcgen05.wait",
)
_ROLES = {  # by instructions: a warp has the first role of which it executes one
    "math group": ("wgmma.mma",),
    "MMA": ("tcgen05.mma",),
    "math warp": ("mma.",),
    "softmax": ("ex2",),
    "producer": ("cp.async.bulk.tensor", "cp.async.cg", "cp.async.ca", "cp.async.bulk.shared"),
    "epilogue": ("st.global",),
}
_NUMBERED = {"math group": 4, "softmax": 4, "math warp": 1}  # roles of several, of so many warps each
ROW, LEFT, WIDTH, HEAD, TEXT = 18, 150, 1050, 22, "#768390"


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
    roles: frozenset[str] = frozenset()  # that the instructions of a block may stand for


class Recorder:
    """Recorder of one launch's events, in the order in which the emulator executed them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ends: dict[int, float] = {}  # where each batch's last event ended
        self.blocks: dict[int, tuple[str, frozenset[str]]] = {}  # kind and roles by block
        self.waits: dict[int, str] = {}  # what each batch waits for behind its last event

    def ran(self, batch: WarpBatch, block: Block) -> None:
        """Record that a batch ran `block`, and the pause since its last event, if any; a loop around a failing test is
        one pause.
        """
        key, now = id(batch), float(batch.cta.clocks.time[batch.agents].max())
        start = self.ends.setdefault(key, now - block.count)
        if batch.spin_since is not None:
            return
        place, inst = (batch.cta.index, tuple(map(int, batch.warps))), block.insts[0][0]
        began = now - block.count
        if began > start:
            waiting = next((i for i, _, _ in block.insts if i.op.startswith(_WAITS)), inst)
            what = batch.passed if waiting.op.startswith("mbarrier") and batch.passed else waiting.text
            found = (self.waits[key], 0) if key in self.waits else (what, waiting.line)
            self.events.append(Event(*place, start, began, "wait", *found))
        if block.index not in self.blocks:
            self.blocks[block.index] = _nature([inst.op for inst, _, _ in block.insts])
        kind, of_roles = self.blocks[block.index]
        self.events.append(Event(*place, max(start, began), now, kind, inst.text, inst.line, of_roles))
        self.ends[key] = now
        self.waits.pop(key, None)
        if batch.wait is not None:
            self.waits[key] = batch.wait.what


def _nature(opcodes: Sequence[str]) -> tuple[str, frozenset[str]]:
    """Kind and roles of a block of these instructions."""
    kinds = (kind for kind, prefixes in _KINDS.items() if any(op.startswith(prefixes) for op in opcodes))
    found = (role for role, prefixes in _ROLES.items() if any(op.startswith(prefixes) for op in opcodes))
    return next(kinds, "other"), frozenset(found)


def trace(events: Sequence[Event]) -> str:
    """Format events as text, one line per event."""
    lines = [
        f"{e.start:9.0f} {e.end:9.0f}  CTA {e.cta} warps {','.join(map(str, e.warps)):<24} {e.kind:<6} "
        f"{f'line {e.line}: ' if e.line else ''}{e.what}"
        for e in events
    ]
    return "\n".join(lines) + "\n"


def roles(events: Sequence[Event]) -> dict[int, str]:
    """What each warp of a CTA does, by the instructions that it ran: "producer", "math group 0", "softmax 1"."""
    of_warps: dict[int, set[str]] = {}
    for e in events:
        for warp in e.warps:
            of_warps.setdefault(warp, set()).update(e.roles)
    names = {warp: next((role for role in _ROLES if role in own), "idle") for warp, own in of_warps.items()}
    found: dict[int, str] = {}
    for warp, name in sorted(names.items()):
        size = _NUMBERED.get(name, 0)
        peers = sorted({w // size for w, other in names.items() if other == name}) if size else []
        found[warp] = f"{name} {peers.index(warp // size)}" if size else name
    return found


def picture(events: Sequence[Event], title: str, barriers: Mapping[int, str] | None = None, most_ctas: int = 4) -> str:
    """Draw events as an HTML page as wide as its window: one row per warp, a tooltip on every bar, which says what a
    pause waited for. `barriers`: names by address in shared memory.
    """
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>:root{color-scheme:light dark}body{font:13px sans-serif;margin:16px}svg{width:100%;height:auto}"
        "rect:hover{stroke:currentColor}</style>"
        f"<h3>{html.escape(title)}</h3>"
        f"{drawing(events, barriers, most_ctas)}\n"
    )


def drawing(events: Sequence[Event], barriers: Mapping[int, str] | None = None, most_ctas: int = 4) -> str:
    """Draw events as SVG that fits any width, in colours for light and dark pages."""
    ctas = sorted({e.cta for e in events})[:most_ctas]
    shown = [e for e in events if e.cta in ctas]
    names = {cta: roles([e for e in shown if e.cta == cta]) for cta in ctas}
    rows = sorted({(e.cta, warp) for e in shown for warp in e.warps})
    place = {row: ROW * i + HEAD * (ctas.index(row[0]) + 1) for i, row in enumerate(rows)}
    end = max((e.end for e in shown), default=1.0)
    scale = WIDTH / end
    heads = {",".join(map(str, cta)): min(y for row, y in place.items() if row[0] == cta) - 6 for cta in ctas}
    parts = [f'<text x="{LEFT}" y="{y}" fill="{TEXT}">CTA {index}</text>' for index, y in heads.items()]
    for (cta, warp), y in place.items():
        label = f"{names[cta][warp]}, warp {warp}"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end" fill="{TEXT}">{label}</text>')
    for e in _merged(shown):
        what = _named(e.what, barriers or {})
        text = f"waited for {what}" if e.kind == "wait" else f"{e.kind}, from {what}"
        tip = html.escape(f"{e.start:.0f} to {e.end:.0f}: {text}" + (f" (PTX line {e.line})" if e.line else ""))
        x, width = LEFT + e.start * scale, max((e.end - e.start) * scale, 0.5)
        for warp in e.warps:
            parts.append(
                f'<rect x="{x:.1f}" y="{place[e.cta, warp]}" width="{width:.1f}" height="{ROW - 3}" '
                f'fill="{COLOURS[e.kind]}"><title>{names[e.cta][warp]}, {tip}</title></rect>'
            )
    foot = ROW * len(rows) + HEAD * len(ctas) + 6
    for i, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 90 * i}" y="{foot}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 90 * i + 18}" y="{foot + 11}" fill="{TEXT}">{kind}</text>')
    scale_text = f"virtual time: 0 to {end:.0f} warp instructions"
    parts.append(f'<text x="{LEFT + WIDTH}" y="{foot + 11}" text-anchor="end" fill="{TEXT}">{scale_text}</text>')
    height = foot + 18
    box = f'viewBox="0 0 {LEFT + WIDTH + 4} {height}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>'


def _named(what: str, barriers: Mapping[int, str]) -> str:
    """Puts the name of a barrier in front of its address, and shortens lists of registers."""
    short = re.sub(r"\{[^}]{24,}\}", "{...}", what)
    found = re.match(r"mbarrier at shared (0x[0-9a-f]+)", short)
    name = barriers.get(int(found[1], 16)) if found else None
    return f"{name}: {short}" if name else short


def _merged(events: Sequence[Event]) -> list[Event]:
    """Merge adjacent blocks of one kind into one event."""
    last: dict[tuple[tuple[int, int, int], tuple[int, ...]], Event] = {}
    found: list[Event] = []
    for e in events:
        before = last.get((e.cta, e.warps))
        if before is not None and before.kind == e.kind != "wait" and before.end == e.start:
            before.end = e.end
            continue
        copy = replace(e)
        last[e.cta, e.warps] = copy
        found.append(copy)
    return found
