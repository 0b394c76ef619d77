"""Plans of latent attention: where the tokens of a batch are, and what runs must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import short
from cute_attn.request import checks
from cute_attn.request.caches import UsedPages
from cute_attn.request.mla import LATENT, NARROW, OF_LIST, OF_TABLE, ROPE, MlaLengths
from cute_attn.request.settings import HALF
from cute_attn.wrappers.calls import Entries

LAYOUTS = ("packed", "split")
LSE_MODES = ("none", "base2", "basee")
SCALE_MODES = ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor")
BY_LIST, BY_TABLE = ", ".join(OF_LIST), ", ".join(OF_TABLE.values())  # the two ways to say where pages are
NO_PROFILER = "no kernel records a profile"


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Where the tokens of a batch are: pages one request after the other (`csr`), a table of pages (`dense`), or both.

    Parameters
    ----------
    qo_indptr, kv_indptr : int32 `[batch_size + 1]`, from 0, not decreasing: query tokens and pages of each request.
    kv_indices : int32, page numbers; those of request i are at `kv_indptr[i]:kv_indptr[i + 1]`.
    kv_len_arr : int32 `[batch_size]`, tokens of each request, at most those of its pages.
    cum_seq_lens_q : what qo_indptr is.
    block_tables : int32 `[batch_size, max_pages]`, the page numbers of each request in order.
    seq_lens : what kv_len_arr is.
    max_q_len : the most query tokens of a request. Default: read from the bounds, which synchronises on a GPU.

    Raises
    ------
    Nothing: plans check the arrays.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """Return metadata with the pages of all requests one after the other."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Return metadata with a table of pages."""
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Return metadata in both forms, which plans compare: on a GPU that synchronises."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


FIELDS = tuple(field.name for field in fields(MLAPlanMetadata))


class Planned(NamedTuple):
    """A plan: lengths on the device, and what `run` must agree with."""

    lengths: MlaLengths
    num_heads: int
    rope: int  # rotated columns
    page_size: int
    dtypes: tuple[torch.dtype, torch.dtype]  # of queries and of the cache
    causal: bool
    sm_scale: float
    layouts: tuple[str | None, ...]  # of queries and of the cache, where the plan says
    lse_mode: str | None  # one of LSE_MODES; None: any
    scale_mode: str
    enable_pdl: bool | None
    use_sinks: bool
    entries: Entries  # of runs; the next plan's too if that differs in its arrays alone

    def agreed(self) -> tuple[Any, ...]:
        """Return what decides on the problem of a run besides its arguments and the arrays of lengths."""
        lengths = self.lengths
        return (lengths.kv_indptr is None, lengths.qo_len, lengths.rows, *self[1:-1])


# ---- index arrays


def plan_lengths(metadata: Any, flat: dict[str, Any], page_size: int) -> MlaLengths:
    """Return the checked lengths of a plan, where the caller has them. `flat`: arguments beside `metadata`, by name."""
    given = [name for name, value in flat.items() if value is not None]
    if metadata is None:
        metadata = MLAPlanMetadata(**flat)
    elif not isinstance(metadata, MLAPlanMetadata):
        raise ArgumentError(f"metadata must be an MLAPlanMetadata, got {checks.describe(metadata)}")
    elif given:
        raise ArgumentError(f"metadata must come without {', '.join(given)}: it has them all")
    found = []
    for names in (OF_LIST, OF_TABLE):
        arrays = {name: getattr(metadata, given) for name, given in names.items()}
        missing = [names[name] for name, x in arrays.items() if x is None]
        if not missing:
            with checks.renamed(names):
                lengths = MlaLengths.checked([arrays.get(name) for name in OF_LIST], metadata.max_q_len)
                if lengths.kv_len_arr.is_cpu and (lengths.kv_indptr is None or lengths.kv_indptr.is_cpu):
                    lengths.on_host(page_size)
            found.append(lengths)
        elif len(missing) < len(names):
            raise ArgumentError(f"{', '.join(names.values())} must be given together; missing: {', '.join(missing)}")
    if not found:
        raise ArgumentError(f"plan must get metadata, or {BY_LIST}, or {BY_TABLE}")
    if len(found) == 2:
        _check_equal(found, page_size)
    return found[0]


def _check_equal(forms: Sequence[MlaLengths], page_size: int) -> None:
    """Check that both forms of metadata describe the same requests."""
    for name in ("qo_indptr", "kv_len_arr"):
        one, other = (getattr(lengths, name).tolist() for lengths in forms)
        if one != other:
            raise ArgumentError(f"{name} and {OF_TABLE[name]} must be equal, got {checks.shown(one)} and {other}")
    used = []
    for lengths in forms:
        with checks.renamed(lengths.names):
            used.append(UsedPages.of(*lengths.on_host(page_size), page_size))
    one, other = (pages.take(lengths.kv_indices).cpu() for pages, lengths in zip(used, forms, strict=True))
    if not torch.equal(one, other):
        i = np.repeat(np.arange(len(used[0].counts)), used[0].counts)[int((one != other).nonzero()[0])]
        raise ArgumentError(f"block_tables and kv_indices must have the same pages; those of request {i} differ")


# ---- other arguments


def checked_dims(**dims: Any) -> tuple[int, ...]:
    """Return latent and rotated columns. Refuse head dimensions that no kernel has."""
    found = tuple(checks.integer(name, value) for name, value in dims.items())
    if found not in ((LATENT, ROPE), (LATENT, 0)):
        feature = ", ".join(f"{name}={value}" for name, value in dims.items())
        reason = f"rows of the cache have {LATENT} latent columns, and {ROPE} rotated ones or none"
        checks.refuse(feature, reason, "zeros in the columns that a model does not have")
    return found


def plan_dtypes(q: Any, kv: Any, out: Any) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of queries and out, and of the cache."""
    if q == NARROW:
        checks.refuse("q_data_type=float8_e4m3fn", "products have 16 bits", "q_data_type=bfloat16")
    checks.dtype("q_data_type", q, HALF)
    checks.dtype("kv_data_type", kv, (q, NARROW))
    if out is not None and out != q:
        checks.refuse(f"output_dtype={out}", "out has the dtype of queries", f"output_dtype={short(q)}")
    return q, kv


def plan_modes(lse_mode: Any, scale_mode: Any, kv_dtype: torch.dtype, *, dynamic: bool) -> tuple[str | None, str]:
    """Return what runs must ask for. `dynamic`: "none" leaves lse to them, as plans without `metadata` do."""
    checks.choice("lse_mode", lse_mode, LSE_MODES)
    checks.choice("scale_mode", scale_mode, SCALE_MODES)
    if scale_mode == "kv-per-tensor" and kv_dtype != NARROW:
        raise ArgumentError(f"scale_mode='kv-per-tensor' needs kv_data_type=float8_e4m3fn, got {short(kv_dtype)}")
    return None if dynamic and lse_mode == "none" else lse_mode, scale_mode
