import ast
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from needlework.analysis.diagnosis import diagnose
from needlework.analysis.ledger import Ledger
from simulator import CONFIG, simulate


def ledger():
    book = Ledger(
        "demo",
        symptom="forgets after 2,048 tokens",
        deployment={
            "version": "sglang 0.5.23",
            "command": "serve --page-size 64",
            "config": {"page_size": 64, "index_topk": 512},
            "flags": {"--disable-radix-cache": "no change"},
        },
    )
    book = book.suspect("F09", "warm hit", 0.3).suspect("F14", "side buffer", 0.3)
    book = book.record("runs/warm", "cold against warm", "0 of 20 pairs differ", exonerates=["F09"], strength="strong")
    return book.record(
        "runs/arms", "PD against combined", "24 to 0 discordant", supports=["F14", "F09"], strength="strong"
    )


def test_status_strength_and_exoneration_by_run():
    table = ledger().table().set_index("code")
    assert table.loc["F09", "status"] == "exonerated" and table.loc["F14", "status"] == "supported"
    assert ledger().exonerated()["run"].tolist() == ["runs/warm"]
    with pytest.raises(ValueError, match="suspect it first"):
        ledger().record("r", "t", "x", supports=["F01"])
    with pytest.raises(ValueError, match="prior"):
        ledger().suspect("F01", "layout", 7)


def test_round_trip_and_foreign_file(tmp_path):
    book = ledger().conclude(diagnose(simulate("F14", 1), {"config": CONFIG}), run="runs/arms")
    book.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json") == book
    assert book.verdict.startswith("Most likely: F14") and book.blind_spots and book.next_steps
    (tmp_path / "bad.json").write_text('{"entries": [1]}')
    with pytest.raises(ValueError, match="not a ledger"):
        Ledger.load(tmp_path / "bad.json")


def test_issue_text_has_what_maintainers_ask_first_and_no_secret():
    book = ledger().record(
        "runs/x", "note", "from http://10.1.2.3:8000/v1 with Bearer abcdefghijk ```", strength="weak"
    )
    text = book.issue_text()
    for wanted in (
        "sglang 0.5.23",
        "serve --page-size 64",
        "| index_topk | 512 |",
        "| --disable-radix-cache | no change |",
        "repro.py",
    ):
        assert wanted in text
    assert "10.1.2.3" not in text and "abcdefghijk" not in text


def test_html_is_escaped():
    book = Ledger("demo").suspect("F01", "<script>alert(1)</script>", 0.1)
    assert "<script>" not in book._repr_html_() and "&lt;script&gt;" in book._repr_html_()


def test_the_reproduction_script_runs(tmp_path):
    class Forgetful(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            known = asked.split("The access code is ")[1][:5] if len(asked) < 8_000 else "no prior context"
            body = json.dumps(
                {"choices": [{"message": {"content": known}}], "usage": {"prompt_tokens": len(asked) // 4}}
            )
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forgetful)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        script = tmp_path / "needle.py"
        script.write_text(Ledger("demo").reproduction())
        ast.parse(script.read_text())
        url = f"http://127.0.0.1:{server.server_port}"
        out = subprocess.run([sys.executable, script, url, "m"], capture_output=True, text=True, timeout=60).stdout
    finally:
        server.shutdown()
        server.server_close()
    assert out.count("found") >= 2 and "lost: 'no prior context'" in out


def test_the_shipped_ledger_says_what_the_verdict_notebook_says():
    root = Path(__file__).parents[2]
    kept = Ledger.load(root / "data/incidents/context-loss/ledger.json")
    assert kept.verdict.startswith("Most likely: F14")
    assert json.dumps(kept.verdict)[1:-1] in (root / "notebooks/11_verdict.ipynb").read_text("utf-8")
