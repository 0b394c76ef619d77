"""Latent attention on the reference, against its formula; plans that are refused. Calls: `test_call_errors`."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import cute_attn
from cute_attn.errors import ArgumentError, ArgumentTypeError, NotPlannedError, NotSupported
from tests.support.mla_case import LATENT, ROPE, SCALE, MlaCase

CASES = {
    "decode": MlaCase(),
    "fp16": MlaCase(dtype=torch.float16),
    "one head": MlaCase(heads=1, kv_lens=(1, 3)),
    "drafts": MlaCase(heads=3, q_lens=(4, 4), kv_lens=(9, 4), page_size=16),
    "ragged": MlaCase(heads=2, q_lens=(3, 0, 1), kv_lens=(7, 5, 2), page_size=1),
    "no keys": MlaCase(q_lens=(1, 1, 1), kv_lens=(0, 33, 0), page_size=32),
    "rows before the keys": MlaCase(q_lens=(5, 5), kv_lens=(3, 64), page_size=64),
    "sinks": MlaCase(q_lens=(2, 2), kv_lens=(1, 5), sinks=True),
    "e4m3": MlaCase(q_lens=(2, 2), kv_lens=(3, 5), narrow=True),
    "no rotated columns": MlaCase(rope=0),
    "e4m3, no rotated columns": MlaCase(narrow=True, rope=0, dtype=torch.float16),
}
GROUPED = {
    "scales of groups": MlaCase(narrow=True, grouped=True),
    "scales of groups, fp16": MlaCase(narrow=True, grouped=True, dtype=torch.float16, sinks=True),
    "scales of groups alone": MlaCase(q_lens=(3, 1), narrow=True, grouped=True, rope=0),
    "rows of 656 bytes": MlaCase(q_lens=(2, 2), kv_lens=(9, 1), narrow=True, grouped=True, wide=True),
}


@pytest.mark.parametrize("name", CASES)
def test_function(name: str) -> None:
    CASES[name].check(CASES[name].trtllm())


def test_fewer_arguments() -> None:
    """The function of XQA's name; its out may be without the axis of query tokens."""
    case = CASES["decode"]
    query, where = case.q[:, None], (case.workspace(), 128, LATENT, ROPE, case.table, case.seq_lens, 9)
    out = torch.empty(2, 4, LATENT, dtype=case.dtype)
    xqa = cute_attn.xqa_batch_decode_with_kv_cache_mla
    assert xqa(query, case.cache, *where, out=out, bmm1_scale=SCALE) is out
    case.check((out, case.trtllm()[1]))
    assert torch.equal(xqa(query, case.cache, *where, bmm1_scale=SCALE), out[:, None])
    with pytest.raises(NotSupported, match=r"query of float8_e4m3fn.*Instead: query.to"):
        xqa(query.to(torch.float8_e4m3fn), case.cache, *where)


@pytest.mark.parametrize("name", CASES | GROUPED)
@pytest.mark.parametrize("causal", [False, True])
def test_wrapper(name: str, causal: bool) -> None:
    case = dataclasses.replace((CASES | GROUPED)[name], causal=causal, made={})
    case.check(case.wrapped(), case.scales)


def test_packed_tensors_give_what_split_ones_give() -> None:
    case = CASES["drafts"]
    wrapper = case.wrapper(query_layout="packed", kv_cache_layout="split")
    found = wrapper.run(query=case.q, kv_cache=case.parts()[2:], return_lse=True)
    case.check(found)
    case.check(case.trtllm(backend="reference"))
    with pytest.raises(ArgumentError, match="kv_cache must be split, as planned, got it packed"):
        wrapper.run(query=case.q, kv_cache=case.cache)
    with pytest.raises(ArgumentError, match="kv_cache must not come with ckv_cache"):
        wrapper.run(*case.parts(), kv_cache=case.parts()[2:])


def test_outputs_of_the_caller() -> None:
    case = CASES["drafts"]
    out, lse = torch.empty(2, 4, 3, LATENT, dtype=case.dtype), torch.empty(8, 3)
    found = case.trtllm(out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    case.check(found)
    three = torch.empty(2, 4, 3)
    assert case.trtllm(lse=three, return_lse=False).shape == out.shape
    torch.testing.assert_close(three.flatten(0, 1), lse)
    new = *case.trtllm(), *CASES["ragged"].trtllm()
    assert [x.shape for x in new] == [out.shape, lse.shape, (4, 2, LATENT), (4, 2)]


def test_units_and_scales() -> None:
    case = CASES["decode"]
    out, lse = case.trtllm()
    torch.testing.assert_close(case.trtllm(return_lse_base="basee")[1], lse * math.log(2))
    torch.testing.assert_close(case.wrapped(return_lse_base_on_e=True)[1], lse * math.log(2))
    scales = {"bmm1_scale": torch.tensor([SCALE]), "bmm2_scale": 2.0}
    torch.testing.assert_close(case.trtllm(**scales)[0], 2 * out)
    torch.testing.assert_close(case.wrapped(**scales)[0], 2 * out[:, 0])
    assert not torch.allclose(case.wrapped(bmm1_scale=1.0)[0], out[:, 0])


def test_bounds_without_their_maximum() -> None:
    case = CASES["ragged"]
    case.check(case.trtllm(max_q_len=None))


def test_run_before_plan() -> None:
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(torch.empty(64, dtype=torch.uint8))
    with pytest.raises(NotPlannedError, match="plan"):
        wrapper.run()


# ---- FlashMLA's names


@pytest.mark.parametrize(
    "name", ["decode", "drafts", "rows before the keys", "no rotated columns", "rows of 656 bytes"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_mla(name: str, causal: bool) -> None:
    case = dataclasses.replace((CASES | GROUPED)[name], causal=causal, made={})
    out, lse = case.flash_mla()
    assert out.shape == (2, case.q_lens[0], case.heads, LATENT)
    assert lse.shape == (2, case.heads, case.q_lens[0])
    case.check((out, lse.transpose(1, 2) / math.log(2)))


def test_scale_of_flash_mla() -> None:
    case = CASES["decode"]
    torch.testing.assert_close(case.flash_mla(softmax_scale=None), case.flash_mla(softmax_scale=1 / 24))


@pytest.mark.parametrize(
    "name", ["indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"]
)
def test_refusals_of_flash_mla(name: str) -> None:
    with pytest.raises(NotSupported, match=rf"{name}.*Instead: "):
        CASES["decode"].flash_mla(**{name: torch.zeros(2)})


def test_errors_of_flash_mla() -> None:
    case = dataclasses.replace(CASES["decode"], made={})
    case.made["seq_lens"] = torch.tensor([9, 100], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"cache_seqlens must be within 0..10, .*request 1 has 100"):
        case.flash_mla()
    case.made["table"] = case.table[:1]
    with pytest.raises(ArgumentError, match="cache_seqlens must have one length for each of the 1 rows of block_table"):
        case.flash_mla()
    with pytest.raises(ArgumentError, match=r"k_cache must have shape \[num_pages, page_size, 1, 656\]"):
        case.flash_mla(is_fp8_kvcache=True)


# ---- plans


@pytest.mark.parametrize("form", ["csr", "dense", "dual"])
@pytest.mark.parametrize("name", ["drafts", "ragged", "no keys"])
def test_metadata(name: str, form: str) -> None:
    case = CASES[name]
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(case.workspace())
    wrapper.plan(metadata=case.metadata(form), lse_mode="base2", **case.options())
    case.check(wrapper.run(*case.parts(), return_lse=True))
    if form == "dense":
        wrapper.plan(**case.arrays(form), max_q_len=7, **case.options())
        case.check(wrapper.run(*case.parts(), return_lse=True))


def test_wrong_metadata() -> None:
    case = CASES["drafts"]
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(case.workspace())
    dense, short = case.metadata("dense"), torch.tensor([3, 4], dtype=torch.int32)
    other = case.indices.flip(0)
    for arguments, message in (
        ({}, "plan must get metadata, or qo_indptr"),
        ({"metadata": (1, 2)}, "metadata must be an MLAPlanMetadata"),
        ({"metadata": dense, "seq_lens": case.seq_lens}, "metadata must come without seq_lens"),
        ({"seq_lens": case.seq_lens}, "must be given together; missing: cum_seq_lens_q, block_tables"),
        ({"metadata": case.metadata("dense", max_q_len=3)}, "give a request more than 3 rows"),
        ({"metadata": case.metadata("dense", block_tables=case.table[:1])}, "one length for each of the 1 rows"),
        ({"metadata": case.metadata("dense", seq_lens=99 * short)}, "seq_lens must be within 0.* in block_tables"),
        ({"metadata": case.metadata("dual", seq_lens=short)}, "kv_len_arr and seq_lens must be equal"),
        ({"metadata": case.metadata("dual", kv_indices=other)}, "must have the same pages; those of request 0 differ"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
            wrapper.plan(**arguments, **case.options())


def test_runs_keep_to_planned_modes() -> None:
    """What a plan says of lse and scales is what runs must ask for."""
    case, narrow = CASES["decode"], CASES["e4m3"]
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(case.workspace())
    lse, base_e = {"return_lse": True}, {"return_lse": True, "return_lse_base_on_e": True}
    numbers, tensors = ({"bmm1_scale": x, "bmm2_scale": x} for x in (1.0, torch.ones(1)))
    for options, right, wrong in (
        ({}, {}, lse),
        ({"lse_mode": "base2"}, lse, base_e),
        ({"lse_mode": "basee"}, base_e, {}),
        ({"scale_mode": "bmm-scalar"}, numbers, tensors),
        ({"scale_mode": "bmm-tensor"}, tensors, {"bmm1_scale": torch.ones(1)}),
    ):
        wrapper.plan(metadata=case.metadata(), **case.options(**options))
        wrapper.run(*case.parts(), **right)
        with pytest.raises(ArgumentError, match=r"as planned with scale_mode|the planned lse_mode"):
            wrapper.run(*case.parts(), **wrong)
    with pytest.raises(ArgumentError, match="scale_mode='kv-per-tensor' needs kv_data_type=float8_e4m3fn"):
        wrapper.plan(metadata=case.metadata(), **case.options(scale_mode="kv-per-tensor"))
    planned = {"scale_mode": "kv-per-tensor"}
    wrapper.plan(metadata=narrow.metadata(), **narrow.options(**planned))
    wrapper.run(*narrow.parts(), **narrow.scale_options())
    with pytest.raises(ArgumentError, match="Exactly one of ckv_scale or ckv_scale_arr must be given"):
        wrapper.run(*narrow.parts(), **numbers)
    with pytest.raises(ArgumentError, match="kpe_scale must be 1 for rotated columns of 16 bits"):
        GROUPED["rows of 656 bytes"].wrapped(kpe_scale=2.0)


def test_graphs_over_tables() -> None:
    """Plans of a graph keep the table and lengths of the caller, who changes their numbers in place."""
    case = MlaCase(q_lens=(2, 2), kv_lens=(9, 6))
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(case.workspace(), use_cuda_graph=True)
    wrapper.plan(metadata=case.metadata("dense"), **case.options())
    assert wrapper._planned is not None
    assert wrapper._planned.lengths.kv_indices.data_ptr() == case.table.data_ptr()
    case.check((wrapper.run(*case.parts()), case.trtllm()[1]))
    case.seq_lens.copy_(torch.tensor([5, 2]))
    wrapper.plan(metadata=case.metadata("dense"), **case.options())
    shorter = dataclasses.replace(case, kv_lens=(5, 2), made={})
    shorter.made.update(case.made)
    shorter.check((wrapper.run(*case.parts()), shorter.trtllm()[1]))
    with pytest.raises(ArgumentError, match="seq_lens must be the array of the first plan of a CUDA graph"):
        wrapper.plan(metadata=case.metadata("dense", seq_lens=case.seq_lens.clone()), **case.options())
    buffers = (x.clone() for x in case.arrays().values())
    buffered = cute_attn.BatchMLAPagedAttentionWrapper(case.workspace(), True, *buffers)
    with pytest.raises(ArgumentError, match="block_tables, seq_lens must not be given to a wrapper whose"):
        buffered.plan(metadata=case.metadata("dense"), **case.options())
    with pytest.raises(ArgumentError, match="kv_len_arr must have buffers from the construction"):
        cute_attn.BatchMLAPagedAttentionWrapper(case.workspace(), use_cuda_graph=True).plan(
            metadata=case.metadata(), **case.options()
        )


# ---- caches and keys


def test_plans_check_all_before_they_write() -> None:
    case = CASES["decode"]
    given, buffers = case.arrays() | case.options(), [torch.zeros_like(x) for x in case.arrays().values()]
    wrapper = cute_attn.BatchMLAPagedAttentionWrapper(case.workspace(), True, *buffers)
    for changes, message in (
        ({"kv_indices": torch.zeros(99, dtype=torch.int32)}, "kv indices must fit the 8 elements"),
        ({"qo_indptr": torch.tensor([0, 2, 1], dtype=torch.int32)}, "qo_indptr must not decrease"),
        ({"qo_indptr": torch.tensor([1, 2, 3], dtype=torch.int32)}, "qo_indptr must start at 0"),
        ({"kv_len_arr": torch.tensor([9, 7], dtype=torch.int32)}, "kv_len_arr must be within 0.*request 1 has 7"),
        ({"kv_len_arr": case.seq_lens[:1]}, r"qo_indptr must have shape \[batch_size \+ 1\] = \(2,\)"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"kv_data_type": torch.float32}, "kv_data_type must have dtype"),
        ({"use_sinks": 1}, "use_sinks must be True or False"),
        ({"query_layout": "other"}, "query_layout must be one of"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
            wrapper.plan(**{**given, **changes})
        assert not any(x.any() for x in buffers)
    with pytest.raises(NotSupported, match="head_dim_ckv=256"):
        wrapper.plan(**{**given, "head_dim_ckv": 256})
    wrapper.plan(**given)
    case.check(wrapper.run(*case.parts(), return_lse=True))
    with pytest.raises(ArgumentError, match="no request more query tokens than the first plan"):
        wrapper.plan(**{**given, "qo_indptr": torch.tensor([0, 2, 4], dtype=torch.int32)})
    with pytest.raises(ArgumentError, match="kv_indptr must have 3 elements for batch size 2, got 2"):
        cute_attn.BatchMLAPagedAttentionWrapper(case.workspace(), True, buffers[0], buffers[1][:2], *buffers[2:])


def test_append() -> None:
    ckv, kpe = torch.randn(5, LATENT).bfloat16(), torch.randn(5, ROPE).bfloat16()
    cache = torch.zeros(4, 2, LATENT + ROPE).bfloat16()
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 1, 1, 1], [2, 3, 0, 1, 2], [3, 1, 0, 2], [0, 2, 4])]
    last = torch.tensor([2, 1], dtype=torch.int32)
    cute_attn.append_paged_mla_kv_cache(ckv, kpe, *ints[:2], cache[..., :LATENT], cache[..., LATENT:], *ints[2:], last)
    rows = torch.cat((ckv, kpe), dim=1)
    want = torch.zeros_like(cache)
    want[1, 0], want[1, 1], want[0, 0], want[0, 1], want[2, 0] = rows
    assert torch.equal(cache, want)


def test_concat() -> None:
    nope, rope = torch.randn(3, 2, 128).half(), torch.randn(3, 1, 64).half()
    k = torch.empty(3, 2, 256).half()[..., :192]  # columns of wider rows, as SGLang has them
    cute_attn.concat_mla_k(k, nope, rope)
    assert torch.equal(k, torch.cat((nope, rope.expand(3, 2, 64)), dim=2))
