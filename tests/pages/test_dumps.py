"""Dumps on disk: every form round-trips, hostile files cost one sentence and no memory; the command's tables."""

from __future__ import annotations

import io
import json
import os
import pickle
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from needlework.__main__ import main
from needlework.pages import LAYOUTS, Dump, page_digests, read, write_dump

LAYOUT = LAYOUTS["dsa-index-fp8"]


@pytest.fixture
def dump() -> Dump:
    torch.manual_seed(0)
    raw = LAYOUT.encode({"values": torch.randn(3, 64, 128)})
    dump = Dump(raw, LAYOUT.name, 64, (4, 9, 2), "c4-index", 2, "r1", "prefill", entries=190, tokens_per_entry=4)
    return replace(dump, page_digests=tuple(page_digests(raw, LAYOUT, 64, dump.live)))


@pytest.mark.parametrize("name", ["a.bin", "a", "a.safetensors"])
def test_dumps_come_back_whole(tmp_path, dump, name):
    back = read(write_dump(tmp_path / name, dump))[0]
    assert torch.equal(back.raw, dump.raw)
    assert back.describe() == dump.describe()
    assert int(back.live.sum()) == 190


def test_numpy_files_are_unlabelled_bytes(tmp_path, dump):
    np.save(tmp_path / "a.npy", dump.raw.numpy())
    np.savez_compressed(tmp_path / "a.npz", pool=dump.raw.numpy())
    for name in ("a.npy", "a.npz"):
        back = read(tmp_path / name)[0]
        assert back.layout is None and torch.equal(back.with_layout(LAYOUT.name, 64).raw, dump.raw)


def test_a_padded_stride_is_cut(tmp_path, dump):
    wide = torch.nn.functional.pad(dump.raw, (0, 192))
    wide.numpy().tofile(tmp_path / "v.bin")
    (tmp_path / "v.json").write_text(json.dumps({"layout": LAYOUT.name, "stride": 8640}))
    assert torch.equal(read(tmp_path / "v.bin")[0].raw, dump.raw)


def test_a_sidecar_may_know_everything_but_the_layout(tmp_path, dump):
    path = tmp_path / "v.bin"
    torch.nn.functional.pad(dump.raw, (0, 192)).numpy().tofile(path)
    (tmp_path / "v.json").write_text(json.dumps({"stride": 8640, "entries": 190, "page_ids": [4, 9, 2]}))
    back = read(path)[0]
    assert back.layout is None and (back.stride, back.entries, back.page_ids) == (8640, 190, (4, 9, 2))
    cut = back.with_layout(LAYOUT.name, 64)
    assert torch.equal(cut.raw, dump.raw) and int(cut.live.sum()) == 190 and cut.stride is None
    with pytest.raises(ValueError, match="190 entries do not fit 3 pages of 32"):
        replace(back, stride=8640).with_layout(LAYOUT.name, 32)
    assert main(["pages", "diagnose", str(path)]) == 0


def test_files_of_the_connector_of_vllm_are_named_after_their_layer(tmp_path, dump):
    """Slots in order, one row each: rows of an interleaved layout are its pages."""
    from safetensors.torch import save_file

    layout = LAYOUTS["v32-mla-fp8"]
    raw = layout.encode({"values": torch.randn(2, 64, layout.dim)})
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        save_file({"kv_cache": raw.view(128, 656)}, str(tmp_path / side / "model.layers.17.self_attn.attn.safetensors"))
        raw[1] = 0
    files = [str(next((tmp_path / side).iterdir())) for side in ("a", "b")]
    back = read(files[0])[0]
    assert (back.pool, back.layer) == ("model.layers.17.self_attn.attn", 17)
    assert main(["pages", "diagnose", files[0]]) == 0
    assert main(["pages", "compare", "--layout", "v32-mla-fp8", *files]) == 1


def test_null_metadata_is_no_metadata(tmp_path):
    (tmp_path / "n.safetensors").write_bytes(_safetensors(4, {"__metadata__": None}))
    assert read(tmp_path / "n.safetensors")[0].raw.numel() == 4


def _hostile(folder, dump):
    good = write_dump(folder / "good.bin", dump)
    side = json.loads((folder / "good.json").read_text())

    def variant(name, **changes):
        (folder / f"{name}.bin").write_bytes(good.read_bytes())
        (folder / f"{name}.json").write_text(json.dumps({**side, **changes}))
        return folder / f"{name}.bin"

    def raw(name, data):
        (folder / name).write_bytes(data)
        return folder / name

    npy = io.BytesIO()
    np.lib.format.write_array_header_1_0(npy, {"descr": "|u1", "fortran_order": False, "shape": (100 * 10**9,)})
    bomb = folder / "claim.npz"
    with zipfile.ZipFile(bomb, "w") as archive:
        archive.writestr("a.npy", npy.getvalue() + b"tiny")
    many = folder / "many.npz"  # each entry alone is sound, all together are a bomb
    with zipfile.ZipFile(many, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("a.npy", bytes(64 << 20))
        archive.filelist *= 70
    objects = io.BytesIO()
    np.save(objects, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    yield "digest", variant("digest", digest="0" * 32), "not those that were saved"
    yield "pages", variant("ids", page_ids=[1]), "page_ids has 1 items for 3 pages"
    yield "entries", variant("entries", entries=10**12), "do not fit 3 pages"
    yield "tokens", variant("tokens", page_tokens=10**12), "page_tokens lies between"
    yield "whole pages", variant("whole", page_tokens=63), "expected pages of 8,316 bytes, found 25,344"
    yield "layout", variant("layout", layout="nonsense"), "unknown layout"
    yield "type", variant("type", layer="two"), "layer is int, found str"
    yield "stride", variant("stride", stride=5), "stride divides 25,344 bytes, found 5"
    yield "short stride", variant("short", stride=3), "expected pages of 8,448 bytes, found 25,344, one every 3"
    yield "negative id", variant("negative", page_ids=[4, -9, 2]), "integers from 0 on, found -9"
    yield "id twice", variant("twice", page_ids=[4, 9, 4]), "page 4 more than once"
    yield "boolean id", variant("boolean", page_ids=[4, True, 2]), "integers from 0 on, found True"
    yield "pages claimed", variant("pages", pages=4), "pages is 4, the bytes are 3 pages"
    yield "no entry", variant("none", entries=0), "0 entries do not fit 3 pages"
    yield "surrogate", variant("surrogate", pool="\ud800"), "pool is at most 200 printable characters"
    yield "escape", variant("escape", request="\x1b[2J"), "request is at most 200 printable characters"
    yield "long name", variant("long", role="r" * 201), "role is at most 200 printable characters"
    yield "layer", variant("layer", layer=-1), "layer lies between 0 and"
    yield "digests", variant("hex", page_digests=["0" * 15 + "g"] * 3), "page_digests are hex digits"
    yield "short digests", variant("short hex", page_digests=["0" * 15] * 3), "page_digests are 16 hex digits"
    yield "json", (variant("list"), (folder / "list.json").write_text("[1]"))[0], "expected a JSON object"
    yield "deep", (variant("deep"), (folder / "deep.json").write_text("[" * 100_000))[0], "is not JSON"
    yield "empty", raw("empty.bin", b""), "is empty"
    yield (
        "safetensors header",
        raw("h.safetensors", (100 * 10**9).to_bytes(8, "little") + b"{}"),
        "header claims 100,000,000,000",
    )
    yield "safetensors offsets", raw("o.safetensors", _safetensors(10**11)), "not a sound safetensors file"
    yield "npy", raw("claim.npy", npy.getvalue() + b"tiny"), "header claims 100,000,000,000 bytes"
    yield "npz", bomb, "header claims 100,000,000,000 bytes"
    yield "bomb", many, "its 70 arrays claim 4,697,620,480 bytes, at most 1,000 arrays and 1,073,741,824 bytes"
    with zipfile.ZipFile(folder / "tiny.npz", "w") as archive:
        for number in range(1001):
            archive.writestr(f"{number}.npy", b"")
    yield "tiny arrays", folder / "tiny.npz", "its 1,001 arrays claim 0 bytes"
    yield "no metadata", raw("null.safetensors", _safetensors(4, {"__metadata__": [1]})), "its metadata is an object"
    many_tensors = {str(n): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(1001)}
    yield "tiny tensors", raw("tiny.safetensors", _safetensors(4, many_tensors)), "at most 1,000 tensors"
    for name, source in (("pipe", None), ("zero", "/dev/zero")):
        for suffix in (".bin", ".npy", ".npz", ".safetensors", ".json"):
            path = folder / f"{name}{suffix}"
            os.mkfifo(path) if source is None else path.symlink_to(source)
        (folder / f"{name}.bin").unlink()
        (folder / f"{name}.bin").write_bytes(good.read_bytes())
        yield f"{name} as sidecar", folder / f"{name}.bin", f"{name}.json is not a file"
        for suffix in (".npy", ".npz", ".safetensors"):
            yield f"{name}{suffix}", folder / f"{name}{suffix}", "is not a file: it is a folder, pipe or device"
    for suffix in (".bin", ".npy", ".npz", ".safetensors"):
        os.truncate(raw(f"sparse{suffix}", npy.getvalue()), 5 << 30)
        yield f"sparse{suffix}", folder / f"sparse{suffix}", "has 5,368,709,120 bytes; at most"
    huge = variant("huge")
    os.truncate(folder / "huge.json", 5 << 30)
    yield "sparse sidecar", huge, "a description of more than 16,777,216 bytes"
    yield "zip", raw("broken.npz", b"PK\x03\x04nothing"), "not a sound numpy file"
    yield "objects", raw("objects.npy", objects.getvalue()), "Python objects, which are never read"
    yield "pickle", raw("pickle.npy", pickle.dumps({"a": 1})), "not a sound numpy file"


def _safetensors(end: int, more: dict | None = None) -> bytes:
    header = json.dumps({**(more or {}), "a": {"dtype": "U8", "shape": [end], "data_offsets": [0, end]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"tiny"


def test_hostile_files_cost_one_sentence_and_no_memory(tmp_path, dump, capsys):
    for name, path, words in _hostile(tmp_path, dump):
        tracemalloc.start()
        with pytest.raises(ValueError, match=words) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2_000_000, (name, peak)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400, name
        assert main(["pages", "diagnose", str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("needlework pages: ") and captured.err.count("\n") == 1, name


WRONG = (
    None,
    True,
    -1,
    0,
    10**40,
    1.5,
    float("nan"),
    "",
    "\ud800",
    "\n",
    "x" * 10**4,
    [],
    [None],
    [-1],
    [[]],
    {},
    {"a": 1},
)


def test_every_wrong_sidecar_gets_one_sentence(tmp_path, dump):
    """Each key with each wrong value: read as it is, or refused in one printable sentence."""
    good = write_dump(tmp_path / "good.bin", dump)
    side = json.loads((tmp_path / "good.json").read_text())
    refused = 0
    for key in (*side, "stride", "unknown"):
        for wrong in WRONG:
            (tmp_path / "good.json").write_text(json.dumps({**side, key: wrong}))
            try:
                assert len(read(good)) == 1
            except ValueError as error:
                refused += 1
                assert str(error).isprintable() and len(str(error)) < 400, (key, wrong)
    assert refused > 150


def test_every_broken_header_gets_one_sentence(tmp_path, dump):
    """Bytes of sidecars and headers flipped, cut and repeated."""
    write_dump(tmp_path / "a.bin", dump)
    write_dump(tmp_path / "a.safetensors", dump)
    np.save(tmp_path / "a.npy", dump.raw.numpy())
    np.savez(tmp_path / "a.npz", pool=dump.raw.numpy())
    generator = np.random.default_rng(0)
    for name, reader in (("a.json", "a.bin"), ("a.safetensors",) * 2, ("a.npy",) * 2, ("a.npz",) * 2):
        whole = (tmp_path / name).read_bytes()
        head = min(len(whole), 700)
        for _ in range(60):
            data = bytearray(whole)
            at = int(generator.integers(head))
            match int(generator.integers(3)):
                case 0:
                    data[at] ^= 1 << int(generator.integers(8))
                case 1:
                    del data[at:]
                case _:
                    data[at:at] = data[: int(generator.integers(64))]
            (tmp_path / name).write_bytes(data)
            try:
                read(tmp_path / reader)
            except ValueError as error:
                assert str(error).isprintable() and len(str(error)) < 400, (name, at)
        (tmp_path / name).write_bytes(whole)


# ---- the command -----------------------------------------------------------------------------------------------------
def test_command_on_healthy_dumps(tmp_path, dump, capsys):
    one, two = write_dump(tmp_path / "a.bin", dump), write_dump(tmp_path / "b.safetensors", dump)
    np.save(tmp_path / "c.npy", dump.raw.numpy())
    assert main(["pages", "diagnose", str(one), str(two)]) == 0
    assert "0 findings" in capsys.readouterr().out
    assert main(["pages", "compare", str(one), str(two)]) == 0
    assert "1 pool arrived, byte for byte" in capsys.readouterr().out
    assert main(["pages", "identify", str(tmp_path / "c.npy")]) == 0
    assert "c.npy: dsa-index-fp8\n" in capsys.readouterr().out
    assert main(["pages", "diagnose", str(tmp_path / "c.npy"), "--entries", "192"]) == 0


def test_command_on_damaged_dumps(tmp_path, dump, capsys):
    one = write_dump(tmp_path / "a.bin", dump)
    damaged = dump.raw.clone()
    damaged[1] = 0
    np.save(tmp_path / "b.npy", damaged.numpy())
    arguments = ["--layout", LAYOUT.name]
    assert main(["pages", "diagnose", str(tmp_path / "b.npy"), *arguments]) == 1
    assert "never-written" in capsys.readouterr().out
    assert main(["pages", "compare", str(one), str(tmp_path / "b.npy"), *arguments, "--csv"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("name,severity,pool") and "tokens 256–511 are lost" in out
    np.save(tmp_path / "noise.npy", np.random.default_rng(0).integers(0, 256, 8448, dtype=np.uint8))
    assert main(["pages", "identify", str(tmp_path / "noise.npy")]) == 1
    assert "none of these" in capsys.readouterr().out


def test_a_pool_named_as_a_formula_reaches_no_spreadsheet(tmp_path, dump, capsys):
    sent = replace(dump, pool="=1+1")
    lost = replace(sent, raw=dump.raw.clone())
    lost.raw[1] = 0
    files = [str(write_dump(tmp_path / f"{name}.bin", one)) for name, one in (("a", sent), ("b", lost))]
    assert main(["pages", "compare", *files, "--csv"]) == 1
    out = capsys.readouterr().out
    assert "'=1+1" in out and ",=1+1" not in out


def test_command_usage_errors(tmp_path, capsys):
    assert main(["pages"]) == 2
    assert main(["pages", "diagnose", str(tmp_path / "absent.bin")]) == 2
    assert main(["pages", "--help"]) == 0
    assert "identify" in capsys.readouterr().out
