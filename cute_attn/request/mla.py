"""Requests of multi-head latent attention (MLA) with absorbed queries, and the checks of their tensors.

All heads share one row per token: `LATENT` columns, which are keys and values, and `ROPE` columns, which are keys only;
some models have none of these. Queries and caches may hold both parts in one tensor or in two; problems have views of
the parts. Lengths and page numbers stay on the device: `check_values` looks at them where that was asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import ArgumentError
from cute_attn.problem import Scratch
from cute_attn.request import caches, checks, index_arrays, operands
from cute_attn.request.caches import UsedPages
from cute_attn.request.settings import HALF, LSE_BASES, MAX_INDEX, MAX_KV_LEN

LATENT, ROPE = 512, 64
GROUP = 128  # latent columns with one scale, where groups have their own
NARROW = torch.float8_e4m3fn  # of caches, beside the dtype of queries
INDEX_DTYPES = (torch.int32,)


class MlaSettings(NamedTuple):
    """All that repeated calls have in common: hashable, without lengths, addresses and strides."""

    device: torch.device
    dtype: torch.dtype  # of queries and out
    kv_dtype: torch.dtype  # of latent numbers in the cache
    rope_bits: int  # of rotated ones; 0: there are none
    grouped: bool  # each GROUP latent numbers have a scale of their own
    num_heads: int
    page_size: int
    causal: bool  # a query token sees the keys up to its own, else all
    sm_scale: float  # of products with latent columns: factors of these are included here, and in v_scale
    rope_scale: float  # of products with rotated columns
    v_scale: float
    lse_scale: float  # lse is base 2 times this
    enable_pdl: bool | None


class Names(NamedTuple):
    """The caller's names of the arrays of `MlaLengths`, for messages. Without one for `kv_indptr` pages are a table."""

    qo_indptr: str
    kv_indptr: str
    kv_indices: str
    kv_len: str


class MlaLengths(NamedTuple):
    """Where the tokens of each request are: int32 tensors. Launches read contiguous ones on the device."""

    names: Names
    qo_indptr: torch.Tensor | None  # [batch_size + 1] rows of q; None: every request has `qo_len`
    kv_indptr: torch.Tensor | None  # [batch_size + 1] index of each request's first page; None: a table
    kv_indices: torch.Tensor  # page numbers: [batch_size, max_pages], or those of all requests one after the other
    kv_len: torch.Tensor  # [batch_size] keys
    qo_len: int  # query tokens of every request, or the most of any
    rows: int | None = None  # of q, where the plan fixes them

    @classmethod
    def checked(
        cls, names: Names, arrays: Sequence[Any], qo_len: Any = None, device: torch.device | None = None
    ) -> MlaLengths:
        """Check arrays in the order of their names, which must have one batch size. `qo_len` None: the most that the
        bounds of queries have, which synchronises on a GPU. `device`: where arrays must be; None: anywhere.
        """
        qo_indptr, kv_indptr, kv_indices, kv_len = arrays
        if names.kv_indptr:
            for name, x in ((names.kv_indices, kv_indices), (names.kv_len, kv_len)):
                checks.operand(name, x, INDEX_DTYPES, (None,), "[n]", device)
        else:
            caches.tables_with_lengths((names.kv_indices, kv_indices), (names.kv_len, kv_len), device)
        for name, x in zip(names, (qo_indptr, kv_indptr), strict=False):
            if x is not None:
                checks.operand(name, x, INDEX_DTYPES, (len(kv_len) + 1,), "[batch_size + 1]", device)
        lengths = cls(names, qo_indptr, kv_indptr, kv_indices, kv_len, qo_len)
        return lengths if qo_indptr is None else lengths._with_most_queries(qo_indptr)

    def _with_most_queries(self, bounds: torch.Tensor) -> MlaLengths:
        """Return these lengths with the most query tokens of a request, and all of them where the host knows. A maximum
        of the caller spares reading the bounds from a GPU.
        """
        most: int | None = self.qo_len
        if most is not None:
            most = checks.at_least("max_q_len", most, 0)
            if not bounds.is_cpu:
                return self._replace(qo_len=most)
        ends = bounds.tolist()
        if most is None:
            most = max((end - begin for begin, end in itertools.pairwise(ends)), default=0)
        operands.check_bounds(self.names.qo_indptr, ends, most)
        return self._replace(qo_len=most, rows=ends[-1])

    @property
    def batch_size(self) -> int:
        return self.kv_len.shape[0]

    @property
    def read(self) -> tuple[torch.Tensor | None, ...]:
        """The arrays in the order in which launches take them."""
        return self.kv_indices, self.kv_len, self.qo_indptr, self.kv_indptr

    def capacity(self, page_size: int) -> int:
        """Return the most keys that a request can have."""
        return min(self.kv_indices.shape[-1] * page_size, MAX_KV_LEN)

    def check_rows(self, name: str, x: torch.Tensor) -> None:
        """Check that queries have a row for each request."""
        if x.shape[0] != self.batch_size:
            what = f"one row for each of the {self.batch_size} requests of {self.names.kv_indices}"
            raise ArgumentError(f"{name} must have {what}, got {checks.describe(x)}")

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the arrays that there are, by the caller's names."""
        return {name: x for name, x in zip(self.names, self[1:5], strict=True) if x is not None}

    def on(self, device: torch.device) -> MlaLengths:
        """Return these lengths as launches on a device read them."""
        arrays = [None if x is None else index_arrays.there(x, device) for x in self[1:5]]
        return MlaLengths._make((self.names, *arrays, *self[5:]))

    def on_host(self, page_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Check the keys of each request, and return them and the index of its first page. On a GPU they are read."""
        kv_len, size = self.kv_len.cpu().numpy().astype(np.int64), self.kv_indices.shape[-1]
        if self.kv_indptr is None:
            bounds = np.arange(self.batch_size + 1) * size
            room = np.full_like(kv_len, size * page_size)
        else:
            bounds = self.kv_indptr.cpu().numpy().astype(np.int64)
            checks.increasing(self.names.kv_indptr, bounds, MAX_INDEX)
            room = np.diff(np.minimum(bounds, size)) * page_size
        what = f", the tokens of a request's pages in {self.names.kv_indptr or self.names.kv_indices}"
        checks.each_within(self.names.kv_len, kv_len, np.minimum(room, MAX_KV_LEN), what)
        return kv_len, bounds[:-1]


class MlaProblem(NamedTuple):
    """One call. Last axes have unit stride; all other strides are free."""

    settings: MlaSettings
    lengths: MlaLengths
    q: torch.Tensor  # [num_tokens, num_heads, LATENT]
    q_pe: torch.Tensor  # [num_tokens, num_heads, ROPE], or [..., 0]
    k: torch.Tensor  # [num_pages, page_size, LATENT]: values too
    kpe: torch.Tensor  # [num_pages, page_size, ROPE], or [..., 0]
    out: torch.Tensor  # [num_tokens, num_heads, LATENT]
    lse: torch.Tensor | None  # [num_tokens, num_heads] fp32
    scratch: Scratch
    scale: torch.Tensor | None = None  # one-element fp32 device tensors: factors of scores and of values
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [num_heads] fp32, natural-log domain
    ckv_scales: torch.Tensor | None = None  # [num_pages, page_size, LATENT / GROUP] fp32, factors of groups of k

    @property
    def v(self) -> torch.Tensor:  # where launches of other problems take it
        return self.kpe


class Part(NamedTuple):
    """A view of one part of queries or of a cache, and its name in messages."""

    name: str
    x: torch.Tensor


class Parts(NamedTuple):
    """Queries and cache of a call, part by part."""

    q_nope: Part
    q_pe: Part
    ckv: Part
    kpe: Part
    ckv_scales: Part | None = None  # of groups of latent columns


class MlaCall(NamedTuple):
    """The tensors of a call, not checked yet."""

    q: Any  # both parts, or latent columns
    q_pe: Any  # None: in q
    cache: Any  # both parts, or latent columns
    kpe: Any  # None: in cache
    groups: Any  # scales of groups
    out: Any
    lse: Any
    workspace: Part
    read: tuple[Any, ...]  # as `MlaLengths.read`
    sm_scale: Any  # these two may be numbers
    v_scale: Any
    sinks: Any = None


class MlaOptions(NamedTuple):
    """Other arguments of a call, not checked yet."""

    causal: bool
    return_lse: Any
    lse_base: str  # a key of LSE_BASES
    enable_pdl: Any = None
    ckv_scale: Any = None  # factors of the cache's parts; None: 1
    kpe_scale: Any = None


# ---- queries and caches


def split_rows(name: str, value: Any, dims: tuple[int, ...], axes: str, rope: int = ROPE) -> tuple[Part, Part]:
    """Return both parts of a tensor with `LATENT + rope` columns and one of `dims` axes."""
    value = whole_part(name, value, LATENT + rope, axes, dims).x
    return Part(name, value[..., :LATENT]), Part(name, value[..., LATENT:])


def whole_part(name: str, value: Any, width: int, axes: str, dims: tuple[int, ...] = (3,)) -> Part:
    """Return a tensor of `width` columns and one of `dims` axes."""
    value = checks.tensor(name, value)
    if value.dim() not in dims or value.shape[-1] != width:
        raise ArgumentError(f"{name} must have shape {axes}, the last axis {width}, got {checks.describe(value)}")
    return Part(name, value)


def _check_parts(parts: Parts) -> Parts:
    """Check dtypes, devices, shapes and strides. Return the parts as kernels read them: queries may be copies."""
    q = parts.q_nope
    checks.dtype(q.name, q.x.dtype, HALF)
    checks.readable(q.name, q.x)
    if not q.x.shape[1] or not parts.ckv.x.shape[1]:
        raise ArgumentError(
            f"{q.name} must have at least one head and {parts.ckv.name} a page_size >= 1, "
            f"got {checks.describe(q.x)} and {checks.describe(parts.ckv.x)}"
        )
    # Rows with scales of groups may keep their rotated numbers in the queries' dtype, which kernels have for bfloat16.
    grouped, same = parts.ckv_scales is not None, (q.x.dtype,)
    narrow = (parts.ckv.x.dtype, *(same if grouped and q.x.dtype == torch.bfloat16 else ()))
    tokens, pages = (tuple(part.x.shape[:2]) for part in (q, parts.ckv))
    of_q, of_cache = "[num_tokens, num_heads, n]", "[num_pages, page_size, n]"
    for part, dtypes, first, axes in (
        (parts.q_pe, same, tokens, of_q),
        (parts.ckv, (NARROW,) if grouped else (*same, NARROW), pages, of_cache),
        (parts.kpe, narrow, pages, of_cache),
    ):
        checks.operand(part.name, part.x, dtypes, (*first, part.x.shape[-1]), axes, q.x.device)
    if parts.ckv_scales is not None:
        shape, axes = (*pages, LATENT // GROUP), f"[num_pages, page_size, {LATENT // GROUP}]"
        checks.operand(*parts.ckv_scales, (torch.float32,), shape, axes, q.x.device)
    q_nope = _readable(q, parts.ckv, parts.ckv_scales or parts.ckv)
    q_pe = _readable(parts.q_pe, parts.ckv, parts.kpe) if parts.kpe.x.shape[-1] else parts.q_pe
    return parts._replace(q_nope=q_nope, q_pe=q_pe)


def _readable(q: Part, k: Part, v: Part) -> Part:
    """Return one part of queries as kernels read it. Two parts of the cache are refused where kernels cannot."""
    for name, x in (k, v):
        if max(operands.outer_strides(x), default=0) * x.itemsize > MAX_INDEX:
            raise ArgumentError(f"{name} must have strides of at most {MAX_INDEX} bytes, got strides {x.stride()}")
    placed, names = operands.placement(q.x, k.x, v.x), (q.name, k.name, v.name)
    return Part(q.name, operands.readable(q.x, k.x, v.x, placed, names, operands.ALIGNMENT))


# ---- problems


def mla_problem(parts: Parts, lengths: MlaLengths, call: MlaCall, options: MlaOptions) -> MlaProblem:
    """Check a call and allocate the outputs that the caller did not pass. `parts`: of its queries and cache."""
    workspace, sinks, given = call.workspace, call.sinks, [part for part in parts if part is not None]
    scratch = operands.partials_in(*workspace)
    parts = _check_parts(parts)
    q, page_size = parts.q_nope.x, parts.ckv.x.shape[1]
    for name, x in (workspace, (lengths.names.kv_indices, lengths.kv_indices)):
        checks.device(name, x, q.device)
    sm_scale, scale = _scale("bmm1_scale", call.sm_scale, q.device)
    v_number, v_scale = _scale("bmm2_scale", call.v_scale, q.device)
    if options.enable_pdl is not None:
        checks.boolean("enable_pdl", options.enable_pdl)
    scales = ("ckv_scale", options.ckv_scale), ("kpe_scale", options.kpe_scale)
    ckv_scale, kpe_scale = (checks.positive_or(name, x, 1.0) for name, x in scales)
    if parts.ckv.x.dtype == NARROW != parts.kpe.x.dtype and kpe_scale != 1.0:
        raise ArgumentError(f"kpe_scale must be 1 for rotated columns of 16 bits, got {kpe_scale}")
    settings = MlaSettings(
        q.device,
        q.dtype,
        parts.ckv.x.dtype,
        8 * parts.kpe.x.itemsize if parts.kpe.x.shape[-1] else 0,
        parts.ckv_scales is not None,
        q.shape[1],
        page_size,
        checks.boolean("causal", options.causal),
        checks.real("sm_scale * ckv_scale", sm_scale * ckv_scale),
        checks.real("sm_scale * kpe_scale", sm_scale * kpe_scale),
        checks.real("bmm2_scale * ckv_scale", v_number * ckv_scale),
        LSE_BASES[options.lse_base],
        options.enable_pdl,
    )
    buffers = call.out, call.lse, call.lse is None and checks.boolean("return_lse", options.return_lse)
    out, lse = operands.outputs(q, buffers, (LATENT, q.dtype), tuple(q.shape[:2]), "num_tokens, num_heads")
    scale_tensors = ("bmm1_scale", call.sm_scale), ("bmm2_scale", call.v_scale), ("sinks", sinks)
    arrays = zip(lengths.names, lengths[1:5], strict=True)
    checks.apart((workspace, ("out", out), ("lse", lse)), (*given, *arrays, *scale_tensors))
    if sinks is not None:
        sinks = operands.per_head("sinks", sinks, q.shape[1], q.device)
    q_nope, q_pe, ckv, kpe, *groups = (part.x for part in parts if part is not None)
    return MlaProblem(settings, lengths, q_nope, q_pe, ckv, kpe, out, lse, scratch, scale, v_scale, sinks, *groups)


def _scale(name: str, value: Any, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """Return a scale as a number and a factor on the device."""
    number, on_device = operands.split_scale(name, value, device)
    return (1.0, on_device[0]) if on_device else (checks.real(name, number), None)


def check_values(problem: MlaProblem) -> None:
    """Check lengths and page numbers, which launches trust. On a GPU this synchronises; a capture reads none."""
    if problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    lengths, page_size = problem.lengths, problem.settings.page_size
    used = UsedPages.of(*lengths.on_host(page_size), page_size)
    used.check(used.take(lengths.kv_indices), problem.k.shape[0], lengths.names.kv_indices)
    if lengths.qo_indptr is not None:
        bounds, rows = lengths.qo_indptr.tolist(), problem.q.shape[0]
        operands.check_bounds(lengths.names.qo_indptr, bounds, lengths.qo_len)
        if bounds[-1] > rows:
            name = lengths.names.qo_indptr
            raise ArgumentError(f"{name} must end at most at {rows}, the rows of queries, got {bounds[-1]}")
