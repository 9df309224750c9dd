"""The studio in a real browser: a run watched to its end, its report, a run stopped.

Without Chromium these tests fail: a page that nobody looked at is not tested.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from urllib.request import Request, urlopen

import numpy as np
import pytest
from playwright.sync_api import expect, sync_playwright

import mhalearn as mha

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
    expect(page.get_by_role("button", name="Learn it")).to_be_enabled()
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
    if "dim" in settings:  # the form may follow a run of own data, which has no such field
        page.get_by_role("button", name="Three heads", exact=True).click()
    for name, value in settings.items():
        field = page.locator(f"#{name}")
        if name in ("method", "inputs"):
            field.select_option(value)
        else:
            field.fill(str(value))
    page.get_by_role("button", name="Learn it").click()


def begin_run(page, **settings):
    """Ask for a run, and wait until it is the one on the page."""
    before = page.locator("#run-heading").text_content()
    ask(page, **settings)
    expect(page.locator("#run-heading")).not_to_have_text(before, timeout=MINUTE)


def scrolls_sideways(page):
    """Whether the page does, or the table of stages within it."""
    page_does = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    table = page.locator("#stages-box")
    return page_does or table.evaluate("box => box.scrollWidth > box.clientWidth")


def test_a_small_layer_is_recovered_while_one_watches(page):
    preset = page.get_by_role("button", name="Three heads", exact=True)
    expect(preset).to_have_attribute("aria-pressed", "true")
    begin_run(page, heads=2, dim=6, tokens=4, examples=200)
    # Live: the true heads are there before anything is learned, and the run can be stopped.
    expect(page.locator("#state")).to_have_text("learning", timeout=MINUTE)
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


def test_a_box_is_asked_while_one_watches(page):
    page.get_by_role("button", name="Ask a box", exact=True).click()
    expect(page.locator("#ask_box")).to_be_checked()
    before = page.locator("#run-heading").text_content()
    page.get_by_role("button", name="Learn it").click()
    expect(page.locator("#run-heading")).not_to_have_text(before, timeout=MINUTE)
    expect(page.locator("#state")).to_have_text("RECOVERED", timeout=MINUTE)
    expect(page.locator("#asked-calls")).to_contain_text("40 of at most 40 calls")
    expect(page.locator("#asked-heads")).to_have_text("6 heads found.")
    expect(page.get_by_role("row", name=re.compile("heads on a plane 4"))).to_be_visible()
    go_to(page, 1)
    expect(page.locator("#asked-calls")).to_contain_text("1 of at most 40 calls")
    expect(page.locator("#asked-heads")).to_have_text("No heads found yet.")


def pixels(page, which):
    """What a canvas shows, as numbers."""
    script = """canvas => {
        const { width, height } = canvas, copy = new OffscreenCanvas(width, height);
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        return [...context.getImageData(0, 0, width, height).data];
    }"""
    return np.array(page.locator(which).first.evaluate(script), float)


def go_to(page, moment):
    page.locator("#moment").fill(str(moment))
    expect(page.locator("#moment-said")).to_contain_text(
        f"Event {moment} of" if moment else "Before the first event"
    )


def test_a_block_is_learned_while_one_watches(page):
    """Its fields, and only those; heads and neurons as they are found; its report."""
    page.get_by_role("button", name="A whole block", exact=True).click()
    for name, shown in (("neurons", True), ("norm", True), ("method", False), ("ask_box", False)):
        assert page.locator(f"#{name}").is_visible() == shown, name
    page.locator("#neurons").fill("33")
    expect(page.get_by_role("alert")).to_have_text("Neurons is 33: choose from 1 to 32")
    expect(page.locator("#neurons")).to_have_attribute("aria-invalid", "true")
    for name, value in (("heads", 1), ("dim", 4), ("neurons", 4), ("examples", 400), ("seed", 2)):
        page.locator(f"#{name}").fill(str(value))
    page.get_by_label("Do not tell it the number of heads and neurons").uncheck()
    before = page.locator("#run-heading").text_content()
    page.get_by_role("button", name="Learn it").click()
    expect(page.locator("#run-heading")).not_to_have_text(before, timeout=MINUTE)
    expect(page.locator("#setting")).to_contain_text("1 head, 4 neurons, d = 4")
    neurons = page.locator('[data-found="neurons"]')
    expect(neurons).to_contain_text("the student has 12", timeout=MINUTE)
    expect(page.locator("#state")).to_have_text("RECOVERED", timeout=2 * MINUTE)
    expect(neurons).to_have_text("4 of 4 neurons; the student has 4")
    expect(page.locator("#worst")).to_have_text(re.compile("10⁻¹[²³⁴⁵⁶⁷]"))
    for picture in page.locator("#neuron-cards canvas").all():
        assert "heat map" in picture.get_attribute("aria-label")
    expect(page.locator("#neuron-cards canvas")).to_have_count(4)
    with page.expect_popup() as opened:
        page.get_by_role("link", name="Open the report").click()
    expect(opened.value.get_by_role("heading", name="The block was recovered")).to_be_visible()
    opened.value.close()
    page.get_by_role("button", name="Three heads", exact=True).click()
    assert page.locator("#method").is_visible()
    assert not page.locator("#neurons").is_visible()


@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
def test_a_recorded_block_is_replayed_and_nothing_sticks_out(page, size):
    page.set_viewport_size(size)
    page.get_by_role("button", name=re.compile("Example, a whole block")).click()
    expect(page.locator("#neurons-box")).to_be_visible()
    page.locator("#moment").fill("2")
    expect(page.locator('[data-found="neurons"]')).to_contain_text("of 16 neurons; the student has")
    assert not scrolls_sideways(page)
    page.get_by_role("button", name=re.compile("Example, three heads")).click()
    expect(page.locator("#neurons-box")).to_be_hidden()
    expect(page.locator("#found")).to_be_hidden()


def test_heads_take_shape_in_the_replay_of_a_recorded_run(page, address):
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{address}#example-1")
    page.reload()
    expect(page.locator("#state")).to_have_text("RECOVERED")
    expect(page.get_by_text("A recorded run")).to_be_visible()
    last = int(page.locator("#moment").get_attribute("max"))
    assert last >= 10
    expect(page.locator("#moment-said")).to_contain_text(f"Event {last} of {last}")
    truth, learned = pixels(page, "[data-truth=theta]"), pixels(page, "[data-learned=theta]")
    assert np.abs(truth - learned).max() <= 3
    go_to(page, 2)
    apart = np.abs(truth - pixels(page, "[data-learned=theta]")).mean()
    go_to(page, 5)
    assert np.abs(truth - pixels(page, "[data-learned=theta]")).mean() < apart / 2
    expect(page.locator("#chart .cursor")).to_have_count(1)
    expect(page.locator("#moment-words")).to_contain_text("penalty")
    expect(page.locator("tr.now")).to_have_count(1)
    go_to(page, 0)
    expect(page.locator(".blank")).to_have_count(6)
    expect(page.locator("#residual-now")).to_have_text("\N{EN DASH}")
    page.get_by_role("button", name="polish").click()
    expect(page.locator("#moment-said")).to_contain_text("polish")


def test_the_replay_plays_to_its_end_and_can_be_paused(page, address):
    page.goto(f"{address}#example-1")
    page.reload()  # who opens a recorded run sees it played
    play = page.locator("#play")
    expect(play).to_have_text("Pause")
    play.click()
    expect(play).to_have_text("Play")
    held = page.locator("#moment").input_value()
    page.wait_for_timeout(700)
    assert page.locator("#moment").input_value() == held
    play.click()
    last = page.locator("#moment").get_attribute("max")
    expect(page.locator("#moment")).to_have_value(last, timeout=20_000)
    expect(play).to_have_text("Play")


def test_cards_of_the_phases_light_up_one_after_another(page, address):
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{address}#example-2")
    page.reload()
    expect(page.locator(".phase.lit")).to_have_count(6)
    stroke = page.locator(".phase svg path").evaluate_all(
        "paths => paths.filter(path => getComputedStyle(path).stroke !== 'none').length"
    )
    assert stroke > 20  # the report's figures, with their styles
    go_to(page, 0)
    expect(page.locator(".phase.waiting")).to_have_count(6)
    lit = []
    for moment in range(int(page.locator("#moment").get_attribute("max")) + 1):
        go_to(page, moment)
        lit.append(page.locator(".phase.lit").count())
    assert lit == sorted(lit)
    assert {1, 2, 3, 4, 5, 6} <= set(lit)


def test_phases_light_up_while_they_run(page):
    page.get_by_role("button", name="The paper's phases", exact=True).click()
    begin_run(page)
    expect(page.locator("#state")).to_have_text("learning", timeout=MINUTE)
    expect(page.locator(".phase.waiting")).to_have_count(6, timeout=MINUTE)
    expect(page.locator(".phase.lit").first).to_be_visible(timeout=MINUTE)
    assert page.locator("#state").text_content() == "learning"
    expect(page.locator(".phase.lit")).to_have_count(6, timeout=3 * MINUTE)
    expect(page.locator("#state")).to_have_text("RECOVERED", timeout=3 * MINUTE)
    expect(page.locator("#reason")).to_contain_text("Phases alone: residual")


def test_what_counting_knows_is_said_at_once_and_nothing_is_started(page):
    before = page.locator("#runs li").count()
    page.get_by_role("button", name="Too few examples").click()
    said = re.compile("Examples is 10: by counting, 3 heads .* need at least 12")
    expect(page.get_by_role("alert")).to_have_text(said)
    expect(page.locator("#examples")).to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Learn it").click()
    page.locator("#method").select_option("sculpt")
    page.locator("#examples").fill("5000")
    page.locator("#heads").fill("8")
    expect(page.get_by_role("alert")).to_contain_text("8 x 7 = 56")
    page.get_by_role("button", name="Three heads", exact=True).click()
    expect(page.get_by_role("alert")).to_be_empty()
    expect(page.locator("#count")).to_contain_text("at least 12 examples")
    assert page.locator("#runs li").count() == before


def test_the_form_follows_the_run_that_is_looked_at(page, address, ended_run):
    page.get_by_role("button", name=re.compile(f"Run {ended_run} ")).click()
    expect(page.locator("#dim")).to_have_value("6")
    page.get_by_role("button", name=re.compile("Example, the paper's phases")).click()
    expect(page.locator("#method")).to_have_value("sculpt")
    expect(page.locator("#tokens")).to_have_value("3")
    page.goto(address)  # without a word about which, the newest
    newest = page.locator("#runs button").first
    expect(newest).to_have_attribute("aria-current", "true")
    expect(page.locator("#run-heading")).to_contain_text("Run ")


def test_own_data_are_dropped_on_the_page_and_learned(page, tmp_path):
    layer = mha.random_layer(n_heads=2, d=6)
    x = mha.sample_inputs("gaussian", 150, 4, 6, seed=1)
    np.savez(tmp_path / "mine.npz", X=x, Y=layer(x))
    encoded = base64.b64encode((tmp_path / "mine.npz").read_bytes()).decode()
    dropped = page.evaluate_handle(
        """bytes => {
            const drop = new DataTransfer();
            const file = Uint8Array.from(atob(bytes), c => c.charCodeAt(0));
            drop.items.add(new File([file], "mine.npz"));
            return drop;
        }""",
        encoded,
    )
    page.dispatch_event("#runs", "drop", {"dataTransfer": dropped})
    said = page.locator("#file-said")
    expect(said).to_contain_text("mine.npz: 150 examples of 4 tokens", timeout=MINUTE)
    expect(page.locator("#dim")).to_be_hidden()
    begin_run(page, heads=2)
    expect(page.locator("#state")).to_have_text("RECOVERED", timeout=MINUTE)
    expect(page.locator("[data-learned]")).to_have_count(4)
    expect(page.locator("[data-truth]")).to_have_count(0)
    expect(page.locator("#heads-note")).to_contain_text("no truth to compare")
    expect(page.get_by_role("link", name="Open the report")).to_be_visible()
    (tmp_path / "notes.txt").write_text("no numbers")
    page.locator("#choose").set_input_files(tmp_path / "notes.txt")
    expect(page.locator("#drop-said")).to_have_text(re.compile("notes.txt: not a format"))
    page.get_by_role("button", name="Back to a hidden layer").click()
    expect(page.locator("#dim")).to_be_visible()


def test_the_axis_ends_at_the_floor_and_every_mark_has_a_legend(page, ended_run):
    page.get_by_role("button", name=re.compile(f"Run {ended_run} ")).click()
    foot = "async told => (await import('./chart.js')).foot(told)"
    noisy = [{"error": 0.4, "head_error": 0.9}, {"error": 0.06, "head_error": None}]
    assert page.evaluate(foot, {"events": noisy, "floor": {"value": 0.05}}) == -2
    assert page.evaluate(foot, {"events": [], "floor": {"value": 2e-16}}) == -16
    expect(page.locator("#chart .floor")).to_have_count(1)
    expect(page.locator("#floor-name")).to_contain_text("rounding of the labels, 2.2·10⁻¹⁶")
    marks = page.locator("#chart svg > :not(text)").evaluate_all(
        "all => [...new Set(all.map(one => one.classList[0]))]"
    )
    explained = {"s1": "residual", "s2": "error of a head", "floor": "labels", "border": "stage"}
    assert set(marks) - {"rule"} == set(explained)
    for words in explained.values():
        expect(page.locator("#descent-heading + .key")).to_contain_text(words)
    for row in page.locator("#stages tr").all():
        assert row.locator("th span").first.text_content()


def test_nothing_can_be_asked_before_the_page_knows_its_choices(page, address):
    """On a slow answer what was typed would be overwritten, and sent to nobody."""
    page.route("**/about", lambda route: (page.wait_for_timeout(500), route.continue_()))
    page.goto(address, wait_until="commit")
    expect(page.get_by_role("button", name="Learn it")).to_be_disabled()
    expect(page.locator("#heads")).to_be_disabled()
    ask(page, heads=99)
    expect(page.get_by_role("alert")).to_have_text("Heads is 99: choose from 1 to 8")


def test_a_run_is_stopped(page):
    begin_run(page, heads=6, dim=32, tokens=8, examples=5000, method="adam", seconds=300)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#state")).to_have_text("stopped", timeout=MINUTE)
    expect(page.locator("#reason")).to_have_text("Stopped by hand.")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
    expect(page.get_by_role("link", name="Open the report")).to_be_hidden()
    expect(page.get_by_text("No report: there was no layer yet.")).to_be_visible()


def test_a_stopped_run_reports_what_it_has(page):
    begin_run(page, heads=2, dim=8, tokens=4, examples=500, method="adam", seconds=300)
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
