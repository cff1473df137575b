"""JupyterLab in real Chromium, one session: notebooks run to their end on the recorded incident, every control moves
what it should, nothing is asked of another machine, and nothing goes wrong in the console. One notebook with a list
and one with a slider; with NEEDLEWORK_ALL_IN_LAB=1 (`make test-jupyterlab`, in .ci/run) all of them, for minutes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from needlework_press import report, writer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        report.browser() is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
LOOPBACK_ONLY = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
AT_ONCE = 2
CONTROLS = {"00": 1, "03": 1, "05": 4, "11": 1}  # notebook -> how many sliders and lists it has at least
QUICK = ("00",)  # has a list; SLIDE has the slider
ALL = bool(os.environ.get("NEEDLEWORK_ALL_IN_LAB"))
SLIDE = """\
# %% [markdown]
# # Slide
#
# Does it move?

# %%
from needlework import workbook

start = workbook.start("Slide")

# %%
def draw(n):
    fig, ax = workbook.figures.new(4, 2)
    ax.plot([0, n])
    return workbook.figures.picture(fig, f"A line that rises from zero to {n} in one step.")

# %%
workbook.explorers.Slider("height", draw, choices=[1, 2, 3])
"""
FAILS = "# %%\nimport sys\n\n# %%\nraise ValueError('planted')\n"

READY = """() => { const app = window.jupyterapp, needed = ['docmanager:open', 'notebook:run-all-cells'];
  return app?.serviceManager.isReady && needed.every(name => app.commands.hasCommand(name)); }"""
OPEN_AND_RUN = """async path => { const app = window.jupyterapp;
  const panel = await app.commands.execute('docmanager:open', {path, factory: 'Notebook'});
  await panel.context.ready; await panel.sessionContext.ready;
  (window.panels ??= {})[path] = panel;
  app.shell.activateById(panel.id);
  void app.commands.execute('notebook:run-all-cells'); }"""
STATE = """path => { const panel = window.panels[path], cells = panel.content.model.cells;
  const found = {run: 0, left: 0, errors: []};
  for (let i = 0; i < cells.length; i++) { const cell = cells.get(i);
    if (cell.type !== 'code' || !cell.sharedModel.getSource().trim()) continue;
    if (cell.executionCount) found.run++; else found.left++;
    for (let j = 0; j < cell.outputs.length; j++) { const output = cell.outputs.get(j);
      if (output.type === 'error') found.errors.push(`${output.toJSON().ename}: ${output.toJSON().evalue}`); } }
  found.busy = panel.sessionContext.session?.kernel?.status !== 'idle';
  return found; }"""
END = "async path => { await window.panels[path].sessionContext.shutdown(); }"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All notebooks without outputs, one with a slider, one that fails."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "src").mkdir()
    (folder / "src/50_slide.py").write_text(SLIDE)
    (folder / "src/51_fails.py").write_text(FAILS)
    for twin in [*writer.twins(ROOT), folder / "src/50_slide.py", folder / "src/51_fails.py"]:
        (folder / f"{twin.stem}.ipynb").write_text(writer.dumps(writer.read_twin(twin)))
    settings = folder / "settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True)  # cells out of sight are drawn too, so that their controls can be reached
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))
    config = folder / "config/labconfig"
    config.mkdir(parents=True)
    # the debugger complains of kernels that end while it asks them
    idle = ("@jupyterlab/apputils-extension:announcements", "@jupyterlab/debugger-extension")
    news = {"disabledExtensions": dict.fromkeys(idle, True)}
    (config / "page_config.json").write_text(json.dumps(news))
    return folder


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[str]:
    """A JupyterLab whose kernels read the recorded incident."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {f"JUPYTER_{n}_DIR": str(folder / n.lower()) for n in ("CONFIG", "DATA", "RUNTIME")}
    folders["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    workbook = {"NEEDLEWORK_ROOT": str(ROOT), "NEEDLEWORK_TARGET": "recorded", "OMP_NUM_THREADS": "1"}
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"),
        *("--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={folder}"),
        "--ServerApp.port_retries=0",
    ]
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **folders, **workbook}, stdout=log, stderr=log, cwd=folder
        )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        assert server.poll() is None, (folder / "lab.log").read_text()[-2000:]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


@pytest.fixture(scope="module")
def page(lab: str) -> Iterator:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=report.browser(), args=[*report.BROWSER_FLAGS, LOOPBACK_ONLY])
        page = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
        page.asked, page.wrong = [], []
        page.on("request", lambda r: page.asked.append(r.url))
        page.on("pageerror", lambda e: page.wrong.append(str(e)))
        page.on("console", lambda m: page.wrong.append(m.text) if m.type == "error" else None)
        page.goto(f"{lab}/lab", timeout=120_000)
        page.wait_for_function(READY, timeout=120_000)
        page.evaluate("window.jupyterapp.restored.then(() => 1)")
        yield page
        browser.close()


def run(page, names: list[str], timeout_s: float = 800) -> dict[str, dict]:
    """Run notebooks, AT_ONCE at a time, and move what they show; name -> cells run, cells left, errors, controls."""
    waiting, running, done = list(names), [], {}
    deadline = time.monotonic() + timeout_s
    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < AT_ONCE:
            running.append(waiting.pop(0))
            page.evaluate(OPEN_AND_RUN, running[-1])
        for name in list(running):
            state = page.evaluate(STATE, name)
            if state["errors"] or (state["left"] == 0 and not state["busy"]):
                running.remove(name)
                done[name] = state | {"controls": 0 if state["errors"] else move_controls(page, name)}
                page.evaluate(END, name)  # a kernel holds up to half a gigabyte
        time.sleep(0.2)
    assert not waiting and not running, f"not done in {timeout_s:.0f} s: {running + waiting}"
    return done


def move_controls(page, name: str) -> int:
    """Move each slider and each list of a notebook by one; what it shows must change. Returns how many there are."""
    page.evaluate("path => window.jupyterapp.shell.activateById(window.panels[path].id)", name)
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    handles, lists = panel.locator(".noUi-handle"), panel.locator(".widget-dropdown select")
    count = handles.count() + lists.count()
    for i in range(count):
        slider = i < handles.count()
        control = handles.nth(i) if slider else lists.nth(i - handles.count())
        shown = control.locator("xpath=ancestor::*[contains(@class,'jp-OutputArea-output')][1]").locator(
            ".widget-html-content"
        )
        before = shown.first.inner_html()
        control.scroll_into_view_if_needed()
        if slider:
            control.focus()
            start, end = (float(control.get_attribute(f"aria-value{a}") or 0) for a in ("now", "max"))
            page.keyboard.press("ArrowLeft" if start >= end else "ArrowRight")
        else:
            chosen = control.evaluate("list => list.selectedIndex")
            control.select_option(index=1 if chosen == 0 else 0)
        deadline = time.monotonic() + 60
        while shown.first.inner_html() == before:
            assert time.monotonic() < deadline, f"{name}: control {i} moves nothing"
            time.sleep(0.1)
    assert panel.locator(".nw-still").count() == 0, "the live form is shown, not the still"
    return count


def test_a_slider_moves_its_plot_and_a_planted_error_is_seen(page) -> None:
    done = run(page, ["51_fails.ipynb", "50_slide.ipynb"])
    assert done["50_slide.ipynb"]["errors"] == [] and "planted" in done["51_fails.ipynb"]["errors"][0]
    assert done["50_slide.ipynb"]["controls"] == 1
    moved = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .widget-html-content img").first
    assert moved.get_attribute("alt") == "A line that rises from zero to 2 in one step."


def test_notebooks_run_and_every_control_moves_something(page, lab: str) -> None:
    names = [f"{twin.stem}.ipynb" for twin in writer.twins(ROOT) if ALL or twin.stem[:2] in QUICK]
    page.wrong.clear()
    done = run(page, names)
    assert {name: state["errors"] for name, state in done.items() if state["errors"]} == {}
    assert all(state["run"] > 3 and state["left"] == 0 for state in done.values())
    controls = {name[:2]: state["controls"] for name, state in done.items()}
    assert set(QUICK) <= set(controls)
    assert {name: least for name, least in CONTROLS.items() if controls.get(name, least) < least} == {}, controls
    assert [u for u in page.asked if not u.startswith((lab, "data:", "blob:"))] == [] and page.wrong == []
