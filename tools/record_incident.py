"""Rebuild the evidence and the page dumps of `data/incidents/context-loss` from a run of the deployment in a box.

    python tools/record_incident.py

The prefill/decode pair runs with the incident's fault behind SGLang's router. Its output is stamped as it appears, put
into a journal by systemd-journal-remote (Debian: systemd-journal-remote), and read back by `journalctl --file` through
`needlework.evidence.collect`, together with unit files, wrapper scripts, server answers and sources laid out as on a
machine. The unit names follow the public account of the incident; so do the four odd things in it: a prefill unit whose
journal holds another service's lines, switches that are not in the unit, a source path that does not exist, and a
combined unit that is prepared and inactive. Process environments are written from the unit files: those of the
recording machine are nobody's business.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import httpx
import needlework_lab as lab
from needlework import evidence

ROOT = Path(__file__).resolve().parents[1]
JOURNAL_REMOTE = ("/lib/systemd/systemd-journal-remote", "/usr/lib/systemd/systemd-journal-remote")
PYTHON = "/opt/needlework/.venv/bin/python"
SERVE = (
    f"exec {PYTHON} -m needlework_lab.main --geometry v4 --page-size 256 --chunked-prefill-size 2048 --index-topk 512"
)
SERVICE = (
    "[Unit]\nDescription={title} server\nAfter=network-online.target\n\n[Service]\nUser=root\nExecStart={command}\n"
    "{extra}Restart=on-failure\n\n[Install]\nWantedBy=multi-user.target\n"
)
ROUTER = f"{PYTHON} -m sglang_router.launch_router --pd-disaggregation --policy random --host 127.0.0.1"
TO_FILE = "StandardOutput=append:/root/logs/prefill.log\n"
UNITS = {
    "sglang-dsv4-prefill.service": SERVICE.format(
        title="Prefill", command="/root/serve_dsv4_prefill.sh", extra=TO_FILE
    ),
    "sglang-dsv4-decode.service": SERVICE.format(title="Decode", command="/root/serve_dsv4_decode.sh", extra=""),
    "sglang-dsv4-router.service": SERVICE.format(title="Router", command=ROUTER, extra=""),
    "sglang-dsv4.service": SERVICE.format(title="Combined", command="/root/serve_dsv4_final.sh", extra=""),
}
SCRIPTS = {
    "/root/serve_dsv4_prefill.sh": f"#!/bin/bash\nexport NEEDLEWORK_ROLE=prefill\n{SERVE} --role prefill\n",
    "/root/serve_dsv4_decode.sh": f"#!/bin/bash\nexport NEEDLEWORK_ROLE=decode\n{SERVE} --role decode\n",
    "/root/serve_dsv4_final.sh": f"#!/bin/bash\n{SERVE} --role combined\n",
}
SOURCES = ("lib/needlework/kernels/reference.py",)
FOREIGN = (
    "checking credentials and permissions",
    "verify system health after restart",
    "maintenance window closed",
) * 4
WINDOW_LINES = 4000


def follow(children: dict[str, Any], rows: list[dict[str, str]], stop: threading.Event) -> None:
    """Stamp each line of the children's output as it appears, as a journal does."""
    offsets = dict.fromkeys(children, 0)
    while True:
        last = stop.is_set()
        for role, child in children.items():
            while raw := child.read_log(offsets[role]):
                whole = raw[: raw.rfind(b"\n") + 1]
                if not whole:
                    break
                offsets[role] += len(whole)
                if role != "prefill":  # its unit writes to a file, not to the journal
                    unit, lines = f"sglang-dsv4-{role}.service", whole.decode("utf-8", "replace").splitlines()
                    rows.extend(journal_row(unit, time.time(), line) for line in lines)
        if last:
            return
        stop.wait(0.05)


def journal_row(unit: str, at: float, message: str) -> dict[str, str]:
    fields = {"_SYSTEMD_UNIT": unit, "_HOSTNAME": "node-a", "SYSLOG_IDENTIFIER": "python", "PRIORITY": "6"}
    return {"__REALTIME_TIMESTAMP": str(int(at * 1e6)), **fields, "MESSAGE": message}


def write_journal(folder: Path, rows: list[dict[str, str]]) -> None:
    """Rows as a journal file, through journald's export format and systemd's own writer."""
    writer = next((path for path in JOURNAL_REMOTE if Path(path).exists()), None)
    if writer is None or not shutil.which("journalctl"):
        raise RuntimeError("this needs journalctl and systemd-journal-remote; install Debian's systemd-journal-remote")
    folder.mkdir(parents=True)
    export = folder / "system.export"
    blocks = []
    for row in sorted(rows, key=lambda row: int(row["__REALTIME_TIMESTAMP"])):
        plain = {key: "".join(c if c.isprintable() else " " for c in value) for key, value in row.items()}
        blocks.append("".join(f"{key}={value}\n" for key, value in plain.items()))
    export.write_text("\n".join(blocks) + "\n", encoding="utf-8")
    subprocess.run([writer, "-o", str(folder / "system.journal"), str(export)], check=True, capture_output=True)
    export.unlink()


def write_machine(root: Path, rows: list[dict[str, str]], answers: dict[str, str]) -> None:
    """The machine's files, as a saved folder that `evidence.collect` reads."""
    files = {f"/etc/systemd/system/{unit}": text for unit, text in UNITS.items()} | SCRIPTS | answers
    files |= {f"/opt/needlework/{name}": (ROOT / name).read_text() for name in SOURCES}
    for unit in UNITS:
        active = "inactive" if unit == "sglang-dsv4.service" else "active"
        files[f"/proc/{unit}/show"] = (
            f"Id={unit}\nLoadState=loaded\nActiveState={active}\nUnitFileState=enabled\nMainPID=0\n"
        )
    for role in ("prefill", "decode"):
        files[f"/proc/sglang-dsv4-{role}.service/environ"] = f"USER=root\0HOME=/root\0NEEDLEWORK_ROLE={role}\0"
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"], capture_output=True, text=True, check=True
    )
    files["/packages.txt"] = "".join(line + "\n" for line in frozen.stdout.splitlines() if " @ " not in line)
    for path, text in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    write_journal(root / "var/log/journal", rows)


def server_answers(deployment: Any) -> dict[str, str]:
    """/server_info, /model_info, /v1/models and /metrics of both servers, as files of the saved folder."""
    found = {}
    for role, url in (("prefill", deployment.prefill_url), ("decode", deployment.decode_url)):
        for route in ("server_info", "model_info", "v1/models", "metrics"):
            found[f"/http/{role}/{route}"] = httpx.get(f"{url}/{route}", timeout=30).text
    return found


ROW_TOKENS = 31  # of one row below, as the lab's tokenizer counts


def conversation(tokens: int) -> list[dict[str, str]]:
    """About `tokens` tokens of conversation: a value is told after 60 % of the talk and asked for at the end."""
    rows = [
        f"Row {n} of stock list {tokens}: shelf {n % 83}, bolts and washers counted, nothing missing."
        for n in range(tokens // ROW_TOKENS)
    ]
    cut = len(rows) * 6 // 10
    return [
        {"role": "user", "content": " ".join(rows[:cut])},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "The secret code for the harbour gate is 81392. Keep it in mind."},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": " ".join(rows[cut:])},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "What is the secret code for the harbour gate? Answer with the value only."},
    ]


def ask(url: str, tokens: int) -> str:
    body = {"model": "lab", "messages": conversation(tokens), "max_tokens": 32, "temperature": 0}
    models = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
    body["model"] = models[0]["id"]
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--incident", default="context-loss")
    parser.add_argument("--page-tokens", type=int, default=4500, help="length of the conversation whose pages are kept")
    options = parser.parse_args()
    bundle = ROOT / "data/incidents" / options.incident
    faults = tuple(tomllib.loads((bundle / "incident.toml").read_text())["lab"]["faults"])
    rows: list[dict[str, str]] = []
    stop = threading.Event()
    with lab.start("pd", faults=faults) as pair:
        follower = threading.Thread(target=follow, args=(pair.children, rows, stop))
        follower.start()
        try:
            for tokens in (600, 1500, 2400, 4200, 10_000, options.page_tokens):
                print(f"{tokens:>6} tokens: {ask(pair.base_url, tokens)[:80]!r}")
            with tempfile.TemporaryDirectory() as scratch:
                keep_pages(pair, options.page_tokens, Path(scratch), bundle / "pages")
            with httpx.Client(timeout=30) as client:  # a scraper is what fills a serving log
                for _ in range(WINDOW_LINES + 200):
                    client.get(f"{pair.decode_url}/metrics")
            answers = server_answers(pair)
        finally:
            time.sleep(0.3)
            stop.set()
            follower.join()
    start_s = min(int(row["__REALTIME_TIMESTAMP"]) for row in rows) / 1e6
    rows += [journal_row("sglang-dsv4-prefill.service", start_s + n, text) for n, text in enumerate(FOREIGN)]
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "incident.toml").write_text((bundle / "incident.toml").read_text())
        write_machine(Path(scratch) / "machine", rows, answers)
        collection = evidence.collect(evidence.load_plan(Path(scratch) / "incident.toml"))
    shutil.rmtree(bundle / "evidence", ignore_errors=True)
    collection.write(bundle / "evidence")
    evidence.Bundle(bundle).seal()
    dumps = len(list((bundle / "pages").glob("*.bin")))
    print(f"{len(collection.items)} items, {len(rows)} log lines, {dumps} page dumps")
    return 0


def keep_pages(pair: Any, tokens: int, scratch: Path, target: Path) -> None:
    """Dump the request's pages on both sides; keep the index pools and one layer of the entries."""
    written = pair.dump_pages(scratch, messages=conversation(tokens))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in written:
        buffer = path.stem.partition("-")[2]
        if buffer.startswith("c4_index.") or buffer == "c4_kv.0":
            shutil.copy(path, target)
            shutil.copy(path.with_suffix(".json"), target)


if __name__ == "__main__":
    sys.exit(main())
