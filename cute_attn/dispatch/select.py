"""Selection of the backend of a problem, by one table of what each backend refuses.

The table drives `choose`, the messages of `NotSupported`, `explain.py` and the support table (`cute_attn support`).
"""

from __future__ import annotations

import bisect
import functools
import logging
import warnings
from typing import Any

import torch

from cute_attn.dispatch.capabilities import BACKENDS, BY_NAME, CAPABILITIES, ELSEWHERE, EMULATOR, ROWS_CLASSES, Backend
from cute_attn.emulator import settings
from cute_attn.errors import LayoutError, NotSupported, Refusal
from cute_attn.problem import Features, short
from cute_attn.request.checks import describe
from cute_attn.runtime import arch as archs
from cute_attn.runtime.arch import Arch

logger = logging.getLogger(__name__)


CACHE_SIZE = 256  # settings: more than the layers of a model have
_ROWS = sorted(ROWS_CLASSES)


@functools.lru_cache(CACHE_SIZE)
def chosen(features: Features, backend: str, rows: int, one_request: bool = False) -> Backend:
    """Return the result of `choose`, memoised."""
    found = choose(features, backend, rows=rows, one_request=one_request)
    if backend == "auto" and features.device.type == "cpu":
        _warn_of_cpu_only(features)
    return found


_warned_of_cpu_only = False


def _warn_of_cpu_only(features: Features) -> None:
    """Warn, once per process, if CPU tensors ask for what every backend of a GPU refuses."""
    global _warned_of_cpu_only
    if _warned_of_cpu_only:
        return
    reason = _refusal_of_gpus(features)
    if reason is not None:
        _warned_of_cpu_only = True
        warnings.warn(
            f"these CPU tensors run on the reference, but no backend runs such a problem on a GPU: {reason} "
            '`python -m cute_attn explain --arch sm_90a ...` tells what a GPU takes, and backend="emulator" runs a '
            "GPU's kernels on CPU tensors.",
            stacklevel=2,
        )


def _refusal_of_gpus(features: Features) -> Refusal | None:
    """Return a reason of fa2, which runs on every GPU, if no backend takes `features` on any architecture."""
    on_gpu, reason = features._replace(device=torch.device("cuda")), None
    for arch in archs.ARCHS.values():
        for backend in BACKENDS:
            if "cuda" not in backend.auto_on:
                continue
            reasons = reasons_against(backend, on_gpu, arch)
            if not reasons:
                return None
            reason = reasons[-1] if backend.name == "fa2" else reason
    return reason


def rows_class(features: Features, qo_len: int) -> int:
    """Return the largest threshold of `ROWS_CLASSES` that the packed query rows of a request reach: selection depends
    on nothing finer, and the cache of `chosen` stays small.
    """
    if features.device_lengths:
        return 0  # one backend takes them, however many rows
    rows = qo_len * (features.num_qo_heads // features.num_kv_heads)
    return _ROWS[bisect.bisect_right(_ROWS, rows) - 1]


def checked_name(backend: Any) -> str:
    """Return the name of a backend or "auto"; raise for anything else."""
    if isinstance(backend, str) and backend == "auto":
        return "auto"
    return _named(backend).name


def choose(
    features: Features,
    backend: str = "auto",
    arch: Arch | None = None,
    rows: int | None = None,
    one_request: bool = False,
) -> Backend:
    """Return the backend for `features`; NotSupported lists every refusal if there is none.

    `arch`: architecture to assume for a CUDA device; by default that of `features.device`. `rows`: packed query rows
    per request, where known; `one_request`: whether there is one request alone. "auto" takes backends that are slower
    for such a batch only if no other supports the features.
    """
    arch = arch_for(features.device, arch)
    refusals: list[Refusal] = []
    for candidate in candidates(features, backend, rows, arch, one_request):
        reasons = reasons_against(candidate, features, arch)
        if not reasons:
            logger.info("%s: %s for %s", backend, candidate.name, title(features, arch))
            return candidate
        refusals += reasons
    raise NotSupported(refusals)


def reasons_against(backend: Backend, features: Features, arch: Arch | None) -> list[Refusal]:
    """Return why `backend` does not support `features` on `arch` (None: on the CPU); empty if it does."""
    if backend is EMULATOR:
        return _reasons_against_emulator(features)
    refusals = []
    if backend.capability is not None:
        runs_on = f"it runs on {backend.runs_on}"
        if arch is None:
            instead = 'backend="reference", or tensors on a GPU'
            refusals.append(Refusal(backend.name, f"{features.device.type} tensors", runs_on, instead))
        elif arch.capability < backend.capability or (backend.only and arch.name not in backend.only):
            refusals.append(Refusal(backend.name, arch.name, runs_on, 'backend="reference"'))
    compute_capability = None if arch is None else arch.capability
    for row in CAPABILITIES:
        if backend.name in row.unsupported and row.concerns(features, compute_capability):
            refusals.append(Refusal(backend.name, row.feature, *row.unsupported[backend.name]))
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


def emulated(features: Features, arch: Arch, qo_len: int | None = None, one_request: bool = False) -> Backend:
    """Return the backend whose kernels the emulator runs for `features` on a GPU of `arch`.

    NotSupported is raised as by `choose`, but in the emulator's name. `qo_len`: query tokens per request, where known.
    """
    kernels = settings.current().kernels
    if kernels != "auto" and _named(kernels).capability is None:
        raise LayoutError(f"kernels of an emulation must be 'auto' or a GPU's backend, got {kernels!r}")
    rows = None if qo_len is None else qo_len * (features.num_qo_heads // features.num_kv_heads)
    try:
        return choose(features._replace(device=torch.device("cuda")), kernels, arch, rows, one_request)
    except NotSupported as err:
        raise NotSupported([Refusal(EMULATOR.name, *refusal[1:]) for refusal in err.refusals]) from None


def refusals(features: Features, capability: tuple[int, int]) -> tuple[Refusal, ...]:
    """Return why no backend takes `features` on GPUs of a compute capability; empty if one does. Needs no GPU.

    Raises ArgumentError for a capability that no kernel runs on.
    """
    try:
        choose(features._replace(device=torch.device("cuda")), arch=archs.for_capability(capability))
    except NotSupported as error:
        return error.refusals
    return ()


def candidates(
    features: Features, backend: Any, rows: int | None, arch: Arch | None = None, one_request: bool = False
) -> tuple[Backend, ...]:
    """Return the backends that may run `features`, best first."""
    if checked_name(backend) == "auto":
        automatic = [b for b in BACKENDS if features.device.type in b.auto_on]
        return tuple(sorted(automatic, key=lambda b: b.auto_skip_reason(features, rows, arch, one_request) is not None))
    return (_named(backend),)


def _named(backend: Any) -> Backend:
    if isinstance(backend, str) and backend in BY_NAME:
        return BY_NAME[backend]
    if isinstance(backend, str) and backend in ELSEWHERE:
        raise NotSupported([Refusal(backend, "every problem", *ELSEWHERE[backend])])
    choices = ", ".join(map(repr, ("auto", *BY_NAME)))
    raise LayoutError(f"backend must be one of {choices}; got {describe(backend)}")


def arch_for(device: torch.device, assumed: Arch | None) -> Arch | None:
    """Return the architecture of a CUDA device, or `assumed` if that is given; None for the CPU."""
    if device.type != "cuda":
        return None
    if assumed is not None:
        return assumed
    return archs.for_device(torch.cuda.current_device() if device.index is None else device.index)


def title(features: Features, arch: Arch | None) -> str:
    """Describe the features in one line."""
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
                "multi_item",
                "soft_cap",
                "per_head_scales",
                "kv_block_scales",
                "sinks",
                "expanded",
                "half_aligned_kv",
                "device_lengths",
                "draft_mask",
            )
        ),
        "" if f.positive_scale else "scale of unknown or negative sign",
    ]
    return "; ".join(part for part in parts if part)
