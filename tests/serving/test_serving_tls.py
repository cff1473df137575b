"""A server that signed its own certificate: one sentence without `--ca FILE`, everything works with it."""

from __future__ import annotations

import subprocess

import pytest
from mock_endpoint import Mock, make_app, serving
from needlework import workbook
from needlework.__main__ import main as needlework
from needlework.serving import Endpoint, TransportError, run

UNTRUSTED = "certificate is not trusted (self-signed?); name its authority with --ca FILE"


def certificate(folder, name: str = "DNS:localhost,IP:127.0.0.1"):
    """(certificate, key) as `openssl req -x509` makes them."""
    files = folder / "own.pem", folder / "own.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-keyout", files[1], "-out", files[0], "-days", "2", "-subj", "/CN=own",
               "-addext", f"subjectAltName={name}"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return files


def served(files):
    return serving(make_app(Mock()), ssl_certfile=str(files[0]), ssl_keyfile=str(files[1]))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    files = certificate(tmp_path_factory.mktemp("tls"))
    with served(files) as url:
        yield url, str(files[0])


def test_a_self_signed_server_is_refused_with_the_way_out(server, tmp_path, capsys):
    url, _ = server
    with pytest.raises(TransportError) as caught:
        run(Endpoint(url, "mock", timeout_s=5).chat([{"role": "user", "content": "Hello."}]))
    assert caught.value.failure == "tls" and UNTRUSTED in caught.value.reason
    for words in (
        ["probe", "recall", url, "--yes"],
        ["probe", "what", url],
        ["diagnose", url, "--yes", "--run", str(tmp_path / "run")],
    ):
        assert needlework(words) == 2
        said = capsys.readouterr().err.strip().split("\n")[-1]
        assert UNTRUSTED in said and url not in said and "Traceback" not in said, said
    with pytest.raises(workbook.TargetError, match=r"--ca FILE"), workbook.open_target(url):
        pass


def test_with_its_certificate_everything_works(server, tmp_path, capsys):
    url, file = server
    assert needlework(["probe", "what", url, "--ca", file]) == 0
    small = ["--lengths", "300,600", "--depths", "0.5", "--yes"]
    assert needlework(["probe", "recall", url, "--ca", file, *small]) == 0
    asked = ["diagnose", url, "--ca", file, "--yes", "--requests", "24", "--run", str(tmp_path / "run")]
    assert needlework(asked) in (0, 1)
    assert "answers right" in capsys.readouterr().out
    with workbook.open_target(url, ca_file=file) as target:
        assert run(target.first.chat([{"role": "user", "content": "Hello."}])).text == "Hello."


def test_what_is_no_certificate_is_told(server, tmp_path, capsys):
    url, _ = server
    (tmp_path / "empty.pem").write_text("no certificate")
    for file in ("empty.pem", "missing.pem"):
        assert needlework(["probe", "what", url, "--ca", str(tmp_path / file)]) == 2
        assert f"{file} holds no certificates in PEM form" in capsys.readouterr().err


def test_a_certificate_for_another_name_is_told_by_its_reason(tmp_path):
    files = certificate(tmp_path, "DNS:other")
    with served(files) as url, pytest.raises(TransportError) as caught:
        run(Endpoint(url, "mock", timeout_s=5, ca_file=files[0]).chat([{"role": "user", "content": "Hello."}]))
    assert caught.value.failure == "tls" and "another name" in caught.value.reason and "--ca" not in caught.value.reason
