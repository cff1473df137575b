"""Page dumps on disk: read and write, never pickle, never an allocation that a file's own header asked for.

A dump is `<name>.bin` (raw pages) with `<name>.json`, or one `.safetensors` file whose metadata holds the same JSON for
each tensor; `.npy` and `.npz` arrays are read as unlabelled bytes.

**Dumping from a running engine.** Save the uint8 buffer of one layer, the request's page ids and the sidecar's fields.

* SGLang 0.5.23, inside the scheduler process: `pool = scheduler.tp_worker.model_runner.token_to_kv_pool`. DeepSeek-V4
  (srt/mem_cache/deepseek_v4_memory_pool.py): `pool.get_swa_raw_buffer(layer)` for the window,
  `pool.get_extra_key_buffer(layer)` for c4 or c128, `pool.get_index_k_with_scale_buffer(layer)` for the indexer keys.
  DeepSeek-V3.2 (srt/mem_cache/memory_pool.py): `pool.kv_buffer[layer]` and `pool.get_index_k_with_scale_buffer(layer)`.
  Page ids: `req_to_token_pool.req_to_token[req.req_pool_idx, :length:page] // page` with the pool's page (256 for V4,
  64 for V3.2); the window pool maps them through its full-to-window table. Of a prefill/decode pair dump prefill
  after its last chunk and decode before its first step: decode goes on to write its own entries.
* vLLM 0.33.0, one process (VLLM_ENABLE_V1_MULTIPROCESSING=0): the cache of a layer is
  `vllm_config.compilation_config.static_forward_context[layer_name].kv_cache` (v1/worker/utils.py), block ids are the
  scheduler's `kv_cache_manager.get_block_ids(request_id)`, one list for each cache group. vLLM pads a page to the
  stride of its group (8,448 bytes to 8,640): save whole strides and put `stride` in the sidecar.

  Its SharedStorageConnector (distributed/kv_transfer/kv_connector/v1/shared_storage_connector.py) writes
  `<layer name>.safetensors` with the tensor kv_cache, a row for each slot of the prompt: read as it is.

Ranks of tensor parallelism hold the same latent pages each: one dump stands for all; `compare` shows whether it does.

A tensor becomes a dump with `Dump(buffer[page_ids].cpu().view(torch.uint8).flatten(1), layout, …)` and `write_dump`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .layouts import Layout, layout_of

HEADER_LIMIT = 16 << 20  # bytes of JSON that describe a dump; a real one is a few kilobytes
SIZE_LIMIT = 1 << 30  # bytes; the pages of one request and layer are a tenth of it at a million tokens
COUNT_LIMIT = 1000  # tensors or arrays of one file
TEXT_LIMIT = 200
PAGE_HEX, ENTRY_HEX = 16, 4  # hex digits of a page's digest, and of each entry's (`digests`)


@dataclass(frozen=True)
class Dump:
    """Pages of one pool and layer, in the request's order; `entries` are live (None: unknown, all are judged)."""

    raw: Tensor  # uint8 [pages, page bytes]; [1, n] while the layout is not known
    layout: str | None = None
    page_tokens: int = 64
    page_ids: tuple[int, ...] = ()  # physical page of each row
    pool: str = ""
    layer: int = 0
    request: str = ""
    role: str = ""  # prefill, decode, combined …
    entries: int | None = None
    tokens_per_entry: int = 1  # 4 in a c4 pool, 128 in a c128 pool
    page_digests: tuple[str, ...] = field(default=(), repr=False)  # as `pages.page_digests` gave them at the origin
    stride: int | None = None  # bytes from page to page while the layout is not known (None: pages without gaps)

    @property
    def record(self) -> Layout:
        """The layout. Raises ValueError if the dump is unlabelled."""
        if self.layout is None:
            raise ValueError("the dump names no layout; give one, or ask identify")
        return layout_of(self.layout)

    @property
    def live(self) -> Tensor | None:
        """bool [pages, page_tokens] of the entries that hold data, or None where the dump does not say."""
        if self.entries is None:
            return None
        slots = torch.arange(self.raw.shape[0] * self.page_tokens).view(-1, self.page_tokens)
        return slots < self.entries

    def with_layout(self, layout: str, page_tokens: int) -> Dump:
        """The same bytes cut into pages of a layout. Raises ValueError if they are not whole pages."""
        size, length = layout_of(layout).page_bytes(page_tokens), self.raw.numel()
        stride = size if self.layout or self.stride is None else self.stride
        if stride < size or length < size or (stride == size and length % size):
            raise ValueError(
                f"{layout} with {page_tokens} entries: expected pages of {size:,} bytes, found {length:,}"
                + (f", one every {stride:,}" if stride != size else "")
            )
        flat = self.raw.reshape(-1)
        raw = flat.as_strided(((length - size) // stride + 1, size), (stride, 1), flat.storage_offset())
        pages = len(raw)
        if self.entries is not None and not 1 <= self.entries <= pages * page_tokens:
            raise ValueError(f"{_short(self.entries)} entries do not fit {pages} pages of {page_tokens} (at least 1)")
        for key, items in (("page_ids", self.page_ids), ("page_digests", self.page_digests)):
            if len(items) not in (0, pages):
                raise ValueError(f"{key} has {len(items)} items for {pages} pages")
        lengths = (PAGE_HEX, PAGE_HEX + ENTRY_HEX * page_tokens)
        wrong = next((digest for digest in self.page_digests if len(digest) not in lengths), None)
        if wrong is not None:
            raise ValueError(
                f"page_digests are {PAGE_HEX} hex digits as page_digests gives them, found {_short(wrong)}"
            )
        return replace(self, raw=raw.contiguous(), layout=layout, page_tokens=page_tokens, stride=None)

    def describe(self) -> dict[str, Any]:
        """The sidecar's JSON object."""
        fields = {key: value for key, value in self.__dict__.items() if key not in ("raw", "stride")}
        fields |= {"stride": self.stride} if self.stride else {}
        return {**fields, "pages": self.raw.shape[0], "digest": _digest(self.raw)}

    def __str__(self) -> str:
        pages, size = self.raw.shape
        name = self.layout or "unlabelled"
        where = f"pool {self.pool or '?'}, layer {self.layer}, {self.role or 'role ?'}"
        return f"{name}, {where}: {pages:,} pages of {size:,} bytes"


def page_digests(
    raw: Tensor, layout: str | Layout, page_tokens: int = 64, live: Tensor | None = None, *, entries: bool = False
) -> list[str]:
    """One 16-digit digest a page over its live entries' bytes (no padding): what to save beside a dump.

    With `entries`, four digits for each entry follow it, and `diagnose` can tell a few changed bytes from foreign
    content.
    """
    layout = layout_of(layout)
    content = layout.entry_bytes(raw, page_tokens)
    if live is not None:
        content = content * live[..., None]
    content = content.contiguous().cpu()
    out = [hashlib.blake2b(page.numpy().tobytes(), digest_size=PAGE_HEX // 2).hexdigest() for page in content]
    if not entries:
        return out
    each = ["".join(entry_digest(entry) for entry in page) for page in content]
    return [page + rest for page, rest in zip(out, each, strict=True)]


def entry_digest(entry: Tensor) -> str:
    return hashlib.blake2b(entry.numpy().tobytes(), digest_size=ENTRY_HEX // 2).hexdigest()


def _digest(raw: Tensor) -> str:
    return hashlib.blake2b(raw.cpu().contiguous().numpy().data, digest_size=16).hexdigest()


def write_dump(path: str | Path, dump: Dump) -> Path:
    """Write `<path>.bin` and `<path>.json` (or one file if the name ends in .safetensors); returns the data file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = dump.raw.cpu().contiguous()
    text = json.dumps(dump.describe(), indent=1)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        name = f"{dump.pool or 'pool'}.{dump.layer}"
        save_file({name: raw}, str(path), metadata={name: text})
        return path
    path = path.with_suffix("") if path.suffix in (".bin", ".json") else path
    data = path.with_name(path.name + ".bin")
    raw.numpy().tofile(data)
    path.with_name(path.name + ".json").write_text(text + "\n")
    return data


def read(path: str | Path, limit_bytes: int = SIZE_LIMIT) -> list[Dump]:
    """The dumps in a file: `.bin` (with or without its `.json`), `.safetensors`, `.npy`, `.npz`.

    Raises ValueError, with expected and found sizes, for anything that does not fit or has more than `limit_bytes`, as
    stored or unpacked; FileNotFoundError.
    """
    path = Path(path)
    if path.suffix == ".json":
        path = path.with_suffix(".bin")
    size = _size(path)
    if size == 0:
        raise ValueError(f"{path.name} is empty")
    if size > limit_bytes:
        raise ValueError(
            f"{path.name} has {size:,} bytes; at most {limit_bytes:,} are read (limit_bytes, --limit-mib): save the "
            "pages of one request and layer"
        )
    match path.suffix:
        case ".safetensors":
            return _read_safetensors(path, size)
        case ".npy" | ".npz":
            return _read_numpy(path, size, limit_bytes)
    side = path.with_suffix(".json")
    label: Mapping[str, Any] = {}
    if side.exists():
        if _size(side) > HEADER_LIMIT:
            raise ValueError(f"{side.name}: a description of more than {HEADER_LIMIT:,} bytes is not a page dump's")
        label = _json(side.read_bytes(), side.name)
    return [_labelled(torch.from_numpy(np.fromfile(path, dtype=np.uint8)), label, path.name)]


def _size(path: Path) -> int:
    """Bytes of a regular file, or of one that a link leads to; a pipe or device would give bytes without end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path.name} is not a file: it is a folder, pipe or device, which is not read")
    return found.st_size


def _json(text: bytes, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {_said(error, 80)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value


_TYPES: dict[str, tuple[type, ...]] = {
    "layout": (str, type(None)), "page_tokens": (int,), "page_ids": (list,), "pool": (str,), "layer": (int,),
    "request": (str,), "role": (str,), "entries": (int, type(None)), "tokens_per_entry": (int,),
    "page_digests": (list,),
}  # fmt: skip


def _labelled(raw: Tensor, label: Mapping[str, Any], name: str) -> Dump:
    known: dict[str, Any] = {}
    for key, types in _TYPES.items():
        if key in label:
            value = label[key]
            if not isinstance(value, types) or isinstance(value, bool):
                raise ValueError(f"{name}: {key} is {types[0].__name__}, found {type(value).__name__}")
            known[key] = tuple(value) if isinstance(value, list) else value
    for key in ("pool", "request", "role"):
        if not known.get(key, "").isprintable() or len(known.get(key, "")) > TEXT_LIMIT:
            raise ValueError(f"{name}: {key} is at most {TEXT_LIMIT} printable characters, found {known[key][:40]!a}")
    for key, least in (("page_tokens", 1), ("tokens_per_entry", 1), ("layer", 0)):
        if not least <= known.get(key, 1) <= 1 << 20:
            raise ValueError(f"{name}: {key} lies between {least} and {1 << 20:,}, found {_short(known[key])}")
    for number in known.get("page_ids", ()):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 40:
            raise ValueError(f"{name}: page_ids are integers from 0 on, found {_short(number)}")
    twice, often = next(iter(Counter(known.get("page_ids", ())).most_common(1)), (0, 0))
    if often > 1:
        raise ValueError(f"{name}: page_ids name page {twice} more than once; a request holds a page once")
    for digest in known.get("page_digests", ()):
        if not isinstance(digest, str) or set(digest) - set("0123456789abcdef"):
            raise ValueError(f"{name}: page_digests are hex digits as page_digests gives them, found {_short(digest)}")
    stride = label.get("stride")
    if stride is not None and (type(stride) is not int or not 0 < stride <= raw.numel() or raw.numel() % stride):
        raise ValueError(f"{name}: stride divides {raw.numel():,} bytes, found {_short(stride)}")
    if "digest" in label and label["digest"] != _digest(raw):
        raise ValueError(f"{name}: the bytes are not those that were saved (digest {_digest(raw)[:8]}… differs)")
    layout = known.pop("layout", None)
    dump = Dump(raw.reshape(1, -1), **known, stride=stride)
    if layout is None:
        return dump
    try:
        dump = dump.with_layout(layout, dump.page_tokens)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    claimed = label.get("pages", len(dump.raw))
    if isinstance(claimed, bool) or claimed != len(dump.raw):
        raise ValueError(f"{name}: pages is {_short(claimed)}, the bytes are {len(dump.raw):,} pages")
    return dump


def _inside(path: Path, name: str) -> str:
    """A tensor or array of a file, named for a sentence."""
    return f"{path.name}: {name if name.isprintable() and len(name) < 60 else ascii(name)[:60]}"


def _said(error: Exception, most: int) -> str:
    text = " ".join(str(error).split())[:most]
    return text if text.isprintable() else ascii(text)[1 : most + 1]


def _short(value: object) -> str:
    """A value of a hostile file, fit for a sentence."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a number of more than 30 digits"
    return ascii(value)[:40]


def _read_safetensors(path: Path, size: int) -> list[Dump]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, HEADER_LIMIT):
            raise ValueError(f"{path.name}: the header claims {length:,} bytes, the file has {size:,}")
        header = _json(file.read(length), path.name)
    labels = header.get("__metadata__") or {}
    if not isinstance(labels, dict) or len(header) > COUNT_LIMIT + 1:
        raise ValueError(f"{path.name}: its metadata is an object, beside at most {COUNT_LIMIT:,} tensors")
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(path))
    except Exception as error:  # its parser and torch's raise several kinds on a broken file
        raise ValueError(f"{path.name} is not a sound safetensors file: {_said(error, 120)}") from None
    if not tensors:
        raise ValueError(f"{path.name} holds no tensor")
    out = []
    for name, tensor in tensors.items():
        label: Mapping[str, Any] = {"pool": name}
        if name in labels:
            label = _json(str(labels[name]).encode(errors="replace"), _inside(path, name))
        elif set(tensors) == {"kv_cache"}:  # vLLM's connector: one file a layer, which is named after it
            number = re.search(r"\blayers?\.(\d{1,4})\b", path.stem)
            label = {"pool": path.stem, "layer": int(number[1]) if number else 0}
        out.append(_labelled(tensor.contiguous().flatten().view(torch.uint8), label, _inside(path, name)))
    return out


def _read_numpy(path: Path, size: int, limit_bytes: int) -> list[Dump]:
    """Arrays of a .npy or .npz; the header's shape is held against the file's size before anything is allocated."""
    out = []
    try:
        if path.suffix == ".npy":
            with open(path, "rb") as file:
                _check_numpy_header(file, size, path.name)
            arrays = {path.stem: np.load(path, allow_pickle=False)}
        else:
            arrays = {}
            with zipfile.ZipFile(path) as archive:
                items = archive.infolist()
                whole = sum(item.file_size for item in items)
                if whole > limit_bytes or len(items) > COUNT_LIMIT:
                    raise ValueError(
                        f"its {len(items):,} arrays claim {whole:,} bytes, at most {COUNT_LIMIT:,} arrays and "
                        f"{limit_bytes:,} bytes are unpacked; save each as .npy"
                    )
                for item in items:
                    # deflate packs at most 1,032 to 1
                    if item.file_size > 1100 * max(1, item.compress_size):
                        raise ValueError(
                            f"{item.filename[:60]} claims {item.file_size:,} bytes in {item.compress_size:,}"
                        )
                    with archive.open(item) as file:
                        _check_numpy_header(file, item.file_size, item.filename[:60])
                    with archive.open(item) as file:
                        arrays[item.filename.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # the parsers of numpy and zipfile raise a dozen kinds on a broken file
        raise ValueError(f"{path.name} is not a sound numpy file: {_said(error, 160)}") from None
    for name, array in arrays.items():
        raw = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        if raw.numel():
            out.append(_labelled(raw, {"pool": name}, _inside(path, name)))
    if not out:
        raise ValueError(f"{path.name} holds no bytes")
    return out


def _check_numpy_header(file: Any, size: int, name: str) -> None:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are never read")
    need = dtype.itemsize
    for extent in shape:
        need *= int(extent)
    if need > size:
        raise ValueError(f"{name}: the header claims {need:,} bytes, the file has {size:,}")
