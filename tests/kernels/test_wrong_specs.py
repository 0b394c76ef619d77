"""Specs and tiles that no kernel has: the rule that each breaks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.kernels.mla.spec import LATENT, MlaSpec
from cute_attn.kernels.xqa.spec import XqaSpec

E4M3 = "float8_e4m3fn"
XQA, MLA = (spec("bfloat16", "", "bfloat16", dim) for spec, dim in ((XqaSpec, 128), (MlaSpec, LATENT)))
EARLY = HopperTile(128, 48, 4, 2, per_sm=2, from_first_key=True, ping_pong=False)
FA3 = Fa3Spec("bfloat16", "bfloat16", 64, 64, mask="band", tile=EARLY)
PAIR = BlackwellTile(query_tiles=1, cols=128, ctas=2)
FA4 = Fa4Spec("bfloat16", "bfloat16", 256, 256, schedule="items", tile=PAIR)

DENSE, COLUMNS = "from_first_key takes dense keys", "columns that a warp holds"
ROPE = "rope_bits must be those of latent numbers"
WRONG: tuple[tuple[Any, str, dict[str, Any]], ...] = (
    (EARLY, "rows must be 64, 128 or 192", {"rows": 256}),
    (PAIR, "cols must", {"cols": 96}),
    (PAIR, "query_tiles must", {"query_tiles": 3}),
    (FA3, DENSE, {"kv": "paged"}),
    (FA3, DENSE, {"kv": "gathered"}),
    (FA3, DENSE, {"mask": "stop"}),
    (FA3, DENSE, {"scores": ("scale",)}),
    (FA3, DENSE, {"pos_encoding": "rope"}),
    (FA4, "by TMA", {"kv": "gathered"}),
    (FA4, "by TMA", {"kv_dtype": E4M3}),
    (XQA, COLUMNS, {"head_dim": 512, "work": "heads"}),
    (XQA, COLUMNS, {"head_dim": 512, "work": "even"}),
    (XQA, COLUMNS, {"head_dim": 512, "work": "cluster", "cluster_size": 2}),
    (XQA, "they alone", {"work": "cluster"}),
    (XQA, "they alone", {"work": "whole", "cluster_size": 2}),
    (XQA, "work must be one of", {"work": "warps"}),
    (XQA, "block scales", {"kv_dtype": "nvfp4", "prefetch": 1}),
    (XQA, "shares of warps", {"work": "even", "prefetch": 1}),
    (XQA, "must not be negative", {"prefetch": -1}),
    (XQA, "whole teams", {"head_dim": 512, "cols": 16, "warps": 3}),
    (XQA, "whole chunks", {"kv_dtype": E4M3, "head_dim": 72}),
    (MLA, "rows must be 16 or a multiple of 32", {"rows": 48}),
    (MLA, "tokens in blocks of 8", {"cols": 32}),
    (MLA, "2 stages or more", {"stages": 1}),
    (MLA, "kv_dtype must be one of", {"kv_dtype": "float8_e5m2"}),
    (MLA, "head_dim must be 512", {"head_dim": 256}),
    (MLA, ROPE, {"rope_bits": 8}),
    (MLA, ROPE, {"kv_dtype": E4M3}),
    (MLA, "scales of groups need numbers of 8 bits", {"grouped": True}),
)


@pytest.mark.parametrize(("spec", "rule", "change"), WRONG, ids=str)
def test_no_kernel_has_them(spec: Any, rule: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(spec, **change)
