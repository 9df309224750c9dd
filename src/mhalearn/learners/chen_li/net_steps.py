"""Phase 6 on the examples at hand: how many fit, how many choose, and what is kept of it.

The paper's: that a validation set chooses. Ours: all numbers of examples.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from mhalearn._runtime.threads import one_lapack_thread
from mhalearn.layer.dense import Dense
from mhalearn.learners.chen_li.breakdown import Breakdown
from mhalearn.learners.chen_li.epsilon_net import bound_error, literal_net
from mhalearn.learners.chen_li.phase6_net import NetResult, search_net
from mhalearn.learners.chen_li.span import Span
from mhalearn.learners.chen_li.task import Task
from mhalearn.run.checkpoint import from_arrays, to_arrays
from mhalearn.solvers.scaled_problem import make_problem

# Rows that the literal net's least squares see, over its m d unknowns a column.
_LITERAL_ROWS = 12
# Examples on which all tuples are measured: the Gram matrix of their means is what takes longest.
_CHOOSING = 1000
# Rows over the same beyond which the counting limit asks for more than a net needs: it counts all
# of Theta, of which the span leaves m^2 numbers open.
_NET_ROWS = 4


def search_net_step(task: Task, span: Span) -> NetResult:
    """A random net on the first examples: few for the net, more for its refinement, others to
    choose."""
    few, constants = task.few, task.constants
    architecture = few.architecture(span.n_heads)
    limit = min(few.counting_limit(architecture), _NET_ROWS * span.n_heads * task.d / few.k)
    sizes = [
        min(int(np.ceil(ratio * limit)), most)
        for ratio, most in zip(constants.net_ratios, constants.net_most, strict=True)
    ]
    spared = min(constants.select, few.n // 4)
    sizes = [min(size, few.n - spared) for size in sizes]
    chosen = few.subset(slice(0, sizes[1] + spared))
    coarse, fine, select = (
        make_problem(chosen.subset(part), Dense(architecture))
        for part in (slice(0, sizes[0]), slice(0, sizes[1]), slice(sizes[1], None))
    )

    def search() -> dict[str, Any]:
        with one_lapack_thread():
            net = search_net(
                span,
                coarse,
                fine,
                select,
                task.run,
                n_starts=constants.net_starts,
                most_steps=constants.net_steps,
            )
        return to_arrays(net.layer) | {"error": net.error, "candidates": net.candidates}

    needs = ("theta", "w", "causal", "error", "candidates")
    found = task.run.checkpoint.once("net", search, needs=needs)
    return NetResult(from_arrays(found), found["error"], found["candidates"])


def literal_net_step(task: Task, span: Span) -> NetResult:
    """The net over all m-tuples; validation examples, which no other phase saw, choose.

    The first of them measure every tuple; what is said of the chosen one is by all of them, and
    holds for every tuple at once, so that the choice may look at any of them.
    """
    few, constants, m = task.few, task.constants, span.n_heads
    if m > 1 + len(constants.net_spacing):
        raise Breakdown(
            "phase 6: net",
            f"{m} heads: a net over all {m}-tuples of a span of {m} dimensions is out of reach; "
            "the practical plan goes on",
            heads=m,
        )
    validation = task.validation
    kind = Dense(few.architecture(m))
    rows = _LITERAL_ROWS * m * task.d
    fit = make_problem(few.subset(slice(0, min(few.n, math.ceil(rows / few.k)))), kind)
    held = make_problem(validation.subset(slice(0, min(validation.n, _CHOOSING))), kind)
    # Heads that are orthogonal and of one size are sqrt(m) times as large as their proxy.
    unit = math.sqrt(m)
    radius, spacing = unit * constants.net_radius, unit * constants.net_spacing[max(m - 2, 0)]
    layer, _, errors = literal_net(span, fit, held, radius=radius, spacing=spacing)
    x, labels, _ = validation.arrays()
    y = labels.astype(np.float64)
    squares = np.sum((layer(x) - y) ** 2, axis=(1, 2)) / np.mean(np.sum(y**2, axis=(1, 2)))
    stated = bound_error(squares, len(errors), constants.delta)
    return replace(NetResult(layer, stated.error, errors), generalisation=stated)
