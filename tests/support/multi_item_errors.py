"""Bad arguments of multi-item scoring in plans of the prefill wrappers, and the errors that say so."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn import ArgumentError, ArgumentTypeError
from tests.support.error_rows import Row, ints, workspace, zeros

ITEMS: dict[str, Any] = {  # a good call: kv_len - prefix_len is 5, 0 and 3
    "prefix_len_ptr": ints(2, 0, 1),
    "token_pos_in_items_ptr": ints(0, 1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1, 2),
    "token_pos_in_items_len": 5,
    "max_item_len_ptr": ints(2, 0, 2),
}

MULTI_ITEM = [
    Row("items alone", {"prefix_len_ptr": ints(1, 1, 1)}, ArgumentError, ("token_pos_in_items_ptr must come with",)),
    Row("items length alone", {"token_pos_in_items_len": 4}, ArgumentError, ("must come with prefix_len_ptr, got 4",)),
    Row("items length", {"token_pos_in_items_len": 4.0}, ArgumentTypeError, ("token_pos_in_items_len must be an int",)),
    Row("positions alone", {"token_pos_in_items_ptr": ints(0)}, ArgumentError, ("token_pos_in_items_ptr must come",)),
    Row("longest item alone", {"max_item_len_ptr": ints(1)}, ArgumentError, ("max_item_len_ptr must come with",)),
    *(
        Row(name, {**ITEMS, **change}, error, parts)
        for name, change, error, parts in (
            ("items list", {"prefix_len_ptr": [2, 0, 1]}, ArgumentTypeError, ("prefix_len_ptr must be a torch.T",)),
            ("prefix float", {"prefix_len_ptr": zeros(3)}, ArgumentError, ("prefix_len_ptr must have", "float16")),
            ("prefix rank", {"prefix_len_ptr": ints(2, 0, 1)[None]}, ArgumentError, ("prefix_len_ptr", "1 dimension")),
            ("prefix size", {"prefix_len_ptr": ints(2, 0)}, ArgumentError, ("[batch_size] = (3,), got 2 elements",)),
            ("prefix < 0", {"prefix_len_ptr": ints(2, -1, 0)}, ArgumentError, ("must not be negative, got -1",)),
            ("prefix device", {"prefix_len_ptr": ints(2, 0, 1).to("meta")}, ArgumentError, ("prefix_len_ptr", "meta")),
            ("longest size", {"max_item_len_ptr": ints(3)}, ArgumentError, ("max_item_len_ptr must have shape",)),
            ("longest low", {"max_item_len_ptr": ints(2, 0, 1)}, ArgumentError, ("request 2 has 1", "token at 2")),
            ("stride", {"token_pos_in_items_len": 4}, ArgumentError, ("at least kv_len", "request 0 needs 5, got 4")),
            ("stride < 0", {"token_pos_in_items_len": -1}, ArgumentError, ("must be at least 0, got -1",)),
            ("positions size", {"token_pos_in_items_ptr": ints(*range(11))}, ArgumentError, ("the 13 elements", "11")),
            (
                "positions jump",
                {"token_pos_in_items_ptr": ints(0, 1, 0, 2, 3, 0, 0, 0, 0, 0, 0, 1, 2)},
                ArgumentError,
                ("must not grow by more than 1", "got 2 after 0 (request 0, key 5)"),
            ),
            ("items and mask", {"custom_mask": torch.ones(29, dtype=torch.bool)}, ArgumentError, ("contradict",)),
            ("items and bits", {"packed_custom_mask": workspace(4)}, ArgumentError, ("contradict", "prefix_len_ptr")),
        )
    ),
]
