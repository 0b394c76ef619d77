"""Check the arguments of `BatchPrefillWithCausalBidirectionalRangesWrapper`: a range of keys per query token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError
from cute_attn.request import checks

NAME = "bidirectional_ranges"
OF_MASKS: dict[str, Any] = {  # arguments of `plan`, with their defaults
    **dict.fromkeys(("custom_mask", "packed_custom_mask")),
    "causal": False,
    "window_left": -1,
    "token_pos_in_items_len": 0,
    **dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr")),
}


class KeyRanges(NamedTuple):
    """Ranges and windows of a run as the user gave them."""

    ranges: Any
    causal_window_left: Any
    range_window_left: Any

    def tensor(self, rows: int, device: torch.device) -> torch.Tensor:
        """Return the ranges, which the kernel reads where they are."""
        ranges = checks.operand(NAME, self.ranges, (torch.int32,), (rows, 2), "[rows of q, 2]", device)
        checks.contiguous(NAME, ranges)
        if ranges.data_ptr() % 8:
            raise checks.wrong(f"{NAME} must be 8-byte aligned", ranges)
        return ranges

    def windows(self) -> tuple[int, int]:
        """Return `Settings.range_windows`."""
        causal = checks.whole("causal_window_left", self.causal_window_left)
        return max(-1, causal), max(-1, checks.whole("range_window_left", self.range_window_left))


def check_plan(given: dict[str, Any], made_for: dict[str, Any]) -> None:
    """Refuse arguments of `plan` that describe a mask, which ranges and windows of a run do, and those that are not the
    constructor's (`made_for`); None names nothing.
    """
    for name, default in OF_MASKS.items():
        value = given[name]
        if value is not default and value != default:
            raise ArgumentError(
                f"{name} must be {default}, got {checks.shown(value)}: the mask is causal with the ranges of run(), "
                "whose causal_window_left and range_window_left are its windows"
            )
    for name in made_for:
        value = given[name]
        made = made_for["q_data_type" if name == "o_data_type" and made_for[name] is None else name]
        if value is not None and checks.named_dtype(value) != checks.named_dtype(made):
            raise ArgumentError(
                f"{name} must be {checks.shown(made)}, which the constructor was given, got {checks.shown(value)}"
            )
