"""Plans of latent attention: where the tokens of a batch are, and what runs must agree with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import short
from cute_attn.request import checks
from cute_attn.request.caches import check_tables
from cute_attn.request.mla import INDEX_DTYPES, LATENT, NARROW, ROPE, MlaLengths
from cute_attn.request.operands import check_bounds
from cute_attn.request.settings import HALF

LAYOUTS = ("packed", "split")
LSE_MODES = ("none", "base2", "basee")
SCALE_MODES = ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor")
CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")
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


class Arrays(NamedTuple):
    """Checked index arrays of a plan, in the form that the launch reads."""

    bounds: torch.Tensor  # [batch_size + 1] query tokens of each request
    lens: torch.Tensor  # [batch_size] keys of each request
    pages: torch.Tensor  # of all requests one after the other, or a table
    starts: torch.Tensor | None  # [batch_size + 1] of the pages of each request; None: `pages` is a table
    max_q_len: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """The caller's names of the arrays."""
        return (DENSE[0], DENSE[2], DENSE[1]) if self.starts is None else (CSR[0], CSR[3], CSR[2], CSR[1])

    def by_name(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in zip(self.names, self[:4], strict=False) if x is not None}

    def moved(self, move: Callable[[str, torch.Tensor], torch.Tensor]) -> Arrays:
        """Return these arrays elsewhere. `move`: from a name and an array to the array there."""
        there = [move(name, x) for name, x in self.by_name().items()]
        return Arrays(there[0], there[1], there[2], there[3] if len(there) > 3 else None, self.max_q_len)

    def page_counts(self) -> torch.Tensor:
        """Return the pages of each request."""
        return torch.full_like(self.lens, self.pages.shape[1]) if self.starts is None else self.starts.diff()

    def lengths(self, most: int) -> MlaLengths:
        starts = None if self.starts is None else self.starts[:-1]
        return MlaLengths(self.lens, self.pages, starts, self.bounds, most)


class Planned(NamedTuple):
    """A plan: lengths on the device, and what `run` must agree with."""

    lengths: MlaLengths
    rows: int | None  # of q; None: not known on the host
    num_heads: int
    rope: int  # rotated columns
    page_size: int
    dtypes: tuple[torch.dtype, torch.dtype]  # of queries and of the cache
    causal: bool
    sm_scale: float
    layouts: tuple[str | None, str | None]  # of queries and of the cache, where the plan says
    lse_mode: str | None  # one of LSE_MODES; None: any
    scale_mode: str
    enable_pdl: bool | None
    use_sinks: bool


# ---- index arrays


def index_arrays(metadata: Any, flat: dict[str, Any], page_size: int) -> Arrays:
    """Return the checked arrays of a plan. `flat`: arguments besides `metadata`, by name."""
    given = [name for name, value in flat.items() if value is not None]
    if metadata is None:
        metadata = MLAPlanMetadata(**flat)
    elif not isinstance(metadata, MLAPlanMetadata):
        raise ArgumentError(f"metadata must be an MLAPlanMetadata, got {checks.describe(metadata)}")
    elif given:
        raise ArgumentError(f"metadata must come without {', '.join(given)}: it has them all")
    values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    forms = [names for names in (CSR, DENSE) if any(values[name] is not None for name in names)]
    if not forms:
        raise ArgumentError(f"plan must get metadata, or {', '.join(CSR)}, or {', '.join(DENSE)}")
    arrays = [_form(names, values) for names in forms]
    for form in arrays:
        _check_sizes(form, page_size)
    if len(arrays) == 2:
        _check_equal(arrays[0], arrays[1], page_size)
    return arrays[0]


def _form(names: tuple[str, ...], values: dict[str, Any]) -> Arrays:
    most, missing = values["max_q_len"], [name for name in names if values[name] is None]
    if missing:
        raise ArgumentError(f"{', '.join(names)} must be given together; missing: {', '.join(missing)}")
    if most is not None:
        checks.at_least("max_q_len", most, 0)
    if names is CSR:
        bounds, starts, pages, lens = (checks.vector(name, values[name], INDEX_DTYPES) for name in names)
        return Arrays(bounds, lens, pages, starts, most)
    table = checks.tensor("block_tables", values["block_tables"])
    pages = check_tables(table, table.device)
    bounds, lens = (checks.vector(name, values[name], INDEX_DTYPES) for name in DENSE[::2])
    return Arrays(bounds, lens, pages, None, most)


def _check_sizes(arrays: Arrays, page_size: int) -> None:
    """Check that arrays have one batch size and, where the host has the numbers, that requests have enough pages."""
    size, (bounds, lens, pages, *starts) = arrays.lens.shape[0], arrays.names
    rows = (pages, arrays.pages, size, "batch_size")
    if arrays.starts is not None:
        rows = (starts[0], arrays.starts, size + 1, "batch_size + 1")
    for name, x, wanted, what in ((bounds, arrays.bounds, size + 1, "batch_size + 1"), rows):
        if x.shape[0] != wanted:
            raise ArgumentError(f"{name} must have {wanted} elements ({what}), got {len(x)}")
    counts = arrays.page_counts()
    if not (arrays.lens.is_cpu and counts.is_cpu):
        return
    wrong = (arrays.lens < 0) | (arrays.lens > counts * page_size)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ArgumentError(
            f"{lens} must be within 0 and the tokens of a request's pages in {rows[0]}; "
            f"request {i} has {int(arrays.lens[i])} tokens and {int(counts[i])} pages of {page_size}"
        )


def _check_equal(csr: Arrays, dense: Arrays, page_size: int) -> None:
    """Check that both forms of metadata describe the same requests."""
    assert csr.starts is not None
    pairs = ((CSR[0], csr.bounds, DENSE[0], dense.bounds), (CSR[3], csr.lens, DENSE[2], dense.lens))
    for name, x, other, y in pairs:
        if x.tolist() != y.tolist():
            raise ArgumentError(f"{name} and {other} must be equal, got {checks.shown(x.tolist())} and {y.tolist()}")
    table, pages, starts = dense.pages.tolist(), csr.pages.tolist(), csr.starts.tolist()
    for i, length in enumerate(csr.lens.tolist()):
        count = -(-length // page_size)
        if table[i][:count] != pages[starts[i] : starts[i] + count]:
            raise ArgumentError(f"block_tables and kv_indices must have the same pages; those of request {i} differ")


def most_queries(arrays: Arrays) -> tuple[int, int | None]:
    """Return the most query tokens of a request, and all of them where the host knows. A maximum of the caller spares
    reading the bounds from a GPU."""
    name, bounds, most = arrays.names[0], arrays.bounds, arrays.max_q_len
    if most is not None and not bounds.is_cpu:
        return most, None
    ends = bounds.tolist()
    longest = max((end - begin for begin, end in itertools.pairwise(ends)), default=0)
    check_bounds(name, ends, longest if most is None else most)
    return longest if most is None else most, ends[-1]


# ---- other arguments


def refuse_dims(names: tuple[str, str], dims: tuple[int, int]) -> None:
    """Refuse head dimensions that no kernel has."""
    if dims not in ((LATENT, ROPE), (LATENT, 0)):
        feature = f"{names[0]}={dims[0]}, {names[1]}={dims[1]}"
        reason = f"rows of the cache have {LATENT} latent columns, and {ROPE} rotated ones or none"
        checks.refuse(feature, reason, "zeros in the columns that a model does not have")


def plan_dtypes(q: Any, kv: Any, out: Any) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of queries and out, and of the cache."""
    if q == NARROW:
        checks.refuse("q_data_type=float8_e4m3fn", "products have 16 bits", "q_data_type=bfloat16")
    checks.dtype("q_data_type", q, HALF)
    checks.dtype("kv_data_type", kv, (q, NARROW))
    if out is not None and out != q:
        checks.refuse(f"output_dtype={out}", "out has the dtype of queries", f"output_dtype={short(q)}")
    return q, kv


def plan_layout(name: str, value: Any) -> str | None:
    return None if value is None else checks.choice(name, value, LAYOUTS)


def plan_modes(lse_mode: Any, scale_mode: Any, kv_dtype: torch.dtype, *, dynamic: bool) -> tuple[str | None, str]:
    """Return what runs must ask for. `dynamic`: "none" leaves lse to them, as plans without `metadata` do."""
    checks.choice("lse_mode", lse_mode, LSE_MODES)
    checks.choice("scale_mode", scale_mode, SCALE_MODES)
    if scale_mode == "kv-per-tensor" and kv_dtype != NARROW:
        raise ArgumentError(f"scale_mode='kv-per-tensor' needs kv_data_type=float8_e4m3fn, got {short(kv_dtype)}")
    return None if dynamic and lse_mode == "none" else lse_mode, scale_mode


def refuse_results(output_scale: Any, skip_softmax: Any, profiler: Any) -> None:
    if output_scale != "none":
        checks.refuse(f"output_scale={output_scale!r}", "outputs have 16 bits", "bmm2_scale of run")
    checks.refuse_given("no weight is dropped from the softmax", skip_softmax=skip_softmax)
    checks.refuse_given(NO_PROFILER, use_profiler=profiler)
