"""What one attention call, or one batch, computes, after every user error has been raised.

`Features` holds all that can change which code runs, `Settings` all that repeated calls have in common: they are the
keys under which selection and preparation are cached. `Problem` adds the tensors and lengths of a single request.
Batches are planned once and run many times: `BatchLengths` or `DeviceLengths`, and `BatchLimits`, describe what a plan
schedules, `BatchPlan` what it leaves for its runs, `BatchProblem` one run. `DecodeProblem` is a batch without a plan:
its lengths stay on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import RuntimeArgumentError


class Features(NamedTuple):
    """The structure of a problem: hashable, without scale factors, lengths, and of strides and addresses only whether
    some strides are 0 and how rows are aligned.
    """

    device: torch.device
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    custom_mask: bool = False
    soft_cap: bool = False
    pos_encoding_mode: str = "NONE"  # NONE | ROPE_LLAMA | ALIBI
    positive_scale: bool = True  # sm_scale and its float factors multiply to a number > 0 that fp32 holds
    per_head_scales: bool = False  # scale_q / scale_k / scale_v tensors of fp8 attention
    kv_block_scales: bool = False  # kv_cache_sf: NVFP4 KV
    sinks: bool = False
    kv_source: str = "dense"  # dense: a single request | ragged | paged
    expanded: bool = False  # q, k or v has a stride of 0 on an axis longer than 1
    decode: bool = False  # query tokens are the newest of their request, and each sees the keys up to its own
    # ^ of plans, which know the most of a request: `BatchLimits.max_qo_len`
    own_splits: bool = False  # fixed_split_size or disable_split_kv: splits depend on the request's own lengths only
    large_cache: bool = False  # paged k or v spans 64 GiB or more
    loose_scales: bool = False  # block scales of a token do not start at a multiple of their size, at most 16 bytes
    device_lengths: bool = False  # lengths and page tables are on the device, and no plan is made: `DecodeProblem`
    draft_mask: bool = False  # mask bits say which draft tokens a query token sees
    multi_item: bool = False  # multi-item scoring: `BatchLengths.key_bounds`
    half_aligned_kv: bool = False  # not all rows of fp8 or NVFP4 k and v start at multiples of 16 bytes
    key_ranges: bool = False  # causal, and besides a range of keys per token, which a run brings

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim_qk, self.head_dim_vo

    def packed_rows(self, qo_len: int) -> int:
        """Return the rows of attention of a kv head: of all query heads of its group, token by token."""
        return qo_len * (self.num_qo_heads // self.num_kv_heads)

    @property
    def chunk_invariant(self) -> bool:
        """Whether the bits of a query token must depend on its own request alone, and not on how that was cut into
        chunks: what rounds them (the backend, the columns of its tile) must then not follow from lengths.
        """
        return self.own_splits and not self.decode


class Settings(NamedTuple):
    """Features and the numbers of a call: hashable, without lengths, addresses and strides."""

    features: Features
    kv_layout: str = "NHD"
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float = 1.0  # product of sm_scale and all float q/k scales
    v_scale: float = 1.0
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    enable_pdl: bool | None = None
    lse_scale: float = 1.0  # lse is base 2 times this: 1 for lse_base "log2", ln(2) for "ln"
    page_size: int = 1  # tokens per page, for kv_source "paged"
    range_windows: tuple[int, int] = (-1, -1)
    # ^ features.key_ranges, of a run: `window_left` of the causal keys, which schedules do not know; and > 0: keys of a
    # ^ token's range up to itself that it sees

    @property
    def unscaled(self) -> Settings:
        """Those of all calls that differ in scales, which decide neither kernel nor schedule."""
        return self._replace(sm_scale=1.0, v_scale=1.0)


class Extras(NamedTuple):
    """Tensors that a problem may lack, in the order in which kernels take them (`kernels.host.operands.ROLES`)."""

    scale0: torch.Tensor | None = None  # one-element fp32 device tensors: two factors of sm_scale, and one of v_scale
    scale1: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [num_qo_heads] fp32, natural-log domain
    mask: torch.Tensor | None = None  # uint8, bit (qo_idx * kv_len + kv_idx), little bit order; of a batch the bits of
    # ^ a request from BatchLengths.mask_offset on. features.key_ranges: int32 [rows, 2], the first and the last key of
    # ^ each token's range, (-1, -1) for none
    scale_q: torch.Tensor | None = None  # features.per_head_scales: fp32 [num_qo_heads], and twice [num_kv_heads]
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    k_scales: torch.Tensor | None = None  # features.kv_block_scales: e4m3, k's and v's shapes with one number per 16
    v_scales: torch.Tensor | None = None  # ^ elements of the last axis
    q_pe: torch.Tensor | None = None  # of latent attention: rotated columns of q
    ckv_scales: torch.Tensor | None = None  # [num_pages, page_size, groups] fp32, factors of groups of latent columns


NO_EXTRAS = Extras()


class Problem(NamedTuple):
    """One single-request call. Lengths count tokens. Last axes have unit stride; all other strides are free.

    With `qo_len` 1, q, out and lse may lack their first axis, as in decode.
    """

    settings: Settings
    qo_len: int
    kv_len: int
    q: torch.Tensor  # [qo_len, num_qo_heads, head_dim_qk]
    k: torch.Tensor  # [kv_len, num_kv_heads, head_dim_qk] (NHD) or [num_kv_heads, kv_len, head_dim_qk] (HND)
    v: torch.Tensor  # like k, with head_dim_vo
    out: torch.Tensor  # [qo_len, num_qo_heads, head_dim_vo]
    lse: torch.Tensor | None  # [qo_len, num_qo_heads] fp32, base 2 times settings.lse_scale
    extras: Extras = NO_EXTRAS
    key_bounds: torch.Tensor | None = None  # int32 [qo_len, 2]: rows of `BatchLengths.key_bounds`


class BatchProblem(NamedTuple):
    """One run of a planned batch. Last axes have unit stride; all other strides are free.

    `settings` may differ from the planned ones in sm_scale, v_scale, enable_pdl, and the features that only a run
    knows: positive_scale, per_head_scales, sinks and half_aligned_kv; and in range_windows.
    """

    settings: Settings
    q: torch.Tensor  # [rows, num_qo_heads, head_dim_qk]
    k: torch.Tensor  # ragged: like Problem.k; paged: [pages, page_size, num_kv_heads, head_dim_qk] (NHD) or
    # ^ [pages, num_kv_heads, page_size, head_dim_qk] (HND)
    v: torch.Tensor  # like k, with head_dim_vo
    out: torch.Tensor  # [rows, num_qo_heads, head_dim_vo]
    lse: torch.Tensor | None  # [rows, num_qo_heads] fp32, base 2 times settings.lse_scale
    kv_indices: torch.Tensor | None = None  # paged: int32 page numbers
    extras: Extras = NO_EXTRAS
    workspace: torch.Tensor | None = None  # uint8, on the device; its size is BatchLimits.workspace_bytes


class BatchLengths:
    """Where the tokens of each request of a batch are, on the host: int64 arrays."""

    def __init__(
        self,
        qo_indptr: np.ndarray | None,  # [batch_size + 1]; None: `q_len` query tokens of every request
        kv_indptr: np.ndarray,  # [batch_size + 1]: rows of ragged k and v, or indices into kv_indices; without an end
        # ^ where only a schedule is made of the lengths
        kv_len: np.ndarray,  # [batch_size], tokens
        mask_offset: np.ndarray | None = None,  # [batch_size]: first byte of a request's bits in the packed mask
        key_bounds: np.ndarray | None = None,  # multi-item scoring: int32 [rows, 2], for every row of q the end of
        # ^ the prefix and the first key of its item, which does not decrease within a request; keys between are hidden
        q_len: int | None = None,  # query tokens of every request, where the plan fixes them (decode)
        last_page_len: np.ndarray | None = None,  # paged: [batch_size], tokens in last pages; buffers of graphs take it
        kv_indices: torch.Tensor | None = None,  # paged: int32 on the device once the wrapper has copied it there
        qo_len: np.ndarray | None = None,  # the steps of qo_indptr, where they are known
    ) -> None:
        if qo_indptr is not None:
            self.qo_indptr = qo_indptr
        self.kv_indptr, self.kv_len = kv_indptr, kv_len
        self.mask_offset, self.key_bounds = mask_offset, key_bounds
        self.q_len, self.last_page_len, self.kv_indices = q_len, last_page_len, kv_indices
        self.batch_size = size = len(kv_len)
        # The most keys and query tokens of a request, the requests that have query tokens, rows of q, out and lse, and
        # the first of them: rows before it belong to no request.
        self.longest_kv = largest(kv_len) if size else 0
        if q_len and size:
            self.longest_qo, self.with_queries, self.rows, self.first_row = q_len, size, q_len * size, 0
        else:
            if qo_len is not None:
                self.qo_len = qo_len
            self.longest_qo = largest(self.qo_len) if size else 0
            self.with_queries = int(np.count_nonzero(self.qo_len))
            self.rows, self.first_row = self.qo_indptr.item(-1), self.qo_indptr.item(0)

    def replace(self, **changes: Any) -> BatchLengths:
        """Return lengths with another mask_offset, key_bounds, kv_indices or kv_indptr."""
        changed = object.__new__(BatchLengths)
        changed.__dict__.update(self.__dict__, **changes)
        return changed

    @property
    def host(self) -> BatchLengths:
        """The lengths on the host."""
        return self

    @property
    def kv_start(self) -> np.ndarray:
        """Where token 0 of each request is: its row of ragged k and v, or the index of its page."""
        return self.kv_indptr[: self.batch_size]

    @property
    def kv_end(self) -> int:
        """Number of rows that ragged k and v must have, or of entries that kv_indices must have."""
        return int(self.kv_indptr.item(-1))

    @functools.cached_property
    def qo_indptr(self) -> np.ndarray:
        """Where the query tokens of each request are; of uniform lengths few read it."""
        assert self.q_len is not None
        return np.arange(self.batch_size + 1, dtype=np.int64) * self.q_len

    @functools.cached_property
    def qo_len(self) -> np.ndarray:
        """Query tokens of each request."""
        return self.qo_indptr[1:] - self.qo_indptr[:-1]

    @property
    def total_kv(self) -> int:
        """Keys of all requests."""
        return total(self.kv_len)


UNLIMITED = 1 << 62  # bytes or records
_NO_REQUESTS = np.zeros(0, np.int64)
NO_LENGTHS = BatchLengths(np.zeros(1, np.int64), _NO_REQUESTS, _NO_REQUESTS, _NO_REQUESTS)
# ^ in place of those on the device, where `BatchLimits.sizes` decides


@dataclass(eq=False)  # tensors compare by a launch
class DeviceLengths:
    """`BatchLengths` in contiguous int32 tensors on the device, for plans that do not read them. What needs them on the
    host reads them there, once, with a synchronisation: `host`.
    """

    qo_indptr: torch.Tensor | None  # [batch_size + 1]; None: every request has `q_len` query tokens
    kv_indptr: torch.Tensor  # [batch_size + 1]
    last_page_len: torch.Tensor | None  # paged: [batch_size]
    kv_end: int  # most rows of ragged k and v, or entries of kv_indices, that launches read
    q_len: int | None = None
    kv_indices: torch.Tensor | None = None
    rows: int | None = None  # of q, None until a run tells; rows past those of requests belong to none
    longest_qo: int | None = None  # upper bounds of the query tokens and the keys of a request, where the caller knows
    longest_kv: int | None = None
    read: Callable[[DeviceLengths], BatchLengths] | None = None  # checks them, and raises what `plan` raises of them

    key_bounds = None
    first_row = 0  # whatever rows before those of requests there are

    def __post_init__(self) -> None:
        self._versions = self._current_versions()

    @property
    def batch_size(self) -> int:
        return self.kv_indptr.shape[0] - 1

    def arrays(self) -> dict[str, Any]:
        """Return the index arrays that there are, by name."""
        named = {name: getattr(self, name) for name in ("qo_indptr", "kv_indptr", "last_page_len")}
        return {name: x for name, x in named.items() if x is not None}

    def _current_versions(self) -> list[int]:
        return [x._version for x in self.arrays().values() if not x.is_inference()]  # these count no versions

    def check_unchanged(self) -> None:
        """Refuse to read index arrays that were written after the plan."""
        if self._versions != self._current_versions():
            raise RuntimeArgumentError(
                "index arrays on the GPU must not be written after plan() if what comes then reads them: a schedule "
                "for other heads or options, or an attribute of the wrapper"
            )

    @functools.cached_property
    def host(self) -> BatchLengths:
        """The lengths on the host."""
        self.check_unchanged()
        assert self.read is not None  # of plans
        return self.read(self).replace(kv_indices=self.kv_indices)

    def replace(self, **changes: Any) -> DeviceLengths:
        """Return lengths with other fields."""
        return replace(self, **changes)


Lengths = BatchLengths | DeviceLengths


class LaunchSizes(NamedTuple):
    """Sizes that launches have room for: of a batch, of lengths on the device, or of all plans of a captured one."""

    batch_size: int
    max_rows: int  # query tokens
    max_kv_tokens: int
    max_qo_len: int | None = None  # most query tokens of a request, where known (decode): allows a smaller launch


class BatchLimits(NamedTuple):
    """Memory that a schedule may use, and how it may split the keys."""

    workspace_bytes: int
    fixed_split_size: int | None = None  # tokens
    disable_split_kv: bool = False
    sizes: LaunchSizes | None = None  # sizes that launches have room for; None: those that the lengths need
    max_qo_len: int | None = None  # most query tokens of a request, where known (decode)
    keeps_address: bool = False  # later plans write their records to the same address, as CUDA graphs need it


@dataclass
class BatchPlan:
    """What a plan leaves for its runs: the settings, the launch, and what repeats earlier runs."""

    settings: Settings
    lengths: Lengths
    limits: BatchLimits
    launch: Any  # `kernels.host.operands.Runner`
    check_supported: Callable[[Features], None]  # raises if the planned backend refuses features that a run adds
    packed_mask: torch.Tensor | None
    workspace: torch.Tensor
    validate: bool  # check page numbers before every launch
    backend: str = ""  # its name
    load: Any = None  # `dispatch.capabilities.Load` by which the plan chose the backend; None: a run chose it
    staging: Any = None  # `runtime.staging.Staging` of the schedule
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # of CUDA graphs, by name
    cached_runs: dict[Any, Any] = field(default_factory=dict)  # `wrappers.calls.Entry` by key
    run_settings: Callable[..., Settings] | None = None  # `request.batch_run` keeps the settings of runs here
    protected: list[tuple[int, int]] | None = None  # memory that runs must not write, once a run asks for it

    @property
    def rows(self) -> int:
        """Rows of q, out and lse."""
        assert self.lengths.rows is not None  # a plan is made once they are known
        return self.lengths.rows

    def follow(self, now: Lengths, same_launches: bool) -> None:
        """Take other lengths, whose schedule `launch` has. Earlier runs may be repeated if their tensors have the
        shapes that these lengths need, and their launches differ only in what the plan decides (`same_launches`).
        """
        before, self.lengths, self.protected = self.lengths, now, None
        same_shapes = before.rows == now.rows and (now.kv_indices is not None or before.kv_end == now.kv_end)
        if self.cached_runs and not (same_launches and same_shapes and not now.first_row):
            self.cached_runs.clear()


class Scratch(NamedTuple):
    """Memory of the caller that one launch uses: a counter per CTA, zero before and after, and partial results. Both
    may be in the same buffer.
    """

    counter_buffer: torch.Tensor
    partial_buffer: torch.Tensor
    counters: int  # addresses
    partials: int
    counter_bytes: int
    partial_bytes: int


class DecodeProblem(NamedTuple):
    """One decode call without a plan. Lengths and page tables are read only on the device, so that a captured launch
    may be replayed with others. `features.device_lengths` is set, and `settings.kv_layout` is "NHD".
    """

    settings: Settings
    qo_len: int  # query tokens of every request; with `qo_indptr` the most of any
    q: torch.Tensor  # [num_tokens, num_qo_heads, head_dim]
    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim], NVFP4: head_dim / 2; any strides but the last
    v: torch.Tensor  # like k
    out: torch.Tensor  # like q
    lse: torch.Tensor | None  # [num_tokens, num_qo_heads] fp32, base 2
    block_tables: torch.Tensor  # [batch_size, max_pages] int32
    seq_lens: torch.Tensor  # [batch_size] int32 or uint32: keys of each request
    max_kv_len: int  # no request has more keys, whatever `seq_lens` says
    scratch: Scratch
    qo_indptr: torch.Tensor | None = None  # [batch_size + 1] int32 or uint32: ragged queries
    draft_mask: torch.Tensor | None = None  # [num_tokens, words]: bit j of row r says whether r sees draft token j
    extras: Extras = NO_EXTRAS


Request = Problem | DecodeProblem  # runs without a plan


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def largest(numbers: np.ndarray) -> int:
    """Return the largest of a few integers, in a fourth of the time of an array's `max`."""
    return int(numbers.item(numbers.argmax()))


def smallest(numbers: np.ndarray) -> int:
    """Return the smallest of a few integers, in a fourth of the time of an array's `min`."""
    return int(numbers.item(numbers.argmin()))


def total(numbers: np.ndarray) -> int:
    """Return the sum of a few integers, in less than the time of an array's `sum`."""
    return int(numbers.cumsum().item(-1)) if len(numbers) else 0


def draft_mask_bytes(qo_len: int) -> int:
    """Return the bytes of a row of draft-mask bits: whole 32-bit words."""
    return -(-qo_len // 32) * 4
