"""What a server says reaches journal, notebook and report only without the secrets in it."""

from __future__ import annotations

from pathlib import Path

from mock_endpoint import mock_endpoint
from needlework_press import cli
from planted import KINDS, gone, planted

ASK = """\
# %% [markdown]
# # Ask a server that tells secrets
#
# Does any of them stay?

# %%
from needlework import probes, workbook

start = workbook.start("Ask")

# %% tags=["parameters"]
incident = "one"
target = ""

# %%
with workbook.open_target(target) as opened:
    found = probes.recall(opened.first, "RUN", lengths=(96,), depths=(0.5,), repeats=REPEATS, max_tokens=400)
print(found)
workbook.tables.table(found.trials[["answer", "error", "outcome"]], "All of it")
"""


def test_a_server_that_tells_secrets_leaves_none_in_journal_notebook_and_report(small: Path) -> None:
    cases = planted()
    assert len(KINDS) >= 25 and len({secret for _, secret, _ in cases}) >= 200
    sentences = [sentence for _, _, sentence in cases]
    told: list[str] = []

    def leak(question: str, value: str) -> str:  # every third request, four secrets an answer
        mine = sentences[len(told) :][:4]
        told.extend(mine)
        return "\n".join([value, *mine])

    def fail(ordinal: int) -> tuple[int, str] | None:  # the others, two secrets an error
        first = 2 * (ordinal - ordinal // 3 - 1)
        return (500, " ; ".join(sentences[first : first + 2])) if ordinal > 0 and ordinal % 3 else None

    run = small / "run"
    with mock_endpoint(answer_instead=leak, fail=fail) as mock:
        mock.model = "/home/felicia/models/m1"
        text = ASK.replace("RUN", str(run)).replace("REPEATS", str(3 * len(cases) // 4))
        (small / "notebooks/src/00_words.py").write_text(text)
        assert cli.run(["00", "--target", mock.base_url]) == 0
    assert told == sentences, "not every secret was told"
    places = [*run.glob("*.json*"), *small.glob("build/*/*.ipynb"), *small.glob("report/*/*.html")]
    assert len(places) == 5  # manifest, trials, counts, notebook, report
    for place in places:
        page = place.read_text()
        assert [kind for kind, secret, _ in cases if not gone(secret, page)] == [], place.name
        assert "felicia" not in page and mock.base_url not in page
    assert "HTTP 500" in page and "exact" in page
