"""The library stands alone: without its neighbours it imports, probes, decodes pages and diagnoses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mock_endpoint import mock_endpoint
from needlework import __main__ as command
from needlework import neighbours
from needlework.serving import target

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(neighbours.__file__).parent
ALONE = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("needlework_lab", "needlework_press"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import needlework
for module in pkgutil.walk_packages(needlework.__path__, "needlework."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:  # the compiler of our kernels is no part of the base install
            assert "triton" in str(error), error

import torch
from needlework import analysis, pages, probes
from needlework.serving import Endpoint
found = probes.recall(Endpoint(sys.argv[1]), lengths=(200, 900), depths=(0.2, 0.6), repeats=3)
diagnosis = analysis.diagnose(found.trials)
layout = pages.LAYOUTS["dsa-index-fp8"]
values = torch.linspace(-1, 1, 64 * 128).reshape(1, 64, 128)
decoded = layout.decode(layout.encode({"values": values}))["values"]
assert (decoded - values).abs().max() < 0.05
print(type(diagnosis).__name__, len(found.trials), diagnosis.verdict)

from needlework import __main__ as command, workbook
for verb in ("run", "lab"):
    assert command.main([verb]) == 2
try:
    workbook.open_target("lab").__enter__()
except workbook.TargetError as error:
    print(error)
"""


def test_alone_it_imports_probes_decodes_and_diagnoses() -> None:
    with mock_endpoint() as mock:
        done = subprocess.run(
            [sys.executable, "-c", ALONE, mock.base_url], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    diagnosed, refused = done.stdout.strip().splitlines()[-2:]
    assert re.fullmatch(r"Diagnosis 12 .+", diagnosed)
    assert refused.startswith("the target lab needs needlework_lab") and "pip install 'needlework[lab]'" in refused
    assert "the command run needs needlework_press" in done.stderr and "[press]" in done.stderr


@pytest.mark.skipif("NEEDLEWORK_CLEAN" not in os.environ, reason="sets up an environment of its own: make test-base")
def test_the_base_install_alone_is_complete(tmp_path: Path) -> None:
    python = tmp_path / "env/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=120)
    subprocess.run([python, ROOT / "tools/set_up.py", "base"], check=True, timeout=900)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    alone = {"env": environment, "cwd": tmp_path, "text": True, "timeout": 120}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([python, *arguments], capture_output=True, check=False, **alone)

    with mock_endpoint() as mock:
        done = run("-c", ALONE, mock.base_url)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"Diagnosis 12 .+", done.stdout.strip().splitlines()[-2])
    for verb, lacks in (("lab", "starlette is not installed here; install it"), ("run", "the command run needs")):
        said = run("-m", "needlework", verb)
        assert said.returncode == 2 and lacks in said.stderr.splitlines()[-1], said.stderr
        assert "Traceback" not in said.stderr and said.stderr.count("\n") <= 2, said.stderr


def imports_of_neighbours(text: str) -> list[str]:
    return re.findall(r"(?m)^\s*(?:from|import)\s+needlework_(?:lab|press)\b.*", text)


def test_the_library_names_no_neighbour_in_an_import() -> None:
    assert imports_of_neighbours("def f():\n    from needlework_lab import start\n")
    found = {p.name: lines for p in LIBRARY.rglob("*.py") if (lines := imports_of_neighbours(p.read_text("utf-8")))}
    assert not found


def test_targets_and_commands_of_the_neighbours_are_found_by_entry_point() -> None:
    assert neighbours.EXTRAS[neighbours.TARGETS].keys() <= neighbours.found(neighbours.TARGETS).keys()
    assert neighbours.EXTRAS[neighbours.COMMANDS].keys() <= neighbours.found(neighbours.COMMANDS).keys()
    for group, names in neighbours.EXTRAS.items():
        assert all(callable(neighbours.load(group, name)) for name in names)


def test_a_neighbour_that_is_not_there_is_one_sentence(monkeypatch, capsys) -> None:
    monkeypatch.setattr(neighbours, "found", lambda group: {})
    with pytest.raises(target.TargetError, match=r"the target lab is not installed here; .*needlework\[lab\]'; or use"):
        target.open_target("lab").__enter__()
    assert command.main(["report"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the command report is not installed here; install it with: pip install" in said


def test_every_stable_name_is_two_dots_away_and_is_offered_by_completion() -> None:
    import needlework

    stable = {
        "pages": ("LAYOUTS", "diagnose", "compare", "identify"),
        "kernels": ("reference", "candidates", "check"),
        "serving": ("Endpoint",),
        "probes": ("recall", "find_cliff", "scan_residues", "warm_cold", "turns", "abort", "echo", "coherence"),
        "analysis": ("load_trials", "diagnose"),
        "evidence": ("collect", "redact", "Bundle"),
        "workbook": ("start", "figures", "tables", "open_target", "incident", "explorers"),
    }
    assert set(stable) == set(needlework.__all__) <= set(dir(needlework))
    for package, names in stable.items():
        module = getattr(needlework, package)
        assert set(names) <= set(dir(module)) and all(hasattr(module, name) for name in names), package
