"""A small workbook in a temporary folder: two twins, one incident with data, nothing of the real one."""

from __future__ import annotations

from pathlib import Path

import needlework_press  # noqa: F401  before anything that imports nbformat: it spares seconds
import pytest

FIRST = """\
# %% [markdown]
# # Count the words
#
# How many words are there?
#
# The mean of $n$ values is
#
# $$\\\\bar{x} = \\\\frac{1}{n} \\\\sum_i x_i$$

# %%
from needlework import workbook

start = workbook.start("Count the words")

# %% tags=["parameters"]
incident = "one"
limit = 3

# %%
words = (workbook.incident(incident).path / "words.txt").read_text().split()
workbook.tables.table(__import__("pandas").DataFrame({"word": words[:limit]}), "Words")

# %%
fig, ax = workbook.figures.new()
ax.plot([1, 2, 3])
workbook.figures.show(fig, alt="A line that rises from one to three over three points.")

# %%
object()

# %% [markdown]
# ## Next
#
# [01_end](01_end.ipynb)
""".replace("\\\\", "\\")
SECOND = """\
# %% [markdown]
# # End here
#
# Is this all?

# %%
from needlework import workbook

workbook.explorers.Slider("size", {1: "small", 2: "large"}, note="Two sizes.")

# %%
evidence = ["e one", "e two"]
workbook.summary(symptom="s is seen", verdict="v is guilty", evidence=evidence, confidence="high", next_step="n")
"""
PLAIN = """\
# %% [markdown]
# # Count up
#
# How far?

# %% tags=["parameters"]
incident = "one"
limit = 3

# %%
print(limit)
"""


@pytest.fixture
def plain(small: Path) -> Path:
    """The small workbook and `05_plain`, which imports nothing: for what no notebook's content is a part of."""
    (small / "notebooks/src/05_plain.py").write_text(PLAIN, "utf-8")
    return small


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "notebooks" / "src").mkdir(parents=True)
    (tmp_path / "notebooks/src/00_words.py").write_text(FIRST, "utf-8")
    (tmp_path / "notebooks/src/01_end.py").write_text(SECOND, "utf-8")
    for name in ("context-loss", "one"):
        (tmp_path / "data/incidents" / name).mkdir(parents=True)
    (tmp_path / "data/incidents/one/words.txt").write_text("alpha beta gamma delta")
    (tmp_path / "data/incidents/one/incident.toml").write_text('[incident]\ntitle = "The <b>first</b> one"\n')
    monkeypatch.setenv("NEEDLEWORK_ROOT", str(tmp_path))
    for name in ("NEEDLEWORK_TARGET", "NEEDLEWORK_INCIDENT", "NEEDLEWORK_API_KEY", "NEEDLEWORK_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
