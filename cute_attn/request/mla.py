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
from cute_attn.problem import Extras, Scratch
from cute_attn.request import caches, checks, index_arrays, operands
from cute_attn.request.caches import UsedPages
from cute_attn.request.settings import HALF, LSE_BASES, MAX_INDEX, MAX_KV_LEN

LATENT, ROPE = 512, 64
GROUP = 128  # latent columns with one scale, where groups have their own
NARROW = torch.float8_e4m3fn  # of caches, beside the dtype of queries
INDEX_DTYPES = (torch.int32,)

# What callers call parts of tensors that have both, and the arrays of `MlaLengths` beside a table: `checks.renamed`.
OF_QUERY, OF_CACHE = dict.fromkeys(("q_nope", "q_pe"), "query"), dict.fromkeys(("ckv_cache", "kpe_cache"), "kv_cache")
OF_LIST = {name: name for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}
OF_TABLE = {"qo_indptr": "cum_seq_lens_q", "kv_indices": "block_tables", "kv_len_arr": "seq_lens"}


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
    lse_scale: float  # lse is base 2 times this
    enable_pdl: bool | None


class MlaLengths(NamedTuple):
    """Where the tokens of each request are: int32 tensors. Launches read contiguous ones on the device."""

    qo_indptr: torch.Tensor | None  # [batch_size + 1] rows of q; None: every request has `qo_len`
    kv_indptr: torch.Tensor | None  # [batch_size + 1] index of each request's first page; None: a table
    kv_indices: torch.Tensor  # page numbers: [batch_size, max_pages], or those of all requests one after the other
    kv_len_arr: torch.Tensor  # [batch_size] keys
    qo_len: int  # query tokens of every request, or the most of any
    rows: int | None = None  # of q, where the plan fixes them

    @classmethod
    def checked(cls, arrays: Sequence[Any], most: Any = None, device: torch.device | None = None) -> MlaLengths:
        """Check arrays in the order of the fields, which must have one batch size. `most`: `qo_len`; with bounds of
        queries None is what these have, and other numbers spare reading them from a GPU, which synchronises. `device`:
        where arrays must be; None: anywhere.
        """
        lengths, rows = cls._make((*arrays, most, None)), None
        bounds, starts, pages, kv_len = zip(cls._fields, arrays, strict=False)
        if lengths.kv_indptr is None:
            caches.tables_with_lengths(pages, kv_len, device)
        else:
            for named in (pages, kv_len):
                checks.operand(*named, INDEX_DTYPES, (None,), "[n]", device)
        for name, x in (bounds, starts):
            if x is not None:
                checks.operand(name, x, INDEX_DTYPES, (lengths.batch_size + 1,), "[batch_size + 1]", device)
        if lengths.qo_indptr is None:
            return lengths
        if most is not None:
            most = checks.at_least("max_q_len", most, 0)
        if most is None or lengths.qo_indptr.is_cpu:
            ends = lengths.qo_indptr.tolist()
            rows = ends[-1]
            if most is None:
                most = max((end - begin for begin, end in itertools.pairwise(ends)), default=0)
            operands.check_bounds(bounds[0], ends, most)
        return lengths._replace(qo_len=most, rows=rows)

    @classmethod
    def in_table(
        cls, query: torch.Tensor, tables: Any, kv_len: Any, bounds: Any = None, most: Any = None
    ) -> MlaLengths:
        """Check a table of pages and its lengths, and return them as launches on the device of queries read them.
        Queries are `[batch_size, q_len, ...]`, or with `bounds` rows, of which no request has more than `most`.
        """
        arrays = bounds, None, tables, kv_len
        if bounds is not None:
            return cls.checked(arrays, most or None, query.device).on(query.device)
        if most is not None:
            raise ArgumentError(f"max_q_len must come with cum_seq_lens_q, got {checks.describe(most)} alone")
        lengths = cls.checked(arrays, query.shape[1], query.device)
        if len(query) != lengths.batch_size:
            what = f"one row for each of the {lengths.batch_size} requests of kv_indices"
            raise checks.wrong(f"query must have {what}", query)
        return lengths.on(query.device)

    @property
    def names(self) -> dict[str, str]:
        """What callers call the arrays, by the names of the fields."""
        return OF_TABLE if self.kv_indptr is None else OF_LIST

    @property
    def batch_size(self) -> int:
        return self.kv_len_arr.shape[0]

    @property
    def read(self) -> tuple[torch.Tensor | None, ...]:
        """The arrays in the order in which launches take them."""
        return self.kv_indices, self.kv_len_arr, self.qo_indptr, self.kv_indptr

    def capacity(self, page_size: int) -> int:
        """Return the most keys that a request can have."""
        return min(self.kv_indices.shape[-1] * page_size, MAX_KV_LEN)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the arrays that there are, by name."""
        return {name: x for name, x in zip(self._fields, self[:4], strict=False) if x is not None}

    def on(self, device: torch.device) -> MlaLengths:
        """Return these lengths as launches on a device read them."""
        return MlaLengths._make((*(None if x is None else index_arrays.there(x, device) for x in self[:4]), *self[4:]))

    def on_host(self, page_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Check the keys of each request, and return them and the index of its first page. On a GPU they are read."""
        kv_len, size, source = self.kv_len_arr.cpu().numpy().astype(np.int64), self.kv_indices.shape[-1], "kv_indices"
        if self.kv_indptr is None:
            bounds = np.arange(self.batch_size + 1) * size
            room = np.full_like(kv_len, size * page_size)
        else:
            bounds, source = self.kv_indptr.cpu().numpy().astype(np.int64), "kv_indptr"
            checks.increasing(source, bounds, MAX_INDEX)
            room = np.diff(np.minimum(bounds, size)) * page_size
        what = f", the tokens of a request's pages in {source}"
        checks.each_within("kv_len_arr", kv_len, np.minimum(room, MAX_KV_LEN), what)
        return kv_len, bounds[:-1]


class MlaScales(NamedTuple):
    """Numbers of a launch by the kernel's parameters. Factors of the cache's parts are included."""

    scale: float  # of products with latent columns
    rope_scale: float  # of products with rotated columns
    v_scale: float


class MlaProblem(NamedTuple):
    """One call. Last axes have unit stride; all other strides are free."""

    settings: MlaSettings
    scales: MlaScales
    lengths: MlaLengths
    q: torch.Tensor  # [num_tokens, num_heads, LATENT]
    k: torch.Tensor  # [num_pages, page_size, LATENT]: values too
    kpe: torch.Tensor  # [num_pages, page_size, ROPE], or [..., 0]
    out: torch.Tensor  # [num_tokens, num_heads, LATENT]
    lse: torch.Tensor | None  # [num_tokens, num_heads] fp32
    scratch: Scratch
    extras: Extras  # q_pe among them: [num_tokens, num_heads, ROPE], or [..., 0]

    @property
    def v(self) -> torch.Tensor:  # where launches of other problems take it
        return self.kpe


class MlaCall(NamedTuple):
    """The arguments of a call under the names of the wrapper, not checked yet."""

    q_nope: Any  # latent columns; of a call as it is given both parts, where `q_pe` is None
    q_pe: Any
    ckv_cache: Any  # likewise
    kpe_cache: Any
    ckv_scale_arr: Any
    out: Any
    lse: Any
    workspace_buffer: Any
    read: tuple[Any, ...]  # as `MlaLengths.read`
    bmm1_scale: Any  # these two may be numbers
    bmm2_scale: Any
    sinks: Any = None
    causal: Any = True
    return_lse: Any = False
    enable_pdl: Any = None
    ckv_scale: Any = None  # factors of the cache's parts; None: 1
    kpe_scale: Any = None
    lse_base: str = "log2"  # a key of LSE_BASES

    def in_parts(self, *parts: Any) -> MlaCall:
        """Return the call with queries, cache and scales of groups in other tensors: as many as are given."""
        return MlaCall._make((*parts, *self[len(parts) :]))


# ---- queries and caches


def split_rows(
    name: str, value: Any, dims: tuple[int, ...], axes: str, rope: int = ROPE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both parts of a tensor with `LATENT + rope` columns and one of `dims` axes."""
    whole = whole_part(name, value, LATENT + rope, axes, dims)
    return whole[..., :LATENT], whole[..., LATENT:]


def whole_part(name: str, value: Any, width: int, axes: str, dims: tuple[int, ...] = (3,)) -> torch.Tensor:
    """Return a tensor of `width` columns and one of `dims` axes."""
    value = checks.tensor(name, value)
    if value.dim() not in dims or value.shape[-1] != width:
        raise checks.wrong(f"{name} must have shape {axes}, the last axis {width}", value)
    return value


def _check_parts(call: MlaCall) -> MlaCall:
    """Check dtypes, devices, shapes and strides. Return the parts as kernels read them: queries may be copies."""
    q, q_pe, ckv, kpe, scales, *_ = call
    checks.dtype("q_nope", q.dtype, HALF)
    checks.readable("q_nope", q)
    if not q.shape[1] or not ckv.shape[1]:
        raise ArgumentError(
            "q_nope must have at least one head and ckv_cache a page_size >= 1, "
            f"got {checks.describe(q)} and {checks.describe(ckv)}"
        )
    # Rows with scales of groups may keep their rotated numbers in the queries' dtype, which kernels have for bfloat16.
    grouped, same = scales is not None, (q.dtype,)
    narrow = (ckv.dtype, *(same if grouped and q.dtype == torch.bfloat16 else ()))
    tokens, pages = tuple(q.shape[:2]), tuple(ckv.shape[:2])
    of_q, of_cache = "[num_tokens, num_heads, n]", "[num_pages, page_size, n]"
    for name, x, dtypes, shape, axes in (
        ("q_pe", q_pe, same, (*tokens, q_pe.shape[-1]), of_q),
        ("ckv_cache", ckv, (NARROW,) if grouped else (*same, NARROW), (*pages, LATENT), of_cache),
        ("kpe_cache", kpe, narrow, (*pages, kpe.shape[-1]), of_cache),
        ("ckv_scale_arr", scales, (torch.float32,), (*pages, LATENT // GROUP), of_cache),
    ):
        if x is not None:
            checks.operand(name, x, dtypes, shape, axes, q.device)
    beside = ("ckv_scale_arr", scales) if grouped else ("ckv_cache", ckv)
    call = call._replace(q_nope=_readable(("q_nope", q), ("ckv_cache", ckv), beside))
    if not kpe.shape[-1]:
        return call
    return call._replace(q_pe=_readable(("q_pe", q_pe), ("ckv_cache", ckv), ("kpe_cache", kpe)))


def _readable(*parts: tuple[str, torch.Tensor]) -> torch.Tensor:
    """Return one part of queries as kernels read it. Two parts of the cache are refused where kernels cannot."""
    names, (q, k, v) = zip(*parts, strict=True)
    for name, x in parts[1:]:
        if max(operands.outer_strides(x), default=0) * x.itemsize > MAX_INDEX:
            raise ArgumentError(f"{name} must have strides of at most {MAX_INDEX} bytes, got strides {x.stride()}")
    return operands.readable(q, k, v, operands.placement(q, k, v), names, operands.ALIGNMENT)


# ---- problems


def mla_problem(call: MlaCall, lengths: MlaLengths) -> MlaProblem:
    """Check a call and allocate the outputs that the caller did not pass."""
    scratch = operands.partials_in("workspace_buffer", call.workspace_buffer)
    given, call = call, _check_parts(call)
    q, _, ckv, kpe, scales_of_groups, *_ = call
    checks.device("workspace_buffer", call.workspace_buffer, q.device)
    checks.device("kv_indices", lengths.kv_indices, q.device)
    sm_scale, scale = operands.split_scale("bmm1_scale", call.bmm1_scale, q.device)
    sm_scale = checks.real("bmm1_scale", sm_scale)
    v_number, v_scale = operands.split_scale("bmm2_scale", call.bmm2_scale, q.device)
    v_number = checks.real("bmm2_scale", v_number)
    if call.enable_pdl is not None:
        checks.boolean("enable_pdl", call.enable_pdl)
    scales = ("ckv_scale", call.ckv_scale), ("kpe_scale", call.kpe_scale)
    ckv_scale, kpe_scale = (checks.positive(name, x, 1.0) for name, x in scales)
    if ckv.dtype == NARROW != kpe.dtype and kpe_scale != 1.0:
        raise ArgumentError(f"kpe_scale must be 1 for rotated columns of 16 bits, got {kpe_scale}")
    settings = MlaSettings(
        q.device,
        q.dtype,
        ckv.dtype,
        8 * kpe.itemsize if kpe.shape[-1] else 0,
        scales_of_groups is not None,
        q.shape[1],
        ckv.shape[1],
        checks.boolean("causal", call.causal),
        LSE_BASES[call.lse_base],
        call.enable_pdl,
    )
    numbers = MlaScales(
        checks.real("sm_scale * ckv_scale", sm_scale * ckv_scale),
        checks.real("sm_scale * kpe_scale", sm_scale * kpe_scale),
        checks.real("bmm2_scale * ckv_scale", v_number * ckv_scale),
    )
    buffers = call.out, call.lse, call.lse is None and checks.boolean("return_lse", call.return_lse)
    out, lse = operands.outputs(q, buffers, (LATENT, q.dtype), tuple(q.shape[:2]), "num_tokens, num_heads")
    written = ("workspace_buffer", call.workspace_buffer), ("out", out), ("lse", lse)
    read = given._replace(workspace_buffer=None, out=None, lse=None)._asdict() | lengths.arrays()
    checks.apart(written, read.items())
    sinks = None if call.sinks is None else operands.per_head("sinks", call.sinks, q.shape[1], q.device)
    extras = Extras(scale, None, v_scale, sinks, q_pe=call.q_pe, ckv_scales=scales_of_groups)
    return MlaProblem(settings, numbers, lengths, q, ckv, kpe, out, lse, scratch, extras)


def check_values(problem: MlaProblem) -> None:
    """Check lengths and page numbers, which launches trust. On a GPU this synchronises."""
    lengths, page_size = problem.lengths, problem.settings.page_size
    used = UsedPages.of(*lengths.on_host(page_size), page_size)
    used.check(used.take(lengths.kv_indices), problem.k.shape[0], "kv_indices")
    if lengths.qo_indptr is not None:
        bounds, rows = lengths.qo_indptr.tolist(), problem.q.shape[0]
        operands.check_bounds("qo_indptr", bounds, lengths.qo_len)
        if bounds[-1] > rows:
            raise ArgumentError(f"qo_indptr must end at most at {rows}, the rows of queries, got {bounds[-1]}")
