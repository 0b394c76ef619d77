"""Launches that do nothing: what host code hands over, by the names of the kernels' parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

from cute_attn.emulator import adapter
from cute_attn.kernels.host import batch as host_batch
from cute_attn.kernels.host import gpu as loading
from cute_attn.kernels.host import planner
from cute_attn.kernels.host import single as host_single
from cute_attn.kernels.host.prepared import prepared as prepared_kernel
from cute_attn.runtime.launch import CPU, Bound
from cute_attn.runtime.spec import KernelSpec
from tests.support.launch_corpus import described

STREAM = 77


class NamedLaunch:
    """Takes the place of `Launch` and of `EmulatedLaunch`. Within `recorded`, `loaded` has the specs of loaded kernels,
    and `fired` what was launched: its spec, grid, stream, `params` with a number per name, and whether with PDL; not
    the planner kernel, whose launches are in `planned`.
    """

    loaded: ClassVar[list[KernelSpec]] = []
    fired: ClassVar[list[NamedLaunch]] = []
    planned: ClassVar[list[NamedLaunch]] = []
    static: dict[str, Any]
    groups: tuple[Sequence[str], ...]
    grid: tuple[int, int, int]
    stream: int
    params: Any
    of_tensors: tuple[Sequence[int], Sequence[int]] = (), ()
    values_of: Any = Bound.values_of

    def __init__(self, artifact: Any, device_index: int = CPU, *, pdl: bool) -> None:
        self.artifact, self.spec, self.pdl = artifact, artifact.spec, pdl
        NamedLaunch.loaded.append(self.spec)

    def bind(self, static: dict[str, Any], *groups: Sequence[str]) -> NamedLaunch:
        bound = copy.copy(self)
        bound.static, bound.groups = static, groups
        return bound

    def fire(self, stream: int, moving: tuple[Any, ...], settled: tuple[Any, ...], tensors: Any = ()) -> None:
        grid, *rest = settled
        values = dict(self.static)
        for fields, given in zip(self.groups, (moving + self.values_of(tensors), *rest), strict=True):
            values |= zip(fields, given, strict=True)
        assert values.keys() == {param.name for param in self.artifact.params}
        fired = copy.copy(self)
        fired.grid, fired.stream, fired.params = grid, stream, SimpleNamespace(**values)
        (NamedLaunch.planned if self.spec.kernel == "plan" else NamedLaunch.fired).append(fired)


@contextlib.contextmanager
def recorded() -> Iterator[type[NamedLaunch]]:
    """Recorded launches in place of those of a GPU or of the emulator, on `STREAM`; kernels are not compiled."""

    def forget() -> None:
        NamedLaunch.loaded.clear()
        NamedLaunch.fired.clear()
        NamedLaunch.planned.clear()
        loading.load.cache_clear()
        prepared_kernel.cache_clear()

    def artifact(spec: KernelSpec, arch: str, program_of: Any) -> Any:
        return SimpleNamespace(spec=spec, params=described(spec, arch, program_of).params)

    forget()
    with (
        mock.patch.object(loading, "Launch", NamedLaunch),
        mock.patch.object(adapter, "EmulatedLaunch", NamedLaunch),
        mock.patch.object(loading, "artifacts", SimpleNamespace(get=artifact)),
        mock.patch.object(host_single, "current_stream", return_value=STREAM),
        mock.patch.object(host_batch, "current_stream", return_value=STREAM),
        mock.patch.object(planner, "current_stream", return_value=STREAM),
    ):
        yield NamedLaunch
    forget()
