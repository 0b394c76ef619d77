"""Sources of artifacts: memory, bundles, disk cache, compile; also between processes and after damage."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cute_attn.cli import doctor
from cute_attn.errors import ArtifactError
from cute_attn.runtime import artifacts, bundle, cache, dsl
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.artifacts import Outcome, Progress
from cute_attn.runtime.compile import compile_spec
from cute_attn.runtime.spec import KernelSpec
from tests.support import subprocesses
from tests.support.toy_spec import BrokenSpec, ToySpec, toy_program

SPEC = ToySpec()
ARCH = "sm_90a"
GET = """
import hashlib, sys
from cute_attn.runtime import artifacts
from tests.support.toy_spec import ToySpec, toy_program
artifact = artifacts.get(ToySpec(), "sm_90a", toy_program)
print(hashlib.sha256(artifact.to_bytes()).hexdigest(), "cutlass" in sys.modules)
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test its own cache and an empty memory."""
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "compiles"))
    monkeypatch.delenv("CUTE_ATTN_BUNDLE", raising=False)
    monkeypatch.delenv("CUTE_ATTN_DISABLE_JIT", raising=False)
    monkeypatch.setattr(artifacts, "_memory", {})


def forget() -> None:
    """Empties the memory of this process."""
    artifacts._memory.clear()


def compiles(tmp_path: Path) -> int:
    log = tmp_path / "compiles"
    return len(log.read_text().splitlines()) if log.exists() else 0


def cached_file() -> Path:
    (file,) = cache.directory().glob("*.artifact")
    return file


def digest(artifact: Artifact) -> str:
    return hashlib.sha256(artifact.to_bytes()).hexdigest()


def test_second_process_hits_the_cache_without_the_dsl(tmp_path: Path) -> None:
    artifact = artifacts.get(SPEC, ARCH, toy_program)
    assert artifacts.get(SPEC, ARCH, toy_program) is artifact
    assert subprocesses.run(GET).split() == [digest(artifact), "False"]
    assert compiles(tmp_path) == 1


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o000, 0o644), (0o077, 0o600)])
def test_others_may_read_files_but_not_write_to_them(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        cache.write_atomically(tmp_path / "file", b"content")
        cache._make_directory()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert stat.S_IMODE(cache.directory().stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]


def test_a_cache_that_may_not_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(f"not for you: {path}")

    cache._make_directory()
    monkeypatch.setattr(cache, "read_private", refuse)
    with pytest.warns(UserWarning, match=r"cannot use its cache in .*not for you"):
        assert cache.load("key", SPEC, ARCH) is None


@pytest.mark.parametrize("damage", ["empty", "short", "first", "digest", "middle", "last"])
def test_damaged_file_is_compiled_again_and_replaced(damage: str, tmp_path: Path) -> None:
    artifact = artifacts.get(SPEC, ARCH, toy_program)
    file, data = cached_file(), bytearray(cached_file().read_bytes())
    if damage in ("empty", "short"):
        file.write_bytes(data[: len(data) // 2 if damage == "short" else 0])
    else:
        data[{"first": 0, "digest": 30, "middle": len(data) // 2, "last": -1}[damage]] ^= 0x10
        file.write_bytes(data)
    forget()
    assert artifacts.get(SPEC, ARCH, toy_program) == artifact
    assert compiles(tmp_path) == 2
    assert Artifact.from_bytes(file.read_bytes()) == artifact


def test_racing_processes_compile_once(tmp_path: Path) -> None:
    racers = [subprocesses.start(GET, env={"TOY_SECONDS": "1.5"}) for _ in range(2)]
    outputs = [subprocesses.finish(racer).split() for racer in racers]
    assert outputs[0][0] == outputs[1][0]
    assert compiles(tmp_path) == 1
    assert not list(cache.directory().glob("*.tmp"))


def test_unwritable_cache_warns_once_and_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        artifacts.get(SPEC, ARCH, toy_program)
        forget()
        artifacts.get(SPEC, ARCH, toy_program)
    (warning,) = caught
    assert "Set CUTE_ATTN_CACHE_DIR to a writable directory" in str(warning.message)
    assert compiles(tmp_path) == 2


def test_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_ATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.directory() == tmp_path / "xdg" / "cute_attn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory() == tmp_path / ".cache" / "cute_attn"


def test_key_depends_on_everything_that_affects_an_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        cache.cache_key(SPEC, ARCH),
        cache.cache_key(ToySpec(threads=64), ARCH),
        cache.cache_key(SPEC, "sm_80"),
    }
    monkeypatch.setattr(dsl, "version", lambda: "4.8.2 cu13")
    keys.add(cache.cache_key(SPEC, ARCH))
    monkeypatch.setattr(cache, "source_fingerprint", lambda: "other sources")
    keys.add(cache.cache_key(SPEC, ARCH))
    assert len(keys) == 5
    monkeypatch.setattr(dsl, "version", lambda: None)
    assert cache.cache_key(SPEC, ARCH) is None


def test_fingerprint_covers_the_kernel_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, host = (tmp_path / "kernels" / name for name in ("blocks/softmax.py", "host/persistent/family.py"))
    for path in (source, host, *(tmp_path / name for name in cache._OTHER_SOURCES)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path)
    prints = []
    for text in ("scale = 1", "scale = 2", "scale = 1"):
        source.write_text(text)
        host.write_text(f"sms = {len(prints)}")  # host code does not change kernels
        prints.append(cache.source_fingerprint.__wrapped__())
    source.rename(source.with_name("masks.py"))
    prints.append(cache.source_fingerprint.__wrapped__())
    assert prints[0] == prints[2]
    assert len(set(prints)) == 3


def test_disabled_jit_uses_the_cache_and_explains_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = artifacts.get(SPEC, ARCH, toy_program)
    forget()
    monkeypatch.setenv("CUTE_ATTN_DISABLE_JIT", "1")
    assert artifacts.get(SPEC, ARCH, toy_program) == artifact
    with pytest.raises(ArtifactError) as caught:
        artifacts.get(ToySpec(threads=96), "sm_100a", toy_program)
    message = str(caught.value)
    for part in (
        '"threads":96',
        "sm_100a",
        "CUTE_ATTN_DISABLE_JIT is set",
        str(cache.directory()),
        "CUTE_ATTN_BUNDLE is not set",
        "python -m cute_attn bundle --arch sm_100a",
    ):
        assert part in message


def test_many_mixes_hits_compiles_and_failures(tmp_path: Path) -> None:
    hit = artifacts.get(SPEC, ARCH, toy_program)
    forget()
    specs = [ToySpec(threads=64), SPEC, BrokenSpec()]
    seen = []
    outcomes = artifacts.get_many(
        {ARCH: specs}, toy_program, jobs=2, progress=lambda spec, arch, outcome: seen.append(spec)
    )
    assert [spec for _, spec in outcomes] == specs
    assert sorted(map(repr, seen)) == sorted(map(repr, specs))
    assert outcomes[ARCH, SPEC] == hit
    assert isinstance(outcomes[ARCH, BrokenSpec()], ArtifactError)
    assert "toy of iron" in str(outcomes[ARCH, BrokenSpec()])
    assert artifacts.get(specs[0], ARCH, toy_program) is outcomes[ARCH, specs[0]]
    assert compiles(tmp_path) == 2  # the hit, and one of the two others: the broken one fails before it logs
    assert outcomes[ARCH, specs[0]] == compile_spec(specs[0], ARCH, toy_program)  # the same bytes in any process


def write_bundle(directory: Path, specs: Sequence[KernelSpec], progress: Progress | None = None) -> int:
    return bundle.write(directory, artifacts.get_many({ARCH: specs}, toy_program, 1, progress).values())


def test_bundles_come_before_the_cache_and_the_first_one_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "a", [ToySpec(threads=64)])
    write_bundle(tmp_path / "b", [SPEC])
    forget()
    monkeypatch.setenv("CUTE_ATTN_BUNDLE", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "other"))
    assert artifacts.get(SPEC, ARCH, toy_program).block == (128, 1, 1)
    assert artifacts.get(ToySpec(threads=64), ARCH, toy_program).block == (64, 1, 1)
    assert compiles(tmp_path) == 2
    assert not (tmp_path / "other").exists()
    monkeypatch.setenv("CUTE_ATTN_DISABLE_JIT", "1")
    with pytest.raises(ArtifactError, match=f"bundles: {tmp_path / 'a'}, {tmp_path / 'b'}\n"):
        artifacts.get(SPEC, "sm_100a", toy_program)


def test_bundle_with_a_failure_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no bundle written, 1 artifacts failed:\n.*toy of iron"):
        write_bundle(tmp_path / "bundle", [SPEC, BrokenSpec()])
    assert not (tmp_path / "bundle").exists()


def test_an_interrupted_bundle_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [SPEC, ToySpec(threads=64), ToySpec(threads=32)]

    def interrupt(spec: KernelSpec, arch: str, outcome: Outcome) -> None:
        if spec == specs[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "bundle", specs, interrupt)
    assert not (tmp_path / "bundle").exists()
    forget()
    assert write_bundle(tmp_path / "bundle", specs) == 0
    assert compiles(tmp_path) == 3  # the third alone
    assert write_bundle(tmp_path / "bundle", specs) == 3
    assert bundle.counts(tmp_path / "bundle") == {ARCH: 3}
    forget()
    monkeypatch.setenv("CUTE_ATTN_BUNDLE", str(tmp_path / "bundle"))
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "other"))  # the bundle alone has them
    for spec in specs:
        assert artifacts.get(spec, ARCH, toy_program).is_of(spec, ARCH)
    assert compiles(tmp_path) == 3


# ---- what is in the cache


def test_entries_tell_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = artifacts.get(SPEC, ARCH, toy_program)
    artifacts.get(SPEC, "sm_80", toy_program)
    monkeypatch.setattr(cache, "source_fingerprint", lambda: "0" * 64)
    forget()
    artifacts.get(SPEC, ARCH, toy_program)
    monkeypatch.undo()
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    entries = list(cache.entries())
    assert sorted((entry.arch, entry.kernel, entry.current) for entry in entries) == [
        ("sm_80", "toy", True),
        (ARCH, "toy", False),
        (ARCH, "toy", True),
    ]
    assert {entry.num_bytes for entry in entries if entry.arch == ARCH} == {len(made.to_bytes())}
    assert not any(entry.problem for entry in cache.entries())
    cache.remove(entry for entry in entries if not entry.current)
    assert len(list(cache.entries())) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spec": {"kernel": {}}}, "must be printable texts"),
        ({"arch": "\x1b[2J"}, "must be printable texts"),
        ({"dsl": "\x1b[2J"}, "must be printable texts"),
        ({"dsl": None}, "malformed artifact file"),
        ({"spec": {}}, "kernel"),
    ],
)
def test_what_planted_files_say_is_reported(changed: dict[str, Any], message: str) -> None:
    content = dataclasses.replace(artifacts.get(SPEC, ARCH, toy_program), **changed).to_bytes()
    cached_file().write_bytes(content)
    (entry,) = cache.entries()
    assert message in entry.problem
    assert (entry.num_bytes, entry.arch, entry.kernel, entry.current) == (len(content), "?", "?", False)


def test_files_that_others_may_write_are_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = artifacts.get(SPEC, ARCH, toy_program)
    cached_file().rename(cache.path_of("a"))
    cache.path_of("b").symlink_to(cache.path_of("b"))
    os.mkfifo(cache.path_of("c"), 0o600)
    assert [entry.problem for entry in cache.entries()][::2] == ["", "not a file"]
    assert "symbolic links" in list(cache.entries())[1].problem
    cache.path_of("a").chmod(0o666)
    monkeypatch.setattr(Artifact, "from_bytes", lambda data: pytest.fail(f"{artifact.symbol} is read"))
    assert "other users may write" in next(cache.entries()).problem
    cache.path_of("a").chmod(0o600)
    cache.directory().chmod(0o777)
    assert "other users may write" in next(cache.entries()).problem


# ---- what is loaded is what was asked for, and nobody else could have put it there


def test_cache_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", "./here", ""):
        monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", name)
        monkeypatch.setenv("XDG_CACHE_HOME", ".")
        monkeypatch.setattr(artifacts, "_memory", {})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            artifact = artifacts.get(SPEC, ARCH, toy_program)
        assert Artifact.from_bytes(cached_file().read_bytes()) == artifact
    assert compiles(tmp_path) == 3


def test_cache_in_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", "kernels")
    monkeypatch.setattr(cache, "_warned", set())
    message = r"cache in kernels \(there is no home or working directory\)"
    with pytest.warns(UserWarning, match=message), cache.locked("key"):
        assert cache.load("key", SPEC, ARCH) is None
    assert list(cache.entries()) == []
    line = doctor.cache_line()
    assert (line.state, "not used (there is no home or working directory)" in line.text) == ("!!", True)


@pytest.mark.parametrize("other", [(ToySpec(threads=64), ARCH), (SPEC, "sm_80")])
def test_another_artifact_under_the_name_is_a_miss(other: tuple[ToySpec, str], tmp_path: Path) -> None:
    artifact, wrong = artifacts.get(SPEC, ARCH, toy_program), artifacts.get(*other, toy_program)
    key = cache.cache_key(SPEC, ARCH)
    assert key
    cache.path_of(key).write_bytes(wrong.to_bytes())
    forget()
    assert artifacts.get(SPEC, ARCH, toy_program) == artifact
    assert compiles(tmp_path) == 3
    assert Artifact.from_bytes(cache.path_of(key).read_bytes()) == artifact


NOT_MINE = 0  # nobody who owns files here is trusted any more


@pytest.mark.parametrize("danger", [NOT_MINE, 0o002, 0o020])
@pytest.mark.parametrize("where", ["directory", "file"])
def test_cache_that_others_control_is_not_used(
    danger: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = artifacts.get(SPEC, ARCH, toy_program)
    path = cache.directory() if where == "directory" else cached_file()
    path.chmod(path.stat().st_mode | danger)
    if danger == NOT_MINE:
        monkeypatch.setattr(cache, "_trusted_users", lambda: (path.stat().st_uid + 1,))
    forget()
    with pytest.warns(UserWarning, match="belongs to user" if danger == NOT_MINE else "chmod go-w"):
        assert artifacts.get(SPEC, ARCH, toy_program) == artifact
    assert compiles(tmp_path) == 2
    if where == "file" and danger != NOT_MINE:  # replaced by a private one
        forget()
        artifacts.get(SPEC, ARCH, toy_program)
        assert compiles(tmp_path) == 2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_ARTIFACTS", 2)
    for threads in (32, 64, 96, 128):
        artifacts.get(ToySpec(threads=threads), ARCH, toy_program)
    assert [spec.threads for spec, _ in artifacts._memory] == [96, 128]


# ---- flavours of the DSL


def test_cuda_version_of_a_flavour() -> None:
    assert [dsl.cuda_major(text) for text in ("4.8.1 cu13", "4.8.0 cu12", "4.8.0 cu?", "")] == [13, 12, 0, 0]
    assert 12 <= dsl.cuda_major(dsl.version() or "") < 20
