"""The studio in a real browser: a run watched to its end, its report, a run stopped.

Without Chromium these tests fail: a page that nobody looked at is not tested.
"""

import json
import os
import re
import signal
import subprocess
import sys
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
DESK, TELEPHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
MINUTE = 60_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address():
    """The address of a studio on a free port; Ctrl-C must end it well."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    start = "from mhalearn.cli import main; main(['studio', '--port', '0'])"
    process = subprocess.Popen(
        [sys.executable, "-c", start],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with process:
        yield re.match(r"(http://127\.0\.0\.1:\d+/) ", process.stdout.readline())[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    """The page, which must not complain on its console."""
    context = browser.new_context(viewport=DESK)
    page, complaints = context.new_page(), []
    context.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    yield page
    context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def ended_run(address):
    """The number of a run that has ended, asked for without a browser."""
    wish = json.dumps({"heads": 2, "dim": 6, "tokens": 4, "examples": 200}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{address}runs", wish, headers)) as answer:
        number = json.load(answer)["number"]
    with urlopen(f"{address}runs/{number}/events") as events:
        events.read()
    return number


def ask(page, **settings):
    for name, value in settings.items():
        field = page.locator(f"#{name}")
        if name in ("method", "inputs"):
            field.select_option(value)
        else:
            field.fill(str(value))
    page.get_by_role("button", name="Learn it").click()


def scrolls_sideways(page):
    """Whether the page does, or the table of stages within it."""
    page_does = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    table = page.locator("#stages-box")
    return page_does or table.evaluate("box => box.scrollWidth > box.clientWidth")


def test_a_small_layer_is_recovered_while_one_watches(page):
    expect(page.get_by_role("button", name="Three heads")).to_have_attribute("aria-pressed", "true")
    ask(page, heads=2, dim=6, tokens=4, examples=200)
    # Live: the true heads are there before anything is learned, and the run can be stopped.
    expect(page.locator("#state")).to_have_text("learning")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    expect(page.locator(".head")).to_have_count(2, timeout=MINUTE)
    expect(page.locator("#chart circle.s1").first).to_be_visible(timeout=MINUTE)
    expect(page.locator("#state")).to_have_text("RECOVERED", timeout=MINUTE)
    # The chart has both curves, and they end at the precision of the labels.
    for series in ("s1", "s2"):
        assert page.locator(f"#chart circle.{series}").count() > 5
    expect(page.locator("#worst")).to_have_text(re.compile("10⁻¹[³⁴⁵⁶⁷]"))
    expect(page.locator("#chart svg")).to_have_attribute("aria-label", re.compile("residual"))
    # Learned and true, Theta and W, for both heads, all drawn.
    pictures = page.locator(".head canvas")
    expect(pictures).to_have_count(8)
    for picture in pictures.all():
        assert picture.bounding_box()["width"] > 50
        assert "heat map" in picture.get_attribute("aria-label")
    expect(page.locator(".track i.tiny")).to_have_count(4)
    expect(page.get_by_role("row", name=re.compile("polish"))).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("RECOVERED")).first).to_be_visible()
    with page.expect_popup() as opened:
        page.get_by_role("link", name="Open the report").click()
    report = opened.value
    expect(report.get_by_role("heading", name="The layer was recovered")).to_be_visible()
    assert report.locator("svg").first.is_visible()
    report.close()
    # Whoever comes back finds the run as it ended.
    page.reload()
    expect(page.locator("#state")).to_have_text("RECOVERED")
    expect(page.locator(".track i.tiny")).to_have_count(4)


def test_nothing_can_be_asked_before_the_page_knows_its_choices(page, address):
    """On a slow answer what was typed would be overwritten, and sent to nobody."""
    page.route("**/about", lambda route: (page.wait_for_timeout(500), route.continue_()))
    page.goto(address, wait_until="commit")
    expect(page.get_by_role("button", name="Learn it")).to_be_disabled()
    expect(page.locator("#heads")).to_be_disabled()
    ask(page, heads=99)
    expect(page.get_by_role("alert")).to_have_text("Heads is 99: choose from 1 to 8")


def test_a_run_is_stopped(page):
    ask(page, heads=6, dim=32, tokens=8, examples=5000, method="adam", seconds=300)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#state")).to_have_text("stopped", timeout=MINUTE)
    expect(page.locator("#reason")).to_have_text("Stopped by hand.")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
    expect(page.get_by_role("link", name="Open the report")).to_be_hidden()
    expect(page.get_by_text("No report: there was no layer yet.")).to_be_visible()


def test_a_stopped_run_reports_what_it_has(page):
    ask(page, heads=2, dim=8, tokens=4, examples=500, method="adam", seconds=300)
    expect(page.locator(".head canvas[aria-label*=learned]").first).to_be_visible(timeout=MINUTE)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#state")).to_have_text("stopped", timeout=MINUTE)
    expect(page.get_by_text("No report")).to_be_hidden()
    with page.expect_popup() as opened:
        page.get_by_role("link", name="Open the report").click()
    report = opened.value
    expect(
        report.get_by_role("heading", name="The run was stopped before it had ended")
    ).to_be_visible()
    expect(report.get_by_text("Stopped by hand; this is the best layer")).to_be_visible()
    report.close()


def test_bad_input_is_one_line_at_its_field(page):
    ask(page, heads=99)
    expect(page.get_by_role("alert")).to_have_text("Heads is 99: choose from 1 to 8")
    expect(page.get_by_role("spinbutton", name="Heads")).to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Adam instead").click()
    expect(page.get_by_role("alert")).to_be_empty()
    expect(page.locator("#heads")).to_have_attribute("aria-invalid", "false")


def test_what_the_server_refuses_is_said_too(browser, address):
    # A console of its own: browsers log every answer that refuses.
    page = browser.new_page()
    page.goto(address)
    page.get_by_role("button", name="Adam instead").click()
    page.get_by_label("Do not tell it the number of heads").check()
    page.get_by_role("button", name="Learn it").click()
    expect(page.get_by_role("alert")).to_contain_text("must be told the number of heads")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
def test_nothing_sticks_out(page, ended_run, size, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(size)
    assert not scrolls_sideways(page)
    page.get_by_role("button", name=re.compile(f"Run {ended_run} ")).click()
    expect(page.locator(".head canvas").first).to_be_visible()
    assert not scrolls_sideways(page)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 246, 244)", "dark": "rgb(17, 20, 23)"}[scheme]


def test_every_field_has_a_label(page):
    for field in page.locator("input, select").all():
        assert field.evaluate("field => field.labels.length") == 1
    expect(page.get_by_role("group", name="Settings to start from")).to_be_visible()
