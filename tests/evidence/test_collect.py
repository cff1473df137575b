"""One read-only call shows everything the incident's engineer looked for, also what is not there."""

import hashlib
import http.server
import json
import re
import shutil
import subprocess
import threading

import pandas as pd
import pytest
from evidence_image import JOURNAL_REMOTE, MISSING, SOURCE, START_US, build_image, write_journal
from forms import FORMS
from needlework.evidence import (
    Bundle,
    Collection,
    absences,
    collect,
    compare_roles,
    compare_source,
    compare_sources,
    effective,
    join_trials,
    load_plan,
    read_log,
    scan,
    searched,
    source_files,
    units,
)
from needlework.evidence.hosts import COMMANDS, argv_of
from needlework.evidence.redaction import check, redact
from planted import gone, planted

PLAN = f"""
name = "seeds"
[window]
lines = 4000
[[hosts]]
name = "node-a"
via = "folder"
folder = "IMAGE"
[[hosts.roles]]
role = "prefill"
unit = "sglang-dsv4-prefill.service"
[[hosts.roles]]
role = "decode"
unit = "sglang-dsv4-decode.service"
files = ["{SOURCE}", "{MISSING}"]
[[hosts.roles]]
role = "router"
unit = "sglang-dsv4-router.service"
[[hosts.roles]]
role = "combined"
unit = "sglang-dsv4.service"
"""


@pytest.fixture(scope="session")
def collection(image, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "incident.toml"
    path.write_text(PLAN.replace("IMAGE", str(image)))
    return collect(load_plan(path))


def test_the_empty_filter_is_explained_by_the_place_that_holds_the_words(collection):
    table = searched(collection).set_index(["role", "place"])
    assert table.loc[("prefill", "unit and drop-ins"), "hits"] == 2  # its arguments stand in the unit itself
    assert table.loc[("decode", "wrapper script"), "hits"] == 2
    assert "page-size" in table.loc[("decode", "wrapper script"), "found"]
    assert table.loc[("router", "process environment"), ["lines", "hits"]].tolist() == [0, 0]
    state = units(collection).set_index("role")["state"]
    assert state.to_dict() == {"prefill": "active", "decode": "active", "router": "active", "combined": "inactive"}


def test_source_files_are_known_by_size_date_and_digest_and_held_against_the_release(collection, image, tmp_path):
    name = SOURCE.rsplit("/", 1)[-1]
    files = source_files(collection)
    files = files.set_index(files["path"].str.rpartition("/")[2])
    came = files.loc[name]
    text = (image / SOURCE.lstrip("/")).read_text()
    assert came["bytes"] == len(text) and came["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert came["modified"] and files.loc["indexer.py", "state"] == "missing"
    assert pd.isna(files.loc["indexer.py", "bytes"])
    (tmp_path / "same.py").write_text(text)
    (tmp_path / "other.py").write_text(text.replace("2048", "512"))
    (same,) = compare_sources(collection, {name: "same.py"}, tmp_path)
    (other,) = compare_sources(collection, {name: "other.py"}, tmp_path)
    assert same.same and not other.same and (other.added, other.removed) == (1, 1) and "2048" in other._repr_html_()
    for place in ("gone.py", "../../etc/hostname"):
        with pytest.raises(ValueError, match="public copy"):
            compare_sources(collection, {name: place}, tmp_path)


def test_every_row_of_the_forensic_step_is_there(collection):
    missing = absences(collection)
    said = {(row.role, row.item.partition(":")[0]): row.finding for row in missing.itertuples()}
    assert "does not exist" in said["decode", "stat"] and missing["item"].str.contains("indexer.py").any()
    assert "inactive" in said["combined", "unit-show"]
    assert "another service" in " ".join(missing[missing["role"] == "prefill"]["finding"])
    assert "no Environment= of the unit" in " ".join(missing[missing["role"] == "prefill"]["finding"])
    assert not (
        (missing["role"] == "decode") & missing["finding"].str.contains("no Environment=")
    ).any()  # its drop-in has one
    items = {(item["role"], item["item"].partition(":")[0], item["state"]) for item in collection.items}
    assert (
        ("decode", "file", "ok") in items
        and ("decode", "sha256", "ok") in items
        and ("decode", "stat", "missing") in items
    )


def test_the_log_window_is_4000_lines_and_categories_are_whole_words(collection):
    log = read_log(collection, "node-a", "decode")
    assert len(log) == 4000 and log["time"].is_monotonic_increasing
    counts = scan(log).set_index("category")
    assert counts.loc["abort", "count"] == 1 and counts.loc["abort", "requests"] == 1
    assert (
        counts.loc["inf", "count"] == 0 and counts.loc["nan", "count"] == 1
    )  # "nan=0" is a nan; "info" and "nanoseconds" are not
    assert counts.loc["corrupt", "count"] == 0 and counts["count"].sum() < 10


@pytest.mark.skipif(
    JOURNAL_REMOTE is None, reason="systemd-journal-remote is not installed, so no real journal can be written"
)
def test_the_journal_was_read_by_journalctl(image, collection):
    assert list((image / "var/log/journal").glob("*.journal")) and not list((image / "var/log/journal").glob("*.jsonl"))


def test_effective_values_name_their_source_and_what_they_override(collection):
    table = effective(collection).set_index(["role", "setting"])
    page = table.loc[("decode", "page_size")]
    assert (page["value"], page["source"], page["overrides"]) == ("64", "server_info", "")
    assert table.loc[("decode", "SGLANG_OPT_USE_TILELANG_INDEXER")]["source"] == "drop-in"
    assert table.loc[("decode", "SGLANG_SM120_FLASHMLA_BACKEND")]["source"] == "process environment"
    assert table.loc[("prefill", "chunked_prefill_size")]["source"] == "unit"


def test_prefill_and_decode_differ_in_page_size_first(collection):
    differing = compare_roles(effective(collection))
    assert differing.iloc[0][["setting", "prefill", "decode", "weight"]].tolist() == [
        "page_size",
        "256",
        "64",
        "decisive",
    ]
    by_role = differing[differing["weight"] == "by role"]["setting"].tolist()
    assert "disaggregation_mode" in by_role and differing["weight"].tolist().index("by role") > 0


def test_equal_roles_give_no_difference(collection):
    table = effective(collection)
    decode = table[table["role"] == "decode"]
    assert compare_roles(pd.concat([decode, decode.assign(role="prefill")])).empty


def test_nothing_secret_is_kept_and_rows_still_join(collection, tmp_path):
    folder = collection.write(tmp_path / "evidence")
    text = "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    for secret in ("10.1.230.171", "blackwell-07", "hf_abcdef", "sk-live-abcdef", "/root/sglang-dsv4"):
        assert secret not in text
    assert check(text) == []
    address = collection.text("node-a", "router", "unit-cat").split("http://")[1].split(":")[0]
    assert address.startswith("<address-") and address in collection.text("node-a", "decode", "journal")
    again = Collection.read(folder)
    assert again.texts == collection.texts and again.items == collection.items
    with pytest.raises(ValueError, match="already holds a collection"):
        collection.write(folder)


def test_log_lines_join_trials_by_id_and_by_time(collection):
    log = read_log(collection, "node-a", "decode")
    time = log["time"].iloc[100]
    trials = pd.DataFrame(
        {
            "trial_id": ["7f3e2c9a0b1d4e5f", "other"],
            "time": [None, time.isoformat()],
            "latency_s": [None, 0.5],
            "outcome": ["refusal", "exact"],
        }
    )
    joined = join_trials(log, trials, slack_s=0.1)
    assert set(joined[joined["by"] == "id"]["trial_id"]) == {"7f3e2c9a0b1d4e5f"}
    assert 1 <= len(joined[joined["by"] == "time"]) <= 4


def test_deployed_source_against_the_release(collection):
    deployed = next(
        text for (_, _, item), text in collection.texts.items() if item.startswith("file:") and "flash_mla" in item
    )
    assert compare_source("flash_mla_sm120_triton.py", deployed, deployed).same
    different = compare_source("flash_mla_sm120_triton.py", deployed, deployed.replace("2048", "512"))
    assert (different.added, different.removed, different.same) == (
        1,
        1,
        False,
    ) and "+    return 2048" in different.diff


def test_only_readers_are_ever_run():
    programs = {argv[0] for argv in COMMANDS.values()}
    assert programs <= {
        "systemctl",
        "journalctl",
        "head",
        "stat",
        "sha256sum",
        "uname",
        "nvidia-smi",
        "{python}",
        "curl",
        "tail",
        "docker",
        "kubectl",
    }
    verbs = {argv[:2] for argv in COMMANDS.values() if argv[0] in ("docker", "kubectl")}
    assert verbs == {("docker", "container"), ("docker", "logs"), ("kubectl", "get"), ("kubectl", "logs")}
    assert COMMANDS["container"][:3] == ("docker", "container", "inspect")
    assert {argv[1] for argv in COMMANDS.values() if argv[0] == "systemctl"} == {"show", "cat"}
    assert COMMANDS["packages"][1:4] == ("-m", "pip", "freeze")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[hosts]", "not valid TOML"),
        ("name = 'x'", "names no"),
        ("[[hosts]]\nvia = 'telnet'", "via must be one of"),
        ("[[hosts]]\nvia = 'ssh'\ntarget = '-oProxyCommand=x'\n[[hosts.roles]]\nrole='decode'", "needs target"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'decode'\nunit = 'a; rm -rf /'", "not a systemd unit name"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'decode'\nfiles = ['../../etc/shadow']", "absolute paths"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'decode'\nendpoint = 'file:///etc/passwd'", "http"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'drummer'", "role must be one of"),
        ("[window]\nlines = 10000000\n[[hosts]]", "lines must be"),
        ("surprise = 1", "unknown key"),
        ("[[hosts]]\nroles = ['decode']", "must be a table"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'decode'\n[[hosts.roles]]\nrole = 'decode'", "named twice"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'decode'\nunit = '--all'", "not a systemd unit name"),
        ('[[hosts]]\n[[hosts.roles]]\nrole = "decode"\nunit = "a.service\\n"', "not a systemd unit name"),
        ("[[hosts]]\nvia = 'ssh'\ntarget = 'a@-oProxyCommand'\n[[hosts.roles]]\nrole='decode'", "needs target"),
        ('[[hosts]]\nvia = "ssh"\ntarget = "a\\n"\n[[hosts.roles]]\nrole="decode"', "needs target"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'decode'\nfiles = ['/dev/zero']", "devices"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'decode'\nfiles = [3]", "absolute paths"),
        ('[[hosts]]\nvia = "folder"\nfolder = "a\\u0000"\n[[hosts.roles]]\nrole="decode"', "not a path"),
        ("[[hosts]]\n[[hosts.roles]]\nrole = 'decode'\n[release]\nx = 3", "public copy"),
        ("[window]\nsince = '--vacuum-size=1'\n[[hosts]]", "not a time"),
        ("[window]\nlines = true\n[[hosts]]", "wrong type"),
        ("[[hosts]]\ntimeout_s = nan\n[[hosts.roles]]\nrole = 'decode'", "timeout_s must be"),
        ('name = "x\\u001b[31m"\n[[hosts]]', "name may hold"),
        ("".join(f"[[hosts]]\nname='h{n}'\n[[hosts.roles]]\nrole='decode'\n" for n in range(2000)), "2,000 hosts"),
        ("[[hosts]]\n" + "[[hosts.roles]]\nrole='decode'\n" * 50, "50 roles"),
        ("[[hosts]]\n[[hosts.roles]]\nrole='decode'\nfiles=[" + "'/x'," * 1000 + "]", "1,000 files"),
        (
            "[[hosts]]\nname='A'\n[[hosts.roles]]\nrole='decode'\n[[hosts]]\nname='a'\n[[hosts.roles]]\nrole='decode'",
            "share a name",
        ),
        ("a=" + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("#" * (2 << 20), "larger than"),
    ],
)
def test_a_bad_plan_is_one_sentence(tmp_path, text, sentence):
    (tmp_path / "incident.toml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        load_plan(tmp_path / "incident.toml")


def test_a_plan_that_is_a_folder_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        load_plan(tmp_path)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_pattern_in_an_endpoint_is_not_many_requests():
    """curl reads [1-50] as fifty addresses unless it is told not to."""
    asked = []

    class Count(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Count) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/[1-50]/server_info"
        subprocess.run(argv_of("http", url=url), capture_output=True, timeout=30, check=False)
        server.shutdown()
    assert len(asked) <= 1


def test_a_link_out_of_a_saved_folder_is_not_followed(tmp_path):
    outside = tmp_path / "secret.txt"
    outside.write_text("outside")
    (tmp_path / "image/opt").mkdir(parents=True)
    (tmp_path / "image/opt/kernel.py").symlink_to(outside)
    (tmp_path / "incident.toml").write_text(
        "[[hosts]]\nvia='folder'\nfolder='image'\n[[hosts.roles]]\nrole='decode'\nfiles=['/opt/kernel.py']"
    )
    result = collect(load_plan(tmp_path / "incident.toml"))
    assert "outside" not in "".join(result.texts.values())
    assert [item["state"] for item in result.items if item["item"].startswith("stat")] == ["missing"]


def test_secrets_planted_in_every_place_reach_no_file_of_the_bundle(tmp_path):
    """All known forms, in the log, the unit, the wrapper script, a source file, the environment and a server's answer."""
    root = build_image(tmp_path / "image", lines=40)
    texts = [form.format(s=value) for form, values in FORMS.values() for value in values]
    random_ones = planted()  # other values in every sentence
    texts += [sentence for _, _, sentence in random_ones]
    values = {v for _, vs in FORMS.values() for v in vs}
    parts = {p for v in values for p in re.split(r"[^A-Za-z0-9]+", v) if len(p) >= 8 and re.search(r"\d", p)}
    unit, single = "sglang-dsv4-decode.service", [text for text in texts if "\n" not in text]
    rows = [
        {
            "__REALTIME_TIMESTAMP": str(START_US + n * 1000),
            "_SYSTEMD_UNIT": unit,
            "_HOSTNAME": "gpu-box",
            "MESSAGE": text,
        }
        for n, text in enumerate(single)
    ]
    shutil.rmtree(root / "var/log/journal")
    write_journal(root / "var/log/journal", rows)
    for path in ("root/serve_decode.sh", SOURCE.lstrip("/")):
        (root / path).write_text("#!/bin/bash\n" + "\n".join(texts) + "\n")
    (root / f"proc/{unit}/environ").write_text("\0".join(single))
    (root / f"proc/{unit}/cmdline").write_text("\0".join(["python", "--api-key", "Zq8Lm2Xw9Rt5Kp3V", "--tp", "8"]))
    (root / "http/decode/server_info").write_text(json.dumps({"version": "1", "notes": texts}))
    path = tmp_path / "incident.toml"
    path.write_text(PLAN.replace("IMAGE", str(root)) + '[incident]\ntitle="t"\nsymptom="s"\ndate="d"\nengine="e"\n')
    result = collect(load_plan(path))
    bundle = tmp_path / "bundle"
    result.write(bundle / "evidence")
    (bundle / "incident.toml").write_text(redact(path.read_text()))  # the plan itself names a path under home
    Bundle(bundle).seal()
    assert Bundle(bundle).problems() == []
    assert len(texts) >= 600 and len({secret for _, secret, _ in random_ones}) >= 200 and len(parts) >= 35
    everything = "".join(p.read_text(errors="replace") for p in bundle.rglob("*") if p.is_file())
    assert sorted(part for part in parts if part in everything) == []
    assert [kind for kind, secret, _ in random_ones if not gone(secret, everything)] == []
    log = read_log(result, "node-a", "decode")
    assert len(log) == len(single), "every line of the redacted journal is still one JSON object"
