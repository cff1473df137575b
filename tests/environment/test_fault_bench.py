"""The bench of faults in real engines: what it asks, what its gateway does wrong, and its recordings, replayed."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fault_bench
import httpx
import pair_proxy
import pytest
from needlework import analysis

DATA = Path(__file__).resolve().parents[2] / "data" / "engines"
RUNS = [
    pytest.param(folder, truth, id=f"{folder.parent.name}-{folder.name}")
    for path in sorted(DATA.glob("*/*/truth.json"))
    for name, truth in json.loads(path.read_text())["runs"].items()
    for folder in [path.parent / name]
]


@pytest.mark.parametrize(("folder", "truth"), RUNS)
def test_a_recorded_run_loads_and_is_what_its_truth_says(folder, truth):
    raw = (folder / "trials.jsonl").read_bytes()
    assert hashlib.blake2b(raw, digest_size=16).hexdigest() == truth["digest"]
    trials = analysis.load_trials(folder)
    for column in (
        "prompt_tokens",
        "depth",
        "needle_token",
        "cached_tokens",
        "concurrency",
        "time",
        "ordinal",
        "label",
    ):
        assert column in trials.columns
    counts = fault_bench.measured(json.loads(trials.fillna({"label": ""}).to_json(orient="records")))
    assert counts == truth["lost"]
    lost = sum(bad for bad, _ in counts.values())
    assert (lost == 0) == (truth["class"] == "healthy")
    if truth["kind"] == "pair":
        assert set(counts) == {"combined", "pd"}
    assert not any(word and word in raw.decode() for word in (truth["fault"], truth["place"]) if word != "none")


def test_the_recordings_are_small_and_every_class_that_came_twice_is_in_both_parts():
    files = [path for path in DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 15 << 20
    assert {path.parent for path in DATA.rglob("trials.jsonl")} == {param.values[0] for param in RUNS}
    parts = {
        part: [p.values[1]["class"] for p in RUNS if p.values[0].parent.name == part] for part in fault_bench.PARTS
    }
    together = [code for codes in parts.values() for code in codes]
    assert len(together) - together.count("healthy") >= 30 and together.count("healthy") >= 10
    for code in set(together):
        assert together.count(code) == 1 or all(code in codes for codes in parts.values())


def test_the_coin_puts_each_stratum_into_both_parts():
    runs = [(f"{stratum}{i}", stratum) for stratum in "abcde" for i in range(1 + ord(stratum) % 4)]
    parts = fault_bench.coin(runs)
    assert set(parts) == {name for name, _ in runs}
    sizes = [list(parts.values()).count(part) for part in fault_bench.PARTS]
    assert abs(sizes[0] - sizes[1]) <= 1
    for stratum in "abcde":
        mine = [parts[name] for name, own in runs if own == stratum]
        assert len(mine) == 1 or set(mine) == set(fault_bench.PARTS)


def test_random_prompts_cover_the_space():
    made = fault_bench.steps(5, 330)
    asks = [one for _, group in made for one in group]
    assert 320 <= len(asks) <= 330 and made == fault_bench.steps(5, 330)
    fresh = [one for one in asks if not one.label]
    lengths = [one.prompt.target_tokens for one in fresh]
    assert min(lengths) < 400 and max(lengths) > 20_000 and {0.0, 1.0} <= {one.prompt.depth for one in fresh}
    assert len({n % 64 for n in lengths}) > 55
    assert 0.1 < sum(one.label == "again" for one in asks) / len(asks) < 0.2
    assert 0.2 < sum(one.concurrency > 1 for one in asks) / len(asks) < 0.6
    assert sum(how == "drop" for how, _ in made) == 9 and sum(how == "turn" for how, _ in made) == 9


class _Engine(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.got.append(body)
        said = {"choices": [{"message": {"content": f"{len(self.server.got)}"}}], "usage": {"prompt_tokens": 4000}}
        raw = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def engine():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    server.got = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(url, text, **more):
    body = {"messages": [{"role": "user", "content": text}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).json()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_gateway_cuts_a_prompt_and_may_hide_it(engine, hidden):
    fault = pair_proxy.cut_prompt(4000, hidden=hidden)
    with pair_proxy.gateway(f"http://127.0.0.1:{engine.server_port}", fault=fault) as url:
        long, short = ask(url, "x" * 32_000), ask(url, "y" * 100)
    assert [len(body["messages"][0]["content"]) for body in engine.got] == [16_000, 100]
    assert long["usage"]["prompt_tokens"] == (8000 if hidden else 4000) and short["usage"]["prompt_tokens"] == 4000


def test_a_gateway_caps_tokens_and_repeats_the_answer_before(engine):
    server = f"http://127.0.0.1:{engine.server_port}"
    with pair_proxy.gateway(server, fault=pair_proxy.cap_tokens(3)) as url:
        ask(url, "a", max_tokens=48)
    assert engine.got[0]["max_tokens"] == 3
    with pair_proxy.gateway(server, fault=pair_proxy.stale_answer(1.0)) as url:
        said = [ask(url, "a")["choices"][0]["message"]["content"] for _ in range(3)]
    assert said == ["2", "2", "3"]
