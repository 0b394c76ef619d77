"""Reference against torch's SDPA in fp64, and against cases small enough to compute by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_attn.problem import Features, Problem, Settings
from cute_attn.reference import attention as reference
from cute_attn.reference.attention import Logits, Mask, alibi_slopes, attention, rope, unpack_mask
from cute_attn.request.bit_packing import packbits

INF = math.inf
F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return torch's attention of tensors `[len, heads, dim]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)
    return o[0].transpose(0, 1)


def make_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: dict[str, Any] | None = None, **fields: Any
) -> Problem:
    heads_axis = 0 if fields.get("kv_layout") == "HND" else 1
    structure = Features(
        q.device,
        q.dtype,
        k.dtype,
        F64,
        q.shape[1],
        k.shape[heads_axis],
        q.shape[2],
        v.shape[2],
        **(features or {}),
    )
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), math.nan, dtype=F64)
    lse = torch.full((q.shape[0], q.shape[1]), math.nan, dtype=F64)
    settings = Settings(structure, **{name: fields.pop(name) for name in Settings._fields if name in fields})
    return Problem(settings, q.shape[0], k.shape[1 - heads_axis], q, k, v, out, lse, **fields)


def solve(problem: Problem, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    reference.run(problem, F64, **options)
    assert problem.lse is not None
    return problem.out, problem.lse


# ------------------------------------------------------------------------------------ against SDPA


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (5, 33), (33, 5)])
def test_full_attention(heads: tuple[int, int], dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    q, k = randn(lengths[0], heads[0], dims[0]), randn(lengths[1], heads[1], dims[0], seed=1)
    v = randn(lengths[1], heads[1], dims[1], seed=2)
    o, lse = attention(q, k, v)
    torch.testing.assert_close(o, sdpa(q, k, v))
    z = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(heads[0] // heads[1], 1)) / math.sqrt(dims[0])
    torch.testing.assert_close(lse, torch.log2(z.exp().sum(-1)))


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.2])
def test_scale(scale: float) -> None:
    q, k, v = randn(9, 2, 16), randn(12, 2, 16, seed=1), randn(12, 2, 16, seed=2)
    torch.testing.assert_close(attention(q, k, v, logits=Logits(scale))[0], sdpa(q, k, v, scale=scale))


@pytest.mark.parametrize("lengths", [(1, 9), (9, 9), (4, 9)])
def test_causal_is_aligned_to_the_bottom_right(lengths: tuple[int, int]) -> None:
    qo_len, kv_len = lengths
    q, k, v = randn(qo_len, 2, 16), randn(kv_len, 1, 16, seed=1), randn(kv_len, 1, 16, seed=2)
    bias = torch.zeros(qo_len, kv_len, dtype=F64)
    for i in range(qo_len):
        bias[i, kv_len - qo_len + i + 1 :] = -INF
    torch.testing.assert_close(attention(q, k, v, mask=Mask(causal=True))[0], sdpa(q, k, v, attn_mask=bias))


def test_boolean_mask_replaces_causal() -> None:
    q, k, v = randn(8, 4, 16), randn(11, 2, 16, seed=1), randn(11, 2, 16, seed=2)
    keep = randn(8, 11, seed=3) > -0.5
    keep[:, 10] = True
    expected = sdpa(q, k, v, attn_mask=keep)
    torch.testing.assert_close(attention(q, k, v, mask=Mask(causal=True, keep=keep))[0], expected)
    packed = packbits(keep.flatten(), "little")
    problem = make_problem(q, k, v, {"custom_mask": True}, packed_mask=packed, causal=True, sm_scale=0.25)
    torch.testing.assert_close(solve(problem)[0], expected)


@pytest.mark.parametrize("num_heads", [4, 6])
def test_alibi(num_heads: int) -> None:
    q, k, v = randn(5, num_heads, 16), randn(9, num_heads, 16, seed=1), randn(9, num_heads, 16, seed=2)
    distance = torch.arange(9) - torch.arange(5)[:, None]
    bias = alibi_slopes(num_heads).double()[:, None, None] * distance
    problem = make_problem(q, k, v, {"pos_encoding_mode": "ALIBI"}, sm_scale=0.25)
    o, lse = solve(problem)
    torch.testing.assert_close(o, sdpa(q, k, v, attn_mask=bias))
    z = torch.einsum("qhd,khd->hqk", q, k) / 4 + bias
    torch.testing.assert_close(lse, torch.log2(z.exp().sum(-1)).T)  # lse contains the offset of the row


def test_results_do_not_depend_on_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = randn(13, 4, 16), randn(11, 2, 16, seed=1), randn(11, 2, 16, seed=2)
    options: dict[str, Any] = {
        "logits": Logits(0.25, 2.0, alibi_slopes(4)),
        "mask": Mask(causal=True, window_left=6),
    }
    whole = attention(q, k, v, **options)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 3 * 2 * 11 * 8)  # three rows per chunk
    for a, b in zip(attention(q, k, v, **options), whole, strict=True):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------ computed by hand


def two_keys(**options: Any) -> tuple[float, float]:
    """Return o and lse of one query with raw scores 1 and 3 and values 10 and 20."""
    q = torch.tensor([[[1.0]]], dtype=F64)
    k = torch.tensor([[[1.0]], [[3.0]]], dtype=F64)
    v = torch.tensor([[[10.0]], [[20.0]]], dtype=F64)
    o, lse = attention(q, k, v, **{"logits": Logits(1.0), **options})
    return o.item(), lse.item()


def test_soft_cap_comes_after_the_scale() -> None:
    a, b = (math.exp(2 * math.tanh(0.5 * x / 2)) for x in (1, 3))
    o, lse = two_keys(logits=Logits(0.5, soft_cap=2.0))
    assert o == pytest.approx((10 * a + 20 * b) / (a + b))
    assert lse == pytest.approx(math.log2(a + b))


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_soft_cap_off(cap: float) -> None:
    assert two_keys(logits=Logits(1.0, soft_cap=cap)) == two_keys()


def test_soft_cap_comes_after_alibi() -> None:
    slope = 0.25
    a, b = (math.exp(2 * math.tanh((0.5 * x + slope * j) / 2)) for j, x in enumerate((1, 3)))
    o, lse = two_keys(logits=Logits(0.5, 2.0, torch.tensor([slope])))
    assert o == pytest.approx((10 * a + 20 * b) / (a + b))
    assert lse == pytest.approx(math.log2(a + b))


def test_sink_takes_weight_and_counts_in_lse() -> None:
    a, b, sink = math.e, math.e**3, math.exp(2.5)
    o, lse = two_keys(sinks=torch.tensor([2.5]))
    assert o == pytest.approx((10 * a + 20 * b) / (a + b + sink))
    assert lse == pytest.approx(math.log2(a + b + sink))


def test_v_scale_does_not_change_lse() -> None:
    o, lse = two_keys()
    assert two_keys(v_scale=-0.5) == (pytest.approx(-0.5 * o), lse)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask(window_left=0), ["..xxx", "...xx", "....x"]),
        (Mask(window_left=1), [".xxxx", "..xxx", "...xx"]),
        (Mask(window_left=9), ["xxxxx", "xxxxx", "xxxxx"]),
        (Mask(causal=True), ["xxx..", "xxxx.", "xxxxx"]),
        (Mask(causal=True, window_left=0), ["..x..", "...x.", "....x"]),
        (Mask(causal=True, window_left=1), [".xx..", "..xx.", "...xx"]),
        (Mask(True, 1, torch.tensor([[1, 0, 1, 1, 1]] * 3).bool()), ["..xxx", "..xxx", "...xx"]),
    ],
)
def test_mask_pictures(mask: Mask, expected: list[str]) -> None:
    visible = mask.visible(range(3), 3, 5, torch.device("cpu"))
    assert ["".join(".x"[int(bit)] for bit in row) for row in visible] == expected


def test_mask_with_fewer_keys_than_rows() -> None:
    visible = Mask(causal=True).visible(range(4), 4, 2, torch.device("cpu"))
    assert visible.int().tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize("sink", [None, 1.5])
def test_empty_rows(sink: float | None) -> None:
    q, k, v = randn(5, 2, 16), randn(2, 1, 16, seed=1), randn(2, 1, 16, seed=2)
    sinks = None if sink is None else torch.full((2,), sink)
    o, lse = attention(q, k, v, mask=Mask(causal=True), sinks=sinks)
    assert torch.equal(o[:3], torch.zeros(3, 2, 16, dtype=F64))
    empty = -INF if sink is None else sink * math.log2(math.e)
    torch.testing.assert_close(lse[:3], torch.full((3, 2), empty, dtype=F64))
    if sink is None:
        torch.testing.assert_close(o[3:], sdpa(q[3:], k, v, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_no_keys_and_no_rows(dtype: torch.dtype) -> None:
    o, lse = attention(randn(3, 2, 16), randn(0, 1, 16), randn(0, 1, 8), mask=Mask(True), compute_dtype=dtype)
    assert torch.equal(o, torch.zeros(3, 2, 8, dtype=dtype))
    assert torch.equal(lse, torch.full((3, 2), -INF, dtype=dtype))
    o, lse = attention(randn(0, 2, 16), randn(4, 1, 16), randn(4, 1, 8), compute_dtype=dtype)
    assert (o.shape, lse.shape) == ((0, 2, 8), (0, 2))


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])  # of hidden keys: tests/api/test_hidden_keys.py
def test_special_values_of_visible_keys_propagate(poison: float) -> None:
    q, k, v = randn(4, 2, 16), randn(4, 1, 16, seed=1), randn(4, 1, 16, seed=2)
    clean, _ = attention(q, k, v)
    v[2, 0, 5] = poison
    clean[:, :, 5] = poison
    torch.testing.assert_close(attention(q, k, v)[0], clean, equal_nan=True)


# ------------------------------------------------------------------------------------ helpers


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (3, [-4, -8, -2]),
        (4, [-2, -4, -6, -8]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (6, [-2, -4, -6, -8, -1, -3]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
    ],
)
def test_alibi_slopes(num_heads: int, exponents: list[float]) -> None:
    slopes = alibi_slopes(num_heads)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor([2.0**e for e in exponents]), rtol=1e-7, atol=0)


@pytest.mark.parametrize(("theta", "scale"), [(1e4, 1.0), (5e5, 8.0)])
def test_rope_rotates_complex_numbers(theta: float, scale: float) -> None:
    x, positions = randn(6, 3, 16), torch.tensor([-3, 0, 1, 2, 100, 4095])
    angles = positions[:, None] * torch.tensor([theta ** (-2 * i / 16) / scale for i in range(8)], dtype=F64)
    turned = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rope(x, positions, theta=theta, scale=scale), expected)
    assert torch.equal(rope(x.half(), positions, theta=theta, scale=scale).double()[1], x[1].half().double())


def test_unpack_mask_is_little_endian_and_rows_share_bytes() -> None:
    keep = unpack_mask(torch.tensor([0b10010001, 0b11111101], dtype=torch.uint8), 3, 3)
    assert keep.int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert unpack_mask(torch.empty(0, dtype=torch.uint8), 0, 5).shape == (0, 5)


# ------------------------------------------------------------------------------------ run(problem)


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5)])
def test_run_rope_positions(lengths: tuple[int, int]) -> None:
    """Key j is rotated by j, row i by i + kv_len - qo_len, which may be negative if kv_len < qo_len."""
    q, k, v = randn(lengths[0], 2, 16), randn(lengths[1], 1, 16, seed=1), randn(lengths[1], 1, 16, seed=2)
    features = {"pos_encoding_mode": "ROPE_LLAMA"}
    problem = make_problem(q, k, v, features, sm_scale=0.25, rope_theta=100.0, rope_scale=2.0)
    rows = torch.arange(lengths[0]) + lengths[1] - lengths[0]
    turned_q = rope(q, rows, theta=100.0, scale=2.0)
    turned_k = rope(k, torch.arange(lengths[1]), theta=100.0, scale=2.0)
    torch.testing.assert_close(solve(problem)[0], sdpa(turned_q, turned_k, v))


def test_run_rounds_rotated_16_bit_inputs() -> None:
    q, k, v = (randn(6, 1, 16, seed=s).bfloat16() for s in range(3))
    features = {"pos_encoding_mode": "ROPE_LLAMA"}
    at = torch.arange(6)
    for rounded, dtype in ((True, torch.bfloat16), (False, F64)):
        o, _ = solve(make_problem(q, k, v, features, sm_scale=0.25), round_rotated=rounded)
        expected = sdpa(rope(q, at, dtype=dtype).double(), rope(k, at, dtype=dtype).double(), v.double())
        torch.testing.assert_close(o, expected)


def test_run_multiplies_every_scale() -> None:
    q, k, v = randn(4, 4, 16), randn(6, 2, 16, seed=1), randn(6, 2, 16, seed=2)
    scale_q, scale_k = torch.tensor([1.0, 2.0, 0.5, 1.5]), torch.tensor([2.0, 0.25])
    scale_v = torch.tensor([3.0, -1.0])
    problem = make_problem(
        q,
        k,
        v,
        {"per_head_scales": True},
        sm_scale=0.1,
        scale_tensors=(torch.tensor([2.0]), torch.tensor(1.5)),
        v_scale=0.5,
        v_scale_tensor=torch.tensor([4.0]),
        head_scales=(scale_q, scale_k, scale_v),
    )
    o, _ = solve(problem)
    expected = sdpa(
        q * scale_q.double()[:, None], k * scale_k.double()[:, None], v * scale_v.double()[:, None], scale=0.3
    )
    torch.testing.assert_close(o, 2 * expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_run_takes_fp8_and_hnd(dtype: torch.dtype) -> None:
    q, k, v = randn(4, 4, 16).to(dtype), randn(2, 6, 16, seed=1).to(dtype), randn(2, 6, 16, seed=2).to(dtype)
    o, _ = solve(make_problem(q, k, v, kv_layout="HND", sm_scale=0.25))
    torch.testing.assert_close(o, sdpa(q.double(), k.double().transpose(0, 1), v.double().transpose(0, 1)))


def test_run_computes_in_fp64() -> None:
    """Also for 16-bit inputs, whose products fp32 would round."""
    q, k, v = randn(8, 2, 16).half(), randn(9, 2, 16, seed=1).half(), randn(9, 2, 16, seed=2).half()
    problem = make_problem(q, k, v, sm_scale=0.25)
    reference.run(problem)
    torch.testing.assert_close(problem.out, sdpa(q.double(), k.double(), v.double()), rtol=1e-12, atol=1e-12)


def test_run_into_narrow_outputs_without_lse() -> None:
    q, k, v = randn(4, 2, 16).half(), randn(6, 2, 16, seed=1).half(), randn(6, 2, 16, seed=2).half()
    out = torch.empty(4, 2, 16, dtype=torch.float16)
    reference.run(make_problem(q, k, v, sm_scale=0.25)._replace(out=out, lse=None))
    torch.testing.assert_close(out, sdpa(q.double(), k.double(), v.double()).half())


def test_nvfp4_values() -> None:
    """Decode low nibbles first; sign, exponent and mantissa of e2m1 bit by bit."""
    packed = torch.arange(256, dtype=torch.uint8).view(32, 8)
    scales = torch.tensor([0.5, -3.0, 448.0, 2**-9]).to(torch.float8_e4m3fn).repeat(8)[:, None]

    def e2m1(code: int) -> float:
        exponent, mantissa = code >> 1 & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return -magnitude if code & 8 else magnitude

    per_byte = scales.double().flatten().repeat_interleave(8).tolist()
    expected = [[e2m1(b & 15) * s, e2m1(b >> 4) * s] for b, s in enumerate(per_byte)]
    values = reference.nvfp4_values(packed, scales)
    assert torch.equal(values.double().flatten(), torch.tensor(expected, dtype=F64).flatten())
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(values.to(dtype).float(), values)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_nvfp4_k_and_v(kv_layout: str) -> None:
    q, generator = randn(3, 4, 32), torch.Generator().manual_seed(1)
    k, v = (torch.randint(0, 256, (2, 7, 16), dtype=torch.uint8, generator=generator) for _ in range(2))
    k_sf, v_sf = (torch.rand(2, 7, 2, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    keys, values = reference.nvfp4_values(k, k_sf), reference.nvfp4_values(v, v_sf)
    if kv_layout == "NHD":
        k, v, k_sf, v_sf = (x.transpose(0, 1) for x in (k, v, k_sf, v_sf))
    features = {"kv_block_scales": True}
    problem = make_problem(q, k, v, features, kv_layout=kv_layout, sm_scale=0.1, block_scales=(k_sf, v_sf))
    o, _ = solve(problem._replace(out=torch.empty(3, 4, 32, dtype=F64)))
    expected = sdpa(q, keys.transpose(0, 1).double(), values.transpose(0, 1).double(), scale=0.1)
    torch.testing.assert_close(o, expected)


def test_lse_scale() -> None:
    q, k, v = randn(4, 2, 16), randn(6, 2, 16, seed=1), randn(6, 2, 16, seed=2)
    o, lse = solve(make_problem(q, k, v, causal=True, window_left=0))
    same, natural = solve(make_problem(q, k, v, causal=True, window_left=0, lse_scale=math.log(2)))
    torch.testing.assert_close(natural, lse * math.log(2))
    assert torch.equal(same, o)
