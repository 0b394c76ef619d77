"""The host side of fa2: splits, launches and their parameters. Numbers of the kernels: `tests/emulator`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn import packbits
from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.kernels.fa2.host import variant as fa2_variant
from cute_attn.kernels.fa2.host.family import FAMILY
from cute_attn.kernels.fa2.spec import Fa2Spec, Tile
from cute_attn.kernels.host import single as host_single
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.prepared import MAX_PREPARED
from cute_attn.kernels.host.prepared import prepared as prepared_kernel
from cute_attn.problem import Problem
from cute_attn.request import single as single_request
from cute_attn.runtime.arch import named
from tests.support.named_launches import STREAM, NamedLaunch, recorded

H200 = Gpu(named("sm_90a"), 0, 132)
SMALL = Tile(16, 16, 1, 1, 2)


@pytest.fixture(autouse=True)
def contract(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recorded launches, and small tiles so that small problems have many."""
    monkeypatch.setattr(fa2_variant.tiles, "choose", lambda *args: SMALL)
    monkeypatch.setattr(fa2_variant.tiles, "resident_ctas", lambda *args: 2)
    with recorded():
        yield


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def solve(problem: Problem, sms: int = 132, arch: str = "sm_90a") -> None:
    FAMILY.prepare(problem.settings, Gpu(named(arch), 0, sms))(problem)


def build(qo_len: int = 5, kv_len: int = 300, heads: tuple[int, int] = (6, 2), **arguments: Any) -> Problem:
    q, (k, v) = random(qo_len, heads[0], 64), random(2, kv_len, heads[1], 64)
    return single_request.problem(single_request.Call(**{"q": q, "k": k, "v": v, "return_lse": True, **arguments}))


@pytest.mark.parametrize(
    ("arguments", "split"),
    [({"kv_len": 40}, False), ({}, True), ({"causal": True, "window_left": 0}, False), ({"window_left": 150}, True)],
)
def test_where_keys_are_split(arguments: dict[str, Any], split: bool) -> None:
    """Not where one tile is visible."""
    solve(build(**arguments))
    assert (NamedLaunch.fired[0].grid[2] > 1) == split


@pytest.mark.parametrize("kv_len", [40, 300], ids=["whole", "split"])
def test_scales_on_the_device(kv_len: int) -> None:
    """Their sign is unknown. Kernels get their addresses; that of V's goes to the launch that writes the output."""
    problem, v_scale = build(kv_len=kv_len, v_scale=2.0, sm_scale=0.1), torch.tensor([0.25])
    scales = torch.tensor([-0.5]), torch.tensor(3.0)
    settings = problem.settings._replace(features=problem.features._replace(positive_scale=False))
    solve(problem._replace(settings=settings, scale_tensors=scales, v_scale_tensor=v_scale))
    main, last = NamedLaunch.fired[0], NamedLaunch.fired[-1]
    assert isinstance(main.spec, Fa2Spec)
    assert main.spec.scores == ("scale",)
    assert (main.params.scale0, main.params.scale1) == tuple(x.data_ptr() for x in scales)
    assert (last.params.v_scale_ptr, last.params.v_scale) == (v_scale.data_ptr(), 2.0)
    assert (main is last) == (kv_len == 40)
    assert main is last or (main.params.v_scale_ptr, main.params.v_scale) == (0, 1.0)


def test_no_query_tokens_launch_nothing() -> None:
    solve(build(qo_len=0))
    assert NamedLaunch.fired == []


def test_split_launches_partials_and_then_combines() -> None:
    solve(build(qo_len=1, kv_len=2000, o_dtype=torch.bfloat16, v_scale=2.0, sinks=torch.zeros(6)))
    main, combine = NamedLaunch.fired
    assert main.stream == combine.stream == STREAM
    assert isinstance(main.spec, Fa2Spec)
    assert main.spec.split
    assert main.spec.out_dtype == "float32"
    assert (main.params.v_scale, main.params.sinks) == (1.0, 0)  # the combine kernel applies them
    assert combine.spec == CombineSpec("bfloat16", 64)
    assert combine.params.num_splits == main.grid[2]


@pytest.mark.parametrize(
    ("arch", "asked", "used"),
    [("sm_90a", None, True), ("sm_90a", False, False), ("sm_90a", True, True), ("sm_80", True, False)],
)
def test_pdl(arch: str, asked: bool | None, used: bool) -> None:
    solve(build(enable_pdl=asked), arch=arch)
    assert [launch.pdl for launch in NamedLaunch.fired] == [used, used]


def test_kernels_are_loaded_once() -> None:
    problem = build(qo_len=1)
    runner = FAMILY.prepare(problem.settings, H200)
    for kv_len in (300, 290, 280):
        runner(problem._replace(kv_len=kv_len, k=problem.k[:kv_len], v=problem.v[:kv_len]))
    assert len({id(launch.artifact) for launch in NamedLaunch.fired}) == 2
    other = FAMILY.prepare(build(heads=(4, 4)).settings, H200)
    other(build(heads=(4, 4)))
    assert len({id(launch.artifact) for launch in NamedLaunch.fired}) == 2  # head counts are no part of a spec


def test_lengths_do_not_grow_the_memo_without_bound() -> None:
    problem = build(qo_len=1)
    runner = FAMILY.prepare(problem.settings, H200)
    for length in range(1, 3 * host_single.MAX_LENGTHS):
        runner.launch(length, 2 * length)
    assert runner.launch.cache_info().currsize == host_single.MAX_LENGTHS
    assert prepared_kernel.cache_info().currsize <= MAX_PREPARED


MASK = torch.rand(5, 300) < 0.5
CODES = torch.zeros(300, 2, 32, dtype=torch.uint8)
BLOCK_SCALES = torch.ones(300, 2, 4).to(torch.float8_e4m3fn)
E5M2 = torch.zeros(300, 2, 64).to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({}, {"scores": (), "mask": "band", "kv_dtype": "", "pos_encoding": "none"}),
        ({"sm_scale": -1.0}, {"scores": ("scale",)}),
        ({"sm_scale": 0.0}, {"scores": ("scale",)}),
        ({"pos_encoding_mode": "ALIBI"}, {"scores": ("scale", "alibi")}),
        ({"logits_soft_cap": 1.0}, {"scores": ("scale", "soft_cap")}),
        ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 1.0}, {"scores": ("scale", "alibi", "soft_cap")}),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, {"scores": (), "pos_encoding": "rope"}),
        ({"custom_mask": MASK, "causal": True}, {"mask": "packed"}),
        ({"packed_custom_mask": packbits(MASK.flatten(), "little")}, {"mask": "packed"}),
        ({"k": E5M2, "v": E5M2}, {"kv_dtype": "float8_e5m2"}),
        ({"k": CODES, "v": CODES, "kv_cache_sf": (BLOCK_SCALES, BLOCK_SCALES)}, {"kv_dtype": "nvfp4"}),
    ],
)
def test_spec(arguments: dict[str, Any], fields: dict[str, Any]) -> None:
    spec = fa2_variant.spec(build(**arguments).settings, SMALL)
    assert {name: getattr(spec, name) for name in fields} == fields
