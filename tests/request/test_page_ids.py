"""CUTE_ATTN_VALIDATE=1 looks at page numbers before a launch."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.dispatch.reference import ReferenceRun
from cute_attn.problem import BatchLengths, BatchProblem
from cute_attn.request import caches
from tests.support.batch_case import call, make, paged, plan_arguments, wrapper
from tests.support.formula import assert_batch_right


def check(
    indices: list[int], pages: int = 6, start: tuple[int, ...] = (1, 4, 4), lens: tuple[int, ...] = (9, 0, 4)
) -> None:
    """Requests of 3, 0 and 1 pages of 4 tokens."""
    lengths = BatchLengths(np.zeros(4, np.int64), np.array(start), np.array(lens), np.zeros(3, np.int64))
    problem = types.SimpleNamespace(
        settings=types.SimpleNamespace(page_size=4, window_left=-1),
        q=torch.empty(0),
        k=torch.empty(pages, 4, 1, 8),
        kv_indices=torch.tensor(indices, dtype=torch.int32),
    )
    caches.check_pages(problem, lengths)  # type: ignore[arg-type]


def test_good_pages() -> None:
    check([99, 0, 5, 3, 2, -1])  # what no request has may be anything
    check([], lens=(0, 0, 0), start=(0, 0, 0))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 0, 6, 3, 2], r"paged_kv_indices\[2\], page 1 of request 0, is 6; the cache has pages 0\.\.5"),
        ([0, 0, 5, 3, -1], r"paged_kv_indices\[4\], page 0 of request 2, is -1"),
        ([0, 0, 5, 2147483647, 99], r"paged_kv_indices\[3\], page 2 of request 0, is 2147483647"),
    ],
)
def test_bad_pages(indices: list[int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check(indices)


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False), (None, False)])
def test_validation_is_enabled_by_a_variable(value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation precedes the launch."""
    monkeypatch.delenv("CUTE_ATTN_VALIDATE", raising=False)
    if value is not None:
        monkeypatch.setenv("CUTE_ATTN_VALIDATE", value)
    case = paged((3,), (9,), page_size=4)
    inputs = make(case)
    made = wrapper(case)
    made.plan(**{**plan_arguments(case, inputs), "paged_kv_indices": torch.tensor([0, 77, 1])})
    launched: list[BatchProblem] = []
    made._planned().launch = ReferenceRun(launched.append)
    if wanted:
        with pytest.raises(ArgumentError, match="page 1 of request 0, is 77"):
            call(case, inputs, made)
    else:
        call(case, inputs, made)
    assert len(launched) == (not wanted)


@pytest.mark.parametrize("page", [1 << 32, (1 << 31) + 1, -2])
def test_wide_page_numbers_do_not_wrap(page: int) -> None:
    """As int32 the first would be page 0, which exists."""
    case = paged((3,), (9,), page_size=4)
    arguments = plan_arguments(case, make(case))
    name = "paged_kv_indices"
    indices = arguments[name].long()
    used = int(arguments["paged_kv_indptr"][-1])
    indices[used - 1] = page
    said = rf"{name}\[{used - 1}\] must be a page within 0\.\.2147483647, or -1 where no query sees it, got {page}"
    with pytest.raises(ArgumentError, match=said):
        wrapper(case).plan(**{**arguments, name: indices})


def test_unused_wide_page_numbers_are_accepted() -> None:
    case = paged((3,), (9,), page_size=4, indices="int64", slack=True)
    inputs = make(case)
    arguments = plan_arguments(case, inputs)
    bounds = arguments["paged_kv_indptr"].tolist()
    indices = arguments["paged_kv_indices"].clone()
    indices[: bounds[0]] = indices[bounds[-1] :] = 1 << 40
    made = wrapper(case)
    made.plan(**{**arguments, "paged_kv_indices": indices})
    assert_batch_right(case, inputs, *call(case, inputs, made))


def test_wide_page_numbers_on_a_device_saturate() -> None:
    """Without a synchronisation nothing can be raised, but validation must see that they are no pages."""

    class OnDevice(torch.Tensor):
        is_cpu = False

    wide = torch.tensor([3, 1 << 32, -(1 << 40), (1 << 31) - 1])
    assert caches.as_int32(wide.as_subclass(OnDevice), torch.device("cpu")).tolist() == [3, 2**31 - 1, -1, 2**31 - 1]
