"""FlashInfer's variant of the batch prefill wrappers with attention sinks.

FlashInfer compiles it from CUDA source that `jit_args` carry, for dtypes and head dimensions that the wrapper is made
with. Here every kernel takes sinks: what remains of the variant is that plans must agree with those dtypes and head
dimensions, and that `run` takes sinks and sm_scale by position.
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch

from cute_attn.errors import ArgumentError, ArgumentTypeError
from cute_attn.request import batch_plan, checks, operands
from cute_attn.request.batch_plan import JIT_INSTEAD, JIT_REASON, PlanOptions
from cute_attn.request.settings import POS_ENCODING_MODES

URI = "batch_prefill_attention_sink"
OPERANDS = (["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink")  # tensors, scalars, name of the variant
JIT_NAMES = ("dtype_q", "dtype_kv", "dtype_o", "idtype", "head_dim_qk", "head_dim_vo")
JIT_SWITCHES = ("use_sliding_window", "use_logits_soft_cap", "use_fp16_qk_reduction", "fp8_enabled")
JIT_OPTIONS = (*JIT_SWITCHES, "pos_encoding_mode", "paged_kv_stride_mode", "module_surface")


class SinkVariant(NamedTuple):
    """What a wrapper with attention sinks was made for."""

    q_data_type: Any
    kv_data_type: Any  # None: q's
    head_dim_qk: Any
    head_dim_vo: Any
    pos_encoding_mode: Any

    def check_plan(self, options: PlanOptions) -> None:
        """Refuse a plan that says anything else."""
        for name, made_for, planned in zip(self._fields, self._values(self), self._values(options), strict=True):
            if not isinstance(planned, numbers.Integral | str | torch.dtype) or made_for != planned:
                raise ArgumentError(
                    f"{name} of plan() must be what the wrapper with attention sinks was made for, {made_for!r}; "
                    f"got {planned!r}"
                )

    @staticmethod
    def _values(source: SinkVariant | PlanOptions) -> tuple[Any, ...]:
        q, kv = checks.named_dtype(source.q_data_type), checks.named_dtype(source.kv_data_type)
        head_dim_vo = source.head_dim_qk if source.head_dim_vo is None else source.head_dim_vo
        return q, q if kv is None else kv, source.head_dim_qk, head_dim_vo, source.pos_encoding_mode

    def operands(self, args: tuple[Any, ...], planned_scale: float, sinks: Any, q_scale: Any) -> tuple[Any, Any]:
        """Return the sinks and the q_scale of a run from its positional arguments `sinks, sm_scale`.

        The run's sm_scale replaces the planned one; q_scale is a factor of it. A plan contains no scale that its
        schedule depends on, so that another one costs no new plan.
        """
        if len(args) > 2:
            got = ", ".join(map(checks.describe, args))
            raise ArgumentTypeError(f"the positional arguments after keys and values are sinks and sm_scale; got {got}")
        if args and sinks is not None:
            raise ArgumentTypeError("sinks were given twice: by position and by keyword")
        sinks = args[0] if args else sinks
        if sinks is None:
            raise ArgumentTypeError("sinks must follow keys and values in run() of a wrapper with attention sinks")
        if len(args) < 2 or args[1] is None:
            return sinks, q_scale
        sm_scale = checks.real("sm_scale", args[1])
        if sm_scale == planned_scale:
            return sinks, q_scale
        if planned_scale == 0:
            raise ArgumentError(f"sm_scale of plan() must not be 0 where run() brings another one, here {sm_scale}")
        return sinks, operands.scaled("q_scale", q_scale, sm_scale / planned_scale)


def made_for(
    q_data_type: Any, kv_data_type: Any, head_dim_qk: Any, head_dim_vo: Any, pos_encoding_mode: Any
) -> SinkVariant:
    """Check the arguments of a constructor."""
    checks.choice("pos_encoding_mode", pos_encoding_mode, POS_ENCODING_MODES)
    batch_plan.count("head_dim_qk", head_dim_qk)
    batch_plan.count("head_dim_vo", head_dim_vo)
    checks.dtype_of("q_data_type", q_data_type)
    if kv_data_type is not None:
        checks.dtype_of("kv_data_type", kv_data_type)
    return SinkVariant(q_data_type, kv_data_type, head_dim_qk, head_dim_vo, pos_encoding_mode)


def from_jit(jit_args: Any, jit_kwargs: Any, variant_owns_mask: Any) -> SinkVariant | None:
    """Return the variant that `jit_args` name, None without them; only the one with sinks is supported."""
    checks.refuse_given(JIT_REASON, "custom_mask of plan()", variant_owns_mask=variant_owns_mask)
    if not _is_sink_variant(jit_args):
        given = None if isinstance(jit_kwargs, dict) and not jit_kwargs else jit_kwargs
        checks.refuse_given(JIT_REASON, JIT_INSTEAD, None, jit_args=jit_args, jit_kwargs=given)
        return None
    options = {} if jit_kwargs is None else jit_kwargs
    if not isinstance(options, dict) or not set(options) <= set(JIT_OPTIONS):
        raise checks.wrong(f"jit_kwargs must be a dict of {', '.join(JIT_OPTIONS)}", options, ArgumentTypeError)
    for name in JIT_SWITCHES:
        checks.boolean(f"jit_kwargs[{name!r}]", options.get(name, False))
    code = options.get("pos_encoding_mode", 0)
    mode = POS_ENCODING_MODES[checks.at_least("jit_kwargs['pos_encoding_mode']", code, 0, len(POS_ENCODING_MODES) - 1)]
    named = dict(zip(JIT_NAMES, jit_args[1:7], strict=True))
    if checks.named_dtype(named["dtype_o"]) != checks.named_dtype(named["dtype_q"]):
        raise ArgumentError(
            f"dtype_o of jit_args must be its dtype_q: o_data_type of plan() is the output's; got {named['dtype_o']}"
        )
    return made_for(named["dtype_q"], named["dtype_kv"], named["head_dim_qk"], named["head_dim_vo"], mode)


def _is_sink_variant(jit_args: Any) -> bool:
    """Tell whether `jit_args` are those of FlashInfer's sink variant: 13 entries with its name, tensors and scalars."""
    if not isinstance(jit_args, list | tuple) or len(jit_args) != 13 or not isinstance(jit_args[0], str):
        return False
    named = tuple(list(x) if isinstance(x, tuple) else x for x in jit_args[7:12])
    return jit_args[0].startswith(URI) and named == OPERANDS
