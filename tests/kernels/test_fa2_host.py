"""The host side of fa2: tiles, splits, parameter blocks, judged by an interpreter of the kernel contract."""

from __future__ import annotations

import math
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
from cute_attn.reference import attention as reference
from cute_attn.request import single as single_request
from cute_attn.runtime.arch import named
from tests.support.fa2_contract import CombineParams, Fa2Params, InterpretedLaunch, interpret

H200 = Gpu(named("sm_90a"), 0, 132)
SMALL = Tile(16, 16, 1, 1, 2)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter in place of a GPU, and small tiles so that small problems have many."""
    interpret(monkeypatch)
    monkeypatch.setattr(fa2_variant.tiles, "choose", lambda *args: SMALL)
    monkeypatch.setattr(fa2_variant.tiles, "resident_ctas", lambda *args: 2)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def solve(problem: Problem, sms: int = 132, arch: str = "sm_90a") -> None:
    """Run on the interpreted kernels and compare with the reference in fp64."""
    expected = problem._replace(
        out=torch.empty_like(problem.out), lse=torch.empty_like(problem.out[..., 0], dtype=torch.float32)
    )
    reference.run(expected, torch.float64)
    problem.out.fill_(torch.nan)
    FAMILY.prepare(problem.settings, Gpu(named(arch), 0, sms))(problem)
    tolerance = TOLERANCE[problem.out.dtype]
    torch.testing.assert_close(problem.out, expected.out, rtol=tolerance, atol=tolerance)
    if problem.lse is not None:
        torch.testing.assert_close(problem.lse, expected.lse, rtol=1e-5, atol=1e-4)


def build(
    qo_len: int = 5,
    kv_len: int = 300,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
    **arguments: Any,
) -> Problem:
    torch.manual_seed(qo_len * 1000 + kv_len)
    num_qo_heads, num_kv_heads = heads
    kv = (num_kv_heads, kv_len) if arguments.get("kv_layout") == "HND" else (kv_len, num_kv_heads)
    q = random(qo_len, num_qo_heads, dims[0], dtype=dtype)
    k, v = random(*kv, dims[0], dtype=dtype), random(*kv, dims[1], dtype=dtype)
    return single_request.problem(single_request.Call(q, k, v, **{"return_lse": True, **arguments}))


def splits() -> int:
    return InterpretedLaunch.fired[0].grid[2]


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 150},
    "causal window": {"causal": True, "window_left": 0},
    "window beyond kv": {"window_left": 10**12},
    "HND": {"kv_layout": "HND"},
    "soft cap": {"logits_soft_cap": 3.0},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "alibi, soft cap": {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 5.0, "causal": True},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e4, "rope_scale": 2.0},
    "negative scale": {"sm_scale": -0.1},
    "zero scale": {"sm_scale": 0.0},
    "scales": {"q_scale": 0.5, "k_scale": 1.5, "v_scale": -2.0},
    "sinks": {"sinks": torch.linspace(-2, 5, 6)},
    "no lse": {"return_lse": False},
    "out fp32": {"o_dtype": torch.float32},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kv_len", [40, 300], ids=["whole", "split"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, kv_len: int, dtype: torch.dtype) -> None:
    solve(build(kv_len=kv_len, dtype=dtype, **FEATURES[feature]))
    windowed = FEATURES[feature].get("window_left", -1) == 0  # one tile is visible: nothing to split
    assert (splits() > 1) == (kv_len == 300 and not windowed)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (5, 1), (32, 8)])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(1, 1), (1, 513), (1, 0), (4, 0), (7, 3), (17, 17), (33, 250)])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(qo_len: int, kv_len: int, dims: tuple[int, int], heads: tuple[int, int], causal: bool) -> None:
    solve(build(qo_len, kv_len, heads, dims, causal=causal))


@pytest.mark.parametrize("kv_len", [40, 300])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window_left", [-1, 30])
def test_custom_mask(kv_len: int, packed: bool, window_left: int) -> None:
    mask = torch.rand(5, kv_len) < 0.5
    mask[2] = False
    given = {"packed_custom_mask": packbits(mask.flatten(), "little")} if packed else {"custom_mask": mask}
    solve(build(kv_len=kv_len, window_left=window_left, causal=True, **given))
    assert isinstance(InterpretedLaunch.fired[0].spec, Fa2Spec)
    assert InterpretedLaunch.fired[0].spec.mask == "packed"


@pytest.mark.parametrize("kv_len", [40, 300], ids=["whole", "split"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_keys(stored: torch.dtype, kv_layout: str, kv_len: int) -> None:
    problem = build(kv_len=kv_len)
    k, v = (x.transpose(0, 1).contiguous() if kv_layout == "HND" else x for x in (problem.k, problem.v))
    solve(
        single_request.problem(
            single_request.Call(problem.q, k.to(stored), v.to(stored), kv_layout=kv_layout, return_lse=True)
        )
    )
    assert isinstance(InterpretedLaunch.fired[0].spec, Fa2Spec)
    assert InterpretedLaunch.fired[0].spec.kv_dtype == str(stored).removeprefix("torch.")


@pytest.mark.parametrize("kv_len", [40, 300], ids=["whole", "split"])
def test_nvfp4_keys(kv_len: int) -> None:
    """Block scales as every second row of a larger tensor: their strides are their own."""
    packed = torch.randint(0, 256, (2, kv_len, 2, 32), dtype=torch.uint8)
    factors = (torch.rand(2, 2 * kv_len, 2, 4) + 0.05).to(torch.float8_e4m3fn)[:, ::2]
    call = single_request.Call(
        random(5, 6, 64), *packed, kv_cache_sf=(factors[0], factors[1]), causal=True, k_scale=0.5
    )
    solve(single_request.problem(call))
    assert isinstance(InterpretedLaunch.fired[0].spec, Fa2Spec)
    assert InterpretedLaunch.fired[0].spec.kv_dtype == "nvfp4"


@pytest.mark.parametrize("kv_len", [40, 300], ids=["whole", "split"])
def test_natural_lse(kv_len: int) -> None:
    problem = build(kv_len=kv_len)
    solve(problem._replace(settings=problem.settings._replace(lse_scale=math.log(2))))


def test_packed_qkv_slices_and_strided_out() -> None:
    qkv = random(40, 12, 64)
    out = torch.empty(40, 2, 8, 64, dtype=torch.float16)[:, 1]
    q, k, v = qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]
    problem = single_request.problem(single_request.Call(q, k, v, causal=True, out=out, return_lse=True))
    assert problem.out is out
    assert problem.q is q  # no copy
    solve(problem)


@pytest.mark.parametrize("kv_len", [40, 300])
def test_decode_writes_the_callers_buffers(kv_len: int) -> None:
    out, lse = random(6, 64), torch.empty(6)
    q, kv = random(6, 64), random(2, kv_len, 2, 64)
    problem = single_request.problem(single_request.Call(q, kv[0], kv[1], decode=True, out=out, lse=lse))
    solve(problem)
    assert problem.out.data_ptr() == out.data_ptr()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("kv_len", [40, 300])
def test_scales_on_the_device(kv_len: int) -> None:
    """As normalise leaves them for CUDA tensors: their sign is unknown, so the kernel must not assume it."""
    problem = build(kv_len=kv_len, v_scale=2.0, sm_scale=0.1)
    problem = problem._replace(
        settings=problem.settings._replace(features=problem.features._replace(positive_scale=False)),
        scale_tensors=(torch.tensor([-0.5]), torch.tensor(3.0)),
        v_scale_tensor=torch.tensor([0.25]),
    )
    solve(problem)
    assert isinstance(InterpretedLaunch.fired[0].spec, Fa2Spec)
    assert InterpretedLaunch.fired[0].spec.scores == ("scale",)


def test_no_query_tokens_launch_nothing() -> None:
    solve(build(qo_len=0))
    assert InterpretedLaunch.fired == []


def test_split_launches_partials_and_then_combines() -> None:
    solve(build(qo_len=1, kv_len=2000, o_dtype=torch.bfloat16, v_scale=2.0, sinks=torch.zeros(6)))
    main, combine = InterpretedLaunch.fired
    assert main.stream == combine.stream == 77
    assert isinstance(main.spec, Fa2Spec)
    assert isinstance(main.params, Fa2Params)
    assert main.spec.split
    assert main.spec.out_dtype == "float32"
    assert (main.params.v_scale, main.params.sinks) == (1.0, 0)  # the combine kernel applies them
    assert isinstance(combine.params, CombineParams)
    assert combine.spec == CombineSpec("bfloat16", 64)
    assert combine.params.num_splits == main.grid[2]


@pytest.mark.parametrize(
    ("arch", "asked", "used"),
    [("sm_90a", None, True), ("sm_90a", False, False), ("sm_90a", True, True), ("sm_80", True, False)],
)
def test_pdl(arch: str, asked: bool | None, used: bool) -> None:
    solve(build(enable_pdl=asked), arch=arch)
    assert [launch.pdl for launch in InterpretedLaunch.fired] == [used, used]


def test_kernels_are_loaded_once() -> None:
    problem = build(qo_len=1)
    runner = FAMILY.prepare(problem.settings, H200)
    for kv_len in (300, 290, 280):
        runner(problem._replace(kv_len=kv_len, k=problem.k[:kv_len], v=problem.v[:kv_len]))
    assert len({id(launch.artifact) for launch in InterpretedLaunch.fired}) == 2
    other = FAMILY.prepare(build(heads=(4, 4)).settings, H200)
    other(build(heads=(4, 4)))
    assert len({id(launch.artifact) for launch in InterpretedLaunch.fired}) == 2  # head counts are no part of a spec


def test_lengths_do_not_grow_the_memo_without_bound() -> None:
    problem = build(qo_len=1)
    runner = FAMILY.prepare(problem.settings, H200)
    for length in range(1, 3 * host_single.MAX_LENGTHS):
        runner.launch(length, 2 * length)
    assert runner.launch.cache_info().currsize == host_single.MAX_LENGTHS
    assert prepared_kernel.cache_info().currsize <= MAX_PREPARED


@pytest.mark.parametrize(
    ("arguments", "scores"),
    [
        ({}, ()),
        ({"sm_scale": -1.0}, ("scale",)),
        ({"sm_scale": 0.0}, ("scale",)),
        ({"pos_encoding_mode": "ALIBI"}, ("scale", "alibi")),
        ({"logits_soft_cap": 1.0}, ("scale", "soft_cap")),
        ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 1.0}, ("scale", "alibi", "soft_cap")),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, ()),
    ],
)
def test_scores_of_the_spec(arguments: dict[str, Any], scores: tuple[str, ...]) -> None:
    assert fa2_variant.spec(build(**arguments).features, SMALL).scores == scores


def test_parameter_blocks_follow_the_kernels() -> None:
    kernel = pytest.importorskip("cute_attn.kernels.fa2.kernel", reason="needs the DSL", exc_type=ImportError)
    combine = pytest.importorskip("cute_attn.kernels.combine.kernel", reason="needs the DSL", exc_type=ImportError)
    assert kernel.Fa2Params._fields == Fa2Params._fields
    assert combine.CombineParams._fields == CombineParams._fields
