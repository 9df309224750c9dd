"""mha.audit: does this box compute what was claimed, and if not, what else?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.validation import check_count
from mhalearn.auditing.evidence import Evidence, ask, gather
from mhalearn.auditing.explain import Conclusion, explain
from mhalearn.auditing.fault import Context
from mhalearn.auditing.learned import learn_instead
from mhalearn.auditing.reading import Reading, read_layer
from mhalearn.auditing.result import Audit
from mhalearn.auditing.rivals import choose
from mhalearn.auditing.search import Search
from mhalearn.auditing.trial import Hypothesis
from mhalearn.data import Examples
from mhalearn.interop import from_huggingface
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import load_layer

# Changes beside others that rounding would hide, at most, what they must take off the squared error
# of each half of the sequences; sequences, and numbers, that there must be.
_HIDDEN, _HALVES, _SEQUENCES, _NUMBERS = 2, 0.98, 8, 1500


def audit(
    claimed: Layer | str | Path | Mapping[str, Any],
    box_or_examples: Examples | Callable[[Any], Any],
    *,
    config: Mapping[str, Any] | None = None,
    layer_index: int = 0,
    precision: str | None = None,
    depth: int = 3,
    max_seconds: float = 60.0,
    n: int = 128,
    k: int = 64,
    inputs: str = "gaussian",
    seed: int = 0,
) -> Audit:
    """Name what a box computes otherwise than a layer does.

    claimed: a layer; the file of one; or weights of a Hugging Face model, of which layer
    `layer_index` is meant: a mapping, or files, with `config` or a config.json beside them.
    box_or_examples: recorded `Examples`, of which the first 256 are used; or a function, a torch
    module or a JAX function from tokens (n, k, d) to outputs, which is asked `n` sequences of `k`
    tokens, drawn as in `sample_inputs`; of cross-attention, a function of tokens and memory.
    precision: what the box computes in, "float32" or "bfloat16" for instance; by default what its
    labels are rounded to. depth: faults that are looked for together, at most.
    max_seconds: after which no further pair of faults is tried. What is left of it goes into
    learning the layer that the box does compute, where nothing explains it and examples suffice.

    Source: none; a catalogue of edits of the forward pass, each tried and its number fitted.
    Cost: a forward pass of a few sequences for each of some hundred edits; pairs of them where one
    does not explain all.
    Trust: `ok` and errors are measured. A finding that brings the error down to rounding is as good
    as certain among the faults of the catalogue; one that explains a part says so by its
    confidence.
    """
    began = time.monotonic()
    if not (math.isfinite(max_seconds) and max_seconds > 0):
        raise ValueError(f"max_seconds={max_seconds}: pass a positive number of seconds")
    check_count("depth", depth)
    layer = _read_claim(claimed, config, layer_index)
    reading = read_layer(layer)
    examples = ask(box_or_examples, layer, n, k, inputs, seed)
    with one_lapack_thread():  # for many small products
        found = _audit(examples, reading, precision, depth, began, max_seconds, seed)
    if found.explained:
        return found
    left = began + max_seconds - time.monotonic()
    learned = learn_instead(layer, examples, left)
    return replace(found, learned=learned, seconds=time.monotonic() - began)


def _audit(
    examples: Examples,
    reading: Reading,
    precision: str | None,
    depth: int,
    began: float,
    max_seconds: float,
    seed: int,
) -> Audit:
    evidence = gather(examples, reading, precision)
    context = Context((), evidence.precision, evidence.padded, examples.k)
    trial = evidence.trial(seed)
    search = Search(
        trial,
        reading,
        context,
        evidence.floor,
        lambda hypothesis: evidence.floor_of(hypothesis, reading),
        depth,
        began + max_seconds,
    )
    conclusion = _conclude(search, evidence, reading, depth)
    return explain(evidence, reading, conclusion, trial.used, depth, time.monotonic() - began)


def _read_claim(
    claimed: Layer | str | Path | Mapping[str, Any], config: Mapping[str, Any] | None, index: int
) -> Layer:
    """A layer, or that of a file: ours, or weights with a config given or beside it."""
    if isinstance(claimed, Layer):
        return claimed
    if isinstance(claimed, Mapping):
        return from_huggingface(claimed, layer_index=index, config=config)
    if not isinstance(claimed, str | Path):
        raise ValueError(
            f"cannot audit against a {type(claimed).__name__}: pass a layer, the file of one, or "
            "Hugging Face weights with their config"
        )
    place = Path(claimed)
    folder = place if place.is_dir() else place.parent
    if config is not None or place.is_dir() or (folder / "config.json").is_file():
        return from_huggingface(claimed, layer_index=index, config=config)
    return load_layer(claimed)


def _conclude(search: Search, evidence: Evidence, reading: Reading, depth: int) -> Conclusion:
    """What explains the labels: down to the floor, and then below it."""
    nothing = Hypothesis()
    error = evidence.error(evidence.residual(nothing, reading))
    conclusion = Conclusion(nothing, error <= evidence.floor)
    if not conclusion.explained:
        found = search.run()
        first, rivals = choose(evidence, reading, found.hypotheses)
        conclusion = Conclusion(first, found.explained, rivals)
    while conclusion.explained and conclusion.hidden < _HIDDEN:
        if len(conclusion.hypothesis.steps) >= depth:
            break
        further = search.smaller(conclusion.hypothesis)
        if further is None:
            break
        if not _holds(evidence, reading, conclusion.hypothesis, further.hypothesis):
            break
        conclusion = Conclusion(further.hypothesis, True, conclusion.rivals, conclusion.hidden + 1)
    return conclusion


def _holds(evidence: Evidence, reading: Reading, before: Hypothesis, after: Hypothesis) -> bool:
    """Whether a change takes something off the error of either half of all sequences; not where
    these are so few that any does."""
    if len(evidence.y) < _SEQUENCES or evidence.y[evidence.forward.rows].size < _NUMBERS:
        return False
    old, new = (evidence.residual(one, reading) for one in (before, after))
    halves = (slice(0, None, 2), slice(1, None, 2))
    return all(
        float((new[half] ** 2).sum()) <= _HALVES * float((old[half] ** 2).sum()) for half in halves
    )
