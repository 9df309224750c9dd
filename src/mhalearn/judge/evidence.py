"""Everything a verdict rests on, each of it measured when first asked for, and once."""

import math
from dataclasses import dataclass, field
from functools import cached_property

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.data.box import Box
from mhalearn.data.input_information import Information
from mhalearn.data.label_precision import Precision, label_precision
from mhalearn.judge.box_answers import Answers, ask_again
from mhalearn.judge.certificate import Certificate, make_certificate
from mhalearn.judge.departures import Departure, find_departures
from mhalearn.judge.fitted_attention import FittedAttention, look_at
from mhalearn.judge.identifiability import RESOLVED
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.mask_test import FirstRow, first_row_sees_later, measure_first_row
from mhalearn.judge.missing_head import OneMoreHead, one_more_head
from mhalearn.judge.missing_projected_head import one_more_projected_head
from mhalearn.judge.noise import estimate_noise
from mhalearn.judge.residual_correlation import measure_residual_correlation
from mhalearn.judge.residual_dependence import residual_dependence_test
from mhalearn.judge.residual_law import (
    ResidualLaw,
    Rows,
    describe_residual_law,
    inputs_look_alike_at_all_positions,
    rows_of,
)
from mhalearn.judge.residual_path import advise_residual, hint_at_residual_path
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.judge.rounding_test import RoundingTest, compare_rows, run_rounding_test
from mhalearn.judge.subsets import Subsets
from mhalearn.judge.tangent_space import TangentSpace, measure_tangent_space
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.comparison import compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run
from mhalearn.run.watch import Watch
from mhalearn.solvers.polish import polish_on


@dataclass(frozen=True)
class Evidence:
    """What is known about a candidate, and what can be measured.

    candidate: the learner's, polished. architecture: that was asked for; the number of heads may
    be open. precision: of the labels of a run, found once. information: of the inputs of the
    working set; None: nothing is known against them.
    polished: whether the candidate was descended from until nothing improved. Where it was not,
    what it leaves says nothing of heads or noise. converged: whether that descent came to rest.
    box: what the examples were drawn from, where it can still be asked.
    given: `train` as the user has it, where the subsets are in other coordinates.
    residual: whether tokens were taken off the labels, because these hold a residual path.

    time_is_up: whether the search used up its time. unfinished: checks that could not be made in
    the time that was left. What costs much raises OutOfTime once it is over.

    Cost: the candidate is walked over each subset at most once, whatever asks for its residuals.
    Expensive are only `gain_of_one_more_head`, a descent; `residual_dependence`, O(1500^2 d^2);
    `departures` and `rounding_test`, a tangent space; and `train_null_dimension`, a spectrum.
    """

    candidate: Candidate
    architecture: Architecture
    subsets: Subsets
    run: Run
    precision: Precision | None = None
    information: Information | None = None
    polished: bool = True
    converged: bool = True
    box: Box | None = None
    given: Examples | None = None
    residual: bool = False
    time_is_up: bool = False
    unfinished: list[str] = field(default_factory=list)

    @property
    def layer(self) -> Layer:
        return self.candidate.layer

    @property
    def train(self) -> Examples:
        return self.subsets.train

    @cached_property
    def label_precision(self) -> Precision:
        return self.precision or label_precision(self.subsets.working_set)

    @property
    def found_architecture(self) -> Architecture:
        """With as many heads as were found."""
        return self.architecture.with_heads(self.layer.n_heads)

    @cached_property
    def class_of_layer(self) -> Architecture:
        """The class of layers it is judged in."""
        architecture = self.found_architecture
        if not architecture.contains(self.layer):  # a learner that does not keep to the rank
            architecture = architecture.with_any_rank()
        return architecture

    @cached_property
    def counting_limit(self) -> float:
        """Of the heads asked for, or of those found where their number was open."""
        open_count = self.architecture.n_heads is None
        asked = self.found_architecture if open_count else self.architecture
        return self.subsets.every.counting_limit(asked)

    @cached_property
    def equations(self) -> float:
        """Independent equations over unknowns, of the scarcest kind."""
        if self.information is None:
            return math.inf
        return self.information.equations(self.found_architecture, self.counting_limit)

    @cached_property
    def train_residuals(self) -> Residuals:
        return self._residuals(self.subsets.train)

    @cached_property
    def certify_residuals(self) -> Residuals | None:
        """None where no example could be spared."""
        certify = self.subsets.certify
        return None if certify is None else self._residuals(certify)

    @cached_property
    def residuals_instead(self) -> Residuals | None:
        """On `certify`, of the layer of another kind that the learner came upon, if any."""
        other, certify = self.candidate.instead, self.subsets.certify
        return (
            None
            if other is None or certify is None
            else measure_residuals(other, certify, self.label_precision)
        )

    @cached_property
    def all_residuals(self) -> Residuals | None:
        """Of every example; None where the working set is all of them. Cost: a pass over all."""
        if not self.subsets.has_more:
            return None
        every = self.subsets.every
        watch = Watch(self.run, "residuals")
        watch.begin(f"all {every.n} examples")
        return measure_residuals(self.layer, every, self.label_precision, watch=watch)

    def _residuals(self, examples: Examples) -> Residuals:
        return measure_residuals(self.layer, examples, self.label_precision)

    def _begin_test(self, what: str) -> Watch:
        """Tell that a test begins that may take long, if there is time for it."""
        watch = Watch(self.run, "residual tests")
        watch.begin(what)
        return watch

    @cached_property
    def certificate(self) -> Certificate | None:
        """What `certify` says of the layer within its class; None where no example was spared."""
        residuals = self.certify_residuals
        if residuals is None:
            return None
        return make_certificate(
            self.layer,
            residuals,
            self.train,
            self.class_of_layer,
            group_of=self.subsets.certify_groups,
            run=self.run,
        )

    @property
    def is_certified(self) -> bool:
        return self.certificate is not None and self.certificate.recovered

    @cached_property
    def train_noise(self) -> float | None:
        """The noise that `train` shows; None where it is explained exactly, where the candidate is
        no minimum, or where nothing certifies."""
        if self.certificate is None or self.train_residuals.exact or not self.polished:
            return None
        determined = self.class_of_layer.count() - (self.certificate.null_dimension or 0)
        scalars = self.train.rows * self.train.out_dim
        return estimate_noise(self.train_residuals, scalars, determined)

    @cached_property
    def train_null_dimension(self) -> int:
        """Directions that the inputs of `train` leave open; 0 where the layer is too large."""
        watch = Watch(self.run, "identifiability")
        spectrum = measure_spectrum(self.layer, self.train, self.architecture, watch=watch)
        return 0 if spectrum is None else spectrum.null_dimension

    @cached_property
    def one_more_head(self) -> OneMoreHead | None:
        """The layer with a head more, and its gain on `certify`; None where nothing tells. There is
        no gain where attention has no softmax heads, of which one could be missing."""
        certify, residuals, layer = self.subsets.certify, self.certify_residuals, self.layer
        if certify is None or residuals is None:
            return None
        if not isinstance(layer, AttentionLayer | ProjectedLayer):
            return OneMoreHead(0.0, layer)
        watch = self._begin_test("one more head")
        given = self.train, certify, self.architecture, self.run
        if isinstance(layer, ProjectedLayer):
            found = one_more_projected_head(layer, *given, residuals=residuals)
        else:
            found = one_more_head(layer, *given, residuals=residuals)
        if found is not None and not found.gain:
            watch.check_time()  # a search that was cut short has excluded nothing
        return found

    @cached_property
    def gain_of_one_more_head(self) -> float | None:
        """Share of the error on `certify` that one more head removes; see `one_more_head`."""
        return None if self.one_more_head is None else self.one_more_head.gain

    @cached_property
    def attention_with_one_more_head(self) -> FittedAttention | None:
        """What the layer with a head more does on some of `train`."""
        more = self.one_more_head
        if more is None or not isinstance(more.layer, AttentionLayer):
            return None
        architecture = self.architecture.with_any_rank()
        return look_at(more.layer, self.train, architecture, self.run.seed)[0]

    @cached_property
    def residual_path_hint(self) -> str:
        """That labels look as if they held a residual path, or none where one was taken off."""
        return hint_at_residual_path(self.given or self.train, self.residual)

    @property
    def residual_advice(self) -> str:
        """What to learn with where a row's own token counts; see `advise_residual`."""
        return advise_residual(self.given or self.train, self.residual)

    @cached_property
    def first_row(self) -> FirstRow | None:
        """Whether the first row sees its own token alone; None where examples are too few."""
        return measure_first_row(self.train)

    @cached_property
    def first_row_sees_later(self) -> bool:
        """Whether what is left of first rows goes with later tokens."""
        part = self.train.subset(slice(0, 4096))
        x, y, lengths = part.arrays()
        return first_row_sees_later(part, (y - self.layer(x, lengths))[:, 0])

    @cached_property
    def answers(self) -> Answers | None:
        """What the box says twice, and of tokens in another order; None where there is no box."""
        return None if self.box is None else ask_again(self.box, self.train, self.run.seed)

    @cached_property
    def fitted_attention(self) -> FittedAttention | None:
        """What the layer does on some of `train`; None for another kind of attention."""
        if not isinstance(self.layer, AttentionLayer):
            return None
        return look_at(self.layer, self.train, self.class_of_layer, self.run.seed)[0]

    @property
    def scalars_left_over(self) -> float:
        """Labels of distinct examples of `train` over the unknowns they determined."""
        distinct = 1.0 if self.fitted_attention is None else self.fitted_attention.distinct
        scalars = self.train.rows * self.train.out_dim * distinct
        return scalars / self.class_of_layer.count()

    @cached_property
    def tangent_space(self) -> TangentSpace:
        """Of another kind of attention only its dimension is known."""
        if self.fitted_attention is None:
            return TangentSpace(None, None, self.class_of_layer.count(), None)
        self._begin_test("tangent space of the layer")
        return measure_tangent_space(self.fitted_attention)

    @cached_property
    def departures(self) -> tuple[Departure, ...]:
        """Alternatives that explain what is left, the largest share first; see `departures`."""
        if self.fitted_attention is None:
            return ()
        tangent = self.tangent_space
        self._begin_test("score tests for other kinds of attention")
        return find_departures(self.fitted_attention, tangent).found

    @cached_property
    def rows(self) -> Rows:
        """What the layer makes of some of `train`."""
        fitted = self.fitted_attention
        if fitted is None:
            return rows_of(self.layer, self.train)
        return Rows(fitted.x, fitted.inside, fitted.outputs.sum(axis=1), fitted.residual)

    @cached_property
    def residual_law(self) -> ResidualLaw:
        """Whether what is left of `train` is like noise."""
        return describe_residual_law(self.rows, self.tangent_space)

    @cached_property
    def positions_look_alike(self) -> bool:
        """Whether inputs do; where not, what depends on tokens depends on positions."""
        return inputs_look_alike_at_all_positions(self.rows)

    @cached_property
    def rounding_test(self) -> RoundingTest:
        """Whether what is left of coarse labels is their rounding."""
        self._begin_test("rounding of the labels")
        return run_rounding_test(
            self.layer, self.train, self.class_of_layer, self.train_residuals, self.run.seed
        )

    @cached_property
    def held_out_rows(self) -> Float64 | None:
        """What is left of rows of `certify` over what computing leaves; see `compare_rows`."""
        certify, residuals = self.subsets.certify, self.certify_residuals
        if certify is None or residuals is None:
            return None
        self._begin_test("rounding of held-out rows")
        return compare_rows(self.layer, certify, self.class_of_layer, residuals)

    @cached_property
    def rival(self) -> Layer | None:
        """Another layer that explains all examples as exactly, where a start ended at one."""
        for other in self.candidate.others:
            watch = self._begin_test("layers of other starts")
            layer = polish_on(self.train, other, self.found_architecture, self.run).layer
            if not isinstance(layer, AttentionLayer) or not isinstance(self.layer, AttentionLayer):
                continue
            subsets = (self.subsets.train, self.subsets.certify)
            walked = [
                measure_residuals(layer, subset, self.label_precision)
                for subset in subsets
                if subset is not None
            ]
            apart = compare(layer.canonical(), self.layer.canonical()).max_error
            if all(residuals.exact for residuals in walked) and apart > RESOLVED:
                return layer
            watch.check_time()  # a descent that was cut short has excluded nothing
        return None

    @cached_property
    def residual_dependence(self) -> float:
        """Standard deviations above noise; see `residual_dependence_test`."""
        self._begin_test("dependence on the inputs")
        return residual_dependence_test(self.layer, self.train, self.run.seed)

    @cached_property
    def residual_correlation(self) -> float:
        """Correlation between output columns over that of noise; a look at some of `train`."""
        return measure_residual_correlation(self.layer, self.train)
