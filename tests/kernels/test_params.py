"""Parameter blocks by name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cute_attn.kernels.host.params import ParamPacker, Values

NAMES = ("q", "group", "o", "lse", "items", "scale")
STATIC = {"group": 4, "scale": 0.5}
DYNAMIC = ("items", ("lse", "o"), "q")


def by_name(names: tuple[str, ...], values: Values) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_order_does_not_matter(seed: int) -> None:
    """Neither of the kernel's parameters, nor of static and dynamic fields."""
    shuffled = random.Random(seed).sample(NAMES, len(NAMES))
    static = dict(random.Random(seed).sample([*STATIC.items()], len(STATIC)))
    packer = ParamPacker(shuffled, static, DYNAMIC)
    assert by_name(tuple(shuffled), packer.values(1, (2, 3), 4)) == {"items": 1, "lse": 2, "o": 3, "q": 4, **STATIC}


@pytest.mark.parametrize(
    ("names", "static", "dynamic", "message"),
    [
        (NAMES, {"group": 4}, DYNAMIC, r"without a value: \['scale'\]"),
        (NAMES, STATIC, ("items", "q"), r"without a value: \['lse', 'o'\]"),
        (NAMES, {**STATIC, "heads": 1}, DYNAMIC, r"without a parameter: \['heads'\]"),
        (NAMES, STATIC, (*DYNAMIC, ("heads",)), r"without a parameter: \['heads'\]"),
        (NAMES, {**STATIC, "q": 1}, DYNAMIC, r"more than once: \['q'\]"),
        (NAMES, STATIC, (*DYNAMIC, "o"), r"more than once: \['o'\]"),
    ],
)
def test_names_must_be_those_of_the_kernel(names: Any, static: Any, dynamic: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParamPacker(names, static, dynamic)


@pytest.mark.parametrize("arguments", [(1, (2, 3)), (1, (2, 3), 4, 5), (1, (2,), 4), (1, (2, 3, 4), 4)])
def test_a_launch_gives_every_dynamic_field(arguments: tuple[Any, ...]) -> None:
    packer = ParamPacker(NAMES, STATIC, DYNAMIC)
    with pytest.raises((TypeError, ValueError)):
        packer.values(*arguments)


def test_static_and_empty() -> None:
    assert ParamPacker(("a", "b"), {"b": 1, "a": 2}, ()).values() == (2, 1)
    assert ParamPacker(("a",), {}, ("a", ())).values(3, ()) == (3,)
