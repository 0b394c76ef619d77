"""The decode functions on CPU tensors, against numpy."""

from __future__ import annotations

import pytest

from cute_attn import xqa_batch_decode_with_kv_cache
from tests.xqa_case import build, random_case


@pytest.mark.parametrize("seed", range(40))
def test_random(seed: int) -> None:
    built = build(random_case(seed, longest=200))
    out, lse = xqa_batch_decode_with_kv_cache(**built.arguments)
    assert built.check(out, lse) == ""
