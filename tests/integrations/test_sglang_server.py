"""SGLang's engine itself on a CPU, with the backend that it found by its entry point.

Opt-in (`pytest -m engines`): docs/integrations/sglang.md has the environment.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import engine_models, subprocesses
from tests.support.engine_models import LATENT, logprobs
from tests.support.sglang_generate import NEW_TOKENS, PROMPT, SHARED
from tests.support.subprocesses import ROOT

pytestmark = pytest.mark.engines

GROUP = "sglang.srt.plugins"
PROMPTS = PROMPT, SHARED, PROMPT[:5]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def write_entry_point(folder: Path) -> None:
    """Declare the entry point of pyproject.toml for a checkout that is not installed."""
    declared = re.search(rf'"{GROUP}"\]\n(.*)\n', (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    info = folder / "cute_attn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cute_attn\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{declared[1].replace(chr(34), '')}\n")


@pytest.mark.parametrize(
    ("name", "options"), [("Llama", {}), ("DeepseekV3", {**LATENT, "moe_layer_freq": 1, "rope_parameters": YARN})]
)
def test_the_engine_generates(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Log-probabilities of its greedy tokens are as close to fp32 as those of eager attention in bfloat16."""
    pytest.importorskip("sglang", reason="needs SGLang: docs/integrations/sglang.md")
    models = engine_models.made(name, tmp_path / "model", **options)
    write_entry_point(tmp_path)
    result = tmp_path / "result.json"
    paths = str(tmp_path / "model"), str(result)
    done = subprocesses.python("-m", "tests.support.sglang_generate", *paths, first_path=str(tmp_path))
    text = done.stdout + done.stderr
    assert result.exists(), text[-4000:]
    assert "reference for cpu" in text, "the worker's log names what ran this library's calls"
    answers = json.loads(result.read_text())
    assert answers[1]["cached"] == 32, "two pages of the second prompt are those of the first"
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer["tokens"]) == NEW_TOKENS
        exact, eager = (logprobs(model, [*prompt, *answer["tokens"]])[-NEW_TOKENS:] for model in models)
        allowed = 2 * (eager - exact).abs().max().clamp_min(0.01)
        assert (torch.tensor(answer["logprobs"]) - exact).abs().max() <= allowed
