"""Branches, exit and instructions without effect on values."""

from __future__ import annotations

from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.ptx import Inst


@form("bra", "bra.uni", "ret", "ret.uni", "exit")
def jump(e: Emitter, inst: Inst) -> None:
    raise PtxError(f"{inst.op} is translated with its block")


@form("nanosleep.u32", "prefetch.global{.L1|.L2}", "prefetch{|.param|.const}.tensormap")
@form("griddepcontrol.launch_dependents", since=90)
def nothing(e: Emitter, inst: Inst, *choices: str) -> None:
    """Emit nothing. Race checks always assume that the next launch begins at once."""
    e.line("pass")  # for one behind a predicate


@called("trap")
def trap(w: object, mask: object) -> None:
    raise PtxError("trap")
