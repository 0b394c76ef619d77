"""Corrupted batches: each raises an error of the library or is valid; the process survives either way."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cute_attn import ArgumentError, ArgumentTypeError, NotSupported
from tests.support.batch_case import (
    E4M3,
    BatchCase,
    decode,
    dims,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    run_arguments,
    wrapper,
)
from tests.support.case import shifted

EXPECTED = (ArgumentError, ArgumentTypeError, NotSupported)

BASES = (
    paged((5, 0, 17), (40, 3, 33), page_size=4, mask="causal", **heads(4, 2)),
    paged((5, 0, 17), (40, 3, 33), page_size=1, cache="one", kv_layout="HND", **heads(4, 2)),
    paged((9, 4), (33, 18), cache="strided", mask="custom", slack=True, **heads(4, 2)),
    paged((9, 4), (33, 18), mask="packed", kv_dtype=E4M3, k_scale=0.5, **heads(4, 2)),
    paged((9, 4), (33, 18), kv_dtype="nvfp4", sinks=True, **heads(4, 2)),
    ragged((9, 0, 4), (33, 7, 18), mask="causal", slack=True, **heads(4, 2)),
    ragged((9, 4), (33, 18), kv_layout="HND", cache="strided", mask="packed", **dims(128)),
    decode((65, 0, 12), **heads(4, 2), **dims(128), q_scale=0.5, tensor_scales=True),
    decode((65, 1, 12), q_len=2, page_size=4, cache="list", fixed_split_size=3, **heads(8, 2)),
)


@dataclass
class Call:
    """Arguments of the constructor, of `plan` and of `run`, by name."""

    case: BatchCase
    make: dict[str, Any]
    plan: dict[str, Any]
    run: dict[str, Any]

    def execute(self, device: str) -> None:
        made = wrapper(self.case, device, **self.make)
        made.plan(**self.plan)
        made.run(**self.run)


@dataclass
class Outcomes:
    raised: int = 0
    valid: int = 0
    names: Counter[str] = field(default_factory=Counter)  # corruptions that raised


class Corruption(NamedTuple):
    name: str
    apply: Callable[[Call, random.Random], None]


def run(count: int, device: str = "cpu", **make_arguments: Any) -> Outcomes:
    """`count` corrupted calls. Anything but a good run or an error of the library is raised here."""
    outcomes = Outcomes()
    whole = [(case, make(case, device)) for case in BASES]
    for seed in range(count):
        rng = random.Random(seed)
        case, inputs = whole[seed % len(whole)]
        names = ("q", "paged_kv_cache") if case.paged else ("q", "k", "v")
        arguments = {**run_arguments(case, inputs), **dict(zip(names, (inputs.q, *inputs.kv), strict=True))}
        call = Call(case, dict(make_arguments), plan_arguments(case, inputs), arguments)
        chosen = [rng.choice(CORRUPTIONS) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        for corruption in chosen:
            with contextlib.suppress(AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # no such tensor
                corruption.apply(call, rng)
        try:
            call.execute(device)
        except EXPECTED:
            outcomes.raised += 1
            outcomes.names.update(corruption.name for corruption in chosen)
        except Exception as error:
            names = ", ".join(corruption.name for corruption in chosen)
            raise AssertionError(f"seed {seed}, {case.id}: {names}: {type(error).__name__}: {error}") from error
        else:
            outcomes.valid += 1
    return outcomes


# ---- what may be corrupted


BOUNDS = ("qo_indptr", "kv_indptr", "paged_kv_indptr", "indptr")
LAST = ("paged_kv_last_page_len", "last_page_len")
PAGES = ("paged_kv_indices", "indices")
NUMBERS = (-1, -7, 0, 1, 2, 3, 5, 100, 4096, 1 << 20, (1 << 31) - 1, -(1 << 31))


def _number(names: tuple[str, ...]) -> Callable[[Call, random.Random], None]:
    def apply(call: Call, rng: random.Random) -> None:
        present = [name for name in names if isinstance(call.plan.get(name), torch.Tensor)]
        name = rng.choice(present)
        if call.plan[name].numel():
            changed = call.plan[name].clone()
            for _ in range(rng.choice((1, 1, 3))):
                changed.view(-1)[rng.randrange(changed.numel())] = rng.choice(NUMBERS)
            call.plan[name] = changed

    return apply


def _changed(x: torch.Tensor, rng: random.Random) -> Any:
    """Return another dtype, rank, length, place, order or device, or no tensor."""
    return rng.choice(
        (
            lambda: x[1:],
            lambda: x[:0],
            lambda: torch.cat((_bytes(x), _bytes(x))).view(x.dtype) if x.dim() else x,
            lambda: x.flip(0),
            lambda: x.repeat_interleave(2)[::2],
            lambda: x[..., :-1],
            lambda: x[..., : x.shape[-1] // 2],
            lambda: x[..., ::2],
            lambda: x.transpose(-1, -2),
            lambda: x.transpose(0, 1),
            lambda: x[None],
            lambda: x[0],
            lambda: x.flatten(),
            lambda: x.to(torch.float32),
            lambda: x.to(torch.float64),
            lambda: x.to(torch.bfloat16),
            lambda: x.view(torch.uint8),
            lambda: x.to(torch.int32),
            lambda: x.to(torch.int16),
            lambda: x.bool(),
            lambda: x.double() * torch.nan,
            lambda: x.to(torch.float8_e5m2),
            lambda: x.to("meta"),
            lambda: x.to("cpu"),
            lambda: x[:, 1:],
            lambda: x[:, :1],
            lambda: x.unsqueeze(1),
            lambda: None,
            lambda: x.shape,
            lambda: x.tolist(),
            lambda: "tensor",
            lambda: shifted(x),
            lambda: x.float().requires_grad_().to(x.dtype) if x.dtype.itemsize == 2 else x,
            lambda: x.expand(2, *x.shape)[0],
        )
    )()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _form(call: Call, rng: random.Random) -> None:
    """Another form of a tensor, or of one of a pair of them, or another pair."""
    given = rng.choice((call.plan, call.run, call.run))
    name = rng.choice([name for name, x in given.items() if isinstance(x, torch.Tensor | tuple | list)])
    if isinstance(given[name], torch.Tensor):
        given[name] = _changed(given[name], rng)
        return
    halves = list(given[name])
    half = rng.randrange(len(halves))
    halves[half] = _changed(halves[half], rng)
    given[name] = rng.choice((halves, tuple(halves), halves[:1], (*halves, None), halves[::-1]))


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 1 << 40, -(1 << 40), 0.0, 1.5, -2.5, float("nan"), float("inf"), 1e300),
    *("", "NONE", "ALIBI", "float16", "bfloat16", "float32", "uint8", "float8_e4m3fn", "NHD", "auto", "fa2", "x"),
    *(torch.float16, torch.bfloat16, torch.float32, torch.int32, (1, 2), [3], {}, object()),
)
MASKS = tuple(torch.ones(n, dtype=dtype) for n in (0, 7, 64, 369, 381) for dtype in (torch.bool, torch.uint8))
SCALARS = tuple(torch.zeros(n, device=d) for n in (0, 1, 2, 4, 8) for d in ("cpu", "meta"))
TENSORS = {"self", "q", "k", "v", "paged_kv_cache", "args", *BOUNDS, *LAST, *PAGES}


def _option(method: str, values: tuple[Any, ...]) -> Callable[[Call, random.Random], None]:
    """Another value of a keyword of a wrapper's method."""

    def apply(call: Call, rng: random.Random) -> None:
        accepted = inspect.signature(getattr(type(wrapper(call.case, "cpu")), method)).parameters
        getattr(call, method)[rng.choice([name for name in accepted if name not in TENSORS])] = rng.choice(values)

    return apply


def _make_option(call: Call, rng: random.Random) -> None:
    call.make[rng.choice(("use_cuda_graph", "backend", "jit_args"))] = rng.choice(VALUES)


def _buffers(call: Call, rng: random.Random) -> None:
    """Outputs of the caller, of which one has another form, or is the query."""
    shape = (call.case.rows, call.case.num_qo_heads, call.case.head_dim_vo)
    device = call.run["q"].device
    given = {
        "out": torch.zeros(shape, dtype=torch.float16, device=device),
        "lse": torch.zeros(shape[:2], device=device),
    }
    name = rng.choice(("out", "lse"))
    call.run |= {name: rng.choice((_changed(given[name], rng), call.run["q"]))}


def _swap(call: Call, rng: random.Random) -> None:
    """Another layout than the tensors have."""
    call.case = dataclasses.replace(call.case, kv_layout="HND" if call.case.kv_layout == "NHD" else "NHD")


CORRUPTIONS = (
    *(Corruption("bounds", _number(BOUNDS)),) * 3,
    *(Corruption("last page", _number(LAST)),) * 2,
    *(Corruption("page numbers", _number(PAGES)),) * 3,
    *(Corruption("form of a tensor", _form),) * 7,
    *(Corruption("option of plan", _option("plan", (*VALUES, *MASKS))),) * 3,
    *(Corruption("option of run", _option("run", (*VALUES, *SCALARS))),) * 2,
    Corruption("option of the constructor", _make_option),
    Corruption("outputs", _buffers),
    Corruption("layout", _swap),
)
