"""Targets: every specification opens or is refused in one sentence that holds neither key nor address."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from needlework import workbook
from needlework_lab import targets as lab_targets

KEY = "sk-secret-of-this-test"


class _Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = 200, json.dumps({"data": [{"id": "m-1"}]})
        if self.path.startswith("/html"):
            body = "<html>"
        elif self.path.startswith("/odd"):
            status = 418
        elif self.path.startswith("/locked") and self.headers.get("Authorization") != f"Bearer {KEY}":
            status = 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def refused(spec: str, **options: object) -> str:
    with pytest.raises(workbook.TargetError) as caught, workbook.open_target(spec, **options):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("lab", (("combined", "pd"), (), {})),
        ("lab:healthy", (("combined", "pd"), (), {})),
        ("lab:pd:F14", (("pd",), ("F14",), {})),
        ("lab:pd:F14:first_chunks=1", (("pd",), ("F14:first_chunks=1",), {})),
        (
            "lab:combined,pd:F05:k=256:geometry=tiny:seed=7",
            (("combined", "pd"), ("F05:k=256",), {"geometry": "tiny", "seed": 7}),
        ),
        ("lab:F14,N1", (("combined", "pd"), ("F14", "N1"), {})),
    ],
)
def test_lab_specifications(spec: str, expected: tuple) -> None:
    plan = lab_targets.parse_lab(spec)
    assert (plan.arms, plan.faults, dict(plan.options)) == expected


def test_plain_lab_plants_what_the_incident_says_and_healthy_plants_nothing() -> None:
    assert lab_targets.parse_lab("lab", ("F14",)).faults == ("F14",)
    assert lab_targets.parse_lab("lab:pd", ("F14",)).faults == ("F14",)
    assert lab_targets.parse_lab("lab:healthy", ("F14",)).faults == ()


@pytest.mark.parametrize("spec", ["lab:pdd", "lab:F14:", "sglang", "", "ftp://x", "lab:k=1"])
def test_an_unreadable_target_is_one_sentence(small: Path, spec: str) -> None:
    if spec in ("", "lab:F14:"):  # empty parts are harmless
        with workbook.open_target(spec) as target:
            assert target.kind == "lab"
        return
    message = refused(spec)
    assert "\n" not in message and ("unknown target" in message or "cannot read" in message)


def test_an_arm_starts_only_when_used(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(lab_targets, "_start_lab", lambda stack, options: started.append(options["mode"]))
    with workbook.open_target("lab:F14") as target:
        assert list(target.arms) == ["combined", "pd"] and "F14 planted" in target.describe() and not started
        assert target.deployments["pd"] is None and target.deployments["pd"] is None
    assert started == ["pd"]


def test_live_endpoints_one_two_and_named(small: Path, url: str) -> None:
    with workbook.open_target(f"{url}/v1") as target:
        assert list(target.arms) == ["target"] and target.kind == "http" and target.live
    with workbook.open_target(f"{url},{url}/b") as target:
        assert list(target.arms) == ["a", "b"]
    with workbook.open_target(f"left={url},right={url}") as target:
        assert list(target.arms) == ["left", "right"]
        assert "127.0.0.1" not in target.describe() + target._repr_html_() + target.spec


def test_dead_endpoint_wrong_key_and_missing_model(small: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = refused("http://127.0.0.1:9")
    assert "nothing answers" in dead and "127.0.0.1" not in dead
    locked = refused(f"{url}/locked", api_key="sk-wrong")
    assert "refuses the key (401)" in locked and "sk-wrong" not in locked and "127.0.0.1" not in locked
    assert "serves no model 'm-2'" in refused(url, model="m-2")
    assert "status 418" in refused(f"{url}/odd")
    assert "other than a list of models" in refused(f"{url}/html")
    monkeypatch.setenv("NEEDLEWORK_API_KEY", KEY)
    with workbook.open_target(f"{url}/locked", model="m-1") as target:
        assert KEY not in repr(target) + str(target) + repr(dict(target.arms))


def test_environment_overrides_the_cell(small: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEEDLEWORK_TARGET", url)
    with workbook.open_target("lab") as target:
        assert target.kind == "http"


def test_mixed_kinds_and_doubled_names_are_refused(small: Path) -> None:
    assert "mixes http, recorded" in refused("a=http://x,b=recorded:y")
    assert "named twice" in refused("a=http://x,a=http://y")


def test_recorded_runs_by_name_with_their_arms(small: Path) -> None:
    run = small / "data/incidents/context-loss/runs/pair"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    rows = [{"trial_id": f"{i:016x}", "arm": arm, "outcome": "exact"} for i, arm in enumerate(["combined", "pd"])]
    (run / "trials.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with workbook.open_target("recorded:pair") as target:
        assert list(target.arms) == ["combined", "pd"] and not target.live
    assert "holds: pair" in refused("recorded:other")


def test_incident_names_are_slugs(small: Path) -> None:
    for name in ("../one", "/etc", "nope", "One"):
        with pytest.raises(ValueError, match="known are: context-loss, one"):
            workbook.incident(name)
    assert workbook.incident("one").title == "The <b>first</b> one"
