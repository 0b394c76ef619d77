"""vLLM's engine on the CPU with our backend, beside its own CPU attention and transformers in fp32.

Opt-in: `pytest -m engines`, in an environment that docs/integrations/vllm.md describes.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import engine_models, subprocesses
from tests.support.engine_models import LATENT, VOCABULARY, logprobs

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [pytest.mark.engines, pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM (docs/integrations/vllm.md)")]
SOURCES = os.environ.get("CUTE_ATTN_VLLM_SOURCES", "")  # where another release of vLLM is unpacked
PROMPTS = (5, 90, 33, 150, 2)  # tokens; 64 fit into a step, so that two prompts are cut and steps are mixed
WINDOW = {"sliding_window": 24}
MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", WINDOW),
    "gemma2": ("Gemma2", {**WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64}),
    "deepseek": ("DeepseekV3", LATENT),
}


def model(name: str, folder: Path) -> Any:
    """Make a model on disk, and return it in fp32."""
    family, options = MODELS[name]
    return engine_models.made(family, folder, **options)[0]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPTS]


def run(folder: Path, ours: bool, **changes: Any) -> dict[str, Any]:
    """Generate in a process of its own."""
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 32, **changes.pop("engine", {})}
    request = {"model": str(folder), "ours": ours, "prompts": prompts(), "max_tokens": 8, "prompt_logprobs": 0}
    request["backend"] = "CUTE_ATTN"
    request |= {"engine": engine, **changes}
    paths = folder / "request.json", folder / "result.json"
    paths[0].write_text(json.dumps(request))
    process("tests.support.vllm_run", *map(str, paths))
    result: dict[str, Any] = json.loads(paths[1].read_text())
    return result


def process(module: str, *arguments: str, first_path: str = "") -> str:
    """Run a module in a process of its own, and return what it prints."""
    done = subprocesses.python("-m", module, *arguments, first_path=first_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def errors(result: dict[str, Any], reference: Any) -> torch.Tensor:
    """Differences of logprobs, of generated tokens and where there are any of prompts, to the reference's over the same
    tokens.
    """
    found = []
    for prompt, request in zip(prompts(), result["requests"], strict=True):
        given = torch.tensor(request["prompt_logprobs"] + request["logprobs"])
        expected = logprobs(reference, prompt + request["tokens"])
        found.append(given - expected[-len(given) :])
    return torch.cat(found)


# On CPUs vLLM does not cut prompts of latent attention, nor limit the tokens of a step: no step of these is mixed. Its
# compiled operator for AVX2 rotates interleaved queries of several heads wrongly: torch's operators instead.
SIZES = {"max_num_batched_tokens": 512, "block_size": 16, "compilation_config": {"custom_ops": ["none"]}}
WHOLE_PROMPTS = {"backend": "CUTE_ATTN_MLA", "engine": SIZES}


@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("mistral", {}), ("gemma2", {}), ("deepseek", WHOLE_PROMPTS)]
)
def test_logprobs_are_as_close_to_fp32_as_those_of_vllms_own_attention(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference = model(name, tmp_path)
    own, result = run(tmp_path, ours=False, **options), run(tmp_path, ours=True, **options)
    theirs, ours = errors(own, reference), errors(result, reference)
    print(f"{name}: rms {theirs.square().mean().sqrt():.4f} (vLLM), {ours.square().mean().sqrt():.4f} (ours)")
    assert len(ours) == len(theirs) == sum(PROMPTS) - len(PROMPTS) + 8 * len(PROMPTS)
    assert theirs.square().mean().sqrt() < 0.2  # the reference is of the same model
    assert ours.square().mean() <= 1.1**2 * theirs.square().mean()
    steps = result["steps"]
    assert options or any(decodes and others for decodes, others, _ in steps)  # mixed
    assert any(decodes > 1 and not others for decodes, others, _ in steps)
    assert any(not decodes and others for decodes, others, _ in steps)
    assert not own["steps"]


@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("deepseek", WHOLE_PROMPTS)])
def test_drafts_are_verified_as_decodes(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With drafts from the prompt, requests verify several tokens at once; greedy tokens have fp32's logprobs."""
    reference = model(name, tmp_path)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = {**options.get("engine", {}), "speculative_config": drafts}
    request = {**options, "engine": engine, "max_tokens": 24, "prompt_logprobs": None}
    result = run(tmp_path, ours=True, **request)
    found = errors(result, reference)
    assert len(found) == 24 * len(PROMPTS)
    assert found.square().mean().sqrt() < 0.15
    assert any(decodes and several for decodes, _, several in result["steps"])


def test_fp8_cache(tmp_path: Path) -> None:
    """Logprobs are no farther from fp32 than with vLLM's own attention over an fp8 cache."""
    reference = model("llama", tmp_path)
    theirs, ours = (errors(run(tmp_path, ours=x, engine={"kv_cache_dtype": "fp8"}), reference) for x in (False, True))
    print(f"fp8: rms {theirs.square().mean().sqrt():.4f} (vLLM), {ours.square().mean().sqrt():.4f} (ours)")
    assert ours.square().mean() <= 1.1**2 * theirs.square().mean()


def test_interfaces_of_the_installed_vllm() -> None:
    assert process("tests.support.vllm_interfaces").split()


@pytest.mark.skipif(not SOURCES, reason="CUTE_ATTN_VLLM_SOURCES names no folder with an unpacked wheel of vLLM")
def test_interfaces_of_another_vllm() -> None:
    printed = process("tests.support.vllm_interfaces", first_path=SOURCES).split()
    assert list(Path(SOURCES).glob(f"vllm-{printed[-1]}*.dist-info"))
