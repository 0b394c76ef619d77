"""FlashInfer 0.7.2's attention modules against ours: names, the places of parameters and their defaults, and what other
values do.

`tests/support/data/flashinfer_0_7_2.json` holds FlashInfer's: `signatures` of what this library means to have, and
`other_names`. Every name is there, or listed here with a reason for its absence; every parameter has the same place and
default, or is listed here with a reason for the difference. Another value of a parameter that has a default, or of one
that we have besides, changes the result or is refused, or is listed, too (`NO_EFFECT`). Numbers are compared with
oracles elsewhere (`test_honour.py`, `tests/engines`).
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import errors
from tests.support.entry_points import LATENT_PARTS, ints
from tests.support.flashinfer_calls import Call, Changes, Results, calls

DATA = json.loads((Path(__file__).parents[1] / "support/data/flashinfer_0_7_2.json").read_text())
SIGNATURES = [(m, name, text) for m, names in DATA["signatures"].items() for name, text in names.items()]
OTHERS = [f"{module}.{name}" for module, names in DATA["other_names"].items() for name in names]

MLA = "of FlashInfer's latent attention a part that is not here: sparse tokens, NVFP4 caches, or its low-level calls"
JIT = "FlashInfer compiles these modules on first use; kernels here are artifacts, and compilation has its own module"
OTHER_BACKENDS = "a form of cuDNN's, Cake's or another library's kernels"
NOT_ATTENTION = "quantisation of activations and weights, or layouts of their scales, for matrix products"
UTILITIES = (
    "helpers and constants of FlashInfer's own modules, its loggers and errors, and probes for its choice of kernels; "
    "here `cute_attn.explain` tells the choice, and `cute_attn.errors` has the errors"
)
ABSENT = {  # patterns of module.name
    "*mla*": MLA,
    "decode.xqa": "imported there for the decode functions; `cute_attn.xqa` is the function",
    "*get_*_module*": JIT,
    "*gen_fp4_*": JIT,
    "prefill.make_hashable_cache": JIT,
    "*_with_jit_module": "runs a module that the caller has compiled from FlashInfer's sources",
    "decode.Trtllm*": JIT,
    "*[Cc]udnn*": OTHER_BACKENDS,
    "*sm110*": OTHER_BACKENDS,
    "*sm120": OTHER_BACKENDS,
    "decode.prepare_balanced_batch_decode_with_kv_cache": OTHER_BACKENDS,
    "prefill.fmha_varlen*": "a form of the CUTLASS kernel for Blackwell; the ragged wrapper computes the same",
    "prefill.fmha_v2_prefill_deepseek": MLA,
    "prefill.trtllm_sage_attention_quantize": "SageAttention rounds queries and keys to int8; attention here is exact",
    "prefill.minimax_h3_*": OTHER_BACKENDS,
    "prefill.prepare_nvfp4_attention": OTHER_BACKENDS,
    "utils.*": UTILITIES,
    "quantization.*": NOT_ATTENTION,
}
# Of those, helpers that are here all the same.
EXTRA = ("utils.get_compute_capability", "utils.device_support_pdl")

DIFFERENCES = {  # by callable and parameter, or by parameter: why it is not at its place, or has another default
    "fast_decode_plan.self": "the wrapper, which all callers give by position",
    "BatchPrefill*.run*.lse_base": "None is what `plan` said, whose own default is log2",
    "*.workspace_size.*": "takes whatever `plan` takes, and passes it on",
    "BatchDecodeWithPagedKVCacheWrapper.plan.q_data_type": "None means float16 unless `data_type` says otherwise",
    "BatchDecodeWithPagedKVCacheWrapper.plan.is_causal": "queries of a request are always causal among themselves",
    "variant_owns_mask": "a property of variants that callers compile",
    "*.reset_workspace_buffer.int_workspace_buffer*": "not needed: schedules are in memory of the wrapper",
    "trtllm_batch_decode_with_kv_cache.cp_*": "context parallelism inside the kernel; merge shards by their lse",
    "trtllm_batch_decode_with_kv_cache.causal_seqlens_kv_global": "context parallelism inside the kernel",
    "trtllm_batch_decode_with_kv_cache.request_order*": "a launch order for Cake's kernels",
}


def reason(name: str) -> str:
    return next((text for pattern, text in ABSENT.items() if fnmatch.fnmatchcase(name, pattern)), "")


def first_match(table: dict[str, Any], name: str, parameter: str) -> Any:
    """The most special entry: by callable and parameter, then by parameter."""
    for key, value in sorted(table.items(), key=lambda item: "." not in item[0]):
        if fnmatch.fnmatchcase(f"{name}.{parameter}" if "." in key else parameter, key):
            return value
    return None


def ours(module: str, name: str) -> Any:
    """The member of that name, or None."""
    found: Any = importlib.import_module(f"cute_attn.{module}")
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None) if inspect.isclass(found) else getattr(found, part, None)
    return found.__func__ if isinstance(found, classmethod) else found


# ---- names


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_have_a_reason(name: str) -> None:
    assert reason(name)
    module, _, rest = name.partition(".")
    if name not in EXTRA:
        assert ours(module, rest) is None, f"cute_attn has {name}: its signature belongs into the data file"


def test_top_level_names() -> None:
    """What FlashInfer's modules hold is also at the top level."""
    package = importlib.import_module("cute_attn")
    names = [(m, n) for m, n, _ in SIGNATURES if "." not in n and m not in ("utils", "xqa")]
    other = [n for m, n in names if getattr(package, n, None) is not ours(m, n) or n not in package.__all__]
    assert other == []
    assert callable(package.xqa)


# ---- parameters


def flashinfers(text: str) -> inspect.Signature:
    """A signature from its text; defaults are the text of theirs."""
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
    kinds, found = inspect.Parameter, []

    def add(argument: ast.arg, default: ast.expr | None, kind: Any) -> None:
        shown = inspect.Parameter.empty if default is None else ast.unparse(default)
        found.append(inspect.Parameter(argument.arg, kind, default=shown))

    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(arguments.args, defaults, strict=True):
        add(argument, default, kinds.POSITIONAL_OR_KEYWORD)
    if arguments.vararg:
        add(arguments.vararg, None, kinds.VAR_POSITIONAL)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        add(argument, default, kinds.KEYWORD_ONLY)
    return inspect.Signature(found)


def shown(default: Any) -> Any:
    return default if default is inspect.Parameter.empty else repr(default)


def problems(name: str, theirs: inspect.Signature, mine: inspect.Signature) -> list[str]:
    """Parameters that callers of FlashInfer would miss, or find elsewhere, or with another default."""
    kinds, found = inspect.Parameter, []
    places = list(mine.parameters)
    for place, (parameter, want) in enumerate(theirs.parameters.items()):
        have = mine.parameters.get(parameter)
        if first_match(DIFFERENCES, name, parameter):
            continue
        if want.kind is kinds.VAR_POSITIONAL:
            if not any(p.kind is kinds.VAR_POSITIONAL for p in mine.parameters.values()):
                found.append(f"no *{parameter}")
        elif have is None:
            found.append(f"no {parameter}")
        elif want.kind is kinds.POSITIONAL_OR_KEYWORD and places[place : place + 1] != [parameter]:
            found.append(f"{parameter} is not number {place}")
        elif have.kind not in (want.kind, kinds.POSITIONAL_OR_KEYWORD):
            found.append(f"{parameter} is {have.kind.description}")
        elif want.default != shown(have.default):
            found.append(f"{parameter} is {shown(have.default)} by default, not {want.default}")
    for place, (parameter, have) in enumerate(mine.parameters.items()):
        renamed = any(first_match(DIFFERENCES, name, other) for other in list(theirs.parameters)[place : place + 1])
        if parameter in theirs.parameters or have.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            continue
        if have.default is kinds.empty and not renamed:
            found.append(f"{parameter} is required")
        if have.kind is not kinds.KEYWORD_ONLY and "." not in name and not renamed:
            found.append(f"{parameter} has a place")
    return found


def signature(name: str, member: Any) -> inspect.Signature:
    """As a caller sees it: without the `self` of methods."""
    parameters = list(inspect.signature(member).parameters.values())
    return inspect.Signature(parameters[1:] if "." in name else parameters)


CALLABLES = [row for row in SIGNATURES if row[2] not in ("class", "property", "value")]


def check_other_form(module: str, name: str, found: Any) -> None:
    """Other names of methods, and forms with `return_lse=True`."""
    owner, _, method = name.rpartition(".")
    same = {"begin_forward": "plan", "forward": "run"}.get(method)
    if same is not None:
        assert found is ours(module, f"{owner}.{same}")
    elif isinstance(found, functools.partialmethod | functools.partial):
        assert found.keywords == {"return_lse": True}
    else:
        assert inspect.signature(found).parameters["return_lse"].default is True


@pytest.mark.parametrize(("module", "name", "text"), SIGNATURES, ids=[f"{m}.{n}" for m, n, _ in SIGNATURES])
def test_signatures(module: str, name: str, text: str) -> None:
    found = ours(module, name)
    assert found is not None
    assert (text == "property") == isinstance(found, property)
    assert (text == "class") == inspect.isclass(found)
    if text == "value":
        check_other_form(module, name, found)
    elif text == "imported":
        assert callable(found)
    elif text not in ("class", "property"):
        assert problems(name, flashinfers(text), signature(name, found)) == []


def test_reasons_are_used() -> None:
    for pattern in ABSENT:
        assert any(fnmatch.fnmatchcase(name, pattern) for name in OTHERS), pattern
    parameters = [(name, p) for _, name, text in CALLABLES if text != "imported" for p in flashinfers(text).parameters]
    for key, why in DIFFERENCES.items():
        assert any(first_match({key: why}, *each) for each in parameters), key


# ---- other values

CALLS, NAN = calls("cpu"), float("nan")
ELSEWHERE = {  # other callables of the table: the tests of their parameters
    "*.reset_workspace_buffer": "tests/request/test_batch_errors.py",
    "*.workspace_size": "those of plan, which it calls",
    "*.forward_return_lse": "those of forward",
    "*.prewarm_paged_kv_stride_variant": "it has nothing to do",
    "CUDAGraph*": "those of the wrapper that it derives from",
    "fast_decode_plan": "tests/engines: captured decode",
    "merge_*": "tests/api/test_merge.py",
    "get_*": "tests/api/test_page.py",
    "append_*": "tests/api/test_page.py",
    "concat_mla_k": "tests/api/test_mla.py",
    "MLAPlanMetadata.*": "tests/api/test_mla.py",
    "nvfp4_*": "tests/api/test_quantization.py",
    "*packbits": "tests/api/test_bit_packing.py",
    "FP4Tensor.*": "tests/api/test_decode.py",
}


@dataclass(frozen=True)
class Value:
    """A value other than the default. `also`: what a refusal may say instead of the parameter's name; `both`: arguments
    without which the parameter means nothing, or, under its own name, what `value` is compared with."""

    value: Any
    also: tuple[str, ...] = ()
    both: tuple[tuple[str, Any], ...] = ()


ROPE = (("pos_encoding_mode", "ROPE_LLAMA"),)
HOST_LENGTHS = (("q_seq_lens_cpu", ints(3, 5)), ("kv_seq_lens_cpu", ints(4, 16)))  # those of the entry
MASK, ONE_MASK, BLOCKS = torch.arange(3 * 4 + 5 * 16) % 3 != 0, torch.arange(8 * 32) % 3 != 0, torch.arange(3 * 4 * 16)
FLAGS = {"False": True, "True": False}  # by the text of the default
VALUES: dict[str, Any] = {  # by parameter, or by callable and parameter; of a flag by default the other one
    "kv_layout": Value("HND", ("k must", "shape", "num_kv_heads", "tokens; request 1 has 16")),
    "pos_encoding_mode": "ALIBI",
    "trtllm_fmha_v2_prefill.pos_encoding_mode": "alibi",
    "[qkv]_scale": 0.5,
    "BlockSparseAttentionWrapper.plan.[qkv]_scale": torch.tensor([0.5]),
    "scale_[qkv]": Value(torch.full((4,), 0.5), ("scale_", "fp8")),
    "single*.scale_[kv]": torch.full((2,), 0.5),
    "o_scale": 2.0,
    "rcp_out_scale": 2.0,
    "window_left": 3,
    "window_right": 1,
    "sliding_win_size": 3,
    "logits_soft_cap": 0.5,
    "logits_soft_cap_scale": 0.5,
    "sm_scale": 0.3,
    "bmm[12]_scale": 0.4,
    "bmm1_scale_log2": torch.tensor([0.4]),
    "kv_scale": 0.4,
    "rope_scale": Value(4.0, both=ROPE),
    "rope_theta": Value(100.0, both=ROPE),
    "*BlockSparse*.rope_scale": 4.0,
    "*BlockSparse*.rope_theta": 100.0,
    "*Shared*.rope_scale": 4.0,
    "*Shared*.rope_theta": 100.0,
    "return_lse": False,
    "backend": "fa2",
    "use_cuda_graph": Value(True, ("buf",)),
    "*_buf": ints(0, 0, 0),
    "*_buffer": ints(0, 0, 0),
    "*_buf_arr": [ints(0, 0, 0)],
    "jit_args": ["name"],
    "jit_kwargs": {"use_sliding_window": True},
    "*Shared*.*data_type": Value("bfloat16", ("float16",)),
    "MultiLevel*.*_data_type": Value("bfloat16", ("float16",)),
    "causal_window_left": 3,
    "range_window_left": Value(1, both=(("causal_window_left", 1),)),
    "o_data_type": "float32",
    "*data_type": Value(torch.float16, ("bfloat16", "float16")),
    "o_dtype": torch.float32,
    "out_dtype": torch.float16,
    "head_dim_*": Value(16, ("shape",)),
    "block_tables": Value(ints(0, 0)[:, None]),
    "trtllm_fmha_v2_prefill.block_tables": ints(2, 3, 0, 1).view(2, 2),
    "seq_lens*": ints(1, 1),
    "fixed_split_size": 1,
    "q_len_per_req": Value(2, ("q must", "query must", "rows", "num_tokens")),
    "*_fp16_qk_reduction": True,
    "custom_mask": MASK,
    "single*.custom_mask": ONE_MASK.view(8, 32),
    "packed_custom_mask": cute_attn.packbits(MASK, "little"),
    "single*.packed_custom_mask": cute_attn.packbits(ONE_MASK, "little"),
    "mask": Value(torch.zeros(2, 1, 2, dtype=torch.uint16)),
    "BlockSparse*.mask": BLOCKS.view(3, 4, 16) % 2 == 0,
    "BlockSparse*.packed_mask": cute_attn.packbits(BLOCKS % 2 == 0, "little"),
    "mask_mode": "padding",
    "chunked_attention_size": 4,
    "prefix_len_ptr": torch.tensor([1, 1]).to(torch.uint32),
    "token_pos_in_items_ptr": torch.zeros(8).to(torch.uint16),
    "token_pos_in_items_len": 4,
    "max_item_len_ptr": ints(1, 1).to(torch.uint16),
    "max_token_per_sequence": 1,
    "max_sequence_kv": 1,
    "uniform_q_len": 7,
    "[vo]_indptr": ints(0, 1, 2),
    "enable_pdl": False,
    "*sinks": torch.ones(4),
    "kv_cache_sf": (torch.zeros(1), torch.zeros(1)),
    "[kv]_sf_cache": Value(torch.zeros(1), ("kv_cache_sf", "k_sf_cache", "v_sf_cache")),
    "skip_softmax_threshold_scale_factor": 0.5,
    "use_fp16_softmax": True,
    "uses_spcompress": True,
    "sage_attn_sfs": (torch.ones(1), torch.ones(1), None, None),
    "num_elts_per_sage_attn_blk": (64, 64, 0, 1),
    "q_seq_lens_cpu": Value(ints(5, 3), both=HOST_LENGTHS),
    "kv_seq_lens_cpu": Value(ints(16, 4), both=HOST_LENGTHS),
    "lse_base": "ln",
    "lse_layout": "HN",
    "o_sf_scale": 2.0,
    "o_sf_vec_size": 16,
    "max_q_len": Value(3, ("cum_seq_lens_q",)),
    "cum_seq_lens_q": Value(ints(0, 1, 2), ("max_q_len",)),
    "q_cu_seq_lens": Value(ints(0, 2, 2), ("rows", "query tokens")),
    "q_seq_len": Value(2, ("q must", "shape")),
    "sm_count": 7,
    "uses_shared_paged_kv_idx": Value(False, ("block_tables",)),
    "bf16q_fp8kv_transform_mode": "k_only",
    "block_mask": torch.ones(4, 2, 3, dtype=torch.bool),
    "kv_block_lens": ints(3, 3, 1),
    "q2k_*": ints(1, 1),
    "kv_splits": 2,
    "use_clc": True,
    "device": "meta",
    "BatchMLA*.plan.qo_indptr": ints(0, 2, 2),
    "BatchMLA*.plan.causal": Value(True, both=(("qo_indptr", ints(0, 2, 2)),)),
    "BatchMLA*.plan.kv_indptr": ints(0, 4, 8),
    "BatchMLA*.plan.kv_indices": ints(1, 0),
    "BatchMLA*.plan.kv_len_arr": ints(1, 1),
    "BatchMLA*.num_heads": Value(2, ("heads",)),
    "BatchMLA*.page_size": Value(4, ("pages",)),
    "BatchMLA*.metadata": (ints(0), ints(0)),
    "BatchMLA*.*_layout": Value("packed", ("packed",)),
    "BatchMLA*.lse_mode": "basee",
    "BatchMLA*.output_dtype": torch.float32,
    "BatchMLA*.output_scale": "per-tensor",
    "BatchMLA*.scale_mode": "bmm-scalar",
    "BatchMLA*.use_sinks": Value(False, ("sinks",)),
    "BatchMLA*.backend": "cutlass",
    "BatchMLA*.__init__.k*": ints(0, 0, 0),
    "BatchMLA*.__init__.q*": ints(0, 0, 0),
    **{f"BatchMLA*.run.{name}": LATENT_PARTS[name].flip(0) for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")},
    "BatchMLA*.run.query": torch.ones(4, 4, 576, dtype=torch.float16),
    "BatchMLA*.run.kv_cache": torch.ones(9, 2, 576, dtype=torch.float16),
    "BatchMLA*.run.kv_len": ints(1, 1),
    "BatchMLA*.run.page_table": ints(0, 0)[:, None],
    "BatchMLA*.run.*k*_scale": 0.5,
    "BatchMLA*.run.ckv_scale_arr": torch.ones(9, 2, 4),
    "return_lse_base": Value("basee", both=(("return_lse", True),)),
    "sparse_mla_top_k": 4,
    "sparse_mla_top_k_lens": ints(1, 1),
    "cute_dsl_impl": "modular",
    "kv_scale_format": "pow2_fp32",
    "cp_world": 2,
    "cp_rank": 1,
    "request_order*": ints(0, 0),
    "is_causal": False,
    "causal_seqlens_kv_global": ints(9, 9),
}
GRAPH_ONLY = "read with use_cuda_graph=True"
HINT = "a hint about speed"
SAME_PAGES = "the same pages as in the index arrays"
NO_EFFECT = {
    "*.is_causal": "the newest token of a request sees all keys in any case",
    "*Sink*.__init__.window_left": "that of plan counts",
    "*.use_tensor_cores": HINT,
    "*_fp16_qk_reduction": HINT,
    "*.non_blocking": HINT,
    "*.enable_pdl": HINT,
    "*.sm_count": HINT,
    "*.plan.uniform_q_len": GRAPH_ONLY,
    "*.__init__.*_buf": GRAPH_ONLY,
    "BatchMLA*.__init__.*_indptr": GRAPH_ONLY,
    "BatchMLA*.__init__.kv_*": GRAPH_ONLY,
    "*.is_var_seq": "lengths are read in any case",
    "*.__init__.*_buffer": GRAPH_ONLY,
    "*.__init__.*_buf_arr": GRAPH_ONLY,
    "*.multi_ctas_kv_counter_buffer": "counters of FlashInfer's kernels; ours are the launch's own",
    "BatchMLA*.plan.max_q_len": "a bound, which spares reading the bounds of queries",
    "*.plan.block_tables": SAME_PAGES,
    "*BlockSparse*.rope_*": "read under ROPE_LLAMA alone, which is refused here",
    "*Shared*.rope_*": "read under ROPE_LLAMA alone, which these wrappers do not have",
    "*.fixed_split_size": "how keys are split; the reference does not split them",
    "*.disable_split_kv": "how keys are split; the reference does not split them",
    "*.skip_all_rows_active_check": "requests without tokens or keys are right in any case",
    "*.bf16q_fp8kv_transform_mode": "which of two kernels; FlashInfer ignores it for other dtypes too",
}


def defaults(module: str, name: str, text: str) -> dict[str, Any]:
    """Texts of the defaults of FlashInfer's parameters, and of further ones of ours."""
    theirs = {p.name: p.default for p in flashinfers(text).parameters.values()}
    mine = {p.name: shown(p.default) for p in signature(name, ours(module, name)).parameters.values()}
    return {parameter: default for parameter, default in (theirs | mine).items() if isinstance(default, str)}


CALLED = [x for x in CALLABLES if x[2] != "imported" and x[1].partition(".")[0] in CALLS]
CALLED = [x for x in CALLED if not any(fnmatch.fnmatchcase(x[1], pattern) for pattern in ELSEWHERE)]
DEFAULTS = {(x[1], parameter): default for x in CALLED for parameter, default in defaults(*x).items()}
CASES = list(DEFAULTS)


def buffer_for(name: str, parameter: str, results: Results) -> torch.Tensor | None:
    """What is written instead of a new tensor."""
    if parameter not in ("out", "lse"):
        return None
    if parameter == "lse" and len(results) == 1:
        return torch.full(results[0].shape[:-1], NAN)
    return torch.full_like(results[("out", "lse").index(parameter)], NAN)


def attempt(call: Call, method: str, changes: Changes) -> tuple[Exception | None, Results]:
    try:
        return None, call(method, changes)
    except Exception as error:
        return error, ()


@pytest.mark.filterwarnings("ignore:q_len_per_req belongs to plan:DeprecationWarning")
@pytest.mark.parametrize(("name", "parameter"), CASES, ids=[".".join(case) for case in CASES])
def test_nothing_is_dropped(name: str, parameter: str) -> None:
    owner, _, method = name.partition(".")
    call, entry = CALLS[owner], first_match(VALUES, name, parameter)
    entry = FLAGS.get(DEFAULTS[name, parameter]) if entry is None else entry
    entry = entry if isinstance(entry, Value) else Value(entry)
    before = call(method, dict(entry.both))
    buffer = buffer_for(name, parameter, before)
    value = entry.value if buffer is None else buffer
    assert value is not None, "no value to try"
    quiet = first_match(NO_EFFECT, name, parameter)
    refusal, after = attempt(call, method, {**dict(entry.both), parameter: value})
    if refusal is not None:
        assert type(refusal).__module__ == errors.__name__, f"{type(refusal)}: {refusal}"
        assert any(word in str(refusal) for word in (parameter, *entry.also)), str(refusal)
        return
    if buffer is not None:
        assert not buffer.isnan().any()
        assert any(x is buffer for x in after)
        return
    same = len(before) == len(after) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, after, strict=True)
    )
    assert same == (quiet is not None), f"{parameter}={value!r} changes {'nothing' if same else 'the result'}"


ANY_TYPE = {"BatchAttention.__init__.device": "torch names it", "BatchMLA*.__init__.*": GRAPH_ONLY}
OTHER_REASON = re.compile(
    "together|must (not )?come|every backend refuses|must be given exactly|got None|query must have"
)


@pytest.mark.parametrize(("name", "parameter"), CASES, ids=[".".join(case) for case in CASES])
def test_other_types_are_refused(name: str, parameter: str) -> None:
    """What nothing takes, and what equals the default of a flag or an integer; the error shows it."""
    owner, _, method = name.partition(".")
    entry, default = first_match(VALUES, name, parameter), DEFAULTS[name, parameter]
    also = entry.also if isinstance(entry, Value) else ()
    if first_match(ANY_TYPE, name, parameter):
        return
    for wrong in (b"?", "1", *{"True": [1], "False": [0], "-1": [-1.0]}.get(default, [])):
        refusal, _ = attempt(CALLS[owner], method, {parameter: wrong})
        assert type(refusal).__module__ == errors.__name__, f"{wrong}: {refusal}"
        assert any(word in str(refusal) for word in (parameter, *also)), str(refusal)
        shown = any(text in str(refusal) for text in (repr(wrong), f"got {wrong}"))
        assert shown or OTHER_REASON.search(str(refusal)), str(refusal)


def test_every_callable_has_a_test() -> None:
    for _, name, text in CALLABLES:
        listed = any(fnmatch.fnmatchcase(name, pattern) for pattern in ELSEWHERE)
        assert listed or "=" not in text or name.partition(".")[0] in CALLS, name
