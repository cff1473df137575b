"""environment.yml, pyproject.toml and constraints.txt agree, and each is readable by the tool it is for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import set_up
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
# left out of the lock on purpose: the machine's own build of torch, and what hangs on it
UNLOCKED = re.compile(r"(torch|triton|nvidia|cuda|pip|setuptools|wheel)([-_.].*)?$")


def requirements() -> list[tuple[str, Requirement]]:
    groups = {"core": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return [(group, Requirement(line)) for group, lines in groups.items() for line in lines]


def constraints() -> dict[str, str]:
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;+]+)", line.strip()).groups()
            pinned[canonicalize_name(name)] = version
    return pinned


def test_conda_reads_the_environment() -> None:
    rattler = pytest.importorskip("rattler", reason="py-rattler is not installed")
    specs = [rattler.MatchSpec(line) for line in CONDA["dependencies"] if isinstance(line, str)]
    assert [getattr(spec.name, "normalized", str(spec.name)) for spec in specs] == ["python", "pip"]
    with pytest.raises(Exception, match=r"."):
        rattler.MatchSpec("python >=>3")
    for channel in CONDA["channels"]:
        rattler.Channel(channel)


def test_conda_brings_python_and_pip_brings_this_project_with_the_lock() -> None:
    (pip,) = [d["pip"] for d in CONDA["dependencies"] if isinstance(d, dict)]
    editable = [line for line in pip if line.startswith("-e ")]
    assert editable == ["-e .[kernels,lab,press,test]"] and "-c constraints.txt" in pip
    extras = set(Requirement(f"x{editable[0].removeprefix('-e .')}").extras)
    assert extras <= set(PROJECT["optional-dependencies"])
    (python,) = [d for d in CONDA["dependencies"] if isinstance(d, str) and d.startswith("python")]
    conda, ours = SpecifierSet(python.removeprefix("python").strip()), SpecifierSet(PROJECT["requires-python"])
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert conda.contains(version) == ours.contains(version), version


def test_every_requirement_is_locked_within_its_range() -> None:
    pinned = constraints()
    for group, requirement in requirements():
        name = canonicalize_name(requirement.name)
        if UNLOCKED.fullmatch(name):
            assert name not in pinned, f"{name} is the machine's own build and must not be locked"
            continue
        assert name in pinned, f"{group}: {name} is missing from constraints.txt; run `make lock`"
        assert requirement.specifier.contains(pinned[name]), f"{group}: {requirement} against {name}=={pinned[name]}"


def test_the_lock_holds_no_accelerator_parts_and_no_local_builds() -> None:
    assert [name for name in constraints() if UNLOCKED.fullmatch(name)] == []


def test_each_requirement_says_what_it_is_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for group, requirement in requirements():
        lines = [x for x in text.splitlines() if re.match(rf'\s+"{re.escape(requirement.name)}[\[<>=;" ~]', x)]
        assert lines and all(re.search(r'",\s+# \w', x) for x in lines), f"{group}: {requirement.name} has no comment"


def test_both_ways_of_setting_up_install_the_same() -> None:
    (editable,) = [d for d in CONDA["dependencies"][-1]["pip"] if d.startswith("-e ")]
    assert editable == f"-e .[{','.join(set_up.EXTRAS)}]" and "$(PY) tools/set_up.py" in (ROOT / "Makefile").read_text()
    assert re.search(r'"torch==([\d.]+)"', Path(set_up.__file__).read_text())[1] == next(
        str(r.specifier).removeprefix("==") for _, r in requirements() if r.name == "torch"
    )


def test_uv_is_told_what_pip_is_configured_with() -> None:
    listed = "\n".join(
        (
            ":env:.find-links='/wheels'",
            "global.extra-index-url='https://a/simple\\nhttps://b/simple'",
            "global.find-links='/one /two'",
            "global.cert='/ca.pem'",
            "install.progress-bar='off'",
        )
    )
    told = set_up.from_pip(listed)
    indexes = "https://a/simple https://b/simple"
    assert told == {"UV_FIND_LINKS": "/one,/two", "UV_INDEX": indexes, "SSL_CERT_FILE": "/ca.pem"}
    with pytest.raises(ValueError, match="configured with require-hashes, which uv cannot be told"):
        set_up.from_pip("global.require-hashes='true'")
    assert set_up.torch_build({}, gpu=True) == set_up.torch_build(told, gpu=False) == {}
    assert set_up.torch_build({}, gpu=False) == ({"UV_TORCH_BACKEND": "cpu"} if sys.platform == "linux" else {})


def test_where_uv_cannot_pip_takes_over(monkeypatch, capsys) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        asked.append(command)
        failed = "uv" in command and "pip" in command and "install" in command
        return subprocess.CompletedProcess(command, int(failed), stdout="")

    monkeypatch.setattr(set_up.subprocess, "run", run)
    assert set_up.main([]) == 0
    said = capsys.readouterr()
    assert "uv could not; pip takes over" in said.err and "set up with pip" in said.out
    assert asked[-1][1:4] == ["-m", "pip", "install"] and asked[-1][-1] == ".[kernels,lab,press,test]"


def test_git_does_not_ignore_the_library() -> None:
    ignored = [line.strip() for line in (ROOT / ".gitignore").read_text().splitlines()]
    assert not {"lib/", "/lib/", "lib", "*.ipynb", "data/"} & set(ignored) and {"/report/", "/build/"} <= set(ignored)
