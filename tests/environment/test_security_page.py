"""SECURITY.md promises tests; each named one exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_named_test_exists():
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    named = set(re.findall(r"\btest_\w+(?=`)", page))
    assert len(named) >= 12 and named <= defined, named - defined
    files = set(re.findall(r"tests/\w+/\w+\.py", page))
    assert files and all((ROOT / file).is_file() for file in files)
