"""`forward`, FlashInfer's older form of `run`, made from the `plan` and the `run` of a wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.compiler import is_dynamo_compiling  # noqa: F401, of `SOURCE`, as are the next two

from cute_attn.ops import declare, trace  # noqa: F401
from cute_attn.request import checks  # noqa: F401

R = TypeVar("R")

REPLACED = frozenset(
    ("causal", "pos_encoding_mode", "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")
)
HINT, OLDER_HINT = HINTS = ("use_fp16_qk_reduction", "allow_fp16_qk_reduction")
BY_POSITION, BY_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
# Compiled: binding the arguments by a general function would take 3 us of a run's 10.
SOURCE = """
def forward({parameters}):
    if is_dynamo_compiling():
        return trace.operator({operator!r})(locals())
    checks.fp16_hint({hints})
    self._replan({options})
    return self.run({of_run})
"""
DOCSTRING = """Run with other options than the planned ones: FlashInfer's older form of `run`.

The options of `plan` below replace the planned ones, given or by default, for this run and those after it: after
`plan(sm_scale=0.1)`, a `forward` without `sm_scale` takes the default. Where they differ, the batch is scheduled again.

Parameters
----------
{of_run} : as for `run`. `forward_return_lse`, where there is one, is `forward` with `return_lse=True` as default.
{options} : options of `plan`, with the same defaults.
use_fp16_qk_reduction, allow_fp16_qk_reduction (its older name), where it has them : hints; scores are always
    accumulated in fp32.

Returns
-------
What `run` returns.

Raises
------
NotPlannedError (no plan yet), and the errors of `plan` and `run`.
"""


def forward_of(
    plan: Callable[..., Any], run: Callable[..., R], order: str, operator: str = "", fake: declare.Fake | None = None
) -> Callable[..., R]:
    """Return the method `forward` of a wrapper.

    `order`: its parameters, each with the default and the annotation that `plan` or `run` gives it; those behind "*"
    are given by keyword. `operator`, `fake`: of the operator that stands for it under Dynamo.
    """
    parameters = _parameters(plan, run, order)
    names = [p.name for p in parameters[1:]]
    options = [name for name in names if name in REPLACED]
    of_run = [name for name in names if name not in REPLACED and name not in HINTS]
    source = SOURCE.format(
        parameters=str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))[1:-1],
        operator=operator,
        hints=_passed(name for name in names if name in HINTS),
        options=_passed(options),
        of_run=_passed(of_run),
    )
    made: dict[str, Callable[..., R]] = {}
    exec(source, globals(), made)
    forward = made["forward"]
    forward.__annotations__ = {p.name: p.annotation for p in parameters[1:]} | {"return": "Result"}
    forward.__qualname__ = f"{run.__qualname__.rpartition('.')[0]}.forward"
    forward.__doc__ = DOCSTRING.format(of_run=", ".join(of_run), options=", ".join(options))
    return declare.operator(operator, fake, mutates=(), is_method=True)(forward) if fake else forward


def _parameters(plan: Callable[..., Any], run: Callable[..., Any], order: str) -> list[inspect.Parameter]:
    of_plan, of_run = inspect.signature(plan).parameters, inspect.signature(run).parameters
    older = inspect.Parameter(OLDER_HINT, BY_KEYWORD, default=None, annotation="bool | None")
    parameters = [of_run["self"]]
    for names, kind in zip(order.split("*"), (BY_POSITION, BY_KEYWORD), strict=False):
        for name in names.replace(",", " ").split():
            source = of_plan if name in REPLACED or name == HINT else of_run
            parameters.append((older if name == OLDER_HINT else source[name]).replace(kind=kind))
    return parameters


def _passed(names: Iterable[str]) -> str:
    """Return the text that passes variables by keyword."""
    return ", ".join(f"{name}={name}" for name in names)
