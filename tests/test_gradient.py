"""The study of gradient descent: its labels are the layer's, and it can succeed and fail."""

import importlib
from types import ModuleType

import numpy as np
import pytest
from blocks import ROOT

import mhalearn as mha


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    found = importlib.import_module("benchmarks.gradient")
    monkeypatch.setattr(found, "STEPS", 500)
    return found


def test_labels_are_those_of_the_layer(study: ModuleType) -> None:
    layer = mha.random_layer(2, 5, scale=3.0)
    x = mha.sample_inputs("boolean", 20, 4, 5).astype(float)
    assert np.allclose(study.label(layer.theta, layer.w, x), layer(x), atol=1e-12)
    assert np.allclose(study.predict(layer.theta, layer.w, x), layer(x), atol=1e-4)


def test_two_heads_learn_only_if_they_start_apart(study: ModuleType) -> None:
    cell = study.Cell(2, d=4, k=3, scale=3.0, start=0.1)
    apart = study.measure(cell, 4)
    alike = study.measure(study.replace(cell, separation=0.0), 4)
    assert apart["learned"] >= 3
    assert alike["learned"] == 0
    assert max(alike["parting"]["closest"]) < 1e-9


def test_no_cell_is_measured_twice(study: ModuleType) -> None:
    cells = [cell for own in study.panels().values() for cell in own]
    assert len(set(cells)) == len(cells)
