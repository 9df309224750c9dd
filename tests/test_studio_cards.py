"""What the studio shows of stages and phases, and the runs that are recorded for its page."""

import json
import re
from xml.etree import ElementTree

import pytest

from mhalearn.run.events import Event
from mhalearn.studio.phase_cards import draw_card
from mhalearn.studio.recorded import RECORDED
from mhalearn.studio.request import PRESETS, Limits, Wish, read_wish
from mhalearn.studio.words import _OTHER, PHASES, explain_stage, find_phase

CRUDE = Event("phase 1: crude sum", 0, float("nan"), 1.0, "", {"chosen": "rows", "strength": 0.9})
BODY = {"round": 0, "proxy_norm": 2.0, "heads": 2, "eigenvalues": [0.01, 0.2, 0.5, 1.0]}
SCULPTED = Event("phase 2: body", 0, float("nan"), 2.0, "", BODY)
TIGHTER = Event("phase 4: tighter body", 0, float("nan"), 3.0, "", BODY | {"round": 1})
FILES = sorted(RECORDED.glob("*.json"))


def test_a_phase_that_has_ended_has_a_card_with_the_reports_numbers():
    card = draw_card([CRUDE])
    assert card["number"] == 1
    assert ("Estimate chosen", ["rows"]) in card["rows"]
    assert card["figures"] == []
    assert card["breakdown"] == ""


def test_steps_and_progress_of_a_phase_and_other_stages_have_none():
    assert draw_card([]) is None
    assert draw_card([CRUDE, Event("polish", 0, 0.1, 2.0, "", {"a": 1})]) is None
    assert draw_card([Event("phase 6: net", 3, 0.1, 2.0)]) is None
    assert draw_card([Event("phase 1: crude sum", 3, 0.1, 2.0, "", {"of": 9})]) is None


def test_a_phase_that_cannot_work_says_why():
    data = {"broke_down": True, "rows": 3, "needed": 128}
    card = draw_card([CRUDE, Event("phase 2: certification", 0, 0.0, 2.0, "too few rows", data)])
    assert (card["number"], card["breakdown"], card["whole"]) == (2, "too few rows", True)


def test_phases_of_certification_and_body_have_ended_with_the_body():
    rows = {"round": 0, "screened": 9, "certified": 5, "frequency": 0.1, "median_score": 0.1}
    rows |= {"scores": [0.1, 0.2], "weights": [0.4, 0.5]}
    certified = Event("phase 2: certification", 0, float("nan"), 1.5, "", rows)
    assert not draw_card([certified])["whole"]
    assert draw_card([certified, SCULPTED])["whole"]


def test_figures_of_all_cards_have_ids_of_their_own_and_no_styles_in_markup():
    cards = [draw_card([SCULPTED]), draw_card([SCULPTED, TIGHTER])]
    ids = []
    for card in cards:
        assert card["figures"], card["number"]
        for figure in card["figures"]:
            drawn = ElementTree.fromstring(figure["svg"])
            names = {one.get("id") for one in drawn.iter()} - {None}
            ids += list(names)
            used = re.findall(r'(?:url\(#|href="#|labelledby=")([^)"]+)', figure["svg"])
            assert set(used) <= names
            assert not any("style" in one.attrib for one in drawn.iter())
            assert any("data-style" in one.attrib for one in drawn.iter())
    assert len(ids) == len(set(ids)) > 0


def test_every_phase_has_words_and_new_stages_have_general_ones():
    assert len(PHASES) == 6
    assert find_phase("phase 4: certification") == 4
    assert find_phase("polish") is None
    assert explain_stage("something new") == _OTHER
    said = [explain_stage(f"round 2{part}") for part in ("", ", head exchange 3", ", no ridge")]
    assert len({*said, _OTHER}) == 4


# Recorded runs


def test_the_page_has_recorded_runs_and_the_first_is_what_the_form_begins_with():
    assert len(FILES) == 4
    assert read_wish(json.loads(FILES[0].read_text())["wish"], Limits()) == Wish()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recorded_runs_are_small_whole_and_explained(file):
    text = file.read_text()
    assert len(text) < 200_000
    run = json.loads(text)
    assert read_wish(run["wish"], Limits()) in PRESETS.values()
    kinds = [message["kind"] for message in run["messages"]]
    assert (kinds[0], kinds[-1]) == ("begin", "ended")
    assert run["state"] == run["messages"][-1]["outcome"] == "RECOVERED"
    told = [message for message in run["messages"] if message["kind"] == "event"]
    for event in told:
        assert explain_stage(event["stage"]) != _OTHER, event["stage"]
    assert {event["stage"] for event in told if "words" in event} == {e["stage"] for e in told}
    pictures = [message for message in run["messages"] if message["kind"] == "heads"]
    # A box that is asked shows its heads by algebra, in few steps.
    assert len(pictures) >= (5 if run["wish"].get("ask") else 8)
    assert [message["at"] for message in pictures] == sorted(message["at"] for message in pictures)
    assert pictures[-1]["at"] == len(told)
    cards = {message["number"] for message in run["messages"] if message["kind"] == "phase"}
    assert cards == (set(range(1, 7)) if run["wish"]["method"] == "sculpt" else set())


def test_nothing_in_recorded_runs_can_be_run():
    for file in FILES:
        assert not re.search(r"<script|javascript:|\bon\w+=|<foreignObject", file.read_text())
