"""Latent attention of the SGLang backend: its parts, and with SGLang (`-m engines`) its pool and batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_attn.integrations import latent
from cute_attn.integrations.sglang.steps import TableStep
from tests.support.mla_case import LATENT, ROPE, SCALE, MlaCase, newest

HEADS = 4
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
needs_sglang = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang: docs/integrations/sglang.md"),
]


def assert_close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.double().cpu(), want, rtol=1 / 64, atol=1 / 64)


# ---- parts


@pytest.mark.parametrize("q_lens", [(1, 1, 1), (2, 2, 2), (5, 1, 20)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("narrow", [False, True])
def test_rows_of_the_pool(q_lens: tuple[int, ...], page_size: int, narrow: bool, device: str) -> None:
    case = MlaCase(HEADS, q_lens, (37, 9, 40), page_size, device=device, narrow=narrow)
    tables = case.table.clamp_min(0)
    step = TableStep([tables], case.seq_lens, q_lens[0])
    if len(set(q_lens)) > 1:
        step = step.extended(list(q_lens))
    assert step.num_tokens == sum(q_lens)
    out = torch.empty(sum(q_lens), HEADS, LATENT, dtype=BF16, device=device)
    scale = torch.tensor([0.5], device=device) if narrow else 1.0
    latent.decode(case.q, case.cache, step.latent(case.workspace()), SCALE, scale, out=out)
    assert_close(out, case.expected((0.5, 0.5) if narrow else (1.0, 1.0))[0])


# ---- SGLang's pool, layers and batches


@pytest.fixture
def sglang() -> Iterator[Any]:
    from tests.support import sglang_runner

    torch.manual_seed(0)
    with sglang_runner.settings():
        yield sglang_runner


def served(sglang: Any, page_size: int, dtype: torch.dtype = BF16) -> tuple[Any, Any, Any, Any]:
    """The backend of a runner with its pool, the runner, and the two layers of SGLang's DeepSeek models per block."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from cute_attn.integrations import sglang as plugin

    absorbed = RadixAttention(HEADS, LATENT + ROPE, SCALE, 1, 0, v_head_dim=LATENT)
    prompts = RadixAttention(HEADS, 192, SCALE, HEADS, 0, v_head_dim=128)
    pool = MLATokenToKVPool(
        size=sglang.POOL_TOKENS, page_size=page_size, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    runner = sglang.Runner([absorbed, prompts], page_size, pool, use_mla_backend=True)
    return plugin.build(runner), runner, absorbed, prompts


def rows_of(runner: Any, batch: Any, i: int) -> torch.Tensor:
    """The rows of a request that its newest query token sees, read slot by slot."""
    verifies = batch.spec_info.draft_token_num if batch.forward_mode.is_target_verify() else 0
    slots = runner.req_to_token_pool.req_to_token[int(batch.req_pool_indices[i]), : int(batch.seq_lens[i]) + verifies]
    return runner.token_to_kv_pool.get_key_buffer(0)[slots.long()].float()


def check_rows(backend: Any, runner: Any, layer: Any, batch: Any, q_lens: list[int], scale: float = 1.0) -> None:
    tokens = sum(q_lens)
    q, row = torch.randn(tokens, HEADS * 576).bfloat16(), torch.randn(tokens, 1, 576).bfloat16()
    out = backend.forward(q, row.clone(), row[..., :LATENT], layer, batch)
    assert out.shape == (tokens, HEADS * LATENT)
    want = []
    for i, part in enumerate(q.view(-1, HEADS, 576).split(q_lens)):
        keys = rows_of(runner, batch, i).expand(-1, HEADS, -1) * scale
        if scale == 1:
            assert torch.equal(keys[-q_lens[i] :, 0], row.split(q_lens)[i][:, 0].float())
        want.append(newest(part, keys, keys[..., :LATENT]).flatten(1))
    assert_close(out, torch.cat(want))


@pytest.mark.parametrize("page_size", [1, 16, 64])
class TestServer:
    pytestmark = needs_sglang

    def test_steps(self, page_size: int, sglang: Any) -> None:
        """A prompt of decompressed keys, whose rows the model writes; extends, decodes and drafts over rows."""
        backend, runner, absorbed, prompts = served(sglang, page_size)
        batch = runner.extend([1, 2], [9, 30])
        backend.init_forward_metadata(batch)
        q, k = torch.randn(2, 39, HEADS, 192).bfloat16()
        v = torch.randn(39, HEADS, 128).bfloat16()
        out = backend.forward(q.flatten(1), k, v, prompts, batch, save_kv_cache=False)
        parts = zip(*(x.split([9, 30]) for x in (q, k, v)), strict=True)
        assert_close(out, torch.cat([newest(*part) for part in parts]).flatten(1))
        check_rows(backend, runner, absorbed, batch, [9, 30])
        for later, q_lens in (
            (runner.extend([1, 2], [5, 1]), [5, 1]),
            (runner.decode([2, 1]), [1, 1]),
            (runner.decode([1, 2], host_lengths=False), [1, 1]),
            (runner.verify([2, 1], SimpleNamespace(draft_token_num=3, custom_mask=None)), [3, 3]),
        ):
            backend.init_forward_metadata(later)
            check_rows(backend, runner, absorbed, later, q_lens)

    def test_hooks_of_graphs(self, page_size: int, sglang: Any) -> None:
        backend, runner, absorbed, _ = served(sglang, page_size)
        batch = runner.extend([1, 2], [9, 30])
        backend.init_forward_metadata(batch)
        check_rows(backend, runner, absorbed, batch, [9, 30])
        backend.init_cuda_graph_state(4, 4)
        addresses = set()
        for batch in (runner.decode([1, 2]), runner.decode([2, 1])):
            backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
            addresses.add(backend.forward_metadata.tables[0].data_ptr())
            check_rows(backend, runner, absorbed, batch, [1, 1])
        assert len(addresses) == 1

    def test_rows_of_8_bits(self, page_size: int, sglang: Any) -> None:
        backend, runner, absorbed, _ = served(sglang, page_size, E4M3)
        absorbed.k_scale, absorbed.k_scale_float = torch.tensor(0.5), 0.5
        batch = runner.extend([1, 2], [9, 30])
        backend.init_forward_metadata(batch)
        check_rows(backend, runner, absorbed, batch, [9, 30], 0.5)
