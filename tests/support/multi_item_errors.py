"""Bad arguments of multi-item scoring in plans of the prefill wrappers, and the errors that say so."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.error_rows import ints, refused, workspace, wrong_type, zeros

ITEMS: dict[str, Any] = {  # a good call: kv_len - prefix_len is 5, 0 and 3
    "prefix_len_ptr": ints(2, 0, 1),
    "token_pos_in_items_ptr": ints(0, 1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1, 2),
    "token_pos_in_items_len": 5,
    "max_item_len_ptr": ints(2, 0, 2),
}

JUMP = ints(0, 1, 0, 2, 3, 0, 0, 0, 0, 0, 0, 1, 2)
MULTI_ITEM = [
    *(
        row._replace(arguments={**ITEMS, **row.arguments})
        for row in (
            wrong_type({"prefix_len_ptr": [2, 0, 1]}, "prefix_len_ptr must be a torch.T"),
            refused({"prefix_len_ptr": zeros(3)}, "prefix_len_ptr must have", "float16"),
            refused({"prefix_len_ptr": ints(2, 0, 1)[None]}, "prefix_len_ptr", "1 dimension"),
            refused({"prefix_len_ptr": ints(2, 0)}, "[batch_size] = (3,), got 2 elements"),
            refused({"prefix_len_ptr": ints(2, -1, 0)}, "must not be negative, got -1"),
            refused({"prefix_len_ptr": ints(2, 0, 1).to("meta")}, "prefix_len_ptr", "meta"),
            refused({"max_item_len_ptr": ints(3)}, "max_item_len_ptr must have shape"),
            refused({"max_item_len_ptr": ints(2, 0, 1)}, "request 2 has 1", "token at 2"),
            refused({"token_pos_in_items_len": 4}, "at least kv_len", "request 0 needs 5, got 4"),
            refused({"token_pos_in_items_len": -1}, "must be at least 0, got -1"),
            refused({"token_pos_in_items_ptr": ints(*range(11))}, "the 13 elements", "11"),
            refused(
                {"token_pos_in_items_ptr": JUMP}, "must not grow by more than 1", "got 2 after 0 (request 0, key 5)"
            ),
            refused({"custom_mask": torch.ones(29, dtype=torch.bool)}, "contradict"),
            refused({"packed_custom_mask": workspace(4)}, "contradict", "prefix_len_ptr"),
        )
    ),
]
