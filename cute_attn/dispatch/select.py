"""Selection of the backend of a problem, by one table of what each backend refuses.

The table drives `choose`, the messages of `NotSupported`, `explain.py` and the support table (`cute_attn support`).
"""

from __future__ import annotations

import bisect
import functools
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from cute_attn.dispatch.capabilities import (
    BACKENDS,
    BY_NAME,
    CAPABILITIES,
    ELSEWHERE,
    EMULATOR,
    ROWS_CLASSES,
    ROWS_OF_DECODE,
    UNKNOWN_LOAD,
    Backend,
    Load,
    faster,
)
from cute_attn.emulator import settings as emulation
from cute_attn.errors import LayoutError, NotSupported, Refusal
from cute_attn.kernels.xqa.host.variant import rule_of
from cute_attn.kernels.xqa.spec import WHOLE
from cute_attn.problem import NO_LENGTHS, BatchLimits, DeviceLengths, Features, Lengths, Settings, short
from cute_attn.request.checks import describe
from cute_attn.runtime import arch as archs
from cute_attn.runtime.arch import Arch
from cute_attn.schedule.batch import typical_qo_len

logger = logging.getLogger(__name__)


CACHE_SIZE = 256  # settings: more than the layers of a model have
HOPPER = archs.named("sm_90a")
NOT_IN_TITLES = {"positive_scale", "kv_block_scales", "decode", "own_splits", "large_cache", "loose_scales"}
# Most packed query rows of some kernel of decode (pairs of rows of NVFP4, blocks of rows) or limit of selection, and
# up to which a plan that names XQA is one of decode.
ROW_STEPS = (4, 8, 16, 24, ROWS_OF_DECODE, 48, 64)


@functools.lru_cache(CACHE_SIZE)
def chosen(features: Features, backend: str, load: Load) -> Backend:
    """Return the result of `choose`, memoised. `load`: one of `load_class`."""
    found = choose(features, backend, load=load)
    if backend == "auto" and features.device.type == "cpu":
        _warn_of_cpu_only(features)
    return found


_warned_of_cpu_only = False


def _warn_of_cpu_only(features: Features) -> None:
    """Warn, once per process, if CPU tensors ask for what every backend of a GPU refuses."""
    global _warned_of_cpu_only
    if _warned_of_cpu_only:
        return
    on_gpu = features._replace(device=torch.device("cuda"))
    gpus = [backend for backend in BACKENDS if "cuda" in backend.auto_on]
    reasons = [(b.name, reasons_against(b, on_gpu, arch)) for arch in archs.ARCHS.values() for b in gpus]
    if not all(found for _, found in reasons):
        return
    _warned_of_cpu_only = True
    *_, of_fa2 = [found for name, found in reasons if name == "fa2"]  # which runs on every GPU
    warnings.warn(
        f"these CPU tensors run on the reference, but no backend runs such a problem on a GPU: {of_fa2[-1]} "
        '`python -m cute_attn explain --arch sm_90a ...` tells what a GPU takes, and backend="emulator" runs a '
        "GPU's kernels on CPU tensors.",
        stacklevel=2,
    )


def load_of(settings: Settings, qo_len: int, batch_size: int = 1) -> Load:
    """Return the load of so many requests of `qo_len` query tokens. It does not depend on their keys."""
    features = settings.features
    if features.chunk_invariant:
        return UNKNOWN_LOAD
    rows = features.packed_rows(qo_len)
    where = faster("xqa", features) if features.decode else None
    if where is None or not where.whole:
        return Load(rows)
    rule = rule_of(settings, HOPPER, batch_size, qo_len)  # by what is known without the keys
    return Load(rows, rule.value[0].work in (*WHOLE, "cluster"))


def load_class(settings: Settings, qo_len: int, batch_size: int = 1) -> Load:
    """Return `load_of` with its rows lowered to the largest of ROWS_CLASSES that they reach: selection depends on
    nothing finer, and the cache of `chosen` stays small.
    """
    if settings.features.device_lengths:
        return Load(0)  # one backend takes them, however many rows
    load, classes = load_of(settings, qo_len, batch_size), ROWS_CLASSES[8 * settings.features.kv_dtype.itemsize]
    return load if load.rows is None else Load(classes[bisect.bisect(classes, load.rows) - 1], load.whole)


def load_of_batch(settings: Settings, lengths: Lengths, limits: BatchLimits) -> Load:
    """Return `load_class` of a batch: of the longest request where kernels of decode may run it, else a typical one."""
    known = NO_LENGTHS if isinstance(lengths, DeviceLengths) else lengths
    return load_class(settings, limits.max_qo_len or typical_qo_len(known, limits), lengths.batch_size)


def newest_bound(most_qo_len: int, heads: tuple[int, int], causal: bool, backend: str = "auto") -> int:
    """Return the query tokens by which kernels of decode plan requests of at most `most_qo_len` over pages, without
    other masks: drafts that are verified, decode steps. 0: they cannot run them, or are not faster. Numbers between
    which no kernel distinguishes are one, so that plans follow one another.

    `heads`: num_qo_heads and num_kv_heads.
    """
    num_qo_heads, num_kv_heads = heads
    kernels = emulation.current().kernels if backend == EMULATOR.name else backend
    most_rows = ROW_STEPS[-1] if kernels == "xqa" else ROWS_OF_DECODE
    if not (causal or most_qo_len == 1) or not 0 < most_qo_len * num_qo_heads <= most_rows * num_kv_heads:
        return 0
    if most_qo_len == 1:
        return 1  # a step of decode
    rows = next(rows for rows in ROW_STEPS if most_qo_len * num_qo_heads <= rows * num_kv_heads)
    return rows * num_kv_heads // num_qo_heads


def checked_name(backend: Any, names: Sequence[str] = ("auto", *BY_NAME), same: Sequence[str] = ()) -> str:
    """Return a name of `names`; raise for anything else. `same`: FlashInfer's names of what is one implementation here,
    "auto".
    """
    if isinstance(backend, str):
        if backend in same:
            return "auto"
        if backend in names:
            return backend
        if backend in ELSEWHERE:
            raise NotSupported([Refusal(backend, "every problem", *ELSEWHERE[backend])])
    choices = ", ".join(map(repr, dict.fromkeys((*same, *names))))
    raise LayoutError(f"backend must be one of {choices}; got {describe(backend)}")


def choose(features: Features, backend: str = "auto", arch: Arch | None = None, load: Load = UNKNOWN_LOAD) -> Backend:
    """Return the backend for `features`; NotSupported lists every refusal if there is none, those of the backend that
    comes closest first.

    `arch`: architecture to assume for a CUDA device; by default that of `features.device`. "auto" takes backends that
    are slower for such a `load` only if no other supports the features.
    """
    arch = arch_for(features.device, arch)
    refused: list[tuple[Backend, list[Refusal]]] = []
    for candidate in candidates(features, backend, load, arch):
        reasons = reasons_against(candidate, features, arch)
        if not reasons:
            logger.info("%s: %s for %s", backend, candidate.name, title(features, arch))
            return candidate
        refused.append((candidate, reasons))
    refused.sort(key=lambda each: (not each[0].runs(arch), len(each[1])))
    raise NotSupported([reason for _, reasons in refused for reason in reasons])


def reasons_against(backend: Backend, features: Features, arch: Arch | None) -> list[Refusal]:
    """Return why `backend` does not support `features` on `arch` (None: on the CPU); empty if it does."""
    if backend is EMULATOR:
        return _reasons_against_emulator(features)
    refusals = []
    if not backend.runs(arch):
        where = f"{features.device.type} tensors" if arch is None else arch.name
        instead = 'backend="reference", or tensors on a GPU' if arch is None else 'backend="reference"'
        refusals.append(Refusal(backend.name, where, f"it runs on {backend.runs_on}", instead))
    compute_capability = None if arch is None else arch.capability
    for row in CAPABILITIES:
        if backend.name in row.unsupported and row.concerns(features, compute_capability):
            refusals.append(Refusal(backend.name, row.feature, *row.unsupported[backend.name]))
    return refusals


def _reasons_against_emulator(features: Features) -> list[Refusal]:
    if features.device.type != "cpu":
        runs_on = f"it runs on {EMULATOR.runs_on}"
        return [Refusal("emulator", f"{features.device.type} tensors", runs_on, 'backend="auto"')]
    arch = archs.named(emulation.current().arch)
    try:
        emulated(features, arch)
    except NotSupported as err:
        return list(err.refusals)
    return []


def emulated(features: Features, arch: Arch, load: Load = UNKNOWN_LOAD) -> Backend:
    """Return the backend whose kernels the emulator runs for `features` on a GPU of `arch`.

    NotSupported is raised as by `choose`, but in the emulator's name.
    """
    kernels = emulation.current().kernels
    if kernels != "auto" and BY_NAME[checked_name(kernels)].archs is None:
        raise LayoutError(f"kernels of an emulation must be 'auto' or a GPU's backend, got {kernels!r}")
    try:
        return choose(features._replace(device=torch.device("cuda")), kernels, arch, load)
    except NotSupported as err:
        raise NotSupported(
            list(dict.fromkeys(Refusal(EMULATOR.name, *refusal[1:]) for refusal in err.refusals))
        ) from None


def refusals(features: Features, capability: tuple[int, int]) -> tuple[Refusal, ...]:
    """Return why no backend takes `features` on GPUs of a compute capability; empty if one does. Needs no GPU.

    Raises ArgumentError for a capability that no kernel runs on.
    """
    try:
        choose(features._replace(device=torch.device("cuda")), arch=archs.for_capability(capability))
    except NotSupported as error:
        return error.refusals
    return ()


def candidates(features: Features, backend: Any, load: Load, arch: Arch | None) -> tuple[Backend, ...]:
    """Return the backends that may run `features`, best first."""
    if checked_name(backend) == "auto":
        automatic = [b for b in BACKENDS if features.device.type in b.auto_on]
        return tuple(sorted(automatic, key=lambda b: b.preference(features, load, arch).why != ""))
    return (BY_NAME[backend],)


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
        f"q {short(f.q_dtype)}, k and v {'NVFP4' if f.kv_block_scales else short(f.kv_dtype)}, out {short(f.o_dtype)}",
        f"heads {f.num_qo_heads}/{f.num_kv_heads}",
        f"head dimensions {f.head_dim_qk}, {f.head_dim_vo}",
        "" if f.kv_source == "dense" else f"{f.kv_source} batch",
        "" if f.pos_encoding_mode == "NONE" else f.pos_encoding_mode,
        *(name for name, value in f._asdict().items() if value is True and name not in NOT_IN_TITLES),
        "" if f.positive_scale else "scale of unknown or negative sign",
    ]
    return "; ".join(part for part in parts if part)
