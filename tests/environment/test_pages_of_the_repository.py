"""What the pages of the repository point at is there: links, and files named in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [p for pattern in ("*.md", "docs/*.md", "tools/*.md") for p in sorted(ROOT.glob(pattern))]


def missing(page: Path, text: str) -> list[str]:
    """Relative links, and `code` that is a path below one of our folders, that lead nowhere."""
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    linked = [(page.parent / t, t) for t in links if t and not re.match(r"https?://|mailto:", t)]
    named = re.findall(r"`((?:lib|tests|docs|tools|data|benchmarks|notebooks)/[\w./-]+)`", text)
    return [t for path, t in [*linked, *((ROOT / n, n) for n in named)] if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_named_files_are_there(page: Path) -> None:
    assert missing(page, "[a](no.md) `lib/needlework/no.py` [b](https://example.org) `data/x y`") == [
        "no.md",
        "lib/needlework/no.py",
    ]
    assert missing(page, page.read_text("utf-8")) == []


def test_the_readme_links_each_notebook_and_the_index_each_page() -> None:
    readme, index = (ROOT / "README.md").read_text(), (ROOT / "docs/README.md").read_text()
    assert all(f"(notebooks/{twin.stem}.ipynb)" in readme for twin in (ROOT / "notebooks/src").glob("[0-9]*.py"))
    assert all(f"({page.name})" in index for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")
    assert len(readme.split()) < 1000


def test_each_script_of_tools_has_its_line() -> None:
    page = (ROOT / "tools/README.md").read_text()
    assert [p.name for p in (ROOT / "tools").glob("*.py") if f"`{p.name}`" not in page] == []


def test_the_workflow_runs_commands_that_the_makefile_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    jobs = workflow["jobs"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    parts = jobs["part"]["strategy"]["matrix"]["part"]
    assert {f"test-{part}" for part in parts} | {"setup", "test-engines"} <= targets
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text())["body"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
