"""Arguments of `cute_attn.xqa`, FlashInfer's low-level form, from those of a decode call without a plan."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.xqa_case import Built


def low_level(built: Built, words: int = 4096, **changes: Any) -> dict[str, Any]:
    """`words`: 32-bit words of the workspace and of the semaphores, each."""
    a = built.arguments
    k, v = a["kv_cache"]
    given = {"q": a["query"], "k_cache": k, "v_cache": v, "page_table": a["block_tables"], "seq_lens": a["seq_lens"]}
    given |= {"output": torch.zeros_like(a["query"]), "num_kv_heads": 2, "page_size": 16}
    given |= {"kv_layout": built.case.kv_layout, "workspace_buffer": torch.empty(words, device=k.device)}
    return given | {"semaphores": torch.zeros(words, dtype=torch.uint32, device=k.device)} | changes
