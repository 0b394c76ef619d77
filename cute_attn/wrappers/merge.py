"""Merging of attention states: results over disjoint keys of the same queries."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from cute_attn.ops import declare, fakes, trace
from cute_attn.request import checks

V_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
AXES = ("n", "num_heads")
S_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@declare.operator("merge_state", fakes.merged_pair)
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention states of the same queries over disjoint keys.

    `s = log2(2^s_a + 2^s_b)` and `v = (2^s_a v_a + 2^s_b v_b) / 2^s`, in fp32. A row of s = -inf has no keys and no
    weight; where both are, v is 0 and s is -inf. Can be captured by CUDA graphs.

    Parameters
    ----------
    v_a, v_b : `[n, num_heads, head_dim]` fp16, bf16 or fp32, both the same.
    s_a, s_b : `[n, num_heads]` fp32, fp16 or bf16: base-2 log-sum-exp of each row; converted to fp32.

    Returns
    -------
    (v, s) : `[n, num_heads, head_dim]` in v_a's dtype and fp32 `[n, num_heads]`.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device).
    """
    if is_dynamo_compiling():
        return trace.operator("merge_state")(locals())
    _check(("v_a", v_a), ("s_a", s_a), ("v_b", v_b), ("s_b", s_b))
    weights, s = _weights(torch.stack((s_a.float(), s_b.float())), 0)
    v = _weighted(v_a, weights[0]) + _weighted(v_b, weights[1])
    return v.to(v_a.dtype), s


@declare.operator("merge_state_in_place", mutates=("v", "s"))
def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge the state (v_other, s_other) into (v, s), by the formula of `merge_state`. Can be captured by CUDA graphs.

    Parameters
    ----------
    v : `[n, num_heads, head_dim]` fp16, bf16 or fp32, written.
    s : fp32 `[n, num_heads]`, base 2, written. Other dtypes are refused: they could not hold the result.
    v_other, s_other : the other state: v_other with v's shape, dtype and device; s_other `[n, num_heads]` fp32, fp16 or
        bf16, converted to fp32.
    mask : bool or uint8 `[n]`; rows where it is 0 keep v and s bit for bit. None (default) merges all rows.

    Returns
    -------
    None; v and s are overwritten.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device; v or s overlap themselves or another
    argument; a tensor that requires grad: a result in place has no derivative).
    """
    if is_dynamo_compiling():
        trace.operator("merge_state_in_place")(locals())
        return
    _check(("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other))
    checks.dtype("s", s.dtype, (torch.float32,))
    checks.dense("v", v)
    checks.dense("s", s)
    for name, x in (("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other)):
        checks.check_grad(name, x)
    if mask is not None:
        checks.operand("mask", mask, (torch.bool, torch.uint8), tuple(v.shape[:1]), "[n]", v.device, "v's device")
    checks.apart((("v", v), ("s", s)), (("v_other", v_other), ("s_other", s_other), ("mask", mask)))
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        merge = mask != 0
        merged_v = torch.where(merge[:, None, None], merged_v, v)
        merged_s = torch.where(merge[:, None], merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


@declare.operator("merge_states", fakes.merged_states)
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of attention states of the same queries over disjoint keys.

    `s = log2(sum of 2^s_i)` and `v = sum of 2^(s_i - s) v_i`, in fp32. Can be captured by CUDA graphs.

    Parameters
    ----------
    v : `[n, num_states, num_heads, head_dim]` fp16, bf16 or fp32.
    s : `[n, num_states, num_heads]` fp32, fp16 or bf16: base-2 log-sum-exp; converted to fp32.

    Returns
    -------
    (v, s) : `[n, num_heads, head_dim]` in v's dtype and fp32 `[n, num_heads]`; zeros and -inf if num_states is 0.

    Raises
    ------
    ArgumentTypeError (not a tensor), ArgumentError (shape, dtype, device).
    """
    if is_dynamo_compiling():
        return trace.operator("merge_states")(locals())
    _check_state("v", v, "s", s, ("n", "num_states", "num_heads"))
    weights, merged = _weights(s.float(), 1)
    return _weighted(v, weights).sum(1).to(v.dtype), merged


def _weights(s: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each state in the merged row, and the merged lse."""
    if s.shape[axis] == 0:
        return s, s.sum(axis) - torch.inf
    maximum = s.amax(axis, keepdim=True)
    anchor = torch.where(maximum == -torch.inf, 0.0, maximum)  # -inf - -inf would be NaN
    weights = torch.exp2(s - anchor)
    total = weights.sum(axis, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0), (torch.log2(total) + anchor).squeeze(axis)


def _weighted(v: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[..., None]
    return torch.where(weights > 0, v.float() * weights, 0.0)  # a row without keys may hold anything, even NaN


def _check(a: tuple[str, object], s_a: tuple[str, object], b: tuple[str, object], s_b: tuple[str, object]) -> None:
    v, other = _check_state(*a, *s_a, AXES), checks.tensor(*b)
    checks.shape(b[0], other, tuple(v.shape), f"{a[0]}'s")
    checks.dtype(b[0], other.dtype, (v.dtype,))
    checks.device(b[0], other, v.device, f"{a[0]}'s device")
    _check_state(*b, *s_b, AXES)


def _check_state(v_name: str, v: object, s_name: str, s: object, axes: tuple[str, ...]) -> torch.Tensor:
    v, s = checks.tensor(v_name, v), checks.tensor(s_name, s)
    checks.shape(v_name, v, (None,) * (len(axes) + 1), f"[{', '.join(axes)}, head_dim]")
    checks.dtype(v_name, v.dtype, V_DTYPES)
    checks.shape(s_name, s, tuple(v.shape[:-1]), f"[{', '.join(axes)}]")
    checks.dtype(s_name, s.dtype, S_DTYPES)
    checks.device(s_name, s, v.device, f"{v_name}'s device")
    return v
