"""Every kernel spec that the compile gate builds, and specs from their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from cute_attn.kernels.append.spec import AppendSpec
from cute_attn.kernels.append.spec import default_specs as append_specs
from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.kernels.fa2.default_specs import default_specs as fa2_specs
from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.fa3.default_specs import default_specs as fa3_specs
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.fa3.tiles import ARCH as FA3_ARCH
from cute_attn.kernels.fa4.default_specs import default_specs as fa4_specs
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.tiles import ARCHS as FA4_ARCHS
from cute_attn.kernels.mla.spec import HopperMlaSpec, MlaSpec
from cute_attn.kernels.mla.tiles import default_specs as mla_specs
from cute_attn.kernels.plan.spec import PlanSpec
from cute_attn.kernels.xqa.default_specs import default_specs as xqa_specs
from cute_attn.kernels.xqa.spec import LengthsSpec, XqaSpec
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.runtime.arch import named
from cute_attn.runtime.spec import KernelSpec

_SPECS = (
    *(Fa2Spec, Fa3Spec, Fa4Spec, CombineSpec, XqaSpec, XqaUmmaSpec, MlaSpec, HopperMlaSpec),
    *(AppendSpec, PlanSpec, LengthsSpec),
)
SPEC_TYPES: dict[str, type[KernelSpec]] = {cls.kernel: cls for cls in _SPECS}


def from_dict(data: dict[str, Any]) -> KernelSpec:
    """Inverts `KernelSpec.asdict`, also after a round trip through JSON."""
    fields = dict(data)
    cls: Any = SPEC_TYPES[fields.pop("kernel")]
    if "tile" in fields:
        fields["tile"] = type(cls.tile)(**fields["tile"])
    if isinstance(fields.get("scores"), Sequence):
        fields["scores"] = tuple(fields["scores"])
    made: KernelSpec = cls(**fields)
    return made


def default_specs(arch_name: str) -> list[KernelSpec]:
    """Lists the specs that most programs need, and one of everything else, for one architecture."""
    arch = named(arch_name)
    specs = [*fa2_specs(arch), *combine_specs(), *append_specs(), PlanSpec(), LengthsSpec(), *xqa_specs(arch)]
    specs += mla_specs(arch)
    if arch_name == FA3_ARCH:
        specs += [*fa3_specs(), *(CombineSpec("float8_e4m3fn", 128, schedule) for schedule in ("grid", "items"))]
    if arch_name in FA4_ARCHS:
        specs += fa4_specs(arch)
    return list(dict.fromkeys(specs))


def combine_specs() -> list[KernelSpec]:
    """Lists merges of single requests in both 16-bit dtypes, and of batches in bf16."""
    single = [CombineSpec(dtype, dim) for dtype, dim in product(("float16", "bfloat16"), (64, 128, 256))]
    return [*single, *(CombineSpec("bfloat16", dim, "items") for dim in (64, 128, 256))]
