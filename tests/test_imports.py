"""Imports point one way, from the public modules down to `problem` and `errors`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "cute_attn"


class Source(NamedTuple):
    """A module's text and the file that holds it."""

    path: str
    text: str


class Import(NamedTuple):
    """`importer` imports `imported`, both dotted names of modules, at `path`:`line`."""

    importer: str
    imported: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.importer} imports {self.imported}"


def read_package(folder: Path) -> dict[str, Source]:
    """Sources of a package below `folder`, by module name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder.parent)
        parts = relative.with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = Source(str(relative), path.read_text())
    return found


def imports(sources: Mapping[str, Source], among: Mapping[str, Source] | None = None) -> list[Import]:
    """What `sources` import of each other, or of the modules `among`: at any depth of the code, for types only, or by a
    name in a string.
    """
    found, known = set(), among or sources
    for module, source in sources.items():
        package = module if source.path.endswith("__init__.py") else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(source.text)):
            for name in _named(node, package, known):
                target = _existing(name, known)
                if target is not None:
                    found.add(Import(module, target, source.path, getattr(node, "lineno", 0)))
    return sorted(found, key=lambda each: (each.path, each.line, each.imported))


def _named(node: ast.AST, package: str, sources: Mapping[str, Source]) -> Iterator[str]:
    """Dotted names that a node of the syntax tree imports, attributes of modules among them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute("." * node.level + (node.module or ""), package)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        module = node.value.partition(":")[0]  # "package.module:attribute"
        if "." in module and module in sources:
            yield module
    elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__") and node.args:
        yield _absolute(_literal_prefix(node.args[0]), package)


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _literal_prefix(argument: ast.expr) -> str:
    """What is known of a string without running the code: "a.b." of f"a.b.{name}"."""
    if isinstance(argument, ast.JoinedStr) and argument.values:
        argument = argument.values[0]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ""


def _absolute(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    base = package.split(".")
    return ".".join([*base[: len(base) - level + 1], name[level:]]).rstrip(".")


def _existing(name: str, sources: Mapping[str, Source]) -> str | None:
    """The module that `name` is, or is in; None for modules of other packages."""
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return name or None


def against(
    found: list[Import], folder: Callable[[str], str], allowed: Mapping[str, frozenset[str] | set[str]]
) -> list[str]:
    """Imports from a folder into another that `allowed` does not list for it."""
    return [
        f"{each}: {folder(each.importer)} may not import {folder(each.imported)}"
        for each in found
        if folder(each.importer) != folder(each.imported)
        and folder(each.imported) not in allowed.get(folder(each.importer), ())
    ]


def cycles(found: list[Import], folder: Callable[[str], str]) -> list[str]:
    """The first import from each folder into another from which imports lead back."""
    arrows: dict[str, set[str]] = {}
    for each in found:
        arrows.setdefault(folder(each.importer), set()).add(folder(each.imported))

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for following in arrows.get(waiting.pop(), set()) - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    closure = {start: reached(start) for start in arrows}
    lines: dict[tuple[str, str], str] = {}
    for each in found:
        arrow = a, b = folder(each.importer), folder(each.imported)
        if a != b and a in closure.get(b, ()):
            lines.setdefault(arrow, f"{each}: {a} and {b} are in a cycle")
    return list(lines.values())


SOURCES = read_package(PACKAGE)
FAMILIES = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/spec.py"))

# The root: modules under FlashInfer's names, and the types that all stages share.
PUBLIC_MODULES = (
    *("prefill", "decode", "mla", "attention", "cascade", "sparse", "page", "concat_ops", "quantization", "utils"),
    "flash_mla",
)
SHARED_MODULES = ("problem", "errors")

# Files of plain data, which need no DSL: of a kernel family, and of the blocks that families share.
SPEC_FILES = ("spec", "tiles", "smem", "default_specs")
BLOCK_DATA = ("smem_map", "attention_spec", "tiles", "default_specs")
TYPES = {"problem", "errors"}
SPECS = {f"kernels.{family}.spec" for family in FAMILIES}
KERNELS = {f"kernels.{family}.kernel" for family in FAMILIES}
HOSTS = {f"kernels.{family}.host" for family in FAMILIES}

# What each folder may import beside itself. Public modules are one folder here, and a kernel family is four: `spec`
# (`SPEC_FILES`), `parts`, `kernel` (its other files) and `host`.
ALLOWED: dict[str, set[str]] = {
    "__main__": {"cli"},
    "cli": {
        "cute_attn",
        "observe",
        "public",
        "xqa",
        "dispatch",
        "kernels.catalog",
        "kernels.programs",
        "kernels.host",
        *SPECS,
    }
    | {"request", "schedule", "reference", "emulator", "runtime", *TYPES},
    "integrations": {"runtime", "cute_attn", "public", "xqa", "wrappers", "ops", "dispatch", "request", *TYPES},
    "cute_attn": {"exports", "observe"},
    "observe": {"exports", "public", "xqa", "ops", "runtime", *TYPES},
    "exports": {"public", "xqa", "dispatch", *TYPES},
    "public": {"xqa", "wrappers", "ops", "dispatch", "request", "reference", "runtime", *TYPES},
    "xqa": {"wrappers", "ops", "dispatch", "request", "reference", "runtime", *TYPES},
    "wrappers": {"ops", "dispatch", "kernels.host", "request", "schedule", "runtime", *TYPES},
    "ops": {"request", "runtime", *TYPES},
    "dispatch": {
        "kernels.host",
        "kernels.rules",
        *HOSTS,
        *SPECS,
        "request",
        "schedule",
        "reference",
        "emulator",
        "runtime",
        *TYPES,
    },
    "kernels.host": {
        "kernels.programs",
        "kernels.formats",
        "kernels.rules",
        "kernels.blocks.data",
        "kernels.combine.spec",
        "kernels.plan.spec",
    }
    | {"request", "schedule", "emulator", "runtime", *TYPES},
    "kernels.catalog": {*SPECS, "kernels.formats", "runtime"},
    "kernels.programs": {*SPECS, *KERNELS, "runtime"},
    "kernels.blocks": {"kernels.blocks.data", "kernels.formats", "schedule", "runtime"},
    "kernels.blocks.data": {"kernels.formats", "kernels.rules", "runtime"},
    "kernels.formats": set(),
    "kernels.rules": set(),
    "request": {"schedule", *TYPES},
    "schedule": {*TYPES},
    "reference": {"request", *TYPES},
    "emulator": {"runtime", "errors"},
    "runtime": {*TYPES},
    "problem": {"errors"},
    "errors": set(),
}
for _family in FAMILIES:
    _own = f"kernels.{_family}"
    _data = {f"{_own}.spec", "kernels.blocks.data", "kernels.formats", "kernels.rules", "schedule", "runtime"}
    ALLOWED |= {
        f"{_own}.spec": _data - {f"{_own}.spec"},
        f"{_own}.parts": {*_data, "kernels.blocks"},
        f"{_own}.kernel": {*_data, "kernels.blocks", f"{_own}.parts"},
        f"{_own}.host": {*_data, "kernels.host", "request", "emulator", *TYPES},
    }

# Latent attention is decode with a kernel of its own: partition, merge and grids are those of XQA.
for _kind in ("spec", "parts", "kernel", "host"):
    ALLOWED[f"kernels.mla.{_kind}"] |= {"kernels.xqa.spec"}
ALLOWED["kernels.mla.parts"] |= {"kernels.xqa.parts"}
ALLOWED["kernels.mla.kernel"] |= {"kernels.xqa.parts"}
ALLOWED["kernels.mla.host"] |= {"kernels.xqa.host"}


def folder(module: str) -> str:
    """The name that `ALLOWED` has for the folder of a module."""
    _, *parts = module.split(".")
    if not parts:
        return "cute_attn"
    if parts[0] in PUBLIC_MODULES:
        return "public"
    if parts[0] != "kernels" or len(parts) == 1:
        return parts[0]
    if parts[1] == "blocks" and parts[-1] in BLOCK_DATA:
        return "kernels.blocks.data"
    if parts[1] not in FAMILIES or len(parts) == 2:
        return ".".join(parts[:2])
    kind = parts[2] if parts[2] in ("parts", "host") else "spec" if parts[-1] in SPEC_FILES else "kernel"
    return f"kernels.{parts[1]}.{kind}"


# ---- the package


def test_imports_point_one_way() -> None:
    lines = against(imports(SOURCES), folder, ALLOWED)
    assert not lines, "\n".join(["imports against the direction:", *lines])


def test_no_folders_import_each_other() -> None:
    lines = cycles(imports(SOURCES), folder)
    assert not lines, "\n".join(["imports in cycles:", *lines])


# Files from which imports lead back to them, for types or within functions. Files may only leave this list.
IN_CYCLES = {
    "integrations.transformers": {"forward", "ops"},
    "emulator": {"access", "isa.order", "machine", "program", "timeline", "unwaited", "warp_batch"},
}


def test_no_other_files_import_each_other() -> None:
    lines = cycles(imports(SOURCES), lambda module: module)
    known = {f"cute_attn.{folder}.{name}" for folder, names in IN_CYCLES.items() for name in names}
    assert {line.split(": ")[1].split(" imports ")[0] for line in lines} == known, "\n".join(lines)


def test_the_table_has_no_cycle() -> None:
    arrows = {name: Source(name, "\n".join(f"import {other}" for other in ALLOWED[name])) for name in ALLOWED}
    assert set().union(*ALLOWED.values()) <= set(ALLOWED)
    assert cycles(imports(arrows), lambda module: module) == []


def test_every_folder_has_a_rule() -> None:
    empty = {module for module, source in SOURCES.items() if not source.text.strip()}
    assert {folder(module) for module in SOURCES.keys() - empty} <= set(ALLOWED)


def test_the_root_holds_public_modules() -> None:
    names = {path.stem for path in PACKAGE.glob("*.py")}
    assert names == {"__init__", "__main__", "exports", *PUBLIC_MODULES, *SHARED_MODULES}


# ---- the check itself, on modules with another text


@pytest.mark.parametrize(
    ("module", "text", "line", "imported"),
    [
        ("request.decode", "import cute_attn.kernels.xqa.spec", 1, "kernels.xqa.spec"),
        ("xqa.decode", "def f():\n    from cute_attn.kernels.xqa.host import family", 2, "kernels.xqa.host.family"),
        (
            "kernels.blocks.softmax",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cute_attn.kernels.fa2.parts.mma import S",
            3,
            "kernels.fa2.parts.mma",
        ),
        ("problem", "import importlib\nimportlib.import_module('cute_attn.request.single')", 2, "request.single"),
        ("schedule.batch", "NAMES = {'a': 'cute_attn.emulator.adapter:run'}", 1, "emulator.adapter"),
        ("runtime.launch", "name = 'x'\n__import__(f'cute_attn.wrappers.{name}')", 2, "wrappers"),
        ("runtime.launch", "import_module('..dispatch.select', __package__)", 1, "dispatch.select"),
        ("runtime.launch", "class C:\n    def f(self):\n        from ..dispatch import select", 3, "dispatch.select"),
        ("errors", "from . import problem", 1, "problem"),
        ("errors", "from cute_attn import explain", 1, ""),
        ("kernels.fa3.host.family", "from cute_attn.kernels.fa2.host import family", 1, "kernels.fa2.host.family"),
        ("kernels.fa3.kernel", "from cute_attn.kernels.fa3.host import family", 1, "kernels.fa3.host.family"),
        ("kernels.fa2.parts.mma", "from cute_attn.kernels.fa2 import kernel", 1, "kernels.fa2.kernel"),
        ("kernels.fa2.spec", "from cute_attn.kernels.fa2.kernel import Fa2Program", 1, "kernels.fa2.kernel"),
        ("kernels.catalog", "from cute_attn.kernels.combine import kernel", 1, "kernels.combine.kernel"),
        ("kernels.host.gpu", "from cute_attn.kernels.fa2.spec import Tile", 1, "kernels.fa2.spec"),
        ("kernels.blocks.smem_map", "from cute_attn.kernels.blocks import ptx", 1, "kernels.blocks.ptx"),
    ],
)
def test_a_back_arrow_is_seen(module: str, text: str, line: int, imported: str) -> None:
    name, path = f"cute_attn.{module}", SOURCES[f"cute_attn.{module}"].path
    lines = against(imports({name: Source(path, text)}, SOURCES), folder, ALLOWED)
    target = ".".join(["cute_attn", *imported.split()])
    assert lines == [f"{path}:{line}: {name} imports {target}: {folder(name)} may not import {folder(target)}"]
