"""`warmup`, `cache` and `bundle`: kernels of a model, in a cache and in a directory."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn.cli import bundle, explain, main, terminal, warmup
from cute_attn.cli.terminal import ProgressBar
from cute_attn.cli.warmup import SOURCES, Shape
from cute_attn.dispatch import select
from cute_attn.dispatch.capabilities import Load
from cute_attn.dispatch.families import FAMILIES
from cute_attn.errors import ArgumentError
from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.kernels.mla.host.launch import launch_config
from cute_attn.problem import BatchLimits, Settings
from cute_attn.request.mla import MlaSettings
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import TYPICAL_SMS, named
from cute_attn.schedule.batch import typical_qo_len
from tests.support import subprocesses
from tests.support.commands import printed

Output = pytest.CaptureFixture[str]
COMBINE = [CombineSpec("bfloat16", 128), CombineSpec("float16", 64)]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LLAMA = Shape(32, 8, 128, 128, "bfloat16")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(artifacts, "_memory", {})


# ---- which kernels a model needs


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "nvfp4"])
def test_no_batch_of_the_model_needs_another_kernel(arch: str, kv_dtype: str) -> None:
    """Whatever its lengths, pages and windows."""
    kernels, _ = warmup.needed(LLAMA, kv_dtype, ["paged", "ragged"], named(arch))
    for decode, qo_lens in ((True, (1,)), (False, (1, 7, 60, 4096))):
        for qo_len in qo_lens:
            for kv_len, batch in ((qo_len, 3), (20000, 1), (5000, 64)):
                for page_size, window in ((16, -1), (128, 1023), (1, 0)):
                    features = LLAMA.features(kv_dtype, "paged", decode)
                    settings = Settings(features, causal=not decode, window_left=window, page_size=page_size)
                    launches = batch_launches(settings, [qo_len] * batch, [max(kv_len, qo_len)] * batch, arch)
                    assert {spec for spec, _ in launches} <= set(kernels)


def batch_launches(settings: Settings, qo_lens: list[int], kv_lens: list[int], arch: str) -> list[Any]:
    texts = {"qo_lens": ",".join(map(str, qo_lens)), "kv_lens": ",".join(map(str, kv_lens))}
    lengths = explain.tokens(argparse.Namespace(batch=None, page_size=settings.page_size, **texts))
    limits = BatchLimits(128 << 20, max_qo_len=1 if settings.features.decode else None)
    rows = typical_qo_len(lengths, limits) * 4
    backend = select.choose(settings.features, "auto", named(arch), Load(rows))
    return FAMILIES[backend.name].batch_launches(settings, lengths, limits, named(arch), TYPICAL_SMS[arch])[1]


def options(**given: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    warmup.add_options(parser)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return parser.parse_args(flags)


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "dtype": "bfloat16",
}
GEMMA2 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "attn_logit_softcapping": 50.0}
OLD = {"num_attention_heads": 12, "hidden_size": 768, "torch_dtype": "float16"}
DEEPSEEK = {"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
DEEPSEEK |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "torch_dtype": "bfloat16"}
GLOBAL = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512}


@pytest.mark.parametrize(
    ("config", "tp", "expected"),
    [
        (GPT_OSS, 1, [Shape(64, 8, 64, 64, "bfloat16", sinks=True)]),
        (GPT_OSS, 16, [Shape(4, 1, 64, 64, "bfloat16", sinks=True)]),
        ({"text_config": GEMMA2, "torch_dtype": "float32"}, 2, [Shape(4, 2, 256, 256, "bfloat16", soft_cap=True)]),
        (OLD, 1, [Shape(12, 12, 64, 64, "float16")]),
        (DEEPSEEK, 8, [Shape(16, 16, 192, 128, "bfloat16", latent=True)]),
        (GLOBAL, 1, [Shape(8, 4, 256, 256, "bfloat16"), Shape(8, 4, 512, 512, "bfloat16")]),
    ],
)
def test_shapes_of_models(config: dict[str, Any], tp: int, expected: list[Shape], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert warmup.shapes_of(options(model_config=tmp_path, tp=tp)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs --model-config"),
        ({"num_qo_heads": 6, "num_kv_heads": 4, "head_dim": 64}, "6 query heads are no multiple of 4"),
        ({"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64, "tp": 4}, "--tp 4 does not divide 6"),
        ({"model_config": "/nowhere"}, "/nowhere is not a readable config.json"),
    ],
)
def test_bad_shapes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        warmup.shapes_of(options(**given))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_a_bundle_of_deepseek_has_its_kernels(arch: str, tmp_path: Path) -> None:
    """Of prompts, and of latent attention over caches of both types, whatever the number of query tokens."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    model = ["--model-config", str(tmp_path), "--kv-dtype", "auto,float8_e4m3fn", "--arch", arch, "--tp", "2"]
    parser = argparse.ArgumentParser()
    bundle.add(parser.add_subparsers())
    found = bundle.selected(parser.parse_args(["bundle", "DIR", *model]))[arch]
    others = 64, True, 1.0, None
    for kv_dtype, bits, grouped in ((BF16, 16, False), (E4M3, 8, False), (E4M3, 8, True), (E4M3, 16, True)):
        for qo_len, heads in product((1, 2, 4), (1, 16, 64)):
            settings = MlaSettings(torch.device("cuda"), BF16, kv_dtype, bits, grouped, heads, *others)
            assert launch_config(settings, qo_len, named(arch), TYPICAL_SMS[arch]).spec in found
    prompt = Shape(64, 64, 192, 128, "bfloat16").features("bfloat16", "ragged", decode=False)
    prompts = select.choose(prompt, "auto", named(arch))
    assert {prompts.name, "append", "plan"} < {spec.kernel for spec in found}


def test_other_sizes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | {"kv_lora_rank": 256}))
    with pytest.raises(ArgumentError, match=r"kernels for kv_lora_rank 512 .*, the configuration has 256 and 64"):
        warmup.shapes_of(options(model_config=tmp_path))
    shape = Shape(16, 16, 192, 128, "bfloat16", latent=True)
    refused = ["sm_90a; latent attention over a cache of nvfp4"]
    assert warmup.needed(shape, "nvfp4", ["paged"], named("sm_90a")) == ([], refused)
    narrow = LLAMA._replace(head_dim=72, head_dim_vo=72), "nvfp4", ["paged"], named("sm_90a")
    why = "sm_90a: NVFP4 (uint8) k and v need head dimensions that are multiples of 16, got 72 and 72"
    assert warmup.needed(*narrow) == ([], [why] * 2)  # prefill and decode


# ---- commands


def test_warmup_fills_the_cache(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(warmup, "needed", lambda *asked: (COMBINE, []))
    argv = ["warmup", "--num-qo-heads", "32", "--num-kv-heads", "8", "--head-dim", "128", "--arch", "h100"]
    out = printed(capsys, [*argv, "--jobs", "1"])
    assert "attention of one GPU: 32/8 heads, head dim 128, bfloat16" in out
    assert "2 kernels (2 for sm_90a), 0 of them there before, 0 failed" in out
    document = json.loads(printed(capsys, [*argv, "--json"]))
    assert document["before"] == 2
    assert document["kernels"]["sm_90a"] == [spec.asdict() for spec in COMBINE]
    assert "--kv-dtype must list some of auto, bfloat16" in printed(capsys, [*argv, "--kv-dtype", "int8"], 2)


def test_warmup_says_what_no_backend_takes(capsys: Output) -> None:
    argv = ["warmup", "--num-qo-heads", "8", "--head-dim", "100", "--arch", "sm_90a", "--kv-source", "paged"]
    out = printed(capsys, argv, 1)
    assert "no backend: sm_90a; q bfloat16" in out
    assert "0 kernels" in out


def test_cache_shows_verifies_and_clears(tmp_path: Path, capsys: Output) -> None:
    for arch in ("sm_80", "sm_90a"):
        assert main(["kernels", "--arch", arch, "--spec", COMBINE[0].key()]) == 0
    capsys.readouterr()
    out = printed(capsys, ["cache"])
    assert [line.split()[:3] for line in out.splitlines()[2:4]] == [
        ["sm_80", "combine", "1"],
        ["sm_90a", "combine", "1"],
    ]
    assert f"2 kernels, {terminal.format_bytes(size(tmp_path))}, in {tmp_path / 'cache'}" in out
    assert "2 of 2 files are intact" in printed(capsys, ["cache", "verify"])
    assert "nothing was removed: add --yes" in printed(capsys, ["cache", "clear", "--arch", "sm_80"])
    assert main(["cache", "clear", "--stale", "--yes"]) == 0
    assert main(["cache", "clear", "--arch", "sm_80", "--yes"]) == 0
    (left,) = (tmp_path / "cache").glob("*.artifact")
    left.write_bytes(left.read_bytes()[:-1])
    capsys.readouterr()
    document = json.loads(printed(capsys, ["cache", "verify", "--json"], 1))
    assert (document["kernels"], document["damaged"][0]["file"]) == (1, str(left))
    for mode, there in ((0o666, True), (0o644, False)):  # not read while others may write it; then nobody knows it
        left.chmod(mode)
        for narrowed in (["--stale"], ["--arch", "sm_80", "--family", "fa2"]):
            assert main(["cache", "verify", *narrowed]) == left.exists()
            assert main(["cache", "clear", *narrowed, "--yes"]) == 0
            assert left.exists() == there
    assert main(["cache", "show", "--json"]) == 0


def test_names_of_planted_files_do_not_control_the_terminal(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    for name in (b"\x1b[2J.artifact", b"\xff.artifact"):
        Path(os.fsdecode(bytes(tmp_path / "cache" / "x")[:-1] + name)).write_bytes(b"junk")
    out = printed(capsys, ["cache", "verify"], 1)
    assert r"/\x1b[2J.artifact: not an intact artifact file" in out
    assert r"/\udcff.artifact: not an intact artifact file" in out


def size(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.artifact"))


def test_bundle_tells_what_it_had(tmp_path: Path, capsys: Output) -> None:
    argv = ["bundle", str(tmp_path / "bundle"), "--arch", "h100", "--spec", COMBINE[0].key()]
    assert "1 kernels for sm_90a" in printed(capsys, argv)
    out = printed(capsys, [*argv, "--spec", COMBINE[1].key(), "--jobs", "1"])
    assert "2 kernels for sm_90a" in out
    assert "1 of them there before, in " in out


def test_a_bundle_of_a_model_has_what_warmup_compiles(tmp_path: Path, capsys: Output) -> None:
    model = ["--num-qo-heads", "32", "--num-kv-heads", "8", "--head-dim", "128", "--dtype", "float16"]
    options = argparse.ArgumentParser()
    bundle.add(options.add_subparsers())
    found = bundle.selected(options.parse_args(["bundle", "DIR", *model, "--arch", "h100"]))["sm_90a"]
    needed, _ = warmup.needed(LLAMA._replace(dtype="float16"), "float16", SOURCES, named("sm_90a"))
    assert set(found) == set(needed)
    assert {"plan", "lengths", "append", "xqa", "fa3", "fa2", "combine"} == {spec.kernel for spec in found}
    for wrong, named_ in (
        (["--head-dim", "128"], "--num-qo-heads"),
        (["--kv-dtype", "nvfp4"], "--num-qo-heads"),
        ([*model, "--spec", "{}"], "--spec"),
    ):
        assert named_ in printed(capsys, ["bundle", str(tmp_path), *wrong, "--arch", "h100"], 2)


def test_an_interruption_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def interrupted(*arguments: Any) -> int:
        arguments[-1](COMBINE[0], "sm_90a", None)
        raise KeyboardInterrupt

    monkeypatch.setattr(artifacts, "get_many", interrupted)
    argv = ["bundle", str(tmp_path), "--arch", "sm_90a", *(f"--spec={spec.key()}" for spec in COMBINE)]
    assert "interrupted after 1 of 2 kernels: the same command goes on" in printed(capsys, argv, 130)
    (tmp_path / "manifest.json").write_text("{}")  # refused before anything is compiled
    assert main(argv) == 1
    assert re.search(r"no bundle written: .*manifest\.json is not one of a bundle", capsys.readouterr().err)
    assert (tmp_path / "manifest.json").read_text() == "{}"


WORKERS = """
import multiprocessing, signal, time
from concurrent.futures import ProcessPoolExecutor
from cute_attn.cli.terminal import interruptible
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this without
with interruptible(), ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
    waiting = [pool.submit(time.sleep, 60) for _ in range(9)]
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    waiting[0].result()
"""


def test_no_worker_outlives_a_signal_to_the_command() -> None:
    commands = {number: subprocesses.start(WORKERS) for number in (signal.SIGINT, signal.SIGTERM)}
    pids = [command.pid for command in commands.values()]
    try:
        for command in commands.values():
            assert command.stdout
            pids += map(int, command.stdout.readline().split())
        assert len(pids) == 6
        for number, command in commands.items():
            command.send_signal(number)
            command.communicate(timeout=20)  # until the workers have closed their ends, too: they are gone
            assert command.returncode == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143}[number]
    except BaseException:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


def test_the_estimate_leaves_out_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    bar = ProgressBar(10)
    for seconds in (0.01, 0.02, 0.03):  # from the cache
        now[0] = seconds
        bar.step("")
    assert bar.seconds_left() is None
    for seconds in (2.0, 4.0):
        now[0] = seconds
        bar.step("")
    assert bar.seconds_left() == pytest.approx(10.0)
    assert [terminal.format_seconds(s) for s in (0.4, 59, 125, 3725)] == ["0 s", "59 s", "2 min 5 s", "1 h 2 min"]
