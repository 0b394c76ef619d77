"""Compilation of a KernelSpec to an Artifact on a machine without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import artifacts, dsl
from cute_attn.runtime.artifact import Param
from cute_attn.runtime.compile import compile_spec, count_matrix_instructions
from tests.support import subprocesses
from tests.support.toy_spec import BrokenSpec, ToySpec, toy_program


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_artifact_describes_the_kernel(arch: str) -> None:
    cluster = (2, 1, 1) if archs.named(arch).pdl else (1, 1, 1)
    artifact = compile_spec(ToySpec(threads=64, cluster=cluster), arch, toy_program)
    assert (artifact.arch, artifact.dsl) == (arch, dsl.version())
    assert artifact.symbol == "cute_attn_toy_0"
    assert artifact.params == (
        Param("out", "i64", 0, 8),
        Param("count", "i32", 8, 4),
        Param("scale", "f32", 12, 4),
        Param("offset", "f64", 16, 8),
        Param("bias", "i32", 24, 4),
    )
    assert (artifact.block, artifact.cluster, artifact.smem_bytes) == ((64, 1, 1), cluster, 65536)
    assert (artifact.stack_bytes, artifact.mma_count) == (0, 0)
    assert 4 <= artifact.registers <= 64
    assert f".target {arch}\n" in artifact.ptx
    assert ("griddepcontrol.wait" in artifact.ptx) == archs.named(arch).pdl
    assert artifact.spec == {"kernel": "toy", "threads": 64, "cluster": list(cluster), "stack": False}


def test_counts_every_kind_of_matrix_instruction() -> None:
    ptx = """
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1}, {%r2}, {%f1};
        @%p1 wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 1;
        wgmma.commit_group.sync.aligned;
        tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, p;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
        fma.rn.f32 %f1, %f2, %f3, %f4;
    """
    assert count_matrix_instructions(ptx) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("trace", r'\{"cluster".*"kernel":"toy".*\} for sm_90a failed: ValueError: toy of iron'),
        ("block", r"program.block is \(64, 1, 1\), the cubin was built for \(128, 1, 1\)"),
        ("SwappedParams", r"ToyProgram declares .*'scale': 'f32', 'count': 'i32'.* but the PTX has"),
        ("ShortParams", r"ToyProgram declares .* but the PTX has .*'f64', 'i32'\]"),
    ],
)
def test_a_program_that_contradicts_its_description_is_refused(fault: str, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        compile_spec(BrokenSpec(fault=fault), "sm_90a", toy_program)


def test_unknown_arch_is_refused_before_anything_is_imported() -> None:
    code = """
import sys
from cute_attn.errors import ArgumentError
from cute_attn.runtime import compile
from tests.support.toy_spec import ToySpec, toy_program
try:
    compile.compile_spec(ToySpec(), "sm_70", toy_program)
except ArgumentError as err:
    print(err, "cutlass" in sys.modules)
"""
    assert re.fullmatch(r"arch must be one of sm_80, sm_90a, .*, got 'sm_70' False", subprocesses.run(code).strip())
    with pytest.raises(ArgumentError):
        artifacts.get_many({"sm_70": [ToySpec()]}, toy_program)


def test_missing_dsl_is_explained(tmp_path: Path) -> None:
    code = """
from cute_attn.runtime import artifacts
from tests.support.toy_spec import ToySpec, toy_program
outcomes = artifacts.get_many({"sm_90a": [ToySpec(), ToySpec(64)]}, toy_program, jobs=2)
print(*(str(outcome).splitlines()[0] for outcome in outcomes.values()), sep="\\n")
"""
    env = {"CUTE_ATTN_CACHE_DIR": str(tmp_path)}
    lines = subprocesses.run(code, env=env, block=["cutlass"]).splitlines()
    assert len(lines) == 2
    assert all("nvidia-cutlass-dsl is not installed" in line and '"toy"' in line for line in lines)
