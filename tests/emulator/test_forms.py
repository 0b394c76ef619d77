"""The registry of instruction forms, and forms that no golden covers."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.emulator.isa import bits, load, registry
from tests.emulator.micro import emulate
from tests.emulator.micro.case import elementwise, rng, values

pytestmark = pytest.mark.emulator


def test_traits() -> None:
    load()
    assert len(registry.FORMS) > 100
    for form in registry.FORMS:
        assert form.conformance in ("exact", "approx", "order", "unverified"), form.template
        assert form.conformance != "unverified" or not form.golden, form.template


def test_every_opcode_has_one_form() -> None:
    load()
    opcodes: set[str] = set()
    for form in registry.FORMS:
        expanded = registry.expand(form.template)
        assert opcodes.isdisjoint(opcode for opcode, _ in expanded), form.template
        opcodes.update(opcode for opcode, _ in expanded)
        arch = max((form.since, *form.only))
        for opcode, choices in expanded[:: max(len(expanded) // 200, 1)]:
            assert registry.lookup(opcode, arch) == (form, choices), opcode
    assert len(opcodes) == sum(len(registry.expand(form.template)) for form in registry.FORMS)


@pytest.mark.parametrize("kind", ["u16", "s16"])
def test_high_half_of_16_bit_products(kind: str) -> None:
    a, b = (values(kind, 512, rng(f"{kind}{i}")) for i in range(2))
    case = elementwise("integer", f"mul.hi.{kind}", [f"mul.hi.{kind} %d, %a0, %a1;"], (kind, kind), kind, data=[a, b])
    signed = "i2" if kind == "s16" else "u2"
    high = [int(x) * int(y) >> 16 for x, y in zip(a.view(signed), b.view(signed), strict=True)]
    assert np.frombuffer(emulate.run(case), np.uint16).tolist() == [x % (1 << 16) for x in high]


def test_bytes_by_a_constant_selector() -> None:
    """prmt by one selector for all lanes, which the emulator indexes at once, is prmt by a selector per lane."""
    a, b = (values("b32", 64, rng(f"prmt{i}")) for i in range(2))
    for selector in (0x0000, 0x3210, 0x7654, 0x5140, 0x6273, 0x89AB, 0x32F0, 0xFFFF):
        one, each = np.array([selector], np.uint32), np.full(64, selector, np.uint32)
        expected = [
            sum(nibble(int(x) | int(y) << 32, selector >> 4 * i & 15) << 8 * i for i in range(4))
            for x, y in zip(a.view(np.uint32), b.view(np.uint32), strict=True)
        ]
        for chosen in (one, each):
            assert bits._prmt(a.view(np.uint32), b.view(np.uint32), chosen).tolist() == expected


def nibble(pool: int, choice: int) -> int:
    """The byte that a nibble of prmt's selector chooses; with its high bit, the byte's sign eight times."""
    byte = pool >> 8 * (choice & 7) & 0xFF
    return (0xFF if byte & 0x80 else 0) if choice & 8 else byte
