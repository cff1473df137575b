"""Every behaviour of the hostile server ends as one honest row, in bounded time and with the server's words."""

import math
import time

import hostile
import pytest
from needlework import probes
from needlework.serving import Endpoint


@pytest.fixture(scope="module")
def base():
    with hostile.serve() as address:
        yield address


def _asked(base: str, name: str):
    endpoint = Endpoint(f"{base}/{name}", timeout_s=3)
    return probes.recall(endpoint, lengths=(2048,), depths=(0.5,), controls=False, progress=False).trials.iloc[0]


@pytest.mark.parametrize("name", hostile.BEHAVIOURS)
def test_a_reply_is_an_honest_row(base, name):
    begin = time.monotonic()
    row = _asked(base, name)
    assert row.outcome in hostile.BEHAVIOURS[name][0], (row.outcome, row.error, row.answer)
    assert time.monotonic() - begin < 60  # a behaviour that hangs ends with the stated time, not with the test's
    if row.outcome == "transport":
        assert isinstance(row.error, str) and 0 < len(row.error) < 600


@pytest.mark.parametrize(
    "name", [f"{way}_{form}" for form in hostile.ERRORS for way in ("refused", "in_200", "in_stream")]
)
def test_the_words_of_the_server_are_kept(base, name):
    assert hostile.WORDS in _asked(base, name).error


def test_a_miss_is_seen_where_there_is_one(base):
    row = _asked(base, "refuses")
    assert row.outcome in ("refusal", "garbage") and (
        row.error is None or (isinstance(row.error, float) and math.isnan(row.error))
    )
