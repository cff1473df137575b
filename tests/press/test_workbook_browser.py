"""In real Chromium: the report offline, at two widths, light and dark, by keyboard, in print."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from needlework.workbook import explorers, figures, tables, verdict
from needlework_press import report, writer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        report.browser() is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
LOOPBACK_ONLY = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=report.browser(), args=[*report.BROWSER_FLAGS, LOOPBACK_ONLY])
        yield browser
        browser.close()


def picture(n: int) -> figures.Picture:
    fig, ax = figures.new(7.2, 2)
    ax.plot([0, n])
    return figures.picture(fig, f"A line that rises from zero to {n} in one step.")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of what is committed, and one notebook more with everything that can be wide."""
    import pandas as pd

    committed = [
        (t.stem, nbformat.read(writer.notebook_path(t), 4))
        for t in writer.twins(ROOT)
        if writer.notebook_path(t).is_file()
    ]
    wide = tables.to_html(tables.table(pd.DataFrame([{f"column {i}": "word " * 8 for i in range(12)}]), "A wide table"))
    still = explorers.Slider("size", {1: picture(1), 2: picture(2), 3: picture(3)}).still()
    outputs = [nbformat.v4.new_output("display_data", data={"text/html": text}) for text in (wide, still)]
    maths = "# Show all forms\n\nIs it wide?\n\n$$\\sum_{i=0}^{n} " + " + ".join("x_{i}^2" for _ in range(40)) + "$$"
    cells = [
        nbformat.v4.new_markdown_cell(maths),
        nbformat.v4.new_code_cell(source="x = " + "1 + " * 100 + "1", outputs=outputs),
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", name="stdout", text="word" * 200)]),
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", name="stdout", text="line\n" * 60)]),
    ]
    found = verdict.Summary(symptom="s " * 40, verdict="v", evidence=["e " * 30] * 3, confidence="c", next_step="n")
    notebooks = [*committed, ("99_forms", nbformat.v4.new_notebook(cells=cells))]
    text = report.page(notebooks, title="Context lost above 4,000 tokens", subtitle="a test", found=found)
    assert report.problems(text, [stem for stem, _ in notebooks]) == []
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(text, "utf-8")
    return path


def opened(chromium, path: Path, size: str = "desktop", scheme: str = "light"):
    width, height = SIZES[size]
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.asked, page.said = [], []
    page.on("request", lambda r: page.asked.append(r.url))
    page.on("console", lambda m: page.said.append(m.text))
    page.on("pageerror", lambda e: page.said.append(str(e)))
    page.goto(path.as_uri())
    return page


def render_all(page) -> None:
    """Lay out every section and read every picture, as scrolling through the page does."""
    page.add_style_tag(content="section.notebook{content-visibility:visible!important}")
    page.evaluate("Promise.allSettled([...document.images].map(i => { i.loading = 'eager'; return i.decode(); }))")


def boxes(page, session) -> int:
    """How many boxes Chromium has laid out."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return next(m["value"] for m in session.send("Performance.getMetrics")["metrics"] if m["name"] == "LayoutObjects")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_opens_offline_at_every_width_and_scheme(chromium, page_file: Path, size: str, scheme: str) -> None:
    page = opened(chromium, page_file, size, scheme)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    loaded = "[...document.images].filter(i => i.complete).length"
    # What makes a page slow to open: a box for everything in it, and pictures read before it is ready.
    elements, pictures = page.evaluate("[document.querySelectorAll('*').length, document.images.length]")
    at_first = boxes(page, session)
    assert elements < 20_000 and at_first < 4_000 and pictures >= 20 and page.evaluate(loaded) <= 3
    outside = [u for u in page.asked if not u.startswith(("data:", page_file.as_uri()))]
    assert outside == [] and page.said == []
    assert page.evaluate("document.scripts.length") == 0
    render_all(page)
    assert boxes(page, session) > 3 * at_first and page.evaluate(loaded) == pictures
    room, need = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
    assert need <= room, f"the page scrolls sideways: {need} in {room}"
    broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth || !i.alt).length")
    assert broken == 0 and page.locator("math").first.is_visible()
    ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    light = [sum(map(int, c.strip("rgb()").split(","))) for c in (ink, paper)]
    assert light[0] < light[1] if scheme == "light" else light[0] > light[1]
    page.context.close()


@pytest.mark.parametrize("size", SIZES)
def test_whatever_scrolls_by_itself_is_reached_by_keys(chromium, page_file: Path, size: str) -> None:
    page = opened(chromium, page_file, size)
    render_all(page)
    scrolling = """[...document.querySelectorAll('#nb99 *')].filter(
      e => /auto|scroll/.test(getComputedStyle(e).overflowX) && e.checkVisibility()
      && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1))"""
    page.evaluate("document.querySelectorAll('#nb99 details').forEach(d => d.open = true)")
    found = page.evaluate(
        f"{scrolling}.map(e => [e.tagName, e.tabIndex >= 0 || e.querySelector('[tabindex]') !== null])"
    )
    assert len(found) >= 2 and all(reached for _, reached in found), found


def test_report_is_operable_by_keyboard_alone(chromium, page_file: Path) -> None:
    page = opened(chromium, page_file)
    focus = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focus}.className") == "skip" and page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focus}.id") == "main"
    state = f"""(() => {{ const e = {focus};
      return [e.tagName, e.type === 'radio' && e.closest('#nb99') !== null, getComputedStyle(e).outlineStyle]; }})()"""
    for start, stops in (("main", 150), ("nb99", 50)):  # every stop is visible and marked
        page.evaluate(f"location.hash = '{start}'")  # as a link of the contents does
        for _ in range(stops):
            page.keyboard.press("Tab")
            tag, radio, outline = page.evaluate(state)
            assert radio or tag == "BODY" or outline != "none"
            if radio:
                break
    assert radio, "the radio group was never reached"
    visible = "[...document.querySelectorAll('#nb99 .nw-frames > div')].map(d => d.checkVisibility())"
    assert page.evaluate(visible) == [True, False, False]
    page.keyboard.press("ArrowRight")
    assert page.evaluate(visible) == [False, True, False]
    page.context.close()


@pytest.mark.parametrize("size", SIZES)
def test_each_entry_of_the_contents_lands_and_is_marked(chromium, page_file: Path, size: str) -> None:
    page = opened(chromium, page_file, size)
    links = page.locator("nav a")
    assert links.count() > 10
    for i in range(links.count()):
        place = links.nth(i).get_attribute("href")
        page.evaluate("e => e.click()", links.nth(i).element_handle())
        page.wait_for_timeout(300)
        top = page.evaluate("t => document.querySelector(t).getBoundingClientRect().top", place)
        assert abs(top - 16) <= 20 or (place == f"#nb{99}" and top < SIZES[size][1]), f"{place} lands at {top}"
        marked = "[...document.querySelectorAll('nav a:target-current')].map(a => a.getAttribute('href'))"
        assert page.evaluate(marked) == [place] or place == "#nb99"
    room, need, scrolls = page.evaluate(
        "(n => [innerHeight, n.scrollHeight, getComputedStyle(n).overflowY])(document.querySelector('nav'))"
    )
    assert need <= room or scrolls == "auto"
    up = page.locator("a.up")
    assert up.is_visible() == (size != "desktop")  # there the contents stay beside the text
    if up.is_visible():
        up.click()
        page.wait_for_timeout(300)
        assert abs(page.evaluate("document.querySelector('#contents').getBoundingClientRect().top") - 16) <= 20
    page.context.close()


def test_figures_are_legible_on_a_phone_and_calm_in_the_dark(chromium, page_file: Path) -> None:
    page = opened(chromium, page_file, "phone", "dark")
    render_all(page)
    pictures = page.evaluate(
        "[...document.querySelectorAll('figure img')].map(i => [i.getBoundingClientRect().width, i.naturalWidth])"
    )
    assert pictures and all(shown >= min(natural, 570) for shown, natural in pictures)
    assert page.evaluate("getComputedStyle(document.querySelector('figure img')).filter") == "brightness(0.74)"
    page.context.close()


def test_no_line_of_a_long_output_is_cut_through(chromium, page_file: Path) -> None:
    page = opened(chromium, page_file)
    render_all(page)
    heights = page.evaluate("""[...document.querySelectorAll('pre.out')].map(e => {
      const s = getComputedStyle(e), lines = (e.clientHeight - parseFloat(s.paddingTop)) / parseFloat(s.lineHeight);
      return [e.scrollHeight > e.clientHeight + 1, lines]; })""")
    cut = [lines for scrolls, lines in heights if scrolls]
    assert cut and all(abs(lines - round(lines)) < 0.06 for lines in cut)
    boxes = "[...document.querySelectorAll('.out.wide')].filter(e => e.scrollHeight > e.clientHeight + 1).length"
    assert page.evaluate(boxes) == 0  # tables are shown whole
    page.context.close()


def test_report_prints_every_frame_and_no_contents(chromium, page_file: Path) -> None:
    page = opened(chromium, page_file, scheme="dark")
    pdf = page.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF") and 20_000 < len(pdf) < 20_000_000
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth)")  # read for the printer
    page.emulate_media(media="print")
    assert all(page.evaluate("[...document.querySelectorAll('#nb99 .nw-frames > div')].map(d => d.checkVisibility())"))
    assert not page.locator("nav").is_visible() and not page.locator(".skip").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    sections = "[...document.querySelectorAll('section.notebook')].map(s => getComputedStyle(s).contentVisibility)"
    assert set(page.evaluate(sections)) == {"visible"}
    assert page.evaluate("getComputedStyle(document.querySelector('h3')).breakAfter") == "avoid"
    assert page.evaluate("getComputedStyle(document.querySelector('tr')).breakInside") == "avoid"
    page.context.close()
    told = text_of(pdf)
    assert told[0].count("Context lost above 4,000 tokens") == 2  # its title, and the line that runs over each page
    assert all("Context lost above 4,000 tokens · Needlework" in one for one in told)
    assert [one.split()[-3:] for one in told] == [[str(n), "/", str(len(told))] for n in range(1, len(told) + 1)]


def text_of(pdf: bytes) -> list[str]:
    """The text of each page, as pdftotext reads it."""
    if shutil.which("pdftotext") is None:
        pytest.skip("no pdftotext on this machine (Debian: apt-get install poppler-utils)")
    done = subprocess.run(["pdftotext", "-layout", "-", "-"], input=pdf, capture_output=True, timeout=60, check=True)
    return [one for one in done.stdout.decode().split("\f") if one.strip()]


def test_the_picture_of_a_page_shows_its_top_and_says_when_nothing_can_draw_it(tmp_path, monkeypatch) -> None:
    from PIL import Image

    page = tmp_path / "page.html"
    page.write_text("<body style='margin:0'><p style='margin:0;height:40px;background:#0072b2'></p></body>")
    report.take_picture(page, tmp_path / "new" / "top.png", width=640, height=480)
    shot = Image.open(tmp_path / "new" / "top.png")
    assert shot.size == (640, 480) and len(shot.getcolors()) <= 128
    top, below = (shot.convert("RGB").getpixel((320, y)) for y in (20, 200))
    assert max(abs(a - b) for a, b in zip(top, (0x00, 0x72, 0xB2), strict=True)) < 8 and min(below) > 247
    monkeypatch.setattr(report, "browser", lambda: "/bin/false")
    with pytest.raises(RuntimeError, match="Chromium could not draw the report"):
        report.take_picture(page, tmp_path / "none.png")
    monkeypatch.setattr(report, "browser", lambda: None)
    with pytest.raises(RuntimeError, match="no Chromium on this machine; install one"):
        report.take_picture(page, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
