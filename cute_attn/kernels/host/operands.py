"""Tensors that a problem may lack: which they are, and what launches take from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from cute_attn.kernels.host.params import kv_axes
from cute_attn.problem import BatchProblem, DecodeProblem, Problem, Request
from cute_attn.runtime.launch import Settled
from cute_attn.runtime.param_block import Values

# Parameters of kernels with the addresses of such tensors, in the order of `Optional`; and the bytes of the mask.
TENSOR_FIELDS = (
    *("scale0", "scale1", "v_scale_ptr", "sinks", "mask", "scale_q", "scale_k", "scale_v", "k_scales", "v_scales"),
)
MASK_BYTES = "mask_bytes"
EXTRA_FIELDS = (*TENSOR_FIELDS, MASK_BYTES)
NO_STRIDES: Values = (0,) * 6

Optional = tuple[torch.Tensor | None, ...]  # two scales, v's scale, sinks, mask, scales of heads of q, k and v, block
# ^ scales of k and v; empty for a problem that has none of them

# What runs requests or batches like an earlier one, from addresses of q, k, v, out and lse (0 for none), and a tuple of
# these tensors, their `Optional`, and what else the kind of run takes.
Fire = Callable[[int, int, int, int, int, tuple[Any, ...]], None]

P = TypeVar("P", Problem, BatchProblem)


def optional_tensors(problem: Request | BatchProblem) -> Optional:
    """Returns the optional tensors of a problem."""
    scales, v_scale, sinks = problem.scale_tensors, problem.v_scale_tensor, problem.sinks
    mask = head_scales = None
    if not isinstance(problem, DecodeProblem):
        mask, head_scales = problem.packed_mask, problem.head_scales
    block_scales = problem.block_scales
    if not scales and v_scale is sinks is mask is head_scales is block_scales is None:
        return ()
    padding = (None,) * (2 - len(scales))
    return *scales, *padding, v_scale, sinks, mask, *(head_scales or (None,) * 3), *(block_scales or (None,) * 2)


def with_optional(problem: P, optional: Optional) -> P:
    """Returns the problem with other optional tensors."""
    if not optional:
        return problem
    scale0, scale1, v_scale, sinks, mask, *more = optional
    head_scales, block_scales = tuple(more[:3]), tuple(more[3:])
    changed: dict[str, Any] = {
        "scale_tensors": tuple(x for x in (scale0, scale1) if x is not None),
        "v_scale_tensor": v_scale,
        "sinks": sinks,
        "packed_mask": mask,
        "head_scales": None if head_scales[0] is None else head_scales,
        "block_scales": None if block_scales[0] is None else block_scales,
    }
    return problem._replace(**changed)


def extras_of(names: Sequence[str]) -> Callable[[Optional], Values]:
    """Returns a function from optional tensors, of which there are some, to the values of `names` of EXTRA_FIELDS."""
    places = [(TENSOR_FIELDS.index("mask" if name == MASK_BYTES else name), name == MASK_BYTES) for name in names]

    def extras(optional: Optional) -> Values:
        given = [(optional[i], is_size) for i, is_size in places]
        return tuple([0 if x is None else x.numel() if is_size else x.data_ptr() for x, is_size in given])

    return extras


def with_extras(settled: Settled, extras: Values) -> Settled:
    """Returns what is settled of a launch with the values of its second group replaced."""
    grid, strides, _, numbers = settled
    return grid, strides, extras, numbers


def block_scale_strides(problem: Request | BatchProblem) -> Values:
    """Returns the bytes from a page, a token and a head of K's and then V's block scales to the next; zeros without."""
    if problem.block_scales is None:
        return NO_STRIDES
    token, head = kv_axes(problem.settings)
    paged = not isinstance(problem, Problem) and problem.features.kv_source == "paged"
    strides = [x.stride() for x in problem.block_scales]
    return tuple(n for of in strides for n in (of[0] if paged else 0, of[token], of[head]))


def fire_first(fire: Fire, problem: Request | BatchProblem, rest: tuple[Any, ...]) -> Fire:
    """Runs `problem` by a function that was bound to it, and returns that function. `rest`: what it takes after the
    tensors.
    """
    tensors = problem.q, problem.k, problem.v, problem.out, problem.lse
    q, k, v, out, lse = (0 if x is None else x.data_ptr() for x in tensors)
    fire(q, k, v, out, lse, (*tensors, optional_tensors(problem), *rest))
    return fire


def launch_nothing(q: int, k: int, v: int, out: int, lse: int, tensors: tuple[Any, ...]) -> None:
    """Runs a problem without query tokens."""
