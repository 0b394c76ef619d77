"""Single-request calls: an entry serves calls with any number of keys, as the next token comes with one key more."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cute_attn.dispatch import backends
from cute_attn.request import single
from cute_attn.request.settings import MAX_KV_LEN, Call
from cute_attn.wrappers import calls
from cute_attn.wrappers.calls import Given, layout, layouts

Result = Tensor | tuple[Tensor, Tensor]
Numbers = tuple[Any, ...]  # options whose values may be equal although their types differ
Names = tuple[Any, ...]  # all other options, the layout first

_entries: calls.Entries = {}


def forget() -> None:
    """Forget all calls."""
    _entries.clear()


def find(given: Given, numbers: Numbers, names: Names) -> tuple[Any, int, calls.Entry | None]:
    """Return what equal calls have in common besides addresses and the number of keys, that number, and the entry of
    such calls. The first is None for a call that all checks must look at, as they do at those of less than 2 keys: the
    stride of one key may be any.
    """
    q, k, v, out, lse, _, optional, read = given
    try:
        if names[0] == "HND":
            (kv_heads, kv_len, k_dim), (v_heads, v_len, v_dim) = k.shape, v.shape
        else:
            (kv_len, kv_heads, k_dim), (v_len, v_heads, v_dim) = k.shape, v.shape
        if kv_len != v_len or not 2 <= kv_len <= MAX_KV_LEN:
            return None, 0, None
        key: Any = (
            *(q.shape, q.stride(), q.dtype, q.device, kv_heads, k_dim, k.stride(), k.dtype, k.device),
            *(v_heads, v_dim, v.stride(), v.dtype, v.device, tuple(map(type, numbers)), numbers, names),
        )
        if optional or read or out is not None or lse is not None:
            key = key, layout(out), layout(lse), layouts(optional + read)
        return key, kv_len, _entries.get(key)
    except calls.NOT_TENSORS:  # or tensors of other axes, or options that have no hash
        return None, 0, None


def run(call: Call, backend: Any, key: Any, given: Given, numbers: Numbers) -> Result:
    """Check and launch a call, and enter it under its key, if it has one. `numbers`: part of the key."""
    problem = single.problem(call)
    fire = backends.run(problem, backend)
    out, lse = problem.out, problem.lse
    if key is not None and calls.is_plain(numbers):
        axis = int(call.kv_layout == "HND")
        of_k, of_v = (x.stride(axis) * x.element_size() for x in (problem.k, problem.v))
        calls.enter(_entries, key, fire, given, problem, (out, lse), (of_k, of_v))
    if call.return_lse:
        assert lse is not None
        return out, lse
    return out
