"""What the phases found: every intermediate result, saved and loaded, and where a run may begin."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mhalearn._runtime import storage
from mhalearn._runtime.types import Float64
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.chen_li.body_shape import BodyShape
from mhalearn.learners.chen_li.decode import Decoded
from mhalearn.learners.chen_li.epsilon_net import Generalisation
from mhalearn.learners.chen_li.phase1_crude_sum import CrudeSum, SumEstimate
from mhalearn.learners.chen_li.phase2_body import ConvexBody, HullBody
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows
from mhalearn.learners.chen_li.phase3_refined_sum import RefinedSum
from mhalearn.learners.chen_li.phase6_net import NetResult
from mhalearn.learners.chen_li.span import Span, exact_span

Body = BodyShape | ConvexBody | HullBody
_BODIES: dict[str, type[Any]] = {kind.__name__: kind for kind in (BodyShape, ConvexBody, HullBody)}
_VERSION = "1"


@dataclass(frozen=True)
class Phases:
    """Everything the phases found, to be looked at, saved, and started from.

    Where inputs are neither uniform +-1 nor standard Gaussian, tokens were whitened: all but the
    layers is in the coordinates of x M, with M in `whitening`.
    """

    plan: str = ""
    crude: CrudeSum | None = None  # phase 1
    rows: tuple[CertifiedRows, ...] = ()  # phase 2, then 4: with the crude sum, with each refined
    bodies: tuple[Body | Any, ...] = ()  # from these rows; a plan's own may be of any kind
    sums: tuple[RefinedSum, ...] = ()  # phase 3
    span: Span | None = None  # phase 5
    net: NetResult | None = None  # phase 6
    decoded: Decoded | None = None
    whitening: Float64 | None = None

    @property
    def layer(self) -> AttentionLayer:
        """What the last step that ran made."""
        last = self.decoded or self.net
        if last is None:
            raise ValueError("these phases end before phase 6: there is no layer yet")
        return last.layer

    @property
    def error(self) -> float:
        """Its relative squared error on the examples that chose it."""
        last = self.decoded or self.net
        return float("nan") if last is None else last.error

    def before(self, phase: int) -> "Phases":
        """What is known when a phase begins, 2 to 7, where 7 is decoding: `run(start=...)` goes on
        from there."""
        if phase not in range(2, 8):
            raise ValueError(f"phase={phase!r}: pass a phase to begin with, 2 to 7 (decoding)")
        kept: dict[str, Any] = {}
        if phase <= 6:
            kept |= {"net": None, "decoded": None}
        if phase == 7:
            kept |= {"decoded": None}
        if phase <= 5:
            kept |= {"span": None}
        if phase <= 4:
            # A body that was given, not sculpted, has no rows: what there are belong to the last.
            has_rows = len(self.rows) == len(self.bodies)
            kept |= {"rows": self.rows[:has_rows], "bodies": self.bodies[:1]}
        if phase <= 3:
            kept |= {"sums": ()}
        if phase == 2:
            kept |= {"rows": (), "bodies": ()}
        return replace(self, **kept)

    def save(self, path: str | Path) -> None:
        """Write all of it to a .safetensors file."""
        tensors: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            parts = value if isinstance(value, tuple) else (value,)
            for number, part in enumerate(parts):
                if part is not None and field.name != "plan":
                    tensors |= _flat(f"{field.name}.{number}", part)
        metadata = {"kind": "phases", "version": _VERSION, "plan": self.plan}
        storage.write_tensors(path, tensors, metadata)


def load_phases(path: str | Path) -> Phases:
    """Phases that were saved."""
    tensors, metadata = storage.read_tensors(path, kind="phases", required=())
    if metadata.get("version") != _VERSION:
        raise ValueError(f"{storage.show(path)}: phases of another version: run them again")
    found: dict[str, dict[int, dict[str, Any]]] = {}
    try:
        for name, tensor in tensors.items():
            field, number, rest = name.split(".", 2)
            found.setdefault(field, {}).setdefault(int(number), {})[rest] = tensor
        made = {
            field: tuple(_made(field, parts[number]) for number in sorted(parts))
            for field, parts in found.items()
        }
        values: dict[str, Any] = {
            name: parts if name in _SEVERAL else parts[0] for name, parts in made.items()
        }
        return Phases(plan=metadata.get("plan", ""), **values)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{storage.show(path)}: damaged: {error}") from None


_SEVERAL = ("rows", "bodies", "sums")


def _flat(name: str, part: Any) -> dict[str, Any]:
    """A result as named arrays."""
    if isinstance(part, np.ndarray):
        return {f"{name}.array": part}
    if isinstance(part, CrudeSum):
        values = part.to_arrays()
    elif isinstance(part, NetResult | Decoded):
        values = {one.name: getattr(part, one.name) for one in fields(part)}
        layer = values.pop("layer")
        values |= {"theta": layer.theta, "w": layer.w}
        stated = values.pop("generalisation", None)
        if stated is not None:
            values["generalisation"] = np.array([float(v) for v in vars(stated).values()])
    else:
        values = {one.name: getattr(part, one.name) for one in fields(part)}
    if isinstance(part, Span):
        values["angles"] = np.array([sine for _, sine in part.angles])
        names = "\n".join(label for label, _ in part.angles)
        values["names"] = np.frombuffer(names.encode(), np.uint8)
    if type(part).__name__ in _BODIES:
        values["kind"] = np.frombuffer(type(part).__name__.encode(), np.uint8)
    return {f"{name}.{key}": np.asarray(value) for key, value in values.items()}


def _made(field: str, values: dict[str, Any]) -> Any:
    plain = {name: _scalar(value) for name, value in values.items()}
    if field == "whitening":
        return plain["array"]
    if field == "crude":
        return CrudeSum.from_arrays(values)
    if field == "rows":
        return CertifiedRows(**plain)
    if field == "sums":
        return RefinedSum(**plain)
    if field == "bodies":
        kind = _BODIES[values["kind"].tobytes().decode()]
        return kind(**{name: value for name, value in plain.items() if name != "kind"})
    if field == "span":
        names = values["names"].tobytes().decode().split("\n") if values["names"].size else []
        angles = tuple(zip(names, values["angles"].tolist(), strict=True))
        return Span(plain["proxy"], plain["wide"], angles, int(plain["queries"]))
    layer = AttentionLayer(values["theta"], values["w"])
    rest = {name: value for name, value in plain.items() if name not in ("theta", "w")}
    if field == "net":
        if "generalisation" in rest:
            error, bound, delta, candidates, examples, clip = values["generalisation"].tolist()
            rest["generalisation"] = Generalisation(
                error, bound, delta, int(candidates), int(examples), clip
            )
        return NetResult(layer, **rest)
    rest["examples"] = int(rest["examples"])
    return Decoded(layer, **rest)


def _scalar(value: Any) -> Any:
    return value.item() if value.ndim == 0 else value


def exact(layer: AttentionLayer) -> Phases:
    """What each phase would find without error: the sum, the hull, the span, the layer.

    With `exact(layer).before(j)` phase j can be seen alone.
    """
    total = np.asarray(layer.w.sum(axis=0))
    span = exact_span(np.asarray(layer.theta))
    reach = 4 * float(np.max(np.linalg.norm(layer.theta, axis=(1, 2))))
    hull = HullBody(span.proxy, span.wide, reach)
    none = np.zeros(0)
    crude = CrudeSum(total, (SumEstimate("exact", total, float("nan")),), 1.0, layer.out_dim)
    refined = RefinedSum(total, none, 1.0, none)
    net = NetResult(layer, 0.0, np.zeros(1))
    return Phases("exact", crude, (), (hull, hull), (refined,), span, net)
