"""How many files of the package a repeated call enters, from the public function to the driver: a budget for each."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import cute_attn
from perf.pretended_gpu import NullDriver
from tests.support.entry_points import ENTRIES
from tests.support.launch_corpus import pretended

PACKAGE = Path(cute_attn.__file__).parent
WARM = 3  # calls until all that is kept is kept

# Files by entry point, all below 7 in the end. Numbers fall and never rise.
SINGLE_PREFILL = 7
SINGLE_PREFILL_WITH_MASK = 17
SINGLE_PREFILL_WITH_SCALES = 16
SINGLE_DECODE = 6
SINGLE_DECODE_WITH_SCALES = 18
PAGED_RUN = RAGGED_RUN = DECODE_RUN = 7
RUN_WITH_SCALES = 15
RUN_WITH_SINKS = 10
MIXED_RUN = 16
BLOCKS_RUN = 12
XQA = 6
XQA_WITH_SCALES, XQA_WITH_DRAFTS = 18, 18
TRTLLM_DECODE = 8
TRTLLM_CONTEXT = TRTLLM_FMHA = 19

BUDGETS = {
    "single prefill": SINGLE_PREFILL,
    "single prefill, mask": SINGLE_PREFILL_WITH_MASK,
    "single prefill, scales": SINGLE_PREFILL_WITH_SCALES,
    "single decode": SINGLE_DECODE,
    "single decode, scales": SINGLE_DECODE_WITH_SCALES,
    "paged": PAGED_RUN,
    "paged, one cache": PAGED_RUN,
    "paged, mask": PAGED_RUN,
    "paged, CUDA graph": PAGED_RUN,
    "paged, scales": RUN_WITH_SCALES,
    "paged with sinks": RUN_WITH_SINKS,
    "ragged": RAGGED_RUN,
    "decode": DECODE_RUN,
    "decode, CUDA graph": DECODE_RUN,
    "decode, scales": RUN_WITH_SCALES,
    "mixed": MIXED_RUN,
    "blocks": BLOCKS_RUN,
    "variable blocks": BLOCKS_RUN,
    "xqa": XQA,
    "xqa, scales and lse": XQA_WITH_SCALES,
    "xqa, drafts": XQA_WITH_DRAFTS,
    "trtllm": TRTLLM_DECODE,
    "trtllm context": TRTLLM_CONTEXT,
    "trtllm fmha": TRTLLM_FMHA,
}


def files_entered(call: Callable[[], Any]) -> list[str]:
    """Return the files of the package whose functions a call enters, in the order of the first entry."""
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered[frame.f_code.co_filename] = None

    gc.disable()  # finalisers of earlier wrappers are no part of the call
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    paths = map(Path, entered)
    return [str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE)]


@pytest.mark.parametrize("name", BUDGETS)
def test_files_that_a_repeated_call_enters(name: str) -> None:
    driver, entry = NullDriver(), ENTRIES[name]
    tensors = {key: x.clone() for key, x in entry.tensors.items()}
    with pretended(driver):
        call = entry.begin(tensors, "auto")
        for _ in range(WARM):
            call(tensors)
        before = driver.launches
        entered = files_entered(lambda: call(tensors))
    assert driver.launches > before
    assert len(entered) <= BUDGETS[name], " ".join(entered)


def test_what_is_entered() -> None:
    """A first call enters the checks and the choice of a kernel."""
    entry = ENTRIES["single prefill"]
    with pretended(NullDriver()):
        call = entry.begin(entry.tensors, "auto")
        entered = files_entered(lambda: call(entry.tensors))
    assert {"prefill.py", "request/single.py", "dispatch/select.py", "runtime/launch.py"} <= set(entered)
