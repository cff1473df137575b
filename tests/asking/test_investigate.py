"""An investigation of endpoints whose loss is known: what is asked, what is foretold, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mock_endpoint import mock_endpoint
from needlework.analysis.predictions import judge
from needlework.evidence.plan import load_plan
from needlework.probes import switch
from needlework.probes.bench.journal import Journal
from needlework.probes.bench.trial import Stopped
from needlework.probes.investigate import investigate
from needlework.serving import Endpoint
from simulate import course, judged


def beyond_3000(n, place, cached, ordinal):
    return n > 3000


def test_an_edge_is_found_foretold_and_read_back(tmp_path):
    with mock_endpoint(lose=beyond_3000) as mock:
        endpoint = Endpoint(mock.base_url)
        found = investigate(endpoint, tmp_path / "run", window=8192, requests=160)
        assert found.diagnosis.laws[0].name == "length" and found.finished and found.diagnosis.predictions.passed
        assert found.predictions[-1].passed and found.predictions[-1].as_predicted >= 22
        assert len(found.trials) <= 160 and found.trials["prompt_tokens"].astype(int).mod(64).nunique() > 24
        sent = len(mock.chats)
        again = investigate(endpoint, tmp_path / "run", window=8192, requests=160, confirm=lambda budget: 1 / 0)
        assert len(mock.chats) == sent and str(again) == str(found)


def test_a_stopped_investigation_says_so_and_goes_on_as_if_it_had_not(tmp_path):
    with mock_endpoint(lose=beyond_3000) as mock:
        endpoint, run = Endpoint(mock.base_url), tmp_path / "run"
        part = investigate(endpoint, run, window=8192, requests=160, say=Impatient(1))
        assert not part.finished and "UNFINISHED" in str(part)
        sent = len(mock.chats)
        budgets = []
        found = investigate(endpoint, run, window=8192, requests=160, confirm=lambda b: budgets.append(b) or True)
        assert found.finished and budgets[0].expected <= 160 - sent
        plan = [json.loads(line) for line in (run / "plan.jsonl").read_text().splitlines()]
        assert [r["record"] for r in plan].count("screen") == 1 and plan[-1]["record"] == "end"
    rows = found.trials
    assert rows["trial_id"].is_unique


class Impatient:
    """Stops at the n-th decision, as a limit does."""

    def __init__(self, n):
        self.left = n

    def __call__(self, sentence):
        self.left -= 1
        if self.left < 0:
            raise Stopped("somebody pulled the plug")


def test_nothing_is_sent_before_the_budget_is_confirmed(tmp_path):
    with mock_endpoint() as mock:
        with pytest.raises(Stopped, match="nothing was sent"):
            investigate(Endpoint(mock.base_url), tmp_path / "run", confirm=lambda budget: False)
        assert not mock.requests


@pytest.mark.parametrize(("dialect", "said"), [("openai", "no window is stated"), ("vllm", "for 131,072 the 40,000")])
def test_how_far_prompts_go_is_said(dialect, said):
    with mock_endpoint(dialect) as server:
        found = investigate(Endpoint(server.base_url), requests=12, tokens=40_000)
    (told,) = [warning for warning in found.warnings if "prompts of at most" in warning]
    longest = int(told.split()[4].replace(",", ""))
    assert said in told and found.trials["target_tokens"].max() <= longest < 40_000


def test_arms_get_the_same_bytes_and_a_folder_of_other_arms_is_refused(tmp_path):
    with mock_endpoint() as whole, mock_endpoint(lose=beyond_3000) as split:
        arms = {"combined": Endpoint(whole.base_url), "pd": Endpoint(split.base_url)}
        found = investigate(arms, tmp_path / "run", window=8192, requests=160)
        assert found.diagnosis.laws[0].name == "arm=pd: length"
        both = found.trials[found.trials["label"] == "plain"].groupby("seed")["prompt_sha"].agg(["nunique", "count"])
        assert (both["nunique"] == 1).all() and (both["count"] == 2).sum() >= 6
        with pytest.raises(ValueError, match="an investigation of combined, pd with seed 0; go on with that"):
            investigate({"single": arms["pd"]}, tmp_path / "run", window=8192, requests=400)


def test_predictions_stand_in_the_journal_before_their_prompts_are_sent():
    order = []
    one = course("edge 4096", 3, record=lambda entry: order.append(entry))
    send = one.ask
    one.ask = lambda step: order.append(step) or send(step)
    one.run()
    at = next(i for i, entry in enumerate(order) if isinstance(entry, dict) and entry["record"] == "predictions")
    told = {p["trial_id"] for p in order[at]["prompts"]}
    asked = [
        {row["trial_id"] for row in step.foreseen(one.space)} & told for step in order[:at] if hasattr(step, "kind")
    ]
    assert len(told) >= 24 and not any(asked), "fresh prompts"
    assert {p["expects"] for p in order[at]["prompts"]} == {"lost", "found"}
    assert one.ended == "fresh prompts came out as predicted"


def test_a_law_that_foretells_wrongly_is_refuted():
    """The law holds while it is found out and not when it is tested: the verdict must not be the law."""
    one = course("edge 4096", 3)
    send = one.ask

    def ask(step):
        rows = send(step)
        if any(r["record"] == "predictions" for r in one.decided) or one.sent > 62:
            for row in rows:
                row["outcome"] = "exact"
        return rows

    one.ask = ask
    one.run()
    assert one.ended == "a prediction failed" and one.rounds[-1].passed is False and one.rounds[-1].broken
    assert "refuted" in str(one.rounds[-1])


@pytest.mark.parametrize("name", ["place 4096", "warm 2048", "from 100 on", "pd last chunk 8192"])
def test_a_planted_law_is_found_and_foretells(name):
    right, sure, requests, law, _, ended = judged(name, 1001)
    assert right and sure and requests <= 200, (law, requests, ended)


def test_healthy_ends_when_every_condition_is_bounded():
    one = course("healthy", 5)
    one.run()
    assert "a loss of more than" in one.ended and 150 <= one.sent <= 300


def prediction(p, expects, n, start=0):
    return [{"trial_id": str(start + i), "p_loss": p, "expects": expects} for i in range(n)]


def came(outcomes):
    import pandas as pd

    return pd.DataFrame({"trial_id": [str(i) for i in range(len(outcomes))], "outcome": outcomes})


@pytest.mark.parametrize(
    ("p", "lost", "passed"), [(0.95, 12, True), (0.95, 11, True), (0.95, 6, False), (0.2, 2, True), (0.2, 0, False),
                              (0.2, 9, False), (0.95, 0, False)],
)  # fmt: skip
def test_a_law_is_held_to_its_own_rate(p, lost, passed):
    record = {"law": "x", "prompts": prediction(p, "lost", 12) + prediction(0.01, "found", 12, 12)}
    found = judge(record, came(["refusal"] * lost + ["exact"] * (24 - lost)))
    assert found.passed is passed


def test_what_was_not_answered_predicts_nothing():
    record = {"law": "x", "prompts": prediction(0.9, "lost", 12) + prediction(0.01, "found", 12, 12)}
    assert judge(record, came(["transport"] * 12 + ["exact"] * 12)).passed is None
    with pytest.raises(ValueError, match="names no law"):
        judge({"prompts": []}, came([]))


def test_a_deployment_that_cannot_run_beside_the_first_gets_its_bytes(tmp_path):
    run = tmp_path / "run"
    with mock_endpoint(lose=beyond_3000, dialect="openai") as split:  # no tokenizer: lengths are learnt on the way
        investigate({"pd": Endpoint(split.base_url)}, run, window=8192, requests=110)
        with mock_endpoint(dialect="openai") as whole:
            assert switch.measure("pd", "combined", Endpoint(whole.base_url), run)
            sent = len(whole.chats)
            assert not switch.measure("pd", "combined", Endpoint(whole.base_url), run) and len(whole.chats) == sent
        assert switch.measure("pd", "pd", Endpoint(split.base_url), run, again=True)
    with Journal(run, read_only=True) as journal:
        rows = journal.frame()
    shared = rows[rows["label"].isin(["plain", "warm", "crowd"])].groupby("seed")
    both = shared.filter(lambda r: r["arm"].nunique() == 2)
    assert both["seed"].nunique() >= 12 and (both.groupby("seed")["prompt_sha"].nunique() == 1).all()
    assert (both[both["arm"] == "combined"]["outcome"] == "exact").all()
    assert len(rows[(rows["label"] == "again") & (rows["send"] == 90)]) == 8
    with pytest.raises(ValueError, match="holds no investigation of other"):
        switch.measure("other", "combined", Endpoint("http://127.0.0.1:9"), run)


def test_the_switch_is_printed_from_the_collected_units():
    plan = load_plan(Path(__file__).parents[2] / "data" / "incidents" / "context-loss" / "incident.toml")
    said = switch.instructions("pd", "combined", "http://10.0.0.7:30000", plan).split("\n")
    order = [
        said.index(next(x for x in said if f"stop sglang-dsv4-{role}" in x)) for role in ("router", "decode", "prefill")
    ]
    start = said.index(next(x for x in said if "start sglang-dsv4.service" in x))
    assert order == sorted(order) and order[-1] < start and any("nvidia-smi" in x for x in said)
    assert any("http://127.0.0.1:30000/health" in x for x in said) and "10.0.0.7" not in "".join(said)
    back = switch.instructions("combined", "pd", plan=plan)
    starts = [back.index(f"start sglang-dsv4-{role}") for role in ("prefill", "decode", "router")]
    assert starts == sorted(starts) and back.index("stop sglang-dsv4.service") < starts[0]
    assert "PORT" in switch.instructions("pd", "combined")
