"""Budgets that keep the code readable."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import cute_attn
import cute_attn.flash_mla
import cute_attn.xqa
from tests.docs.pages import pages

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 12

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("cute_attn", "examples", "perf", "tests") for path in (ROOT / folder).rglob("*.py"))
PACKAGE = [path for path in FILES if ROOT / "cute_attn" in path.parents]

# Numbers of today as limits: they fall and never rise.
MAX_HOST_LINES = 18_814
HOST_FOLDERS = ("wrappers", "request", "dispatch", "schedule", "xqa", "runtime", "ops")  # with the root and every host/
MAX_PERF_LINES, MAX_PERF_FILES, MAX_RECORDS = 5_000, 25, 20
MAX_TEST_LINES = 37_839
MAX_MEMOS = 29  # functions that `lru_cache`, `cache` or `once` keeps the results of
UNBOUNDED_MEMOS = {
    "integrations/transformers/patterns.py: _templates",
    "runtime/cache.py: source_fingerprint",
    "runtime/dsl.py: version",
    "runtime/launch.py: load_driver",
}
MAX_LINES_OF_ARCHITECTURE = 150
MAX_LINES_OF_ALL_DOCUMENTS = 3_600

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]


def code_lines(function: Function) -> int:
    """Lines from `def` to the end, without the docstring: text about shapes and errors is no complexity."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def public_methods(path: Path) -> set[str]:
    """Methods of the classes that users call: their signatures are FlashInfer's."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    methods = [(c.name, f.name) for c in classes for f in c.body if isinstance(f, Function)]
    return {f for c, f in methods if c in cute_attn.__all__ and (not f.startswith("_") or f == "__init__")}


def offenders(files: Sequence[Path], found: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """What is `found` in each file, by the file's name; files where nothing is are left out."""
    return {str(path.relative_to(ROOT)): what for path in files if (what := list(found(path)))}


def test_file_length() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert offenders(FILES, lambda path: [f"{lengths[path]} lines"] * (lengths[path] > MAX_FILE_LINES)) == {}


def long_functions(path: Path) -> Iterator[str]:
    return (f"{f.name}: {code_lines(f)}" for f in functions(path) if code_lines(f) > MAX_FUNCTION_LINES)


def wide_functions(path: Path) -> Iterator[str]:
    wide = [f for f in functions(path) if parameters(f) > MAX_PARAMETERS]
    exempt = {*cute_attn.__all__, *cute_attn.xqa.__all__, *cute_attn.flash_mla.__all__}
    exempt |= public_methods(path) if wide else set()
    return (f"{f.name}: {parameters(f)}" for f in wide if f.name not in exempt)


@pytest.mark.parametrize("found", [long_functions, wide_functions])
def test_functions(found: Callable[[Path], Iterable[str]]) -> None:
    assert offenders(FILES, found) == {}


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros"),
}
WITH_DTYPE_OF_VALUES = {"arange", "as_tensor", "asarray", "randint", "randperm", "tril_indices", "triu_indices"}


def implicit_defaults(text: str) -> list[str]:
    """Calls of torch's factories, and partials of them, that take torch's default device or dtype."""
    found = []
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        of_partial = call.args[:1] if ast.unparse(call.func) in ("partial", "functools.partial") else []
        for called in (call.func, *of_partial):
            torch, _, factory = ast.unparse(called).rpartition(".")
            needed = {"device"} if factory in WITH_DTYPE_OF_VALUES else {"device", "dtype"}
            if torch == "torch" and factory in FACTORIES and needed - {keyword.arg for keyword in call.keywords}:
                found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


def test_tensors_are_made_on_no_default_device() -> None:
    """A user's `torch.set_default_device` and `torch.set_default_dtype` are not for the library's tensors."""
    assert offenders(PACKAGE, lambda path: implicit_defaults(path.read_text())) == {}


def test_what_takes_a_default() -> None:
    for taking in (
        "torch.zeros(1, dtype=d)",
        "torch.tensor([1.0], device=d)",
        "functools.partial(torch.empty, dtype=d)",
    ):
        assert implicit_defaults(taking)
    for taking_none in ("x.new_zeros(1)", "torch.arange(3, device=d)", "torch.zeros_like(x)", "partial(f, torch.rand)"):
        assert not implicit_defaults(taking_none)


# Work left for later, and phrases that one must read twice; with classes of one letter, as this file is read too.
PHRASES = re.compile(
    r"TO[D]O|FIX[M]E|XX[X]|HA[C]K|\b[Aa]s[ ]ever\b|what[ ]told|told[ ]so|asks?[ ]for[ ]nothing|had[ ]a[ ]part[ ]in"
)


def test_phrases() -> None:
    assert offenders([*FILES, *pages()], lambda path: PHRASES.findall(path.read_text())) == {}


def variables_named_of(path: Path) -> Iterator[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name | ast.arg)]
    return (f"line {node.lineno}" for node in nodes if getattr(node, "id", getattr(node, "arg", "")) == "of")


def test_no_variable_is_a_preposition() -> None:
    assert offenders(FILES, variables_named_of) == {}


def is_host_code(path: Path) -> bool:
    parts = path.relative_to(ROOT / "cute_attn").parts[:-1]
    return not parts or parts[0] in HOST_FOLDERS or "host" in parts


def test_numbers_of_lines() -> None:
    tests, perf = ([path for path in FILES if ROOT / folder in path.parents] for folder in ("tests", "perf"))
    host = [path for path in PACKAGE if is_host_code(path)]
    lines = [sum(len(path.read_text().splitlines()) for path in paths) for paths in (host, perf, tests)]
    assert all(map(operator.le, lines, (MAX_HOST_LINES, MAX_PERF_LINES, MAX_TEST_LINES))), f"{lines} lines"
    assert len(perf) <= MAX_PERF_FILES
    assert len(list((ROOT / "perf" / "results").iterdir())) <= MAX_RECORDS


def test_lines_of_documents() -> None:
    lines = {page.relative_to(ROOT).as_posix(): len(page.read_text().splitlines()) for page in pages()}
    assert {"README.md", "docs/architecture.md", "docs/kernels/fa3.md"} <= set(lines)
    assert lines["docs/architecture.md"] <= MAX_LINES_OF_ARCHITECTURE
    longest = sorted(lines, key=lines.__getitem__, reverse=True)[:5]
    assert sum(lines.values()) <= MAX_LINES_OF_ALL_DOCUMENTS, f"{sum(lines.values())} lines; the longest: {longest}"


# The names that count are functools': nothing imports them from it.
MEMO = re.compile(r"functools\.(?:lru_)?cache\b|@once\b|(?<!def )\bonce\(|from functools import .*cache")
UNBOUNDED = re.compile(r"functools\.(?:cache\b|lru_cache\((?:maxsize=)?None\b)(?:.*\n(?: *@.*\n)* *def (\w+))?")


def test_number_of_memos() -> None:
    texts = {path.relative_to(ROOT / "cute_attn").as_posix(): path.read_text() for path in PACKAGE}
    unbounded = {f"{path}: {name}" for path, text in texts.items() for name in UNBOUNDED.findall(text)}
    assert unbounded == UNBOUNDED_MEMOS
    assert sum(len(MEMO.findall(text)) for text in texts.values()) <= MAX_MEMOS


def test_one_place_assigns_the_plan() -> None:
    wrappers = [path.read_text() for path in PACKAGE if path.parent.name == "wrappers"]
    assert sum(len(re.findall(r"^[^=(\n]*\._plan\b[^=(\n]*=[^=]", text, re.MULTILINE)) for text in wrappers) == 1
