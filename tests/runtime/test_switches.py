"""Environment variables: misspelled ones, the level of the log, and a table that names all that the sources read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cute_attn.runtime import switches
from tests.support import subprocesses

PACKAGE = Path(switches.__file__).parents[1]

SOME_CALLS = """
import torch, cute_attn
q = torch.zeros(1, 2, 64).half()
for sm_scale in (1.0, 1.0, 2.0):
    cute_attn.single_prefill_with_kv_cache(q, q, q, sm_scale=sm_scale)
"""


COMPILES = """
import logging, os, sys
from cute_attn.runtime import artifacts, switches
from tests.support.toy_spec import ToySpec, toy_program
for level in ("DEBUG", "info", "WARNING", "LOUD"):
    print("level", file=sys.stderr)
    os.environ |= {"CUTE_ATTN_LOGLEVEL": level, "CUTE_ATTN_CACHE_DIR": os.environ["DIRECTORY"] + "/" + level}
    switches.configure_log()
    for _ in range(2):
        artifacts.get(ToySpec(), "sm_90a", toy_program)
        artifacts._memory.clear()
"""


def test_every_variable_of_the_sources_is_in_the_table() -> None:
    """And none is there that no source reads."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    named = {name for text in texts.values() for name in re.findall(r"CUTE_ATTN_[A-Z_]*[A-Z]", text)}
    named -= {"CUTE_ATTN_TEST", *switches.OF_TESTS, "CUTE_ATTN_MLA"}  # the last is the name of a backend in vLLM
    assert named == set(switches.VARIABLES)
    for name in switches.VARIABLES:
        symbol = name.removeprefix(switches.PREFIX)
        others = (text for path, text in texts.items() if path.name != "switches.py")
        here = name in (switches.VALIDATE, switches.LOGLEVEL)
        assert here or any(f"switches.{symbol}" in text or name in text for text in others), name


def test_the_table_of_variables_is_the_documented_one() -> None:
    assert switches.markdown() in (subprocesses.ROOT / "docs/observability.md").read_text()


def test_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHEDIR", "x")
    monkeypatch.setenv("CUTE_ATTN_QQ", "x")
    monkeypatch.setenv("CUTE_ATTN_TEST_ANY", "x")
    monkeypatch.setenv("CUTE_ATTN_NVTX", "0")
    assert switches.unknown() == {"CUTE_ATTN_CACHEDIR": "CUTE_ATTN_CACHE_DIR", "CUTE_ATTN_QQ": None}
    with pytest.warns(UserWarning, match="did you mean CUTE_ATTN_CACHE_DIR") as found:
        switches.warn_of_unknown()
    assert len(found) == 2


def test_the_first_use_warns_and_logs_once() -> None:
    env = {"CUTE_ATTN_VALIDAT": "1", "CUTE_ATTN_LOGLEVEL": "info"}
    done = subprocesses.python("-c", SOME_CALLS, **env)
    assert done.returncode == 0
    assert done.stderr.count("CUTE_ATTN_VALIDAT is no variable of cute_attn") == 1
    assert done.stderr.count("INFO: auto: reference for cpu; q float16") == 1


def test_compiles_are_logged_with_their_time(tmp_path: Path) -> None:
    done = subprocesses.python("-c", COMPILES, DIRECTORY=str(tmp_path))
    assert done.returncode == 0, done.stderr
    _, debug, info, warning, loud = (part.splitlines() for part in done.stderr.split("level\n"))
    assert re.search(r"INFO: compiled toy for sm_90a in \d+\.\d\d s: ", debug[0])
    assert "DEBUG: toy for sm_90a comes from the cache: " in debug[1]
    (line,) = info
    assert re.search(r"INFO: compiled toy for sm_90a in \d+\.\d\d s: ", line)
    assert warning == []
    assert "CUTE_ATTN_LOGLEVEL must be one of CRITICAL, ERROR, WARNING, INFO, DEBUG, got 'LOUD'" in loud[0]
