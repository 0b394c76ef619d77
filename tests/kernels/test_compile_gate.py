"""Every default kernel, compiled for every architecture: no stack, shared memory that fits, matrix instructions."""

from __future__ import annotations

import pytest

from cute_attn.cli.specs import failures, label
from cute_attn.kernels import catalog
from cute_attn.kernels.programs import program
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import ARCHS


@pytest.mark.parametrize("arch", ARCHS)
def test_default_kernels_pass_the_gates(arch: str) -> None:
    specs = catalog.default_specs(arch)
    assert len(specs) > 50
    outcomes = artifacts.get_many({arch: specs}, program, jobs=1)
    missed = {label(spec): why for (_, spec), outcome in outcomes.items() if (why := failures(arch, spec, outcome))}
    assert missed == {}
