"""The site builds without a warning: links and anchors, pages that the navigation lacks, docstrings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra `docs`)")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (extra `docs`)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def test_pages_are_there(site: Path) -> None:
    pages = "index.html", "contributing.html", "changelog.html", "guide/batches.html", "search/search_index.js"
    assert all((site / page).exists() for page in pages)


def test_parameters_of_the_api_are_lists(site: Path) -> None:
    text = (site / "api/single.html").read_text()
    assert "<li><code>window_left</code>:" in text.replace("<p>", "")
    assert "----" not in text
    for page, forms in (("batches", 3), ("sparse", 2)):
        text = (site / f"api/{page}.html").read_text()
        assert text.count("Where they differ, the batch is scheduled again.") == forms
        assert ("without <code>causal</code>" in text) is (page == "batches")


def test_pictures_follow_the_scheme_of_the_site(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert 'src="pictures/prefill_light.svg#only-light"' in text
    assert 'src="pictures/prefill_dark.svg#only-dark"' in text
