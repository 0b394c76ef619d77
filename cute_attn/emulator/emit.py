"""Code generation for instructions: operands become expressions, results are assigned to registers, under a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cute_attn.emulator.dtypes import DTYPES, OF_PTX, WIDTH, bits_to, some
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.ptx import Addr, Imm, Inst, Not, Operand, Reg, Special, Sym, Vec

_HOMES = {"pred": "p", "b128": "v16", "f64": "f8"}  # of registers that no instruction uses as another type


def homes(registers: dict[str, Reg], body: Sequence[Any]) -> list[str]:
    """The numpy type of each register: the one in which most instructions use it, so that conversions are few."""
    votes: dict[int, dict[str, int]] = {}
    for inst in body:
        if not isinstance(inst, Inst):
            continue
        parts = inst.op.split(".")
        if parts[0] in ("mma", "wgmma"):
            _vote(votes, inst.operands[:1], "f4", 2)
            continue
        if parts[0] == "cvt" and len(parts) > 2:
            _vote(votes, inst.operands[:1], OF_PTX.get(parts[-2], ""), 1)
        kind = OF_PTX.get(parts[-1], "")
        _vote(votes, inst.operands[1:] if parts[0] in ("cvt", "setp", "set") else inst.operands, kind, 1)
    found = []
    for register in registers.values():
        if register.type in _HOMES or register.type.endswith("16"):
            found.append(_HOMES.get(register.type, "u2"))
            continue
        width = 8 if register.type.endswith("64") else 4
        own = {t: n for t, n in votes.get(register.index, {}).items() if WIDTH[t] == width}
        found.append(max(own, key=lambda t: own[t]) if own else f"u{width}")
    return found


def _vote(votes: dict[int, dict[str, int]], operands: Sequence[Operand], kind: str, weight: int) -> None:
    for operand in operands:
        if isinstance(operand, Vec):
            _vote(votes, operand.items, kind, weight)
        elif isinstance(operand, Reg) and kind not in ("", "p"):
            by_kind = votes.setdefault(operand.index, {})
            by_kind[kind] = by_kind.get(kind, 0) + weight


class Emitter:
    """Generates the Python of one block, a function of w (warp batch), R (registers) and m (mask or None)."""

    def __init__(
        self, register_homes: list[str], names: dict[str, Any], variables: dict[str, int], masked: bool
    ) -> None:
        self.homes = register_homes
        self.names = names  # globals of the generated function
        self.params = variables  # number of each kernel parameter
        self.masked = masked
        self.mask = "m" if masked else "None"
        self.indent = "  "
        self.lines: list[str] = []
        self.reads: set[int] = set()  # registers of the instruction at hand
        self.writes: set[int] = set()

    # --- what forms use -----------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def bind(self, value: Any, hint: str = "k") -> str:
        """Bind `value` to a name in the generated code."""
        name = f"{hint}_{len(self.names)}"
        self.names[name] = value
        return name

    def get(self, operand: Operand, kind: str) -> str:
        """Expression of numpy type `kind`, with one element or one per lane."""
        if isinstance(operand, Reg):
            self.reads.add(operand.index)
            return _convert(f"R[{operand.index}]", self.homes[operand.index], kind)
        if isinstance(operand, Imm):
            return self._immediate(operand, kind)
        if isinstance(operand, Not):
            return f"(~{self.get(operand.operand, 'p')})"
        if isinstance(operand, Special):
            return _convert(f"w.special({operand.name!r})", "u4", kind)
        if isinstance(operand, Sym):
            return _convert(f"w.cta.symbol({operand.name!r})", "u8", kind)
        raise PtxError(f"operand {operand} where a value is needed")

    def set(self, operand: Operand, kind: str, expression: str) -> None:
        """Assign an expression of type `kind` to a register (or to `_`)."""
        if isinstance(operand, Sym) and operand.name == "_":
            self.line(expression)
            return
        if not isinstance(operand, Reg):
            raise PtxError(f"operand {operand} where a register is needed")
        self.writes.add(operand.index)
        home = self.homes[operand.index]
        value = _convert(f"({expression})" if home != kind else expression, kind, home)
        if self.mask != "None":
            value = f"where({self.mask}, {value}, R[{operand.index}])"
        self.line(f"R[{operand.index}] = {value}")

    def compute(self, inst: Inst, function: str | Callable[..., Any], operands: str = "", results: str = ".") -> None:
        """Set the first operand to a function or pattern of the others, of these kinds (as those of `registry.called`);
        all are of the type that the opcode ends with where none are given.
        """
        target, *sources = inst.operands
        own = self.own_types(inst)
        kinds = operands.split() or "." * len(sources)
        values = [self.get(x, own.get(kind, kind)) for x, kind in zip(sources, kinds, strict=True)]
        to = own.get(results, results)
        self.set(target, to, self.expression(inst, function, values, to))

    @staticmethod
    def own_types(inst: Inst) -> dict[str, str]:
        """The type that an opcode ends with, and the one before it."""
        before, last = ("", *inst.op.split("."))[-2:]
        return {".": OF_PTX.get(last, ""), "^": OF_PTX.get(before, "")}

    def expression(self, inst: Inst, function: str | Callable[..., Any], values: Sequence[str], to: str = "") -> str:
        """Expression of a function of values, or of a pattern of `{0}`, `{1}`, ... and the result's type `{to}`."""
        if not isinstance(function, str):
            return f"{self.bind(function, getattr(function, '__name__', 'computed'))}({', '.join(values)})"
        if f"{{{len(values) - 1}}}" not in function or f"{{{len(values)}}}" in function:
            raise PtxError(f"{inst.op} with {len(values)} operands")
        return function.format(*values, to=to)

    def call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[str],
        results: Sequence[tuple[Operand, str]] = (),
        rows: bool = False,
    ) -> None:
        """Emit `function(w, mask, *arguments)`, which returns one array for each of `results`; `rows`: as rows of one
        array, even if there is one result.
        """
        text = f"{self.bind(function, function.__name__)}({', '.join(('w', self.mask, *arguments))})"
        if not results:
            self.line(text)
        elif len(results) == 1 and not rows:
            self.set(*results[0], text)
        else:
            self.line(f"t = {text}")
            for i, (operand, kind) in enumerate(results):
                if not (isinstance(operand, Sym) and operand.name == "_"):
                    self.set(operand, kind, f"t[{i}]")

    def apply(
        self, inst: Inst, function: Callable[..., Any], choices: Sequence[str], operands: str, results: str
    ) -> None:
        """Call a function of w and mask with `operands`, and set the first operand, or its items, to `results`: kinds
        as those of `registry.called`.
        """
        types = self.own_types(inst)
        own = types["."]
        given = list(inst.operands)
        targets = self.items(given.pop(0)) if results else ()
        if ".L2::cache_hint" in inst.op:
            given.pop()
        known = {"$op": repr(inst.op), "$type": own, "$items": str(len(targets))}
        known |= {f"${i}": repr(choice) for i, choice in enumerate(choices)}
        arguments = [
            known[kind] if kind[0] == "$" else self._argument(inst, kind.replace(".", own), given)
            for kind in operands.split()
        ]
        if given:
            raise PtxError(f"{inst.op} with {len(inst.operands)} operands")
        kinds = results.replace(".", own).replace("^", types["^"]).split()
        whole = results[:1] == "{"  # results for all items
        pairs = [(x, kinds[0][1:-1]) for x in targets] if whole else list(zip(targets, kinds, strict=False))
        self.call(function, [x for x in arguments if x], pairs, rows=whole or len(kinds) > 1)

    def _argument(self, inst: Inst, kind: str, given: list[Operand]) -> str:
        """Argument of a kind, made of the first operand of `given`, which is taken."""
        kind, _, default = kind.partition("=")
        if not given and kind == "?":
            return ""
        if not given and default:
            return default if default == "None" else self.constant(int(default), kind)
        if not given:
            raise PtxError(f"{inst.op} with {len(inst.operands)} operands")
        operand = given.pop(0)
        if kind == "#":
            return str(self.number(inst, operand))
        if kind == "[*]":
            return self.address(operand, wide=".shared" not in inst.op)
        if kind == "[]":
            shared = ".shared" in inst.op
            return self.address(operand, wide=False) if shared else f"{self.address(operand, wide=True)}.astype(u4)"
        if kind[0] == "[":
            text = self.address(operand, wide=kind.startswith("[u8]"))
            return f"{text}, {self._coordinates(inst, operand, kind[5:-1])}" if kind[4:] else text
        if kind[0] == "{":
            return self.values(operand, kind[1:-1])
        return "" if kind == "?" else self.get(operand, kind)

    def _coordinates(self, inst: Inst, operand: Operand, kind: str) -> str:
        """Coordinates of an operand `[map, {c0, c1, ...}]`, as many as the opcode says (".2d")."""
        place = operand.rest[0] if isinstance(operand, Addr) and operand.rest else None
        if not isinstance(place, Vec):
            raise PtxError("a tensor operand needs coordinates")
        numbers = inst.op.partition(".tensor.")[2][:1]
        if len(place.items) != int(numbers):
            raise PtxError(f"{len(place.items)} coordinates where {numbers} are needed")
        return self.values(place, kind)

    def number(self, inst: Inst, operand: Operand) -> int:
        """Value of an immediate operand."""
        if not isinstance(operand, Imm):
            raise PtxError(f"{inst.op} {operand}: a number is needed")
        return operand.value

    def address(self, operand: Operand, wide: bool) -> str:
        """Address expression of `[base+offset]`: u8 if `wide`, else u4."""
        if not isinstance(operand, Addr):
            raise PtxError(f"operand {operand} where an address is needed")
        kind = "u8" if wide else "u4"
        base = self.get(operand.base, kind)
        return f"({base} + {self.constant(operand.offset, kind)})" if operand.offset else base

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """Parts of a vector or a pair, or the operand itself."""
        return operand.items if isinstance(operand, Vec) else (operand,)

    def values(self, operand: Operand, kind: str) -> str:
        """Tuple of the values of an operand's items."""
        return "(" + "".join(f"{self.get(item, kind)}, " for item in self.items(operand)) + ")"

    def constant(self, value: int, kind: str) -> str:
        name = f"c_{kind}_{value & ((1 << 64) - 1):x}"
        if name not in self.names:
            self.names[name] = bits_to(value, kind)
        return name

    # ------------------------------------------------------------------------------------------------------------------

    def _immediate(self, operand: Imm, kind: str) -> str:
        value = operand.value
        if operand.kind == "d" and kind == "f4":
            value = int(np.array([value], np.uint64).view(np.float64).astype(np.float32).view(np.uint32)[0])
        elif operand.kind == "f" and kind == "f8":
            value = int(np.array([value], np.uint32).view(np.float32).astype(np.float64).view(np.uint64)[0])
        return self.constant(value, kind)


def _convert(expression: str, have: str, want: str) -> str:
    """Reinterpret bits of type `have` as `want`, truncated or zero-extended where widths differ."""
    if have == want:
        return expression
    if "p" in (have, want):
        raise PtxError(f"a predicate where {want if have == 'p' else have} is needed")
    if WIDTH[have] == WIDTH[want]:
        return f"{expression}.view({want})"
    if have[0] == "f":
        expression = f"{expression}.view(u{WIDTH[have]})"
    narrow = f"{expression}.astype({'i' if have[0] == 'i' else 'u'}{WIDTH[want]})"
    return narrow if want[0] == ("i" if have[0] == "i" else "u") else f"{narrow}.view({want})"


NAMES: dict[str, Any] = {**dict(DTYPES.items()), "where": np.where, "some": some, "np": np}
"""Globals of generated code."""
