"""Rules of choice: the first that applies to what is known of a launch decides."""

from __future__ import annotations

import pytest

from cute_attn.kernels.rules import Rule, above, first, up_to

FEW, MANY = Rule("few", {"rows": up_to(16)}), Rule("many", {"rows": above(16), "arch": ("sm_90a",)})
OTHERS = Rule("others", {})


def test_the_first_rule_that_applies_decides_and_none_is_among_no_values() -> None:
    def chosen(rows: int | None, arch: str) -> str:
        return first((FEW, MANY, OTHERS), {"rows": rows, "arch": arch}).value

    assert [chosen(rows, "sm_90a") for rows in (0, 16, 17, None)] == ["few", "few", "many", "others"]
    assert chosen(17, "sm_80") == "others"
    with pytest.raises(LookupError, match="no rule is for"):
        first((FEW,), {"rows": None})
    with pytest.raises(KeyError, match="rows"):
        first((FEW,), {})


def test_what_a_rule_covers() -> None:
    narrow = Rule("", {"rows": range(3, 9), "arch": ("sm_90a",)})
    assert FEW.covers(narrow)
    assert OTHERS.covers(FEW)
    assert not FEW.covers(OTHERS)
    assert not narrow.covers(FEW)
    assert narrow.covers(Rule("", {"rows": range(4, 5)}), given=("arch",))
