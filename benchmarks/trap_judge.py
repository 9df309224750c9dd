"""Whether what was said about a trap is true; see fails_safely.py for the rules.

Nothing is taken from the library but the arrays of the layer and the words that were said.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.ledger import Record, finite
from benchmarks.trap_jacobian import allowed_error, null_dimension
from benchmarks.trap_words import asserts_noise, leaves_distant_layers_open, stated_dimension
from benchmarks.traps.boxes import Array, Heads, forward, heads_of, rms
from benchmarks.traps.draw import Trap

COMPUTED = 1e-12  # what computing a layer in doubles loses, relative to its outputs
FRESH = 1000  # inputs of the same law that labels nobody rounded are made of
# On those a layer may be off by so many times more: its parameters were found from rounded labels.
BEYOND = 2.0
# A relative squared error above this is no rounding of doubles.
ROUNDED = 1e-20


# Whether the layer is the true one


def in_units(trap: Trap, layers: list[Heads]) -> tuple[Trap, list[Heads]]:
    """Inputs and labels of size about one, as powers of two, and layers to match."""
    of_x, of_y = (power_of_two(values) for values in (trap.x, trap.y))
    if trap.box is not None:
        return trap, layers  # all boxes have such sizes
    scaled = [
        Heads(
            layer.theta * of_x * of_x,
            layer.w * (of_x / of_y),
            None if layer.key_vector is None else layer.key_vector * of_x,
            None if layer.out_bias is None else layer.out_bias / of_y,
            layer.causal,
        )
        for layer in layers
    ]
    made = None if trap.made is None else trap.made / of_y
    y, unit = trap.y.astype(float) / of_y, trap.last_place
    return replace(trap, x=trap.x / of_x, y=y, made=made, unit=unit), scaled


def power_of_two(values: Array) -> float:
    largest = float(np.max(np.abs(values)))
    if largest == 0:
        return 1.0
    return 2.0 ** round(math.log2(largest * rms(values / largest)))


def canonical(layer: Heads, tolerance: float = 1e-14) -> Heads:
    """Heads of equal attention are one, and those without W none."""
    vectors = np.zeros(layer.theta.shape[:2]) if layer.key_vector is None else layer.key_vector
    attention = np.concatenate([layer.theta, vectors[:, None]], axis=1)
    near = tolerance * np.linalg.norm(attention, axis=(1, 2)).max()
    firsts: list[int] = []
    w = layer.w.copy()
    for i, one in enumerate(attention):
        same = [j for j in firsts if np.linalg.norm(attention[j] - one) <= near]
        if same:
            w[same[0]] += w[i]
        else:
            firsts.append(i)
    least = tolerance * np.linalg.norm(layer.w, axis=(1, 2)).max()
    kept = [i for i in firsts if np.linalg.norm(w[i]) > least]
    if not kept:
        return layer._replace(theta=0 * layer.theta[:1], w=0 * w[:1], key_vector=None)
    vector = None if layer.key_vector is None else layer.key_vector[kept]
    return layer._replace(theta=layer.theta[kept], w=w[kept], key_vector=vector)


def match(learned: Heads, truth: Heads) -> tuple[Array, float]:
    """The learned head for each true one, and the largest error, relative to a head's size."""
    order, worst = np.arange(len(truth.theta)), math.inf
    if learned.theta.shape != truth.theta.shape or learned.causal != truth.causal:
        return order, worst
    apart = np.zeros((3, len(order), len(order)))
    sizes = [scales(truth.theta), scales(truth.w)]
    vectors = [
        np.zeros(truth.theta.shape[:2]) if layer.key_vector is None else layer.key_vector
        for layer in (learned, truth)
    ]
    sizes.append(np.maximum(scales(vectors[1]), sizes[0].max() / math.sqrt(truth.theta.shape[1])))
    pairs = ((learned.theta, truth.theta), (learned.w, truth.w), vectors)
    for kind, (found, true) in enumerate(pairs):
        for i in range(len(order)):
            for j in range(len(order)):
                apart[kind, i, j] = np.linalg.norm(found[j] - true[i]) / sizes[kind][i]
    rows, order = linear_sum_assignment(np.sum(apart**2, axis=0))
    biases = [
        np.zeros(truth.w.shape[2]) if layer.out_bias is None else layer.out_bias
        for layer in (learned, truth)
    ]
    size = max(np.linalg.norm(biases[1]), sizes[1].max() / math.sqrt(truth.w.shape[1]))
    worst = max(apart[:, rows, order].max(), np.linalg.norm(biases[0] - biases[1]) / size)
    return order, float(worst)


def scales(heads: Array) -> Array:
    """The norm of each head, or that of all where it is less."""
    norms = np.linalg.norm(heads.reshape(len(heads), -1), axis=1)
    common = math.sqrt(np.mean(norms**2))
    return np.maximum(norms, common) if common > 0 else np.ones(len(norms))


def apart(found: Array, true: Array) -> float:
    return rms(found - true) / (rms(true) or 1.0)


def compare(learned: Heads, trap: Trap, truth: Heads | None) -> tuple[bool, float]:
    """Whether the learned layer is the truth, and its error."""
    rounding = max(COMPUTED, trap.last_place)
    if truth is None:
        return meets_labels(learned, trap, rounding)
    if trap.twins:
        error = apart(forward(learned, trap.x, trap.lengths), forward(truth, trap.x, trap.lengths))
        return error <= rounding, error
    allowed = allowed_error(truth, trap, rounding)
    if trap.x.shape[1] == 2:
        error = apart_on_gaussian_inputs(learned, truth, trap)
        return error <= allowed, error
    least = canonical(truth)
    if len(learned.theta) < len(least.theta):
        error = apart_on_gaussian_inputs(learned, truth, trap)
        return error <= rounding, error
    _, error = match(learned, least)
    return error <= allowed, error


def meets_labels(learned: Heads, trap: Trap, rounding: float) -> tuple[bool, float]:
    """Of no layer: whether one makes the labels all the same, before they were rounded."""
    if trap.made is None:
        return False, math.inf
    error = apart(forward(learned, trap.x, trap.lengths), trap.made)
    if trap.box is None or trap.fresh is None:
        return trap.last_place > 1e-15 and error <= rounding, error
    x = trap.fresh(FRESH)
    error = max(error, apart(forward(learned, x), trap.box(x)) / BEYOND)
    return error <= rounding and not null_dimension(learned, trap), error


def apart_on_gaussian_inputs(learned: Heads, truth: Heads, trap: Trap) -> float:
    """Relative distance of two functions; Gaussian inputs stand in for all of this size."""
    x = np.random.default_rng(0).standard_normal((500, *trap.x.shape[1:])) * rms(trap.x)
    return apart(forward(learned, x), forward(truth, x))


# Families of layers


def family_dimension(truth: Heads, trap: Trap) -> int | None:
    """Of the layers that fit with the heads asked for: the largest of the family's pieces.

    Heads beyond the truth's have any attention and no W, or share the attention of another.
    """
    truth = canonical(truth)
    m, d, e = truth.w.shape
    extra = 0 if trap.heads == "auto" else int(trap.heads) - m
    if extra < 0:
        return None
    rng, vector = np.random.default_rng(0), truth.key_vector
    free = rng.standard_normal((extra, d, d)), np.zeros((extra, d, e))
    shared = np.repeat(truth.theta[:1], extra, axis=0), rng.standard_normal((extra, d, e))
    if vector is not None:
        vector = np.concatenate([vector, np.repeat(vector[:1], extra, axis=0)])
    found = []
    for theta, w in (free, shared):
        least = truth.w - np.eye(m)[0][:, None, None] * w.sum(axis=0)
        theta, w = np.concatenate([truth.theta, theta]), np.concatenate([least, w])
        found.append(null_dimension(truth._replace(theta=theta, w=w, key_vector=vector), trap))
    return None if None in found else max(found)


def family_due(truth: Heads | None, trap: Trap) -> int | None:
    """The dimension of the family that fits exact doubles; None where that is not known."""
    if truth is None or trap.last_place > 1e-15:
        return None
    true = forward(truth, trap.x, trap.lengths)
    return family_dimension(truth, trap) if rms(trap.y - true) <= 1e-14 * rms(true) else None


# What was said


def false_words(trap: Trap, outcome: str, reason: str, certificate: Any) -> list[str]:
    """What asserts of noise, or of a lack of examples, something that is not so."""
    found = []
    rounded_only = trap.cell is not None and not trap.cell["precision"].startswith("computed")
    if rounded_only and outcome == "NOT_IDENTIFIED":
        found.append("not identified")
    if trap.noisy:
        return found
    if asserts_noise(reason):
        found.append("noise in reason")
    if certificate is None:
        return found
    if asserts_noise(certificate.statement):
        found.append("noise in statement")
    left = certificate.relative_mse > ROUNDED
    if left and trap.last_place < 1e-15 and has_intervals(certificate):
        found.append(f"intervals of {outcome}")
    return found


def has_intervals(certificate: Any) -> bool:
    given = certificate.intervals
    return given is not None and any(np.isfinite(a).any() for a in given.arrays.values())


def coverage(learned: Heads, truth: Heads, certificate: Any) -> float | None:
    """The share of true parameters inside the interval around the learned one."""
    if certificate is None or not has_intervals(certificate):
        return None
    order, error = match(learned, truth)
    if not math.isfinite(error):
        return None
    inside = [
        np.abs(getattr(learned, name) - getattr(truth, name)[np.argsort(order)]) <= widths
        for name, widths in certificate.intervals.arrays.items()
        if name in ("theta", "w")
    ]
    return float(np.mean(np.concatenate([part.ravel() for part in inside])))


def judge(trap: Trap, learner: Any) -> Record:
    """What a fitted learner said, and what of it is false."""
    outcome, reason = learner.outcome_.name, learner.solution_.reason
    certificate, learned = learner.certificate_, heads_of(learner.layer_)
    layers = [learned] if trap.truth is None else [learned, heads_of(trap.truth)]
    found: Record = {"outcome": outcome, "reason": reason, "false": False, "noisy": trap.noisy}
    found["says_noise"] = asserts_noise(reason)
    found["false_words"] = false_words(trap, outcome, reason, certificate)
    if trap.cell is not None:
        found["cell"] = trap.cell
    if trap.gaussian and outcome == "FITTED":
        found["gaussian"] = True
        found["covered"] = coverage(*layers, certificate)
    trap, (learned, *true) = in_units(trap, layers)
    truth = true[0] if true else None
    family = found["family"] = family_due(truth, trap)
    if outcome == "RECOVERED":
        right, error = compare(learned, trap, truth)
        right = right and not family and (not trap.twins or leaves_distant_layers_open(reason))
        found |= {"false": not right, "error": finite(error)}
    if outcome == "RECOVERED_ON_SPAN":
        true = trap.y if truth is None else forward(truth, trap.x, trap.lengths)
        off = apart(forward(learned, trap.x, trap.lengths), true)
        right = truth is not None and off <= 100 * max(COMPUTED, trap.last_place) and family != 0
        found |= {"false": not right, "error": finite(off)}
    stated = stated_dimension(reason)
    if outcome == "NOT_IDENTIFIED" and stated:
        found["stated"], is_bound = stated
        if not is_bound:
            found["of_layer"] = null_dimension(learned, trap)
        if trap.heads != "auto":
            found["of_asked"] = family
    return found


def judge_again(trap: Trap, learned: Any, recovered: bool) -> bool:
    """Whether a certificate on examples that hold nothing new was false."""
    x = trap.fresh(FRESH)
    return recovered and apart(forward(learned, x), trap.box(x)) > 1e-6
