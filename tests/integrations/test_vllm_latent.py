"""Latent attention of the vLLM plug-in, without vLLM: decodes over its cache, prefills over chunks, and its ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from cute_attn import emulator
from cute_attn.errors import ArgumentError
from cute_attn.integrations import latent
from cute_attn.integrations.latent import LatentDecodes, LatentPrefills
from cute_attn.integrations.vllm import support
from cute_attn.integrations.vllm.metadata import split_decodes
from cute_attn.prefill import BatchPrefillWithRaggedKVCacheWrapper
from tests.support.engine_case import Batch, Graph, Tokens, merge, workspace
from tests.support.executors import DEVICES
from tests.support.mla_case import LATENT, ROPE, SCALE, MlaCase, newest
from tests.support.noted import noted
from tests.support.paged_cache import ends

ENTRIES = [*DEVICES, pytest.param("emulator", marks=pytest.mark.emulator)]
SCALED = 0.5  # of e4m3 caches
BATCHES = {
    "decodes": MlaCase(heads=8, q_lens=(1, 1, 1), kv_lens=(37, 5, 70), page_size=16),
    "drafts": MlaCase(heads=8, q_lens=(3, 3), kv_lens=(70, 3), page_size=16),
    "drafts_of_many_lengths": MlaCase(heads=8, q_lens=(2, 1, 3), kv_lens=(40, 9, 33), page_size=16),
    "e4m3": MlaCase(heads=8, q_lens=(2, 2), kv_lens=(40, 17), page_size=16, narrow=True),
}


def placed(case: MlaCase, device: str) -> MlaCase:
    return dataclasses.replace(case, device="cuda" if device == "cuda" else "cpu", made={})


def described(case: MlaCase, device: str, padding: int = 0) -> LatentDecodes:
    """The step of a batch, with requests that pad it."""
    starts = torch.cat((case.qo_indptr, case.qo_indptr[-1:].expand(padding)))
    rows = len(case.q) + padding * max(case.q_lens)
    table = torch.cat((case.table.clamp_min(0), case.table.new_zeros(padding, case.table.shape[1])))
    lengths = torch.cat((case.seq_lens, case.seq_lens.new_zeros(padding)))
    decodes = split_decodes(starts.cpu(), len(lengths), rows, max(case.q_lens), max(case.q_lens))
    backend = "emulator" if device == "emulator" else "auto"
    where = table, lengths, None if decodes.uniform else starts
    return LatentDecodes(decodes.num_tokens, decodes.q_len, *where, case.workspace(), backend)


@pytest.mark.parametrize("device", ENTRIES)
@pytest.mark.parametrize("name", BATCHES)
def test_decodes(name: str, device: str) -> None:
    """The rotated part of queries is a view of wider rows, as vLLM splits it; caches of 8 bits are bytes."""
    case = placed(BATCHES[name], device)
    q_nope = case.q[..., :LATENT].contiguous()
    q_pe = torch.nn.functional.pad(case.q[..., LATENT:], (128, 0))[..., 128:]
    cache = case.cache.view(torch.uint8) if case.narrow else case.cache
    scale = SCALED if case.narrow else 3.0  # which caches of 16 bits do not have
    with emulator.using("sm_90a") if device == "emulator" else contextlib.nullcontext():
        found, lse = latent.decode((q_nope, q_pe), cache, described(case, device), SCALE, scale, True)
    assert lse is not None
    case.check((found, lse / math.log(2)), (SCALED, SCALED) if case.narrow else (1.0, 1.0))


@pytest.mark.parametrize("name", ["decodes", "drafts", "drafts_of_many_lengths"])
def test_steps_of_graphs(name: str, device: str) -> None:
    """Padded, with the lengths of a replay; queries in one tensor, as ranks gather them. Rows of padding are 0."""
    case, return_lse = placed(BATCHES[name], device), name == "decodes"
    step, cache, rows = described(case, device, padding=2), case.cache.nan_to_num(), len(case.q)
    query = torch.cat((case.q, torch.full_like(case.q[:1], 9.0).expand(2 * max(case.q_lens), -1, -1)))
    captured = device if step.starts is None else "cpu"  # vLLM captures no others
    graph = Graph(captured, lambda: latent.decode(query, cache, step, SCALE, 1.0, return_lse))
    shorter = dataclasses.replace(case, kv_lens=[n - 2 for n in case.kv_lens], made={})
    shorter.made.update(case.made)
    for now in (case, shorter):
        step.seq_lens[: len(now.kv_lens)] = torch.tensor(now.kv_lens, dtype=torch.int32)
        found, lse = graph.replay()
        assert (lse is not None) == return_lse
        assert not found[rows:].any()
        now.check((found[:rows], now.expected()[1] if lse is None else lse[:rows] / math.log(2)))


# ---- prefills


def test_prefills_merge_new_tokens_and_chunks_of_context(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers share the plans of a step; values are columns of wider rows, as vLLM splits them."""
    new, chunks = (5, 9), ((20, 4), (7, 30))
    lens = list(zip(*chunks, new, strict=True))  # of each request
    prefills, starts = LatentPrefills(workspace(device)), ends(new)
    plans = noted(monkeypatch, BatchPrefillWithRaggedKVCacheWrapper, "plan")
    for seed in range(2):
        whole = Tokens(Batch(new, [*map(sum, lens)], (2, 2), 128 + ROPE, 128, seed=seed), device)
        k, v = (
            [torch.cat(part).bfloat16().to(device) for part in zip(*map(torch.split, side, lens), strict=True)]
            for side in (whole.keys, whole.values)
        )
        v = [torch.nn.functional.pad(x, (128, 0))[..., 128:] for x in v]
        results = [prefills.run(starts, (whole.q, k[2], v[2]), SCALE, None, True)]
        for i, n in enumerate(chunks):
            bounds = {"query_start_loc": ends(new).to(device), "cu_seq_lens": ends(n).to(device)}
            out = torch.empty(sum(new), 2, 128, dtype=whole.q.dtype, device=device)
            chunk = SimpleNamespace(index=i, **bounds)
            results.append(prefills.run(starts, (whole.q, k[i], v[i]), SCALE, out, True, chunk))
        assert all(lse.shape == (2, sum(new)) and lse.is_contiguous() for _, lse in results)
        merged, _ = merge([(out, lse.T / math.log(2)) for out, lse in results])
        torch.testing.assert_close(merged, whole.expected(SCALE, causal=True)[0], rtol=1e-2, atol=1e-2)
    assert [plan.kwargs["causal"] for plan in plans] == [True, False, False]
    newest_3 = whole.q[:3], k[2][:3], v[2][:3]
    out = torch.empty(3, 2, 128, dtype=whole.q.dtype, device=device)
    assert prefills.run(ends([3]), newest_3, SCALE, out) is out  # planned again
    torch.testing.assert_close(out.double().cpu(), newest(*(x.cpu() for x in newest_3)), rtol=1e-2, atol=1e-2)


# ---- refusals


def test_caches_of_another_dtype_are_refused() -> None:
    case = BATCHES["decodes"]
    with pytest.raises(ArgumentError, match="kv_cache must have dtype"):
        latent.decode(case.q, case.cache.half(), described(case, "cpu"), SCALE, 1.0, False)
    reason = support.cache_reason("float16", torch.bfloat16)
    assert reason is not None
    assert "must have the model's dtype" in reason
    assert all(
        support.cache_reason(name, torch.bfloat16) is None for name in support.LATENT_DTYPES if name != "float16"
    )
