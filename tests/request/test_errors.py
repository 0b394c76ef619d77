"""Arguments of single calls that are refused, or accepted though they look odd; rows of bad values: test_bad_input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import (
    ArgumentError,
    single_prefill_with_kv_cache,
)
from cute_attn.request import operands
from tests.support.error_rows import FLOAT, HALF, prefill_arguments, with_grad, zeros

# ---- what only concerns memory that a GPU reads


@pytest.mark.parametrize(
    ("tensor", "aligned"),
    [
        (zeros(7, 2, 16), True),
        (zeros(7, 2, 24)[..., 8:], True),
        (zeros(7, 2, 24)[..., 4:20], False),  # address
        (zeros(7, 2, 20)[..., :16], False),  # head stride
        (torch.as_strided(zeros(500), (7, 2, 16), (36, 16, 1)), False),  # token stride
        (torch.as_strided(zeros(500), (1, 2, 16), (3, 16, 1)), True),  # an axis of 1 has no step
        (torch.as_strided(zeros(500), (7, 1, 16), (16, 3, 1)), True),
    ],
)
def test_alignment_of_rows(tensor: torch.Tensor, aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert operands.aligned(tensor) is aligned
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    if aligned:
        _readable(tensor)
        return
    with pytest.raises(ArgumentError, match="v must start at a multiple of 16 bytes") as error:
        _readable(tensor)
    assert "multiples of 8 elements" in str(error.value)
    assert str(tensor.stride()) in str(error.value)


def _readable(v: torch.Tensor) -> None:
    q = torch.zeros(v.shape, dtype=v.dtype)
    operands.readable(q, q, v, operands.placement(q, q, v))


# ---- what is accepted, though it looks odd


def test_gradients_are_no_matter_without_grad_mode() -> None:
    arguments = {**prefill_arguments(), "q": with_grad(3, 4, 16), "sinks": with_grad(4, dtype=FLOAT)}
    with torch.no_grad():
        assert not single_prefill_with_kv_cache(**arguments).requires_grad
    with torch.inference_mode():
        single_prefill_with_kv_cache(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"window_left": np.int64(2)},
        {"window_left": -7},
        {"window_left": 10**30},
        {"sm_scale": np.float32(0.5)},
        {"sm_scale": 1},
        {"sm_scale": 0},
        {"logits_soft_cap": -1.0},
        {"k_scale": torch.tensor(0.5)},
        {"v_scale": torch.ones(1, 1, dtype=HALF)},
        {"sinks": zeros(8)[::2]},
        {"sinks": zeros(4, dtype=torch.bfloat16)},
        {"k": zeros(7, 1, 16).expand(7, 2, 16)},
        {"v": zeros(7, 2, 9)},
        {"packed_custom_mask": zeros(6, dtype=torch.uint8)[::2]},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_accepted(arguments: dict[str, Any]) -> None:
    assert torch.isfinite(single_prefill_with_kv_cache(**{**prefill_arguments(), **arguments})).all()
