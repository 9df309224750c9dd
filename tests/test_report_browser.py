"""The report in a real browser: wide and narrow, light and dark, on paper.

These tests fail, and are not left out, where there is no Chromium: what a person sees is promised.
"""

import os
import shutil

import numpy as np
import pytest
from playwright.sync_api import sync_playwright
from test_report import learned

import mhalearn as mha
from mhalearn.cli import run
from mhalearn.judge.solution import Solution
from mhalearn.run.events import Event
from mhalearn.run.outcome import Outcome

pytestmark = pytest.mark.slow

DESK, TELEPHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PAPER = {"width": 794, "height": 1123}  # A4 at 96 dots an inch
EVIL = '<img src=x onerror="alert(1)"><script>alert(2)</script>'

# Relative luminance and contrast as WCAG 2 defines them, for each element with text of its own.
FAINT_TEXT = """() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) =>
    0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const background = element => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = numbers(getComputedStyle(at).backgroundColor);
      if (alpha > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), drawn = element instanceof SVGElement;
    const over = luminance(background(element));
    const ink = luminance(numbers(drawn ? style.fill : style.color));
    const contrast = (Math.max(over, ink) + 0.05) / (Math.min(over, ink) + 0.05);
    if (contrast < 4.5) faint.push([element.textContent.trim(), contrast]);
  }
  return faint;
}"""
SMALLEST_LETTERS = """() => Math.min(...[...document.querySelectorAll("svg text")]
  .filter(text => text.getClientRects().length)
  .map(text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a))"""
# For each figure: the drawings that show, and whether each has a size and lies within the page.
FIGURES = """() => [...document.querySelectorAll("figure")].map(figure =>
  [...figure.querySelectorAll("svg")]
    .map(svg => svg.getBoundingClientRect())
    .filter(box => box.width || box.height)
    .map(box => box.width > 100 && box.height > 80 && box.left >= 0
                && box.right <= document.documentElement.clientWidth + 1))"""


def find_browser():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.fail("no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    # Chromium's sandbox refuses to run as root, as containers do.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
        yield found
        found.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    assert run(["demo", "--out", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def sculpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sculpt")
    truth = mha.random_layer(n_heads=2, d=8, scale=4.0, seed=11)
    mha.Examples.from_callable(truth, "boolean", n=40_000, k=3, d=8, seed=12).save(
        folder / "examples.safetensors"
    )
    arguments = ["--heads", "2", "--method", "sculpt", "--report", str(folder / "report.html")]
    assert run(["learn", str(folder / "examples.safetensors"), *arguments]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    path = tmp_path_factory.mktemp("noisy") / "report.html"
    truth = mha.random_layer(n_heads=1, d=4, seed=1)
    x = mha.sample_inputs("gaussian", 150, 3, 4, seed=2)
    y = truth(x)
    y += 0.02 * np.random.default_rng(0).standard_normal(y.shape)
    learner = mha.AttentionRegressor(1).fit(x, y)
    assert learner.outcome_ is Outcome.FITTED
    mha.write_report(learner, path, truth=truth)
    return path


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    path = tmp_path_factory.mktemp("failed") / "report.html"
    x = mha.sample_inputs("boolean", 5, 8, 16, seed=2)
    learner = mha.AttentionRegressor(3).fit(x, mha.random_layer(n_heads=3, d=16, seed=1)(x))
    assert learner.outcome_ is Outcome.TOO_FEW_EXAMPLES
    mha.write_report(learner, path)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """More heads than are drawn, larger than the drawings, of rank 8, and many stages."""
    path = tmp_path_factory.mktemp("large") / "report.html"
    truth = mha.random_layer(n_heads=20, d=70, rank=8, seed=0)
    trace = [Event(f"round {i // 100}", i, 1 / (i + 1), i / 100, "x" * 90) for i in range(5_000)]
    mha.write_report(Solution(truth, Outcome.FITTED, trace, settings={"k": 4}), path, truth=truth)
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    trace = [Event(EVIL, i, 10.0**-i, i / 10, EVIL + "w" * 300) for i in range(4)]
    settings = {"n_heads": 2, "method": EVIL, "examples": EVIL, EVIL: EVIL, "k": 4}
    solution, truth = learned(reason=EVIL, settings=settings)
    solution = Solution(solution.layer, Outcome.STUCK, trace, EVIL, None, settings)
    mha.write_report(solution, path, truth=truth)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Tokens as a norm leaves them, and no truth."""
    path = tmp_path_factory.mktemp("recorded") / "report.html"
    rng = np.random.default_rng(0)
    vocabulary = rng.standard_normal((60, 8)) * np.geomspace(1, 0.05, 8)
    vocabulary -= vocabulary.mean(axis=1, keepdims=True)
    vocabulary /= vocabulary.std(axis=1, keepdims=True)
    x = vocabulary[rng.integers(0, 60, (400, 6))]
    learner = mha.AttentionRegressor(2).fit(x, mha.random_layer(n_heads=2, d=8, seed=5)(x))
    assert learner.outcome_ is Outcome.RECOVERED_ON_SPAN
    mha.write_report(learner, path)
    return path


PAGES = ["demo", "sculpt", "noisy", "failed", "large", "hostile", "recorded"]


@pytest.fixture(params=PAGES)
def report(request):
    return request.getfixturevalue(request.param)


def open_page(browser, path, size, scheme):
    """The page, and the list that its complaints and requests are added to."""
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    heard = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: heard.append(dialog.message))
    page.on(
        "request",
        lambda asked: asked.url.startswith(("file:", "data:")) or heard.append(asked.url),
    )
    page.goto(path.as_uri())
    return page, heard


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
def test_everything_is_seen(browser, report, size, scheme):
    page, heard = open_page(browser, report, size, scheme)
    drawings = page.evaluate(FIGURES)
    assert len(drawings) >= 6
    assert all(shown == [True] for shown in drawings)  # one drawing a figure, of the right width
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert page.evaluate(FAINT_TEXT) == []
    assert page.evaluate(SMALLEST_LETTERS) >= 10.5
    named = page.get_by_role("img")
    assert named.count() == len(drawings)
    assert all(named.nth(i).locator("title").text_content() for i in range(named.count()))
    assert heard == []
    page.context.close()


def test_it_is_printed(browser, report):
    page, heard = open_page(browser, report, PAPER, "dark")
    page.emulate_media(media="print")
    assert all(shown == [True] for shown in page.evaluate(FIGURES))
    assert page.evaluate("document.documentElement.scrollWidth") <= PAPER["width"]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(FAINT_TEXT) == []
    table = page.locator("details table").last  # which is folded on a screen
    assert table.bounding_box()["height"] > 40
    printed = page.pdf(format="A4")
    assert printed.startswith(b"%PDF-")
    assert printed.count(b"/Type /Page\n") >= 2
    assert heard == []
    page.context.close()


def test_the_demo_is_a_page_to_look_at_and_not_a_protocol(browser, demo):
    page, _ = open_page(browser, demo, DESK, "light")
    assert page.evaluate("document.documentElement.scrollHeight") < 3000
    # What the layer does is seen before anything is scrolled.
    seen = page.get_by_role("region", name="What the layer does").bounding_box()
    assert seen["y"] + seen["height"] < DESK["height"]
    page.context.close()


@pytest.mark.parametrize("name", ["What the layer does", "The heads"])
def test_the_switch_shows_the_truth_and_the_learned_layer_again(browser, demo, name):
    page, _ = open_page(browser, demo, DESK, "light")
    section = page.get_by_role("region", name=name)

    def titles():
        drawn = section.get_by_role("img")
        return [drawn.nth(i).locator("title").text_content() for i in range(drawn.count())]

    learned_first = titles()
    section.get_by_text("true", exact=True).click()
    true = titles()
    assert len(true) == len(learned_first)
    switched = [new for new, old in zip(true, learned_first, strict=True) if new != old]
    assert len(switched) == (4 if name == "What the layer does" else 6)
    assert all("learned:" not in title for title in switched)
    section.locator("input").nth(1).press("ArrowLeft")  # by keyboard too
    assert titles() == learned_first
    page.context.close()


def test_recorded_inputs_have_figures_of_their_own(browser, recorded):
    page, _ = open_page(browser, recorded, DESK, "light")
    section = page.get_by_role("region", name="What is certain")
    assert section.locator("figure").count() == 4
    assert "Tokens span 7 of 8 dimensions" in section.inner_text()
    page.context.close()


def test_it_is_one_small_file(report):
    assert report.stat().st_size < 2_000_000


def test_the_phases_and_their_numbers_are_there(browser, sculpt):
    page, _ = open_page(browser, sculpt, DESK, "light")
    section = page.get_by_role("region", name="The paper's phases")
    said = section.inner_text()
    for told in ("Rows certified", "Norm of the proxy", "Widths of the body", "Inliers"):
        assert told in said
    for told in ("Rows with a large margin", "Sine to the span by", "Candidates that agree"):
        assert told in said
    again = page.get_by_role("region", name="How to run it again").inner_text()
    assert f"mhalearn learn {sculpt.parent}" in again
    page.context.close()


def test_the_first_heads_of_many_are_drawn_and_the_page_says_so(browser, large):
    page, _ = open_page(browser, large, DESK, "light")
    said = page.get_by_role("region", name="The heads").inner_text()
    assert "The first 12 of 20 heads are drawn." in said
    assert "entry of largest size in its block" in said
    assert page.get_by_role("article").count() == 12
    page.context.close()
