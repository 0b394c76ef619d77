"""Bad arguments of calls without a plan: an error that names them, before anything is written. What is wrong with any
tensor of a call: `test_stored`, and `tests/api/test_shared_memory.py`; with decode calls: `decode_refusals`, too.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from cute_attn import ArgumentError, ArgumentTypeError, FP4Tensor, LayoutError, NotSupported, RuntimeArgumentError
from cute_attn.wrappers import calls
from perf.pretended_gpu import NullDriver
from tests.support import decode_refusals
from tests.support.entry_points import CACHES, ENTRIES, NEW_RESULTS, NEW_ROWS, OTHERS, STATES, TWO_CACHES, ints, randn
from tests.support.launch_corpus import pretended
from tests.support.refused_calls import Row, assert_refused, places, same

BF16, E4M3, NAN, INF = torch.bfloat16, torch.float8_e4m3fn, float("nan"), float("inf")
META, FLOATS = torch.device("meta"), torch.zeros(4, 2, 16, 2, 32)
K, V, S, ROWS = CACHES["k of paged_kv_cache"], STATES["v"], STATES["s"], NEW_ROWS["append_value"][:2]
K_CACHE, OUTPUT = TWO_CACHES["k_cache"], OTHERS["dequantise pages"].tensors["output_v"]

FP4 = FP4Tensor(torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(128, 4).to(torch.float8_e4m3fn))
MANY = randn(1, 2, 64).expand((1 << 31) + 20, 2, 64)  # more than launches count
WIDE, ROTATED = torch.zeros(64, 2), torch.zeros(4, 16, 64, dtype=E4M3)
OWN_PAGES = {"block_tables": ints(0, 0, 0, 0).view(2, 2, 1), "uses_shared_paged_kv_idx": False}
KNOWN, UNKNOWN = "'auto', 'fa4', 'fa3', 'xqa', 'fa2'", ("fa-2", "", None, 2, ["fa2"], np.array(["auto", "fa2"]))


def kv(*shape: int, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    """Keys and values of zeros."""
    return {name: torch.zeros(*shape, dtype=dtype) for name in "kv"}


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


Q = halves(8, 4, 64)
with torch.inference_mode():
    INFERENCE = halves(8, 4, 64), torch.zeros(8, 4)
SINGLE: list[Row] = [  # refused by prefill and decode alike
    ({"k": halves(32, 64), "kv_layout": "HND"}, r"k must have shape \[num_kv_heads, kv_len.*\(32, 64\)"),
    ({"v": halves(31, 2, 64)}, r"v must have k's kv_len.*\(32, 2, 64\).*\(31, 2, 64\)"),
    ({"v": halves(32, 1, 64)}, r"v must have k's.*num_kv_heads.*\(32, 1, 64\)"),
    (kv(32, 0, 64), "num_kv_heads 0"),
    (kv(32, 3, 64), "num_qo_heads of q must be a multiple of num_kv_heads of k and v", RuntimeArgumentError),
    ({"v": halves(32, 2, 0)}, "head_dim_vo 0"),
    (kv(32, 2, 64, dtype=torch.float16), "k and v must have dtype bfloat16.*got float16"),
    (kv(32, 2, 64, dtype=torch.float32), "k must have dtype float16 or bfloat16.*got float32"),
    (kv(32, 2, 32, dtype=torch.uint8), "kv_cache_sf.*None.*uint8"),
    ({"k": halves(32, 2, 128)[..., ::2]}, r"k must have stride 1 on its last axis.*\(256, 128, 2\).*k\.contiguous\(\)"),
    ({"v": halves(64, 32, 2).permute(1, 2, 0)}, r"v must have stride 1 on its last axis.*\(2, 1, 64\)"),
    ({"sm_scale": -2e38}, r"sm_scale.*within \+-1e\+38.*-2e\+38"),
    ({"sm_scale": 1e30, "k_scale": 1e30}, r"sm_scale \* q_scale \* k_scale.*1e\+60"),
    *same("must be finite", sm_scale=[NAN, INF], logits_soft_cap=INF, rope_scale=INF, rope_theta=NAN, k_scale=NAN),
    *same("must be finite", v_scale=[-INF, torch.tensor(NAN)]),
    *same("must be > 0", rope_scale=0.0, rope_theta=-1e4),
    *same("must be an int", ArgumentTypeError, window_left=[True, -1.0]),
    *same("must be a number", ArgumentTypeError, sm_scale=[True, False], rope_theta=True, k_scale=True),
    *same("must be a number", ArgumentTypeError, logits_soft_cap=True),
    *same("must be True or False", ArgumentTypeError, enable_pdl=1, return_lse=1),
    *(({"backend": x}, f"backend must be one of {KNOWN}", LayoutError) for x in UNKNOWN),
]
BAD: dict[str, list[Row]] = {  # by entry: what changes, the message, and the error if no ArgumentError
    "single prefill": [
        *SINGLE,
        ({"q": Q[0]}, r"q must have shape \[qo_len, num_qo_heads,.*\(4, 64\)"),
        ({"q": Q[:, :0]}, "num_qo_heads 0"),
        ({"q": Q.to(E4M3)}, "k and v must have dtype float8_e4m3fn.*got bfloat16"),
        ({"q": Q.to(E4M3), **kv(32, 2, 64, dtype=torch.float8_e5m2)}, "dtype float8_e4m3fn.*got float8_e5m2"),
        ({"q": Q[..., :15], **kv(32, 2, 15), "pos_encoding_mode": "ROPE_LLAMA"}, "ROPE_LLAMA.*even head dimension.*15"),
        (
            {"k": K[:1, 0].expand(2**31, 2, 64), "v": K[:1, 0].expand(2**31, 2, 64)},
            "at most 1073741824 tok.*2147483648",
        ),
        ({"q": Q[:1].expand(2**30, 4, 64)}, "q must have at most 1073741824 rows.*1073741824 x 4"),
        *same("must be True or False", ArgumentTypeError, causal=[1, 0.0], use_fp16_qk_reduction=0),
        ({"o_dtype": torch.float64}, "o_dtype.*float16.*got float64"),
        ({"out": INFERENCE[0]}, "^out is written and must not be an inference tensor"),
        ({"lse": INFERENCE[1], "return_lse": True}, "^lse is written and must not be an inference tensor"),
        ({"out": halves(8, 4, 128)[..., ::2]}, r"out must have stride 1.*\(512, 128, 2\)"),
        ({"lse": torch.zeros(4, 8).T}, r"lse must be contiguous.*\(1, 8\)"),
        ({"backend": "fa2"}, 'fa2 refuses cpu tensors.* backend="reference"', NotSupported),
        ({"backend": "fa4"}, 'fa4 refuses cpu tensors.* backend="reference"', NotSupported),
        ({"backend": "cudnn"}, "cudnn refuses.* not part of this library", NotSupported),
    ],
    "single decode": [
        *SINGLE,
        ({"q": Q[:1]}, r"q must have shape \[num_qo_heads, head_dim\].*\(1, 4, 64\)"),
        *same("must be finite", q_scale=INF),
    ],
    "trtllm context": [
        ({"query": randn(7, 4, 64)}, "cum_seq_lens_q must stay within 0..7"),
        ({"kv_cache": K}, "kv_cache as one tensor must have shape"),
        ({"block_tables": ints(-1, 1, 2, 3).view(2, 2)}, r"block_tables\[0, 0\], page 0 of request 0, is -1"),
        ({"block_tables": ints().view(2, 0)}, "seq_lens must be .*; request 0 has 4"),
        ({"block_tables": ints(0, 1)[None]}, "block_tables must have 2 rows"),
        ({"seq_lens": ints(-1, 1)}, "seq_lens must be within .*; request 0 has -1"),
        ({"max_kv_len": 15}, r"within 0\.\.15, max_kv_len; request 1 has 16"),
        ({"max_q_len": 4}, "cum_seq_lens_q must give .* at most 4 query tokens, max_q_len; request 1 has 5"),
        *same("must be at least 0, got", max_q_len=-1, max_kv_len=-7),
        ({"max_kv_len": 1 << 63}, "max_kv_len must be at most 9223372036854775807, got 9223372036854775808"),
        (
            {"seq_lens": ints(4, (1 << 30) + 1), "max_kv_len": 1 << 40},
            r"seq_lens must be within 0\.\.1073741824; request 1 has 1073741825",
        ),
        ({"batch_size": 3}, "cum_seq_lens_q must have 4 elements for batch_size 3"),
        ({"cum_seq_lens_q": ints(0, 3, 2)}, "cum_seq_lens_q must not decrease"),
        ({"cum_seq_lens_q": ints(0, 5, 9)}, "cum_seq_lens_q must stay within 0..8"),
        ({"cum_seq_lens_kv": None}, "cum_seq_lens_kv must be a torch.Tensor", ArgumentTypeError),
        *same("must be a number", ArgumentTypeError, bmm1_scale=None),
        ({"out_dtype": "nvfp4"}, "NVFP4 output", NotSupported),
        ({"out": FP4}, "NVFP4 output", NotSupported),
        ({"out": None, "out_dtype": torch.int8}, "^out_dtype must be float16"),
        ({"sinks": [torch.zeros(4), torch.zeros(4)]}, "list of 2"),
        ({"backend": "cake"}, "cake", NotSupported),
        ({"workspace_buffer": WIDE[:, 0]}, "^workspace_buffer must be contiguous"),
    ],
    "trtllm fmha": [({"block_tables": ints(0)[None]}, "block_tables must be None with input_layout")],
    "trtllm fmha, pages": [
        ({"input_layout": "QKV"}, "input_layout must be one of", LayoutError),
        ({"qkv": None}, "qkv must be a tuple of 2", ArgumentTypeError),
        ({"mask_mode": "chunked"}, "chunked_attention_size must be > 0 with mask_mode='chunked', got 0"),
        ({"mask_mode": "custom"}, "mask_mode='custom'", NotSupported),
        ({"mask_mode": "padding", "window_left": 3}, "window_left must be negative"),
        ({"mask_mode": "padding", "pos_encoding_mode": "ALIBI"}, "'ALIBI' with mask_mode='padding'"),
        ({"chunked_attention_size": 64, "mask_mode": "padding"}, "chunked_attention_size must be 0 with"),
        ({"chunked_attention_size": 64, "window_left": 3}, "negative with chunked_attention_size=64, got 3"),
    ],
    "trtllm ragged": [
        *same("must be a number", ArgumentTypeError, o_sf_scale="x"),
        (
            {"q_seq_lens_cpu": ints(3, -2), "kv_seq_lens_cpu": ints(4, 16)},
            "^the sums of q_seq_lens_cpu must not decrease",
        ),
        ({"q_seq_lens_cpu": ints(3, 5), "kv_seq_lens_cpu": ints(4, -2)}, "^kv_seq_lens_cpu must be within"),
        ({"key": randn(19, 2, 64), "value": randn(19, 2, 64)}, "within 0..19, the rows of key and value"),
        (
            {"key": MANY, "value": MANY, "cum_seq_lens_kv": torch.tensor([0, 4, 20]) + (1 << 31)},
            "^cum_seq_lens_kv must stay within 0..2147483647, got",
        ),
        ({"seq_lens": ints(3, 15)}, "cum_seq_lens_kv must be the sums of seq_lens"),
        ({"attention_sinks": [torch.zeros(4)] * 2}, "^attention_sinks must be a tensor or a list"),
        ({"is_causal": 1}, "is_causal must be True or False", ArgumentTypeError),
        ({"backend": "cudnn"}, "cudnn", NotSupported),
    ],
    "xqa": [
        ({"query": randn(2, 4, 64).half()}, "k and v must have dtype float16"),
        ({"workspace_buffer": WIDE[:, 0]}, "workspace_buffer must be contiguous"),
        ({"backend": "fa2"}, "fa2 refuses cpu tensors", NotSupported),
    ],
    "xqa, low level": [
        ({"q_scale": True}, "^q_scale must ", ArgumentTypeError),
        ({"num_kv_heads": 2.0}, "^num_kv_heads must ", ArgumentTypeError),
        ({"page_size": 16.0}, "^page_size must ", ArgumentTypeError),
        ({"q": randn(2, 4, 0)}, "^q must "),
        ({"page_table": ints(0, 1, -5, 3).view(2, 2)}, r"page_table\[1, 0\], page 0 of request 1, is -5"),
        ({"output": torch.zeros(2, 4, 2, 64).bfloat16()[..., 0, :].transpose(0, 1)}, "^output must "),
    ],
    "trtllm": [
        ({"out_dtype": "nvfp4"}, "NVFP4 output", NotSupported),
        ({"backend": "cute-dsl"}, "cute-dsl refuses", NotSupported),
        ({"backend": "cake"}, "cake refuses", NotSupported),
        ({"uniform_q_len": 2}, "uniform_q_len must be None or q_len_per_req, 1"),
        ({"lse_layout": "TN"}, "lse_layout must be one of", LayoutError),
        ({"lse_layout": np.zeros(3)}, "lse_layout must be one of", LayoutError),
        ({"cp_world": np.zeros(3)}, "cp_world must be an int", ArgumentTypeError),
        ({"max_seq_len": 1 << 70}, "max_seq_len must be at most"),
        ({"max_q_len": "x", "cum_seq_lens_q": ints(0, 1, 2)}, "^max_q_len must be an int", ArgumentTypeError),
        ({"bmm1_scale_log2": torch.tensor(3)}, "^bmm1_scale_log2 must be", ArgumentTypeError),
        ({"out": None, "out_dtype": torch.float32}, "^out_dtype must be float16 or bfloat16"),
        ({"uses_shared_paged_kv_idx": False}, r"block_tables must have shape \[batch_size, 2, max_pages\]"),
        ({**OWN_PAGES, "block_tables": ints(0, 0, 1, 2).view(2, 2, 1)}, "distances.*one page table", NotSupported),
        ({**OWN_PAGES, "block_tables": ints(0, 99, 1, 100).view(2, 2, 1)}, "beyond the cache"),
        ({**OWN_PAGES, "block_tables": ints(0, 0).view(1, 2, 1)}, "one length for each of the 1 rows of block_tables"),
        ({**OWN_PAGES, "seq_lens": ints(4, 16).to(META)}, "seq_lens must be on .* cpu.*, got .* on meta"),
        ({**OWN_PAGES, "block_tables": OWN_PAGES["block_tables"].to(META)}, "block_tables must be on a cpu or cuda"),
        ({**OWN_PAGES, "seq_lens": torch.zeros(2, dtype=torch.complex64)}, "seq_lens must have dtype"),
    ],
    "trtllm, NVFP4": [({"backend": "trtllm-gen"}, "interleaves scales of v", NotSupported)],
    "latent": [
        *(
            ({name: n}, rf"{name}.*Instead: ", NotSupported)
            for name, n in (("kv_lora_rank", 256), ("qk_rope_head_dim", 32))
        ),
        *(({"backend": x}, x, NotSupported) for x in ("cutlass", "cute-dsl", "cake")),
        ({"backend": "sparse"}, "backend must be one of 'auto'", LayoutError),
        ({"seq_lens": ints(4, 1000)}, r"seq_lens must be within 0\.\..*request 1 has 1000"),
        ({"block_tables": ints(99, 0, 0, 0).view(2, 2)}, "block_tables, page 0 of request 0, is 99"),
    ],
    "latent, planned": [
        ({"q_nope": randn(1, 4, 512), "q_pe": randn(1, 4, 64)}, "tokens of q_nope must be as planned, 2"),
        ({"ckv_cache": randn(64, 1, 512), "kpe_cache": randn(64, 1, 64)}, "page_size of ckv_cache must be as planned"),
        ({"q_pe": randn(2, 1, 64)}, "q_pe must have shape "),
        ({"sinks": None}, "sinks must be given exactly where plan has use_sinks"),
        ({"kpe_scale": 2.0}, "must come with a cache of float8_e4m3fn"),
    ],
    "latent, scales of groups": [
        ({"ckv_scale": 1.0}, "Exactly one of ckv_scale or ckv_scale_arr must be given"),
        ({"ckv_scale_arr": None}, "Exactly one of ckv_scale or ckv_scale_arr must be given"),
        ({"ckv_scale_arr": None, "ckv_scale": 0.0, "kpe_cache": ROTATED}, "ckv_scale must be > 0"),
        ({"ckv_scale_arr": torch.ones(4, 16, 3)}, "ckv_scale_arr must have shape "),
        ({"kpe_scale": None}, "kpe_scale must be given"),
    ],
    "append latent rows": [
        ({"append_kpe": randn(2, 64)}, "append_kpe must have as many rows as append_ckv, 3"),
        ({"append_ckv": randn(3, 64)}, r"append_ckv must have shape \[nnz, 512\]"),
    ],
    "concat": [
        ({"k": torch.zeros(3, 4, 190, dtype=BF16)}, "k must have nope_dim"),
        ({"k_rope": randn(3, 4, 64)}, "k_rope must have shape"),
        ({"backend": "cake"}, "cake", NotSupported),
    ],
    "append": [
        ({"kv_layout": "HDN"}, "kv_layout must be one of 'NHD', 'HND'", LayoutError),
        ({"append_value": ROWS}, "append_value must have as many rows as append_key, 3"),
        ({"batch_indices": ints(0, 0, 2)}, "batch_indices .* the 2 requests, got 2 for row 2"),
        ({"positions": ints(0, 16, 2)}, "positions .* the 16 tokens .*, got 16 for row 1"),
        ({"positions": ints(0, -1, 2)}, "positions .* got -1 for row 1"),
        ({"paged_kv_cache": K}, r"paged_kv_cache as one tensor must have shape \[num_pages, 2, ...\]"),
        ({"paged_kv_cache": (K,)}, "paged_kv_cache must be a tensor or a pair", ArgumentTypeError),
        ({"paged_kv_cache": (K, K[:2])}, "paged_kv_cache must have keys and values of the same pages"),
        ({"paged_kv_cache": (K.mT.contiguous().mT, K)}, "must have stride 1 on its last axis"),
        ({"paged_kv_cache": (K[:, :0], K[:, :0])}, "must have a page_size >= 1"),
        ({"kv_indices": ints(0, 9)}, "kv_indices .* the 4 pages of the cache, got 9"),
        ({"kv_indices": ints(0)}, "kv_indptr must stay within the 1 kv_indices, got 1"),
        ({"kv_indptr": ints()}, r"kv_indptr must have batch_size \+ 1 elements, got none"),
    ],
    "append NVFP4 to slots": [
        ({"append_value": ROWS}, "append_value must have as many rows"),
        ({"slot_mapping": ints(0, 1, 2, 3)}, "append_key must have a row for each of 4 slots"),
        ({"paged_kv_cache": FLOATS}, "k of paged_kv_cache must have dtype uint8"),
        ({"paged_kv_cache": None}, "paged_kv_cache must be a tensor or a pair", ArgumentTypeError),
        *same("must be > 0", k_scale=[0.0, torch.tensor([-1.0])]),
        ({"k_scale": 1e-60}, "k_scale must be > 0, got 0.0"),  # in fp32
        *same("must be finite", v_scale=[NAN, 1e39]),
        ({"v_scale": torch.ones(2)}, "v_scale must have one element"),
        ({"kv_layout": 0}, "kv_layout must be one of", LayoutError),
    ],
    "dequantise pages": [
        ({"paged_kv_cache": FLOATS}, "k of paged_kv_cache must have dtype uint8"),
        ({"block_tables": ints().view(2, 0)}, "block_tables column count insufficient", RuntimeError),
        ({"block_tables": ints().view(2, 0)}, r"max_pages \* page_size must be >= 16, .* is 16, got"),
        ({"seq_lens": ints(17, 0)}, "seq_lens must be within 0..16, .* max_seq_len; request 0 has 17"),
        ({"v_scale": torch.zeros(1)}, "v_scale must be > 0"),
        ({"output_v": OUTPUT.float()}, "output_v must have dtype bfloat16, got float32"),
        ({"output_v": OUTPUT[:, :5]}, r"output_v must have shape .* = \(2, 16, 2, 64\)"),
        ({"output_v": OUTPUT[:1].expand(2, -1, -1, -1)}, "output_v must not overlap itself"),
        ({"kv_layout": "NH"}, "kv_layout must be one of", LayoutError),
    ],
    "positions": [
        ({"nnz": 2.0}, "nnz must be an int", ArgumentTypeError),
        *(({"nnz": x}, f"nnz must be at {bound}") for x, bound in ((-1, "least 0, got -1"), (1 << 62, "most"))),
        ({"append_indptr": ints(5, 2, 0)}, "append_indptr must not decrease"),
        ({"append_indptr": ints()}, "append_indptr must have batch_size"),
        ({"batch_indices": torch.zeros(3, dtype=torch.int64)}, "batch_indices must have dtype int32"),
    ],
    "lengths": [
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"page_size": 1 << 70}, "page_size must be at most"),
        ({"kv_indptr": ints(5, 2, 0)}, "kv_indptr must not decrease"),
        ({"page_size": "16"}, "page_size must be an int", ArgumentTypeError),
        ({"kv_last_page_len": ints(1, 2, 3)}, r"kv_last_page_len must have shape \[n\] = \(2,\)"),
        ({"kv_indptr": ints()}, "kv_indptr must have batch_size"),
        ({"kv_last_page_len": torch.ones(2)}, "kv_last_page_len must have dtype int32 or int64"),
    ],
    "quantise": [
        ({"input": randn(4, 8)}, "K % 16 == 0"),
        ({"global_scale": torch.ones(2)}, "global_scale must have one element"),
        ({"global_scale": torch.tensor([torch.nan])}, "global_scale must be finite"),
        ({"global_scale": torch.ones(1, device=META)}, "global_scale must be on device cpu"),
    ],
    "dequantise": [
        ({"fp4_data": torch.zeros(4, 7, dtype=torch.uint8)}, "fp4_data must have shape"),
        ({"block_scales": torch.zeros(4, 4, dtype=torch.uint8, device=META)}, "block_scales must be on device cpu"),
        ({"output_dtype": torch.int8}, "output_dtype must have dtype"),
    ],
    "quantise pages": [
        ({"kv_layout": "ND"}, "kv_layout must be one of", LayoutError),
        ({"v_cache": K_CACHE[..., :8]}, "v_cache must have head_dim % 16"),
        ({"k_global_sf": -torch.ones(1)}, "k_global_sf must be > 0"),
        ({"k_global_sf": torch.ones(1).to_sparse()}, "k_global_sf must be a strided tensor"),
        ({"v_cache": K_CACHE.to(META)}, "v_cache must be on a cpu or cuda device"),
        ({"k_cache": K_CACHE / 0}, "k_cache without a scale must be finite"),
    ],
    "quantise pages to fp8": [
        ({"dtype": torch.int8}, "dtype must have dtype"),
        ({"dtype": torch.float8_e5m2, "k_scale": 0.0}, "k_scale must be > 0"),
        ({"v_cache": K_CACHE / 0}, "v_cache without a scale must be finite"),
        ({"k_cache": K_CACHE.to(META)}, "k_cache must be on a cpu or cuda device"),
    ],
    "merge two": [
        ({"v_b": V.to(META)}, "v_b must be on v_a's device"),
        ({"s_a": S.to(META)}, "s_a must be on v_a's device"),
    ],
    "merge": [
        ({"s": S.half()}, "s must have dtype float32"),
        ({"v": V[:1].expand(V.shape)}, "v must not overlap itself"),
        ({"s": S[:1].expand(S.shape)}, "s must not overlap itself"),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_argument(name: str) -> None:
    entry = (ENTRIES | NEW_RESULTS)[name]
    for row in BAD[name]:
        for place in places(row):
            with place:
                assert_refused(entry.begin(entry.tensors), entry, row)


@pytest.mark.parametrize(("name", "form"), decode_refusals.CALLS)
def test_decode(name: str, form: str) -> None:
    decode_refusals.assert_refused(name, form)


def test_values_on_a_gpu_are_looked_at_where_they_are_validated() -> None:
    entry = ENTRIES["xqa, low level"]
    looking = mock.patch.object(calls, "looks_at_values", return_value=True)  # as with CUTE_ATTN_VALIDATE=1
    with pretended(NullDriver()), looking, pytest.raises(ArgumentError, match="pages of page_table times 16 tokens"):
        entry.begin({})({**entry.tensors, "seq_lens": ints(4, 33)})


@pytest.mark.parametrize("axis", range(4))
def test_caches_whose_slots_share_memory_are_refused(axis: int) -> None:
    """A row written to an expanded cache would appear in other slots, or overwrite its own neighbours."""
    call, given = OTHERS["append"].begin({}), OTHERS["append"].tensors
    narrow = torch.zeros_like(K.narrow(axis, 0, 1)).expand(K.shape)
    for cache in ((K.clone(), narrow), (narrow, K.clone())):
        with pytest.raises(ArgumentError, match=r"[kv] of paged_kv_cache must (not overlap itself|have stride 1)"):
            call({**given, "paged_kv_cache": cache})
    assert not narrow.any()
