"""Dumps, replay, NVTX ranges: what they record of calls, and that nothing is there where nobody asked for it."""

from __future__ import annotations

import ast
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn import errors, exports
from cute_attn.cli import main, replay
from cute_attn.errors import ArgumentError
from cute_attn.observe.dump import Dumper, from_environment
from cute_attn.observe.hooks import Call, public_names
from cute_attn.observe.snapshot import ALIGNMENT, Reader, Snapshot
from tests.support import subprocesses
from tests.support.commands import printed
from tests.support.dense_attention import assert_near, decoded
from tests.support.executors import needs_gpu

Output = pytest.CaptureFixture[str]
MB = 1 << 20

# Every kind of public call, with NVTX ranges noted down. Plans' arguments change after the plan, as engines do it.
PROGRAM = """
import torch
ranges = []
torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = ranges.append, lambda: ranges.append("end")
import cute_attn
from cute_attn.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache

torch.manual_seed(0)
i32 = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
k, v = torch.randn(2, 50, 2, 64).bfloat16()
q, x = torch.randn(4, 64).bfloat16(), torch.randn(3, 4, 64).bfloat16()
single_decode_with_kv_cache(q, k, v, sm_scale=0.5)
prefill = lambda q: cute_attn.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
torch.compile(prefill, fullgraph=True, backend="eager")(x)
cache, bounds = torch.randn(6, 2, 16, 2, 64).bfloat16(), i32(0, 1, 3, 4)
wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
wrapper.begin_forward(bounds, i32(5, 1, 2, 0), i32(3, 16, 1), 4, 2, 64, 16, q_data_type=torch.bfloat16)
bounds.zero_()
wrapper.run(x, cache)
pages = i32(5, 1), i32(0, 1, 2), i32(3, 4)
cute_attn.append_paged_kv_cache(x[:, :2], x[:, 2:], i32(0, 0, 1), i32(0, 1, 2), cache, *pages)
try:
    wrapper.run(x[:, :3], cache)
except ValueError:
    pass
cute_attn.concat_mla_k(torch.empty(3, 4, 80), x.float(), torch.ones(3, 1, 16))
ragged = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
ragged.plan(i32(0, 3), i32(0, 50), 4, 2, head_dim=64)
latent = cute_attn.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
metadata = cute_attn.MLAPlanMetadata.csr(i32(0, 1), i32(0, 1), i32(2), i32(9))
latent.plan(None, None, None, None, 2, 512, 64, 16, False, 0.1, q.dtype, q.dtype, metadata=metadata)
from cute_attn.flash_mla import flash_mla_with_kvcache, get_mla_metadata
rows = torch.zeros(1, 1, 4, 576).bfloat16(), torch.zeros(2, 16, 1, 576).bfloat16()
flash_mla_with_kvcache(*rows, i32(1, 0)[None], i32(20), 512, *get_mla_metadata())
print(ranges[2:])  # without the trial
"""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[str]]:
    """Files of every call of the program, in the order of the calls, and its NVTX ranges."""
    directory = tmp_path_factory.mktemp("dumps")
    out = subprocesses.run(PROGRAM, env={"CUTE_ATTN_DUMP": f"{directory}:all", "CUTE_ATTN_NVTX": "1"})
    files = sorted(directory.iterdir(), key=lambda file: int(file.name.split("-")[3]))
    return files, json.loads(out.replace("'", '"'))


NAMES = (
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.begin_forward",  # which is `plan`
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "append_paged_kv_cache",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "concat_mla_k",
    *("BatchPrefillWithRaggedKVCacheWrapper.__init__", "BatchPrefillWithRaggedKVCacheWrapper.plan"),
    *("BatchMLAPagedAttentionWrapper.__init__", "BatchMLAPagedAttentionWrapper.plan"),  # not of its metadata
    *("get_mla_metadata", "flash_mla_with_kvcache"),
)


def test_every_outermost_call_is_seen_once(dumped: tuple[list[Path], list[str]]) -> None:
    files, ranges = dumped
    assert [file.name.split("-", 4)[4] for file in files] == [f"{name}.zip" for name in NAMES]
    assert [name for name in ranges if name != "end"] == [f"cute_attn.{name}" for name in NAMES]
    assert ranges[1::2] == ["end"] * len(NAMES)


def test_all_that_is_public_is_observed() -> None:
    describing = {"FP4Tensor", "Features", "explain", "get_device_sm_count"}
    describing.add("get_trtllm_gen_multi_ctas_kv_counter_bytes")
    assert {*exports.__all__} - describing - {*vars(errors)} <= {name for _, name, _ in public_names()}


def test_plug_ins_take_public_functions_from_where_they_are_observed() -> None:
    names, places = {name for _, name, _ in public_names()}, {f"cute_attn.{module}" for module, _, _ in public_names()}
    for path in (subprocesses.ROOT / "cute_attn/integrations").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and names & {name.name for name in node.names}:
                assert node.module in places, f"{path}, line {node.lineno}"


@pytest.mark.emulator
@pytest.mark.parametrize("number", [0, 1, 4])
def test_replay_on_the_emulator_agrees(dumped: tuple[list[Path], list[str]], number: int, capsys: Output) -> None:
    out = printed(capsys, ["replay", str(dumped[0][number]), "--arch", "sm_90a"])
    assert "for sm_90a" in out
    error = float(out.split("max abs error ")[1].split()[0])
    assert 0 < error < 2e-2  # bf16 results of the kernel and of the reference differ in some last bits
    assert out.count(": ok") == (2 if number == 1 else 1)


def test_replay_on_the_reference(dumped: tuple[list[Path], list[str]], capsys: Output) -> None:
    for number, file in enumerate(dumped[0]):
        if number != 6:
            assert printed(capsys, ["replay", str(file), "--backend", "reference"]).endswith("reference: runs\n")
    for number in (5, 7):
        assert main(["replay", str(dumped[0][number]), "--arch", "sm_90a"]) == 2
        assert f"{NAMES[number]} takes no backend" in capsys.readouterr().err
    assert "raises ArgumentError: q must have shape" in printed(capsys, ["replay", str(dumped[0][6])], 1)


def test_replayed_results_are_those_of_the_call(dumped: tuple[list[Path], list[str]]) -> None:
    """Though the plan's arguments were overwritten after it."""
    with replay.opened(dumped[0][4]) as archive:
        document = replay.read(dumped[0][4], archive)
        (found,) = replay.execute(document, archive, replay.Target("reference")).results
    torch.manual_seed(0)
    torch.randn(2, 50, 2, 64), torch.randn(4, 64)
    x, cache = torch.randn(3, 4, 64).bfloat16(), torch.randn(6, 2, 16, 2, 64).bfloat16()
    assert_near(found, None, decoded(x, cache, [3, 32, 1], torch.tensor([5, 1, 2, 0])))


def test_a_call_that_raises_leaves_a_file(tmp_path: Path, capsys: Output) -> None:
    code = (
        "import torch, cute_attn\n"
        "q = torch.randn(3, 2, 64).half()\n"
        "cute_attn.single_prefill_with_kv_cache(q, q, q)\n"
        "cute_attn.single_prefill_with_kv_cache(q, q, q, window_left='all')\n"
    )
    done = subprocesses.python("-c", code, CUTE_ATTN_DUMP=str(tmp_path))
    assert done.returncode == 1
    (file,) = tmp_path.iterdir()
    assert f"replay {file}" in done.stderr
    assert "window_left must be an int" in done.stderr
    out = printed(capsys, ["replay", str(file)], 1)
    assert "recorded error: ArgumentTypeError: window_left must be an int, got 'all'" in out
    assert "reference: raises ArgumentTypeError" in out


# ---- files


def dump(directory: Path, max_bytes: int = MB, **kwargs: Any) -> Path:
    """A file of a decode call with these keywords."""
    function = cute_attn.single_decode_with_kv_cache
    q, (k, v) = torch.randn(4, 64).half(), torch.randn(2, 50, 2, 64).half()
    call = Call("decode", None, "single_decode_with_kv_cache", (q, k, v), kwargs, function)
    Dumper(directory, True, max_bytes, "0")(call, lambda: function(*call.args, **call.kwargs))
    (path,) = directory.glob("*.zip")
    return path


def rewritten(path: Path, change: Any) -> Path:
    """A copy of a file with another document."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    document = json.loads(entries["call.json"])
    change(document)
    other = path.with_name("other.zip")
    with zipfile.ZipFile(other, "w") as archive:
        for name, content in (entries | {"call.json": json.dumps(document).encode()}).items():
            archive.writestr(name, content)
    return other


def test_values_beyond_the_limit_are_left_out(tmp_path: Path, capsys: Output, caplog: pytest.LogCaptureFixture) -> None:
    file = dump(tmp_path, max_bytes=1000)
    assert "values of k, v (0.0 MB) are left out: larger than what was left of the limit" in caplog.text
    assert file.stat().st_size < 10_000
    assert "random numbers stand for values that the file leaves out: k, v\n" in printed(capsys, ["replay", str(file)])


def with_call(**changed: Any) -> Any:
    return lambda document: document["parts"]["call"].update(changed)


def with_q(**changed: Any) -> Any:
    return lambda document: document["parts"]["call"]["args"][0]["tensor"].update(changed)


def with_memory(**changed: Any) -> Any:
    return lambda document: document["parts"]["call"]["memory"][0].update(changed)


DAMAGES = {
    "the document has no versions of type dict": lambda d: d.pop("versions"),
    "the document has no error of type": lambda d: d.update(error="x"),
    "error has no message of type str": lambda d: d.update(error={"type": "x"}),
    "the document has no parts of type dict": lambda d: d.update(parts=[]),
    "KeyError: 'call'": lambda d: d.update(parts={}),
    "part made has no module of type str": lambda d: d["parts"].update(made=None),
    "part call has no owner": with_call(owner=3),
    "part call has no memory of type list": with_call(memory={}),
    "memory of part call has no device of type str": with_memory(device=None),
    "memory of part call has no bytes of type int": with_memory(bytes="16"),
    "expected str instance, int found": with_memory(names=[1]),
    "cannot be read: IndexError": with_q(memory=9),
    "shape [9] and strides [1] is outside its memory": with_q(memory=-1, shape=[9], stride=[1]),
    "for a memory of 36028797018963968": with_memory(bytes=1 << 55),
    "strides [1152921504606846976] is outside its memory": with_q(shape=[2], stride=[1 << 60]),
    "strides [1] is outside its memory": with_q(shape=[2], stride=[1], offset=-2),
    "cannot be read: TypeError": with_q(dtype=3),
    "has format 99": lambda d: d.update(format=99),
    "no data for a value": lambda d: d["parts"]["call"]["args"].__setitem__(0, {"other": "Module: <x>"}),
    # Files run nothing but public functions.
    "names os.system, which is no public function": with_call(module="os", function="system"),
    "is no public function of cute_attn": with_call(function="_layout"),
    "which is no dtype": with_q(dtype="load"),
    "no public function": lambda d: d["parts"].update(made={**d["parts"]["call"], "owner": "os", "args": []}),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_files_are_refused(message: str, tmp_path: Path, capsys: Output) -> None:
    assert message in printed(capsys, ["replay", str(rewritten(dump(tmp_path), DAMAGES[message]))], 2)


def test_damaged_archives_are_refused(tmp_path: Path, capsys: Output) -> None:
    file = dump(tmp_path)
    with zipfile.ZipFile(tmp_path / "deep.zip", "w") as archive:
        archive.writestr("call.json", "[" * 100_000)
    with zipfile.ZipFile(file) as archive:
        document = archive.read("call.json")
    with zipfile.ZipFile(tmp_path / "bare.zip", "w") as archive:
        archive.writestr("call.json", document)
    (tmp_path / "junk.zip").write_bytes(b"junk")
    messages = {"deep": "RecursionError", "bare": "cannot be read: KeyError", "none": "No such file", "junk": ""}
    for name, message in messages.items():
        assert message in printed(capsys, ["replay", str(tmp_path / f"{name}.zip")], 2)
    assert main(["replay", str(file), "--backend", "reference", "--arch", "sm_90a"]) == 2


def test_a_wrong_result_is_exit_code_1(capsys: Output) -> None:
    target, truth = replay.Target("emulator", "sm_90a"), torch.tensor([1.0, -math.inf, 0.5]).half()
    assert replay.compared(target, [truth.clone()], [truth]) == 0
    assert "max abs error 0.00e+00" in capsys.readouterr().out
    for wrong in (math.nan, math.inf, 1.2):
        assert replay.compared(target, [truth.where(truth != 1, wrong)], [truth]) == 1
        assert "WRONG" in capsys.readouterr().out
    assert replay.errors(torch.tensor([1.25]), torch.tensor([1.0])) == (0.25, 0.125)


def test_a_dump_that_fails_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    dumper = Dumper(tmp_path / "file", True, MB, "0")
    function = cute_attn.get_seq_lens
    args = (torch.tensor([0, 1]), torch.tensor([1]), 16)
    call = Call("page", None, "get_seq_lens", args, {}, function)
    assert dumper(call, lambda: function(*args)).tolist() == [1]
    assert "could not be dumped" in caplog.text


def test_directory_and_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTE_ATTN_DUMP_MAX_MB", "3")
    every, raising = from_environment(f"{tmp_path}:all", "0"), from_environment(str(tmp_path), "0")
    assert (every.directory, every.every, every.max_bytes) == (tmp_path, True, 3 * MB)
    assert (raising.directory, raising.every) == (tmp_path, False)


@pytest.mark.parametrize(
    ("text", "megabytes", "warned"),
    [("0", 0, False), ("", 1024, False), *((text, 1024, True) for text in ("²", "9" * 5000, "-1", "1.5"))],
)
def test_limits_that_are_no_number_leave_the_default(
    text: str, megabytes: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUTE_ATTN_DUMP_MAX_MB", text)
    assert from_environment("x", "0").max_bytes == megabytes * MB
    assert ("CUTE_ATTN_DUMP_MAX_MB must be a number of megabytes, got" in caplog.text) == warned


# ---- values


def read_back(*values: Any, budget: int = MB) -> list[Any]:
    snapshot = Snapshot()
    encoded = [snapshot.encode(value, "x") for value in values]
    snapshot.copy(budget)
    encoded = json.loads(json.dumps(encoded))
    data = [memory.data for memory in snapshot.memories]
    index = json.loads(json.dumps(snapshot.index()))

    def content(number: int) -> bytes:
        found = data[number]
        assert found is not None
        return bytes(found.tolist())

    reader = Reader(index, content, torch.device)
    return [reader.decode(value) for value in encoded]


def test_tensors_keep_values_strides_alignment_and_shared_memory() -> None:
    base = torch.randn(7, 11, 6)
    k, v = base[1:, ::2, :3], base[1:, 1::2, 2:]
    again_k, again_v = read_back(k, v)
    assert torch.equal(again_k, k)
    assert torch.equal(again_v, v)
    assert again_k.stride() == k.stride()
    assert again_k.data_ptr() % ALIGNMENT == k.data_ptr() % ALIGNMENT
    assert again_v.data_ptr() - again_k.data_ptr() == v.data_ptr() - k.data_ptr()


def test_all_kinds_of_values() -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        x = torch.arange(6).to(dtype).reshape(2, 3)
        (again,) = read_back(x)
        assert again.dtype == dtype
        assert torch.equal(again.to(torch.float64), x.to(torch.float64))
    plain = (None, True, 3, "a", 1e300, -math.inf, (1, [2.5]), {"a": torch.float16}, torch.device("cpu"))
    assert read_back(*plain) == [*plain]
    assert all(type(a) is type(b) for a, b in zip(read_back(*plain), plain, strict=True))
    (empty,) = read_back(torch.empty(0, 4))
    assert empty.shape == (0, 4)
    (nan,) = read_back(math.nan)
    assert math.isnan(nan)


def test_indices_whose_values_are_left_out_are_refused() -> None:
    with pytest.raises(ArgumentError, match="does not hold the values of x"):
        read_back(torch.arange(100), budget=8)


# ---- on a GPU

GPU_PROGRAM = """
import torch, cute_attn
torch.manual_seed(0)
q, (k, v) = torch.randn(3, 4, 64).bfloat16().cuda(), torch.randn(2, 50, 2, 64).bfloat16().cuda()
cute_attn.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
i32 = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device="cuda")
wrapper = cute_attn.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
wrapper.plan(i32(0, 1, 3, 4), i32(5, 1, 2, 0), i32(3, 16, 1), 4, 2, 64, 16, q_data_type=torch.bfloat16)
cache = torch.randn(6, 2, 16, 2, 64).bfloat16().cuda()
out = wrapper.run(q, cache)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    wrapper.run(q, cache, out=out)
cute_attn.merge_state(out, torch.zeros(3, 4, device="cuda"), out, torch.zeros(3, 4, device="cuda"))
"""


@needs_gpu
def test_calls_of_a_gpu_replay_there_and_on_the_emulator(tmp_path: Path, capsys: Output) -> None:
    done = subprocesses.python("-c", GPU_PROGRAM, CUTE_ATTN_DUMP=f"{tmp_path}:all", CUTE_ATTN_NVTX="1")
    assert done.returncode == 0, done.stderr
    assert "run is not dumped: it is being captured in a CUDA graph" in done.stderr
    files = sorted(tmp_path.iterdir(), key=lambda file: int(file.name.split("-")[3]))
    names = [file.name.split("-", 4)[4].removesuffix(".zip") for file in files]
    calls = [f"BatchDecodeWithPagedKVCacheWrapper.{name}" for name in ("__init__", "plan", "run")]
    assert names == ["single_prefill_with_kv_cache", *calls, "merge_state"]
    for file in files:
        out = printed(capsys, ["replay", str(file)])
        assert "gpu NVIDIA" in out
        assert "\ngpu: " in out
    for number in (0, 3):
        assert main(["replay", str(files[number]), "--arch", "sm_90a"]) == 0
        assert "emulator (sm_90a): result 0 (bfloat16): max abs error" in capsys.readouterr().out
