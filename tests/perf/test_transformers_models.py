"""The benchmark of transformers' models, with tiny models on the CPU."""

from __future__ import annotations

import pytest
import torch

from cute_attn.integrations.transformers import register
from perf import report, transformers_models
from perf.transformers_models import FAMILIES, Sizes

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
SIZES = Sizes(prefill=((1, 24),), decode=(2, 16), check=(3, 30))


@pytest.mark.parametrize("label", ["Llama-3-8B", "gpt-oss-20b, 4 experts"])
def test_a_row_has_checked_speeds_or_reasons(label, monkeypatch, capsys):
    name, options = FAMILIES[label]
    options = options | TINY
    if "layer_types" in options:
        options |= {"layer_types": options["layer_types"][:2], "sliding_window": 8}
    monkeypatch.setitem(FAMILIES, label, (name, options))
    register()
    with torch.no_grad():
        row = transformers_models.run_family(label, torch.device("cpu"), SIZES, rounds=1)
    assert set(row["speed"]["cute_attn"]) == {"prefill 1 x 24", "decode 2 x 16 eager"}
    assert row["error"]["cute_attn"] <= 1.1 * row["error"]["eager"]
    assert set(row["speed"]) | {name.split(",")[0] for name in row["reasons"]} >= {*transformers_models.IMPLEMENTATIONS}
    shown = "\n".join(report.transformers_tables({"transformers": [row], "failed_rows": {}}))
    assert f"| {label} | prefill 1 x 24 |" in shown


def test_an_implementation_that_is_off_is_not_timed(monkeypatch):
    name, options = FAMILIES["Llama-3-8B"]
    model = transformers_models.build((name, options | TINY), torch.device("cpu"))
    check = transformers_models.check_logits

    def wrong(model, name, sizes):
        return check(model, name, sizes) + (0.5 if name == "sdpa" else 0.0)

    monkeypatch.setattr(transformers_models, "check_logits", wrong)
    register()
    with torch.no_grad():
        _, excluded = transformers_models.errors(model, SIZES)
    assert "logits are off by" in excluded["sdpa"]
    assert "cute_attn" not in excluded
