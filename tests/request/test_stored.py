"""What no call takes for a tensor, in first and repeated calls alike: what is none, other devices, dtypes, axes and
sizes, one that wants derivatives, one whose memory does not hold its values or is off alignment, and to write, one that
overlaps itself.

Entries replay repeated calls (`calls.replay`), but for those of `entry_points.OTHERS`, and while forward-mode AD is on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import forward_ad

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.request import operands
from perf.pretended_gpu import NullDriver
from tests.support.case import shifted
from tests.support.entry_points import E4M3, ENTRIES, NEW_RESULTS, OTHER_NAMES, OTHERS
from tests.support.launch_corpus import pretended


class Wrong(NamedTuple):
    """How a tensor is made wrong, and the error, where NAME stands for the tensor or the argument that it is a part of.
    `but`: names of tensors that may be so. `fits`: which tensors can be made so.
    """

    made: Callable[[torch.Tensor], Any]
    message: str
    but: str = ""
    fits: Callable[[torch.Tensor], bool] = lambda x: True


BY_TORCH = ("dequantise pages", "concat", "merge")  # whose operations take tangents
UNREAD = {("trtllm fmha, pages", "cum_seq_lens_kv"), ("trtllm context", "cum_seq_lens_kv")}
ALIGNED = r"[kv]( of kv_cache)?|(the |kv_|[kv]_|ckv_|kpe_)cache|key|value|out(put)?|ckv_scale_arr|bidirectional_ranges"
SCRATCH, OVERLAPPING = "workspace_buffer|semaphores", "overlapping itself"


WRONG = {
    "no tensor": Wrong(lambda x: "x", "^NAME must .*got 'x'|^the positional arguments .* must be scale_q, scale_k"),
    "another device": Wrong(lambda x: x.to("meta"), "NAME.*meta"),
    "another dtype": Wrong(
        lambda x: torch.zeros(x.shape, dtype=torch.complex64),
        "NAME.*(dtype|floating-point|must be a bool).*complex64",
        SCRATCH,
    ),
    "another axis": Wrong(
        lambda x: x[None], "NAME.*(shape|dimension|batch_size, 2)", rf"{SCRATCH}|mask|output|q|sinks|\w*_scale(_log2)?"
    ),
    "half as wide": Wrong(
        lambda x: x[..., : x.shape[-1] // 2].contiguous(),
        "(shape.*|head dimension,|columns,|same last axis,) got|stay within|sums of seq_lens|(elements|one length) for",
        f"{SCRATCH}|block_tables|page_table|slot_mapping",
        lambda x: x.shape[-1] > 1,
    ),
    "derivatives": Wrong(
        lambda x: x.detach().clone().requires_grad_(),
        "^NAME (requires|.*not require) grad",
        fits=torch.is_floating_point,
    ),
    "a tangent": Wrong(
        lambda x: forward_ad.make_dual(x, torch.ones_like(x)),
        "^NAME has a tangent of forward-mode AD",
        "[sv]_other",
        torch.is_floating_point,
    ),
    "a negative view": Wrong(torch._neg_view, "^NAME must .*be a negative view", fits=torch.is_floating_point),
    # torch has no sparse tensors of 8-bit floats
    "a sparse tensor": Wrong(
        torch.Tensor.to_sparse, "^NAME must .*(be a strided tensor|at equal distances)", fits=lambda x: x.dtype != E4M3
    ),
    "off alignment": Wrong(
        lambda x: shifted(x, 4),
        "^NAME must (start at a multiple of (8|16) bytes|be 8-byte aligned)",
        f"(?!({ALIGNED})$).*",
    ),
    # of what is written
    OVERLAPPING: Wrong(
        lambda x: x[:1].expand(x.shape), "^NAME must (not overlap itself|be contiguous)", fits=lambda x: len(x) > 1
    ),
}


# Where two tensors must agree the error names the other one.
AGREES_WITH = {
    **dict.fromkeys((("another device", "block_tables"), ("another device", "append_indptr")), "seq_lens"),
    **{("another dtype", name): "the(?= dtype of k and v)" for name in ("k of kv_cache", "k", "key", "the cache")},
    ("another axis", "fp4_data"): "block_scales",
    ("another dtype", "ckv_cache"): "append_ckv",
    ("another dtype", "kpe_cache"): "append_kpe",
}


def assert_refused(
    call: Callable[[dict[str, Any]], Any], given: Mapping[str, torch.Tensor], name: str, *but: str
) -> None:
    """Every way in which the tensor is wrong is refused, `but` some."""
    x, whole = given[name], re.escape(name.split(" of ")[-1].partition("[")[0])
    called = rf"({OTHER_NAMES.get(name, whole)}|([kv](_sf)? of )?(paged_kv_cache|{whole})(\[[01]\])?)( of \w+)?"
    for kind, wrong in WRONG.items():
        if kind not in but and wrong.fits(x) and not re.fullmatch(wrong.but, name):
            message = wrong.message.replace("NAME", f"({called}|{AGREES_WITH.get((kind, name), called)})")
            # other kinds outside of forward-mode AD, under which no call is replayed
            level = forward_ad.dual_level() if kind == "a tangent" else contextlib.nullcontext()
            with level, pytest.raises((ArgumentError, ArgumentTypeError), match=message):
                call({**given, name: wrong.made(x)})


@pytest.mark.parametrize("entry", NEW_RESULTS)
def test_functions_without_outputs(entry: str) -> None:
    given = NEW_RESULTS[entry].tensors
    call = NEW_RESULTS[entry].begin(given)
    call(given)
    wanted = ("derivatives", "a tangent") if "merge" in entry else ()  # which torch's operations take
    for name in given:
        assert_refused(call, given, name, OVERLAPPING, "another device", "half as wide", "off alignment", *wanted)


@pytest.mark.parametrize("entry", ENTRIES)
def test_first_and_repeated_calls(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    but = ["a tangent"] * (entry in BY_TORCH) + ["off alignment"] * (entry in OTHERS)
    with pretended(NullDriver()):
        call, given = ENTRIES[entry].begin(ENTRIES[entry].tensors, "auto"), ENTRIES[entry].on("cpu")
        for calls in (0, 3):
            for _ in range(calls):
                call(given)
            for name in given.keys() - {*ENTRIES[entry].planned}:
                if (entry, name) not in UNREAD:
                    assert_refused(call, given, name, *but, *[OVERLAPPING] * (name not in ENTRIES[entry].written))
            for name in given.keys() & {"q", "query", "q_nope", "q_pe"}:
                call({**given, name: shifted(given[name], 4)})  # is copied
