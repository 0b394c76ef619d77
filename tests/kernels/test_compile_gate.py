"""Every default kernel, compiled for every architecture: no stack, shared memory that fits, matrix instructions.

A kernel that two architectures compile to the same machine code is compiled for one of them. So is one of the same PTX,
which ptxas alone compiles differently, unless the first has it spill soon.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from cute_attn.cli.specs import failures, label
from cute_attn.kernels import catalog
from cute_attn.kernels.blocks.attention_spec import PersistentSpec
from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.programs import program
from cute_attn.runtime import artifacts
from cute_attn.runtime import cubin as cubins
from cute_attn.runtime.arch import ARCHS
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.spec import KernelSpec
from tests.support.tiers import GATE_KERNELS, spread

SAMPLED = 1  # kernels of a family per architecture that the quick tier compiles
SIBLINGS = {"sm_121a": "sm_120a"}  # whose machine code it has; that of sm_103a differs from sm_100a's
FIRST = {"sm_100a": ("sm_90a",), "sm_103a": ("sm_90a", "sm_100a")}  # architectures that may have the same PTX
SPARE = 24  # registers that a kernel leaves: on another architecture it took 13 more at most (DSL 4.8.1, 2026-11-30)
CHUNK = 20  # kernels per test of the others, at most: a kernel takes 0.7 s of CPU time, one of fa4 1.3 s

default_specs = functools.cache(catalog.default_specs)


def family(spec: KernelSpec) -> str:
    """Whose device code the kernel is; a file of fa3 or fa4 counts as one, and so do fp8 operands of fa2."""
    if isinstance(spec, Fa2Spec) and spec.fp8:
        return "fa2 fp8"
    if not isinstance(spec, PersistentSpec):
        return spec.kernel
    return f"{spec.kernel} fp8" if spec.fp8 else f"{spec.kernel} fp8-kv" if spec.kv_dtype else spec.kernel


def own_specs(arch: str) -> list[KernelSpec]:
    """The default kernels of an architecture, without those that its sibling compiles."""
    of_sibling = set(default_specs(SIBLINGS[arch])) if arch in SIBLINGS else set()
    return [spec for spec in default_specs(arch) if spec not in of_sibling]


def sample(specs: list[KernelSpec], each: int = SAMPLED) -> list[KernelSpec]:
    """So many kernels of each family."""
    names = {spec: family(spec) for spec in specs}
    families = {name: [spec for spec in specs if names[spec] == name] for name in dict.fromkeys(names.values())}
    return [mates[i] for mates in families.values() for i in spread(len(mates), each)]


def chunks() -> Iterator[tuple[str, str, list[KernelSpec]]]:
    """Architecture, name and kernels of each test: per architecture the sample, then the others, dealt in turn so that
    slow families are spread over the tests and workers end together.
    """
    for arch in ARCHS:
        specs = own_specs(arch)
        sampled = sample(specs)
        yield arch, "sample", sampled
        others = [spec for spec in specs if spec not in set(sampled)]
        tests = -(-len(others) // CHUNK)
        for i in range(tests):
            yield arch, f"{i}", others[i::tests]


PARAMS = [
    pytest.param(arch, specs, id=f"{arch}-{name}", marks=() if name == "sample" else pytest.mark.long)
    for arch, name, specs in chunks()
    if specs
]


def test_chunks_hold_every_default_kernel_once() -> None:
    found = Counter((arch, spec) for arch, _, specs in chunks() for spec in specs)
    assert found == Counter((arch, spec) for arch in ARCHS for spec in own_specs(arch))
    assert min(Counter(arch for arch, _ in found).values()) > 50
    assert {arch for arch, _ in found} == set(ARCHS) - set(SIBLINGS)
    for arch, sibling in SIBLINGS.items():
        assert {spec for own, spec in found if own in (arch, sibling)} >= set(default_specs(arch))


def test_the_gate_stays_within_its_budget() -> None:
    assert sum(len(specs) for _, _, specs in chunks()) <= GATE_KERNELS


@pytest.mark.parametrize("arch", SIBLINGS)
def test_siblings_have_the_same_machine_code(arch: str) -> None:
    for spec in sample([spec for spec in default_specs(arch) if spec not in own_specs(arch)], each=2):
        first, second = (artifacts.get(spec, name, program) for name in (arch, SIBLINGS[arch]))
        assert code(first) == code(second), label(spec)


def code(artifact: Artifact) -> dict[str, bytes]:
    """Instructions, and what the driver is told of them: registers, stack, barriers."""
    sections = cubins._sections(artifact.cubin)
    return {name: found for name, found in sections.items() if name.startswith((".text.", ".nv.info"))}


def first_with_its_ptx(arch: str, spec: KernelSpec) -> str | None:
    """The first architecture that has the PTX of a kernel. Hopper converts numbers of 8 and 4 bits in other ways."""
    narrow = re.search("float8|fp4", spec.key())
    others = (other for other in FIRST.get(arch, ()) if not (narrow and other == "sm_90a"))
    return next((other for other in others if spec in default_specs(other)), None)


def spare_registers(artifact: Artifact) -> int:
    """How many more registers a thread may have."""
    ctas = re.search(r"\.minnctapersm (\d+)", artifact.ptx)
    threads = math.prod(artifact.block) * (int(ctas[1]) if ctas else 1)
    return min(255, 65536 // threads // 8 * 8) - artifact.registers


@pytest.mark.parametrize(("arch", "specs"), PARAMS)
def test_default_kernels_pass_the_gates(arch: str, specs: list[KernelSpec]) -> None:
    unsampled = [] if specs == sample(own_specs(arch)) else specs
    others = {spec: first_with_its_ptx(arch, spec) for spec in unsampled}
    firsts = {spec: artifacts.get(spec, other, program) for spec, other in others.items() if other}
    clear = {spec for spec, artifact in firsts.items() if spare_registers(artifact) >= SPARE}
    outcomes = artifacts.get_many({arch: [spec for spec in specs if spec not in clear]}, program, jobs=1)
    missed = {label(spec): why for (_, spec), outcome in outcomes.items() if (why := failures(arch, spec, outcome))}
    assert missed == {}
    for spec in firsts.keys() - clear:
        own, first = (re.sub(r"\.target .*", "", made.ptx) for made in (outcomes[arch, spec], firsts[spec]))
        assert own == first, label(spec)
