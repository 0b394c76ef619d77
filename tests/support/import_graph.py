"""Every import in Python sources, at any depth, and those that a table of permissions does not allow."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


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
