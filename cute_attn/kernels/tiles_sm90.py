"""Tile table of the wgmma kernel, as data: which tile a problem gets, by head dims and by what is done to its scores.

Every row must compile to 0 bytes of stack and fit 227 KB of shared memory. "modified" rows leave registers for
windows, mask bits, slopes and caps. On an H200 a turn at issuing products is worth 3 % at head dim 64 and costs 1 % at
128 and 256; holding exponentials before the wait for the output gains 3 % at 64 and loses 2 % at 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_attn.kernels.spec import Fa3Spec, HopperTile, KernelSpec

ARCH = "sm_90a"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
PAGE_ALIGNED = 64  # tiles of paged keys are multiples of it, so that pages of any power of two make few boxes


class Row(NamedTuple):
    """The tile of requests with at least so many keys, on average."""

    kv_len: int
    tile: HopperTile


_PLAIN: dict[tuple[int, int], tuple[Row, ...]] = {  # longest first
    (64, 64): (Row(0, HopperTile(192, 128, 3, 1)),),
    (96, 96): (Row(0, HopperTile(128, 128, 2, 2, pinned=False)),),
    (128, 128): (Row(0, HopperTile(128, 128, 2, 2, ping_pong=False)),),
    (192, 128): (Row(0, HopperTile(128, 128, 2, 1, pinned=False)),),
    (256, 256): (
        Row(2048, HopperTile(128, 80, 2, 1, ping_pong=False)),
        Row(0, HopperTile(128, 64, 2, 1, ping_pong=False)),
    ),
}
_MODIFIED = {
    (64, 64): HopperTile(128, 128, 2, 2),
    (96, 96): HopperTile(128, 128, 2, 2, pinned=False),
    (128, 128): HopperTile(128, 128, 2, 2, pinned=False),
    (192, 128): HopperTile(128, 128, 2, 1, pinned=False),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False),
}
LENGTHS = sorted({row.kv_len for rows in _PLAIN.values() for row in rows})  # one for every outcome


def choose(head_dims: tuple[int, int], plain: bool, paged: bool, kv_len: int) -> HopperTile:
    if plain:
        tile = next(row.tile for row in _PLAIN[head_dims] if kv_len >= row.kv_len)
        if not paged or tile.cols % PAGE_ALIGNED == 0:
            return tile
    return _MODIFIED[head_dims]


def candidates() -> dict[tuple[int, int], list[HopperTile]]:
    """Every tile that `choose` may answer, by head dims."""
    return {dims: list(dict.fromkeys([*(row.tile for row in _PLAIN[dims]), _MODIFIED[dims]])) for dims in HEAD_DIMS}


# What modifies scores; the first asks for more registers than any other.
MODIFIED: tuple[dict[str, Any], ...] = (
    {"mask": "packed", "scores": ("scale", "alibi", "soft_cap")},
    {"mask": "packed"},
    {"mask": "band"},
    {"scores": ("scale", "soft_cap")},
)
ITEMS: dict[str, Any] = {"schedule": "items", "kv": "paged"}


def default_specs() -> list[KernelSpec]:
    """All head dims in bf16, alone, over pages and with the most demanding scores; the rest at the commonest dims."""
    llama = (128, 128)
    specs = [
        _spec(dims, kv_len=kv_len, **source)
        for dims in HEAD_DIMS
        for kv_len in LENGTHS
        for source in ({}, ITEMS, {"split": True, "out_dtype": "float32"})
    ]
    specs += [_spec(dims, **MODIFIED[0], **(ITEMS if dims == llama else {})) for dims in HEAD_DIMS]
    specs += [_spec(llama, **modified) for modified in MODIFIED[1:]]
    specs += [_spec(dims, schedule="items") for dims in HEAD_DIMS]
    specs += [_spec(llama, dtype="float16", out_dtype="float16")]
    return list(dict.fromkeys(specs))


def _spec(
    dims: tuple[int, int], *, kv_len: int = 0, dtype: str = "bfloat16", out_dtype: str = "bfloat16", **rest: Any
) -> KernelSpec:
    plain = rest.get("mask", "stop") == "stop" and not rest.get("scores")
    return Fa3Spec(dtype, out_dtype, *dims, tile=choose(dims, plain, rest.get("kv") == "paged", kv_len), **rest)
