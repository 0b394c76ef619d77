"""Faults in what fp8 adds to the Hopper kernel: transposed V, scales, signs, tails."""

from __future__ import annotations

from tests.emulator.faults.fault import Fault, chosen

SIGNED = chosen("persistent_fp8", "fa3 and (signed and (70x5 or 130))")
EIGHT = chosen("persistent_fp8", "fa3 and (ragged-70x0)")
GATHERED = chosen("persistent_fp8_kv", "fa3 and (long_batches and 96x96 and eager)")
FP8_FAULTS = (
    Fault(
        "odd dimensions are taken for even ones",
        "fa3/parts/fp8.py",
        "ptx.permute(c, d, 0x6420)",
        "ptx.permute(c, d, 0x7531)",
        EIGHT,
    ),
    Fault("keys of V are swapped", "fa3/parts/fp8.py", "ptx.permute(a, b, 0x6420)", "ptx.permute(b, a, 0x6420)", EIGHT),
    Fault(
        "one row of the next request is not cleared (fp8)",
        "fa3/parts/fp8.py",
        "at = source + first * LINE + chunk * 16",
        "at = source + (first + 1) * LINE + chunk * 16",
        EIGHT,
    ),
    Fault(
        "warps do not wait for rows that another one clears",
        "fa3/parts/fp8.py",
        "        tma.named_sync(Int32(self.barrier), 32 * self.warps)\n",
        "",
        EIGHT,
    ),
    Fault(
        "a transposed tile is not fenced",
        "blocks/transform_warps.py",
        "        tma.fence_async()\n        ptx.sync_warp()\n        if lane == 0:",
        "        ptx.sync_warp()\n        if lane == 0:",
        EIGHT,
    ),
    Fault(
        "transform warps overwrite a tile that is being read",
        "fa3/fp8.py",
        "            rings.v.wait_empty(at)\n            transform.run(",
        "            transform.run(",
        EIGHT,
    ),
    Fault(
        "rows with a negative scale keep their sign",
        "fa3/fp8.py",
        "head(lanes.warpgroup * WARPGROUP_ROWS + row)) < Float32(0.0)",
        "head(lanes.warpgroup * WARPGROUP_ROWS + row)) < Float32(-1e30)",
        SIGNED,
    ),
    Fault(
        "negated rows are not fenced",
        "fa3/fp8.py",
        "            tma.fence_async()\n            ptx.sync_warp()\n        return scale",
        "            ptx.sync_warp()\n        return scale",
        SIGNED,
    ),
    Fault(
        "negative scales stay negative",
        "fa3/fp8.py",
        "scales.append(ptx.fmax(ptx.magnitude(scale), Float32(MIN_SCALE)))",
        "scales.append(scale)",
        SIGNED,
    ),
    Fault(
        "a scale of 0 is not replaced",
        "fa3/fp8.py",
        "scales.append(ptx.fmax(ptx.magnitude(scale), Float32(MIN_SCALE)))",
        "scales.append(ptx.magnitude(scale))",
        chosen("persistent_fp8", "fa3 and (single-20-200)"),
    ),
    Fault(
        "k's scale is that of the first head",
        "blocks/fp8_scales.py",
        "head_scale(p.scale_k, kv_head(p, work))",
        "head_scale(p.scale_k, Int32(0))",
        SIGNED,
    ),
    Fault(
        "q's scale is that of the first head",
        "blocks/fp8_scales.py",
        "* head_scale(p.scale_q, head)",
        "* head_scale(p.scale_q, Int32(0))",
        SIGNED,
    ),
    Fault(
        "partial outputs are not multiplied by their head's scale",
        "blocks/fp8_scales.py",
        "return factor * self.v_scale, lse",
        "return factor, lse",
        chosen("persistent_fp8", "fa3 and (test_cut_keys and signed)"),
    ),
    Fault(
        "neighbouring dimensions are swapped",
        "fa3/parts/fp8.py",
        "[values[i], values[i + 2], values[i + 1], values[i + 3]]",
        "[values[i], values[i + 1], values[i + 2], values[i + 3]]",
        EIGHT,
    ),
    Fault(
        "a gathered tile is released before it is read",
        "blocks/dequant_warps.py",
        "        transform.run(transform.k, staged",
        "        staged.release(at.staged, transform.lane)\n        transform.run(transform.k, staged",
        GATHERED,
    ),
)
