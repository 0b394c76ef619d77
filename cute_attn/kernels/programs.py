"""Makes the kernel that a spec names: the only module that knows both. The DSL is imported on first use."""

from __future__ import annotations

from cute_attn.kernels.append.spec import AppendSpec
from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.mla.spec import HopperMlaSpec, MlaSpec
from cute_attn.kernels.plan.spec import PlanSpec
from cute_attn.kernels.xqa.spec import LengthsSpec, XqaSpec
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.runtime.spec import KernelSpec, Program


def program(spec: KernelSpec, arch: str) -> Program:
    """The traceable kernel of `spec` for `arch` ("sm_90a", ...). TypeError for a spec of no family."""
    if isinstance(spec, Fa2Spec):
        return _fa2_program(spec, arch)
    if isinstance(spec, Fa3Spec):
        return _fa3_program(spec, arch)
    if isinstance(spec, Fa4Spec):
        return _fa4_program(spec, arch)
    if isinstance(spec, CombineSpec):
        from cute_attn.kernels.combine.kernel import CombineProgram

        return CombineProgram(spec, arch)
    if isinstance(spec, XqaSpec):
        from cute_attn.kernels.xqa.kernel import XqaProgram

        return XqaProgram(spec, arch)
    if isinstance(spec, MlaSpec):
        from cute_attn.kernels.mla.kernel import MlaProgram

        return MlaProgram(spec, arch)
    if isinstance(spec, HopperMlaSpec):
        from cute_attn.kernels.mla.hopper.kernel import HopperMlaProgram

        return HopperMlaProgram(spec, arch)
    if isinstance(spec, AppendSpec):
        from cute_attn.kernels.append.kernel import AppendProgram

        return AppendProgram(spec, arch)
    if isinstance(spec, PlanSpec):
        from cute_attn.kernels.plan.kernel import PlanProgram

        return PlanProgram(spec, arch)
    if isinstance(spec, LengthsSpec):
        from cute_attn.kernels.xqa.lengths import LengthsProgram

        return LengthsProgram(spec, arch)
    if isinstance(spec, XqaUmmaSpec):
        from cute_attn.kernels.xqa.umma.kernel import XqaUmmaProgram

        return XqaUmmaProgram(spec, arch)
    raise TypeError(f"no program for {spec!r}")


def _fa2_program(spec: Fa2Spec, arch: str) -> Program:
    if spec.fp8:
        from cute_attn.kernels.fa2.fp8 import Fp8Program

        return Fp8Program(spec, arch)
    from cute_attn.kernels.fa2.kernel import Fa2Program

    return Fa2Program(spec, arch)


def _fa3_program(spec: Fa3Spec, arch: str) -> Program:
    if spec.fp8:
        from cute_attn.kernels.fa3.fp8 import Fp8Program

        return Fp8Program(spec, arch)
    if spec.pos_encoding == "rope":
        from cute_attn.kernels.fa3.rope import RopeProgram

        return RopeProgram(spec, arch)
    if spec.kv_dtype == "nvfp4":
        from cute_attn.kernels.fa3.nvfp4_kv import Nvfp4KvProgram

        return Nvfp4KvProgram(spec, arch)
    if spec.kv_dtype:
        from cute_attn.kernels.fa3.fp8_kv import Fp8KvProgram

        return Fp8KvProgram(spec, arch)
    from cute_attn.kernels.fa3.kernel import Fa3Program

    return Fa3Program(spec, arch)


def _fa4_program(spec: Fa4Spec, arch: str) -> Program:
    if spec.fp8:
        from cute_attn.kernels.fa4.fp8 import Fp8Program

        return Fp8Program(spec, arch)
    if spec.kv_dtype:
        from cute_attn.kernels.fa4.fp8_kv import Fp8KvProgram

        return Fp8KvProgram(spec, arch)
    from cute_attn.kernels.fa4.kernel import Fa4Program

    return Fa4Program(spec, arch)
