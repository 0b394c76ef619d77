"""Every bad input raises before anything runs: a type that callers can catch, a message that names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import (
    ArgumentError,
    LayoutError,
    NotSupported,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from cute_attn.dispatch import backends
from cute_attn.request import operands
from cute_attn.request import single as single_request
from tests.support.error_rows import FLOAT, HALF, TABLE, Row, decode_arguments, prefill_arguments, with_grad, zeros


@pytest.mark.parametrize(
    ("function", "good", "row"), TABLE, ids=[f"{f.__name__[7:14]}-{row.name}" for f, _, row in TABLE]
)
def test_bad_input(
    function: Callable[..., Any],
    good: Callable[[], dict[str, Any]],
    row: Row,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "run", lambda *args: pytest.fail("ran"))
    arguments = {**good(), **row.arguments}
    if row.name == "rope of an odd head_dim":
        arguments["q"] = arguments["q"][..., :15]
    with pytest.raises(row.error) as error:
        function(**arguments)
    assert type(error.value) is row.error
    assert isinstance(error.value, ValueError)
    for part in row.message:
        assert part in str(error.value)


@pytest.mark.parametrize("good", [prefill_arguments, decode_arguments])
def test_the_arguments_that_rows_change_are_good(good: Callable[[], dict[str, Any]]) -> None:
    arguments = good()
    function = single_prefill_with_kv_cache if arguments["q"].dim() == 3 else single_decode_with_kv_cache
    assert function(**arguments).shape == arguments["q"].shape


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "custom_mask", "packed_custom_mask"])
def test_out_must_not_lie_over_an_input(name: str) -> None:
    pool = torch.zeros(4096, dtype=torch.uint8)
    shape, dtype = {
        "q": ((3, 4, 16), HALF),
        "k": ((7, 2, 16), HALF),
        "v": ((7, 2, 16), HALF),
        "sinks": ((4,), FLOAT),
        "custom_mask": ((3, 7), torch.bool),
        "packed_custom_mask": ((3,), torch.uint8),
    }[name]
    last = 3 * 4 * 16 * 2 - 16  # the last 16 bytes of out
    other = pool[last : last + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    out = pool[: 3 * 4 * 16 * 2].view(HALF).view(3, 4, 16)
    with pytest.raises(ArgumentError, match=f"out must not share memory with {name}"):
        single_prefill_with_kv_cache(**{**prefill_arguments(), name: other}, out=out)


def test_lse_must_not_lie_over_out() -> None:
    pool = torch.zeros(96, dtype=FLOAT)
    out, lse = pool.view(HALF).view(3, 4, 16), pool[84:].view(3, 4)
    with pytest.raises(ArgumentError, match="lse must not share memory with out"):
        single_prefill_with_kv_cache(**prefill_arguments(), out=out, lse=lse)


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


WIDE = torch.randn(3, 4, 32).half()


@pytest.mark.parametrize(
    ("q", "copied"),
    [(WIDE[..., :16], False), (WIDE[..., ::2], True), (WIDE[..., 1:17], True), (WIDE[:, :, 16:], False)],
    ids=["aligned slice", "strided last axis", "misaligned", "second half"],
)
def test_a_query_that_kernels_cannot_read_is_copied(
    q: torch.Tensor, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    problem = single_request.problem(single_request.Call(**{**prefill_arguments(), "q": q}))
    assert (problem.q is not q) == copied
    assert operands.aligned(problem.q)
    assert torch.equal(problem.q, q)


@pytest.mark.parametrize("name", ["k", "v", "out"])
def test_other_misaligned_tensors_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    arguments = prefill_arguments()
    rows = 3 if name == "out" else 7
    heads = 4 if name == "out" else 2
    with pytest.raises(ArgumentError, match=f"{name} must start at a multiple of 16 bytes"):
        single_prefill_with_kv_cache(**{**arguments, name: zeros(rows, heads, 24)[..., 1:17]})


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


# ---- valid, but no backend takes it


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"backend": "fa2"}, ("fa2 refuses cpu tensors", 'backend="reference"')),
        ({"backend": "fa4"}, ("fa4 refuses cpu tensors", 'backend="reference"')),
        ({"backend": "cudnn"}, ("cudnn refuses", "not part of this library")),
    ],
)
def test_refused(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(NotSupported) as error:
        single_prefill_with_kv_cache(**{**prefill_arguments(), **arguments})
    assert isinstance(error.value, (ValueError, NotImplementedError))
    assert error.value.refusals
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("backend", ["fa-2", "", None, 2, ["fa2"], np.array(["auto", "fa2"])], ids=str)
def test_unknown_backend(backend: Any) -> None:
    with pytest.raises(LayoutError, match="backend must be one of 'auto', 'fa4', 'fa3', 'xqa', 'fa2', 'reference'"):
        single_prefill_with_kv_cache(**prefill_arguments(), backend=backend)
    with pytest.raises(LayoutError, match="backend must be one of"):
        single_decode_with_kv_cache(**decode_arguments(), backend=backend)
