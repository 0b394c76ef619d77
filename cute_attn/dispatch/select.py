"""Which backend runs a problem, and why: one table of what each backend refuses, and nothing else decides.

The table drives `choose`, the messages of `NotSupported`, `explain` and the support table of the README.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from cute_attn.dispatch.capabilities import BACKENDS, BY_NAME, ELSEWHERE, EMULATOR, ROWS_CLASSES, TABLE, Backend
from cute_attn.emulator import settings
from cute_attn.errors import LayoutError, NotSupported, Refusal
from cute_attn.problem import Features, Request, short
from cute_attn.request.checks import describe
from cute_attn.runtime import arch as archs
from cute_attn.runtime.arch import Arch

logger = logging.getLogger(__name__)


REMEMBERED = 256  # settings, and what runs them


@functools.lru_cache(REMEMBERED)
def chosen(features: Features, backend: str, rows: int) -> Backend:
    """`choose`, remembered."""
    return choose(features, backend, rows=rows)


def rows_class(features: Features, qo_len: int) -> int:
    """The packed query rows of a request as far as any backend asks: the highest `least_rows` that they reach."""
    if features.device_lengths:
        return 0  # one backend takes them, however many rows
    rows = qo_len * (features.num_qo_heads // features.num_kv_heads)
    return max(least for least in ROWS_CLASSES if least <= rows)


def known(backend: Any) -> str:
    """The name of a backend, or "auto"; anything else is refused."""
    if isinstance(backend, str) and backend == "auto":
        return "auto"
    return _named(backend).name


def choose(features: Features, backend: str = "auto", arch: Arch | None = None, rows: int | None = None) -> Backend:
    """The backend for `features`; NotSupported lists every refusal if there is none.

    `arch` stands for the architecture of `features.device`, so that another machine's choice can be asked
    for. `rows`: packed query rows of a request, where known; "auto" minds them.
    """
    arch = arch_for(features.device, arch)
    refusals: list[Refusal] = []
    for candidate in _candidates(features, backend, rows):
        reasons = reasons_against(candidate, features, arch)
        if not reasons:
            logger.info("%s: %s for %s", backend, candidate.name, _title(features, arch))
            return candidate
        refusals += reasons
    raise NotSupported(refusals)


def reasons_against(backend: Backend, features: Features, arch: Arch | None) -> list[Refusal]:
    """Why `backend` does not take `features` on `arch` (None: on the CPU); empty if it does."""
    if backend is EMULATOR:
        return _reasons_against_emulator(features)
    refusals = []
    if backend.capability is not None:
        runs_on = f"it runs on {backend.runs_on}"
        if arch is None:
            instead = 'backend="reference", or tensors on a GPU'
            refusals.append(Refusal(backend.name, f"{features.device.type} tensors", runs_on, instead))
        elif arch.capability < backend.capability or backend.only not in (None, arch.name):
            refusals.append(Refusal(backend.name, arch.name, runs_on, 'backend="reference"'))
    capability = None if arch is None else arch.capability
    for row in TABLE:
        if (no := row.refusal(backend.name, features, capability)) is not None:
            refusals.append(Refusal(backend.name, row.feature, *no))
    return refusals


def _reasons_against_emulator(features: Features) -> list[Refusal]:
    if features.device.type != "cpu":
        runs_on = f"it runs on {EMULATOR.runs_on}"
        return [Refusal("emulator", f"{features.device.type} tensors", runs_on, 'backend="auto"')]
    arch = archs.named(settings.current().arch)
    try:
        emulated(features, arch)
    except NotSupported as err:
        return list(err.refusals)
    return []


def emulated(features: Features, arch: Arch, qo_len: int | None = None) -> Backend:
    """The backend whose kernels stand for `features` on an emulated GPU of `arch`; NotSupported as `choose`, but in the
    emulator's name. `qo_len`: query tokens of a request, where known.
    """
    kernels = settings.current().kernels
    if kernels != "auto" and _named(kernels).capability is None:
        raise LayoutError(f"kernels of an emulation must be 'auto' or a GPU's backend, got {kernels!r}")
    rows = None if qo_len is None else qo_len * (features.num_qo_heads // features.num_kv_heads)
    try:
        return choose(features._replace(device=torch.device("cuda")), kernels, arch, rows)
    except NotSupported as err:
        raise NotSupported([Refusal(EMULATOR.name, *refusal[1:]) for refusal in err.refusals]) from None


def explain(asked: Features | Request, arch: Arch | None = None, rows: int | None = None) -> str:
    """What "auto" chooses for `asked`, and for every backend why it is chosen, passed over or refused.

    `arch` stands for the architecture of a CUDA device; with it, no GPU is needed. `rows`: as for `choose`, of a batch.
    """
    features = asked if isinstance(asked, Features) else asked.features
    if not isinstance(asked, Features):
        rows = asked.qo_len * (features.num_qo_heads // features.num_kv_heads)
    arch = arch_for(features.device, arch)
    lines = [_title(features, arch)]
    chosen = False
    for backend in (*BACKENDS, EMULATOR):
        reasons = reasons_against(backend, features, arch)
        automatic = features.device.type in backend.auto_on
        if reasons:
            lines += [f"  {backend.name}: refused"] + [f"    {reason}" for reason in reasons]
        elif automatic and (why := backend.slow(features, rows)):
            lines.append(f"  {backend.name}: able, passed over: {why}, which is faster elsewhere")
        elif automatic and not chosen:
            chosen = True
            lines.append(f"  {backend.name}: chosen")
        else:
            lines.append(f'  {backend.name}: able, taken only with backend="{backend.name}"')
    if not chosen:
        lines.append("  no backend takes this problem")
    return "\n".join(lines)


def _candidates(features: Features, backend: Any, rows: int | None) -> tuple[Backend, ...]:
    if known(backend) == "auto":
        return tuple(b for b in BACKENDS if features.device.type in b.auto_on and not b.slow(features, rows))
    return (_named(backend),)


def _named(backend: Any) -> Backend:
    if isinstance(backend, str) and backend in BY_NAME:
        return BY_NAME[backend]
    if isinstance(backend, str) and backend in ELSEWHERE:
        raise NotSupported([Refusal(backend, "every problem", *ELSEWHERE[backend])])
    choices = ", ".join(map(repr, ("auto", *BY_NAME)))
    raise LayoutError(f"backend must be one of {choices}; got {describe(backend)}")


def arch_for(device: torch.device, assumed: Arch | None) -> Arch | None:
    """What `device` is, or shall be taken for; None for the CPU."""
    if device.type != "cuda":
        return None
    if assumed is not None:
        return assumed
    return archs.for_device(torch.cuda.current_device() if device.index is None else device.index)


def _title(features: Features, arch: Arch | None) -> str:
    """One line that tells these features from others."""
    f = features
    parts = [
        f"{f.device.type if arch is None else arch.name}",
        f"q {short(f.q_dtype)}, k and v {short(f.kv_dtype)}, out {short(f.o_dtype)}",
        f"heads {f.num_qo_heads}/{f.num_kv_heads}",
        f"head dimensions {f.head_dim_qk}, {f.head_dim_vo}",
        "" if f.kv_source == "dense" else f"{f.kv_source} batch",
        "" if f.pos_encoding_mode == "NONE" else f.pos_encoding_mode,
        *(
            name if getattr(f, name) else ""
            for name in (
                "custom_mask",
                "soft_cap",
                "per_head_scales",
                "kv_block_scales",
                "sinks",
                "expanded",
                "device_lengths",
                "draft_mask",
            )
        ),
        "" if f.positive_scale else "scale of unknown or negative sign",
    ]
    return "; ".join(part for part in parts if part)
