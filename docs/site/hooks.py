"""Hooks of mkdocs: files outside of docs/ become pages, and links to them follow.

On GitHub every page is read where it lies, so links are relative to files. The site has no files outside of docs/:
README.md becomes its first page, other documents pages beside it, examples pages with their source.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "cute_attn/emulator/README.md": "kernels_of_your_own.md",
}
LANGUAGES = {".py": "python", "": "dockerfile"}

LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)#\s:]+)(?P<after>#[^)\s]*)?(?=\))")
PICTURE = re.compile(
    r'<picture>.*?srcset="(?P<dark>[^"]+)".*?alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)".*?</picture>', re.S
)


def examples() -> dict[str, str]:
    """Return the page of every example, by its path in the repository."""
    paths = [path for path in sorted((ROOT / "examples").rglob("*")) if path.is_file() and path.suffix in LANGUAGES]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return {name: f"{name.removesuffix('.py')}.md" for name in names}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages that mkdocs.yml does not name: examples, those of docs/kernels, and any other."""
    sections = {name: pages for section in config.nav or [] for name, pages in section.items()}
    named = set(_names(sections))
    docs = Path(config.docs_dir)
    others = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    for name in others:
        if name not in named:
            sections["Kernels" if name.startswith("kernels/") else "Start"].append(name)
    sections["Guide"].append({"Examples": list(examples().values())})
    return config


def _names(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [name for item in (nav.values() if isinstance(nav, dict) else nav) for name in _names(item)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ as generated pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for source, page in examples().items():
        path = ROOT / source
        text = f"---\ntitle: {source}\n---\n\n# `{source}`\n\n```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site, and show one picture per colour scheme of the site."""
    target = page.file.src_uri
    source = {page: source for source, page in {**PAGES, **examples()}.items()}.get(target, f"docs/{target}")
    if source not in PAGES and not source.startswith("docs/"):
        return markdown  # the text of an example
    moved = {**PAGES, **examples()}

    def followed(path: str) -> str:
        where = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        where = f"{where}/README.md" if (ROOT / where).is_dir() else where
        where = moved.get(where, where.removeprefix("docs/"))
        return posixpath.relpath(where, posixpath.dirname(target) or ".")

    def picture(match: re.Match[str]) -> str:
        shown = ((followed(match[theme]), theme) for theme in ("light", "dark"))
        return "\n".join(f"![{match['alt']}]({path}#only-{theme})" for path, theme in shown)

    markdown = LINK.sub(lambda m: f"{m['before']}{followed(m['path'])}{m['after'] or ''}", markdown)
    return PICTURE.sub(picture, markdown)
