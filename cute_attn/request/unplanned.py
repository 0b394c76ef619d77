"""Check lengths and page tables of calls without a plan that read them on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import BatchLengths
from cute_attn.request import checks
from cute_attn.request.settings import MAX_INDEX, MAX_KV_LEN

NOWHERE = np.empty(0, np.int64)  # rows of keys that are in pages
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # the first three of BatchLengths
LENGTH_DTYPES = (torch.int32, torch.uint32, torch.int64)


class Keys(NamedTuple):
    """Keys and values in rows, or in pages `[num_pages, page_size, num_kv_heads, head_dim]` with a table of both."""

    k: torch.Tensor
    v: torch.Tensor
    tables: Any = None  # [batch_size, max_pages]

    @property
    def paged(self) -> bool:
        return self.k.dim() == 4


def refuse_capture(function: str, device: torch.device) -> None:
    """Refuse a call whose launches would be captured: it reads lengths and makes a plan."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        instead = (
            "a prefill wrapper of batches with use_cuda_graph=True, planned before the capture, or "
            "trtllm_batch_decode_with_kv_cache(max_q_len=, cum_seq_lens_q=), which reads lengths on the device"
        )
        reason = "it reads lengths on the host and schedules by them"
        checks.refuse("capture in a CUDA graph", reason, instead, function)


def host_arrays(
    arrays: Mapping[str, Any], device: torch.device, read: list[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Check one-dimensional arrays of lengths, and return them on the host. `read`: result of `on_host`, if known."""
    for name, value in arrays.items():
        _array(name, value, device)
    return on_host(list(arrays.values())) if read is None else read


def on_host(arrays: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return arrays on the host. Those on a GPU cost one copy, and a synchronisation, together."""
    signed = [x.view(torch.int32) if x.dtype == torch.uint32 else x for x in arrays]
    remote = [x for x in signed if x.is_cuda]
    if remote:
        sizes = [x.numel() for x in remote]
        copied = iter(torch.cat([x.to(torch.int64) for x in remote]).cpu().split(sizes))
        signed = [next(copied) if x.is_cuda else x for x in signed]
    return [
        x.numpy().astype(np.int64) & (0xFFFFFFFF if given.dtype == torch.uint32 else -1)
        for x, given in zip(signed, arrays, strict=True)
    ]


def _array(name: str, value: Any, device: torch.device) -> torch.Tensor:
    value = checks.operand(name, value, LENGTH_DTYPES, (None,), "[n]")
    if value.device.type != "cpu":
        checks.device(name, value, device)
    return value.view(torch.int32) if value.dtype == torch.uint32 else value


def from_host(q_seq_lens_cpu: Any, kv_seq_lens_cpu: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cum_seq_lens_q, seq_lens and cum_seq_lens_kv from the query tokens and the keys of every request."""
    given = {"q_seq_lens_cpu": q_seq_lens_cpu, "kv_seq_lens_cpu": kv_seq_lens_cpu}
    if q_seq_lens_cpu is None or kv_seq_lens_cpu is None:
        raise ArgumentError("q_seq_lens_cpu and kv_seq_lens_cpu must be given together")
    qo_len, kv_len = (torch.from_numpy(x) for x in host_arrays(given, torch.device("cpu")))
    qo_indptr, kv_indptr = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (qo_len, kv_len))
    return qo_indptr, kv_len, kv_indptr


def lengths(
    arrays: Mapping[str, Any],
    sizes: Mapping[str, Any],
    query: torch.Tensor,
    k: torch.Tensor,
    read: list[np.ndarray] | None = None,
) -> Arrays:
    """Read lengths, and check them against each other, the rows of query and k, and what else the call says of them.

    `arrays`: cum_seq_lens_q, seq_lens and, where k has rows instead of pages, cum_seq_lens_kv. `sizes`: batch_size,
    max_q_len and max_kv_len. `read`: as for `host_arrays`.
    """
    rows = query.shape[0]
    qo_indptr, kv_len, *of_rows = host_arrays(arrays, query.device, read)
    batch_size, max_q_len, max_kv_len = (checks.at_least(name, value, 0) for name, value in sizes.items())
    for name, value, size in (("cum_seq_lens_q", qo_indptr, batch_size + 1), ("seq_lens", kv_len, batch_size)):
        if len(value) != size:
            raise ArgumentError(f"{name} must have {size} elements for batch_size {batch_size}, got {len(value)}")
    checks.increasing("cum_seq_lens_q", qo_indptr, rows, ", the rows of query")
    if (i := checks.first(np.diff(qo_indptr) > max_q_len)) is not None:
        raise ArgumentError(
            f"cum_seq_lens_q must give a request at most {max_q_len} query tokens, max_q_len; request {i} has "
            f"{qo_indptr[i + 1] - qo_indptr[i]}"
        )
    what = ", max_kv_len" if max_kv_len <= MAX_KV_LEN else ""
    checks.each_within("seq_lens", kv_len, min(max_kv_len, MAX_KV_LEN), what)
    kv_indptr = of_rows[0] if of_rows else NOWHERE
    if of_rows:
        if not np.array_equal(np.diff(kv_indptr), kv_len):
            raise ArgumentError(
                "cum_seq_lens_kv must be the sums of seq_lens: they give other numbers of keys to a request"
            )
        what = ", the rows of k and v" if k.shape[0] <= MAX_INDEX else ""
        checks.increasing("cum_seq_lens_kv", kv_indptr, min(k.shape[0], MAX_INDEX), what)
    return qo_indptr, kv_indptr, kv_len


def chunk_bounds(size: int, lengths: BatchLengths) -> np.ndarray:
    """Return `BatchLengths.key_bounds` of chunks of `size` keys: items behind an empty prefix."""
    row = np.arange(lengths.first_row, lengths.rows)
    position = row + np.repeat(lengths.kv_len - lengths.qo_indptr[1:], lengths.qo_len)
    bounds = np.zeros((lengths.rows, 2), np.int32)
    bounds[row, 1] = np.maximum(position, 0) // size * size
    return bounds


# ---- tables in which keys and values have pages of their own


APART = "pages of values and of keys in tables of their own"
ONE_TABLE = "block_tables [batch_size, max_pages]"


def joined(paged: Keys, seq_lens: Any, origin: int = 0) -> Keys:
    """Return views of k and v in which both are at the same pages.

    `paged.tables` is `[batch_size, 2, max_pages]`: pages of keys, then pages of values, which are counted from page
    -`origin` of v. Kernels read one table, so that the values of all requests must be the same number of pages away
    from their keys: the same pages, or both halves of one pool. Finding that out costs a synchronisation on a GPU,
    except where both rows of the table are the same memory.
    """
    k, v, tables = paged
    meaning = "[batch_size, 2, max_pages] where keys and values have their own pages"
    checks.operand("block_tables", tables, (torch.int32,), (None, 2, None), meaning)
    keys, values = tables.unbind(1)
    if tables.stride(1) == 0 and origin == 0:
        return Keys(k, v, keys)
    if tables.is_cuda and torch.cuda.is_current_stream_capturing():
        checks.refuse(f"{APART} while a CUDA graph is captured", "it cannot look at the table then", ONE_TABLE)
    lengths = _array("seq_lens", checks.tensor("seq_lens", seq_lens).reshape(-1), tables.device)
    if len(lengths) != len(tables):
        raise ArgumentError(
            f"seq_lens must have one length for each of the {len(tables)} rows of block_tables, got {len(lengths)}"
        )
    live = torch.arange(tables.shape[2], device=tables.device) * k.shape[1] < lengths.to(tables.device)[:, None]
    apart = (values.long() - keys.long())[live]
    if apart.numel() == 0:
        return Keys(k, v, keys)
    nearest, farthest = torch.stack(apart.aminmax()).tolist()
    if nearest != farthest:
        checks.refuse(f"{APART} at different distances", "it reads one page table for keys and values", ONE_TABLE)
    shift = nearest - origin
    pages = min(k.shape[0], v.shape[0]) - abs(shift)
    if pages <= 0:
        raise ArgumentError(f"block_tables has pages of values {shift} pages from their keys, beyond the cache")
    if shift >= 0:
        return Keys(k[:pages], v[shift : shift + pages], keys)
    return Keys(k[-shift : pages - shift], v[:pages], keys + shift)
