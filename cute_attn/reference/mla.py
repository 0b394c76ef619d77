"""Multi-head latent attention in plain torch, in fp64: one kv head, whose values are the first columns of its keys."""

from __future__ import annotations

import itertools

import torch

from cute_attn.reference.attention import Logits, Mask, attention
from cute_attn.request.mla import GROUP, MlaLengths, MlaProblem


def run(problem: MlaProblem) -> None:
    """Compute every request of `problem`, after reading the lengths. Rows of q that belong to none are not written."""
    settings, lengths, extras = problem.settings, problem.lengths, problem.extras
    factor, (scale, rope_scale, v_scale) = 1.0, problem.scales
    if extras.scale0 is not None:
        factor = extras.scale0.item()
    if extras.v_scale is not None:
        v_scale *= extras.v_scale.item()
    assert extras.q_pe is not None
    queries = torch.cat((scale * problem.q.double(), rope_scale * extras.q_pe.double()), dim=-1)
    for index, rows in enumerate(_rows(lengths)):
        ckv, kpe = (_tokens(x, lengths, index) for x in (problem.k, problem.kpe))
        if extras.ckv_scales is not None:
            factors = _tokens(extras.ckv_scales, lengths, index).repeat_interleave(GROUP, dim=-1)
            ckv = (ckv.float() * factors.float()).to(settings.dtype).double()  # as kernels multiply
        o, lse = attention(
            queries[rows],
            torch.cat((ckv, kpe), dim=-1)[:, None],
            ckv[:, None],
            logits=Logits(factor),
            mask=Mask(settings.causal),
            sinks=extras.sinks,
            v_scale=v_scale,
        )
        problem.out[rows] = o.to(problem.out.dtype)
        if problem.lse is not None:
            problem.lse[rows] = (lse * settings.lse_scale).to(problem.lse.dtype)


def _rows(lengths: MlaLengths) -> list[slice]:
    """Return the rows of q of each request."""
    bounds = [i * lengths.qo_len for i in range(lengths.batch_size + 1)]
    if lengths.qo_indptr is not None:
        bounds = lengths.qo_indptr.tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def _tokens(cache: torch.Tensor, lengths: MlaLengths, index: int) -> torch.Tensor:
    """Return the rows of a request `[kv_len, columns]` of one part of the cache, in fp64."""
    page_size = cache.shape[1]
    kv_len = min(int(lengths.kv_len_arr[index]), lengths.capacity(page_size))
    pages = lengths.kv_indices[index if lengths.kv_indptr is None else slice(int(lengths.kv_indptr[index]), None)]
    return cache[pages[: -(-kv_len // page_size)].long()].flatten(0, 1)[:kv_len].double()
