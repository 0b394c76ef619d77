"""Attention in plain torch: the reference that every kernel is tested against, and the backend of CPU tensors.

For query row i and key j of one head, in the natural-log domain:

    z_ij  = scale * q_i·k_j           scale: sm_scale times every q/k scale; q and k rotated first under RoPE
    z_ij += slope * (j - i)           ALiBi
    z_ij  = cap * tanh(z_ij / cap)    soft cap
    z_ij  = -inf                      where the mask hides j from i
    lse_i = log2(sum_j exp(z_ij) + exp(sink))
    o_i   = v_scale * sum_j exp(z_ij) * v_j / (sum_j exp(z_ij) + exp(sink))

A row that sees no key has o = 0 and lse = -inf (with a sink: o = 0, lse = sink * log2(e)).
Hidden keys may hold anything in k. In v they must be finite: o sums over all keys of the request, hidden ones with
weight 0, and 0 * NaN is NaN. So it is in the GPU's kernels, which leave out only some of the hidden keys.
A batch is one such problem per request; keys of paged caches are gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_attn.problem import BatchLengths, BatchProblem, DecodeProblem, Problem, Settings
from cute_attn.request import caches
from cute_attn.request.bit_packing import packbits

LOG2E = math.log2(math.e)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of codes 0..7; bit 3 is the sign
E2M1_BLOCK = 16  # elements per scale
Select = Callable[[torch.Tensor], torch.Tensor]  # from k, v or block scales to a request's `[kv_len, heads, width]`
CHUNK_BYTES = 128 << 20  # scores of one chunk of query rows; about six tensors of this size are alive at once


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return ALiBi slopes, fp32 `[num_heads]` (Press et al. 2022).

    With n the largest power of two <= num_heads: 2^(-8i/n) for i = 1..n, then every other slope of the series
    for 2n heads: 2^(-4(2j-1)/n).
    """
    n = 1 << (num_heads.bit_length() - 1)
    powers = [-8 * i / n for i in range(1, n + 1)]
    powers += [-4 * (2 * j - 1) / n for j in range(1, num_heads - n + 1)]
    return torch.tensor([2.0**p for p in powers], dtype=torch.float32, device=device)


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    theta: float = 1e4,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Apply rotary embedding to the full head dimension, in pairs (d, d + D/2) (NeoX order).

    `x` is `[len, heads, D]`, `positions` `[len]`; pair d is rotated by `position * theta^(-2d/D) / scale`.
    Computed in fp64, returned in `dtype` (default: x's).
    """
    head_dim = x.shape[-1]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=x.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * torch.pow(theta, -exponents) / scale
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.to(torch.float64).chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(dtype or x.dtype)


def unpack_mask(packed: torch.Tensor, qo_len: int, kv_len: int) -> torch.Tensor:
    """Unpack bool `[qo_len, kv_len]`: bit qo_idx * kv_len + kv_idx, least significant bit first."""
    size = qo_len * kv_len
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[: (size + 7) // 8, None] >> shifts) & 1
    return bits.reshape(-1)[:size].reshape(qo_len, kv_len).bool()


def nvfp4_values(packed: torch.Tensor, block_scales: torch.Tensor) -> torch.Tensor:
    """Dequantise NVFP4, uint8 `[..., D / 2]` (low nibble first) with e4m3 scales `[..., D / 16]`, to fp32 `[..., D]`.

    The result is exact: a product of code and scale has at most six significant bits.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float32, device=packed.device)[codes]
    return values * block_scales.to(torch.float32).repeat_interleave(E2M1_BLOCK, dim=-1)


@dataclass(frozen=True)
class Mask:
    """Keys that a query row sees. Row i has position i + kv_len - qo_len (bottom-right alignment)."""

    causal: bool = False  # no keys after the row's position
    window_left: int = -1  # >= 0: hides keys more than this many before the position, but none after it
    keep: torch.Tensor | None = None  # bool [qo_len, kv_len]; replaces `causal`; the window still applies
    key_bounds: torch.Tensor | None = None  # int [qo_len, 2]: row i sees no key of [key_bounds[i, 0], key_bounds[i, 1])
    ranges: torch.Tensor | None = None  # int [qo_len, 2]: row i sees the keys from ranges[i, 0] to ranges[i, 1], too
    range_window: int = -1  # > 0: hides keys of a range that are this many or more before the position

    def visible(self, rows: range, qo_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        """Return bool `[len(rows), kv_len]`, the visible keys of `rows`."""
        position = torch.arange(rows.start, rows.stop, device=device)[:, None] + (kv_len - qo_len)
        key = torch.arange(kv_len, device=device)
        if self.keep is not None:
            visible = self.keep[rows.start : rows.stop]
        elif self.causal:
            visible = key <= position
        else:
            visible = torch.ones(len(rows), kv_len, dtype=torch.bool, device=device)
        if self.window_left >= 0:
            visible = visible & (key >= position - self.window_left)
        if self.key_bounds is not None:
            prefix_end, item_start = self.key_bounds[rows.start : rows.stop].unsqueeze(-1).unbind(1)
            visible = visible & ((key < prefix_end) | (key >= item_start))
        if self.ranges is not None:
            first, last = self.ranges[rows.start : rows.stop].unsqueeze(-1).unbind(1)
            near = key > position - self.range_window if self.range_window > 0 else key >= 0
            visible = visible | ((key >= first) & (key <= last) & near)
        return visible


@dataclass(frozen=True)
class Logits:
    """Modifications of a raw score q·k, in this order: scale, ALiBi, soft cap."""

    scale: float | torch.Tensor  # a number, or one per query head
    soft_cap: float = 0.0  # <= 0: off
    alibi_slopes: torch.Tensor | None = None  # [num_qo_heads]

    def apply(self, scores: torch.Tensor, rows: range, heads: slice) -> torch.Tensor:
        """Return the logits of `scores` `[rows, heads, kv_len]`. ALiBi counts query rows from 0."""
        scale = self.scale[heads, None] if isinstance(self.scale, torch.Tensor) else self.scale
        z = scores * scale
        if self.alibi_slopes is not None:
            key = torch.arange(z.shape[-1], device=z.device)
            row = torch.arange(rows.start, rows.stop, device=z.device)
            slopes = self.alibi_slopes[heads].to(z.dtype)
            z = z + slopes[:, None] * (key - row[:, None])[:, None]
        if self.soft_cap > 0:
            z = self.soft_cap * torch.tanh(z / self.soft_cap)
        return z


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    logits: Logits | None = None,
    mask: Mask | None = None,
    sinks: torch.Tensor | None = None,
    v_scale: float | torch.Tensor = 1.0,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of q `[qo_len, num_qo_heads, head_dim_qk]` over k, v `[kv_len, num_kv_heads, head_dim_*]`.

    Takes any float dtypes (fp8 included) and strides; query head h reads kv head h * num_kv_heads // num_qo_heads.
    `logits` defaults to a scale of head_dim_qk**-0.5, `mask` to all keys; `sinks` is `[num_qo_heads]` in the
    natural-log domain, `v_scale` a number or one per query head. Returns o `[qo_len, num_qo_heads, head_dim_vo]` and
    the base-2 lse `[qo_len, num_qo_heads]`, both in `compute_dtype`.
    """
    qo_len, num_qo_heads, head_dim_qk = q.shape
    kv_len, num_kv_heads, head_dim_vo = v.shape
    logits = logits or Logits(head_dim_qk**-0.5)
    mask = mask or Mask()
    group = num_qo_heads // num_kv_heads
    o = torch.empty(qo_len, num_qo_heads, head_dim_vo, dtype=compute_dtype, device=q.device)
    lse = torch.empty(qo_len, num_qo_heads, dtype=compute_dtype, device=q.device)
    step = max(1, CHUNK_BYTES // (max(1, group * kv_len) * compute_dtype.itemsize))
    with torch.autocast(q.device.type, enabled=False):  # it would round the operands of both products
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            keys, values = k[:, kv_head].to(compute_dtype), v[:, kv_head].to(compute_dtype)
            sink = None if sinks is None else sinks[heads].to(compute_dtype)
            for start in range(0, qo_len, step):
                rows = range(start, min(start + step, qo_len))
                visible = mask.visible(rows, qo_len, kv_len, q.device)
                scores = q[start : rows.stop, heads].to(compute_dtype) @ keys.T
                z = logits.apply(scores, rows, heads).masked_fill(~visible[:, None], -math.inf)
                weights, lse[start : rows.stop, heads] = _softmax(z, sink)
                o[start : rows.stop, heads] = weights @ values
    scale = v_scale[:, None] if isinstance(v_scale, torch.Tensor) else v_scale
    return o * scale, lse * LOG2E


def _softmax(z: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and natural-log lse over the last axis; a row of -inf gets weights of 0."""
    lse = torch.logsumexp(z, dim=-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink)
    return torch.exp(z - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), lse


def run(problem: Problem, dtype: torch.dtype = torch.float64) -> None:
    """Compute `problem.out` and `problem.lse` on their device in `dtype` (fp64 or fp32).

    After RoPE q and k are rounded to q's dtype if that has 16 bits, as a kernel with 16-bit matrix instructions must.
    fp32 on CUDA follows torch's TF32 switches: compare kernels with fp64.
    """
    features = problem.settings.features
    q, k, v = problem.q, problem.k, problem.v
    extras = problem.extras
    if extras.k_scales is not None and extras.v_scales is not None:
        k, v = nvfp4_values(k, extras.k_scales), nvfp4_values(v, extras.v_scales)
    if q.dim() == 2:
        q = q.unsqueeze(0)
    if problem.settings.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if features.pos_encoding_mode == "ROPE_LLAMA":
        rounded = q.dtype if q.dtype.itemsize == 2 else dtype
        key = torch.arange(problem.kv_len, device=q.device)
        row = torch.arange(problem.qo_len, device=q.device) + (problem.kv_len - problem.qo_len)
        q, k = (
            rope(x, positions, theta=problem.settings.rope_theta, scale=problem.settings.rope_scale, dtype=rounded)
            for x, positions in ((q, row), (k, key))
        )
    scale, v_scale = _head_scales(problem, dtype)
    slopes = alibi_slopes(q.shape[1], q.device) if features.pos_encoding_mode == "ALIBI" else None
    o, lse = attention(
        q,
        k,
        v,
        logits=Logits(scale, problem.settings.logits_soft_cap, slopes),
        mask=_mask(problem),
        sinks=extras.sinks,
        v_scale=v_scale,
        compute_dtype=dtype,
    )
    problem.out.copy_(_saturated(o, problem.out.dtype).view(problem.out.shape))
    if problem.lse is not None:
        problem.lse.copy_(lse.view(problem.lse.shape) * problem.settings.lse_scale)


def _mask(problem: Problem) -> Mask:
    """Return the mask of a single request."""
    settings, packed = problem.settings, problem.extras.mask
    if problem.settings.features.key_ranges:
        window_left, range_window = settings.range_windows
        return Mask(True, window_left, ranges=packed, range_window=range_window)
    keep = None if packed is None else unpack_mask(packed, problem.qo_len, problem.kv_len)
    return Mask(settings.causal, settings.window_left, keep, problem.key_bounds)


def _saturated(o: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamp `o` to the range of an 8-bit dtype, as kernels convert; torch converts what is beyond to NaN."""
    if dtype.itemsize > 1:
        return o
    largest = torch.finfo(dtype).max
    return o.clamp(-largest, largest)


def run_batch(problem: BatchProblem, lengths: BatchLengths) -> None:
    """Compute every request of `problem` like `run`. Checks page ids, since torch would read the last page at -1."""
    if problem.kv_indices is not None:
        caches.check_pages(problem, lengths)
    for i, kv_len in enumerate(lengths.kv_len.tolist()):
        rows = slice(int(lengths.qo_indptr[i]), int(lengths.qo_indptr[i + 1]))
        select = _tokens(problem, int(lengths.kv_start[i]), kv_len)
        first = 0 if lengths.mask_offset is None else int(lengths.mask_offset[i])
        part = rows if problem.settings.features.key_ranges else slice(first, None)
        mask = None if problem.extras.mask is None else problem.extras.mask[part]
        request = _request(problem, rows, kv_len, select, mask)
        if lengths.key_bounds is not None:
            bounds = torch.from_numpy(lengths.key_bounds[rows]).to(problem.q.device)
            request = request._replace(key_bounds=bounds)
        run(request)


def run_decode(problem: DecodeProblem) -> None:
    """Compute every request of `problem` like `run`, after reading the lengths."""
    qo_len = problem.qo_len
    kv_lens = problem.seq_lens.to(torch.int64).clamp(max=problem.max_kv_len).tolist()
    qo_indptr = [i * qo_len for i in range(len(kv_lens) + 1)]
    if problem.qo_indptr is not None:
        qo_indptr = problem.qo_indptr.to(torch.int64).tolist()
    for i, kv_len in enumerate(kv_lens):
        rows = slice(qo_indptr[i], qo_indptr[i + 1])
        select = _page_tokens(problem.settings, problem.block_tables[i], kv_len)
        mask = None if problem.draft_mask is None else _packed_mask(problem.draft_mask[rows], kv_len)
        run(_request(problem, rows, kv_len, select, mask))


def _request(
    problem: BatchProblem | DecodeProblem,
    rows: slice,
    kv_len: int,
    select: Select,
    mask: torch.Tensor | None,
) -> Problem:
    """Return one request of a batch: rows of q, out and lse, and the tokens that `select` returns."""
    extras = problem.extras._replace(mask=mask)
    if extras.k_scales is not None and extras.v_scales is not None:
        extras = extras._replace(k_scales=select(extras.k_scales), v_scales=select(extras.v_scales))
    return Problem(
        problem.settings._replace(kv_layout="NHD"),
        rows.stop - rows.start,
        kv_len,
        problem.q[rows],
        select(problem.k),
        select(problem.v),
        problem.out[rows],
        None if problem.lse is None else problem.lse[rows],
        extras,
    )


def _packed_mask(draft_mask: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Return `Extras.mask` of a request's draft mask. Bit j of its row r says whether r sees draft token j,
    which is key kv_len - qo_len + j; keys before the draft are visible to all.
    """
    qo_len, words = draft_mask.shape
    bits = unpack_mask(draft_mask.contiguous().view(torch.uint8).flatten(), qo_len, 8 * words * draft_mask.itemsize)
    keep = torch.ones(qo_len, kv_len, dtype=torch.bool, device=draft_mask.device)
    start = max(0, kv_len - qo_len)
    keep[:, start:] = bits[:, start - (kv_len - qo_len) : qo_len]
    return packbits(keep.flatten(), "little")


def _tokens(problem: BatchProblem, start: int, kv_len: int) -> Select:
    """Return how to select the tokens of a request: `start` is a row of ragged k and v or an index into kv_indices."""
    if problem.kv_indices is not None:
        return _page_tokens(problem.settings, problem.kv_indices[start:], kv_len)
    tokens_first = problem.settings.kv_layout != "HND"
    return lambda x: (x if tokens_first else x.transpose(0, 1)).narrow(0, start, kv_len)


def _page_tokens(settings: Settings, pages: torch.Tensor, kv_len: int) -> Select:
    """Return how to gather the tokens of a request whose pages come first in `pages`."""
    used = pages[: -(-kv_len // settings.page_size)].long()

    def select(x: torch.Tensor) -> torch.Tensor:
        page = x[used.clamp(0, max(0, len(x) - 1))]  # before a window a page may be none
        return (page.transpose(1, 2) if settings.kv_layout == "HND" else page).flatten(0, 1)[:kv_len]

    return select


def _head_scales(problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the scores and of the output, each `[num_qo_heads]`."""
    num_qo_heads, num_kv_heads = problem.settings.features.num_qo_heads, problem.settings.features.num_kv_heads
    ones = torch.ones(num_qo_heads, dtype=dtype, device=problem.q.device)
    scale, v_scale = ones * problem.settings.sm_scale, ones * problem.settings.v_scale
    e, group = problem.extras, num_qo_heads // num_kv_heads
    of_scores = (e.scale0, 1), (e.scale1, 1), (e.scale_q, 1), (e.scale_k, group)
    of_v = (e.v_scale, 1), (e.scale_v, group)
    for product, factors in ((scale, of_scores), (v_scale, of_v)):
        for factor, repeats in factors:
            if factor is not None:
                product *= factor.to(dtype).reshape(-1).repeat_interleave(repeats)
    return scale, v_scale
