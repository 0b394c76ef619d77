"""What selection says of a problem, in words: `cute_attn.explain` and the command of that name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.dispatch import select
from cute_attn.dispatch.capabilities import BACKENDS, EMULATOR, Backend, Load, Pass
from cute_attn.dispatch.families import FAMILIES
from cute_attn.errors import ArgumentError, Refusal
from cute_attn.problem import UNLIMITED, BatchLengths, BatchLimits, Features, Problem, Settings
from cute_attn.request import batch_plan, checks, single
from cute_attn.request.batch_plan import PlanOptions
from cute_attn.request.settings import MAX_KV_LEN, Call
from cute_attn.runtime import arch as archs
from cute_attn.runtime.arch import Arch

CHOSEN, PASSED_OVER, ABLE, REFUSED = "chosen", "passed over", "able", "refused"


class Verdict(NamedTuple):
    """What selection says of a backend. `why`: the reason, empty for a refusal, which has `refusals`."""

    backend: str
    verdict: str
    why: str
    refusals: tuple[Refusal, ...] = ()
    rule: str = ""  # by which the chosen one takes its kernel


Launch = tuple[Settings, BatchLengths, BatchLimits, int]  # what rules are asked; multiprocessors, 0: of a typical GPU
NVFP4 = "nvfp4"  # a `kv_dtype` that torch has no name for
NO_TENSORS: tuple[Any, ...] = (None,) * 5  # of a request in words
PLAN_NAMES = {"head_dim_qk": "head_dim", "q_data_type": "dtype", "kv_data_type": "kv_dtype", "o_data_type": "o_dtype"}


def explain(
    asked: Features | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    arch: str | Arch | None = None,
    rows: int | None = None,
    *,
    qo_len: int = 1,
    kv_len: int = 4096,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    head_dim_vo: int | None = None,
    dtype: torch.dtype | str = "bfloat16",
    kv_dtype: torch.dtype | str | None = None,
    o_dtype: torch.dtype | str | None = None,
    kv_layout: str = "NHD",
    causal: bool = False,
    custom_mask: bool = False,
    window_left: int = -1,
    pos_encoding_mode: str = "NONE",
    logits_soft_cap: float | None = None,
    sinks: bool = False,
) -> str:
    """Explain what "auto" chooses, and for every backend why it is chosen, passed over or refused. Nothing is run.

    Parameters
    ----------
    asked : tensors (q, k, v) of a single request, shaped as `single_prefill_with_kv_cache` or, with a q of two axes,
        `single_decode_with_kv_cache` takes them; or `Features`. Default: the request that the keywords describe.
    arch : GPU to explain for, which need not be here: "sm_90a", or a name such as "h100", "b200" or "rtx5090"; "cpu".
        Default: the device of the tensors or features; for a described request the GPU of this machine, else "sm_90a".
    rows : packed query rows per request of a batch (qo_len times the query heads per kv head), where known. Read with
        `Features` only.
    qo_len, kv_len : tokens of a described request. Default 1 (decode) and 4096.
    num_qo_heads, num_kv_heads : of a described request. Default 32 and 8.
    head_dim, head_dim_vo : of q and k, and of v and the output (default: `head_dim`), of a described request.
        Default 128.
    dtype, kv_dtype : dtypes of q, and of k and v (default: `dtype`), of a described request: "bfloat16" (default),
        "float16", "float8_e4m3fn", ...; of k and v also "nvfp4".
    o_dtype : dtype of the output. Default: that of q.
    kv_layout, causal, window_left, pos_encoding_mode, logits_soft_cap : as in `single_prefill_with_kv_cache`.
    custom_mask : whether there is a custom mask. Default False.
    sinks : whether there are attention sinks. Default False.

    Returns
    -------
    A title line, then a line per backend and, indented, the reasons of refusals. Of a single request the rule by which
    the chosen backend takes its kernel on a typical GPU of `arch`: its conditions and what was measured.

    Raises
    ------
    ArgumentError (a ValueError: an unknown `arch`, keywords that `asked` makes meaningless, or arguments that no call
    accepts).

    Examples
    --------
    >>> print(explain(qo_len=4096, causal=True, arch="h100").splitlines()[2])
      fa3: chosen: the first of fa4, fa3, xqa, fa2 that takes it and is not passed over
    """
    given = locals()
    options = Namespace(**{name: given[name] for name in DEFAULTS})
    changed = [name for name, default in DEFAULTS.items() if given[name] != default]
    checks.boolean("custom_mask", custom_mask)
    checks.boolean("sinks", sinks)
    if rows is not None and (not isinstance(asked, Features) or checks.integer("rows", rows) < 1):
        raise ArgumentError(f"rows must be None, or at least 1 with Features, got {checks.describe(rows)}")
    found, request, load = _arch(arch), None, Load(rows)
    if isinstance(asked, Features):
        _refuse_keywords(changed, "Features")
        features = asked
    else:
        request = described(options) if asked is None else _with_tensors(asked, options, changed)
        features = request.settings.features
        load = select.load_of(request.settings, request.qo_len)
        if asked is None and arch is None:
            found = archs.for_device(torch.cuda.current_device()) if torch.cuda.is_available() else _arch("sm_90a")
    if found is not None:
        features = features._replace(device=torch.device("cuda"))
    elif arch is not None:
        features = features._replace(device=torch.device("cpu"))
    return text(features, found, load, request and launch_of(request))


DEFAULTS: dict[str, Any] = dict(explain.__kwdefaults__ or {})
OF_TENSORS = [*DEFAULTS][:8]  # what tensors say themselves


def _arch(arch: Any) -> Arch | None:
    """Return the architecture of a name; None for the CPU, and for the device of the request."""
    if arch is None or isinstance(arch, Arch):
        return arch
    if not isinstance(arch, str):
        raise ArgumentError(f"arch must be a name such as 'sm_90a' or 'h100', got {checks.describe(arch)}")
    return None if arch == "cpu" else archs.of_gpu(arch)


def _refuse_keywords(names: list[str], asked: str) -> None:
    if names:
        raise ArgumentError(f"{', '.join(names)} must not be given with {asked}, which already tell")


def _with_tensors(asked: Any, options: Namespace, changed: list[str]) -> Problem:
    """Return the request of tensors (q, k, v) with options, of which these are `changed`."""
    if not (isinstance(asked, (tuple, list)) and len(asked) == 3 and all(isinstance(x, torch.Tensor) for x in asked)):
        raise ArgumentError(f"asked must be Features, tensors (q, k, v) or None, got {checks.describe(asked)}")
    _refuse_keywords([name for name in changed if name in OF_TENSORS], "tensors")
    q, k, v = asked
    call = Call(
        *(q, k, v, q.dim() == 2),
        kv_layout=options.kv_layout,
        pos_encoding_mode=options.pos_encoding_mode,
        causal=options.causal and not options.custom_mask,
        window_left=options.window_left,
        logits_soft_cap=options.logits_soft_cap,
        o_dtype=None if options.o_dtype is None else checks.dtype_of("o_dtype", options.o_dtype),
    )
    problem = single.problem(call)
    features = problem.settings.features._replace(custom_mask=options.custom_mask, sinks=options.sinks)
    return problem._replace(settings=problem.settings._replace(features=features))


def described(options: Namespace, **features: Any) -> Problem:
    """Return a request in words, of the keywords of `explain`. It has no tensors."""
    for name in ("qo_len", "kv_len"):
        value = getattr(options, name)
        if type(value) is not int or checks.integer(name, value) < 0:
            raise ArgumentError(f"{name} must be an int >= 0, got {checks.describe(value)}")
    checks.at_least("kv_len", options.kv_len, 0, MAX_KV_LEN)
    decode = options.qo_len == 1 and not (options.causal or options.custom_mask or options.o_dtype)
    problem = Problem(settings_of(options, decode=decode, **features), options.qo_len, options.kv_len, *NO_TENSORS)
    batch_plan.check_rows(launch_of(problem)[1], options.num_qo_heads)
    return problem


def settings_of(options: Namespace, page_size: int = 1, **features: Any) -> Settings:
    """Return the settings of a request or a batch in words. `features`: those that no keyword tells; of a device, the
    CPU by default.
    """
    kv_dtype = "uint8" if options.kv_dtype == NVFP4 else options.kv_dtype
    planned = PlanOptions(
        *(options.num_qo_heads, options.num_kv_heads, options.head_dim, options.head_dim_vo),
        *(options.dtype, kv_dtype, options.o_dtype, options.pos_encoding_mode, options.causal),
        *(options.window_left, options.logits_soft_cap),
    )
    given = {"device": torch.device("cpu"), "custom_mask": options.custom_mask, **features}
    with checks.renamed(PLAN_NAMES):
        settings = batch_plan.plan_settings(planned, options.kv_layout, page_size, **given)
    return settings._replace(features=settings.features._replace(sinks=options.sinks))


def launch_of(problem: Problem, sms: int = 0) -> Launch:
    """Return the launch of a request: of a batch of one."""
    qo_len, kv_len = problem.qo_len, problem.kv_len
    lengths = BatchLengths(np.array([0, qo_len]), np.array([0, kv_len]), np.array([kv_len]))
    return problem.settings, lengths, BatchLimits(UNLIMITED, max_qo_len=qo_len), sms


def verdicts(features: Features, arch: Arch | None, load: Load, launch: Launch | None) -> list[Verdict]:
    """Return what selection says of every backend. `arch` None: that of the features' device. `launch`: if known."""
    arch = select.arch_for(features.device, arch)
    candidates = select.candidates(features, "auto", load, arch)
    able = [b for b in candidates if not select.reasons_against(b, features, arch)]
    found = []
    for backend in BACKENDS if arch else (*BACKENDS, EMULATOR):
        rule = backend.preference(features, load, arch)
        note = f" ({rule.note})" if rule.note else ""
        if refusals := select.reasons_against(backend, features, arch):
            found.append(Verdict(backend.name, REFUSED, "", tuple(refusals)))
        elif backend in able[:1]:
            of_kernel = _rule_of(backend, launch, arch) if launch and arch else ""
            found.append(Verdict(backend.name, CHOSEN, _why_chosen(features, rule, able) + note, (), of_kernel))
        elif rule.why:
            found.append(Verdict(backend.name, PASSED_OVER, f"{rule.why}: another backend is faster there{note}"))
        else:
            found.append(Verdict(backend.name, ABLE, f'taken only with backend="{backend.name}"'))
    return found


def _rule_of(backend: Backend, launch: Launch, arch: Arch) -> str:
    settings, lengths, limits, sms = launch
    return str(FAMILIES[backend.name].rule_of(settings, lengths, limits, arch, sms or archs.TYPICAL_SMS[arch.name]))


def _why_chosen(features: Features, rule: Pass, able: list[Backend]) -> str:
    if len(able) == 1:
        return "CPU tensors run on it" if features.device.type == "cpu" else "no other backend of this GPU takes it"
    if rule.why:
        return "all that take it are passed over for others where they can, and it comes first"
    order = ", ".join(b.name for b in BACKENDS if features.device.type in b.auto_on)
    return f"the first of {order} that takes it and is not passed over"


def text(features: Features, arch: Arch | None, load: Load, launch: Launch | None) -> str:
    """Return the verdicts as text. What to use instead of a refused feature is said only if nothing is chosen."""
    arch = select.arch_for(features.device, arch)
    found = verdicts(features, arch, load, launch)
    chosen = any(each.verdict == CHOSEN for each in found)
    lines = [select.title(features, arch)]
    for each in found:
        if each.verdict == REFUSED:
            lines.append(f"  {each.backend}: refused")
            reasons = map(str, each.refusals)
            lines += [f"    {reason.partition(' Instead: ')[0] if chosen else reason}" for reason in reasons]
        elif each.verdict == PASSED_OVER:
            lines.append(f"  {each.backend}: able, passed over: {each.why}")
        else:
            lines.append(f"  {each.backend}: {each.verdict}{',' if each.verdict == ABLE else ':'} {each.why}")
            lines += [f"    rule: {each.rule}"] if each.rule else []
    if not chosen:
        lines.append("  no backend of a GPU takes this problem")
    return "\n".join(lines)
