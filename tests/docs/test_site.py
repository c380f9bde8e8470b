"""The documentation site: it builds without a broken link, and has a page for every command and every section."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vorox.core.schema import RunConfig

ROOT = Path(__file__).parents[2]


def test_the_home_page_links_every_page_of_the_navigation() -> None:
    pages = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert len(pages) > 25
    assert pages - set(re.findall(r"\]\((\w+\.md)\)", home)) == {"index.md"}


@pytest.mark.slow
def test_the_site_builds_with_its_reference(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "not included in the" not in built.stderr  # a page without an entry in the navigation
    reference = tmp_path / "site" / "reference"
    assert "data build" in (reference / "commands" / "data" / "index.html").read_text(encoding="utf-8")
    checkpoints = (reference / "commands" / "checkpoints" / "index.html").read_text(encoding="utf-8")
    assert "Remove checkpoints of a run that is not running" in checkpoints  # a whole sentence in the list of commands
    for section in RunConfig.model_fields:
        assert (reference / "settings" / section / "index.html").is_file(), section
    assert "optimizer.lr" in (reference / "settings" / "optimizer" / "index.html").read_text(encoding="utf-8")
