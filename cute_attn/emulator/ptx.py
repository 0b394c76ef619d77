"""PTX parser: kernels with parameters, registers, shared variables and instructions with resolved names."""

from __future__ import annotations

import bisect
import collections
import re
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from cute_attn.emulator.errors import PtxError

# --- operands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reg:
    name: str
    index: int
    type: str  # "b32", "pred", ...


@dataclass(frozen=True)
class Imm:
    """Immediate. `kind`: "i" for an integer, "f" or "d" for the bits of a 32- or 64-bit float."""

    value: int
    kind: str = "i"


@dataclass(frozen=True)
class Special:
    name: str  # "%tid.x"


@dataclass(frozen=True)
class Sym:
    name: str


@dataclass(frozen=True)
class Vec:
    """Operands `{a, b, ...}` or `a|b`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Not:
    operand: Operand


@dataclass(frozen=True)
class Addr:
    """Address operand `[base+offset, rest...]`."""

    base: Operand
    offset: int
    rest: tuple[Operand, ...] = ()


Operand = Reg | Imm | Special | Sym | Vec | Not | Addr


class Inst(NamedTuple):
    op: str
    operands: tuple[Operand, ...]
    guard: Operand | None
    line: int
    text: str
    source: str


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Variable:
    """A .param or .shared variable; `nbytes` is 0 for dynamic shared memory."""

    name: str
    nbytes: int
    align: int


@dataclass
class Kernel:
    name: str
    target: str  # "sm_90a"
    params: list[Variable] = field(default_factory=list)
    shared: list[Variable] = field(default_factory=list)
    registers: dict[str, Reg] = field(default_factory=dict)
    body: list[Inst | Label] = field(default_factory=list)
    directives: dict[str, str] = field(default_factory=dict)


_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "x2": 8, "128": 16}
_STATEMENT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)"
    r"|(?P<stmt>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
_INSTRUCTION = re.compile(r"(?:@(!?\s*[%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_LOC = re.compile(r"^[ \t]*\.loc[ \t]+(\d+)[ \t]+(\d+)[^\n]*", re.M)
_FILE = re.compile(r'^[ \t]*\.file[ \t]+(\d+)[ \t]+"([^"]*)"[^\n]*', re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_NAME = re.compile(r"[A-Za-z_$%][\w$.]*")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")
_DECIMAL = re.compile(r"-?\d+\.\d+(?:[eE]-?\d+)?")
_ADDRESS = re.compile(r"([^\s+]+?)\s*(?:([+-])\s*(-?\w+))?")
_PART = re.compile(r"(?:\{[^{}]*\}|\[[^\[\]]*\]|[^,{\[])+")
_BANK = re.compile(r"(.+)<(\d+)>")


# Names declared between one pair of braces and around it, each with the name that it has in the kernel; by "", what
# those of the innermost pair end with.
_Scope = collections.ChainMap[str, str]


def parse(text: str) -> dict[str, Kernel]:
    """Parse a PTX module; returns its kernels by name."""
    return _Reader(text).kernels()


class _Reader:
    def __init__(self, text: str) -> None:
        blanked = _COMMENT.sub(lambda m: "\n".join(" " * len(line) for line in m.group().split("\n")), text)
        self.files = dict(_FILE.findall(blanked))
        self.locations: list[tuple[int, str]] = []
        self.text = _FILE.sub(_blank, _LOC.sub(self._location, blanked))
        self.newlines = [m.start() for m in re.finditer("\n", self.text)]
        target = re.search(r"\.target\s+(\w+)", self.text)
        if target is None:
            raise PtxError("no .target directive")
        self.target = target.group(1)

    def _location(self, match: re.Match[str]) -> str:
        path = self.files.get(match.group(1), "?")
        self.locations.append((match.start(), f"{path}:{match.group(2)}"))
        return _blank(match)

    def kernels(self) -> dict[str, Kernel]:
        found, end = {}, 0
        shared: list[Variable] = []
        for entry in _ENTRY.finditer(self.text):
            if entry.start() < end:
                continue
            shared += [_variable(s) for s in re.findall(r"\.shared\s+([^;]*);", self.text[end : entry.start()])]
            kernel = Kernel(entry.group(1), self.target, shared=list(shared))
            kernel.params = [_variable(p.replace(".param", "")) for p in entry.group(2).split(",") if p.strip()]
            kernel.directives = dict(re.findall(r"\.(\w+)([^.]*)", entry.group(3)))
            end = self._body(kernel, entry.end())
            found[kernel.name] = kernel
        if not found:
            raise PtxError("no .entry in the PTX")
        return found

    def _body(self, kernel: Kernel, at: int) -> int:
        """Read statements up to the brace that ends the kernel; instructions are resolved when all names are known."""
        scope, count = _Scope({"": ""}), 0
        raw: list[tuple[str, int, _Scope, bool]] = []
        while True:
            match = _STATEMENT.match(self.text, at)
            if match is None:
                raise PtxError(f"cannot read PTX line {self._line(at)}")
            at, kind = match.end(), match.lastgroup
            if kind == "stmt":
                statement = match["stmt"].rstrip()
                if statement.startswith("."):
                    self._directive(kernel, statement, scope)
                elif statement:
                    raw.append((statement, match.start("stmt"), scope, False))
            elif kind == "label":
                scope[match["label"]] = match["label"] + scope[""]
                raw.append((match["label"], match.start("label"), scope, True))
            elif kind == "open":
                count += 1
                scope = scope.new_child({"": f"@{count}"})
            elif len(scope.maps) > 1:
                scope = scope.parents
            else:
                break
        operands = _Operands(kernel.registers)
        for text, start, where, is_label in raw:
            if is_label:
                kernel.body.append(Label(where[text]))
            else:
                kernel.body.append(self._instruction(text, start, where, operands))
        return at

    def _directive(self, kernel: Kernel, statement: str, scope: _Scope) -> None:
        words = statement.split(None, 1)
        if words[0] == ".reg":
            kind, names = words[1].split(None, 1)
            for name in names.split(","):
                bank = _BANK.fullmatch(name.strip())
                listed = [f"{bank[1]}{i}" for i in range(int(bank[2]))] if bank else [name.strip()]
                for declared in listed:
                    full = scope[declared] = declared + scope[""]
                    kernel.registers[full] = Reg(full, len(kernel.registers), kind.lstrip("."))
        elif words[0] == ".shared":
            kernel.shared.append(_variable(words[1]))
        elif words[0] not in (".pragma", ".branchtargets"):
            raise PtxError(f"directive {statement!r} is not supported")

    def _instruction(self, text: str, start: int, scope: _Scope, operands: _Operands) -> Inst:
        match = _INSTRUCTION.match(text)
        if match is None:
            raise PtxError(f"cannot read PTX line {self._line(start)}: {text!r}")
        guard, op, rest = match.groups()
        where = bisect.bisect(self.locations, (start, "\uffff"))
        source = self.locations[where - 1][1] if where else ""
        tested = operands.parse(guard, scope) if guard else None
        parsed = tuple(operands.parse(part, scope) for part in _split(rest))
        return Inst(op, parsed, tested, self._line(start), " ".join(text.split()), source)

    def _line(self, at: int) -> int:
        return bisect.bisect_left(self.newlines, at) + 1


class _Operands:
    def __init__(self, registers: dict[str, Reg]) -> None:
        self.registers = registers
        self.known: dict[str, Operand] = {}

    def parse(self, text: str, scope: _Scope) -> Operand:
        if len(scope.maps) > 1:
            return self._parse(text, scope)
        found = self.known.get(text)
        if found is None:
            found = self.known[text] = self._parse(text, scope)
        return found

    def _parse(self, text: str, scope: _Scope) -> Operand:
        first = text[0]
        if first == "{":
            return Vec(tuple(self.parse(item, scope) for item in _split(text[1:-1])))
        if first == "[":
            return self._address(text[1:-1], scope)
        if first == "!":
            return Not(self.parse(text[1:].strip(), scope))
        if "|" in text:
            return Vec(tuple(self.parse(part.strip(), scope) for part in text.split("|")))
        if first != "%":
            number = _number(text)
            if number is not None:
                return number
        register = self.registers.get(scope.get(text, text))
        if register is not None:
            return register
        if not _NAME.fullmatch(text):
            raise PtxError(f"operand {text!r}")
        return Special(text) if first == "%" else Sym(scope.get(text, text))

    def _address(self, text: str, scope: _Scope) -> Addr:
        head, *rest = _split(text)
        match = _ADDRESS.fullmatch(head)
        if match is None:
            raise PtxError(f"address {text!r}")
        offset = int(match[3], 0) if match[3] else 0
        base = self.parse(match[1], scope)
        return Addr(base, -offset if match[2] == "-" else offset, tuple(self.parse(part, scope) for part in rest))


def _number(text: str) -> Imm | None:
    if text[:2] in ("0f", "0F") and len(text) == 10:
        return Imm(int(text[2:], 16), "f")
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return Imm(int(text[2:], 16), "d")
    if _INTEGER.match(text):
        return Imm(int(text.rstrip("U"), 0) if "x" in text.lower() else int(text.rstrip("U")))
    if _DECIMAL.fullmatch(text):
        return Imm(int.from_bytes(struct.pack("<d", float(text)), "little"), "d")
    return None


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    if "{" not in text and "[" not in text:
        return [part.strip() for part in text.split(",") if part.strip()]
    return [part.strip() for part in _PART.findall(text) if not part.isspace()]


def _variable(text: str) -> Variable:
    """Parse a declaration such as `.align 128 .b8 name[64]` or `.u64 .ptr .global .align 16 name`."""
    head = text.split("=")[0].strip()
    if "=" in text:
        raise PtxError(f"initialised variable {text!r} is not supported")
    aligns = re.findall(r"\.align\s+(\d+)", head)
    kind = re.search(r"\.[busf](\d+)\b", head)
    name = re.search(r"([A-Za-z_$][\w$]*)\s*(\[(\d*)\])?\s*$", head)
    if kind is None or name is None:
        raise PtxError(f"variable {text!r}")
    size = _SIZES[kind.group(1)]
    count = 1 if name.group(2) is None else int(name.group(3) or 0)
    return Variable(name.group(1), size * count, int(aligns[-1]) if aligns and ".ptr" not in head else size)


def _blank(match: re.Match[str]) -> str:
    return " " * len(match.group())
