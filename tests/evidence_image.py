"""A machine as the incident's engineer found it: units, drop-in, wrapper script, sources, process and journal.

The journal is a real one: written with systemd-journal-remote, read back with journalctl.
"""

import json
import shutil
import subprocess
from pathlib import Path

JOURNAL_REMOTE = next(
    (p for p in ("/lib/systemd/systemd-journal-remote", "/usr/lib/systemd/systemd-journal-remote") if Path(p).exists()),
    None,
)
START_US = 1_796_000_000_000_000
SOURCE = "/root/sglang-dsv4/python/sglang/srt/layers/attention/flash_mla_sm120_triton.py"
MISSING = "/root/sglang-dsv4/python/sglang/srt/models/dsv4/indexer.py"

UNITS = {
    "sglang-dsv4-prefill.service": "[Service]\nUser=root\nExecStart=/opt/venv/bin/python -m sglang.launch_server --page-size 256 \\\n  --disaggregation-mode prefill --chunked-prefill-size 8192 --api-key sk-live-abcdefghijklmnop --port 30000\n",
    "sglang-dsv4-decode.service": "[Service]\nUser=root\nEnvironment=HF_HOME=/models/hf\nExecStart=/root/serve_decode.sh\n",
    "sglang-dsv4-router.service": "[Service]\nExecStart=/opt/venv/bin/python -m sglang_router.launch_router --pd-disaggregation --prefill http://10.1.230.171:30000 8998\n",
    "sglang-dsv4.service": "[Service]\nExecStart=/root/serve_dsv4_final.sh\n",
}  # fmt: skip
DROP_IN = "[Service]\nEnvironment=SGLANG_OPT_USE_TILELANG_INDEXER=1 SGLANG_HOST_IP=10.1.230.171\n"
WRAPPER = "#!/bin/bash\n# decode\nexport SGLANG_SM120_FLASHMLA_BACKEND=triton\nexport HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz\nexec /opt/venv/bin/python -m sglang.launch_server --page-size 64 --disaggregation-mode decode --port 30001\n"


def log_lines(unit, count):
    """Ordinary access lines with a few that matter; one message is bytes, one is hostile."""
    rows = []
    for number in range(count):
        message = f'INFO:     10.1.230.171:{40000 + number % 999} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
        if number == count // 2:
            message = "[WARNING] abort: rid=7f3e2c9a0b1d4e5f aborted after 12 tokens <script>alert(1)</script>\x1b[31m"
        if number == count // 3:
            message = "info: inference nanoseconds ok, nan=0"
        rows.append({"__REALTIME_TIMESTAMP": str(START_US + number * 250_000), "_SYSTEMD_UNIT": unit, "_HOSTNAME": "blackwell-07",
                     "SYSLOG_IDENTIFIER": "python", "PRIORITY": "6", "_PID": "4711", "MESSAGE": message})  # fmt: skip
    return rows


def write_journal(folder: Path, rows) -> None:
    """Rows as a real journal file (or, where systemd-journal-remote is missing, as journalctl's JSON export)."""
    folder.mkdir(parents=True, exist_ok=True)
    if JOURNAL_REMOTE and shutil.which("journalctl"):
        export = folder / "system.export"
        blocks = []
        for row in rows:
            fields = b""
            for key, value in row.items():
                raw = value.encode()
                plain = b"\n" not in raw and all(byte >= 32 for byte in raw)
                fields += key.encode() + (b"=" + raw if plain else b"\n" + len(raw).to_bytes(8, "little") + raw) + b"\n"
            blocks.append(fields)
        export.write_bytes(b"\n".join(blocks) + b"\n")
        subprocess.run(
            [JOURNAL_REMOTE, "-o", str(folder / "system.journal"), str(export)], check=True, capture_output=True
        )
        export.unlink()
    else:
        for unit in {row["_SYSTEMD_UNIT"] for row in rows}:
            text = "".join(json.dumps(row) + "\n" for row in rows if row["_SYSTEMD_UNIT"] == unit)
            (folder / f"{unit}.jsonl").write_text(text)


def build_image(root: Path, lines: int = 4200) -> Path:
    """The tree of one machine's files under `root`."""
    files = {f"/etc/systemd/system/{unit}": text for unit, text in UNITS.items()}
    files["/etc/systemd/system/sglang-dsv4-decode.service.d/10-kernels.conf"] = DROP_IN
    files["/root/serve_decode.sh"] = WRAPPER
    files[SOURCE] = "import triton\n\ndef kernel():\n    return 2048\n"
    files["/gpu.csv"] = "NVIDIA RTX PRO 6000 Blackwell, 580.95.05, 97887 MiB\n"
    files["/proc/sglang-dsv4-decode.service/environ"] = (
        "USER=root\0HOSTNAME=blackwell-07\0SGLANG_SM120_FLASHMLA_BACKEND=triton\0"
    )
    for unit in UNITS:
        active = "inactive" if unit == "sglang-dsv4.service" else "active"
        files[f"/proc/{unit}/show"] = f"Id={unit}\nLoadState=loaded\nActiveState={active}\nMainPID=0\nUser=root\n"
    info = {
        "version": "0.5.14",
        "page_size": 256,
        "kv_cache_dtype": "fp8_e4m3",
        "server_args": {"disable_radix_cache": False},
    }
    files["/http/prefill/server_info"] = json.dumps(info)
    files["/http/decode/server_info"] = json.dumps(info | {"page_size": 64})
    for path, text in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    foreign = [
        row | {"MESSAGE": text}
        for row, text in zip(
            log_lines("sglang-dsv4-prefill.service", 8),
            ["credentials and permissions", "verify system health after restart"] * 4,
            strict=True,
        )
    ]
    write_journal(root / "var/log/journal", log_lines("sglang-dsv4-decode.service", lines) + foreign)
    return root
