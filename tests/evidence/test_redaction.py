"""Redaction: hundreds of planted secrets of many kinds are gone, rows still join, ordinary words stay."""

import json
import re
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest
from forms import FORMS
from needlework.evidence import Redactor, redact
from needlework.evidence.redaction import check, clean
from planted import KINDS, gone, planted
from trade import LEAKS, ORDINARY


def test_planted_secrets_are_gone():
    cases = planted()
    assert len(KINDS) >= 25 and len({secret for _, secret, _ in cases}) >= 200
    left = [(kind, sentence) for kind, secret, sentence in cases if not gone(secret, redact(sentence))]
    assert left == []


def test_planted_secrets_inside_a_log_are_gone_and_a_second_pass_changes_nothing():
    cases = planted()
    once = redact(
        "\n".join(f"Nov 29 12:00:00 engine[1]: {sentence}" for _, _, sentence in cases if "PRIVATE" not in sentence)
    )
    assert [kind for kind, secret, s in cases if "PRIVATE" not in s and not gone(secret, once)] == []
    assert redact(once) == once
    assert check(once) == []


def test_the_checker_finds_every_planted_secret_and_keeps_no_value():
    for kind, secret, sentence in planted():
        leaks = check(f"first line\n{sentence}\n")
        assert leaks and leaks[0].line == 2, kind
        assert secret not in repr(leaks)


def test_same_value_same_placeholder_so_rows_join():
    redactor = Redactor(hosts=["gpu-box"])
    a = redactor.text("peer 10.1.2.3 on gpu-box")
    b = redactor.text("10.1.2.3 failed; 10.1.2.4 did not; GPU-BOX rebooted")
    assert a == "peer <address-1> on <host-1>"
    assert b == "<address-1> failed; <address-2> did not; <host-1> rebooted"
    assert redactor.report()["address"] == {"values": 2, "places": 3}


def test_secrets_hidden_by_control_characters_are_found():
    key = "sk-" + "a1B2" * 8
    assert key[10:] not in redact(f"{key[:10]}\x1b[31m{key[10:]}\x1b[0m")
    assert key[10:] not in redact(f"{key[:10]}\u200b{key[10:]}")


@pytest.mark.parametrize(
    "form",
    [
        "['serve', '--api-key', '%s', '--port', '3']",
        '"Args": ["--api-key",\n  "%s"]',
        "(b'x-api-key', b'%s')",
        '- name: HF_TOKEN\n  value: "%s"',
        '{"name": "OPENAI_API_KEY", "value": "%s"}',
        "api_key: |\n  %s\n",
        'password = """\n%s\n"""',
        "ExecStart=serve --api-key \\\n    %s \\\n  --port 3",
        r'"{\\\"api_key\\\": \\\"%s\\\"}"',
        "api_key=&quot;%s&quot;",
        "GET /v1?api_key%%3D%s HTTP/1.1",
        "next=https%%3A%%2F%%2Fal%%3A%s%%40db",
        "api_keys: ['%s', 'other']",
        'password: "correct horse, %s"',
        "<password>%s</password>",
        '<add key="password" value="%s"/>',
        "api_key => %s",
        "Incorrect API key provided: %s.",
        "DB_PASS=%s",
        "curl -s -u alice:%s http://h/",
        '{"auths": {"r": {"auth": "%s"}}}',
    ],
)
def test_secrets_are_found_in_the_forms_that_files_and_logs_give_them(form):
    secret = "Zq8Lm2Xw9Rt5Kp3V"
    once = redact(form % secret)
    assert secret not in once and redact(once) == once
    assert check(form % secret) and check(once) == []


ROOT = Path(__file__).resolve().parents[2]
NO_SECRET = {"users", "words", "here"}  # parts of planted paths and sentences that may stay


def is_json(text):
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", FORMS)
def test_every_known_form_is_found_whole_once_and_leaves_json_json(name):
    form, values = FORMS[name]
    assert values
    for value in values:
        text = form.format(s=value)
        once = redact(text)
        parts = re.split(r"[^A-Za-z0-9]+", urllib.parse.unquote(value))
        left = [part for part in parts if len(part) >= 4 and part.lower() not in NO_SECRET and part in once]
        assert value not in once and left == [], (text, once)
        assert redact(once) == once
        assert check(text) and check(once) == []
        assert is_json(once) or not is_json(text), (text, once)


def test_the_forms_are_many():
    assert len(FORMS) >= 200 and sum(len(values) for _, values in FORMS.values()) >= 350


def test_an_escaped_secret_joins_with_the_plain_one():
    redactor = Redactor()
    plain = redactor.text("api_key=Zq8Lm2Xw9Rt5Kp3V from 10.1.2.3")
    assert (
        redactor.text("q=api_key%3DZq8Lm2Xw9Rt5Kp3V%26host%3D10.1.2.3") == "q=api_key%3D<secret-1>%26host%3D<address-1>"
    )
    assert redactor.text(r"api_key\u003dZq8Lm2Xw9Rt5Kp3V") == r"api_key\u003d<secret-1>"
    assert plain == "api_key=<secret-1> from <address-1>"


def test_escapes_that_hide_nothing_stay_as_they_are():
    text = r"""GET /x%20y?a=1%2F2 "café" C:\new\table &lt;b&gt; 100%25 {"msg": "line one\nline \"two\""}"""
    assert redact(text) == text and check(text) == []


def test_source_code_reads_as_it_was():
    text = "\n".join(p.read_text() for p in sorted((ROOT / "lib/needlework_lab").glob("*.py")))
    words, changed = text.split(), redact(text).split()
    assert len(words) == len(changed) > 10_000
    assert sum(a != b for a, b in zip(words, changed, strict=True)) / len(words) < 0.001


def test_addresses_and_homes_are_found_when_they_are_encoded():
    text = redact(r"to=http%3A%2F%2F10.1.2.3%3A30 %2Fhome%2Falice%2Fx \/home\/alice\/x C:\\Users\\alice\\x")
    assert "10.1.2.3" not in text and "alice" not in text


@pytest.mark.parametrize(
    "text",
    [
        '["secret", "password", "api_key", "token"]',
        '"token", "position"',
        "prompt tokens: [1, 2, 3]",
        "token -> expert 17",
        "<token>hello</token>",
        "PASS: 12 tests",
        "PASS=12",
        "name: max_tokens\nvalue: 4096",
        "python -u serve.py:app",
        "secret key length is 3",
    ],
)
def test_words_in_those_forms_that_are_no_secret_stay(text):
    assert redact(text) == text and check(text) == []


def test_endless_line_is_bounded():
    assert len(clean("x" * 5_000_000)) < 25_000


@pytest.mark.parametrize(
    "text",
    [
        "a" * 20_000,
        "://" * 5000,
        "=" * 20_000,
        "a." * 9000,
        "0:" * 9000,
        "/home/" * 3000,
        "token=" * 3000,
        "A_" * 9000,
        "'" * 20_000,
        '"password": "' * 1500,
        "mysql -p" * 2500,
        "%25" * 6000,
        "\\\\u0070assword" * 1500,
        " " * 20_000,
        "A1b2" * 5000,
        "://a:" * 4000,
    ],
)
def test_no_pattern_hangs_on_a_hostile_line(text):
    redact(text)  # the suite's time limit is the assertion: a quadratic pattern takes minutes here


def test_command_line_checks_and_redacts(tmp_path):
    def run(*args):
        return subprocess.run(
            [sys.executable, "-m", "needlework", "redact", *args], capture_output=True, text=True, timeout=60
        )

    file = tmp_path / "a.log"
    file.write_text("peer 10.1.2.3\nfine\n")
    found = run("--check", str(file))
    assert found.returncode == 1 and ":1: address" in found.stdout and "10.1.2.3" not in found.stdout
    done = run(str(file), "-o", str(tmp_path / "b.log"))
    assert done.returncode == 0 and (tmp_path / "b.log").read_text() == "peer <address-1>\nfine\n"
    assert run("--check", str(tmp_path / "b.log")).returncode == 0
    again = run(str(file), "-o", str(tmp_path / "b.log"))
    assert again.returncode == 2 and "exists" in again.stderr and "Traceback" not in again.stderr


def test_texts_of_the_trade_come_out_clean():
    assert len(LEAKS) >= 140
    left = []
    for text, values in LEAKS:
        once = redact(text)
        if any(value in once for value in values) or redact(once) != once or check(once) or not check(text):
            left.append((text, once))
    assert left == []


def test_lines_that_engines_write_stay():
    assert len(ORDINARY) >= 100
    assert [(line, redact(line)) for line in ORDINARY if redact(line) != line] == []


def test_what_one_text_tells_is_replaced_in_all_others():
    """In one collection the unit names the key and the log says it."""
    redactor = Redactor()
    log = redactor.text("INFO retry with Qx7vLm2p9Tz on gpu-node-17 failed; q=Qx7vLm2p9Tz%3D for alice")
    redactor.text("DB_PASSWORD=Qx7vLm2p9Tz\nMASTER_ADDR=gpu-node-17\nUSER=alice\n")
    assert redactor.again(log) == "INFO retry with <secret-1> on <host-1> failed; q=<secret-1>%3D for <user-1>"
    assert redactor.report()["secret"] == {"values": 1, "places": 3}


def test_a_common_folder_under_home_is_no_user():
    assert redact("/home/data/models/x.json\nno data of models\n").endswith("no data of models\n")


@pytest.mark.parametrize("word", ["default", "required", "changes", "12345678", "abort"])
def test_a_word_that_a_log_says_for_another_reason_is_not_looked_for_again(word):
    assert redact(f"password={word}\nthe {word} value\n").endswith(f"the {word} value\n")


@pytest.mark.parametrize(
    "line",
    ["\\" * 20_000, '["' + '\\"' * 9_990 + '"]', '["' + '\\"' * 9_990, '"' * 20_000, "%25" * 6_600, "&amp;" * 4_000],
)
def test_a_line_of_escapes_costs_milliseconds(line):
    start = time.process_time()
    redact(line)
    assert time.process_time() - start < 0.3, "about 0.02 s on a quiet machine; quadratic patterns took 3 s and more"


def test_a_journal_of_backslashes_costs_seconds():
    start = time.process_time()
    redact("\n".join(json.dumps({"n": n, "MESSAGE": "\\" * 4_000}) for n in range(200)))
    assert time.process_time() - start < 6


def test_megabytes_of_log_take_seconds():
    lines = [f"{line} #{n}" for n in range(60) for line in ORDINARY]
    text = "\n".join(lines)
    start = time.process_time()
    redact(text)
    assert (time.process_time() - start) * 25e6 / len(text) < 240, "25 MB in a minute of a quiet core"
