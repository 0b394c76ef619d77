"""SGLang's engine itself on a CPU, with the backend that it found by its entry point.

Opt-in (`pytest -m engines`): docs/integrations/sglang.md has the environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sglang_generate import NEW_TOKENS, PROMPT, SHARED

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
GROUP = "sglang.srt.plugins"
PROMPTS = PROMPT, SHARED, PROMPT[:5]

COMMON = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,  # no experts
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def write_entry_point(folder: Path) -> None:
    """Declare the entry point of pyproject.toml for a checkout that is not installed."""
    declared = re.search(rf'"{GROUP}"\]\n(.*)\n', (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    info = folder / "cute_attn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cute_attn\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{declared[1].replace(chr(34), '')}\n")


@pytest.mark.parametrize(("name", "options"), [("Llama", {}), ("DeepseekV3", LATENT)])
def test_the_engine_generates(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Log-probabilities of its greedy tokens are as close to fp32 as those of eager attention in bfloat16."""
    pytest.importorskip("sglang", reason="needs SGLang: docs/integrations/sglang.md")
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **options})
    made = getattr(transformers, f"{name}ForCausalLM")
    made(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    # Loaded again, for the cast has rounded the frequencies of RoPE too, which no checkpoint holds
    models = [made.from_pretrained(tmp_path / "model", dtype=x) for x in (torch.float32, torch.bfloat16)]
    write_entry_point(tmp_path)
    result, log = tmp_path / "result.json", tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    with log.open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "tests.support.sglang_generate", str(tmp_path / "model"), str(result)],
            check=False,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
    text = log.read_text()
    assert result.exists(), text[-4000:]
    assert "reference for cpu" in text, "the worker's log names what ran this library's calls"
    answers = json.loads(result.read_text())
    assert answers[1]["cached"] == 32, "two pages of the second prompt are those of the first"
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer["tokens"]) == NEW_TOKENS
        tokens = torch.tensor([[*prompt, *answer["tokens"]]])
        exact, eager = (logprobs(model, tokens, len(prompt)) for model in models)
        found = torch.tensor(answer["logprobs"])
        allowed = 2 * (eager - exact).abs().max().clamp_min(0.01)
        assert (found - exact).abs().max() <= allowed


def logprobs(model: torch.nn.Module, tokens: torch.Tensor, prompt_len: int) -> torch.Tensor:
    """Log-probabilities of the tokens after a prompt, each given those before it."""
    with torch.no_grad():
        scores = model(tokens).logits[0, prompt_len - 1 : -1].float().log_softmax(-1)
    return scores.gather(1, tokens[0, prompt_len:, None])[:, 0]
