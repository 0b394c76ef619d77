"""The registry of instruction forms, and forms that no golden covers."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.emulator.isa import load, registry
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
