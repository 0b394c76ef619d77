"""vLLM's engine on the CPU with our backend, beside its own CPU attention and transformers in fp32.

Opt-in: `pytest -m engines`, in an environment that docs/integrations/vllm.md describes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM (docs/integrations/vllm.md)"),
]
ROOT = Path(__file__).parents[2]
VOCABULARY = 512
PROMPTS = (5, 90, 33, 150, 2)  # tokens; 64 fit into a step, so that two prompts are cut and steps are mixed
COMMON = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,  # large enough for attention to decide logits
}


def model(name: str, folder: Path) -> Any:
    """Make a model with random weights on disk, and return it."""
    import transformers

    config = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "gemma2": transformers.Gemma2Config,
    }[name]
    options = {
        "llama": {},
        "mistral": {"sliding_window": 24},
        "gemma2": {"sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64},
    }[name]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config(**COMMON, **options), attn_implementation="eager")
    made.to(torch.bfloat16).save_pretrained(folder)
    return made.float().eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPTS]


def run(folder: Path, ours: bool, **changes: Any) -> dict[str, Any]:
    """Generate in a process of its own."""
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 32, **changes.pop("engine", {})}
    request = {"model": str(folder), "ours": ours, "prompts": prompts(), "max_tokens": 8, "prompt_logprobs": 0}
    request |= {"engine": engine, **changes}
    paths = folder / "request.json", folder / "result.json"
    paths[0].write_text(json.dumps(request))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "tests.support.vllm_run", *map(str, paths)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    result: dict[str, Any] = json.loads(paths[1].read_text())
    return result


def errors(result: dict[str, Any], reference: Any) -> torch.Tensor:
    """Differences of all logprobs, of prompts and of generated tokens, to the reference's over the same tokens."""
    found = []
    for prompt, request in zip(prompts(), result["requests"], strict=True):
        tokens = torch.tensor(prompt + request["tokens"])
        with torch.no_grad():
            logprobs = reference(tokens[None]).logits[0].double().log_softmax(-1)
        expected = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
        found.append(torch.tensor(request["prompt_logprobs"] + request["logprobs"]) - expected)
    return torch.cat(found)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_logprobs_are_as_close_to_fp32_as_those_of_vllms_own_attention(name: str, tmp_path: Path) -> None:
    reference = model(name, tmp_path)
    own, result = run(tmp_path, ours=False), run(tmp_path, ours=True)
    theirs, ours = errors(own, reference), errors(result, reference)
    print(f"{name}: rms {theirs.square().mean().sqrt():.4f} (vLLM), {ours.square().mean().sqrt():.4f} (ours)")
    assert len(ours) == len(theirs) == sum(PROMPTS) - len(PROMPTS) + 8 * len(PROMPTS)
    assert ours.square().mean() <= 1.1**2 * theirs.square().mean()
    steps = result["steps"]
    assert any(decodes and others for decodes, others, _ in steps)  # mixed
    assert any(decodes > 1 and not others for decodes, others, _ in steps)
    assert any(not decodes and others for decodes, others, _ in steps)
    assert not own["steps"]
