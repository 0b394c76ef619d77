"""Artifact files: whatever is wrong in one, under a digest that fits or not, raises ArtifactError."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cute_attn.errors import ArtifactError
from cute_attn.runtime import artifact as artifacts
from cute_attn.runtime import bundle
from cute_attn.runtime.artifact import Artifact, Param
from tests.support import compare_cubins
from tests.support.toy_spec import ToySpec

PARAMS = (Param("out", "i64", 0, 8), Param("count", "i32", 8, 4), Param("maps", "map", 128, 128))
WHOLE = Artifact(
    *("sm_90a", "cute_attn_toy", b"cubin" * 40, ".version 9.0", PARAMS, (128, 1, 1), 1024, 40, 0, 2),
    {"kernel": "toy"},
    dsl="4.8.1 cu13",
)
MOST_BYTES = 1 << 18  # of an inflated file
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    1 << 70,
    "",
    "x",
    "\ud800",
    [],
    {},
    [1],
    [[]],
    {"a": 1},
    [None] * 3,
    [-1, 0, 1],
)


def file_of(body: bytes) -> bytes:
    return artifacts._MAGIC + hashlib.sha256(body).digest() + body


def parts() -> tuple[dict[str, Any], bytes]:
    """Returns the header of the file of WHOLE, and what follows it."""
    raw = zlib.decompress(WHOLE.to_bytes()[len(artifacts._MAGIC) + 32 :])
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def with_header(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return file_of(zlib.compress(len(text).to_bytes(8, "little") + text + rest))


def accepted(data: bytes) -> Artifact | None:
    """Returns the artifact; None after an ArtifactError. Any other error fails the test."""
    try:
        return Artifact.from_bytes(data)
    except ArtifactError:
        return None


def test_round_trip() -> None:
    assert Artifact.from_bytes(WHOLE.to_bytes()) == WHOLE


def test_every_field_may_be_missing_or_junk() -> None:
    header, rest = parts()
    for name in header:
        assert accepted(with_header({k: v for k, v in header.items() if k != name}, rest)) is None or name in (
            *("cluster", "dsl", "ptx"),
        )
        for junk in JUNK:
            found = accepted(with_header({**header, name: junk}, rest))
            if found is not None:  # junk that happens to be a value of the field
                assert Artifact.from_bytes(found.to_bytes()) == found
    assert accepted(with_header({**header, "more": 1}, rest)) is None


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_parameters_may_be_junk(junk: Any) -> None:
    header, rest = parts()
    for index in range(4):
        param = header["params"][1][:]
        param[index] = junk
        found = accepted(with_header({**header, "params": [header["params"][0], param]}, rest))
        assert found is None or (index == 0 and type(junk) is str)
    for params in (junk, [junk], [[*header["params"][0], junk]]):
        found = accepted(with_header({**header, "params": params}, rest))
        assert found is None or (not params and found == dataclasses.replace(WHOLE, params=()))


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"not deflated", zlib.compress(b""), zlib.compress(b"\xff" * 8), zlib.compress(b"\0" * 100)),
        zlib.compress((4).to_bytes(8, "little") + b"null"),
        zlib.compress((2).to_bytes(8, "little") + b"{}"),
        zlib.compress((100_000).to_bytes(8, "little") + b"[" * 100_000),
        zlib.compress(b"\0" * (MOST_BYTES + 1)),
        zlib.compress(b"whole")[:-3],
    ],
    ids=["empty", "raw", "nothing", "length", "zeros", "null", "object", "nested", "bomb", "cut"],
)
def test_malformed_body(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_MOST_BYTES", MOST_BYTES)
    with pytest.raises(ArtifactError, match="malformed artifact file"):
        Artifact.from_bytes(file_of(body))


def test_random_bytes_anywhere() -> None:
    """Bytes of the file, of the body under a new digest, and of the text before it is deflated."""
    rng = random.Random(7)
    whole, start = WHOLE.to_bytes(), len(artifacts._MAGIC) + 32
    raw = zlib.decompress(whole[start:])
    makers: tuple[Callable[[bytes], bytes], ...] = (bytes, file_of, lambda body: file_of(zlib.compress(body)))
    for source, make in zip((whole, whole[start:], raw), makers, strict=True):
        for _ in range(1500):
            data = bytearray(source)
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            data = data[: rng.randrange(len(data))] if rng.random() < 0.2 else data
            accepted(make(bytes(data)))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: [m],
        lambda m: None,
        *(lambda m, k=key: {x: y for x, y in m.items() if x != k} for key in ("sources", "dsl", "artifacts")),
        *(lambda m, k=key, j=junk: {**m, k: j} for key in ("sources", "dsl", "artifacts") for junk in JUNK),
        *(lambda m, j=junk: {**m, "artifacts": dict.fromkeys(m["artifacts"], j)} for junk in JUNK),
        *(
            lambda m, j=junk: {**m, "artifacts": {x: {"file": j} for x in m["artifacts"]}}
            for junk in (*JUNK, "\0", ".")
        ),
    ],
)
def test_malformed_manifest(change: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest without the artifact is a miss, any other change an ArtifactError."""
    bundle.write(tmp_path, [WHOLE])
    manifest = tmp_path / bundle.MANIFEST
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    bundle._contents.cache_clear()
    monkeypatch.setenv("CUTE_ATTN_BUNDLE", str(tmp_path))
    with contextlib.suppress(ArtifactError):
        assert bundle.find(ToySpec(), "sm_90a") is None


def test_machine_code_of_two_caches_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, cubin in (("before", WHOLE.cubin), ("same", WHOLE.cubin), ("other", WHOLE.cubin + b"x")):
        (tmp_path / folder).mkdir()
        made = dataclasses.replace(WHOLE, cubin=cubin)
        (tmp_path / folder / "a.artifact").write_bytes(made.to_bytes())
    before, same, other = (str(tmp_path / folder) for folder in ("before", "same", "other"))
    assert compare_cubins.main([before, same]) == 0
    assert compare_cubins.main([before, other]) == 1
    assert "sm_90a" in capsys.readouterr().out
    assert compare_cubins.main([before, str(tmp_path)]) == 1, "nothing in common"
