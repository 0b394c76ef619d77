"""Branches, exit and instructions without effect on values."""

from __future__ import annotations

from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.ptx import Inst


@form("bra", "bra.uni", "ret", "ret.uni", "exit", conformance="order")
def jump(e: Emitter, inst: Inst) -> None:
    raise PtxError(f"{inst.op} is translated with its block")


@form(
    "nanosleep.u32",
    "prefetch{|.global}{.L1|.L2}",
    "prefetch{|.param|.const}.tensormap",
    "discard.global.L2",
    "createpolicy.fractional{.L2::evict_first|.L2::evict_last|.L2::evict_normal|.L2::evict_unchanged}{|.L2::evict_unchanged}.b64",
    conformance="order",
)
@form(
    "cp.async.bulk.prefetch.tensor{.1d|.2d|.3d|.4d|.5d}.L2.global{|.tile}{|.L2::cache_hint}",
    "cp.async.bulk.prefetch.L2.global{|.L2::cache_hint}",
    since=90,
    conformance="order",
)
@form("griddepcontrol.launch_dependents", since=90, conformance="order", golden="barriers")
def nothing(e: Emitter, inst: Inst, *choices: str) -> None:
    """Emit nothing but a result, where there is one. Race checks always assume that the next launch begins at once."""
    if inst.op.startswith("createpolicy"):
        e.set(inst.operands[0], "u8", e.constant(0, "u8"))
    else:
        e.line("pass")  # for one behind a predicate


@called("trap", conformance="order")
def trap(w: object, mask: object) -> None:
    raise PtxError("trap")
