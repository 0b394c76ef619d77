"""Check the arguments of a batch's `plan` beside the index arrays: options and settings, lengths that are given again,
masks, and buffers. Every user error is raised here and in `index_arrays`, before a schedule is made. What is not a
tensor is checked once: the steps of an engine differ in lengths.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.problem import NO_LENGTHS, BatchLengths, Features, Lengths, Settings
from cute_attn.request import checks, index_arrays, positional
from cute_attn.request.bit_packing import pack_segments
from cute_attn.request.operands import check_workspace
from cute_attn.request.settings import MAX_INDEX, MAX_ROWS, call_settings, once

UNSET = -1  # FlashInfer's number for a `fixed_split_size` that is not given
JIT_REASON = "variants written in CUDA are not part of this library"
JIT_INSTEAD = "sinks, custom_mask, logits_soft_cap or pos_encoding_mode"


class PlanOptions(NamedTuple):
    """The options of a `plan`, without lengths and masks; None stands for a default."""

    num_qo_heads: Any
    num_kv_heads: Any
    head_dim_qk: Any
    head_dim_vo: Any = None
    q_data_type: Any = "float16"
    kv_data_type: Any = None
    o_data_type: Any = None
    pos_encoding_mode: Any = "NONE"
    causal: Any = False
    window_left: Any = -1
    logits_soft_cap: Any = None
    sm_scale: Any = None
    rope_scale: Any = None
    rope_theta: Any = None
    lse_base: Any = "log2"

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **others: Any) -> PlanOptions:
        """Return the options among the arguments of a plan, by name, except `others`."""
        return cls(**{name: arguments[name] for name in cls._fields if name in arguments} | others)


class Mask(NamedTuple):
    """The packed masks of a batch."""

    packed: torch.Tensor | None  # uint8 on the device
    offsets: np.ndarray  # [batch_size + 1]: first byte of every request; not read without masks


# ---- settings


PLAN_NAMES = {  # what a single request says of dtypes, and what a plan says
    "q must have dtype": "q_data_type must be",
    "k must have dtype": "kv_data_type must be",
    "k and v must have dtype": "kv_data_type must be",
    "o_dtype must have dtype": "o_data_type must be",
}


def plan_settings(options: PlanOptions, kv_layout: str, page_size: int, **features: Any) -> Settings:
    """Check the options of a plan and return the settings they decide. `features`: those that do not follow from them,
    the device and the source of keys among them.
    """
    q_dtype = checks.dtype_of("q_data_type", options.q_data_type)
    kv_dtype = q_dtype if options.kv_data_type is None else checks.dtype_of("kv_data_type", options.kv_data_type)
    o_dtype = None if options.o_data_type is None else checks.dtype_of("o_data_type", options.o_data_type)
    head_dim_qk = count("head_dim_qk", options.head_dim_qk)
    head_dim_vo = head_dim_qk if options.head_dim_vo is None else count("head_dim_vo", options.head_dim_vo)
    packing = 2 if kv_dtype == torch.uint8 else 1
    if packing == 2 and (head_dim_qk % 2 or head_dim_vo % 2):  # two values per byte
        raise ArgumentError(f"NVFP4 (uint8) k and v need even head dimensions, got {head_dim_qk} and {head_dim_vo}")
    given = Features(
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        o_dtype=q_dtype,
        num_qo_heads=count("num_qo_heads", options.num_qo_heads),
        num_kv_heads=count("num_kv_heads", options.num_kv_heads),
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo // packing,
        kv_block_scales=packing == 2,
        **features,
    )
    stored = kv_dtype, head_dim_qk // packing, page_size
    *first, lse_base = options[PlanOptions._fields.index("pos_encoding_mode") :]  # in the order of `Call`
    try:  # not `checks.renamed`, whose context costs every plan 1 us
        return call_settings(given, *stored, kv_layout, *first, None, None, None, o_dtype, False, None, lse_base)
    except (ArgumentError, ArgumentTypeError) as error:
        checks.rename(error, PLAN_NAMES)
        raise


def count(name: str, value: Any) -> int:
    """Check an integer within 1..MAX_INDEX."""
    return checks.at_least(name, value, 1, MAX_INDEX)


class Splits(NamedTuple):
    """How a schedule may split keys."""

    fixed_split_size: int | None = None  # tokens
    disable_split_kv: bool = False


def splits(fixed_split_size: Any, disable_split_kv: Any, page_size: int) -> Splits:
    """Check the arguments about splits. `fixed_split_size` counts pages, -1 stands for None; `Splits` counts tokens.

    Without splits their size has no meaning: `disable_split_kv` wins, as in FlashInfer's scheduler.
    """
    checks.boolean("disable_split_kv", disable_split_kv)
    if fixed_split_size is None or checks.integer("fixed_split_size", fixed_split_size) == UNSET:
        return Splits(None, disable_split_kv)
    tokens = count("fixed_split_size", fixed_split_size) * page_size
    return Splits(None, True) if disable_split_kv else Splits(tokens, False)


@once
def prefill_arguments(
    page_size: Any,
    use_fp16_qk_reduction: Any,
    non_blocking: Any,
    fixed_split_size: Any,
    disable_split_kv: Any,
    *options: Any,
) -> PlanRequest:
    """Check the arguments of a prefill plan, and return the request without lengths and mask; `options`: fields of
    PlanOptions.
    """
    given = PlanOptions(*options)
    positional.check_plan(given.head_dim_vo, given.causal)
    checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
    checks.boolean("non_blocking", non_blocking)
    size = count("page_size", page_size)
    return PlanRequest(given, splits(fixed_split_size, disable_split_kv, size), size)


@once
def decode_arguments(
    page_size: Any,
    non_blocking: Any,
    window_right: Any,
    q_len_per_req: Any,
    is_causal: Any,
    fixed_split_size: Any,
    disable_split_kv: Any,
    data_type: Any,
    *options: Any,
) -> PlanRequest:
    """Check the arguments of a decode plan, and return the request without lengths; `options`: fields of PlanOptions,
    of which `causal` follows from `q_len_per_req`.
    """
    checks.boolean("non_blocking", non_blocking)
    if checks.integer("window_right", window_right) != 0:
        reason, instead = "a token sees no key to its right", "a prefill wrapper with causal=False"
        checks.refuse_given(reason, instead, window_right=window_right)
    q_len = count("q_len_per_req", q_len_per_req)
    if is_causal is not None and checks.boolean("is_causal", is_causal) != (q_len > 1):
        feature, reason = f"is_causal={is_causal} with q_len_per_req={q_len}", "tokens see the keys up to their own"
        checks.refuse(feature, reason, "a prefill wrapper")
    size, given = count("page_size", page_size), PlanOptions(*options)
    q_dtype = data_type if given.q_data_type is None else given.q_data_type
    planned = given._replace(
        q_data_type="float16" if q_dtype is None else q_dtype,
        kv_data_type=data_type if given.kv_data_type is None else given.kv_data_type,
        causal=q_len > 1,
    )
    return PlanRequest(planned, splits(fixed_split_size, disable_split_kv, size), size, q_len, newest=True)


# ---- lengths


def check_rows(lengths: Lengths, num_qo_heads: int) -> None:
    """Refuse more rows of q (tokens x heads) than kernels can count."""
    rows = lengths.rows
    assert rows is not None
    if rows * num_qo_heads > MAX_ROWS:
        raise ArgumentError(f"q must have at most {MAX_ROWS} rows (tokens x heads), got {rows} x {num_qo_heads}")


def last_page_len_of_host(
    qo_indptr: Any, kv_indptr: Any, kv_lens: Any, uniform_width: Any, page_size: int
) -> torch.Tensor:
    """Check that lengths which the caller knows on the host agree, and return the tokens in each request's last page.
    `uniform_width`: query tokens of every request, or None.
    """
    given = {"qo_indptr_host": qo_indptr, "kv_indptr_host": kv_indptr, "kv_lens_host": kv_lens}
    for name, value in given.items():
        if not checks.tensor(name, value).is_cpu:
            raise checks.wrong(f"{name} must be on the CPU", value)
    q_lens = np.diff(index_arrays.indptr("qo_indptr_host", qo_indptr))
    pages = np.diff(index_arrays.indptr("kv_indptr_host", kv_indptr))
    lengths = index_arrays.integers("kv_lens_host", kv_lens)
    index_arrays.check_size("kv_lens_host", lengths, len(pages))
    if (i := checks.first(pages != -(-lengths // page_size))) is not None:
        raise ArgumentError(
            f"kv_lens_host must need the pages that kv_indptr_host counts: request {i} has {lengths[i]} keys, "
            f"but {pages[i]} pages of {page_size}"
        )
    if uniform_width is not None:
        width = count("uniform_verify_width", uniform_width)
        if (i := checks.first(q_lens != width)) is not None:
            raise ArgumentError(
                f"uniform_verify_width must be the query tokens of every request: request {i} has {q_lens[i]}, "
                f"got {width}"
            )
    return torch.from_numpy(index_arrays.last_page_len(lengths, pages, page_size))


def uniform_q_len(value: int | None, lengths: Lengths) -> int | None:
    """Check a promise about the query tokens of every request. None: no promise, or a warning that it is not true."""
    if value is None or value <= 0:
        return None
    qo_len = lengths.host.qo_len
    if len(qo_len) and (qo_len == value).all():
        return value
    warnings.warn(
        f"uniform_q_len={value} does not describe this batch, whose requests have {qo_len.min(initial=value)} to "
        f"{qo_len.max(initial=0)} query tokens; planning without it",
        stacklevel=6,
    )
    return None


def repeated_lengths(
    lengths: Lengths,
    seq_lens: Any,
    seq_lens_q: Any = None,
    max_token_per_sequence: Any = None,
    max_sequence_kv: Any = None,
) -> Lengths:
    """Check what a `plan` gets of lengths besides the index arrays: that it agrees with these, if they are read here.
    Lengths on a GPU are not read, which would cost a synchronisation: of them return the lengths with the two bounds.
    """
    if seq_lens is seq_lens_q is max_token_per_sequence is max_sequence_kv is None:
        return lengths
    known = isinstance(lengths, BatchLengths)
    for name, value, field in (("seq_lens", seq_lens, "kv_len"), ("seq_lens_q", seq_lens_q, "qo_len")):
        if value is not None and checks.tensor(name, value).is_cpu and known:
            given, planned = index_arrays.integers(name, value.flatten()), getattr(lengths, field)
            index_arrays.check_size(name, given, len(planned))
            if (i := checks.first(given != planned)) is not None:
                raise ArgumentError(f"{name}[{i}] must be {planned[i]}, as the index arrays say; got {given[i]}")
    bounds = {}
    for name, bound, field in (
        ("max_token_per_sequence", max_token_per_sequence, "longest_qo"),
        ("max_sequence_kv", max_sequence_kv, "longest_kv"),
    ):
        if bound is None:
            continue
        bounds[field] = checks.integer(name, bound)
        if known and bounds[field] < (longest := getattr(lengths, field)):
            raise ArgumentError(f"{name} must not be below the longest request, which has {longest}; got {bound}")
    return lengths if known else lengths.replace(**bounds)


# ---- masks


NO_MASK = Mask(None, np.zeros(0, np.int64))  # of a batch without custom masks


def mask(
    custom_mask: Any,
    packed_custom_mask: Any,
    lengths: Lengths,
    device: torch.device,
    packed_name: str = "packed_custom_mask",
) -> Mask:
    """Pack the masks of all requests, each from a new byte on. `packed_custom_mask` takes precedence."""
    if custom_mask is packed_custom_mask is None:
        return NO_MASK
    sizes = lengths.host.qo_len * lengths.host.kv_len
    offsets = index_arrays.bounds((sizes + 7) // 8)
    total = int(sizes.sum())
    if custom_mask is not None:
        bits = checks.operand("custom_mask", custom_mask, (torch.bool, torch.uint8), (None,), "[n]")
        if bits.numel() != total:
            raise ArgumentError(
                f"custom_mask must have the sum of qo_len * kv_len = {total} elements, got {bits.numel()}"
            )
        if packed_custom_mask is None:
            return Mask(_pack(bits.to(device).bool(), sizes, offsets), offsets)
    packed = checks.operand(packed_name, packed_custom_mask, (torch.uint8,), (None,), "[n]").to(device)
    if packed.numel() != offsets[-1]:
        raise ArgumentError(
            f"{packed_name} must have {offsets[-1]} bytes, each request from a new byte on, as "
            f'segment_packbits(..., bitorder="little") packs them; got {packed.numel()}'
        )
    return Mask(packed.contiguous(), offsets)


def _pack(bits: torch.Tensor, sizes: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
    starts, packed_starts = torch.from_numpy(np.stack((index_arrays.bounds(sizes), offsets))).to(bits.device)
    return pack_segments(bits, starts, packed_starts, int(offsets[-1]), "little")


# ---- all of them


class PlanRequest(NamedTuple):
    """What a `plan` asks for."""

    options: PlanOptions
    splits: Splits = Splits()
    page_size: int = 1
    max_qo_len: int | None = None  # most query tokens of a request, where launches may depend on it
    newest: bool = False  # whether all query tokens are the newest of their request, and see the keys up to their own
    matrix: Any = None  # `block_sparse.Matrix`, of a block-sparse plan
    lengths: Lengths = NO_LENGTHS
    mask: Mask = NO_MASK

    def with_options(self, overrides: dict[str, Any]) -> PlanRequest:
        """Return the request with some of its options replaced. Tokens that see later keys then are not `newest`."""
        newest = self.newest and (not self.options.causal or bool(overrides.get("causal", True)))
        return self._replace(options=self.options._replace(**overrides), newest=newest) if overrides else self

    def with_lengths(self, lengths: Lengths) -> PlanRequest:
        """Return the request with other lengths, without a bound that they do not keep."""
        longest, most = lengths.longest_qo, self.max_qo_len
        if longest is None or most is None or longest <= most:
            return self._replace(lengths=lengths)
        return self._replace(lengths=lengths, max_qo_len=None, newest=False)

    def differs(self, before: PlanRequest) -> bool:
        """Tell whether it differs from another in more than lengths. Types count: 1 == 1.0 == True."""
        old, new = before.lengths, self.lengths
        then, now = before.options, self.options
        return (
            (then is not now and (*map(type, then), then) != (*map(type, now), now))  # arrays are not compared
            or (before.splits is not self.splits and before.splits != self.splits)
            or before[2:6] != self[2:6]  # page size, bound of query tokens, matrix
            or old.batch_size != new.batch_size
            or not (before.mask.packed is self.mask.packed is None)
            or not (old.key_bounds is new.key_bounds is None)
        )


# ---- buffers of the wrapper


def workspace(value: Any) -> torch.Tensor:
    """Check the caller's workspace and return it as bytes."""
    buffer = checks.readable("float_workspace_buffer", value)
    check_workspace("float_workspace_buffer", buffer)
    return buffer.view(-1).view(torch.uint8)
