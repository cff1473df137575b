"""Install Needlework into the environment whose Python runs this: with uv, from the same pins and with what pip is
configured with; with pip where uv cannot.

    .venv/bin/python tools/set_up.py [--pip] [EXTRA …]
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

UV = "uv==0.13.9"
ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("kernels", "lab", "press", "test")
PIP = [sys.executable, "-m", "pip"]
# pip's setting -> the variable by which uv is told the same, and what stands between several values
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "no-binary": ("UV_NO_BINARY_PACKAGE", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
WITHOUT_EFFECT = {
    *("disable-pip-version-check", "retries", "cache-dir", "no-cache-dir", "progress-bar", "quiet", "verbose"),
    *("no-input", "no-color", "no-warn-script-location", "root-user-action", "break-system-packages", "user"),
}


def from_pip(listed: str) -> dict[str, str]:
    """uv's environment for what `pip config list` says. ValueError names a setting that uv cannot be told.

    What is said by file and again by environment is as the later one says, as for pip.
    """
    found = {}
    for line in listed.splitlines():
        if match := re.fullmatch(r"(?:global|user|site|install|:env:)\.([\w-]+)='(.*)'", line.strip()):
            name, values = match[1], match[2].replace("\\n", " ").split()
            if name in VARIABLES:
                variable, between = VARIABLES[name]
                found[variable] = between.join(values)
            elif name not in WITHOUT_EFFECT:
                raise ValueError(f"pip is configured with {name}, which uv cannot be told")
    return found


def torch_build(told: Mapping[str, str], gpu: bool) -> dict[str, str]:
    """Without a GPU, PyTorch's own index of CPU builds; where pip is told where to look, only there is looked."""
    places = {"UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "UV_NO_INDEX"}
    return {} if gpu or places & told.keys() or sys.platform != "linux" else {"UV_TORCH_BACKEND": "cpu"}


def with_uv(wanted: Sequence[str]) -> bool:
    """Whether uv installed it; it says why not."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    try:
        told = {**os.environ, **from_pip(listed)}
        subprocess.run([*PIP, "install", "-q", "--disable-pip-version-check", UV], check=True)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"set-up: {error}; pip takes over", file=sys.stderr)
        return False
    gpu = shutil.which("nvidia-smi") is not None or Path("/dev/kfd").exists()
    # the best version that any place offers, as pip does: of several builds of torch the one with a local label
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--index-strategy", "unsafe-best-match"]
    command += ["--python", sys.executable, *wanted]
    build = torch_build(told, gpu)
    for more in [build, {}] if build else [{}]:
        if subprocess.run(command, cwd=ROOT, env={**told, **more}, check=False).returncode == 0:
            return True
    print("set-up: uv could not; pip takes over", file=sys.stderr)
    return False


def main(argv: Sequence[str]) -> int:
    extras = [word for word in argv if not word.startswith("-")] or list(EXTRAS)
    wanted = ["torch==2.13.0", "-c", "constraints.txt", "-e", "." if extras == ["base"] else f".[{','.join(extras)}]"]
    began = time.monotonic()
    if "--pip" not in argv and with_uv(wanted):
        by = "uv"
    else:
        by = "pip"
        install = [*PIP, "install", "-q", "--disable-pip-version-check", *wanted]
        if status := subprocess.run(install, cwd=ROOT, check=False).returncode:
            print(f"set-up: {shlex.join(install[1:])} failed", file=sys.stderr)
            return status
    print(f"set up with {by} in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
