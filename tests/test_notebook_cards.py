"""What notebooks show for an object: small, static, escaped, and the numbers it stands for."""

import base64
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import mhalearn as mha
from mhalearn._runtime import html, pixels
from mhalearn.judge.finding import Finding
from mhalearn.judge.open_parameters import OpenParameters
from mhalearn.run.events import Event

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;\ud800\x00"
VOID = {"img"}
ALLOWED = {"div", "b", "p", "table", "tr", "th", "td", "details", "summary", "img"}


class Card(HTMLParser):
    """Reads a card: unbalanced tags, tags and attributes that nobody wrote are errors."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.images = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in ALLOWED
        assert {name for name, _ in attrs} <= {"style", "alt", "title", "width", "height", "src"}
        if tag == "img":
            self.images.append(dict(attrs))
            assert dict(attrs)["src"].startswith("data:image/png;base64,")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def card(thing):
    shown = thing._repr_html_()
    shown.encode()  # a kernel sends it so
    return Card(shown)


def test_a_comparison_of_blocks_names_the_part_that_differs():
    block = mha.random_block(2, 5, 4, seed=0)
    ffn = block.feed_forward
    moved = block.replace(feed_forward=ffn.replace(down_bias=ffn.down_bias + 1.0))
    compared = mha.compare(moved, block)
    said = card(compared).text
    assert f"output bias {compared.feed_forward_bias_error:.2g}" in " ".join(said.split())
    other = mha.compare(mha.random_block(2, 5, 3, seed=0), block)
    assert "3 neurons beside 4" in card(other).text


@pytest.fixture(scope="module")
def layer():
    return mha.random_layer(
        n_heads=2, d=6, scale=2.0, key_vector=True, out_bias=True, causal=True, seed=0
    )


@pytest.fixture(scope="module")
def certificate(layer):
    X = mha.sample_inputs("gaussian", n=60, k=4, d=6, seed=1)
    return mha.certify(layer, X, layer(X))


def read_png(uri):
    """Width, height and levels of a picture, by the PNG specification and zlib alone."""
    data = base64.b64decode(uri.partition(",")[2])
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    blocks, place = {}, 8
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        assert struct.unpack(">I", data[place + 8 + size :][:4])[0] == zlib.crc32(kind + body)
        blocks[kind], place = body, place + 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", blocks[b"IHDR"][:10])
    assert (depth, colour) == (8, 3)
    lines = np.frombuffer(zlib.decompress(blocks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    pixel, above = [], np.zeros(width, np.uint8)
    for kind, *rest in lines:
        line = np.array(rest, np.uint8)
        above = np.cumsum(line, dtype=np.uint8) if kind == 1 else above + line
        assert kind in (1, 2)
        pixel.append(above)
    palette = np.frombuffer(blocks[b"PLTE"], np.uint8).reshape(-1, 3)
    return np.stack(pixel), palette, np.frombuffer(blocks[b"tRNS"], np.uint8)


def test_a_picture_has_the_entries_sign_as_hue_and_size_as_opacity():
    matrix = np.array([[1.0, -1.0, 0.0], [0.5, -0.25, np.nan]])
    levels, palette, opacity = read_png(pixels.as_data_uri(pixels.draw_png(matrix, 1.0, 4)))
    assert levels.shape == (8, 12)
    entries = levels[::4, ::4]
    assert np.array_equal(levels, np.kron(entries, np.ones((4, 4), np.uint8)))
    assert np.allclose(opacity[entries] / 255, np.abs(np.nan_to_num(matrix)), atol=0.02)
    red, _, blue = np.moveaxis(palette[entries].astype(int), -1, 0)
    assert np.array_equal(red > blue, np.nan_to_num(matrix) >= 0)


def test_thinning_keeps_the_largest_entry_of_each_block():
    matrix = np.random.default_rng(0).normal(size=(70, 9))
    matrix[41, 7] = -50.0
    thinned = pixels.thin(matrix, 32)
    assert thinned.shape == (32, 9)
    assert thinned.min() == -50.0
    assert np.isin(thinned, matrix).all()
    assert pixels.thin(matrix, 70) is matrix


def test_a_layer_shows_its_sizes_and_heads(layer):
    shown = card(layer)
    for said in ("2 heads", "6 features", "6 outputs", "causal", "v (2, 6), c (6,)"):
        assert said in shown.text
    assert f"{np.linalg.norm(layer.w[1]):.3g}" in shown.words
    assert len(shown.images) == 4
    assert shown.images[0]["alt"].startswith("\N{GREEK CAPITAL LETTER THETA} 1: 6 by 6 entries")


def test_heads_are_drawn_on_one_scale():
    one = np.eye(4)
    levels = [
        read_png(image["src"])[0].max()
        for image in card(mha.AttentionLayer([one, one / 2], [one, one])).images[:2]
    ]
    assert levels[0] - 31 == pytest.approx(2 * (levels[1] - 31), abs=1)


def test_a_large_layer_has_a_small_card_that_says_what_it_leaves_out():
    large = mha.random_layer(n_heads=20, d=200, seed=0)
    shown = large._repr_html_()
    assert len(shown) < 60_000
    assert "12 more heads are not drawn" in shown
    assert "the largest of several entries" in shown
    assert len(Card(shown).images) == 16


def test_a_comparison_lists_its_errors_or_why_there_are_none(layer):
    moved = layer.replace(theta=layer.theta[::-1] * 1.25, w=layer.w[::-1])
    shown = card(mha.compare(moved.replace(key_vector=layer.key_vector[::-1]), layer))
    assert "largest relative error 0.25" in shown.text
    assert shown.words[shown.words.index("1") :][:3] == ["1", "2", "0.25"]
    other = card(mha.compare(mha.random_layer(n_heads=3, d=6, causal=True, seed=0), layer))
    assert "3 heads beside 2" in other.text


def test_a_certificate_shows_what_it_claims(certificate):
    assert certificate.recovered
    shown = card(certificate)
    assert certificate.statement in shown.text
    assert certificate.reason in shown.text
    assert "recovered" in shown.words
    refused = card(replace(certificate, recovered=False))
    assert "not recovered" in refused.words
    assert "recovered" not in refused.words


def test_a_certificate_on_a_span_says_what_is_open(certificate):
    opened = OpenParameters(5, 6, np.eye(6)[:1], 7, 90, ("first words", "second words"))
    shown = card(replace(certificate, recovered=False, recovered_on_span=True, span=opened))
    assert "recovered on the span of the tokens" in shown.words
    assert "Tokens span 5 of 6 dimensions, which leaves 7 of 90" in shown.text
    assert {"first words", "second words"} <= set(shown.words)


@pytest.mark.parametrize("outcome", list(mha.Outcome))
def test_a_solution_shows_its_outcome_and_only_recovered_ones_are_green(layer, outcome):
    solution = mha.Solution(layer, outcome, [], reason="why")
    shown = solution._repr_html_()
    assert outcome.name in Card(shown).words
    assert "why" in Card(shown).words
    green = outcome in (mha.Outcome.RECOVERED, mha.Outcome.RECOVERED_ON_SPAN)
    assert ("#1a7f37" in shown) == green


def test_everything_is_escaped(layer, certificate):
    """Files and boxes may hold any text, and a card is shown as it is."""
    hostile = layer.replace(metadata={HOSTILE: HOSTILE})
    opened = OpenParameters(5, 6, np.eye(6)[:1], 7, 90, (HOSTILE,))
    certificate = replace(
        certificate, reason=HOSTILE, statement=HOSTILE, label_precision=HOSTILE, span=opened
    )
    solution = mha.Solution(
        hostile,
        mha.Outcome.FITTED,
        [Event(HOSTILE, 0, 1.0, 1.0, HOSTILE)],
        reason=HOSTILE,
        certificate=certificate,
        findings=(Finding(HOSTILE, mha.Outcome.FITTED, HOSTILE),),
    )
    comparison = replace(mha.compare(layer, layer), why=HOSTILE)
    for thing in (hostile, certificate, solution, comparison):
        shown = card(thing)  # knows no script and no handler
        assert "<script>alert(1)</script>" in shown.text
    named = html.heat_map(np.eye(2), 1.0, HOSTILE)
    assert Card(named).images[0]["alt"].startswith("<script>")


def test_long_text_is_cut(layer):
    long = mha.Solution(layer.replace(metadata={"note": "x" * 10**6}), mha.Outcome.FITTED, [])
    shown = replace(long, reason="y" * 10**6)._repr_html_()
    assert len(shown) < 20_000
    assert "\N{HORIZONTAL ELLIPSIS}" in shown


def test_cards_need_no_drawing_library(tmp_path):
    from blocks import run_block

    code = (
        "import sys, mhalearn as mha\n"
        "assert 'img' in mha.random_layer(n_heads=1, d=2)._repr_html_()\n"
        "assert 'matplotlib' not in sys.modules and 'jinja2' not in sys.modules"
    )
    run_block("python", code, tmp_path)


def test_another_kind_of_attention_is_shown_too():
    from mhalearn.layer.base import ParametrisedLayer
    from mhalearn.layer.dense import Dense

    dense = Dense(mha.Architecture(3, 2))
    params = {"values": np.ones((2, 3, 3)), "slope": np.ones(2)}
    shown = card(ParametrisedLayer(dense, params))
    assert "values" in shown.words
    assert "and slope (2,)" in shown.words


def test_the_estimator_keeps_that_of_scikit_learn():
    shown = mha.AttentionRegressor(n_heads=2)._repr_html_()
    assert re.search("sk-", shown)
