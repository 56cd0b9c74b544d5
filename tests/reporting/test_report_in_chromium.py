"""A report as a browser shows it: everything drawn, nothing on the console, nothing fetched; phone, dark and print."""

import math
import shutil

import pytest
from support.run_folders import (
    anchor,
    history,
    score,
    search,
    write_language_model,
    write_plain,
    write_run,
    write_sweep,
)

import ewc_finetune

pytestmark = pytest.mark.slow

LONG = "a-name-that-goes-on-and-on_" * 8


@pytest.fixture(scope="module")
def browser():
    """Chromium as the system has it, or a skip."""
    programs = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    program = next(programs, None)
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives Chromium (pip install '.[dev]')")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=quiet)
        yield browser
        browser.close()


def searched(path):
    return write_run(path / "model-fmnist.run", search=search(), options={"lambda": "auto"})


def stacked(path):
    names = [f"mnist?permute={n}" for n in range(8)]
    before, after = [score(n, 0.9) for n in names], [score(n, 0.8 + k / 100) for k, n in enumerate(names)]
    anchors = [anchor(n, 10.0**k) for k, n in enumerate(names[:3])]
    write_run(path / "all/held.run", anchors=anchors, data=names[7], before=before, after=after)
    write_plain(path / "all/plain.run", data=names[7], before=before, after=[score(n, 0.4) for n in names])
    return path / "all"


def language(path):
    for strength, kept, learned in ((0, 108.5, 60.3), (3.0, 80.1, 61.0), (30.0, 62.0, 63.4), (100.0, 53.7, 66.9)):
        write_language_model(path / "lm", f"{strength:g}.run", strength, kept, learned)
    return path / "lm"


def failed(path):
    names = [f"{LONG}csv:/data/{LONG}.csv?target={n}" for n in range(2)]
    before, after = [score(n, 0.5) for n in names], [score(n, 0.9) for n in names]
    layers = [
        {"layer": f"{LONG}.{n}", "parameters": 10**9, "share": n / 1770, "moved": 0.1**n, "penalty": 1}
        for n in range(60)
    ]
    return write_run(
        path / f"{'x' * 180}.run",
        anchors=[anchor(LONG, excluded={LONG: "is free"})],
        data=names[1],
        before=before,
        after=None,
        layers=layers,
        lines=list(history(before, after, epochs=2)),
        status=f"failed: {LONG}",
        command=f"ewc-ft finetune --data {names[1]}",
    )


def regression(path):
    lines = [{"step": n, "epoch": 1, "loss": 10.0 ** (n % 9 - 6), "penalty": 1e-7, "lr": 1} for n in range(20_000)]
    before, after = [score("csv:old", None, 0.0032)], [score("csv:old", None, 0.0033)]
    scores = [{"step": 0, "epoch": 0, "scores": {"csv:old": before[0]}}]
    scores.append({"step": 20_000, "epoch": 1, "scores": {"csv:old": after[0]}})
    return write_run(path / "a.run", data="csv:new", before=before, after=after, lines=[*scores, *lines])


def probed(path):
    probe = {"anchor": "mnist", "data": "mnist", "samples": 512, "divergence": 0.041, "unchanged": 0.951}
    lines = [{"step": n, "epoch": n, "retention": [probe | {"unchanged": 1 - n / 50}]} for n in range(4)]
    scores = [score("fmnist", 0.1)], [score("fmnist", 0.85)]
    lines += list(history(*scores, epochs=3))
    return write_run(path / "a.run", before=scores[0], after=scores[1], lines=lines, retention=[probe])


def empty(path):
    return write_run(path / "a.run", lines="", before=[], after=[], anchors=[], layers=None, command=None)


def crowded(path):
    for n in range(40):
        after = [score("mnist", 0.93 + math.sin(n) / 200), score("fmnist", 0.85 + math.cos(n * n) / 200)]
        write_run(path / f"all/{n}.run", anchors=[anchor(strength=10 ** (n / 7))], after=after)
    return path / "all"


PAGES = [searched, write_sweep, stacked, language, failed, regression, probed, empty, crowded]

# Of every figure: what is drawn of it, and where its texts are.
DRAWN = """() => [...document.querySelectorAll('svg')].filter(svg => svg.checkVisibility()).map(svg => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] }
  const scale = svg.getBoundingClientRect().width / (svg.viewBox.baseVal.width || 1)
  const texts = [...svg.querySelectorAll('text')]
  return { bar: svg.classList.contains('bar'), box: box(svg),
    marks: [...svg.querySelectorAll('.line, .dot, .ring, .track')].map(box),
    texts: texts.map(t => [t.textContent, box(t), parseFloat(getComputedStyle(t).fontSize) * scale]) }
})"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Of every piece of text: its contrast with the page (WCAG 2), and the piece itself.
CONTRAST = """() => {
  const light = text => { const c = text.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    return .2126 * c[0] + .7152 * c[1] + .0722 * c[2] }
  const page = light(getComputedStyle(document.body).backgroundColor)
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05)
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = []
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement
    if (!walker.currentNode.data.trim() || e.localName == 'title') continue
    const style = getComputedStyle(e)
    found.push([ratio(light(e instanceof SVGElement ? style.fill : style.color), page), walker.currentNode.data])
  }
  return [page, found]
}"""
# In print: what is still closed, or wider than its place.
HIDDEN = """() => [
  ...[...document.querySelectorAll('details > :not(summary)')].filter(e => {
    const b = e.getBoundingClientRect(); return !e.checkVisibility({contentVisibilityAuto: true}) || !b.height }),
  ...[...document.querySelectorAll('.scroll, pre, table')].filter(e => e.scrollWidth > e.clientWidth + 1),
].map(e => e.outerHTML.slice(0, 200))"""


def opened(browser, path, **options):
    """Open a report, and check that it says nothing and fetches nothing."""
    context = browser.new_context(**options)
    page = context.new_page()
    said, fetched = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(path.as_uri(), wait_until="load")
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert said == []
    assert [url for url in fetched if not url.startswith("data:")] == [path.as_uri()]
    return page


def check_figures(page, smallest):
    """Check that all is drawn, within its figure, and that no text lies on another."""
    for figure in page.evaluate(DRAWN):
        left, top, right, bottom = figure["box"]
        assert right - left > (20 if figure["bar"] else 200), figure
        assert bottom - top > (5 if figure["bar"] else 130), figure
        assert figure["marks"]
        texts = [box for _, box, _ in figure["texts"]]
        for box in [*figure["marks"], *texts]:
            assert box[2] - box[0] + box[3] - box[1] > 1
            assert box[0] >= left - 1, (box, figure)
            assert box[1] >= top - 1, (box, figure)
            assert box[2] <= right + 1, (box, figure)
            assert box[3] <= bottom + 1, (box, figure)
        for n, one in enumerate(texts):
            for other in texts[:n]:
                apart = one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] - 3 or other[1] >= one[3] - 3
                assert apart, (one, other, figure["texts"])
        assert all(size >= smallest for _, _, size in figure["texts"]), figure["texts"]


@pytest.mark.parametrize("make", PAGES, ids=lambda make: make.__name__)
def test_a_report_in_a_browser(browser, tmp_path, make):
    path = ewc_finetune.report(make(tmp_path)).path

    for width in (1200, 768, 360):
        page = opened(browser, path, viewport={"width": width, "height": 800}, color_scheme="light")
        check_figures(page, smallest=10.9 if width > 400 else 10.8)
        assert page.evaluate(OVERFLOW) == 0, width
        lightness, texts = page.evaluate(CONTRAST)
        assert lightness > 0.9
        assert min(texts)[0] >= 4.5, min(texts)
        page.context.close()

    page = opened(browser, path, viewport={"width": 1200, "height": 800}, color_scheme="dark")
    lightness, texts = page.evaluate(CONTRAST)
    assert lightness < 0.05
    assert min(texts)[0] >= 4.5, min(texts)
    page.context.close()


@pytest.mark.parametrize("make", PAGES, ids=lambda make: make.__name__)
def test_a_report_in_print(browser, tmp_path, make):
    path = ewc_finetune.report(make(tmp_path)).path
    # 180 mm, what A4 leaves between the margins; people who print from dark mode get white paper too.
    context = browser.new_context(viewport={"width": 680, "height": 960}, color_scheme="dark")
    page = context.new_page()
    page.goto(path.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate(HIDDEN) == []
    assert page.evaluate(OVERFLOW) == 0
    check_figures(page, smallest=8)
    lightness, texts = page.evaluate(CONTRAST)
    assert lightness == 1
    assert min(texts)[0] >= 4.5, min(texts)
    assert page.pdf(format="A4").startswith(b"%PDF")
    context.close()


def test_the_command_is_copied_as_it_was_typed(browser, tmp_path):
    command = "ewc-ft finetune --anchors 'a b.safetensors' --data fmnist --output x--y.pt"
    path = ewc_finetune.report(write_run(tmp_path / "a.run", command=command)).path
    page = opened(browser, path, viewport={"width": 360, "height": 800})
    copied = page.evaluate("getSelection().selectAllChildren(document.querySelector('pre')), String(getSelection())")
    assert copied.strip() == f"cd /home/someone/models\n{command}"
    page.context.close()
