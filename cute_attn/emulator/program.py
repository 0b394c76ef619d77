"""Programs: a kernel as blocks of generated Python, which are compiled when they are first reached."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cute_attn.emulator import isa, ptx, unwaited
from cute_attn.emulator.emit import NAMES, Emitter, homes
from cute_attn.emulator.errors import EmulatorError, LaunchFault, PtxError
from cute_attn.emulator.isa.registry import Form, lookup
from cute_attn.emulator.ptx import Inst, Kernel, Label, Operand, Sym

EXIT = -1
ENDS = ("bra", "bra.uni", "ret", "ret.uni", "exit")


@dataclass
class Block:
    """Instructions that execute together; `solo` and `converges` are traits of their forms."""

    index: int
    insts: list[tuple[Inst, Form, tuple[str, ...]]]
    solo: bool = False
    converges: bool = False
    count: int = 0
    functions: list[Callable[..., Any] | None] = field(default_factory=lambda: [None, None])  # plain, masked


class Program:
    """One kernel. All its launches share it, because it holds no state of a launch."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        match = re.fullmatch(r"sm_(\d+)[af]?", kernel.target)
        if match is None:
            raise PtxError(f"target {kernel.target!r}")
        self.arch = int(match.group(1))
        self.homes = homes(kernel.registers, kernel.body)
        self.names: dict[str, Any] = dict(NAMES)
        self.labels: dict[str, int] = {}
        self.blocks = self._cut()
        self.param_index = {param.name: i for i, param in enumerate(kernel.params)}
        self.files: dict[str, list[Inst | None]] = {}
        insts = [inst for inst in kernel.body if isinstance(inst, Inst)]
        self.uses_tensor_memory = any(inst.op.startswith("tcgen05.") for inst in insts)
        self.tracked = unwaited.tracked(insts)  # registers of tensor-memory loads

    def param_offsets(self) -> list[int]:
        """Default offsets of the parameters. A cubin may differ, for example begin with a gap."""
        offsets, end = [], 0
        for param in self.kernel.params:
            end = -(-end // param.align) * param.align
            offsets.append(end)
            end += param.nbytes
        return offsets

    def _cut(self) -> list[Block]:
        """Cut the body into blocks: at labels, around solo forms, and before the first converging form of a block."""
        blocks: list[Block] = []
        current: list[tuple[Inst, Form, tuple[str, ...]]] = []
        converges = False

        def close(solo: bool = False) -> None:
            nonlocal current, converges
            if current:
                blocks.append(Block(len(blocks), current, solo, converges, len(current)))
            current, converges = [], False

        for item in self.kernel.body:
            if isinstance(item, Label):
                close()
                self.labels[item.name] = len(blocks)
                continue
            try:
                entry, choices = lookup(item.op, self.arch)
            except EmulatorError as err:
                err.message += f" (PTX line {item.line}: {item.text})"
                raise
            together = entry.converges or bool(entry.aligned)
            if entry.solo or (together and not converges):
                close()
            converges = converges or together
            current.append((item, entry, choices))
            if entry.solo or item.op in ENDS:
                close(entry.solo)
        close()
        return blocks

    def function(self, block: Block, masked: bool) -> Callable[..., Any]:
        found = block.functions[masked]
        if found is None:
            found = block.functions[masked] = self._compile(block, masked)
        return found

    def _compile(self, block: Block, masked: bool) -> Callable[..., Any]:
        emitter = Emitter(self.homes, self.names, self.param_index, masked)
        origin: list[Inst | None] = [None]
        following = block.index + 1 if block.index + 1 < len(self.blocks) else EXIT
        result = f"return {following}"
        for inst, entry, choices in block.insts:
            start = len(emitter.lines)
            if inst.op in ENDS:
                result = self._jump(emitter, inst, following)
            else:
                self._instruction(emitter, inst, entry, choices)
            origin += [inst] * (len(emitter.lines) - start)
        emitter.line(result)
        origin.append(block.insts[-1][0])
        name = f"<{self.kernel.name} block {block.index}{' masked' if masked else ''}>"
        source = "\n".join(["def block(w, R, m):", *emitter.lines])
        self.files[name] = origin
        space: dict[str, Any] = {}
        exec(compile(source, name, "exec"), self.names, space)
        return space["block"]

    def _instruction(self, emitter: Emitter, inst: Inst, entry: Form, choices: tuple[str, ...]) -> None:
        if inst.guard is None:
            self._tested(emitter, inst, entry, choices)
            return
        emitter.line(f"q = w.full({emitter.get(inst.guard, 'p')}){' & m' if emitter.masked else ''}")
        emitter.line("if some(q):")
        outer = emitter.mask, emitter.indent
        emitter.mask, emitter.indent = "q", emitter.indent + "  "
        self._tested(emitter, inst, entry, choices)
        emitter.mask, emitter.indent = outer

    def _tested(self, emitter: Emitter, inst: Inst, entry: Form, choices: tuple[str, ...]) -> None:
        """Emit an instruction, with notes of the registers of tensor-memory loads around it."""
        start = len(emitter.lines)
        emitter.reads, emitter.writes = set(), set()
        if entry.aligned and emitter.mask != "None":
            emitter.line(f"w.whole({emitter.mask}, {entry.aligned!r})")
        entry.build(emitter, inst, *choices)
        if not self.tracked:
            return
        own = emitter.lines[start:]
        del emitter.lines[start:]
        unwaited.emit(emitter, inst.op, own, self.tracked & emitter.reads, self.tracked & emitter.writes)

    def _jump(self, emitter: Emitter, inst: Inst, following: int) -> str:
        target = EXIT if inst.op.startswith(("ret", "exit")) else self._target(inst.operands[0])
        if inst.guard is None:
            return f"return {target}"
        return f"return ({emitter.get(inst.guard, 'p')}, {target}, {following})"

    def _target(self, operand: Operand) -> int:
        if not isinstance(operand, Sym) or operand.name not in self.labels:
            raise PtxError(f"branch target {operand}")
        block = self.labels[operand.name]
        return block if block < len(self.blocks) else EXIT

    def instruction_at(self, file: str, line: int) -> Inst | None:
        """The instruction from which a line of code was generated."""
        origin = self.files.get(file)
        return origin[line - 1] if origin and 0 < line <= len(origin) else None


@functools.lru_cache(64)
def program(text: str, symbol: str) -> Program:
    """The program of a kernel in a PTX text."""
    isa.load()
    kernels = ptx.parse(text)
    if symbol not in kernels:
        raise LaunchFault(f"the PTX has no kernel {symbol}, only {', '.join(kernels)}")
    return Program(kernels[symbol])
