"""The cascade wrapper against attention over each request's own keys, put together from its levels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import cute_attn
from cute_attn.errors import ArgumentError, ArgumentTypeError, LayoutError, NotPlannedError, NotSupported
from tests.support.paged_cache import Pages, ends

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
QO_LENS = [3, 1, 4, 2]
# By level: which requests share a group, and the keys of the group.
LEVELS = [([0, 0, 0, 0], [13]), ([0, 0, 1, 1], [5, 8]), ([0, 1, 2, 3], [7, 1, 4, 9])]


class Shared:
    """A batch whose requests share the keys of LEVELS[:-1]."""

    def __init__(self, layout: str = "NHD", levels: list[tuple[list[int], list[int]]] = LEVELS) -> None:
        self.layout, generator = layout, torch.Generator().manual_seed(0)
        self.q = torch.randn(sum(QO_LENS), HEADS, DIM).half()
        self.cache, self.keys = torch.empty(0, 2, PAGE, KV_HEADS, DIM).half(), [list[torch.Tensor]() for _ in QO_LENS]
        arrays = []
        for groups, kv_lens in levels:
            pages = Pages(kv_lens, PAGE, generator)
            rows = [sum(q for q, g in zip(QO_LENS, groups, strict=True) if g == i) for i in range(len(kv_lens))]
            arrays.append((ends(rows), pages.indptr, pages.indices + len(self.cache), pages.last_page_len))
            cache = torch.randn(pages.num_pages, *self.cache.shape[1:]).half()
            self.cache, tokens = torch.cat((self.cache, cache)), pages.gather(cache.transpose(1, 2))
            for keys, group in zip(self.keys, groups, strict=True):
                keys.append(tokens[group])
        self.arrays = [*map(list, zip(*arrays, strict=True))]

    def given(self) -> torch.Tensor:
        return self.cache if self.layout == "NHD" else self.cache.transpose(2, 3).contiguous()

    def expected(self, **options: Any) -> torch.Tensor:
        single, requests = cute_attn.single_prefill_with_kv_cache, zip(self.q.split(QO_LENS), self.keys, strict=True)
        return torch.cat([single(q, *torch.cat(keys).unbind(1), **options) for q, keys in requests])


def wrapper(levels: int = 3, layout: str = "NHD") -> cute_attn.MultiLevelCascadeAttentionWrapper:
    return cute_attn.MultiLevelCascadeAttentionWrapper(levels, torch.zeros(1 << 20, dtype=torch.uint8), layout)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 2.0, "sm_scale": 0.5}])
def test_levels_merge_to_attention_over_all_keys(
    layout: str, levels: int, causal: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(levels)
    batch = Shared(layout, LEVELS[3 - levels :])
    cascade = wrapper(levels, layout)
    cascade.plan(*batch.arrays, HEADS, KV_HEADS, DIM, PAGE, causal=causal, **options)
    out = cascade.run(batch.q, batch.given())
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, batch.expected(causal=causal, **options), rtol=3e-3, atol=3e-3)


def test_other_names_and_a_new_plan() -> None:
    batch, cascade = Shared(), wrapper()
    cascade.begin_forward(*batch.arrays, HEADS, KV_HEADS, DIM, PAGE, True, allow_fp16_qk_reduction=True)
    out = cascade.forward(batch.q, batch.given())
    torch.testing.assert_close(out, batch.expected(causal=True), rtol=3e-3, atol=3e-3)
    assert cascade.end_forward() is None
    assert not cascade.is_cuda_graph_enabled
    cascade.plan(*batch.arrays, HEADS, KV_HEADS, DIM, PAGE)
    torch.testing.assert_close(cascade.run(batch.q, batch.given()), batch.expected(), rtol=3e-3, atol=3e-3)
    cascade.reset_workspace_buffer(torch.zeros(1 << 20, dtype=torch.uint8), [torch.zeros(8)] * 3)
    with pytest.raises(NotPlannedError, match=r"plan\(\) must come before run"):
        cascade.run(batch.q, batch.given())


def test_one_level_takes_positions() -> None:
    batch, cascade = Shared(levels=LEVELS[2:]), wrapper(1)
    options = {"pos_encoding_mode": "ALIBI", "window_left": 3, "causal": True}
    cascade.plan(*batch.arrays, HEADS, KV_HEADS, DIM, PAGE, **options)
    out = cascade.run(batch.q, batch.given())
    torch.testing.assert_close(out, batch.expected(**options), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize(
    ("changed", "message", "error"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "cascade refuses pos_encoding_mode='ROPE_LLAMA'", NotSupported),
        ({"pos_encoding_mode": np.zeros(2)}, "pos_encoding_mode must be one of", LayoutError),
        ({"window_left": 8}, "cascade refuses window_left=8: a level knows .* Instead: a paged wrapper", NotSupported),
        ({"paged_kv_indptr_arr": 7}, "paged_kv_indptr_arr must be a list with a tensor for each", ArgumentTypeError),
        ({"paged_kv_indices_arr": []}, "paged_kv_indices_arr must have a tensor for each of 3 levels", ArgumentError),
        (
            {"qo_indptr_arr": [torch.tensor([0, n]) for n in (9, 10, 10)]},
            r"same number .* \[9, 10, 10\]",
            ArgumentError,
        ),
        ({"qo_indptr_arr": [None] * 3}, r"qo_indptr_arr\[0\] must be a torch.Tensor", ArgumentTypeError),
        *(
            ({"qo_indptr_arr": [torch.tensor([0, 10]), array, None]}, rf"qo_indptr_arr\[1\] must {rule}", ArgumentError)
            for array, rule in (
                (torch.tensor(10), "have shape"),
                (torch.tensor([[0, 10]]), "have shape"),
                (torch.tensor([0.0, torch.nan]), "have dtype int32 or int64"),
                (torch.tensor([0, 10], device="meta"), "be on a cpu or cuda device"),
            )
        ),
        ({"causal": 1}, "causal must be True or False", ArgumentTypeError),
        ({"num_kv_heads": 3}, "num_qo_heads", ArgumentError),
    ],
)
def test_bad_plans_are_named_and_leave_none(changed: dict[str, Any], message: str, error: type) -> None:
    batch, cascade = Shared(), wrapper()
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
    good = {**dict(zip(names, batch.arrays, strict=True)), "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS}
    good |= {"head_dim": DIM, "page_size": PAGE}
    cascade.plan(**good)
    with pytest.raises(error, match=message):
        cascade.plan(**{**good, **changed})
    with pytest.raises(NotPlannedError):
        cascade.run(batch.q, batch.given())


@pytest.mark.parametrize("num_levels", [1 << 70, 0, 2.0])
def test_bad_numbers_of_levels_are_named(num_levels: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=r"^num_levels must"):
        wrapper(num_levels)


def test_fixed_buffers_hold_other_lengths() -> None:
    """Buffers of the constructor are those that captured launches read: a new plan changes what is in them."""
    first, second = Shared(), Shared(levels=[([0] * 4, [9]), ([0, 0, 1, 1], [2, 8]), ([0, 1, 2, 3], [3, 2, 5, 6])])
    buffers = [[torch.zeros(len(a), dtype=torch.int32) for a in arrays] for arrays in first.arrays]
    cascade = cute_attn.MultiLevelCascadeAttentionWrapper(
        3, torch.zeros(1 << 20, dtype=torch.uint8), "NHD", True, *buffers
    )
    assert cascade.is_cuda_graph_enabled
    for batch in (first, second):
        cascade.plan(*batch.arrays, HEADS, KV_HEADS, DIM, PAGE, causal=True)
        assert all(map(torch.equal, buffers[1], batch.arrays[1]))
        out = cascade.run(batch.q, batch.given())
        torch.testing.assert_close(out, batch.expected(causal=True), rtol=3e-3, atol=3e-3)
