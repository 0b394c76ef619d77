"""GPU architectures: which cubin a device runs and what it offers. Needs neither DSL nor CUDA."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from cute_attn.errors import ArgumentError

MAX_DEVICES = 64  # CUDA devices of a process, for which facts are kept

# Bytes of shared memory that one CTA may opt in to (CUDA programming guide, table of compute capabilities).
_SMEM_163K = 166912
_SMEM_99K = 101376
_SMEM_227K = 232448
_SMEM_OF_8X = {0: _SMEM_163K, 7: _SMEM_163K}  # 8.6, 8.9 and any other 8.x: 99 KB


class Arch(NamedTuple):
    """One type of device. `name` is the compile target, which capabilities may share (8.6 runs the sm_80 cubin)."""

    name: str
    capability: tuple[int, int]
    smem_limit: int  # bytes of shared memory per CTA, static and dynamic together

    @property
    def pdl(self) -> bool:
        """Whether it has programmatic dependent launch (`griddepcontrol`), and thread block clusters."""
        return self.capability >= (9, 0)

    @property
    def converts_e4m3(self) -> bool:
        """Whether it has an instruction from pairs of e4m3 to pairs of fp16."""
        return self.capability >= (8, 9)

    @property
    def converts_e2m1(self) -> bool:
        """Whether it has one from pairs of e2m1; then also from e2m1 and fp8 to bf16, with PTX ISA 9.2 and later."""
        return self.capability >= (10, 0)


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", (8, 0), _SMEM_163K),
        Arch("sm_90a", (9, 0), _SMEM_227K),
        Arch("sm_100a", (10, 0), _SMEM_227K),
        Arch("sm_103a", (10, 3), _SMEM_227K),
        Arch("sm_120a", (12, 0), _SMEM_99K),
        Arch("sm_121a", (12, 1), _SMEM_99K),
    )
}
# Multiprocessors of A100, H100/H200 SXM, B200, B300, RTX 5090 and GB10: they decide how many kv splits there are.
TYPICAL_SMS = {"sm_80": 108, "sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 170, "sm_121a": 48}
# Compute capabilities of GPUs by their names in lower case, without spaces.
GPUS = {
    "a100": (8, 0),
    "a10": (8, 6),
    "rtx3090": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "gh200": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "b300": (10, 3),
    "gb300": (10, 3),
    "rtx5090": (12, 0),
    "rtxpro6000": (12, 0),
    "gb10": (12, 1),
}
_BY_CAPABILITY = {arch.capability: arch for arch in ARCHS.values()}


def named(name: str) -> Arch:
    """Returns the architecture called `name`; otherwise an ArgumentError lists the accepted names."""
    if name not in ARCHS:
        raise ArgumentError(f"arch must be one of {', '.join(ARCHS)}, got {name!r}")
    return ARCHS[name]


def of_gpu(name: str) -> Arch:
    """Returns the architecture called `name` ("sm_90a"), or that of a GPU ("h100", "RTX 5090"); otherwise an
    ArgumentError lists both kinds of names.
    """
    capability = GPUS.get(name.lower().replace(" ", ""))
    if capability is not None:
        return for_capability(capability)
    if name not in ARCHS:
        close = difflib.get_close_matches(name.lower(), [*ARCHS, *GPUS], 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        names = f"one of {', '.join(ARCHS)}, or a GPU of {', '.join(GPUS)}"
        raise ArgumentError(f"arch must be {names}; got {name!r}{meant}")
    return ARCHS[name]


def for_capability(capability: tuple[int, int]) -> Arch:
    """Returns the architecture of compute capability (major, minor). Every 8.x runs the sm_80 cubin."""
    major, minor = capability
    if major == 8:
        return Arch("sm_80", (major, minor), _SMEM_OF_8X.get(minor, _SMEM_99K))
    if (major, minor) not in _BY_CAPABILITY:
        known = ", ".join(f"{a}.{b}" for a, b in _BY_CAPABILITY if a > 8)
        raise ArgumentError(f"compute capability {major}.{minor} is not supported; supported: 8.x, {known}")
    return _BY_CAPABILITY[(major, minor)]


def for_device(index: int) -> Arch:
    """Returns the architecture of CUDA device `index` in torch's numbering, independent of the current device."""
    import torch

    return for_capability(torch.cuda.get_device_capability(index))


def multiprocessors(index: int) -> int:
    """Returns the number of multiprocessors of CUDA device `index`."""
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)
