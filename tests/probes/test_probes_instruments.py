"""Every instrument finds the fault it is made for and stays silent on a healthy endpoint."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mock_endpoint import mock_endpoint
from needlework import probes
from needlework.probes import Journal, Limits, warm
from needlework.probes.bench.trial import PromptTooLong
from needlework.probes.cli import main
from needlework.probes.recall import describe
from needlework.serving import Endpoint

SMALL = {"lengths": (300, 600, 1200), "depths": (0.2, 0.8)}


@pytest.mark.parametrize("dialect", ["sglang", "openai"])
def test_recall(dialect):
    with mock_endpoint(dialect) as mock:
        healthy = probes.recall(mock.base_url, **SMALL)
    assert healthy.healthy and str(healthy).endswith("6 of 6: above 61 %.")
    with mock_endpoint(dialect, lose=lambda n, place, c, o: n > 1000 and place < 600) as mock:
        sick = probes.recall(mock.base_url, **SMALL, repeats=3)
    assert sick.verdict == "finding" and "partly lost at 1,200 tokens (3 of 6" in str(sick)
    assert list(sick.table["hits"]) == [6, 6, 3] and len(sick.controls) == 4
    assert "<script" not in sick._repr_html_() and (sick.trials["prompt_tokens"] > 250).all()


def test_realised_length_is_on_the_axis_and_a_cut_prompt_is_loud():
    with mock_endpoint("sglang", truncate_to=700) as mock:
        result = probes.recall(mock.base_url, lengths=(1200,), depths=(0.1, 0.9))
    assert set(result.trials["prompt_tokens"]) == {700.0} and set(result.trials["counted_tokens"]) == {1200}
    assert result.trials["length_note"].str.contains("may be cut before the model sees it").all()
    assert any("differs from what was sent" in w for w in result.warnings)


def test_controls_that_fail_are_called_harness():
    with mock_endpoint(answer_instead=lambda key, value: "see above") as mock:
        result = probes.recall(mock.base_url, **SMALL)
        assert result.verdict == "harness" and str(result).startswith("Harness, not recall: the controls failed: short")
        assert probes.find_cliff(mock.base_url, high=4000).verdict == "harness"
    with mock_endpoint(
        thinks=True, dialect="trtllm"
    ) as mock:  # thoughts cannot be switched off, answers come all the same
        assert probes.recall(mock.base_url, **SMALL).healthy


@pytest.mark.parametrize("edge", [2048, 777])
def test_cliff_is_walked_to_the_token_and_the_constant_is_named(edge):
    config = {"topk": 512, "ratio": 4, "page": 64, "chunk": 512, "window": 777}
    with mock_endpoint(lose=lambda n, place, c, o: n > edge) as mock:
        result = probes.find_cliff(mock.base_url, low=300, high=6000, config=config)
    assert result.edge == edge and result.constants[0].value == edge
    assert result.cliff.requests <= 60 and f"{edge:,} tokens still hit, {edge + 1:,} miss" in str(result)
    assert set(result.trials["concurrency"]) == {1}


def test_no_cliff_on_a_healthy_endpoint():
    with mock_endpoint() as mock:
        result = probes.find_cliff(mock.base_url, low=300, high=6000)
    assert result.healthy and result.edge is None and "No cliff" in str(result)


@pytest.mark.parametrize("warm_only", [False, True])
def test_residues(warm_only):
    def lose(n, place, cached, ordinal):
        return n % 8 == 3 and (cached > 0 or not warm_only)

    with mock_endpoint(lose=lose) as mock:
        result = probes.scan_residues(mock.base_url, start=500, period=8, anchors=("start", "end"))
    seen = {k: (c.state, c.period, c.residues) for k, c in result.combs.items()}
    assert seen["start", "warm"] == seen["end", "warm"] == ("comb", 8, (3,))
    assert (seen["start", "cold"][0] == "none") is warm_only and result.verdict == "finding"
    assert result.trials["concurrency"].max() == 4, "a row says how many were in flight"
    with mock_endpoint() as mock:
        assert probes.scan_residues(mock.base_url, start=500, period=8).healthy
    with mock_endpoint("openai") as mock, pytest.raises(ValueError, match="needs exact lengths"):
        probes.scan_residues(mock.base_url, period=8)


def test_warm_against_cold_with_proof():
    with mock_endpoint() as mock:
        healthy = probes.warm_cold(mock.base_url, lengths=(512, 1024), repeats=2)
    assert healthy.healthy and healthy.details["proved"] == 4
    with mock_endpoint(lose=lambda n, place, cached, o: cached > 0) as mock:
        sick = probes.warm_cold(mock.base_url, lengths=(512, 1024), repeats=4)
    assert sick.verdict == "finding" and sick.details["discordant"] == (8, 0)
    with mock_endpoint("llama.cpp") as mock:  # its cache has no pages: the template's head is cached in every prompt
        same = probes.warm_cold(mock.base_url, lengths=(512,), repeats=2)
        assert same.healthy and same.details["proved"] == 2 and same.trials["cached_tokens"].min() > 0
    shared = [({"cache": "unknown", "cached_tokens": 200}, {"cache": "warm", "cached_tokens": 511})]
    assert "Cold was not reached" in warm._describe(shared, [], {})[0]  # and not that repeats were not warm
    with mock_endpoint("trtllm") as mock:  # says nothing about its cache
        blind = probes.warm_cold(mock.base_url, lengths=(512,), repeats=2)
    assert blind.verdict == "not proven" and "Warm was not reached" in str(blind)


def test_turns_continued_and_resent():
    with mock_endpoint() as mock:
        healthy = probes.turns(mock.base_url, length=600, repeats=1)
        assert healthy.healthy and len(healthy.table) == 6
        last = [r["messages"] for r in mock.chats if len(r["messages"]) == 3][-1]
        assert last[-1]["content"].startswith("To a file.") and "tic-tac-toe" in last[0]["content"]
        assert list(healthy.table.query("mode == 'continue'")["cached_tokens"] > 0) == [True] * 3
        assert list(healthy.table.query("mode == 'resend'")["cached_tokens"]) == [0] * 3
    with mock_endpoint(lose=lambda n, place, cached, o: cached > 0) as mock:
        sick = probes.turns(mock.base_url, length=600, repeats=2)
    assert sick.verdict == "finding" and "the continued session loses it" in str(sick)


def test_arms():
    with mock_endpoint() as one, mock_endpoint() as two:
        same = probes.compare_arms({"a": one.base_url, "b": two.base_url}, **SMALL, repeats=1, aa_pairs=2)
        assert same.healthy and same.details["aa"] == (0, 2) and "No pair differs" in str(same)
        texts = [[r["messages"][0]["content"] for r in m.chats] for m in (one, two)]
        assert set(texts[1]) - {t for t in texts[1] if "Cache check" in t} <= set(texts[0]) | _controls(two)
    with mock_endpoint() as one, mock_endpoint(lose=lambda n, place, c, o: n > 500) as two:
        options = {**SMALL, "repeats": 2, "aa_pairs": 2, "cache": ("cold", "warm")}
        apart = probes.compare_arms({"a": one.base_url, "b": two.base_url}, **options)
        early = probes.compare_arms({"a": one.base_url, "b": two.base_url}, **options, stop_early=True)
    assert apart.verdict == "finding" and apart.details["discordant"] == (16, 0) and not apart.warnings
    assert early.details["pairs"] < apart.details["pairs"] and early.details["e_value"] >= 20


def _controls(mock):
    return {r["messages"][0]["content"] for r in mock.chats if len(r["messages"][0]["content"]) < 1400}


@pytest.mark.parametrize("how", ["disconnect", "call"])
def test_abort(how):
    with mock_endpoint(delay_s=0.15) as mock:
        healthy = probes.abort(mock.base_url, stages=("queued", "prefill"), rounds=1, length=700, how=how)
        assert healthy.healthy and healthy.details["aborted"] == 2 and mock.aborted >= 1
        assert healthy.details["stuck"] == 0

    def lose(n, place, cached, ordinal):  # whatever was cached by an aborted request is bad
        return cached > 0

    with mock_endpoint(delay_s=0.15, lose=lose) as mock:
        sick = probes.abort(mock.base_url, stages=("prefill",), rounds=3, length=700, how=how)
    assert sick.verdict == "finding" and list(sick.table.query("role == 'followup'")["hits"]) == [0]


def test_an_abort_that_comes_too_late_is_tried_again_sooner(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["needlework.probes.abort"], "_pace", lambda *_: 2.0)  # measured in a slow moment
    with mock_endpoint(delay_s=0.3) as mock:
        options = {"stages": ("prefill",), "rounds": 1, "length": 700, "controls": False}
        result = probes.abort(mock.base_url, tmp_path / "run", **options)
    assert result.healthy and result.details["aborted"] == 1 and result.details["too_late"] in (1, 2)
    again = probes.abort(probes.Recorded(tmp_path / "run"), **options)
    assert str(again) == str(result) and again.details["too_late"] == result.details["too_late"]


def test_echo_tells_foreign_content_from_mere_misses():
    with mock_endpoint() as mock:
        assert probes.echo(mock.base_url, trials=8, concurrency=4, lengths=(300,)).healthy
    with mock_endpoint(leak=True) as mock:
        sick = probes.echo(mock.base_url, trials=12, concurrency=4, lengths=(300,))
    assert sick.verdict == "finding" and sick.details["foreign"] >= 3


def test_drift():
    with mock_endpoint() as mock:
        assert probes.drift(mock.base_url, canaries=12, length=300).healthy
    with mock_endpoint(lose=lambda n, p, c, ordinal: ordinal > 16) as mock:
        sick = probes.drift(mock.base_url, canaries=24, length=300)
    assert sick.verdict == "finding" and 10 <= sick.details["drift"].onset <= 14


def test_a_length_at_which_nothing_was_measured_is_not_called_held():
    rows = [{"target_tokens": n, "outcome": "exact" if n < 3000 else "transport"} for n in (1000, 2000, 3000)]
    sentence, verdict = describe(rows)
    assert verdict == "not proven" and sentence.startswith("Nothing was measured at 3,000 tokens")
    assert describe(rows[:2])[1] == "healthy"


def test_coherence_cannot_see_what_recall_sees():
    with mock_endpoint(lose=lambda n, place, c, o: n > 500) as mock:
        result = probes.coherence(mock.base_url, lengths=(300, 900), repeats=3)
    assert result.verdict == "finding" and "coherence cannot see this failure" in str(result)
    from needlework.probes.coherence import gzip_ratio, repetition

    assert (
        gzip_ratio("no prior context " * 60) > 10 > 4 > gzip_ratio("The lamp stood by the door and nobody asked why.")
    )
    assert repetition("a b c d " * 9) > 0.8 and repetition("one two three four five") == 0


def test_pool():
    with mock_endpoint(replicas=2) as mock:
        assert probes.pool(mock.base_url, sends=6, length=300).verdict == "finding"
    with mock_endpoint() as mock:
        assert probes.pool(mock.base_url, sends=6, length=300).healthy


def test_depth_profile():
    with mock_endpoint(lose=lambda n, place, c, o: place > 500) as mock:
        result = probes.depth_profile(mock.base_url, length=1000, depths=(0.0, 0.3, 0.9), repeats=3, controls=False)
    assert list(result.table["hits"]) == [3, 3, 0] and "lost at depth 0.90" in str(result)


def test_limits_stop_and_a_later_run_goes_on(tmp_path):
    with mock_endpoint() as mock:
        few = probes.recall(mock.base_url, tmp_path / "run", **SMALL, limits=Limits(requests=9))
        assert "Stopped early: stopped at the limit of 9 requests" in str(few) and len(few.trials) < 6
        sent = len(mock.chats)
        whole = probes.recall(mock.base_url, tmp_path / "run", **SMALL)
        assert len(whole.trials) == 6 and len(mock.chats) - sent == 6 - len(few.trials)
        with pytest.raises(ValueError, match="would cost about"):
            probes.recall(mock.base_url, lengths=(4000,), limits=Limits(cost=0.001, price=1.0))
        seen = []
        refused = probes.recall(mock.base_url, **SMALL, confirm=lambda b: seen.append(b) or False)
        assert "not confirmed" in str(refused) and seen[0].requests == 14 + 14 + 2 and seen[0].expected == 26


def test_a_prompt_beyond_the_window_is_one_plain_error():
    """With a bundle of errors in its context, a notebook would show a bare traceback in place of the error."""
    with mock_endpoint() as mock, pytest.raises(PromptTooLong, match="do not fit the window of 2048 tokens") as caught:
        mock.window = 2048
        probes.recall(mock.base_url, lengths=[6144], depths=[0.5], repeats=1)
    error: BaseException | None = caught.value
    while error is not None:
        assert not isinstance(error, BaseExceptionGroup)
        error = error.__context__


def test_a_dead_endpoint_stops_soon(tmp_path):
    with mock_endpoint(fail=lambda o: (500, "") if o > 5 else None) as mock:
        result = probes.recall(mock.base_url, tmp_path / "run", **SMALL, repeats=10, controls=False)
    assert "8 requests in a row failed; the last: HTTP 500 with an empty body" in str(result)
    with pytest.raises(RuntimeError, match="does not answer: the endpoint cannot be reached"):
        probes.recall("http://127.0.0.1:9", **SMALL)


def test_another_target_in_the_same_folder_is_refused(tmp_path):
    with mock_endpoint("sglang") as mock:
        probes.pool(mock.base_url, tmp_path / "run", sends=2, length=300)
    with mock_endpoint("vllm") as mock, pytest.raises(ValueError, match=r"measured sglang .* use another folder"):
        probes.pool(mock.base_url, tmp_path / "run", sends=3, length=300)


def test_a_folder_of_another_address_is_refused_and_an_empty_one_taken_away(tmp_path):
    with mock_endpoint() as one, mock_endpoint() as two:
        probes.pool(one.base_url, tmp_path / "run", sends=2, length=300)
        with pytest.raises(ValueError, match=r"measured another address \(2 trials\)"):
            probes.pool(two.base_url, tmp_path / "run", sends=3, length=300)
        assert "127.0.0.1" not in (tmp_path / "run" / "manifest.json").read_text()
        asked = []
        probes.pool(one.base_url, tmp_path / "run", sends=2, length=300, confirm=lambda b: asked.append(b) or False)
        assert not asked, "a finished run has nothing to send"
    with pytest.raises(RuntimeError, match="does not answer"):
        probes.pool("http://127.0.0.1:9", tmp_path / "new", sends=2)
    assert not (tmp_path / "new").exists()


def test_a_run_that_did_not_end_says_so(tmp_path):
    with mock_endpoint() as mock:
        probes.recall(mock.base_url, tmp_path / "run", **SMALL, limits=Limits(requests=7))
        probes.pool(mock.base_url, tmp_path / "run", sends=2, length=300)
    with Journal(tmp_path / "run", read_only=True) as journal:
        assert journal.unfinished == {"recall": "stopped at the limit of 7 requests"}


@pytest.mark.parametrize(("failure", "said"), [("hang", "3 requests in a row failed; the last: no complete answer")])
def test_a_server_that_hangs_on_long_prompts_is_given_up_soon(failure, said):
    with mock_endpoint(fail=lambda o: (500, failure) if o >= 2 else None, hang=3.0) as mock:
        result = probes.recall(Endpoint(mock.base_url, timeout_s=0.5), **SMALL, repeats=5, controls=False)
    assert said in result.stopped and set(result.trials["failure"].dropna()) == {"timeout"}


def test_a_key_in_the_place_of_its_variable_is_never_printed(capsys):
    for argv in (["recall", "http://127.0.0.1:9", "--api-key-env", "sk-verysecretkey0123456789"],
                 ["what", "http://127.0.0.1:9", "--api-key-env", "verysecretkey0123456789"]):  # fmt: skip
        with pytest.raises(ValueError, match="name of an environment variable") as caught:
            main(argv)
        assert "verysecret" not in str(caught.value)
    with pytest.raises(SystemExit):
        main(["recall", "http://127.0.0.1:9", "--api-key", "sk-verysecretkey0123456789"])
    assert "verysecret" not in capsys.readouterr().err


def test_command_line(tmp_path, capsys):
    with mock_endpoint(lose=lambda n, place, c, o: n > 1000) as mock:
        argv = ["recall", mock.base_url, "--run", str(tmp_path / "run"), "--lengths", "300,1200", "--repeats", "2"]
        with pytest.raises(ValueError, match="add --yes"):
            main([*argv, "--price", "2"])
        assert main([*argv, "--price", "2", "--yes"]) == 1
        out, err = capsys.readouterr()
        assert (
            "budget: about 32 requests, 36 at most" in err and "at the given price" in err and "is lost at 1,200" in out
        )
        assert main(["what", mock.base_url]) == 0 and "sglang endpoint" in capsys.readouterr().out
        with pytest.raises(ValueError, match="--word flush"):
            main(["flush", mock.base_url])
        assert mock.cache and main(["flush", mock.base_url, "--word", "flush"]) == 0 and not mock.cache
    assert main(["recall", f"recorded:{tmp_path / 'run'}", "--lengths", "300,1200", "--repeats", "2"]) == 1
    with pytest.raises(ValueError, match="arms needs two"):
        main(["arms", "a=http://127.0.0.1:9"])


@pytest.mark.parametrize("name", ["recall", "warm", "echo", "arms"])
def test_an_empty_list_of_lengths_is_one_sentence(name):
    urls = ["a=http://127.0.0.1:9", "b=http://127.0.0.1:9"] if name == "arms" else ["http://127.0.0.1:9"]
    with pytest.raises(ValueError, match="lengths is empty; give at least one"):
        main([name, *urls, "--lengths", ",", "--yes"])


def test_command_line_error_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "needlework", "probe", "recall", "http://127.0.0.1:9", "--yes"],
        capture_output=True,
        text=True,
        env={**os.environ, "NEEDLEWORK_API_KEY": "sk-verysecretkey0123456789"},
    )
    assert done.returncode == 2 and "cannot be reached" in done.stderr
    assert [line[:7] for line in done.stderr.splitlines()] == ["budget:", "needlew"]
    assert "verysecret" not in done.stderr + done.stdout


def test_what_was_not_measured_is_no_health_and_its_law_is_said():
    with mock_endpoint("openai") as mock:
        mock.window = 1000
        refused = probes.recall(mock.base_url, lengths=(300, 800, 1500), depths=(0.2, 0.8), repeats=2)
        alone = probes.recall(mock.base_url, lengths=(1500,), depths=(0.5,), repeats=12, controls=False)
    assert refused.verdict == "not proven" and set(refused.trials["failure"].dropna()) == {"http_400"}
    assert any("prompt too long): every prompt above 8" in w or "above 7" in w for w in refused.warnings), (
        refused.warnings
    )
    assert not alone.stopped and len(alone.trials) == 12, "a server that refuses long prompts alone is not dead"
    with mock_endpoint(fail=lambda o: (503, "busy") if o % 3 == 1 else None) as mock:
        some = probes.recall(mock.base_url, lengths=(300, 800), depths=(0.2, 0.8), repeats=4, controls=False)
    assert some.verdict == "not proven" and "trials measured nothing (5 transport: HTTP 503: busy)" in some.sentence
