"""Makes the kernel that a spec names: the only module that knows both. The DSL is imported on first use."""

from __future__ import annotations

import importlib

from cute_attn.runtime.spec import KernelSpec, Program

# Module and class, by the name of the kernel and, of attention kernels, what its operands are.
_PROGRAMS = {
    ("fa2", ""): "cute_attn.kernels.fa2.kernel:Fa2Program",
    ("fa2", "fp8"): "cute_attn.kernels.fa2.fp8:Fp8Program",
    ("fa3", ""): "cute_attn.kernels.fa3.kernel:Fa3Program",
    ("fa3", "fp8"): "cute_attn.kernels.fa3.fp8:Fp8Program",
    ("fa3", "rope"): "cute_attn.kernels.fa3.rope:RopeProgram",
    ("fa3", "nvfp4"): "cute_attn.kernels.fa3.nvfp4_kv:Nvfp4KvProgram",
    ("fa3", "fp8_kv"): "cute_attn.kernels.fa3.fp8_kv:Fp8KvProgram",
    ("fa4", ""): "cute_attn.kernels.fa4.kernel:Fa4Program",
    ("fa4", "fp8"): "cute_attn.kernels.fa4.fp8:Fp8Program",
    ("fa4", "fp8_kv"): "cute_attn.kernels.fa4.fp8_kv:Fp8KvProgram",
    ("combine", ""): "cute_attn.kernels.combine.kernel:CombineProgram",
    ("xqa", ""): "cute_attn.kernels.xqa.kernel:XqaProgram",
    ("xqa_umma", ""): "cute_attn.kernels.xqa.umma.kernel:XqaUmmaProgram",
    ("lengths", ""): "cute_attn.kernels.xqa.lengths:LengthsProgram",
    ("mla", ""): "cute_attn.kernels.mla.kernel:MlaProgram",
    ("mla_wgmma", ""): "cute_attn.kernels.mla.hopper.kernel:HopperMlaProgram",
    ("append", ""): "cute_attn.kernels.append.kernel:AppendProgram",
    ("plan", ""): "cute_attn.kernels.plan.kernel:PlanProgram",
}


def program(spec: KernelSpec, arch: str) -> Program:
    """The traceable kernel of `spec` for `arch` ("sm_90a", ...). TypeError for a spec of no family."""
    place = _PROGRAMS.get((spec.kernel, getattr(spec, "operands", "")))
    if place is None:
        raise TypeError(f"no program for {spec!r}")
    module, _, name = place.partition(":")
    made: Program = getattr(importlib.import_module(module), name)(spec, arch)
    return made
