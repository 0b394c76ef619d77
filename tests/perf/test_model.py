"""The performance model: units, arithmetic of clocks, tables, choice of kernels, and its record of flash-attn-4."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_attn.emulator.program import program
from perf import model, report
from perf.flash_attn_4.choice import choose, variants
from perf.flash_attn_4.kernel import Kernel
from perf.sass import clocks, ours
from perf.sass.executed import tally
from perf.sass.tools import ToolError, find
from perf.sass.units import RATES, columns, unit, words
from perf.sass.work import ROLES, Roles, Tiling, Work, tile_step

RECORD = Path(__file__).parents[2] / "perf/results/2026-11-22_model_flash_attn_4.json"
ROWS = json.loads(RECORD.read_text())["model"]
ROLES_OF_16 = ROLES["flash-attn-4", 16]


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("MUFU.EX2", "MUFU"),
        ("FFMA2", "FMA2"),
        ("FADD2.FTZ.RM", "FMA2"),
        ("IMAD.WIDE.U32", "FMA"),
        ("FMNMX3.FTZ", "ALU"),
        ("F2FP.BF16.F32.PACK_AB", "ALU"),
        ("LDTM.x32", "TMEM"),
        ("STS.128", "smem"),
        ("SYNCS.ARRIVE.TRANS64.A1T0", "barrier"),
        ("UTCBAR.MULTICAST", "barrier"),
        ("UTCHMMA", "tensor"),
        ("HGMMA.64x128x16.F32.BF16", "tensor"),
        ("UIADD3", "uniform"),
        ("R2UR", "uniform"),
        ("UTMALDG.4D", "memory"),
        ("BRA.U", "branch"),
        ("FROBNICATE", "other"),
    ],
)
def test_units(opcode: str, expected: str) -> None:
    assert unit(opcode) == expected


def test_sizes_of_accesses() -> None:
    assert [columns(op) for op in ("LDTM.x32", "STTM.x16", "LDTM")] == [32, 16, 1]
    assert [words(op) for op in ("LDS", "LDS.U.64", "STS.128", "LDSM.16.MT88.4", "STS.U16")] == [1, 2, 4, 4, 1]


def test_rates() -> None:
    assert {n: RATES["sm_100a"].clocks(n) for n in ("MUFU", "FMA", "FMA2", "ALU")} == {
        "MUFU": 8,
        "FMA": 1,
        "FMA2": 2,
        "ALU": 2,
    }
    assert RATES["sm_103a"].clocks("MUFU") == 4


def _matches(found: Work, tensor: float, smem: float, arch: str) -> None:
    rates = RATES[arch]
    assert (found.tensor_flops / rates.tensor_flops, found.smem_bytes / rates.smem_bytes) == (tensor, smem)


def test_clocks_of_a_tile_step_that_no_instruction_tells() -> None:
    """The table of the kernel's design: clocks of tensor cores and of shared memory, for one CTA and for a pair."""
    one, pair = Tiling(256, 128), Tiling(512, 256)
    for dims, tensor, alone, paired in (
        ((64, 64), 512, 512, 320),
        ((128, 128), 1024, 1024, 640),
        ((192, 128), 1280, 1344, 864),
    ):
        _matches(tile_step(dims, 2, one), tensor, alone, "sm_100a")
        _matches(tile_step(dims, 2, pair), tensor, paired, "sm_100a")
    _matches(tile_step((256, 256), 2, Tiling(256, 256)), 2048, 1536, "sm_100a")
    _matches(tile_step((128, 128), 1, one), 512, 512, "sm_100a")
    _matches(tile_step((128, 128), 2, Tiling(128, 64)), 2048, 1792, "sm_90a")


def _times(warps: Sequence[int], count: float, ranks: int = 1) -> Any:
    """Executions by [CTA rank, warp] of 16."""
    times = np.zeros((ranks, 16))
    times[:, list(warps)] = count
    return times


SYNTHETIC = [
    ("MUFU.EX2", _times(range(8), 50.0)),  # two warps a quarter
    ("FADD2.RM", _times(range(8), 4.0)),
    ("FMNMX3", _times(range(8), 10.0)),
    ("LDTM.x32", _times(range(8), 2.0)),
    ("STS.64", _times(range(8, 12), 3.0)),
    ("FFMA", _times([9], 7.0)),  # on quarter 1 alone
    ("UTCHMMA", _times([12], 16.0)),
    ("UMOV", _times([12], 30.0) + _times([13], 5.0)),
]


def test_arithmetic_of_clocks() -> None:
    work = Work("tile step", 8192 * 100, 128 * 200)
    found = clocks.clocks(SYNTHETIC, ROLES_OF_16, work, RATES["sm_100a"])
    assert found == {
        "tensor": 100,
        "smem": 200 + 12 * 2,  # two words a lane take two clocks
        "MUFU": 2 * 50 * 8,
        "FMA": 7 + 2 * 4 * 2,
        "ALU": 2 * 10 * 2,
        "uniform": 0,
        "issue": 2 * (50 + 4 + 10 + 2) + 3 + 7,
        "fullest quarter": 2 * 66 + 3 + 16 + 30,  # quarter 0, with the MMA warp
        "TMEM": 16 * 32 * 128 / 512,
    }
    assert clocks.binds(found) == ["MUFU"]
    assert clocks.binds(found | {"tensor": 799.0}) == ["tensor", "MUFU"]
    assert clocks.polynomial_share(SYNTHETIC, ROLES_OF_16) == 28 / 128
    with_factor = [*SYNTHETIC, ("MUFU.EX2", _times([0, 1, 2, 3], 1.0))]
    assert clocks.polynomial_share(with_factor, ROLES_OF_16) == 28 / 128
    assert clocks.polynomial_share([("MUFU.EX2", _times(range(8), 64.5))], ROLES_OF_16) == 0
    slots = clocks.slots(SYNTHETIC, ROLES_OF_16)
    assert slots["softmax"] == {"all": 132, "MUFU": 100, "FMA2": 8, "ALU": 20, "TMEM": 4}
    assert slots["correction"] == {"all": 10, "smem": 3, "FMA": 7}
    assert slots["MMA"] == {"all": 46, "tensor": 16, "uniform": 30}


def test_fullest_quarter_is_that_of_the_leading_cta() -> None:
    both = [("UTCHMMA", np.array([_times([12], 16.0)[0], np.zeros(16)])), ("FADD", _times([0], 4.0, ranks=2))]
    found = clocks.clocks(both, ROLES_OF_16, Work("step", 8192, 128), RATES["sm_100a"])
    assert found["fullest quarter"] == 20
    assert clocks.slots(both, ROLES_OF_16)["MMA"]["all"] == 8  # averaged over the pair
    assert clocks.matrix_instructions(both) == 8


def test_roles() -> None:
    roles = Roles.parse("softmax*=0-7,correction*=8-11,MMA=12,load=13-15")
    assert roles == ROLES_OF_16
    assert roles.warps["softmax"] == tuple(range(8))
    assert roles.warps["MMA"] == (12,)
    last = roles.on_quarter(3)
    assert last.warps == {"softmax": (3, 7), "correction": (11,), "load": (15,)}
    found = clocks.clocks(SYNTHETIC, last, Work("step", 8192, 128), RATES["sm_100a"])
    assert found["issue"] == 2 * 66 + 3


def test_kernels_of_flash_attn_4() -> None:
    assert str(Kernel("sm_90a", 64, True, 2)) == "sm_90a:64:1:2:1:"
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for causal in (False, True):
            kernel = choose("sm_100a", dims, causal)
            assert Kernel.parse(str(kernel)) == kernel
            assert (kernel.head_dim, kernel.dim_vo) == dims
            assert kernel.rows == (512 if kernel.ctas == 2 and dims[1] < 256 else 256)
    one, two = choose("sm_100a", (64, 64), False), choose("sm_100a", (128, 128), False)
    assert (one.ctas, two.ctas, choose("sm_100a", (128, 128), True).ctas) == (1, 2, 1)
    found = variants("sm_100a", (128, 128))
    assert found["1 CTA, no polynomial"].exp2_frequency == 0
    assert all(Kernel.parse(str(kernel)) == kernel for kernel in found.values())
    assert len({kernel.file for kernel in found.values()}) == len(found)


def test_a_subject_of_ours_executes_the_flops_of_its_work() -> None:
    """Units of work and their products are arithmetic: what the kernel executes says the same."""
    subject = ours.subject("fa3", "sm_90a", (64, 64), causal=False)
    lines = []
    for tiles in (1, 3):
        with tally() as counts:
            assert subject.launch(tiles * subject.keys) < 0.02
        lines.append(counts.lines(subject.ptx, subject.symbol, subject.ctas, subject.warps))
    flops = 0.0
    for block in program(subject.ptx, subject.symbol).blocks:
        for inst, _, _ in block.insts:
            if shape := re.search(r"^wgmma\.mma_async.*\.m64n(\d+)k(\d+)", inst.op):
                times = lines[1][inst.line] - lines[0][inst.line]
                flops += 2 * 64 * int(shape[1]) * int(shape[2]) * times[0, list(subject.roles.warps["MMA"])].sum() / 4
    units = subject.units(3 * subject.keys) - subject.units(subject.keys)
    assert flops == units * subject.work.tensor_flops


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("PTXAS", raising=False)
    with pytest.raises(ToolError, match=r"pip install .*nvidia-cuda-nvcc.*PTXAS"):
        find()
    assert model.main(["--kernel", "fa3"]) == 2
    assert "nvidia-cuda-nvcc" in capsys.readouterr().err


def test_options() -> None:
    options = model.parse(["--head-dim", "192/128", "64", "--causal", "--kernel", "flash-attn-4"])
    assert (options.head_dim, options.masks) == ([(192, 128), (64, 64)], [True])
    assert list(model.peers(options)) == ["flash-attn-4 d192/128 causal", "flash-attn-4 d64 causal"]
    assert model.parse([]).kernel == ["auto", "flash-attn-4"]


# ---- the record


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_record_is_consistent(row: Mapping[str, Any]) -> None:
    """Exponentials and matrix instructions are as many in SASS as in PTX, and as the shapes ask for."""
    dims = re.search(r" d(\d+)(?:/(\d+))? ", row["name"])
    assert dims is not None
    d, dv = int(dims[1]), int(dims[2] or dims[1])
    checks, pair = row["checks"], d == 256 or (d > 64 and "full" in row["name"] and "1 CTA" not in row["name"])
    assert checks["ex2"][0] == checks["ex2"][1]
    assert checks["matrix"][0] == checks["matrix"][1] == row["matrix_instructions"] == (d / 16 + 128 / 16) / (1 + pair)
    assert checks["agreement"] > 0.98
    assert row["same_code_as_the_dsl"]
    hardware = 128 * (1 - row["polynomial_share"])  # and one or two for the correction's factor
    assert hardware < row["slots"]["softmax"]["MUFU"] <= hardware + 2
    assert row["clocks"]["tensor"] == 4 * (d + dv)
    per_quarter = sum(row["opcodes"]["softmax"].values())
    assert per_quarter == pytest.approx(row["slots"]["softmax"]["all"], rel=0.01)


def test_record_has_a_row_of_every_shape_and_mask() -> None:
    names = {row["name"] for row in ROWS}
    wanted = {f"flash-attn-4 {d} {mask}" for d in ("d64", "d128", "d192/128", "d256") for mask in ("full", "causal")}
    assert wanted <= names
    assert all("masked" in row for row in ROWS if row["name"].endswith("causal"))


def test_tables_of_a_record() -> None:
    first = {**ROWS[0], "name": "synthetic"}
    masked = {**first, "name": "with a mask", "masked": ROWS[0]}
    record = {**json.loads(RECORD.read_text()), "model": [first, masked], "failed_rows": {"another": "no such kernel"}}
    shown = report.markdown(record)
    total = sum(first["slots"][role]["all"] for role in ("softmax", "correction"))
    parts = f"{first['slots']['softmax']['all']:.1f}".removesuffix(".0")
    assert f"| synthetic | 12.50 % | {total:.1f} ({parts} + " in shown
    assert shown.count(f"{total:.1f} ({parts} + ") == 3
    assert "| MUFU | 57 % |" in shown
    assert "- another: no such kernel" in shown


def test_rates_of_a_record_are_those_of_the_model() -> None:
    record = json.loads(RECORD.read_text())
    for arch, rates in record["rates"].items():
        assert rates == dataclasses.asdict(RATES[arch])
