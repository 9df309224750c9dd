"""Certify a layer on examples it was not learned from: what may be used, and what then holds."""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from mhalearn._runtime.validation import read_count
from mhalearn.data import Examples, Survey, as_examples, check_sizes
from mhalearn.data.input_information import (
    ENOUGH_EQUATIONS,
    Information,
    measure_information,
)
from mhalearn.data.label_precision import label_precision
from mhalearn.data.span import find_coordinates
from mhalearn.judge.certificate import Certificate, make_certificate
from mhalearn.judge.open_parameters import describe_open
from mhalearn.judge.residuals import measure_residuals
from mhalearn.judge.rounding_test import run_rounding_test
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.run.events import Listener
from mhalearn.run.run import Run


def certify(
    layer: Layer,
    X_fresh: ArrayLike | Examples,
    Y_fresh: ArrayLike | None = None,
    delta: float = 0.05,
    *,
    lengths: ArrayLike | None = None,
    learned_from: Examples | None = None,
    architecture: Architecture | None = None,
    on_event: Listener | None = None,
) -> Certificate:
    """Certify a layer on examples it was not learned from.

    X_fresh may be an Examples, and Y_fresh is then left out. `learned_from`: the inputs that
    determined the layer, for the spectrum and the intervals; without them the fresh inputs stand
    in, and the intervals are scaled to the number of examples the layer says it was learned from.
    architecture: the class of layers it is certified in; without it, as the layer says it was
    learned (`layer.architecture`). on_event: called with an Event as it goes on.
    Examples the layer was learned from are refused; if they are a minority, they are left out. So
    are those that come back in other guises, however many: tokens in another order, signs turned,
    digits rounded. Fresh ones that repeat each other so count as one, and nothing is recovered
    where they, and `learned_from`, hold hardly more equations than there are unknowns.
    Cost: three passes over the examples, one with a layer of four heads; memory of sixteen bytes a
    token and, of examples that are not in memory, of a working set.
    Trust: see `near_hashes` and `measure_information`.
    """
    architecture = _check_asked(layer, delta, learned_from, architecture)
    examples = as_examples(X_fresh, Y_fresh, lengths)
    for given in (examples, learned_from):
        if given is not None:
            _check_fits(layer, given)
    survey = examples.survey()
    check_sizes(survey)
    fresh, n_seen = _unseen(layer, examples, survey)
    examples = examples if fresh is None else fresh
    precision = label_precision(examples)
    residuals = measure_residuals(layer, examples, precision)
    inputs = learned_from
    if inputs is None:
        inputs = examples.sample(examples.working_set_size(architecture), seed=0)
    others = examples if inputs is not examples else None
    coordinates = find_coordinates(inputs, architecture, precision, others=others, whiten=False)
    opened = None
    if coordinates is not None and isinstance(layer, AttentionLayer | ProjectedLayer):
        opened = describe_open(coordinates, layer.n_heads)
        layer, architecture = coordinates.restrict(layer), coordinates.reduced
        examples, inputs = examples.in_span(coordinates), inputs.in_span(coordinates)
        learned_from = None if learned_from is None else inputs
    information = measure_information(examples, architecture, precision.unit)
    certificate = make_certificate(
        layer,
        residuals,
        inputs,
        architecture,
        float(delta),
        n_learned=_learned_count(layer, examples.n) if learned_from is None else None,
        n_seen=n_seen,
        group_of=information.group_of,
        run=Run(on_event=on_event),
    )
    if fresh is None:
        return _without_fresh(certificate).on_span(opened)
    objection = _objection(examples, information, learned_from, architecture, precision.unit)
    if objection is None and certificate.recovered and precision.name != "float64":
        test = run_rounding_test(layer, examples, architecture, residuals)
        certificate = replace(certificate, undetected=test.undetected)
        objection = None if test.passed else test.describe(residuals)
    if objection is not None:
        certificate = certificate.withdrawn(objection)
    return certificate.on_span(opened)


def _check_asked(
    layer: Layer,
    delta: float,
    learned_from: Examples | None,
    architecture: Architecture | None,
) -> Architecture:
    """Refuse what `certify` cannot take; the class of layers, as given or as the layer says."""
    if not isinstance(layer, Layer):
        raise ValueError(f"layer is a {type(layer).__name__}: pass an AttentionLayer")
    if not isinstance(delta, float | int | np.number) or not 0 < delta < 1:
        raise ValueError(f"delta={delta!r}: pass a probability between 0 and 1")
    if not isinstance(learned_from, Examples | None):
        raise ValueError(f"learned_from is a {type(learned_from).__name__}: pass an Examples")
    if architecture is None:
        return layer.architecture
    if not isinstance(architecture, Architecture):
        raise ValueError(
            f"architecture is a {type(architecture).__name__}: pass an Architecture or leave it out"
        )
    architecture = architecture.with_heads(layer.n_heads)
    if not architecture.contains(layer):
        raise ValueError(f"{architecture} does not contain the layer: leave it out")
    return architecture


def _unseen(layer: Layer, examples: Examples, survey: Survey) -> tuple[Examples | None, int]:
    """The examples that the layer was not learned from, None if there is none, and how many are
    left out."""
    same = np.isin(survey.hashes, layer.seen)
    if 2 * same.sum() > examples.n:
        raise ValueError(
            f"{same.sum()} of {examples.n} examples are those the layer was learned from: "
            "certify on fresh ones"
        )
    seen = same | np.isin(survey.near_hashes, layer.seen).any(axis=1)
    if seen.all():
        return None, examples.n
    return (examples.view(~seen) if seen.any() else examples), int(seen.sum())


def _without_fresh(certificate: Certificate) -> Certificate:
    """Of a layer that met nothing but what it was learned from, in other guises."""
    return replace(
        certificate,
        recovered=False,
        reason=(
            f"all {certificate.n_seen} examples are those the layer was learned from, up to the "
            "order of tokens, the sign, or rounding: certify on fresh ones"
        ),
        n_examples=0,
        n_groups=0,
        n_exceeding=0,
        tail_bound=1.0,
        errors=None,
        statement="No example is fresh: nothing is certain about other inputs.",
    )


def _objection(
    examples: Examples,
    information: Information,
    learned_from: Examples | None,
    architecture: Architecture,
    unit: float,
) -> str | None:
    """What fresh inputs, and those learned from where they are known, are too few or too alike for;
    None where they are not."""
    sources = [(examples, information)]
    if learned_from is not None:
        sources.append((learned_from, measure_information(learned_from, architecture, unit)))
    equations = max(
        of.equations(architecture, given.counting_limit(architecture)) for given, of in sources
    )
    if equations < ENOUGH_EQUATIONS:
        return (
            f"the inputs give {equations:.2f} independent equations an unknown, less than "
            f"{ENOUGH_EQUATIONS:g} (mirror images, near copies and repeated tokens add none): "
            "labels that no layer made could be fitted as well; give more distinct inputs"
        )
    longest = max(int(given.lengths.max()) for given, _ in sources)
    if longest > 2 and all(of.centrally_symmetric for _, of in sources):
        return (
            "the tokens of every example lie symmetrically about their mean, as two tokens always "
            "do: heads with Theta and W of opposite sign make the same outputs; give inputs that "
            "are not symmetric"
        )
    return None


def _check_fits(layer: Layer, examples: Examples) -> None:
    if (examples.d, examples.out_dim) != (layer.d, layer.out_dim):
        raise ValueError(
            f"the examples have d = {examples.d} and out_dim = {examples.out_dim}, "
            f"the layer d = {layer.d} and out_dim = {layer.out_dim}"
        )


def _learned_count(layer: Layer, otherwise: int) -> int:
    """How many examples the layer says it was learned from."""
    return read_count(layer.metadata.get("n_examples", "")) or otherwise
