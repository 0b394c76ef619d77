"""Honour or refuse: for every argument a pair of calls that differ in it, and what the table says about the second.

The first call is plain. The second must give what the reference gives for it, and where the argument changes numbers,
that must not pass for the first one's result; or the backend refuses with its name, a reason and an alternative.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.dispatch import capabilities, select
from cute_attn.request.settings import FP8
from cute_attn.runtime.arch import Arch
from tests.support.batch_case import E4M3, E5M2, BatchCase, call, dims, features, make
from tests.support.formula import check
from tests.support.right import assert_right

KINDS = ("paged", "ragged", "decode", "single_prefill", "single_decode")
PREFILL = ("paged", "ragged", "single_prefill")
BATCH = ("paged", "ragged", "decode")
D72, D128, D512 = dims(72), dims(128), dims(512)
FP8_Q = {**D128, "dtype": E4M3, "o_dtype": "bfloat16"}
ROPE = {"pos_encoding_mode": "ROPE_LLAMA"}


@dataclass(frozen=True)
class Perturbation:
    """`argument` goes from its value in a case with `before` to that with `after`."""

    argument: str
    after: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = KINDS
    moves: bool = True  # the numbers of the result

    @property
    def id(self) -> str:
        return f"{self.argument}-" + "-".join(map(str, self.after.values()))


PERTURBATIONS = (
    Perturbation("causal", {"mask": "causal"}, kinds=PREFILL),
    Perturbation("custom_mask", {"mask": "custom"}, kinds=PREFILL),
    Perturbation("packed_custom_mask", {"mask": "packed"}, kinds=PREFILL),
    *(
        Perturbation(name, {"mask": "items"}, kinds=("paged", "ragged"))
        for name in ("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr")
    ),
    Perturbation("window_left", {"window_left": 3}),
    Perturbation("logits_soft_cap", {"logits_soft_cap": 0.5}),
    Perturbation("pos_encoding_mode", ROPE),
    Perturbation("pos_encoding_mode", {"pos_encoding_mode": "ALIBI"}),
    Perturbation("rope_scale", {**ROPE, "rope_scale": 8.0}, before=ROPE),
    Perturbation("rope_theta", {**ROPE, "rope_theta": 10.0}, before=ROPE),
    Perturbation("sm_scale", {"sm_scale": 0.3}),
    Perturbation("sm_scale", {"sm_scale": -0.3}),
    Perturbation("q_scale", {"q_scale": 0.5}, kinds=(*BATCH, "single_decode")),
    Perturbation("q_scale", {"q_scale": 0.5, "tensor_scales": True}, kinds=(*BATCH, "single_decode")),
    Perturbation("k_scale", {"k_scale": 0.5}),
    Perturbation("k_scale", {"k_scale": 0.5, "tensor_scales": True}),
    Perturbation("v_scale", {"v_scale": -2.0}),
    Perturbation("v_scale", {"v_scale": -2.0, "tensor_scales": True}),
    Perturbation("sinks", {"sinks": True}),
    Perturbation("lse_base", {"lse_base": "ln"}),
    Perturbation("kv_layout", {"kv_layout": "HND"}, moves=False),
    Perturbation("page_size", {"page_size": 16}, kinds=("paged", "decode"), moves=False),
    Perturbation("head_dim_vo", dims(192, 128), kinds=PREFILL, moves=False),
    Perturbation("head_dim_qk", D128, moves=False),
    Perturbation("head_dim_qk", dims(264), moves=False),
    Perturbation("head_dim_qk", D72, moves=False),
    Perturbation("head_dim_qk", {**D72, "pos_encoding_mode": "ROPE_LLAMA"}, moves=False),
    Perturbation("head_dim_qk", {**D72, "kv_dtype": E4M3}, moves=False),
    Perturbation("head_dim_qk", D512, moves=False),
    Perturbation("head_dim_qk", {**D512, "kv_dtype": "nvfp4"}, kinds=(*BATCH, "single_prefill"), moves=False),
    Perturbation("head_dim_qk", dims(80), moves=False),
    Perturbation("num_qo_heads", {"num_qo_heads": 6}, moves=False),
    Perturbation("q_data_type", {"dtype": "bfloat16"}, moves=False),
    Perturbation("q_data_type", FP8_Q, before=D128),
    Perturbation("q_data_type", {"dtype": E4M3, "o_dtype": "bfloat16"}),
    Perturbation("logits_soft_cap", {**FP8_Q, "logits_soft_cap": 0.5}, before=FP8_Q),
    Perturbation("kv_data_type", {"kv_dtype": E4M3}),
    Perturbation("kv_data_type", {"kv_dtype": E5M2}),
    Perturbation("kv_cache_sf", {"kv_dtype": "nvfp4"}, kinds=(*BATCH, "single_prefill")),
    Perturbation("kv_cache_sf", {"kv_dtype": "nvfp4", **dims(96)}, before=dims(96), kinds=(*BATCH, "single_prefill")),
    Perturbation("o_data_type", {"o_dtype": "bfloat16"}, kinds=(*BATCH, "single_prefill"), moves=False),
    Perturbation("o_data_type", {"o_dtype": "float32"}, kinds=(*BATCH, "single_prefill"), moves=False),
    Perturbation("fixed_split_size", {"fixed_split_size": 8}, kinds=BATCH, moves=False),
    Perturbation("disable_split_kv", {"disable_split_kv": True}, kinds=BATCH, moves=False),
    Perturbation("return_lse", {"return_lse": False}, moves=False),
    Perturbation("q_len_per_req", {"qo_lens": (3, 3)}, kinds=("decode",), moves=False),
)

CALLS = [(kind, p) for p in PERTURBATIONS for kind in p.kinds]
IDS = [f"{kind}-{p.id}" for kind, p in CALLS]

# Arguments that say where numbers are, are refused, or change no numbers; tests of their own cover them.
ELSEWHERE = {
    *("self", "q", "k", "v", "paged_kv_cache", "args", "backend", "out", "lse"),
    *("qo_indptr", "kv_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_kv_heads"),
    *("indptr", "indices", "last_page_len", "seq_lens", "seq_lens_q", "block_tables", "max_token_per_sequence"),
    *("max_sequence_kv", "v_indptr", "o_indptr", "window_right", "data_type", "head_dim", "non_blocking"),
    *("use_fp16_qk_reduction", "allow_fp16_qk_reduction", "use_tensor_cores", "enable_pdl"),
    *("skip_softmax_threshold_scale_factor",),
    *("use_fp16_softmax", "uses_spcompress", "o_scale", "scale_q", "scale_k", "scale_v", "o_dtype"),
    *("lse_layout", "uniform_q_len", "is_causal"),
}


def base(kind: str, changes: dict[str, Any]) -> BatchCase:
    """One request for single functions, two for batches."""
    requests = 1 if kind.startswith("single") else 2
    qo_lens = (1,) * requests if "decode" in kind else (33, 5)[:requests]  # rows of a kv head beyond those of decode
    page_size = 4 if kind in ("paged", "decode") else 1
    case = BatchCase(kind, qo_lens, (40, 33)[:requests], 4, 2, page_size=page_size, seed=5)
    return dataclasses.replace(case, **changes)


def honour(kind: str, perturbation: Perturbation, backend: str, device: str, arch: Arch | None) -> None:
    before, after = base(kind, perturbation.before), base(kind, perturbation.after)
    inputs, asked = make(after, device), features(after, torch.device(device))
    asked = asked._replace(half_aligned_kv=after.head_dim_qk % 16 != 0 and asked.kv_dtype in FP8)  # as tensors show
    expected = select.reasons_against(capabilities.BY_NAME[backend], asked, arch)
    if expected:
        with pytest.raises(cute_attn.NotSupported) as error:
            call(after, inputs, backend=backend)
        refused = error.value.refusals
        assert refused
        assert all(refusal in expected and refusal[0] == backend and all(refusal) for refusal in refused)
        return
    out, lse = call(after, inputs, backend=backend)
    assert_right(after, inputs, out, lse)
    if perturbation.moves:
        assert check(before, make(before, device), out, lse), f"{perturbation.argument} moved nothing"
