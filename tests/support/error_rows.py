"""Bad inputs of single requests: what is wrong with a good call, and the error that says so."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    LayoutError,
    RuntimeArgumentError,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)

HALF, FLOAT = torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def zeros(*shape: int, dtype: torch.dtype = HALF, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def workspace(size: int = 1 << 16) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def prefill_arguments() -> dict[str, Any]:
    return {"q": zeros(3, 4, 16), "k": zeros(7, 2, 16), "v": zeros(7, 2, 16)}


def decode_arguments() -> dict[str, Any]:
    return {"q": zeros(4, 16), "k": zeros(7, 2, 16), "v": zeros(7, 2, 16)}


class Row(NamedTuple):
    name: str
    arguments: dict[str, Any]  # what is changed in a good call
    error: type[Exception]
    message: tuple[str, ...]  # parts of the message


def with_grad(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return zeros(*shape, dtype=dtype).requires_grad_()


def overlapping(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return zeros(1, *shape[1:], dtype=dtype).expand(shape)


BOTH = [  # refused by prefill and decode alike
    Row("q no tensor", {"q": [1.0]}, ArgumentTypeError, ("q must be a torch.Tensor", "[1.0] (list)")),
    Row("k no tensor", {"k": np.zeros(3)}, ArgumentTypeError, ("k must be a torch.Tensor", "ndarray")),
    Row("v None", {"v": None}, ArgumentTypeError, ("v must be a torch.Tensor", "None")),
    Row("k rank", {"k": zeros(7, 16)}, ArgumentError, ("k must have shape [kv_len,", "(7, 16)", "'NHD'")),
    Row("v rank", {"v": zeros(1, 7, 2, 16)}, ArgumentError, ("v must have shape", "(1, 7, 2, 16)")),
    Row(
        "k rank HND",
        {"k": zeros(7, 16), "kv_layout": "HND"},
        ArgumentError,
        ("k must have shape [num_kv_heads, kv_len", "(7, 16)"),
    ),
    Row(
        "v kv_len",
        {"v": zeros(6, 2, 16)},
        ArgumentError,
        ("v must have k's kv_len", "(7, 2, 16)", "(6, 2, 16)"),
    ),
    Row("v heads", {"v": zeros(7, 1, 16)}, ArgumentError, ("v must have k's", "num_kv_heads", "(7, 1, 16)")),
    Row("head_dim", {"k": zeros(7, 2, 32)}, RuntimeArgumentError, ("q and k", "head dimension", "16 and 32")),
    Row(
        "heads no multiple",
        {"k": zeros(7, 3, 16), "v": zeros(7, 3, 16)},
        RuntimeArgumentError,
        ("num_qo_heads", "multiple of num_kv_heads", "4 and 3"),
    ),
    Row("no kv heads", {"k": zeros(7, 0, 16), "v": zeros(7, 0, 16)}, ArgumentError, ("num_kv_heads 0",)),
    Row("no head_dim_vo", {"v": zeros(7, 2, 0)}, ArgumentError, ("head_dim_vo 0",)),
    Row(
        "k dtype",
        {"k": zeros(7, 2, 16, dtype=torch.bfloat16)},
        ArgumentError,
        ("k and v", "bfloat16", "float16"),
    ),
    Row(
        "kv of the other 16-bit dtype",
        {"k": zeros(7, 2, 16, dtype=torch.bfloat16), "v": zeros(7, 2, 16, dtype=torch.bfloat16)},
        ArgumentError,
        ("k and v must have dtype float16", "got bfloat16"),
    ),
    Row(
        "k fp32",
        {"k": zeros(7, 2, 16, dtype=FLOAT), "v": zeros(7, 2, 16, dtype=FLOAT)},
        ArgumentError,
        ("k must have dtype float16 or bfloat16", "got float32"),
    ),
    Row("k device", {"k": zeros(7, 2, 16, device="meta")}, ArgumentError, ("k", "cpu", "meta")),
    Row("v device", {"v": zeros(7, 2, 16, device="meta")}, ArgumentError, ("v", "cpu", "meta")),
    Row(
        "k last stride",
        {"k": zeros(7, 2, 32)[..., ::2]},
        ArgumentError,
        ("k must have stride 1 on its last axis", "(64, 32, 2)", "k.contiguous()"),
    ),
    Row(
        "v last stride",
        {"v": zeros(16, 7, 2).permute(1, 2, 0)},
        ArgumentError,
        ("v must have stride 1 on its last axis", "(2, 1, 14)"),
    ),
    Row(
        "k grad",
        {"k": with_grad(7, 2, 16)},
        ArgumentError,
        ("k requires grad", "torch.no_grad()", "k.detach()"),
    ),
    Row("v grad", {"v": with_grad(7, 2, 16)}, ArgumentError, ("v requires grad", "v.detach()")),
    Row("layout", {"kv_layout": "NDH"}, LayoutError, ("kv_layout", "'NHD', 'HND'", "'NDH'")),
    Row("layout case", {"kv_layout": "nhd"}, LayoutError, ("kv_layout", "'nhd'")),
    Row("layout type", {"kv_layout": 0}, LayoutError, ("kv_layout", "0 (int)")),
    Row(
        "pos encoding",
        {"pos_encoding_mode": "ROPE"},
        LayoutError,
        ("pos_encoding_mode", "'NONE', 'ROPE_LLAMA', 'ALIBI'", "'ROPE'"),
    ),
    Row("pos encoding None", {"pos_encoding_mode": None}, LayoutError, ("pos_encoding_mode", "None")),
    Row(
        "rope of an odd head_dim",
        {"k": zeros(7, 2, 15), "v": zeros(7, 2, 15), "pos_encoding_mode": "ROPE_LLAMA"},
        ArgumentError,
        ("ROPE_LLAMA", "even head dimension", "15"),
    ),
    Row("window float", {"window_left": 3.0}, ArgumentTypeError, ("window_left must be an int", "3.0 (float)")),
    Row("window bool", {"window_left": True}, ArgumentTypeError, ("window_left must be an int", "True (bool)")),
    Row("window None", {"window_left": None}, ArgumentTypeError, ("window_left must be an int", "None")),
    Row(
        "window tensor",
        {"window_left": torch.tensor(3)},
        ArgumentTypeError,
        ("window_left must be an int", "int64 tensor"),
    ),
    Row("sm_scale NaN", {"sm_scale": math.nan}, ArgumentError, ("sm_scale must be finite", "nan")),
    Row("sm_scale inf", {"sm_scale": math.inf}, ArgumentError, ("sm_scale must be finite", "inf")),
    Row("sm_scale beyond fp32", {"sm_scale": -2e38}, ArgumentError, ("sm_scale", "within +-1e+38", "-2e+38")),
    Row("sm_scale str", {"sm_scale": "1"}, ArgumentTypeError, ("sm_scale must be a number", "'1' (str)")),
    Row("sm_scale bool", {"sm_scale": True}, ArgumentTypeError, ("sm_scale must be a number", "True (bool)")),
    Row(
        "sm_scale tensor",
        {"sm_scale": torch.ones(1)},
        ArgumentTypeError,
        ("sm_scale must be a number", "float32 tensor of shape (1,)"),
    ),
    Row(
        "soft cap NaN",
        {"logits_soft_cap": math.nan},
        ArgumentError,
        ("logits_soft_cap must be finite", "nan"),
    ),
    Row(
        "soft cap inf",
        {"logits_soft_cap": math.inf},
        ArgumentError,
        ("logits_soft_cap must be finite", "inf"),
    ),
    Row("soft cap bool", {"logits_soft_cap": True}, ArgumentTypeError, ("logits_soft_cap", "True (bool)")),
    Row("rope_scale 0", {"rope_scale": 0.0}, ArgumentError, ("rope_scale must be > 0", "0.0")),
    Row("rope_scale inf", {"rope_scale": math.inf}, ArgumentError, ("rope_scale must be finite", "inf")),
    Row("rope_theta < 0", {"rope_theta": -1e4}, ArgumentError, ("rope_theta must be > 0", "-10000.0")),
    Row("rope_theta NaN", {"rope_theta": math.nan}, ArgumentError, ("rope_theta", "nan")),
    Row("k_scale NaN", {"k_scale": math.nan}, ArgumentError, ("k_scale must be finite", "nan")),
    Row("v_scale inf", {"v_scale": -math.inf}, ArgumentError, ("v_scale must be finite", "-inf")),
    Row(
        "scale product",
        {"sm_scale": 1e30, "k_scale": 1e30},
        ArgumentError,
        ("sm_scale * q_scale * k_scale", "1e+60"),
    ),
    Row(
        "k_scale of two elements",
        {"k_scale": torch.ones(2)},
        ArgumentTypeError,
        ("k_scale", "one element", "(2,)"),
    ),
    Row(
        "v_scale of integers",
        {"v_scale": torch.ones(1, dtype=torch.int32)},
        ArgumentTypeError,
        ("v_scale", "int32"),
    ),
    Row(
        "v_scale NaN tensor",
        {"v_scale": torch.tensor(math.nan)},
        ArgumentError,
        ("v_scale must be finite", "nan"),
    ),
    Row("v_scale device", {"v_scale": torch.ones(1, device="meta")}, ArgumentError, ("v_scale", "cpu", "meta")),
    Row(
        "k_scale grad",
        {"k_scale": with_grad(1, dtype=FLOAT)},
        ArgumentError,
        ("k_scale requires grad", "k_scale.detach()"),
    ),
    Row("sinks no tensor", {"sinks": [0.0] * 4}, ArgumentTypeError, ("sinks must be a torch.Tensor", "list")),
    Row("sinks shape", {"sinks": zeros(2)}, ArgumentError, ("sinks", "[num_qo_heads] = (4,)", "(2,)")),
    Row("sinks rank", {"sinks": zeros(2, 2)}, ArgumentError, ("sinks", "(4,)", "(2, 2)")),
    Row("sinks dtype", {"sinks": zeros(4, dtype=torch.int64)}, ArgumentError, ("sinks", "floating", "int64")),
    Row("sinks device", {"sinks": zeros(4, device="meta")}, ArgumentError, ("sinks", "cpu", "meta")),
    Row("sinks grad", {"sinks": with_grad(4)}, ArgumentError, ("sinks requires grad",)),
    Row("enable_pdl", {"enable_pdl": 1}, ArgumentTypeError, ("enable_pdl must be True or False", "1 (int)")),
    Row("return_lse", {"return_lse": 1}, ArgumentTypeError, ("return_lse must be True or False", "1 (int)")),
    Row(
        "return_lse beside lse",
        {"return_lse": None, "lse": zeros(4, dtype=FLOAT)},
        ArgumentTypeError,
        ("return_lse must be True or False", "None"),
    ),
    Row("out no tensor", {"out": "x"}, ArgumentTypeError, ("out must be a torch.Tensor", "'x'")),
    Row(
        "NVFP4 without scales",
        {"k": zeros(7, 2, 8, dtype=torch.uint8), "v": zeros(7, 2, 8, dtype=torch.uint8)},
        ArgumentError,
        ("kv_cache_sf", "uint8", "None"),
    ),
]

PREFILL = [
    Row("q rank", {"q": zeros(4, 16)}, ArgumentError, ("q must have shape [qo_len, num_qo_heads,", "(4, 16)")),
    Row(
        "q fp32",
        {"q": zeros(3, 4, 16, dtype=FLOAT)},
        ArgumentError,
        ("q must have dtype float16 or bfloat16", "float32"),
    ),
    Row("q int", {"q": zeros(3, 4, 16, dtype=torch.int32)}, ArgumentError, ("q must have dtype", "int32")),
    Row(
        "all fp32",
        {
            "q": zeros(3, 4, 16, dtype=FLOAT),
            "k": zeros(7, 2, 16, dtype=FLOAT),
            "v": zeros(7, 2, 16, dtype=FLOAT),
        },
        ArgumentError,
        ("q must have dtype float16 or bfloat16", "got float32"),
    ),
    Row("q device", {"q": zeros(3, 4, 16, device="meta")}, ArgumentError, ("q", "cpu or cuda", "meta")),
    Row("q grad", {"q": with_grad(3, 4, 16)}, ArgumentError, ("q requires grad", "q.detach()")),
    Row("q without heads", {"q": zeros(3, 0, 16)}, ArgumentError, ("num_qo_heads 0",)),
    Row(
        "fp8 q, 16-bit kv",
        {"q": zeros(3, 4, 16).to(E4M3)},
        ArgumentError,
        ("k and v must have dtype float8_e4m3fn", "got float16"),
    ),
    Row(
        "fp8 q, other fp8 kv",
        {"q": zeros(3, 4, 16).to(E4M3), "k": zeros(7, 2, 16).to(E5M2), "v": zeros(7, 2, 16).to(E5M2)},
        ArgumentError,
        ("k and v must have dtype float8_e4m3fn", "got float8_e5m2"),
    ),
    Row(
        "too many keys",
        {"k": zeros(1, 1, 16).expand(2**31, 2, 16), "v": zeros(1, 1, 16).expand(2**31, 2, 16)},
        ArgumentError,
        ("at most 1073741824 tokens", "2147483648"),
    ),
    Row(
        "too many rows",
        {"q": zeros(1, 1, 16).expand(2**30, 4, 16)},
        ArgumentError,
        ("q must have at most 1073741824 rows", "1073741824 x 4"),
    ),
    Row("causal int", {"causal": 1}, ArgumentTypeError, ("causal must be True or False", "1 (int)")),
    Row("causal None", {"causal": None}, ArgumentTypeError, ("causal must be True or False", "None")),
    Row("fp16 hint", {"use_fp16_qk_reduction": 1}, ArgumentTypeError, ("use_fp16_qk_reduction", "1 (int)")),
    Row(
        "mask no tensor",
        {"custom_mask": [[True]]},
        ArgumentTypeError,
        ("custom_mask must be a torch.Tensor", "list"),
    ),
    Row(
        "mask dtype",
        {"custom_mask": zeros(3, 7, dtype=FLOAT)},
        ArgumentError,
        ("custom_mask must be a bool", "float32"),
    ),
    Row(
        "mask bytes",
        {"custom_mask": zeros(3, 7, dtype=torch.uint8)},
        ArgumentError,
        ("custom_mask must be a bool", "uint8", "packed_custom_mask"),
    ),
    Row(
        "mask shape",
        {"custom_mask": zeros(7, 3, dtype=torch.bool)},
        ArgumentError,
        ("custom_mask", "(3, 7)", "(7, 3)"),
    ),
    Row(
        "mask flat, an element short",
        {"custom_mask": zeros(20, dtype=torch.bool)},
        ArgumentError,
        ("custom_mask", "(3, 7)", "(20,)"),
    ),
    Row(
        "mask device",
        {"custom_mask": zeros(3, 7, dtype=torch.bool, device="meta")},
        ArgumentError,
        ("custom_mask", "cpu", "meta"),
    ),
    Row(
        "packed dtype",
        {"packed_custom_mask": zeros(3, dtype=torch.int32)},
        ArgumentError,
        ("packed_custom_mask must have dtype uint8", "int32"),
    ),
    Row(
        "packed short",
        {"packed_custom_mask": zeros(2, dtype=torch.uint8)},
        ArgumentError,
        ("packed_custom_mask", "ceil(qo_len * kv_len / 8)", "(3,)", "(2,)"),
    ),
    Row(
        "packed by row",
        {"packed_custom_mask": zeros(3, 1, dtype=torch.uint8)},
        ArgumentError,
        ("packed_custom_mask", "(3,)", "(3, 1)"),
    ),
    Row(
        "packed device",
        {"packed_custom_mask": zeros(3, dtype=torch.uint8, device="meta")},
        ArgumentError,
        ("packed_custom_mask", "cpu", "meta"),
    ),
    Row(
        "a wrong mask beside a packed one",
        {"packed_custom_mask": zeros(3, dtype=torch.uint8), "custom_mask": zeros(7, 3, dtype=torch.bool)},
        ArgumentError,
        ("custom_mask", "(3, 7)", "(7, 3)"),
    ),
    Row(
        "o_dtype str",
        {"o_dtype": "float16"},
        ArgumentTypeError,
        ("o_dtype must be a torch.dtype", "'float16'"),
    ),
    Row("o_dtype fp64", {"o_dtype": torch.float64}, ArgumentError, ("o_dtype", "float16", "got float64")),
    Row("scale_q shape", {"scale_q": zeros(2)}, ArgumentError, ("scale_q", "[num_qo_heads] = (4,)", "(2,)")),
    Row("scale_k shape", {"scale_k": zeros(4)}, ArgumentError, ("scale_k", "[num_kv_heads] = (2,)", "(4,)")),
    Row("scale_v number", {"scale_v": 1.0}, ArgumentTypeError, ("scale_v must be a torch.Tensor", "1.0")),
    Row("scale_v device", {"scale_v": zeros(2, device="meta")}, ArgumentError, ("scale_v", "cpu", "meta")),
    Row(
        "scale_q dtype",
        {"scale_q": zeros(4, dtype=torch.int8)},
        ArgumentError,
        ("scale_q", "floating", "int8"),
    ),
    Row(
        "block scales of a 16-bit cache",
        {"kv_cache_sf": (1, 2)},
        ArgumentError,
        ("kv_cache_sf", "uint8", "float16"),
    ),
    Row("out shape", {"out": zeros(3, 4, 8)}, ArgumentError, ("out", "(3, 4, 16)", "(3, 4, 8)")),
    Row(
        "out dtype",
        {"out": zeros(3, 4, 16, dtype=FLOAT)},
        ArgumentError,
        ("out must have dtype float16", "float32"),
    ),
    Row(
        "out is not of o_dtype",
        {"out": zeros(3, 4, 16), "o_dtype": FLOAT},
        ArgumentError,
        ("out must have dtype float32", "got float16"),
    ),
    Row("out device", {"out": zeros(3, 4, 16, device="meta")}, ArgumentError, ("out", "cpu", "meta")),
    Row(
        "out last stride",
        {"out": zeros(3, 4, 32)[..., ::2]},
        ArgumentError,
        ("out must have stride 1", "(128, 32, 2)"),
    ),
    Row(
        "out overlaps itself",
        {"out": overlapping(3, 4, 16)},
        ArgumentError,
        ("out must not overlap itself", "(0, 16, 1)"),
    ),
    Row("out grad", {"out": with_grad(3, 4, 16)}, ArgumentError, ("out requires grad",)),
    Row("lse shape", {"lse": zeros(4, 3, dtype=FLOAT)}, ArgumentError, ("lse", "(3, 4)", "(4, 3)")),
    Row("lse dtype", {"lse": zeros(3, 4)}, ArgumentError, ("lse must have dtype float32", "float16")),
    Row("lse device", {"lse": zeros(3, 4, dtype=FLOAT, device="meta")}, ArgumentError, ("lse", "cpu", "meta")),
    Row(
        "lse strides",
        {"lse": zeros(4, 3, dtype=FLOAT).T},
        ArgumentError,
        ("lse must be contiguous", "(1, 3)"),
    ),
    Row("lse grad", {"lse": with_grad(3, 4, dtype=FLOAT)}, ArgumentError, ("lse requires grad",)),
]

DECODE = [
    Row(
        "q rank",
        {"q": zeros(1, 4, 16)},
        ArgumentError,
        ("q must have shape [num_qo_heads, head_dim]", "(1, 4, 16)"),
    ),
    Row(
        "q fp32",
        {"q": zeros(4, 16, dtype=FLOAT)},
        ArgumentError,
        ("q must have dtype float16 or bfloat16", "float32"),
    ),
    Row(
        "use_tensor_cores",
        {"use_tensor_cores": "yes"},
        ArgumentTypeError,
        ("use_tensor_cores", "'yes' (str)"),
    ),
    Row("q_scale inf", {"q_scale": math.inf}, ArgumentError, ("q_scale must be finite", "inf")),
    Row(
        "out shape",
        {"out": zeros(1, 4, 16)},
        ArgumentError,
        ("out", "[num_qo_heads, head_dim_vo] = (4, 16)", "(1, 4, 16)"),
    ),
    Row(
        "lse shape",
        {"lse": zeros(1, 4, dtype=FLOAT)},
        ArgumentError,
        ("lse", "[num_qo_heads] = (4,)", "(1, 4)"),
    ),
]

TABLE = [
    *((single_prefill_with_kv_cache, prefill_arguments, row) for row in (*BOTH, *PREFILL)),
    *((single_decode_with_kv_cache, decode_arguments, row) for row in (*BOTH, *DECODE)),
]
