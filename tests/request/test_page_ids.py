"""CUTE_ATTN_VALIDATE=1 looks at page numbers before a launch."""

from __future__ import annotations

import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.dispatch.reference import ReferenceRun
from cute_attn.problem import BatchProblem
from cute_attn.request import caches
from tests.support.batch_case import call, make, paged, plan_arguments, wrapper
from tests.support.formula import assert_batch_right


@pytest.mark.parametrize(
    ("place", "page", "said"), [(3, 7, "1 of request 0"), (5, -1, "0 of request 2"), (4, 2147483647, "2 of request 0")]
)
def test_bad_pages(place: int, page: int, said: str) -> None:
    """Of requests of 3, 0 and 1 pages, in a cache of 7."""
    case = paged((3, 0, 1), (9, 0, 4), page_size=4, slack=True)  # two entries of no request come first
    inputs = make(case)
    arguments = plan_arguments(case, inputs)
    indices = arguments["paged_kv_indices"].clone()
    indices[place] = page
    made = wrapper(case)
    made.plan(**{**arguments, "paged_kv_indices": indices})
    message = rf"paged_kv_indices\[{place}\], page {said}, is {page}; the cache has pages 0\.\.6"
    with pytest.raises(ArgumentError, match=message):
        call(case, inputs, made)


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
