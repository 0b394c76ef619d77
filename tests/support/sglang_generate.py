"""Runs SGLang's engine on a CPU once, for tests: `python -m tests.support.sglang_generate MODEL RESULT`.

A process of its own, since the engine ends all processes below it. `RESULT` receives JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPT = list(range(1, 40))
SHARED = [*PROMPT[:36], 99, 98, 97]  # two pages of 16 tokens like those of PROMPT, which the engine keeps
NEW_TOKENS = 8


def run(engine: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    answers = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS},
        return_logprob=True,
        logprob_start_len=[len(prompt) - 1 for prompt in prompts],
    )
    return [
        {
            "tokens": answer["output_ids"],
            "logprobs": [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            "cached": answer["meta_info"]["cached_tokens"],
        }
        for answer in answers
    ]


def main(model: str, result: str) -> None:
    """Answer a prompt, then two at once of which one shares its beginning."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="cute_attn",
        page_size=16,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        max_total_tokens=2048,
        max_running_requests=4,
        sampling_backend="pytorch",
        grammar_backend="none",
        log_level="info",
    )
    try:
        Path(result).write_text(json.dumps(run(engine, [PROMPT]) + run(engine, [SHARED, PROMPT[:5]])))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
