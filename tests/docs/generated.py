"""Rewrite the parts of documents that are made from records and tables: `python -m tests.docs.generated`.

Such a part stands between `<!-- generated: NAME -->` and `<!-- end -->`; `PARTS` says what makes it. A test compares
what is committed with what would be written.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from cute_attn.cli import support
from perf import report, tables
from tests.docs.pages import ROOT, pages

OTHERS = ("behind-prefill", "other-prefill", "behind-decode", "other-decode")
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.S)
SPREAD = re.compile(r" \([\d.]+-[\d.]+\)")
SECTIONS = {  # of docs/performance.md: title and table
    "Prefill": lambda: tables.section_table("prefill"),
    "Decode": lambda: tables.section_table("decode"),
    "Other shapes": lambda: tables.section_table(*OTHERS),
    "Random shapes, lengths on the GPU": tables.random_table,
    "Host time": tables.host_table,
    "Cold start": lambda: tables.cold_start_table("h100"),
}
RECORDS = {  # title, record in perf/results
    "fp8 attention": "2026-11-29_h200_fp8",
    "Hugging Face transformers": "2026-11-23_h200_transformers",
}

ENGINE = "2026-11-28_h200_vllm"  # record in perf/results


def speed() -> str:
    """Return a section per kind of table; no line for what has not been measured."""
    return "\n".join(f"## {title}\n\n{made}" for title, table in SECTIONS.items() if (made := table()))


def records() -> str:
    """Return the longest table of single records, without spread and the reasons why candidates are missing."""
    parts = []
    for title, name in RECORDS.items():
        record = json.loads((tables.RESULTS / f"{name}.json").read_text())
        made = next((table for key, table in report.TABLES.items() if key in record), report.speed_tables)(record)
        longest = max((table for table in made if table.startswith("|")), key=len)
        parts.append(f"### {title}\n\n{tables.source(record)}.\n\n{SPREAD.sub('', longest)}\n")
    return "\n".join(parts)


def engine() -> str:
    """Return the table of tokens per second in vLLM of the first model of the record."""
    return report.engine_tables(json.loads((tables.RESULTS / f"{ENGINE}.json").read_text()))[0]


def engine_graphs() -> str:
    """Return the rows of CUDA graphs of that table."""
    header, rule, *rows = engine().splitlines()
    return "\n".join([header, rule, *(row for row in rows if row.startswith("| graphs"))])


PARTS: dict[str, Callable[[], str]] = {
    "readme": tables.readme_table,
    "summary": tables.summary_table,
    "tables": speed,
    "records": records,
    "latent": lambda: tables.latent_table("h100"),
    "engine": engine_graphs,
    "vllm": engine,
    "support": support.markdown,
}


def rewritten(text: str) -> str:
    """Return the text of a document with its generated parts made anew."""
    return PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}", text)


def named(path: Path) -> list[str]:
    """Return the names of the generated parts of a document."""
    return [match[2] for match in PART.finditer(path.read_text())]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes no arguments
    for path in pages():
        old = path.read_text()
        if (new := rewritten(old)) != old:
            path.write_text(new)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
