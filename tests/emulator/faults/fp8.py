"""Faults in what fp8 adds to the Hopper kernel: transposed V, scales, signs, tails."""

from __future__ import annotations

from tests.emulator.faults.fault import chosen

SIGNED = chosen("persistent_fp8", "fa3 and (signed and (70x5 or 130))")
EIGHT = chosen("persistent_fp8", "fa3 and (ragged-70x0)")
GATHERED = chosen("persistent_fp8_kv", "fa3 and (long_batches and 96x96 and eager)")
FP8_FAULTS = {
    EIGHT: {
        "fa3/parts/fp8.py": {
            "odd dimensions are taken for even ones": ("ptx.permute(c, d, 0x6420)", "ptx.permute(c, d, 0x7531)"),
            "keys of V are swapped": ("ptx.permute(a, b, 0x6420)", "ptx.permute(b, a, 0x6420)"),
            "one row of the next request is not cleared (fp8)": (
                "at = source + first * LINE + chunk * 16",
                "at = source + (first + 1) * LINE + chunk * 16",
            ),
            "warps do not wait for rows that another one clears": (
                "        tma.named_sync(Int32(self.barrier), 32 * self.warps)\n",
                "",
            ),
            "neighbouring dimensions are swapped": (
                "[values[i], values[i + 2], values[i + 1], values[i + 3]]",
                "[values[i], values[i + 1], values[i + 2], values[i + 3]]",
            ),
        },
        "blocks/transform_warps.py": {
            "a transposed tile is not fenced": (
                "        tma.fence_async()\n        ptx.sync_warp()\n        if lane == 0:",
                "        ptx.sync_warp()\n        if lane == 0:",
            ),
        },
        "fa3/fp8.py": {
            "transform warps overwrite a tile that is being read": (
                "            rings.v.wait_empty(at)\n            transform.run(",
                "            transform.run(",
            ),
        },
    },
    SIGNED: {
        "fa3/fp8.py": {
            "rows with a negative scale keep their sign": (
                "head(lanes.warpgroup * WARPGROUP_ROWS + row)) < Float32(0.0)",
                "head(lanes.warpgroup * WARPGROUP_ROWS + row)) < Float32(-1e30)",
            ),
            "negated rows are not fenced": (
                "            tma.fence_async()\n            ptx.sync_warp()\n        return scale",
                "            ptx.sync_warp()\n        return scale",
            ),
            "negative scales stay negative": (
                "scales.append(ptx.fmax(ptx.magnitude(scale), Float32(MIN_SCALE)))",
                "scales.append(scale)",
            ),
        },
        "blocks/fp8_scales.py": {
            "k's scale is that of the first head": (
                "head_scale(p.scale_k, kv_head(p, work))",
                "head_scale(p.scale_k, Int32(0))",
            ),
            "q's scale is that of the first head": (
                "* head_scale(p.scale_q, head)",
                "* head_scale(p.scale_q, Int32(0))",
            ),
        },
    },
    chosen("persistent_fp8", "fa3 and (single-20-200)"): {
        "fa3/fp8.py": {
            "a scale of 0 is not replaced": (
                "scales.append(ptx.fmax(ptx.magnitude(scale), Float32(MIN_SCALE)))",
                "scales.append(ptx.magnitude(scale))",
            ),
        },
    },
    chosen("persistent_fp8", "fa3 and (test_cut_keys and signed)"): {
        "blocks/fp8_scales.py": {
            "partial outputs are not multiplied by their head's scale": (
                "return factor * self.v_scale, lse",
                "return factor, lse",
            ),
        },
    },
    GATHERED: {
        "blocks/dequant_warps.py": {
            "a gathered tile is released before it is read": (
                "        transform.run(transform.k, staged",
                "        staged.release(at.staged, transform.lane)\n        transform.run(transform.k, staged",
            ),
        },
    },
}
