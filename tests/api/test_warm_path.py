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

BUDGET = 6  # files that a repeated call enters
WITHOUT_KERNEL = {"dequantise pages", "concat", "positions", "merge"}  # torch operations


def files_entered(call: Callable[[], Any]) -> list[str]:
    """Return the files of the package whose functions a call enters, in the order of the first entry."""
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered[frame.f_code.co_filename] = None

    gc.disable()  # whose finalizers would count
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    paths = map(Path, entered)
    return [str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE)]


@pytest.mark.parametrize("name", ENTRIES)
def test_files_that_a_repeated_call_enters(name: str) -> None:
    driver, entry = NullDriver(), ENTRIES[name]
    tensors = {key: x.clone() for key, x in entry.tensors.items()}
    with pretended(driver):
        call = entry.begin(tensors, "auto")
        first = files_entered(lambda: call(tensors))
        for _ in range(WARM):
            call(tensors)
        before = driver.launches
        entered = files_entered(lambda: call(tensors))
    assert (driver.launches > before) is (name not in WITHOUT_KERNEL)
    assert len(entered) <= BUDGET, " ".join(entered)
    assert name in WITHOUT_KERNEL or len(first) > len(entered)  # checks, and the choice of a kernel
