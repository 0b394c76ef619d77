"""The names, parameters and defaults of FlashInfer 0.7.2's attention modules, against ours.

`tests/support/data/flashinfer_0_7_2.json` holds FlashInfer's: `signatures` of what this library means to have, and
`other_names`. Every name is there, or listed here with a reason for its absence; every parameter has the same place and
default, or is listed here with a reason for the difference.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

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

DIFFERENCES: dict[tuple[str, str], str] = {  # (callable, parameter): why it is not at its place, or has another default
    ("fast_decode_plan", "self"): "the wrapper, which all callers give by position",
    ("BatchPrefill*.run*", "lse_base"): "None is what `plan` said, whose own default is log2",
    ("*.workspace_size", "*"): "takes whatever `plan` takes, and passes it on",
    ("BatchDecodeWithPagedKVCacheWrapper.plan", "q_data_type"): "None means float16 unless `data_type` says otherwise",
    ("BatchDecodeWithPagedKVCacheWrapper.plan", "is_causal"): "queries of a request are always causal among themselves",
    ("*", "variant_owns_mask"): "a property of variants that callers compile",
    ("*.reset_workspace_buffer", "int_workspace_buffer"): "not needed: schedules are in memory of the wrapper",
    ("*.reset_workspace_buffer", "int_workspace_buffers"): "not needed: schedules are in memory of the wrapper",
    ("trtllm_batch_decode_with_kv_cache", "cp_*"): "context parallelism inside the kernel; merge shards by their lse",
    ("trtllm_batch_decode_with_kv_cache", "causal_seqlens_kv_global"): "context parallelism inside the kernel",
    ("trtllm_batch_decode_with_kv_cache", "request_order*"): "a launch order for Cake's kernels",
}


def reason(name: str) -> str:
    return next((text for pattern, text in ABSENT.items() if fnmatch.fnmatchcase(name, pattern)), "")


def difference(name: str, parameter: str) -> str:
    return next(
        (
            text
            for (callables, parameters), text in DIFFERENCES.items()
            if fnmatch.fnmatchcase(name, callables) and fnmatch.fnmatchcase(parameter, parameters)
        ),
        "",
    )


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


@pytest.mark.parametrize(("module", "name", "text"), SIGNATURES, ids=[f"{m}.{n}" for m, n, _ in SIGNATURES])
def test_names_are_here(module: str, name: str, text: str) -> None:
    found = ours(module, name)
    assert found is not None
    assert (text == "property") == isinstance(found, property)
    assert (text == "class") == inspect.isclass(found)


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
        if difference(name, parameter):
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
        renamed = any(difference(name, other) for other in list(theirs.parameters)[place : place + 1])
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


@pytest.mark.parametrize(("module", "name", "text"), CALLABLES, ids=[f"{m}.{n}" for m, n, _ in CALLABLES])
def test_parameters(module: str, name: str, text: str) -> None:
    found = ours(module, name)
    if text == "imported":
        assert callable(found)
        return
    assert problems(name, flashinfers(text), signature(name, found)) == []


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, n, text in SIGNATURES if text == "value"], ids=lambda value: value
)
def test_other_forms(module: str, name: str) -> None:
    """Other names of methods, and forms with `return_lse=True`."""
    found = ours(module, name)
    owner, _, method = name.rpartition(".")
    same = {"begin_forward": "plan", "forward": "run"}.get(method)
    if same is not None:
        assert found is ours(module, f"{owner}.{same}")
    elif isinstance(found, functools.partialmethod | functools.partial):
        assert found.keywords == {"return_lse": True}
    else:
        assert inspect.signature(found).parameters["return_lse"].default is True


def test_reasons_are_used() -> None:
    for pattern in ABSENT:
        assert any(fnmatch.fnmatchcase(name, pattern) for name in OTHERS), pattern
    for callables, parameters in DIFFERENCES:
        used = [
            parameter
            for _, name, text in CALLABLES
            if fnmatch.fnmatchcase(name, callables) and text != "imported"
            for parameter in flashinfers(text).parameters
            if fnmatch.fnmatchcase(parameter, parameters)
        ]
        assert used, (callables, parameters)
