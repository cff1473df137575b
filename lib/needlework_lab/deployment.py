"""A running deployment: its addresses, what its servers remember of each request, and its pages as dumps."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needlework_lab.servers import Servers, call


class LabError(RuntimeError):
    """The lab could not do what was asked; the message is one sentence, with the last log lines where they help."""


@dataclass(frozen=True)
class Deployment(Servers):
    """A running deployment in a box; see `Servers` for its addresses."""

    geometry: str
    faults: tuple[str, ...]
    seed: int
    router: str | None = None

    def __str__(self) -> str:
        planted = "healthy" if not self.faults else "faults " + ", ".join(self.faults)
        return f"{self.mode} deployment, geometry {self.geometry}, {planted}"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(f"<tr><th>{escape(role)}</th><td>running</td></tr>" for role in self.children)
        return f"<p>{escape(str(self))}</p><table>{rows}</table>"

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory of each server process in bytes (0 where the system does not tell)."""
        return {role: self.children[role].rss_bytes() for role in self.roles}

    def request(self, role: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """JSON (or text) of one request to a process; raises LabError with the server's sentence when it refuses."""
        try:
            status, headers, raw = call(self.ports[role], method, path, body)
        except OSError as error:
            raise LabError(f"the {role} server does not answer: {error}") from None
        if status != 200:
            raise LabError(f"the {role} server answers {status}: {_sentence(raw)}")
        return json.loads(raw) if "json" in headers.get("content-type", "") else raw.decode("utf-8", "replace")

    def server_info(self) -> dict[str, dict[str, Any]]:
        """/server_info of each process, by role."""
        return {role: self.request(role, "GET", "/server_info") for role in self.roles}

    def flush_cache(self) -> None:
        """Empty every prefix cache; raises LabError when a server is busy."""
        for role in self.roles:
            self.request(role, "POST", "/flush_cache?timeout=5")

    def digests(self, **request: Any) -> Any:
        """Digests of every buffer that a request's pages lie in, by server, as a DataFrame.

        Name the request by `rid`, `prompt`, `messages` or `input_ids` (with `cache_salt` if one was sent): its newest
        run counts. Columns: buffer, group, layout, pages, one digest column per server, and in PD mode `equal`: what
        decode holds is what prefill wrote. Raises LabError when a server no longer remembers the request.
        """
        import pandas as pd

        found = self._captures(request)
        table = pd.DataFrame()
        for role, summary in found.items():
            rows = pd.DataFrame.from_dict(summary["buffers"], orient="index")
            if table.empty:
                table = rows[["group", "layout"]].assign(pages=rows["pages"].map(len))
            table[f"{role}_digest"] = [f"{digest:08x}" for digest in rows["digest"]]
        if self.mode == "pd":
            table["equal"] = table["prefill_digest"] == table["decode_digest"]
        return table.rename_axis("buffer").reset_index()

    def transfers(self) -> Any:
        """Every transfer that both servers of a pair remember (the last 512), as a DataFrame with a row for each
        buffer.

        Columns: rid (decode's), prompt_tokens, buffer, group, layout, pages, and `equal`: decode held, before its first
        step, what prefill had written. Raises LabError in combined mode, where nothing is transferred.
        """
        import pandas as pd

        if self.mode != "pd":
            raise LabError("a combined deployment transfers nothing; start one with mode='pd'")
        sent = {entry["bootstrap_room"]: entry["buffers"] for entry in self.request("prefill", "GET", "/lab/captures")}
        rows = []
        for entry in self.request("decode", "GET", "/lab/captures"):
            for name, here in entry["buffers"].items():
                there = sent.get(entry["bootstrap_room"], {}).get(name)
                if there is not None:
                    facts = {
                        "buffer": name,
                        "group": here["group"],
                        "layout": here["layout"],
                        "pages": len(here["pages"]),
                    }
                    same = here["digest"] == there["digest"]
                    rows.append({"rid": entry["rid"], "prompt_tokens": entry["prompt_tokens"], **facts, "equal": same})
        columns = ["rid", "prompt_tokens", "buffer", "group", "layout", "pages", "equal"]
        return pd.DataFrame(rows, columns=columns)

    def _captures(self, request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Summaries by role of one request; the servers of a pair share its room, not its id."""
        if self.mode == "combined":
            return {"combined": self.request("combined", "POST", "/lab/digests", request)}
        decode = self.request("decode", "POST", "/lab/digests", request)
        room = {"room": decode["bootstrap_room"]}
        return {"prefill": self.request("prefill", "POST", "/lab/digests", room), "decode": decode}

    def dump_pages(self, folder: str | Path, **request: Any) -> list[Path]:
        """Write a request's pages into `folder` in the form that `pages.read` takes, and return the data files.

        The request is named as in `digests`. One `<role>-<buffer>.bin` with its `.json` for each buffer; buffers that
        are no pages of a known layout (the compressor's float rows) are written unlabelled. Raises LabError when the
        bytes were dropped for newer requests.
        """
        import torch
        from needlework.pages import LAYOUTS, Dump, write_dump

        written = []
        for role, summary in self._captures(request).items():
            for buffer in summary["buffers"]:
                header, raw = self._pages(role, {"rid": summary["rid"], "buffer": buffer})
                tensor = (
                    torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
                )
                facts = {key: header[key] for key in ("pool", "layer", "request", "role", "tokens_per_entry")}
                if header["layout"] in LAYOUTS and raw:
                    facts |= {key: header[key] for key in ("layout", "page_tokens", "entries")}
                    dump = Dump(tensor.view(len(header["page_ids"]), -1), page_ids=tuple(header["page_ids"]), **facts)
                else:
                    dump = Dump(tensor.view(1, -1), **facts)
                written.append(write_dump(Path(folder) / f"{role}-{buffer}.bin", dump))
        return written

    def _pages(self, role: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        try:
            status, headers, raw = call(self.ports[role], "POST", "/lab/pages", body)
        except OSError as error:
            raise LabError(f"the {role} server does not answer: {error}") from None
        if status != 200:
            raise LabError(f"the {role} server answers {status}: {_sentence(raw)}")
        header = json.loads(headers["x-needlework-pages"])
        if zlib.adler32(raw) != header["digest"]:
            raise LabError(f"the bytes of {body['buffer']} changed on their way from the {role} server")
        return header, raw


def _sentence(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return raw[:300].decode("utf-8", "replace").strip()
