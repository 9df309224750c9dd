"""An optimiser of the reader's own: what it is given, how it is judged, its line in the table."""

import importlib

import jax
import numpy as np
import pytest
from blocks import ROOT, find_blocks, find_file
from scipy.optimize import approx_fprime

import mhalearn as mha
from mhalearn.cli import run as command
from mhalearn.learners import OwnOptimiser
from mhalearn.learners.own_optimiser import OwnOptions

LAYER = mha.random_layer(2, 4, seed=0)
X = mha.sample_inputs("boolean", 120, 4, 4, seed=1)
Y = LAYER(X)
PAGE = ROOT / "docs" / "own_method.md"


@pytest.fixture
def mine(tmp_path):
    """The file of the page, and the function in it."""
    code = next(code for _, code in find_blocks(PAGE) if find_file(code) == "mine.py")
    (tmp_path / "mine.py").write_text(code)
    return f"{tmp_path / 'mine.py'}:descend"


def look_at(X, Y, look, **options):
    """What a function sees in the objective of its first start, which it gives back as it was."""
    seen = []

    def optimise(objective):
        seen.append(look(objective))
        return objective.start

    estimator = mha.AttentionRegressor(
        2, OwnOptimiser(optimise), options=OwnOptions(starts=1), polish=False, **options
    )
    estimator.fit(X, Y)
    return seen[0]


@pytest.mark.parametrize("options", [{}, {"bias": True, "causal": True}, {"head_dim": 2}], ids=str)
def test_the_objective_is_the_relative_squared_error_of_the_layer(options):
    def look(objective):
        at = objective.start
        value, gradient = objective.loss_and_gradient(at)
        difference = approx_fprime(at, objective.loss, 1e-7)
        residuals, jacobian = objective.residuals(at), jax.jacfwd(objective.residuals)(at)
        arrays = map(np.asarray, (gradient, difference, residuals, jacobian))
        return objective.layer(at), value, *arrays

    layer, value, gradient, difference, residuals, jacobian = look_at(X, Y, look, **options)
    np.testing.assert_allclose(gradient, difference, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(2 * jacobian.T @ residuals, gradient, rtol=1e-9, atol=1e-12)
    assert float(np.sum(residuals**2)) == pytest.approx(value, rel=1e-12)
    of_all = np.sum((layer(X) - Y) ** 2) / np.sum(Y**2)
    assert value == pytest.approx(of_all, rel=0.5)  # most of them are trained on


def test_the_page_s_optimiser_learns_and_tells_how_far_it_is(mine):
    told = []
    method = OwnOptimiser.from_file(mine)
    model = mha.AttentionRegressor(2, method, on_event=told.append).fit(X, Y)
    assert method.name == "descend"
    assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
    assert mha.compare(model.layer_, LAYER).max_error < 1e-8
    losses = [event.loss for event in told if event.stage == "own optimiser"]
    assert len(losses) > 5
    assert min(losses) < 1e-12


def test_one_that_diverges_is_not_believed():
    lost = OwnOptimiser(lambda objective: np.full_like(objective.start, np.nan), "lost")
    options = OwnOptions(starts=2)
    model = mha.AttentionRegressor(2, lost, options=options, polish=False).fit(X, Y)
    assert model.outcome_ is mha.Outcome.NONFINITE


@pytest.mark.parametrize(
    ("returned", "said"),
    [(lambda start: start[:-1], "of shape"), (lambda start: None, "object"), (np.sign, None)],
)
def test_what_is_not_the_vector_is_refused(returned, said):
    method = OwnOptimiser(lambda objective: returned(objective.start), "odd")
    estimator = mha.AttentionRegressor(2, method, options=OwnOptions(starts=1), polish=False)
    if said is None:
        estimator.fit(X, Y)
        return
    with pytest.raises(ValueError, match=f"odd returned .*{said}"):
        estimator.fit(X, Y)


BAD = {
    "mine.py": "give a file and a function",
    "absent.py:descend": "there is no such file",
    "mine.py:absent": "has no function 'absent'",
    "broken.py:descend": "ZeroDivisionError",
}


@pytest.mark.parametrize(("place", "said"), BAD.items())
def test_a_file_without_the_function_is_refused_in_one_line(
    place, said, mine, tmp_path, monkeypatch, capsys
):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench.py").write_text("raise AssertionError\n")
    monkeypatch.chdir(tmp_path)
    assert command(["bench", "--method", place]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_it_has_a_line_in_the_table_beside_the_peers(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    bench = importlib.import_module("benchmarks.bench")
    cases = importlib.import_module("benchmarks.cases")
    small = cases.Case(1, 3, 3, 40, 2.0)
    monkeypatch.setattr(bench, "case_at", lambda ratio, shape: small)
    newton = {"newton": bench.methods()["newton"]}
    monkeypatch.setattr(bench, "small_entries", lambda case: dict(newton))
    assert bench.main(["--method", mine, "--folder", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "bench.md").read_text()
    line = next(line for line in page.splitlines() if f"{small}, descend" in line)
    assert "3/3 arrive" in line
    assert "WORSE" not in capsys.readouterr().out
    for more in (["limit"], ["--record"]):
        with pytest.raises(SystemExit):
            bench.main([*more, "--method", mine])
