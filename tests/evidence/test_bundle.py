"""A bundle is checked before it is believed; a hostile zip is refused and leaves nothing behind."""

import io
import json
import re
import stat
import zipfile
from pathlib import Path

import pytest
from needlework.evidence import Bundle, unzip
from needlework.evidence.collect import Collection

ROOT = Path(__file__).resolve().parents[2]
INCIDENT = '[incident]\ntitle = "t"\nsymptom = "s"\ndate = "2026-11-29"\nengine = "lab"\n'


def make(root):
    (root / "runs/a").mkdir(parents=True)
    (root / "pages").mkdir()
    (root / "incident.toml").write_text(INCIDENT)
    (root / "runs/a/manifest.json").write_text("{}")
    (root / "runs/a/trials.jsonl").write_text('{"trial_id": "x"}\n')
    (root / "pages/p.bin").write_bytes(bytes(8448))
    (root / "pages/p.json").write_text("{}")
    (root / "ledger.json").write_text("{}")
    bundle = Bundle(root)
    bundle.seal()
    return bundle


def test_a_sealed_bundle_has_no_problem_and_survives_the_zip(tmp_path):
    bundle = make(tmp_path / "demo")
    assert bundle.problems() == []
    first = bundle.zip(tmp_path / "one.zip").read_bytes()
    assert bundle.zip(tmp_path / "two.zip").read_bytes() == first
    back = unzip(tmp_path / "one.zip", tmp_path / "elsewhere")
    assert back.problems() == [] and back.digests() == bundle.digests() and back.run_names == ["a"]
    with pytest.raises(ValueError, match="already exists"):
        unzip(tmp_path / "one.zip", tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("runs/a/trials.jsonl", '{"trial_id": "y"}\n', "changed since"),
        ("runs/a/trials.jsonl", "not json\n", "not valid JSON"),
        ("runs/a/new.txt", "x", "not among the sealed"),
        ("runs/b/trials.jsonl", "{}\n", "manifest.json is missing"),
        ("incident.toml", "[incident]\n", "lacks title"),
        ("incident.toml", "[[[", "not valid TOML"),
        ("surprise.txt", "x", "not a part of a bundle"),
        ("evidence/log.txt", "peer 10.1.2.3\n", "holds a address"),
        ("pages/q.bin", "x", "description"),
        ("digests.json", "{", "damaged"),
    ],
)
def test_every_problem_is_named(tmp_path, name, content, sentence):
    bundle = make(tmp_path / "demo")
    (bundle.path / name).parent.mkdir(parents=True, exist_ok=True)
    (bundle.path / name).write_text(content)
    assert any(sentence in problem for problem in bundle.problems())
    with pytest.raises(ValueError, match="not fit to share"):
        bundle.zip(tmp_path / "x.zip")


@pytest.mark.parametrize("text", ["incident = 3", "incident = [1]", "a = " + "[" * 5000])
def test_an_incident_of_another_shape_is_one_sentence(tmp_path, text):
    bundle = make(tmp_path / "demo")
    (bundle.path / "incident.toml").write_text(text)
    assert any(re.search("must be a table|not valid TOML", problem) for problem in bundle.problems())


@pytest.mark.parametrize("sealed", ["5", "null", '"incident.toml"', "[1]", "[" * 100_000])
def test_digests_of_another_shape_are_damaged(tmp_path, sealed):
    bundle = make(tmp_path / "demo")
    (bundle.path / "digests.json").write_text(f'{{"sha256": {sealed}}}')
    assert "digests.json is damaged" in bundle.problems()
    (bundle.path / "collection.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        Collection.read(bundle.path)


def test_a_link_in_a_bundle_is_a_problem(tmp_path):
    bundle = make(tmp_path / "demo")
    (bundle.path / "evidence").mkdir()
    (bundle.path / "evidence/passwd").symlink_to("/etc/passwd")
    assert any("symbolic" in problem for problem in bundle.problems())


def hostile(entries):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in entries:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return data.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([("demo/../../x", "x", 0o644)], "outside"),
        ([("/etc/x", "x", 0o644)], "outside"),
        ([("demo\\..\\x", "x", 0o644)], "outside"),
        ([("c:/x", "x", 0o644)], "outside"),
        ([("demo/link", "/etc/passwd", stat.S_IFLNK | 0o777)], "symbolic link"),
        ([("demo/a", "x", 0o644), ("demo/a", "y", 0o644)], "twice"),
        ([("demo/bomb", bytes(64 << 20), 0o644)], "no incident bundle"),
        ([(f"demo/{n}", "x", 0o644) for n in range(6000)], "no incident bundle"),
        ([(f"demo/{n}/", "", 0o755) for n in range(90_000)], "too many entries"),
        ([("demo/x", "x", 0o644), ("demo/../../evil/", "", 0o755)], "outside"),
        ([("demo/x", "x", 0o644), ("demo/l/", "/etc", stat.S_IFLNK | 0o777)], "symbolic link"),
        ([("demo/pipe", "", stat.S_IFIFO | 0o644)], "neither a file nor a folder"),
        ([("demo/null", "", stat.S_IFCHR | 0o644)], "neither a file nor a folder"),
        ([("demo/A", "x", 0o644), ("demo/a", "y", 0o644)], "twice"),
        ([("demo/\x1b[31mred", "x", 0o644)], "strange characters"),
        ([("demo/a\nb", "x", 0o644)], "strange characters"),
        ([("demo/\u202egnp.exe", "x", 0o644)], "strange characters"),
        ([("demo/" + "a/" * 500 + "x", "x", 0o644)], "too long"),
        ([("demo/a", "x", 0o644), ("demo/a/b", "x", 0o644)], "could not be unpacked"),
        ([("Demo Name/x", "x", 0o644)], "named after its incident"),
        ([("a/x", "x", 0o644), ("b/x", "x", 0o644)], "one folder"),
        ([("x", "x", 0o644)], "one folder"),
        ([], "one folder"),
    ],
)
def test_a_hostile_zip_is_refused_whole(tmp_path, entries, sentence):
    (tmp_path / "in.zip").write_bytes(hostile(entries))
    with pytest.raises(ValueError, match=sentence):
        unzip(tmp_path / "in.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_an_encrypted_or_unknown_entry_is_one_sentence_without_a_path(tmp_path):
    good = hostile([("demo/a", "hello", 0o644)])
    for offset, value, sentence in ((8, 1, "encrypted"), (10, 99, "damaged")):
        data = bytearray(good)
        data[data.find(b"PK\x01\x02") + offset] = value
        (tmp_path / "in.zip").write_bytes(data)
        with pytest.raises(ValueError, match=sentence) as caught:
            unzip(tmp_path / "in.zip", tmp_path / "out")
        assert str(tmp_path) not in str(caught.value) and list((tmp_path / "out").iterdir()) == []


def test_the_shipped_incident_can_be_trusted_as_it_is():
    assert Bundle(ROOT / "data/incidents/context-loss").problems() == []


def test_damaged_zips_are_one_sentence(tmp_path):
    bundle = make(tmp_path / "demo")
    good = bundle.zip(tmp_path / "good.zip").read_bytes()
    for cut in (0, 10, len(good) // 2, len(good) - 3):
        (tmp_path / "bad.zip").write_bytes(good[:cut])
        with pytest.raises(ValueError, match=r"not a readable zip|could not be unpacked"):
            unzip(tmp_path / "bad.zip", tmp_path / "out")
    flipped = bytearray(good)
    flipped[60] ^= 0xFF
    (tmp_path / "bad.zip").write_bytes(flipped)
    with pytest.raises(ValueError, match="zip"):
        unzip(tmp_path / "bad.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_an_entry_larger_than_its_header_says_is_refused(tmp_path):
    data = bytearray(hostile([("demo/a", bytes(5000), 0o644)]))
    size = (5000).to_bytes(4, "little")
    while (at := data.find(size)) >= 0:  # both the local header and the directory lie about the size
        data[at : at + 4] = (10).to_bytes(4, "little")
    (tmp_path / "lie.zip").write_bytes(data)
    with pytest.raises(ValueError, match=r"could not be unpacked|zip"):
        unzip(tmp_path / "lie.zip", tmp_path / "out")
    assert json.dumps([p.name for p in (tmp_path / "out").glob("*")]) == "[]"
