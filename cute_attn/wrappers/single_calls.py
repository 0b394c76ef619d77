"""Single-request calls, and replays of them: a call that differs from earlier ones only in addresses and the number of
keys skips the checks.

The layers of a model call with tensors of the same shapes, strides and dtypes, and with the same options; the next
token comes with a cache of one key more. The second such call leaves a `CachedCall`; later ones check their addresses
and pass them to the launch. Calls with masks, sinks, or scales that are tensors always take the full path
(`request.single.problem`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, is_grad_enabled
from torch.autograd import forward_ad

from cute_attn.dispatch import backends
from cute_attn.kernels.host.single import SingleRepeat
from cute_attn.problem import Problem
from cute_attn.request import checks, single
from cute_attn.request.operands import ALIGNMENT, NARROW_ALIGNMENT
from cute_attn.request.settings import MAX_KV_LEN, Call
from cute_attn.wrappers.run_cache import PLAIN_TYPES, buffer_key, outputs_qualify

CACHE_SIZE = 512  # calls: prompts of any length must not fill memory

Result = Tensor | tuple[Tensor, Tensor]
Numbers = tuple[Any, ...]  # options whose values may be equal although their types differ: 1 == 1.0 == True
Names = tuple[Any, ...]  # all other options, the layout first


class CachedCall(NamedTuple):
    """A call that passed every check, and how to launch it again."""

    repeat: SingleRepeat
    like_q: bool  # out has q's shape and dtype, and q is contiguous
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    return_lse: bool
    kv_alignment: int  # bytes: the launch reads k and v at multiples of it
    spans: tuple[int, tuple[int, int], tuple[int, int], int, int]  # bytes that q, k, v, out and lse cover; of k and v
    # ^ without keys, and per key


_cached: dict[Any, CachedCall] = {}
_seen: set[int] = set()  # hashes of keys that came once: less to collect than keys, where every call is a new one


def forget() -> None:
    """Forget all calls."""
    _cached.clear()
    _seen.clear()


def key_of(q: Any, k: Any, v: Any, out: Any, lse: Any, numbers: Numbers, names: Names) -> tuple[Any, int]:
    """Return what equal calls have in common besides addresses and the number of keys, and that number; (None, 0) for a
    call that the full path must look at, as it does at those of less than 2 keys: the stride of one key may be any.
    """
    try:
        if names[0] == "HND":
            (kv_heads, kv_len, k_dim), (v_heads, v_len, v_dim) = k.shape, v.shape
        else:
            (kv_len, kv_heads, k_dim), (v_len, v_heads, v_dim) = k.shape, v.shape
        if kv_len != v_len or not 2 <= kv_len <= MAX_KV_LEN:
            return None, 0
        key = (
            *(q.shape, q.stride(), q.dtype, q.device, kv_heads, k_dim, k.stride(), k.dtype, k.device),
            *(v_heads, v_dim, v.stride(), v.dtype, v.device, tuple(map(type, numbers)), numbers, names),
        )
        return key if out is lse is None else (key, buffer_key(out), buffer_key(lse)), kv_len
    except (AttributeError, RuntimeError, TypeError, ValueError):  # no tensor, a sparse one, or one of other axes
        return None, 0


def try_replay(key: Any, kv_len: int, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Result | None:
    """Launch a call like a cached one and return its result; None if there is none, or an address does not qualify."""
    try:
        cached = _cached.get(key)
    except TypeError:  # an option has no hash: the full path says what is wrong with it
        return None
    if cached is None or forward_ad._current_level >= 0:  # the full path looks for tangents
        return None
    repeat, like_q, shape, dtype, return_lse, kv_alignment, spans = cached
    q_start, k_start, v_start = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if q_start % ALIGNMENT or (k_start | v_start) % kv_alignment or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if not out is lse is None:
        of_q, (of_k, per_k), (of_v, per_v), of_out, of_lse = spans
        covered = of_q, of_k + kv_len * per_k, of_v + kv_len * per_v, of_out, of_lse
        if not outputs_qualify(covered, (q_start, k_start, v_start), out, lse):
            return None
    if out is None:
        out = empty_like(q) if like_q else q.new_empty(shape, dtype=dtype)
    if lse is None and return_lse:
        lse = q.new_empty(shape[:-1], dtype=torch.float32)
    repeat(kv_len, q_start, k_start, v_start, out.data_ptr(), 0 if lse is None else lse.data_ptr(), (q, k, v, out, lse))
    return (out, lse) if return_lse else out


def run(call: Call, backend: Any, key: Any, numbers: Numbers) -> Result:
    """Check and launch a call. `key`: that of its replays, or None; `numbers`: part of it."""
    problem = single.problem(call)
    backends.run(problem, backend)
    if key is not None and problem.q is call.q and PLAIN_TYPES.issuperset(map(type, numbers)):
        _cache(call, backend, problem, key)
    if call.return_lse:
        assert problem.lse is not None
        return problem.out, problem.lse
    return problem.out


def _cache(call: Call, backend: str, problem: Problem, key: Any) -> None:
    """Cache a call that comes for the second time, if its launch can be repeated."""
    if (number := hash(key)) not in _seen:
        if len(_seen) >= CACHE_SIZE:
            _seen.clear()
        _seen.add(number)
        return
    if len(_cached) >= CACHE_SIZE:
        _cached.clear()
    q, k, v, out, lse = problem.q, problem.k, problem.v, problem.out, problem.lse
    repeat = backends.repeat(problem, backend)
    if repeat is None:
        return
    per_k, per_v = (x.stride(int(call.kv_layout == "HND")) * x.element_size() for x in (k, v))
    of_k, of_v = _span(k) - problem.kv_len * per_k, _span(v) - problem.kv_len * per_v
    _cached[key] = CachedCall(
        repeat,
        q.is_contiguous() and q.shape == out.shape and q.dtype == out.dtype,
        tuple(out.shape),
        out.dtype,
        call.return_lse,
        NARROW_ALIGNMENT if problem.features.half_aligned_kv else ALIGNMENT,
        (_span(q), (of_k, per_k), (of_v, per_v), _span(out), _span(lse)),
    )


def _span(x: Tensor | None) -> int:
    """Return the bytes that a tensor covers."""
    if x is None:
        return 0
    start, stop = checks.extent(x)
    return stop - start
