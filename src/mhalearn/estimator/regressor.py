"""The settings of a fit, as scikit-learn has them, and what it leaves behind. No mathematics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from mhalearn._runtime.devices import is_first
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Float64
from mhalearn._runtime.version import __version__
from mhalearn.data import Examples, Survey, as_examples, check_sizes
from mhalearn.estimator.fitting import Task, gather, solve
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.score import add_tokens, determination
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.latent import Latent
from mhalearn.layer.parametrisation import Parametrisation
from mhalearn.layer.position_bias import PositionBias
from mhalearn.layer.qk_norm import QKNorm
from mhalearn.layer.rope import Rope
from mhalearn.learners.options import find_options, list_options
from mhalearn.learners.protocol import Learner
from mhalearn.learners.registry import find_learner
from mhalearn.learners.settings import (
    check_open,
    check_settings,
    check_start,
    check_supported,
    given_fields,
    list_open_fields,
)
from mhalearn.report.terminal import Progress
from mhalearn.run.checkpoint import Checkpoint, hold_checkpoint
from mhalearn.run.events import Event
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run


class AttentionRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Learn a multi-head attention layer from examples (X, Y).

    n_heads: the number of heads, or "auto" to find it (methods "newton" and "sculpt").
    method: "newton" (and "auto", which means it), "sculpt" for the six phases of Chen & Li, a
        baseline: "adam", "lbfgs", "linear"; the name of a learner that was registered; or any
        object of a class that subclasses `mhalearn.learners.Learner`.
    plan: of method "sculpt": "practical" (unless given), "decode", "literal", or a `chen_li.Plan`.
    options: what can be set about the method, as a record of `mhalearn.learners`: NewtonOptions,
        ChenLiOptions, AdamOptions, LbfgsOptions, LinearOptions; the defaults where it is None.
    head_dim: rank of every Theta_i and of every W_i, where it is known to be less than d.
    bias: learn a key-side vector a head and an output bias. causal: tokens see no later token.
    residual: labels hold a residual path, y = x + F(x): F is learned, and `predict` adds x again.
    kv_heads, rope, window, sinks, softcap, qk_norm, position_bias, latent: what heads have beside a
        Theta and a W, as in `Architecture`; "newton" learns them, given n_heads and head_dim. Of
        small layers, kv_heads, rope, window, sinks, softcap and position_bias may be "auto": they
        are found, and `layer_.architecture` and the reason have them.
    attention: a kind of attention of your own, a class of `mhalearn.layer.parametrisation.
        Parametrisation`, in place of softmax heads.
    polish: descend to machine precision after the learner.
    random_state: seed of all randomness. max_seconds: when to stop with the best layer so far; the
        judge may take a tenth of it more (five seconds at least), and what it had no time for is
        said in the reason.
    checkpoint: a .safetensors file for the state of the run, written every few seconds; it is a
        layer file too, of the best layer so far. resume: go on from it, if it is there, to the
        same result; without, a file that is there is refused, and so is one that another run is
        using. It holds states and no events: the trace and the report of a resumed run tell what
        came after.
    progress: True draws a live line on a terminal. on_event: called with every Event.

    After `fit`: layer_, outcome_, certificate_ (None if no example could be spared), trace_,
    n_heads_, n_features_in_, solution_.
    """

    def __init__(
        self,
        n_heads: int | str = "auto",
        method: str | Learner = "auto",
        *,
        plan: Any = None,
        options: Any = None,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = False,
        residual: bool = False,
        kv_heads: int | str | None = None,
        rope: Rope | str | None = None,
        window: int | str | None = None,
        sinks: bool | str = False,
        softcap: float | int | str | None = None,
        qk_norm: QKNorm | bool | str = False,
        position_bias: PositionBias | str | None = None,
        latent: Latent | None = None,
        attention: Callable[[Architecture], Parametrisation] | None = None,
        polish: bool = True,
        random_state: int = 0,
        max_seconds: float | None = None,
        checkpoint: str | Path | None = None,
        resume: bool = False,
        progress: bool | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.n_heads = n_heads
        self.method = method
        self.plan = plan
        self.options = options
        self.head_dim = head_dim
        self.bias = bias
        self.causal = causal
        self.residual = residual
        self.kv_heads = kv_heads
        self.rope = rope
        self.window = window
        self.sinks = sinks
        self.softcap = softcap
        self.qk_norm = qk_norm
        self.position_bias = position_bias
        self.latent = latent
        self.attention = attention
        self.polish = polish
        self.random_state = random_state
        self.max_seconds = max_seconds
        self.checkpoint = checkpoint
        self.resume = resume
        self.progress = progress
        self.on_event = on_event

    def fit(
        self, X: ArrayLike | Examples, Y: ArrayLike | None = None, lengths: ArrayLike | None = None
    ) -> AttentionRegressor:
        """Learn from X (n, k, d) and Y (n, k, e), or from an Examples.

        Memory: of more than `Examples.working_set_size` a random working set of that many is held,
        to learn from, to polish and to certify; all others are read in passes, a block at a time.
        Method "sculpt" learns from all. In the end every example counts: one that contradicts the
        layer is told, and under noise the layer is fitted to all.
        """
        examples = as_examples(X, Y, lengths)
        check_settings(self, examples)
        examples = examples.without_residual() if self.residual else examples
        with (
            Progress(enabled=bool(self.progress) and is_first()) as progress,
            hold_checkpoint(self.checkpoint),
        ):
            seed = int(self.random_state)
            self._run = Run(self.max_seconds, self._listener(progress), seed=seed)
            open_fields = list_open_fields(self)
            self._architecture = examples.architecture(
                None if isinstance(self.n_heads, str) else int(self.n_heads),
                head_dim=None if self.head_dim is None else int(self.head_dim),
                bias=bool(self.bias),
                causal=bool(self.causal),
                qk_norm=self.qk_norm,
                latent=self.latent,
                attention=self.attention,
                **given_fields(self),
            )
            check_supported(self._learner, self._architecture)
            if open_fields:
                check_open(self, self._learner, self._architecture, examples)
            box = examples.box
            examples, working_set, survey = gather(examples, self._architecture, seed, self._run)
            check_sizes(survey)
            self._seen = survey.remembered
            if self.checkpoint is not None:
                self._run.follow(self._open_checkpoint(examples, survey))
            task = Task(
                architecture=self._architecture,
                examples=examples,
                working_set=working_set,
                survey=survey,
                box=box,
                learner=self._learner,
                options=self._options,
                polish=bool(self.polish),
                residual=bool(self.residual),
                seed=seed,
                run=self._run,
                metadata=self._metadata,
                settings=self._settings(examples),
                open_fields=open_fields,
            )
            try:
                with one_lapack_thread():
                    solution = solve(task)
            except BaseException:
                with suppress(OSError):  # what broke the run is to be told
                    self._run.checkpoint.flush()
                raise
            self._run.checkpoint.flush()
        self.solution_ = solution
        self.layer_: Any = solution.layer
        self.outcome_: Outcome = solution.outcome
        self.trace_: list[Event] = solution.trace
        self.certificate_: Certificate | None = solution.certificate
        self.n_heads_ = solution.layer.n_heads
        self.n_features_in_ = examples.d
        return self

    def predict(self, X: ArrayLike, lengths: ArrayLike | None = None) -> Float64:
        """The learned layer's outputs (n, k, e); with `residual`, X is added to them."""
        check_is_fitted(self)
        outputs: Float64 = self.layer_(X, lengths)
        return add_tokens(outputs, X, lengths) if self.residual else outputs

    def score(self, X: ArrayLike, Y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Coefficient of determination over all outputs: 1 - |Y - F|^2 / |Y - mean Y|^2."""
        check_is_fitted(self)
        return determination(self.predict, Examples(X, Y), sample_weight)

    def best_layer_so_far(self) -> Layer | None:
        """The best layer of a fit that is running or was interrupted; None before there is one."""
        run: Run | None = getattr(self, "_run", None)
        if run is None or run.best is None:
            return None
        return run.best.replace(seen=self._seen)

    def layer_at_hand(self) -> Layer | None:
        """The layer an event speaks of, asked for inside `on_event`; None where it has none.

        Not the best so far, and nothing is promised about it: it is there to be looked at.
        """
        run: Run | None = getattr(self, "_run", None)
        return None if run is None or run.layer_at_hand is None else run.layer_at_hand()

    @property
    def _learner(self) -> Learner:
        return find_learner(self.method)

    @property
    def _options(self) -> Any:
        return find_options(self._learner, self.options, self.plan)

    def _open_checkpoint(self, examples: Examples, survey: Survey) -> Checkpoint:
        """The checkpoint, of this run and no other."""
        assert self.checkpoint is not None
        run = {
            "mhalearn": __version__,
            "method": self._learner.name,
            **{f"options.{name}": repr(set_) for name, set_ in list_options(self._options).items()},
            **self._architecture.describe(),
            "polish": bool(self.polish),
            **({"residual": True} if self.residual else {}),
            "random_state": int(self.random_state),
            "examples": blake2b(survey.hashes.tobytes(), digest_size=16).hexdigest(),
        }
        plain = self.attention is None and self._architecture.is_plain
        kind = None if plain else self._architecture.parametrisation()
        checkpoint = Checkpoint.open(
            self.checkpoint, run, self._seen, resume=self.resume, kind=kind
        )
        if checkpoint.is_plain and checkpoint.start is not None:
            check_start(checkpoint.start, self, examples)
        return checkpoint

    def _listener(self, progress: Progress) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            progress.on_event(event)
            if self.on_event is not None:
                self.on_event(event)

        return listen

    def _metadata(self, n: int) -> dict[str, str]:
        settings = {"method": _method_name(self.method), "seed": self.random_state, "n_examples": n}
        if self.head_dim is not None:
            settings["head_dim"] = self.head_dim
        if self.residual:
            settings["residual"] = "y = x + F(x)"
        return {name: str(value) for name, value in settings.items()}

    def _settings(self, examples: Examples) -> dict[str, Any]:
        chosen = self.get_params(deep=False)
        for name in ("progress", "on_event", "checkpoint", "resume"):
            chosen.pop(name)
        options = find_options(self._learner, self.options)
        chosen |= {"method": _method_name(self.method), "options": options}
        shape = {"n": examples.n, "k": examples.k, "d": examples.d, "out_dim": examples.out_dim}
        return chosen | shape

    def __getstate__(self) -> dict[str, Any]:
        """The running trace belongs to the process; callbacks are the caller's to restore."""
        state = dict(super().__getstate__())
        state.pop("_run", None)
        for name in ("_seen", "_architecture"):
            state.pop(name, None)
        state["on_event"] = None
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.target_tags.multi_output = True
        return tags


def _method_name(method: str | Learner) -> str:
    return method if isinstance(method, str) else method.name
