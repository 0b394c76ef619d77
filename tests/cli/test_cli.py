"""`python -m cute_attn`: its output, and the exit codes that scripts rely on."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cute_attn
from cute_attn.cli import demo, doctor, main, specs
from cute_attn.cli.terminal import ProgressBar, format_bytes, table
from cute_attn.errors import ArtifactError
from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.kernels.fa2.spec import Fa2Spec, Tile
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.kernels.programs import program
from cute_attn.runtime import artifacts, switches
from cute_attn.runtime.arch import ARCHS
from cute_attn.runtime.spec import KernelSpec, Program
from tests.support import subprocesses
from tests.support.commands import printed
from tests.support.toy_spec import BrokenSpec, ToySpec, toy_program

COMBINE = CombineSpec("bfloat16", 128)
MAIN = "from cute_attn.cli import main; raise SystemExit(main({argv!r}))"

Output = pytest.CaptureFixture[str]


@dataclasses.dataclass(frozen=True)
class MatrixToy(ToySpec):
    """Toy kernel that claims to multiply matrices."""

    needs_mma = True


# ---- doctor


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_doctor_succeeds_without_a_gpu(capsys: Output) -> None:
    out = printed(capsys, ["doctor"])
    assert f"torch {torch.__version__}".split()[1] in out
    assert "CPU tensors  the reference" in out
    assert "GPU tensors  no:" in out
    assert "!!" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_doctor_without_dsl_and_cuda_python(tmp_path: Path) -> None:
    env = {"CUTE_ATTN_CACHE_DIR": str(tmp_path)}
    out = subprocesses.run(MAIN.format(argv=["doctor"]), env=env, block=("cutlass", "cuda"))
    assert "--  CuTe DSL" in out
    assert "not installed" in out
    assert "--  cuda-python" in out
    assert "--  compiling" in out
    assert f"{tmp_path}: 0 kernels" in out


def test_doctor_needs_the_standard_library_only(tmp_path: Path) -> None:
    """Without site-packages: no numpy, filelock, cuda-python or DSL, nor what they bring; and with a broken torch."""
    (tmp_path / "torch.py").write_text('raise ImportError("no torch today")')
    code = f"import sys; sys.path[:0] = {[str(tmp_path), str(subprocesses.ROOT)]}; " + MAIN.format(argv=["doctor"])
    env = {"PATH": os.environ.get("PATH", ""), "CUTE_ATTN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 1
    for name in ("torch", "numpy", "filelock", "CPU tensors"):
        assert f"!!  {name}" in done.stdout
    assert "no torch today" in done.stdout
    assert "CuTe DSL" in done.stdout


def test_doctor_reports_a_cache_that_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    line = doctor.cache_line()
    assert line.state == "!!"
    assert f"other users may write to {tmp_path}" in line.text


def h100(version: int) -> doctor.Driver:
    return doctor.Driver(version, (("NVIDIA H100", (9, 0)),), None)


def test_doctor_finds_an_old_driver(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(doctor, "probe_driver", lambda: h100(12040))
    out = printed(capsys, ["doctor"], 1)
    assert "!!  CUDA driver" in out
    assert "CUDA 12.4: too old" in out
    assert "GPU 0                NVIDIA H100" in out or "NVIDIA H100, compute capability 9.0" in out
    assert "!!  GPU 0 tensors" in out


def test_doctor_accepts_a_working_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = h100(13000)
    installed = [doctor.Finding("ok", "torch", ""), doctor.driver_line(driver)]
    assert doctor.kernel_lines(driver, installed) == [doctor.Finding("ok", "GPU 0 tensors", "kernels for sm_90a")]
    old = doctor.Driver(13000, (("V100", (7, 0)),), None)
    assert doctor.kernel_lines(old, installed)[0].state == "--"
    assert "7.0 is not supported" in doctor.kernel_lines(old, installed)[0].text


def test_doctor_counts_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.artifact").write_bytes(b"x" * 2048)
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    assert doctor.cache_line() == doctor.Finding("ok", "cache", f"{tmp_path}: 1 kernels, 2.0 KB")
    assert doctor.Finding("ok", "CUTE_ATTN_CACHE_DIR", str(tmp_path)) in doctor.environment()


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_doctor_as_data(capsys: Output) -> None:
    document = json.loads(printed(capsys, ["doctor", "--json"]))
    assert document["broken"] is False
    assert {"state": "ok", "name": "cute_attn", "text": cute_attn.__version__} in document["installed"]
    assert {line["name"] for line in document["runs"]} == {"CPU tensors", "GPU tensors", "compiling"}


def test_doctor_reports_what_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """A bundle that is not there, and a misspelled variable."""
    assert main(["bundle", str(tmp_path / "good"), "--arch", "sm_90a", "--spec", COMBINE.key()]) == 0
    monkeypatch.setenv("CUTE_ATTN_BUNDLE", f"{tmp_path / 'good'}:{tmp_path / 'nowhere'}")
    monkeypatch.setenv("CUTE_ATTN_DISABLEJIT", "1")
    capsys.readouterr()
    out = printed(capsys, ["doctor"], 1)
    assert f"{tmp_path / 'good'}: 1 kernels for sm_90a" in out
    assert re.search(rf"!!  bundle +CUTE_ATTN_BUNDLE names {tmp_path}/nowhere, which is not a readable bundle", out)
    assert re.search(r"!!  CUTE_ATTN_DISABLEJIT .*did you mean CUTE_ATTN_DISABLE_JIT", out)


def test_doctor_lists_the_variables(capsys: Output) -> None:
    assert printed(capsys, ["doctor", "--variables"]) == switches.markdown()


# ---- flags


def test_a_misspelled_flag_is_an_error_of_two_lines(capsys: Output) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["explain", "--kv-leng", "7", "--causal"])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "error: unknown arguments: --kv-leng 7 (did you mean --kv-len?)",
        "`python -m cute_attn explain --help` lists what there is.",
    ]


# ---- kernels


def test_kernels_prints_resources_and_passes_the_gates(capsys: Output) -> None:
    assert main(["kernels", "--arch", "sm_80,sm_90a", "--spec", COMBINE.key(), "--check"]) == 0
    captured = capsys.readouterr()
    artifact = artifacts.get(COMBINE, "sm_90a", program)
    line = next(line for line in captured.out.splitlines() if line.startswith("sm_90a")).split()
    assert line[1:4] == ["combine", ">bf16", "vo128"]
    assert line[4:6] == [str(artifact.registers), "0"]
    assert line[-1] == "ok"
    assert "2 of 2 kernels pass every gate" in captured.out
    assert captured.err == ""  # no progress bar where stderr is no terminal


def test_kernels_json(capsys: Output) -> None:
    document = json.loads(printed(capsys, ["kernels", "--arch", "sm_100a", "--spec", COMBINE.key(), "--json"]))
    (kernel,) = document["kernels"]
    artifact = artifacts.get(COMBINE, "sm_100a", program)
    assert kernel["arch"] == "sm_100a"
    assert kernel["spec"] == COMBINE.asdict()
    assert kernel["registers"] == artifact.registers > 0
    assert kernel["smem_bytes"] == artifact.smem_bytes
    assert kernel["stack_bytes"] == 0
    assert kernel["failures"] == []
    assert document["failed"] == 0


def program_or_toy(spec: KernelSpec, arch: str) -> Program:
    return program(spec, arch) if spec == COMBINE else toy_program(spec, arch)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (ToySpec(stack=True), "stack bytes: registers spill"),
        (MatrixToy(), "no matrix instruction"),
        (BrokenSpec(fault="trace"), "does not compile"),
    ],
    ids=["stack", "mma", "compile"],
)
def test_a_failed_gate_is_exit_code_1(
    spec: KernelSpec, why: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(specs, "selected", lambda options: {"sm_90a": [spec, COMBINE]})
    monkeypatch.setattr(specs, "program", program_or_toy)
    out = printed(capsys, ["kernels", "--check"], 1)
    assert why in out
    assert "1 of 2 kernels pass every gate" in out
    unchecked = main(["kernels", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert [bool(kernel["failures"]) for kernel in document["kernels"]] == [True, False]
    assert unchecked == (1 if why == "does not compile" else 0)


def test_shared_memory_gate_knows_the_architecture() -> None:
    large = dataclasses.replace(artifacts.get(COMBINE, "sm_90a", program), smem_bytes=150_000)
    assert specs.failures("sm_90a", COMBINE, large) == []
    assert specs.failures("sm_120a", COMBINE, large) == [
        f"150000 bytes of shared memory, but sm_120a has {ARCHS['sm_120a'].smem_limit}"
    ]
    assert specs.failures("sm_90a", COMBINE, ArtifactError("why")) == ["does not compile: why"]


@pytest.mark.parametrize("argv", [["--arch", "sm_70"], ["--spec", "{}"], ["--spec", "nonsense"]])
def test_bad_arguments_are_exit_code_2(argv: list[str], capsys: Output) -> None:
    assert printed(capsys, ["kernels", *argv], 2).startswith("error: ")


# ---- bundle


def test_bundle_runs_where_nothing_can_be_compiled(tmp_path: Path, capsys: Output) -> None:
    bundle = tmp_path / "bundle"
    assert main(["bundle", str(bundle), "--arch", "sm_90a,sm_100a", "--spec", COMBINE.key()]) == 0
    assert "2 kernels for sm_90a, sm_100a" in capsys.readouterr().out
    env = {
        "CUTE_ATTN_BUNDLE": str(bundle),
        "CUTE_ATTN_CACHE_DIR": str(tmp_path / "empty"),
        "CUTE_ATTN_DISABLE_JIT": "1",
    }
    arguments = ["kernels", "--check", "--arch", "sm_90a,sm_100a", "--spec", COMBINE.key()]
    out = subprocesses.run(MAIN.format(argv=arguments), env=env, block=("cutlass",))
    assert "2 of 2 kernels pass every gate" in out
    other = CombineSpec("float16", 64).key()
    process = subprocesses.start(MAIN.format(argv=["kernels", "--spec", other]), env=env, block=("cutlass",))
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "CUTE_ATTN_DISABLE_JIT is set" in out


# ---- explain


SPLIT = "--kv-len 131072 --num-kv-heads 16"  # a long decode
LONG = "--qo-len 4096 --kv-len 4096 --causal --specs"
MANY = "--batch 64 --page-size 16 --arch sm_90a"
DRAFTS = "--batch 8 --page-size 16 --qo-len 3 --num-kv-heads 32 --causal"
EXPLAINED: dict[str, tuple[int, list[str]]] = {  # exit code, and patterns of the output; behind "not": of none
    f"{SPLIT} --arch sm_80": (
        0,
        [
            "fa2: chosen: the first of fa4, fa3, xqa, fa2 that takes it and is not passed over",
            *("on 108 multiprocessors of sm_80", "  fa2 bf16 >fp32 qk128 vo128 split", "not Instead", "not {"),
        ],
    ),
    f"{SPLIT} --arch sm_80 --specs": (0, [r'(?s)"kernel":"fa2".*"split":true.*"kernel":"combine"']),
    **{
        f"{LONG} --arch {arch}": (0, [f'"kernel":"{kernel}".*"split":false', 'not "combine"'])
        for arch, kernel in (("sm_90a", "fa3"), ("sm_100a", "fa4"), ("sm_103a", "fa4"), ("sm_120a", "fa2"))
    },
    f"{MANY} --kv-len 4096": (0, ["xqa: chosen"]),
    f"{MANY} --kv-len 1024": (0, ["xqa: chosen", "whole, grid 8 x 1 x 64"]),
    f"{MANY} --kv-len 1024 --head-dim 256": (
        0,
        [
            *("fa2: chosen", "xqa: able, passed over: head dimension 256, but for few segments", "not combine"),
            *("fa3: able, passed over: 4 query rows per kv head are fewer than 65", "no query tile is cut"),
            *("64 work items x 8", "grid 512 x 1 x 1"),
        ],
    ),
    "--batch 2 --head-dim 68 --arch sm_90a": (1, ["other head dimensions"]),
    "--qo-lens 3,4 --kv-len 9 --arch cpu": (0, ["reference: chosen"]),
    **{  # the kernel for few rows
        f"{more} --kv-dtype nvfp4 --arch h100": (
            0,
            ["k and v NVFP4, out bfloat16", "xqa: chosen", "  xqa bf16 nvfp4 .* paired"],
        )
        for more in ("", DRAFTS)
    },
    f"{DRAFTS} --kv-dtype nvfp4 --head-dim 100 --arch h100": (2, []),
    "--head-dim 600 --arch sm_90a": (1, ["fa2: refused", "no tiles for them. Instead: pad q, k and v"]),
    "--head-dim 600 --arch cpu": (0, ["reference: chosen"]),
}


@pytest.mark.parametrize("options", EXPLAINED)
def test_explain(options: str, capsys: Output) -> None:
    code, patterns = EXPLAINED[options]
    out = printed(capsys, ["explain", *options.split()], code)
    for pattern in patterns:
        assert bool(re.search(pattern.removeprefix("not "), out)) != pattern.startswith("not "), pattern
    for spec in (json.loads(line) for line in out.splitlines() if line.strip().startswith("{")):
        assert spec["kernel"] == "combine" or specs.from_dict(spec).asdict() == spec | {"scores": ()}


def test_explain_of_a_batch(capsys: Output) -> None:
    argv = "explain --qo-lens 1,5,512 --kv-lens 100,2000,512 --page-size 16 --arch sm_90a --sms 132 --causal"
    out = printed(capsys, argv.split())
    assert "fa3: chosen" in out
    assert "3 requests, 518 query tokens, 2612 keys in pages of 16 on 132 multiprocessors of sm_90a" in out
    assert "  tile: 128 packed rows (4 heads of each token) x" in out
    tiles, waves = 1 + 1 + 16, 2 * -(-132 // 8)  # 512 tokens of 4 heads are 16 tiles of 128 rows
    workspace = round((tiles + waves) * 8 * 128 * (128 + 1) * 4 / 2**20, 1)
    assert f"at most {tiles + waves} work items x 8, {workspace} MiB of workspace" in out
    assert "the planner kernel may cut 17 query tiles" in out


def test_explain_as_data(capsys: Output) -> None:
    document = json.loads(printed(capsys, ["explain", *SPLIT.split(), "--arch", "a100", "--json"]))
    assert document["chosen"] == "fa2"
    assert [launch["spec"]["kernel"] for launch in document["launches"]] == ["fa2", "combine"]
    (refused,) = (each["refusals"] for each in document["backends"] if each["backend"] == "fa4")
    assert refused[0]["feature"] == "sm_80"
    argv = ["explain", "--batch", "4", "--page-size", "16", "--head-dim", "100", "--arch", "a100", "--json"]
    assert json.loads(printed(capsys, argv, 1))["launches"] == []


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--num-kv-heads", "5"], "num_kv_heads"),
        (["--kv-layout", "NDH"], "kv_layout"),
        (["--pos-encoding-mode", "ROPE"], "pos_encoding_mode"),
        (["--kv-len", "-1"], "--kv-len"),
        (["--kv-len", "99999999999999"], "kv_len must be at most 1073741824"),
        (["--qo-len", "9" * 20], "qo_len must be at most 9223372036854775807"),
        (["--sms", "0"], "--sms"),
        (["--arch", "sm_70"], "sm_70"),
        (["--batch", "0"], "--batch"),
        (["--batch", "3", "--qo-lens", "1,2"], "--qo-lens"),
        (["--qo-lens", "1,2", "--kv-lens", "9"], "--kv-lens"),
        (["--kv-lens", "1,x"], "--kv-lens"),
        (["--kv-lens", "5,-1"], "--kv-lens"),
        (["--kv-lens", "5,-1", "--page-size", "4"], "--kv-lens"),
        (["--kv-lens", f"5,{1 << 70}"], "--kv-lens"),
        (["--batch", "2", "--page-size", "0"], "page_size"),
        (["--batch", "3", "--qo-len", f"{1 << 30}"], "the sum of --qo-lens must stay within 0..2147483647"),
        (["--batch", "3", "--kv-len", f"{1 << 30}", "--page-size", "1"], "pages of --kv-lens must stay within"),
    ],
)
def test_explain_checks_its_arguments(argv: list[str], named: str, capsys: Output) -> None:
    assert named in printed(capsys, ["explain", *argv], 2)


# ---- demo


def test_demo_runs_and_compiles_without_a_gpu() -> None:
    done = subprocesses.python("-m", "cute_attn", "demo", "--cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") >= 4
    assert "decode" in done.stdout
    for arch in demo.COMPILED_ARCHS:
        assert f"{arch}  " in done.stdout
    assert "sm_90a   xqa" in done.stdout  # what `explain` says of this decode step
    assert "WRONG" not in done.stdout


def test_demo_notices_wrong_results() -> None:
    conversation = demo.Conversation(demo.SMALL, torch.device("cpu"))
    errors = conversation.errors(demo.by_sdpa)
    assert all(error < demo.TOLERANCE for error in errors.values())
    skewed = conversation.errors(lambda q, k, v: demo.by_sdpa(q, k, v) * (1.1 if len(q) == 1 else 1.0))
    assert skewed["prefill"] < demo.TOLERANCE < skewed["decode"]
    poisoned = conversation.errors(lambda q, k, v: demo.by_sdpa(q, k, v) * float("nan"))
    assert not any(error <= demo.TOLERANCE for error in poisoned.values())


# ---- terminal output


def test_labels_leave_defaults_out() -> None:
    plain = Fa2Spec("bfloat16", "bfloat16", 128, 128, tile=Tile(128, 64, 4, 1, 2))
    assert specs.label(plain) == "fa2 bf16 >bf16 qk128 vo128 128x64/4x1/2"
    more = {"pos_encoding": "rope", "split": True, "tile": Tile(16, 64, 1, 4, 2)}
    rich = Fa2Spec("float16", "float32", 192, 128, "packed", ("scale", "soft_cap"), **more)
    assert specs.label(rich) == "fa2 fp16 >fp32 qk192 vo128 packed scale+soft_cap split rope 16x64/1x4/2"
    hopper = Fa3Spec("bfloat16", "bfloat16", 256, 256, "band", kv="paged", tile=HopperTile(128, 64, 2, 1))
    assert specs.label(hopper) == "fa3 bf16 >bf16 qk256 vo256 band paged 128x64/2+1"
    half = Fa3Spec("bfloat16", "bfloat16", 256, 256, tile=HopperTile(128, 64, 2, 1, q_registers=128))
    assert specs.label(half) == "fa3 bf16 >bf16 qk256 vo256 128x64/2+1/q128"
    blackwell = Fa4Spec("bfloat16", "bfloat16", 192, 128, schedule="items", tile=BlackwellTile(v_stages=1))
    assert specs.label(blackwell) == "fa4 bf16 >bf16 qk192 vo128 items 256x128/2+1"


def test_tables_are_aligned() -> None:
    assert table(("a", "bb"), [("long", 1), ("x", 22)]) == "a     bb\n----  --\nlong   1\nx     22"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (3 << 20, "3.0 MB"), (5 << 30, "5.0 GB")]
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_progress_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar(4) as bar:
        bar.step("sm_90a fa2")
        bar.step("two more", 2)
    err = capsys.readouterr().err
    assert "1/4" in err
    assert "3/4" in err
    assert "sm_90a fa2" in err
    assert err.endswith("\r\x1b[K")  # and leaves no trace


def test_without_torch_the_api_says_why() -> None:
    code = (
        "import cute_attn\n"
        "try:\n    cute_attn.single_decode_with_kv_cache\n"
        "except ImportError as error:\n    print(error)"
    )
    (said,) = subprocesses.run(code, block=("torch",)).splitlines()
    assert said.startswith("cute_attn.single_decode_with_kv_cache is not available")
    assert "torch" in said


def test_unknown_names_are_no_attributes() -> None:
    assert not hasattr(cute_attn, "nonsense")
    assert set(cute_attn.__all__) <= set(dir(cute_attn))


ONE_CALL = "import torch, cute_attn; q = torch.ones(3, 2, 64).half(); cute_attn.single_prefill_with_kv_cache(q, q, q)"
NOT_LOADED = {  # modules, by what is run
    ONE_CALL: ("cute_attn.observe", "cute_attn.ops.register", "torch._dynamo"),  # where nobody asks for them
    "import perf.coldstart": ("torch", "numpy", "cute_attn"),  # before its clock starts
    "import cute_attn.kernels.fa2.host.family": ("cutlass",),
    # Engines load the plug-in of every installed package.
    "import cute_attn.integrations.vllm, cute_attn.integrations.sglang": ("torch", "cute_attn.dispatch"),
}


@pytest.mark.parametrize("code", NOT_LOADED)
def test_what_is_not_loaded(code: str) -> None:
    env = {"CUTE_ATTN_DUMP": "", "CUTE_ATTN_NVTX": ""}
    loaded = subprocesses.run(f"{code}\nimport sys; print(*sys.modules)", env=env).split()
    assert not [name for name in loaded if f"{name}.".startswith(tuple(f"{x}." for x in NOT_LOADED[code]))]
