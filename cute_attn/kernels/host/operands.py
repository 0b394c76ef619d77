"""Tensors that a problem may lack: which it has, and what launches take from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_attn.kernels.host.params import Fields, kv_axes
from cute_attn.problem import NO_EXTRAS, BatchProblem, Extras, Lengths, Problem, Request, Settings
from cute_attn.request.mla import MlaProblem
from cute_attn.runtime.launch import Bound, Launch, Values

# Such tensors by the kernels' parameters that hold their addresses. With a mask's goes the number of its bytes.
ROLES = tuple("v_scale_ptr" if name == "v_scale" else name for name in Extras._fields)
MASK, MASK_BYTES = ROLES.index("mask"), "mask_bytes"
NO_STRIDES: Values = (0,) * 6
STRIDE_FIELDS = (
    *("q_stride_n", "q_stride_h", "k_stride_n", "k_stride_h", "v_stride_n", "v_stride_h"),
    *("k_stride_page", "v_stride_page"),
)
BLOCK_SCALE_FIELDS = (  # of kernels for NVFP4 k and v
    *("k_scales_stride_page", "k_scales_stride_n", "k_scales_stride_h"),
    *("v_scales_stride_page", "v_scales_stride_n", "v_scales_stride_h"),
)

Roles = tuple[int, ...]  # of ROLES, those of the tensors that a problem has
Optional = tuple[torch.Tensor, ...]  # these tensors, in the same order

# What runs requests or batches like an earlier one, from addresses of q, k, v, out and lse (0 for none), and a tuple of
# these tensors, their `Optional`, and what else the kind of run takes.
Fire = Callable[[int, int, int, int, int, tuple[Any, ...]], None]


def optional_tensors(problem: Request | BatchProblem | MlaProblem) -> tuple[Roles, Optional]:
    """Return which optional tensors a problem has, and these."""
    if problem.extras is NO_EXTRAS:
        return (), ()
    roles = tuple([i for i, x in enumerate(problem.extras) if x is not None])
    return roles, tuple([x for x in problem.extras if x is not None])


class OptionalBounds:
    """Launches of a kernel by which optional tensors its problems have: the addresses of these move, after all others,
    and the parameters of those that are absent are 0.
    """

    def __init__(self, launch: Launch, static: Fields, groups: tuple[tuple[str, ...], ...]) -> None:
        """`groups`: as `Launch.bind` takes them, the moving fields first."""
        self._launch, self._static, self._groups = launch, static, groups
        named = {name for group in groups for name in group}
        self._free = {param.name for param in launch.artifact.params}.difference(static, named)
        self._bounds: dict[Roles, Bound] = {}
        self.of(())  # checks that every parameter has a name

    def of(self, roles: Roles) -> Bound:
        """Returns the launches of problems that have these tensors."""
        found = self._bounds.get(roles)
        if found is None:
            names = [ROLES[i] for i in roles]
            places = [i for i, name in enumerate(names) if name in self._free]
            masks = [i for i in places if roles[i] == MASK]
            fields = [names[i] for i in places] + [MASK_BYTES] * len(masks)
            moving, *groups = self._groups
            zeros = dict.fromkeys(self._free.difference(fields), 0)
            found = self._launch.bind({**self._static, **zeros}, (*moving, *fields), *groups)
            found.of_tensors = places, masks
            self._bounds[roles] = found
        return found


def block_scale_strides(problem: Request | BatchProblem) -> Values:
    """Returns the values of BLOCK_SCALE_FIELDS, bytes from a page, a token and a head to the next; zeros without."""
    if problem.extras.k_scales is None:
        return NO_STRIDES
    token, head = kv_axes(problem.settings)
    paged = problem.settings.features.kv_source == "paged"
    strides = [x.stride() for x in (problem.extras.k_scales, problem.extras.v_scales) if x is not None]
    return tuple(n for stride in strides for n in (stride[0] if paged else 0, stride[token], stride[head]))


def plain_strides(settings: Settings, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int = 1) -> Values:
    """Returns the values of STRIDE_FIELDS: bytes, but for tokens and pages of k and v chunks of so many bytes."""
    of_q, size, paged, (token, head) = q.stride(), k.itemsize, settings.features.kv_source == "paged", kv_axes(settings)
    strides = [x.stride() for x in (k, v)]
    of_kv = [n for stride in strides for n in (stride[token] * size // chunk, stride[head] * size)]
    pages = [stride[0] * size // chunk if paged else 0 for stride in strides]
    return of_q[0] * q.itemsize, of_q[-2] * q.itemsize, *of_kv, *pages


class Runner:
    """Runs requests of the same settings, or batches of one plan; subclasses define `bind`."""

    def bind(self, problem: Any) -> Fire:
        """Returns a function that runs problems which differ from this one in addresses; single requests also in the
        number of keys, batches also in what later plans change whose kernels are the same.
        """
        raise NotImplementedError

    def __call__(self, problem: Any) -> Fire | None:
        """Runs a problem. Returns what runs those like it; None where every one is looked at."""
        return fire_first(self.bind(problem), problem)

    def again(self, lengths: Lengths) -> bool | None:
        """Replaces the lengths of a plan's requests, and tells whether launches are the same otherwise; None, and
        nothing is replaced, where a new plan is needed.
        """
        return None


def fire_first(fire: Fire, problem: Request | BatchProblem | MlaProblem) -> Fire:
    """Runs `problem` by a function that was bound to it, and returns that function."""
    tensors = problem.q, problem.k, problem.v, problem.out, problem.lse
    q, k, v, out, lse = (0 if x is None else x.data_ptr() for x in tensors)
    fire(q, k, v, out, lse, (*tensors, optional_tensors(problem)[1], *_rest(problem)))
    return fire


def _rest(problem: Request | BatchProblem | MlaProblem) -> tuple[Any, ...]:
    """Returns what a `Fire` takes after the optional tensors."""
    if isinstance(problem, Problem):
        return (problem.kv_len,)
    if isinstance(problem, BatchProblem):
        return problem.kv_indices, problem.workspace
    read: tuple[torch.Tensor | None, ...]
    if isinstance(problem, MlaProblem):
        read = problem.lengths.read
    else:
        read = problem.block_tables, problem.seq_lens, problem.qo_indptr, problem.draft_mask
    addresses = [0 if x is None else x.data_ptr() for x in read]
    return problem.scratch.counters, problem.scratch.partials, *addresses


def launch_nothing(q: int, k: int, v: int, out: int, lse: int, tensors: tuple[Any, ...]) -> None:
    """Runs a problem without query tokens."""
