"""The performance model of decode kernels: arithmetic, GPUs, measured launches, tables, and its record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_attn.emulator.program import program
from perf import decode_model, report
from perf.sass import decode_clocks, measured
from perf.sass.decode import KV_BITS, Decode, Executions, kernel, subject, work
from perf.sass.gpus import GPUS, Gpu, of_arch
from perf.sass.tools import ToolError, Tools, find
from perf.sass.units import RATES, flops, unit
from perf.sass.work import Roles, Work

RESULTS = Path(__file__).parents[2] / "perf/results"
RECORD = RESULTS / "2026-11-22_model_decode.json"
ROWS = json.loads(RECORD.read_text())["decode_model"]
H200 = of_arch("sm_90a")[0]
NVFP4 = Decode("xqa", "sm_90a", "nvfp4", 128, 4, True)


def _all(*counts: float) -> Any:
    """Executions by [CTA rank, warp]."""
    return np.array([counts])


SYNTHETIC = [
    ("HMMA.16816.F32", _all(0.5, 0.5, 0.5, 0.5)),
    ("LDGSTS.E.BYPASS.LTC128B.128", _all(0.25, 0.25, 0.25, 0.25)),
    ("LDSM.16.M88.4", _all(0.5, 0.5, 0.5, 0.5)),
    ("LOP3.LUT", _all(1.0, 3.0, 1.0, 1.0)),
    ("MUFU.EX2", _all(0.0, 0.125, 0.0, 0.0)),
    ("HMUL2", _all(2.0, 0.0, 0.0, 0.0)),
]


def test_operations_of_matrix_instructions() -> None:
    found = {op: flops(op) for op in ("HMMA.16816.F32.BF16", "HMMA.1688.F32", "QMMA.16832.F32.E4M3.E4M3", "UTCHMMA")}
    assert found == {
        "HMMA.16816.F32.BF16": 4096,
        "HMMA.1688.F32": 2048,
        "QMMA.16832.F32.E4M3.E4M3": 4096,  # of 8-bit operands, at twice the rate
        "UTCHMMA": 0,
    }
    assert [unit(op) for op in ("MOVM.16.MT88", "IADD", "LDGSTS.E.64")] == ["memory", "ALU", "memory"]


def test_bytes_and_clocks_of_memory() -> None:
    """The table of the kernel's design: a token and kv head at head dim 128 on a B200."""
    of_dtype = {dtype: dataclasses.replace(NVFP4, kv_dtype=dtype).token_bytes for dtype in ("bf16", "e4m3", "nvfp4")}
    assert of_dtype == {"bf16": 512, "e4m3": 256, "nvfp4": 144}
    b200 = of_arch("sm_100a")[0]
    assert [round(b200.memory_clocks(n), 1) for n in of_dtype.values()] == [17.5, 8.8, 4.9]
    assert round(H200.bytes_per_clock, 1) == 20.7
    assert {gpu.arch for gpu in GPUS} <= set(RATES)


def test_summary_of_a_token() -> None:
    roles = Roles.parse("softmax*=0-2,load=3")
    found = decode_clocks.summary(SYNTHETIC, roles, Work("token", 100, 256), "sm_100a", 4)
    assert found["slots"] == 2 + 1 + 2 + 6 + 0.125 + 2
    assert found["units"] == {"tensor": 2, "memory": 1, "smem": 2, "ALU": 6, "MUFU": 0.125, "FMA": 2}
    assert found["clocks"] == {
        "issue": 0.5 + 0.25 + 0.5 + 3 + 0.125,  # warp 1's quarter
        "MUFU": 1,
        "ALU": 6,
        "FMA": 2,
        "smem": 256 / 128 + 1 * 512 / 128 + 2 * 512 / 128,  # TMA's copies, those of LDGSTS, reads
        "TMEM": 0,
        "uniform": 0,
    }
    assert found["flops"] == {"mma.sync": 2 * 4096, "tcgen05": 100}
    assert found["roles"] == {"softmax": 4.375, "load": 2.25}


def test_small_ctas_share_the_quarters_of_an_sm() -> None:
    roles, work = Roles.parse("all*=0-1"), Work("token", 100, 256)
    halves = [(op, times[:, :2]) for op, times in SYNTHETIC]
    one, two, four = (decode_clocks.summary(halves, roles, work, "sm_100a", 2, ctas)["clocks"] for ctas in (1, 2, 4))
    assert two == four == {name: n / (1 if name in ("smem", "TMEM") else 2) for name, n in one.items()}


def _row(kv_dtype: str, issue: float, alu: float, num_bytes: float = 1000) -> dict[str, Any]:
    clocks = {"issue": issue, "ALU": alu, "MUFU": 0.5, "FMA": 1.0, "smem": 2.0}
    of_tensor = {"mma.sync": 4000.0, "tcgen05": 0.0}
    fixed = {"segment": 800.0, "launch": 100.0}
    return {"kv_dtype": kv_dtype, "arch": "sm_90a", "bytes": num_bytes, "clocks": clocks, "flops": of_tensor} | {
        "name": f"a {kv_dtype} kernel",
        "fixed": fixed,
        "spec": {"ctas": 2},
    }


@pytest.mark.parametrize(
    ("kv_dtype", "issue", "alu", "largest", "holds"),
    [
        ("bf16", 70, 10, "issue", True),
        ("bf16", 71, 10, "issue", False),
        ("e5m2", 10, 71, "ALU", False),
        ("nvfp4", 75, 10, "issue", True),
        ("nvfp4", 76, 10, "issue", False),
        ("nvfp4", 75, 90, "ALU", True),  # NVFP4's limit is of issue slots
        ("bf16", 1, 1, "tensor", True),
    ],
)
def test_limits(kv_dtype: str, issue: float, alu: float, largest: str, holds: bool) -> None:
    gpu = Gpu("one SM", "sm_90a", 1, 1.0, 10.0, 400, "")
    found = decode_clocks.on_gpu(_row(kv_dtype, issue, alu), gpu, gpu.bandwidth)
    share = max(issue, alu, 10) / 100
    expected = {"memory": 100, "tensor": 10, "largest": largest, "share": share, "issue_share": issue / 100}
    assert found == {**expected, "holds": holds}
    assert decode_clocks.on_gpu(_row(kv_dtype, issue, alu), gpu, 5.0)["memory"] == 200


def test_fixed_slots() -> None:
    """Three CTAs, whose launch takes 50 slots, segments 700 and tokens of one 2000."""
    assert decode_model.fixed(3 * 2750, 3 * 5450, 2000, 3) == {"segment": 700, "launch": 50}


def test_work_of_kernels_that_copy_by_tma_and_multiply_in_tensor_memory() -> None:
    case = dataclasses.replace(NVFP4, kv_dtype="bf16", rows=20)
    assert (work(case, "mma.sync").tensor_flops, work(case, "mma.sync").smem_bytes) == (0, 0)
    assert work(case, "cp.async.bulk.tensor.2d").smem_bytes == 512
    both = work(case, "cp.async.bulk.tensor.2d\ntcgen05.mma.cta_group::1.kind::f16")
    assert (both.tensor_flops, both.smem_bytes) == (2 * 2 * 128 * 32, 1024)


# ---- measured launches


def test_measured_launches_of_a_record() -> None:
    found = measured.measured(RESULTS / "2026-11-21_h200_xqa_nvfp4.json", H200)
    assert len(found) == 6
    assert measured.cases(found) == [
        dataclasses.replace(NVFP4, rows=rows, many=many)
        for rows, many in ((4, False), (4, True), (8, False), (8, True))
    ]
    assert found[2].tokens == 64 * 8192 * 8
    with pytest.raises(ValueError, match=r"wanted B200"):
        measured.measured(RESULTS / "2026-11-21_h200_xqa_nvfp4.json", of_arch("sm_100a")[0])


def test_a_measured_launch_beside_the_model() -> None:
    gpu = Gpu("one SM", "sm_90a", 2, 2.0, 100.0, 400, "")
    launch = measured.Measured("launch", NVFP4, 10, 1000, 2.0, 1000, 0.5, 50.0, "file")
    found = measured.beside(launch, _row("nvfp4", 2.0, 3.0, num_bytes=62.5), gpu)
    assert found["clocks"] == 4  # 2000 clocks of 2 SMs, 1000 tokens
    assert found["shares"] == {"issue": 0.5, "tensor": 2.5, "MUFU": 0.125, "ALU": 0.75, "FMA": 0.25, "smem": 0.5}
    assert found["fixed"] == (10 * 800 + 4 * 100) / 4 / 4000  # 10 requests and heads, 2 SMs of 2 CTAs
    few = measured.beside(launch._replace(pairs=3), _row("nvfp4", 2.0, 3.0), gpu)
    assert few["fixed"] == (4 * 800 + 4 * 100) / 4 / 4000  # each CTA computes a part
    assert (found["bound"], found["largest"]) == (0.25, "tensor")  # memory: 62.5 bytes at 25 a clock


# ---- kernels


def test_a_token_executes_the_products_of_its_shapes() -> None:
    """On the emulator alone: K Q^T and V^T P^T of 16 tokens are d / 16 instructions each for 8 rows."""
    executions = Executions()
    case = Decode("xqa", "sm_100a", "bfloat16", 64, 8, True)
    launched = kernel(case)
    one = subject(case, launched)
    execute = executions.of(case, 1)
    short, long = (execute(one, length) for length in (512, 1024))
    executed = sum(
        float((long[inst.line] - short[inst.line]).sum())
        for block in program(one.ptx, one.symbol).blocks
        for inst, _, _ in block.insts
        if inst.op.startswith("mma.sync")
    )
    tokens = one.units(1024) - one.units(512)
    assert launched.ctas > 1
    assert tokens == 512 * launched.ctas
    assert executed / tokens == 2 * 64 / 16 / 16
    other = dataclasses.replace(one, arch="sm_103a", ptx=one.ptx.replace(".target sm_100a", ".target sm_103a"))
    assert other.ptx != one.ptx
    assert execute(other, 512) is short  # not run again


def _tools() -> Tools:
    try:
        return find()
    except ToolError as error:
        pytest.skip(str(error))


def test_a_row_from_ptx_to_sass() -> None:
    found = decode_model.row(Decode("xqa", "sm_100a", "e5m2", 64, 8, False), _tools(), Executions())
    _is_consistent(found)
    assert found["units"]["tensor"] == 0.5
    assert set(found["on"]) == {"B200"}


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("PTXAS", raising=False)
    assert decode_model.main([]) == 2
    assert "nvidia-cuda-nvcc" in capsys.readouterr().err


def test_options() -> None:
    options = decode_model.parse(["--arch", "sm_120a", "--kv-dtype", "nvfp4", "--rows", "8", "16", "--few"])
    assert [case.name for case in decode_model.cases(options, [])] == [
        f"xqa sm_120a nvfp4 d{d} {rows} rows few" for d in (64, 128, 256) for rows in (8, 16)
    ]
    launch = measured.Measured("launch", NVFP4, 10, 1000, 2.0, 1000, 0.5, 50.0, "file")
    assert decode_model.cases(options, [launch, launch])[-1] == NVFP4
    assert len(decode_model.cases(decode_model.parse([]), [])) == 5 * 3 * 2 * (3 * 3 + 4)  # 4 rows are of NVFP4 alone


# ---- the record


def _is_consistent(row: Mapping[str, Any]) -> None:
    """Exponentials and matrix instructions are as many in SASS as in PTX, and as the shapes ask for."""
    checks, dim, rows = row["checks"], row["head_dim"], row["rows"]
    if row["spec"]["kernel"] == "xqa_umma":  # of 128 tokens: 32 bytes of K, and 16 or 32 tokens of up to 128 dims of V
        item_bytes = KV_BITS[row["kv_dtype"]] // 8
        products = item_bytes * (dim / 32 + 4 * -(-dim // 128)) / 128
        # 8-bit operands: five per row of 16 bits, two of q and three of P, that count as half.
        flops = {"mma.sync": 0, "tcgen05": {2: 4, 1: 5}[item_bytes] * dim * rows}
    else:
        products = -(-rows // 8) * dim / 128
        flops = {"mma.sync": 4096 * products, "tcgen05": 0}
        assert "other" not in row["units"]
    assert checks["ex2"][0] == checks["ex2"][1]
    assert checks["matrix"] == pytest.approx([products, products], abs=6e-4)  # of three decimals
    assert row["flops"] == flops
    assert checks["agreement"] > 0.95
    assert row["same_code_as_the_dsl"]
    assert sum(row["units"].values()) == pytest.approx(row["slots"], rel=1e-3)
    assert row["clocks"]["issue"] >= row["slots"] / 4 - 1e-3
    assert row["fixed"]["segment"] > 0
    assert row["on"] == decode_clocks.on_gpus(row)


def test_rows_of_the_record_are_consistent() -> None:
    for row in ROWS:
        _is_consistent(row)


def test_record_has_every_kernel_and_the_tables_of_the_model() -> None:
    record = json.loads(RECORD.read_text())
    assert not record["failed_rows"]
    options = decode_model.parse(record["command"].split()[3:])
    assert {"sm_90a", "sm_100a", "sm_120a"} <= set(options.arch)
    assert {*options.kv_dtype, *options.head_dim, *options.rows} == {*KV_BITS, 64, 128, 256, 4, 8, 16, 32}
    launches = [m for path in decode_model.MEASURED for m in measured.measured(path, H200)]
    assert [row["name"] for row in ROWS] == [case.name for case in decode_model.cases(options, launches)]
    assert len(record["measured"]) == len(launches)
    assert record["rates"] == {arch: dataclasses.asdict(RATES[arch]) for arch in record["rates"]}
    assert record["gpus"] == [dataclasses.asdict(gpu) for gpu in GPUS if gpu.arch in options.arch]


def test_tables_of_a_record() -> None:
    record = json.loads(RECORD.read_text())
    row = {**ROWS[0], "name": "synthetic"}
    gpu, on = next(iter(row["on"].items()))
    shown = report.markdown({**record, "decode_model": [row], "failed_rows": {"another": "no such kernel"}})
    assert f"| {gpu}: clocks | bytes | memory |" in shown
    assert f"| synthetic | {row['bytes']:g} | {on['memory']:.2f} | {on['tensor']:.2f} |" in shown
    assert f"| {record['measured'][0]['name']} |" in shown
    assert "- another: no such kernel" in shown
