"""Is this machine fit for the workbook? Each need with what it is for, whether it is met, and what to do if not.

Only yes or no is shown, never a measured figure, a host or a path: the table is the same wherever the needs are met.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import pandas as pd

from needlework.evidence import incidents

GIB = 1 << 30
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or less where a control group limits it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def needs() -> pd.DataFrame:
    """What the notebooks need on the default target (need, for, required, met, remedy where it is not); nothing is
    started, nothing is sent."""
    root = incidents.root()
    names = ("torch", "triton", "zmq", "uvicorn", "ipywidgets")
    have = {name: importlib.util.find_spec(name) is not None for name in names}
    tools = {name: shutil.which(name) is not None for name in ("ssh", "journalctl")}
    linux = platform.system() == "Linux" and sys.maxsize > 2**32
    cores, memory = (os.cpu_count() or 1) >= 2, memory_bytes() >= 4 * GIB
    disk, writable = shutil.disk_usage(root).free >= GIB, os.access(root, os.W_OK)
    made, debian = "make run installs it", "Debian: apt-get install"
    must = [
        ("Python 3.11 or newer", "everything", sys.version_info >= (3, 11), "set PYTHON and run make again"),
        ("Linux on a 64-bit machine", "the router, Triton's interpreter", linux, "use a Linux machine or container"),
        ("2 cores or more", "two notebooks at a time, prefill beside decode", cores, "expect twice the time"),
        ("4 GiB of memory", "the deployment in a box as a pair", memory, "run one notebook at a time"),
        ("1 GiB of free disk", "executed notebooks, runs, report", disk, "free some space"),
        ("a folder that can be written", "executed notebooks, report", writable, "use a clone of your own"),
        ("torch", "references, page codecs, the lab's model", have["torch"], made),
        ("pyzmq and uvicorn", "the lab's transfer and its HTTP", have["zmq"] and have["uvicorn"], made),
        ("ipywidgets", "sliders and pickers", have["ipywidgets"], made),
    ]
    may = [
        ("Triton", "our kernel twins, in its interpreter without a GPU", have["triton"], "the references still run"),
        ("Chromium", "tests of the report, the README's picture", browser() is not None, f"{debian} chromium"),
        ("OpenSSH client", "collecting evidence from other hosts", tools["ssh"], f"{debian} openssh-client"),
        ("journalctl", "reading a saved systemd journal", tools["journalctl"], f"{debian} systemd"),
    ]
    rows = [(need, use, required, "yes" if met else "NO" if required else "no", "" if met else remedy)
            for table, required in ((must, True), (may, False)) for need, use, met, remedy in table]  # fmt: skip
    return pd.DataFrame(rows, columns=["need", "for", "required", "met", "remedy"])


def browser() -> str | None:
    """Path of a Chromium on this machine, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)
