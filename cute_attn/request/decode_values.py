"""Check what a decode call without a plan has in its tensors: lengths, page numbers, and which memory is whose.

Memory is compared in every call. Lengths and page numbers are on the device, so that reading them costs
synchronisations: on a GPU they are checked with `CUTE_ATTN_VALIDATE=1` only, on the CPU always. Kernels trust them, and
a wrong one is an illegal access.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import DecodeProblem
from cute_attn.request import checks
from cute_attn.request.settings import MAX_KV_LEN


class Said(NamedTuple):
    """What a call says about its problem, and the caller's names of arguments where they differ from those here."""

    max_seq_len: int | None
    returns_given_out: bool  # rows that belong to no request are then the caller's own
    scales: tuple[tuple[str, Any], ...]  # with their names; those of the problem may be copies
    names: Mapping[str, str] = MappingProxyType({})
    lse_by_heads: torch.Tensor | None = None  # written after the launch

    def name(self, ours: str) -> str:
        """Return the caller's name of an argument."""
        return self.names.get(ours, ours)


def before_launch(problem: DecodeProblem, said: Said, values: bool) -> None:
    """Raise ArgumentError for buffers, and where `values` says so for lengths and page numbers, that the problem must
    not have.

    While a CUDA graph is captured, nothing can be read from the device: only buffers are checked then.
    """
    _check_buffers(problem, said)
    if not values or (problem.q.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    _check_queries(problem, said)
    lengths = _check_lengths(problem, said)
    _check_pages(problem, lengths, said)


def _check_buffers(problem: DecodeProblem, said: Said) -> None:
    """Check that nothing which the launch writes is something else that it reads or writes."""
    scratch, block_scales = problem.scratch, problem.block_scales or (None, None)
    inputs = [
        (said.name("query"), problem.q),
        ("k of kv_cache", problem.k),
        ("v of kv_cache", problem.v),
        (said.name("block_tables"), problem.block_tables),
        (said.name("seq_lens"), problem.seq_lens),
        (said.name("q_cu_seq_lens"), problem.qo_indptr),
        ("mask", problem.draft_mask),
        ("sinks", problem.sinks),
        *((name, x) for name, x in said.scales if isinstance(x, torch.Tensor)),
        ("k_sf of kv_cache_sf", block_scales[0]),
        ("v_sf of kv_cache_sf", block_scales[1]),
    ]
    written = [("workspace_buffer", scratch.partial_buffer), (said.name("out"), problem.out), ("lse", problem.lse)]
    written.append(("lse", said.lse_by_heads))
    if scratch.counter_buffer is not scratch.partial_buffer:
        written.insert(0, ("semaphores", scratch.counter_buffer))
    taken = [(name, checks.extent(x)) for name, x in inputs if x is not None]
    for name, x in written:
        if x is not None:
            own = checks.extent(x)
            for other_name, other in taken:
                checks.no_overlap(name, own, other_name, other)
            taken.append((name, own))


def _check_queries(problem: DecodeProblem, said: Said) -> None:
    """Check `q_cu_seq_lens`: from 0, not decreasing, within the rows of query, no request longer than announced."""
    if problem.qo_indptr is None:
        return
    name, rows = said.name("q_cu_seq_lens"), problem.q.shape[0]
    bounds = _on_host(problem.qo_indptr)
    if int(bounds[0]) != 0:
        raise ArgumentError(f"{name} must start at 0, got {int(bounds[0])}")
    lengths = bounds.diff()
    for wrong, rule in (
        (lengths < 0, "must not decrease"),
        (
            lengths > problem.qo_len,
            f"must give no request more than {said.name('q_len_per_req')} = {problem.qo_len} rows",
        ),
    ):
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise ArgumentError(f"{name} {rule}, got {int(bounds[i + 1])} after {int(bounds[i])} (request {i})")
    last = int(bounds[-1])
    if last > rows or (last < rows and not said.returns_given_out):
        raise ArgumentError(f"{name} must end at {rows}, the rows of {said.name('query')}, got {last}")


def _check_lengths(problem: DecodeProblem, said: Said) -> torch.Tensor:
    """Check `seq_lens` against the pages of the tables and `max_seq_len`; return it on the host."""
    name, tables = said.name("seq_lens"), said.name("block_tables")
    lengths = _on_host(problem.seq_lens)
    pages, page_size = problem.block_tables.shape[1], problem.settings.page_size
    bounds = [
        (0, MAX_KV_LEN, f"within 0..{MAX_KV_LEN}"),
        (0, pages * page_size, f"at most {pages * page_size}, the {pages} pages of {tables} times {page_size} tokens"),
    ]
    if said.max_seq_len is not None:
        bounds.append((0, said.max_seq_len, f"at most max_seq_len = {said.max_seq_len}"))
    for least, most, rule in bounds:
        wrong = (lengths < least) | (lengths > most)
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise ArgumentError(f"{name} must be {rule}; request {i} has {int(lengths[i])}")
    return lengths


def _check_pages(problem: DecodeProblem, lengths: torch.Tensor, said: Said) -> None:
    """Check every page number that the launch reads: those before the window are not read."""
    page_size, num_pages = problem.settings.page_size, problem.k.shape[0]
    tables, device = problem.block_tables, problem.block_tables.device
    first, lengths = torch.arange(tables.shape[1], device=device) * page_size, lengths.to(device)[:, None]
    used = first < lengths
    if (window_left := problem.settings.window_left) >= 0:
        used &= first + page_size > lengths - problem.qo_len - window_left
    wrong = used & ((tables < 0) | (tables >= num_pages))
    if not bool(wrong.any()):
        return
    i, j = wrong.nonzero()[0].tolist()
    pages = f"pages 0..{num_pages - 1}" if num_pages else "no pages"
    raise ArgumentError(
        f"{said.name('block_tables')}[{i}, {j}], page {j} of request {i}, is {int(tables[i, j])}; the cache has {pages}"
    )


def _on_host(lengths: torch.Tensor) -> torch.Tensor:
    """Return 32-bit lengths as int64 on the host. torch has few operations on uint32."""
    unsigned = lengths.dtype == torch.uint32
    host = lengths.view(torch.int32).cpu().to(torch.int64)
    return host & 0xFFFFFFFF if unsigned else host
