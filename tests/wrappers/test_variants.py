"""What runs settle of a plan: the options of `forward`, and heads below the planned ones; with CUDA graphs too.

A captured graph is stood for by a `run` that launches what it launched before, which is what a replay does; on a GPU
the graphs are real (`test_layers_of_one_plan` in `tests/gpu/test_matrices.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cute_attn import ArgumentError, RuntimeArgumentError
from cute_attn.errors import WorkspaceError
from cute_attn.runtime.staging import Staging
from cute_attn.wrappers import plan
from cute_attn.wrappers.plan import Plan
from tests.support.batch_case import BatchCase, heads, make, plan_arguments, random_lengths, wrapper
from tests.support.formula import assert_batch_right
from tests.support.graphs import sliced
from tests.support.right import planned
from tests.wrappers import kinds
from tests.wrappers.kinds import IDS, eager_and_graph, made_for, plan_case, run

PAGED, RAGGED, DECODE = KINDS = [dataclasses.replace(case, **heads(8, 4)) for case in kinds.KINDS]
FEWER = [(4, 4), (4, 2), (8, 1), (2, 1), (8, 4)]


def forward(case: BatchCase, made: Any, fewer: tuple[int, int] | None = None, **changed: Any) -> None:
    """`forward` with the options of a case, whatever was planned. `fewer`: heads of q, and of k and v."""
    case = dataclasses.replace(case, **changed)
    inputs = make(case)
    if fewer is not None:
        case, inputs = dataclasses.replace(case, **heads(*fewer)), sliced(inputs, *fewer)
    options = {"window_left": case.window_left, "logits_soft_cap": case.logits_soft_cap, "sm_scale": case.sm_scale}
    if case.kind != "decode":
        options["causal"] = case.mask == "causal"
    assert_batch_right(case, inputs, *made.forward_return_lse(inputs.q, *inputs.kv, **options))


# ---- heads


@eager_and_graph
@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_planned_heads_are_a_bound(case: BatchCase, graph: bool) -> None:
    """Layers of a model run one plan with different heads, in any order, any number of times."""
    made = made_for(case, graph)
    for seed in range(3):
        most = random_lengths(dataclasses.replace(case, seed=seed), seed, 40) if seed else case
        if case.kind == "ragged" and sum(most.kv_lens) > sum(case.kv_lens):
            continue
        inputs = plan_case(most, made)
        for fewer in (*FEWER, *FEWER):
            layer, tensors = dataclasses.replace(most, **heads(*fewer)), sliced(inputs, *fewer)
            run(layer, tensors, made)


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_more_heads_than_planned_are_refused(case: BatchCase) -> None:
    made, _ = planned(case)
    for more, name in ((heads(16, 4), "q"), (heads(8, 8), "k"), (heads(6, 4), "q")):
        inputs = make(dataclasses.replace(case, **more)) if more != heads(6, 4) else make(case)
        q = inputs.q[:, :6] if more == heads(6, 4) else inputs.q
        with pytest.raises(ArgumentError, match=rf"^{name}( of paged_kv_cache)? must have shape"):
            made.run(q, *inputs.kv)


# ---- options of forward

OPTIONS: list[dict[str, Any]] = [
    {"sm_scale": 64**-0.5},
    {"sm_scale": 0.3},
    {"logits_soft_cap": 5.0},
    {"window_left": 6},
    {"window_left": 6, "logits_soft_cap": 2.0, "sm_scale": -0.2},
]


@eager_and_graph
@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_forward_settles_what_the_plan_left_open(case: BatchCase, graph: bool) -> None:
    """Plans name only defaults; each layer's `forward` says the rest, and layers differ."""
    made = made_for(case, graph)
    masks = ({}, {"mask": "causal"}) if case.kind != "decode" else ({},)
    for seed in range(2):
        case = dataclasses.replace(case, seed=seed)
        plan_case(case, made)
        for options in OPTIONS:
            for mask in masks:
                forward(case, made, **options, **mask)
        forward(case, made, (4, 2), logits_soft_cap=5.0)


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_the_default_scale_named_by_forward_is_no_variant(case: BatchCase) -> None:
    made, _ = planned(case)
    before = made._planned()
    forward(case, made, sm_scale=64**-0.5, logits_soft_cap=0.0)
    assert made._planned() is before


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_eager_plans_forget_what_no_longer_runs(case: BatchCase) -> None:
    made = wrapper(case)
    for scale in (0.1, 0.2, 0.3):
        plan_case(case, made)
        forward(case, made, sm_scale=scale)
        forward(case, made, sm_scale=scale, logits_soft_cap=3.0)
        assert len(made._plan.variants) <= 5
    plan_case(case, made)
    assert [v.overrides.get("sm_scale") for v in made._plan.variants if v.batch] == [0.3, 0.3]
    other = dataclasses.replace(case, dtype="bfloat16")
    plan_case(other, made)
    assert made._plan.variants == [made._plan.base]


def test_the_number_of_variants_is_bounded() -> None:
    made, inputs = planned(DECODE)
    for i in range(3 * plan.MAX_VARIANTS):
        made.forward(inputs.q, *inputs.kv, sm_scale=1 + i / 100)
    assert len(made._plan.variants) == plan.MAX_VARIANTS
    forward(DECODE, made)
    graphed = made_for(DECODE)
    graphed.plan(**plan_arguments(DECODE, inputs))
    for i in range(plan.MAX_VARIANTS - 1):
        graphed.forward(inputs.q, *inputs.kv, sm_scale=1 + i / 100)
    with pytest.raises(RuntimeArgumentError, match=f"at most {plan.MAX_VARIANTS} combinations"):
        graphed.forward(inputs.q, *inputs.kv, sm_scale=9.0)
    forward(DECODE, graphed, sm_scale=1.0)


# ---- capture


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_nothing_is_scheduled_during_a_capture(case: BatchCase, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_for(case)
    inputs = plan_case(case, made)
    forward(case, made, sm_scale=0.3)
    monkeypatch.setattr(plan, "is_capturing", lambda device: True)
    made.forward(inputs.q, *inputs.kv, sm_scale=0.3)
    for changed in ({"sm_scale": 0.4}, {"logits_soft_cap": 1.5, "sm_scale": 0.3}):
        with pytest.raises(RuntimeArgumentError, match=r"run once after plan\(\) before the capture.*=0\.[34]"):
            made.forward(inputs.q, *inputs.kv, **changed)
    fewer = sliced(inputs, 4, 2)
    with pytest.raises(RuntimeArgumentError, match="num_qo_heads=4, num_kv_heads=2"):
        made.run(fewer.q, *fewer.kv)
    monkeypatch.undo()
    forward(case, made, sm_scale=0.4)


# ---- errors


@pytest.mark.parametrize("case", KINDS, ids=IDS)
def test_a_plan_that_fails_half_way_leaves_the_previous_one(case: BatchCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two schedules are made again, and the second fails: nothing is written over the records of the first."""
    made = made_for(case)
    plan_case(case, made)
    forward(case, made, sm_scale=0.3)
    forward(case, made, logits_soft_cap=5.0)
    scheduled, calls = Plan.scheduled, []

    def failing(self: Plan, tokens: Any, *rest: Any) -> Any:
        calls.append(self.staging)
        if len(calls) == 2:
            raise WorkspaceError("no room")
        return scheduled(self, tokens, *rest)

    monkeypatch.setattr(Plan, "scheduled", failing)
    monkeypatch.setattr(Staging, "send", lambda staging: pytest.fail("a schedule was written"))
    other = dataclasses.replace(case, kv_lens=(2, 1, 1), qo_lens=case.qo_lens)
    with pytest.raises(WorkspaceError, match="no room"):
        plan_case(other, made)
    assert calls == [v.staging for v in made._plan.variants if v.used]
    for options in ({"sm_scale": 0.3}, {"logits_soft_cap": 5.0}):
        forward(case, made, **options)


def test_a_predicted_variant_may_not_refuse_another_plan() -> None:
    """`forward` asked for ALIBI under the first plan; the second has settings of its own."""
    made, inputs = planned(PAGED)
    made.forward(inputs.q, *inputs.kv, pos_encoding_mode="ALIBI")
    other = dataclasses.replace(PAGED, page_size=8)
    run(other, plan_case(other, made), made)
