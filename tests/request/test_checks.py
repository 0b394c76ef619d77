"""Checks that several functions share: tensors whose memory is not their values, what messages show, which tensors
share memory, and alignment; what is accepted though it looks odd. All calls: `tests/request/test_stored.py`,
`tests/api/test_shared_memory.py`.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import BatchDecodeWithSharedPrefixPagedKVCacheWrapper, single_prefill_with_kv_cache
from cute_attn.errors import ArgumentError, NotSupported
from cute_attn.request import checks, operands
from tests.support.entry_points import ENTRIES, ints, randn

SINGLE = {name: ENTRIES["single prefill"].tensors[name] for name in "qkv"}


def test_views_of_complex_numbers() -> None:
    z = torch.ones(4, dtype=torch.complex64)
    with pytest.raises(ArgumentError, match="conjugate view"):
        checks.tensor("x", z.conj())
    with pytest.raises(ArgumentError, match="negative view"):
        checks.tensor("x", z.conj().imag)
    assert checks.tensor("x", z.real).dtype == torch.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda attention, q: torch.vmap(attention)(torch.stack((q, q))),
        lambda attention, q: torch.func.grad(attention)(q),
        lambda attention, q: attention(torch.nested.nested_tensor([q, q[:2]])),
    ],
    ids=["vmap", "grad", "nested"],
)
def test_tensors_of_transforms(call: Any) -> None:
    with pytest.raises((ArgumentError, NotSupported), match=r"\bq\b"):
        call(lambda q: single_prefill_with_kv_cache(**SINGLE | {"q": q}), SINGLE["q"])


def test_names_are_those_of_the_call() -> None:
    made = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.zeros(1 << 16, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match=r"^unique_kv_last_page_len must"):
        made.begin_forward(ints(0, 1, 2), ints(0, 1), ints(16, 99), 4, 2, 64, 16)
    error = ArgumentError("out must not run out of q_len; q_len_per_req and x.q_len are others")
    checks.rename(error, {"out": "output", "q_len": "rows"})
    assert str(error) == "output must not run out of rows; q_len_per_req and x.q_len are others"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (list(range(10**6)), "[0, 1, 2, 3, ...] (list)"),
        (tuple(range(10**6)), "(0, 1, 2, 3, ...) (tuple)"),
        ([torch.zeros(10**6)], "(list)"),
        ("x" * 10**6, "(str)"),
        (10**4000, "(int)"),
        (2.5, "2.5 (float)"),
        (None, "None (NoneType)"),
    ],
    ids=["list", "tuple", "list of tensors", "str", "int", "float", "None"],
)
def test_messages_are_bounded(value: object, text: str) -> None:
    assert checks.describe(value).endswith(text)
    assert len(checks.describe(value)) < 160


# ---- memory


def bytes_of(memory: torch.Tensor, x: torch.Tensor) -> set[int]:
    """Returns the bytes of memory that a view of it covers."""
    memory.zero_()
    x.fill_(-1)
    return set(memory.view(torch.uint8).nonzero().flatten().tolist())


def test_shared_bytes_are_found() -> None:
    choose, memory, shared = random.Random(0), torch.zeros(400, dtype=torch.int16), [0, 0]
    for _ in range(400):
        page, token = choose.choice([(64, 16), (64, 8), (40, 8), (16, 64)]), choose.choice([1, 3, 4])
        x, y = (
            memory.as_strided((choose.randint(1, 3), choose.randint(1, 2), width), (*page, 1), choose.randint(0, 90))
            for width in (token, choose.choice([token, 4]))
        )
        meet = bool(bytes_of(memory, x) & bytes_of(memory, y))
        shared[meet] += 1
        with pytest.raises(ArgumentError, match="y must not share memory with x") if meet else nullcontext():
            checks.apart((("x", x), ("y", y)))
    assert min(shared) > 50


# ---- what only concerns memory that a GPU reads


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("tensor", "aligned"),
    [
        (halves(7, 2, 16), True),
        (halves(7, 2, 24)[..., 8:], True),
        (halves(7, 2, 24)[..., 4:20], False),  # address
        (halves(7, 2, 20)[..., :16], False),  # head stride
        (torch.as_strided(halves(500), (7, 2, 16), (36, 16, 1)), False),  # token stride
        (torch.as_strided(halves(500), (1, 2, 16), (3, 16, 1)), True),  # an axis of 1 has no step
        (torch.as_strided(halves(500), (7, 1, 16), (16, 3, 1)), True),
    ],
)
def test_alignment_of_rows(tensor: torch.Tensor, aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are refused, and queries copied."""
    assert operands.aligned(tensor) is aligned
    monkeypatch.setattr(operands, "KERNEL_DEVICES", ("cpu",))
    for q in (tensor.normal_(), halves(7, 2, 32).normal_()[..., ::2]):
        read = _readable(q, halves(*q.shape))
        assert (read is q) == (aligned and q.stride(-1) == 1)
        assert read.stride(-1) == 1
        assert operands.aligned(read)
        assert torch.equal(read, q)
    if aligned:
        _readable(halves(*tensor.shape), tensor)
        return
    with pytest.raises(ArgumentError, match="v must start at a multiple of 16 bytes") as error:
        _readable(halves(*tensor.shape), tensor)
    assert "multiples of 8 elements" in str(error.value)
    assert str(tensor.stride()) in str(error.value)


def _readable(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k = halves(*v.shape)
    return operands.readable(q, k, v, operands.placement(q, k, v))


# ---- what is accepted, though it looks odd


def test_gradients_are_no_matter_without_grad_mode() -> None:
    arguments = {**SINGLE, "q": randn(8, 4, 64).requires_grad_(), "sinks": torch.zeros(4, requires_grad=True)}
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
        {"v_scale": torch.ones(1, 1).half()},
        {"sinks": torch.zeros(8)[::2]},
        {"sinks": torch.zeros(4).bfloat16()},
        {"k": randn(32, 1, 64).expand(32, 2, 64)},
        {"v": randn(32, 2, 9)},
        {"packed_custom_mask": torch.ones(64, dtype=torch.uint8)[::2]},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_accepted(arguments: dict[str, Any]) -> None:
    assert torch.isfinite(single_prefill_with_kv_cache(**{**SINGLE, **arguments})).all()
