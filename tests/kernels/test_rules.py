"""Rules of choice: the first that applies to what is known of a launch decides."""

from __future__ import annotations

from typing import Any

import pytest

from cute_attn import explain
from cute_attn.kernels.fa2 import tiles as fa2
from cute_attn.kernels.fa3 import tiles as fa3
from cute_attn.kernels.fa4 import tiles as fa4
from cute_attn.kernels.rules import Rule, above, first, up_to
from cute_attn.kernels.xqa import tiles as xqa

FEW, MANY = Rule("few", {"rows": up_to(16)}), Rule("many", {"rows": above(16), "arch": ("sm_90a",)})
OTHERS = Rule("others", {})
# What rules are asked of one request: 32/8 heads of 128 dimensions.
XQA_CALL: dict[str, Any] = {"requests": 1, "units": 8, "segments": 8, "pairs": 8, "keys": 100, "row": 128} | {
    "head_dim": 128
}
TILE: dict[str, Any] = {"head_dims": (128, 128), "operands": "", "plain": True, "full": True, "kv": "dense"} | {
    "window_left": -1,
    "group": 4,
}


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


def test_rules_in_words() -> None:
    when = {
        "keys": up_to(512),
        "rows": range(1, 9),
        "units": range(2, 3),
        "pairs": above(128),
        "kv": ("dense", "paged"),
    }
    assert (
        str(Rule("", when, "note")) == "keys up to 512, rows 1 to 8, units 2, pairs from 129, kv dense or paged -- note"
    )
    assert str(Rule("", {"plain": (True,), "full": (False,), "any": (True, False)})) == "plain, not full"
    assert str(OTHERS) == "all other launches"


@pytest.mark.parametrize(
    ("table", "asked", "known"),
    [
        (xqa.RULES[9, 8], {"kv_dtype": "float8_e4m3fn", "kv_len": 100}, XQA_CALL),
        (xqa.RULES[9, 8], {"kv_dtype": "float8_e4m3fn", "kv_len": 9000}, XQA_CALL | {"keys": 9000}),
        (fa3.RULES, {"qo_len": 5000, "kv_len": 5000}, TILE | {"launch": "long"}),
        (fa4.RULES["sm_100a"], {"qo_len": 5000, "kv_len": 5000, "arch": "b200"}, TILE | {"launch": "long"}),
        (fa2.RULES, {"arch": "a100"}, {"fp8": False, "head_dims": (128, 128), "packed_rows": 4, "kv_dtype": ""}),
    ],
)
def test_explain_prints_the_first_rule_that_applies(
    table: tuple[Rule[Any], ...], asked: dict[str, Any], known: dict[str, Any]
) -> None:
    text = explain(**{"arch": "h100"} | asked)
    holds = (rule for rule in table if all(known[name] in values for name, values in rule.when.items()))
    rule = next(holds)
    assert rule.note
    assert f"    rule: {rule}" in text.splitlines()
