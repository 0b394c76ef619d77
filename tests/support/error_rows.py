"""Good calls of single requests and of wrappers, bad inputs of the former, and the errors that say so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
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


class Setting(NamedTuple):
    """A good call of one wrapper."""

    wrapper: Callable[..., Any]
    plan: dict[str, Any]
    run: dict[str, Any]


def paged() -> Setting:
    plan = {
        "qo_indptr": ints(0, 3, 3, 5),
        "paged_kv_indptr": ints(0, 2, 2, 3),
        "paged_kv_indices": ints(4, 0, 2),
        "paged_kv_last_page_len": ints(3, 0, 4),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
        "page_size": 4,
    }
    return Setting(
        BatchPrefillWithPagedKVCacheWrapper, plan, {"q": zeros(5, 4, 16), "paged_kv_cache": zeros(5, 2, 4, 2, 16)}
    )


def ragged() -> Setting:
    plan = {"qo_indptr": ints(0, 3, 3, 5), "kv_indptr": ints(0, 7, 7, 11)}
    plan |= {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16}
    run = {"q": zeros(5, 4, 16), "k": zeros(11, 2, 16), "v": zeros(11, 2, 16)}
    return Setting(BatchPrefillWithRaggedKVCacheWrapper, plan, run)


def decode() -> Setting:
    plan = {"indptr": ints(0, 2, 2, 3), "indices": ints(4, 0, 2), "last_page_len": ints(3, 0, 4)}
    plan |= {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    run = {"q": zeros(3, 4, 16), "paged_kv_cache": zeros(5, 2, 4, 2, 16)}
    return Setting(BatchDecodeWithPagedKVCacheWrapper, plan, run)


SETTINGS = {"paged": paged, "ragged": ragged, "decode": decode}


class Row(NamedTuple):
    """What is changed in a good call, and parts of the message of the error that says so."""

    arguments: dict[str, Any]
    message: tuple[str, ...]
    error: type[Exception]

    @property
    def name(self) -> str:
        return "-".join(self.arguments) or "nothing"


def refused(arguments: dict[str, Any], *message: str, error: type[Exception] = ArgumentError) -> Row:
    return Row(arguments, message, error)


def wrong_type(arguments: dict[str, Any], *message: str) -> Row:
    return Row(arguments, message, ArgumentTypeError)


def with_grad(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return zeros(*shape, dtype=dtype).requires_grad_()


BOTH = [  # refused by prefill and decode alike
    refused({"k": zeros(7, 16), "kv_layout": "HND"}, "k must have shape [num_kv_heads, kv_len", "(7, 16)"),
    refused({"v": zeros(6, 2, 16)}, "v must have k's kv_len", "(7, 2, 16)", "(6, 2, 16)"),
    refused({"v": zeros(7, 1, 16)}, "v must have k's", "num_kv_heads", "(7, 1, 16)"),
    refused({"k": zeros(7, 0, 16), "v": zeros(7, 0, 16)}, "num_kv_heads 0"),
    refused({"v": zeros(7, 2, 0)}, "head_dim_vo 0"),
    refused(
        {"k": zeros(7, 2, 16, dtype=torch.bfloat16), "v": zeros(7, 2, 16, dtype=torch.bfloat16)},
        "k and v must have dtype float16",
        "got bfloat16",
    ),
    refused(
        {"k": zeros(7, 2, 16, dtype=FLOAT), "v": zeros(7, 2, 16, dtype=FLOAT)},
        "k must have dtype float16 or bfloat16",
        "got float32",
    ),
    refused({"k": zeros(7, 2, 32)[..., ::2]}, "k must have stride 1 on its last axis", "(64, 32, 2)", "k.contiguous()"),
    refused({"v": zeros(16, 7, 2).permute(1, 2, 0)}, "v must have stride 1 on its last axis", "(2, 1, 14)"),
    refused(
        {"k": zeros(7, 2, 15), "v": zeros(7, 2, 15), "pos_encoding_mode": "ROPE_LLAMA"},
        "ROPE_LLAMA",
        "even head dimension",
        "15",
    ),
    wrong_type({"window_left": True}, "window_left must be an int", "True (bool)"),
    refused({"sm_scale": math.nan}, "sm_scale must be finite", "nan"),
    refused({"sm_scale": math.inf}, "sm_scale must be finite", "inf"),
    refused({"sm_scale": -2e38}, "sm_scale", "within +-1e+38", "-2e+38"),
    wrong_type({"sm_scale": True}, "sm_scale must be a number", "True (bool)"),
    refused({"logits_soft_cap": math.nan}, "logits_soft_cap must be finite", "nan"),
    refused({"logits_soft_cap": math.inf}, "logits_soft_cap must be finite", "inf"),
    wrong_type({"logits_soft_cap": True}, "logits_soft_cap", "True (bool)"),
    refused({"rope_scale": 0.0}, "rope_scale must be > 0", "0.0"),
    refused({"rope_scale": math.inf}, "rope_scale must be finite", "inf"),
    refused({"rope_theta": -1e4}, "rope_theta must be > 0", "-10000.0"),
    refused({"rope_theta": math.nan}, "rope_theta", "nan"),
    refused({"k_scale": math.nan}, "k_scale must be finite", "nan"),
    refused({"v_scale": -math.inf}, "v_scale must be finite", "-inf"),
    refused({"sm_scale": 1e30, "k_scale": 1e30}, "sm_scale * q_scale * k_scale", "1e+60"),
    refused({"v_scale": torch.tensor(math.nan)}, "v_scale must be finite", "nan"),
    wrong_type({"enable_pdl": 1}, "enable_pdl must be True or False", "1 (int)"),
    refused(
        {"k": zeros(7, 2, 8, dtype=torch.uint8), "v": zeros(7, 2, 8, dtype=torch.uint8)}, "kv_cache_sf", "uint8", "None"
    ),
]

PREFILL = [
    refused({"q": zeros(4, 16)}, "q must have shape [qo_len, num_qo_heads,", "(4, 16)"),
    refused({"q": zeros(3, 0, 16)}, "num_qo_heads 0"),
    refused({"q": zeros(3, 4, 16).to(E4M3)}, "k and v must have dtype float8_e4m3fn", "got float16"),
    refused(
        {"q": zeros(3, 4, 16).to(E4M3), "k": zeros(7, 2, 16).to(E5M2), "v": zeros(7, 2, 16).to(E5M2)},
        "k and v must have dtype float8_e4m3fn",
        "got float8_e5m2",
    ),
    refused(
        {"k": zeros(1, 1, 16).expand(2**31, 2, 16), "v": zeros(1, 1, 16).expand(2**31, 2, 16)},
        "at most 1073741824 tokens",
        "2147483648",
    ),
    refused({"q": zeros(1, 1, 16).expand(2**30, 4, 16)}, "q must have at most 1073741824 rows", "1073741824 x 4"),
    refused({"o_dtype": torch.float64}, "o_dtype", "float16", "got float64"),
    refused({"out": zeros(3, 4, 32)[..., ::2]}, "out must have stride 1", "(128, 32, 2)"),
    refused({"lse": zeros(4, 3, dtype=FLOAT).T}, "lse must be contiguous", "(1, 3)"),
]

DECODE = [
    refused({"q": zeros(1, 4, 16)}, "q must have shape [num_qo_heads, head_dim]", "(1, 4, 16)"),
    refused({"q_scale": math.inf}, "q_scale must be finite", "inf"),
]

TABLE = [
    *((single_prefill_with_kv_cache, prefill_arguments, row) for row in (*BOTH, *PREFILL)),
    *((single_decode_with_kv_cache, decode_arguments, row) for row in (*BOTH, *DECODE)),
]
