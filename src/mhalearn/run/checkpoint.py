"""What a run has done so far, in one file that is whole at every moment.

A learner asks what is known of a stage before it begins it, and records states as it goes; a run
that was killed then goes on from the last state written, to the same result. The file is also a
layer file, of the best layer so far, once there is one.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import devices, storage
from mhalearn._runtime.locks import locked
from mhalearn._runtime.programs import in_float64
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation
from mhalearn.layer.units import Units

StateArrays = dict[str, NDArray[Any]]

# Seconds between two writes, and how many times longer than a write that must be.
_SECONDS, _SHARE = 2.0, 20.0
# Tensors of the file that are not the layer's: about the run, of all the rest, and the states.
_OURS = "journal/"
# How the arrays of a state that are parameters of another kind of attention begin.
_PARAMETER = "parameter."
_RUN, _DIGEST, _STATE = f"{_OURS}run", f"{_OURS}digest", f"{_OURS}at/"


class Checkpoint:
    """States by stage, written to a file now and then; without a path it forgets everything.

    A state is a tree of arrays and numbers, which must not change once recorded. Names are relative
    to the stages that `within` has entered.
    """

    def __init__(
        self, path: str | Path | None = None, run: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.kind: Parametrisation | None = None  # of attention, where layers are not softmax heads
        self.best: tuple[Layer, float] | None = None  # and its error
        self.records = 0  # made so far, by all processes together
        self.resumed = False
        self.is_plain = False  # resumed from a layer file that is no journal
        self._run = dict(run or {})
        self._states: dict[str, dict[str, Any]] = {}
        self._noted: dict[str, dict[str, Any]] = {}
        self._ended: list[str] = []  # stages whose parts the next record replaces
        self._place = ""
        self._closed = path is None  # to new states
        self._changed = False
        self._written, self._cost = -np.inf, 0.0
        self._seen: NDArray[np.uint64] | None = None
        self._found = np.zeros(16, np.uint8)  # the digest of what was read

    @classmethod
    def open(
        cls,
        path: str | Path,
        run: Mapping[str, Any],
        seen: NDArray[np.uint64],
        *,
        resume: bool,
        kind: Parametrisation | None = None,
    ) -> "Checkpoint":
        """The journal in a file: a new one, or with `resume` the one that is there.

        run: what must be the same when it is resumed. seen: goes with the best layer. kind: of
        attention, where layers are not softmax heads.
        Processes of one run open it together: all read it, and the first one writes.
        """
        checkpoint = cls(path, run)
        checkpoint._seen, checkpoint.kind = seen, kind
        if devices.is_first():
            storage.remove_leftovers(path)
        if resume and holds_something(path):
            checkpoint._read(path)
        checkpoint._share(path)
        return checkpoint

    @property
    def start(self) -> Layer | None:
        """The layer it was resumed from, where there is nothing else to go on from."""
        return self.best[0] if self.resumed and self.best and not self._states else None

    # What learners use

    @in_float64
    def recall(self, name: str, like: Any = None, needs: Iterable[str] = ()) -> Any:
        """The state last recorded under a name, or None.

        like: a tree of the structure and shapes to return. Without it, an array or a flat
        dictionary (with what it `needs`) as it was recorded, zero-dimensional arrays as numbers.
        """
        found = self._states.get(self._place + name)
        if found is None:
            return None
        if not set(needs) <= set(found):
            raise self.damaged()
        if like is None:
            numbers = {key: _number(leaf) for key, leaf in found.items()}
            return numbers[""] if set(numbers) == {""} else numbers
        wanted, structure = jax.tree_util.tree_flatten_with_path(like)
        leaves = []
        for path, leaf in wanted:
            known = found.get(_key(path))
            if known is None or not _alike(known, leaf) or len(found) != len(wanted):
                raise self.damaged()
            if isinstance(leaf, jax.Array):
                known = jnp.asarray(known)
            leaves.append(type(leaf)(known) if isinstance(leaf, bool | int | float) else known)
        return jax.tree.unflatten(structure, leaves)

    def recall_layer(self, name: str, *needs: str) -> tuple[Any, dict[str, Any]] | None:
        """A state made by `to_arrays`, as a layer, and all of the state."""
        found = self.recall(name, needs=needs)
        if found is None:
            return None
        try:
            return from_arrays(found, self.kind), found
        except (ValueError, TypeError, KeyError):
            raise self.damaged() from None

    def record(self, name: str, state: Any, *, now: bool = False) -> None:
        """Remember a state. It is written if the last time was long ago, or `now`."""
        if self._closed:
            return
        known = (self._states | self._noted).items()
        kept = {stage: old for stage, old in known if not stage.startswith(tuple(self._ended))}
        # In one step: an interrupt may come at any moment, and what there is then is written.
        self._states = kept | {self._place + name: _flat(state)}
        self._noted, self._ended = {}, []
        self.records += 1
        self._changed = True
        self._write_if_due(now)

    def noter(self, name: str) -> Callable[[Any], None]:
        """A function that remembers what goes with the next state recorded, wherever that is."""
        full = self._place + name

        def note(state: Any) -> None:
            if not self._closed:
                self._noted[full] = _flat(state)

        return note

    def begun(self, name: str) -> bool:
        """Whether anything is known of a stage."""
        full = self._place + name
        return any(known == full or known.startswith(full + "/") for known in self._states)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Names inside are those of the stage's parts, which the next record after it replaces."""
        before, self._place = self._place, f"{self._place}{name}/"
        try:
            yield
            self._ended.append(self._place)
        finally:
            self._place = before

    def once(self, name: str, work: Callable[[], Any], needs: Iterable[str] = ()) -> Any:
        """What a stage comes to: recalled (without `like`), or worked out and written."""
        found = self.recall(name, needs=needs)
        if found is None:
            with self.within(name):
                found = work()
            self.record(name, found, now=True)
        return found

    # What a run uses

    def keep(self, layer: Layer, error: float) -> None:
        """Remember the best layer so far."""
        self.best = layer, error
        self._changed = True
        self._write_if_due(False)

    def close(self) -> None:
        """Record no more: what follows is cut short, and nothing to go on from."""
        self._closed = True

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._changed:
            self._write_if_due(True)

    def _write_if_due(self, now: bool) -> None:
        pause = max(_SECONDS, _SHARE * self._cost)
        if self.path is not None and (now or time.monotonic() - self._written >= pause):
            self._write(self.path)

    def _write(self, path: str | Path) -> None:
        began = time.monotonic()
        said = {"run": self._run, "records": self.records}
        tensors: StateArrays = {_RUN: _letters(json.dumps(said, sort_keys=True))}
        for name, state in self._states.items():
            tensors |= {f"{_STATE}{name}#{key}": np.asarray(leaf) for key, leaf in state.items()}
        metadata = {"kind": "journal"}
        if self.best is not None:
            layer, error = self.best
            tensors |= to_arrays(layer)
            tensors["seen"] = layer.seen if self._seen is None else self._seen
            if isinstance(layer, AttentionLayer):
                causal = str(bool(tensors.pop("causal"))).lower()
                metadata = {"kind": "layer", "causal": causal, "held_out_loss": repr(error)}
        tensors[_DIGEST] = _digest(tensors, metadata)
        try:
            storage.write_tensors(path, tensors, metadata)
        except ValueError as error:  # the folder was there when the run began
            raise OSError(str(error)) from None
        self._changed = False
        self._written = time.monotonic()
        self._cost = self._written - began

    def _read(self, path: str | Path) -> None:
        self.resumed = True
        try:
            tensors, metadata = storage.read_tensors(path, kind=None, required=())
        except ValueError:
            raise self.damaged() from None
        metadata.pop("mhalearn_version", None)
        digest = tensors.pop(_DIGEST, np.zeros(0, np.uint8))
        self._found = _digest(tensors, metadata)
        if digest.size or any(name.startswith(_OURS) for name in tensors):
            if not np.array_equal(digest, self._found):
                raise self.damaged()
            self._take(tensors)
        elif metadata.get("kind") != "layer":
            raise self.damaged()
        else:
            self.is_plain = True
        if metadata.get("kind") == "layer":
            tensors["causal"] = np.array(metadata.get("causal") == "true")
            try:
                layer = from_arrays(tensors)
                error = float(metadata.get("held_out_loss", "inf"))
            except (ValueError, KeyError):
                raise self.damaged() from None
            self.best = layer, error if error >= 0 else np.inf

    def _share(self, path: str | Path) -> None:
        """See that all processes have read the same; from then on the first one writes."""
        if np.any(devices.all_gather_rows(self._found[None]) != self._found):
            raise ValueError(
                f"{storage.show(path)}: not all processes see the same checkpoint: name a file "
                "that all of them see"
            )
        if not devices.is_first():
            self.path = None

    def _take(self, tensors: StateArrays) -> None:
        """Everything but the layer, if this is the run that was recorded."""
        try:
            said = json.loads(tensors.pop(_RUN).tobytes())
            recorded, self.records = dict(said["run"]), int(said["records"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self.damaged() from None
        shown = storage.show(self.path or "")
        for name, asked in self._run.items():
            found = recorded.get(name)
            if found == asked:
                continue
            if name == "examples":
                raise ValueError(
                    f"{shown}: the checkpoint is of a run on other examples: give those, or remove "
                    "the file to start anew"
                )
            raise ValueError(
                f"{shown}: the checkpoint is of a run with {name}={ascii(found)[:40]}, now it is "
                f"{asked!r}: ask for the same, or remove the file to start anew"
            )
        for name, tensor in tensors.items():
            if name.startswith(_STATE):
                stage, _, key = name.removeprefix(_STATE).rpartition("#")
                self._states.setdefault(stage, {})[key] = tensor

    def damaged(self) -> ValueError:
        """What to raise where states are not what a learner has recorded."""
        return ValueError(
            f"{storage.show(self.path or '')} is damaged or no checkpoint: remove the file to "
            "start anew"
        )


@contextmanager
def hold_checkpoint(path: str | Path | None) -> Iterator[None]:
    """Keep other runs from a checkpoint; the first process holds it for all those of its run."""
    refusal: ValueError | None = None
    with ExitStack() as held:
        if path is not None and devices.is_first():
            try:
                held.enter_context(locked(path))
            except ValueError as error:
                refusal = error
        if path is not None and devices.any_process(refusal is not None):
            raise refusal or ValueError(f"{storage.show(path)}: the first process cannot use it")
        yield


def holds_something(path: str | Path) -> bool:
    """Whether there is a file that is not empty."""
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False


def to_arrays(layer: Layer) -> StateArrays:
    """A layer's parameters as a state."""
    if not isinstance(layer, AttentionLayer):
        return {f"{_PARAMETER}{name}": np.asarray(leaf) for name, leaf in layer.params.items()}
    parts = {"theta": layer.theta, "w": layer.w, "causal": np.array(layer.causal)}
    biases = {"key_vector": layer.key_vector, "out_bias": layer.out_bias}
    return parts | {name: bias for name, bias in biases.items() if bias is not None}


def from_arrays(arrays: Mapping[str, Any], kind: Parametrisation | None = None) -> Any:
    """The layer of a state made by `to_arrays`; other arrays in it do not matter.

    kind: of attention, where it is not that of softmax heads.
    """
    if kind is not None:
        named = {
            name.removeprefix(_PARAMETER): leaf
            for name, leaf in arrays.items()
            if name.startswith(_PARAMETER)
        }
        return kind.to_layer({name: named[name] for name in kind.shapes()}, Units())
    biases = arrays.get("key_vector"), arrays.get("out_bias")
    return AttentionLayer(arrays["theta"], arrays["w"], *biases, bool(arrays["causal"]))


def generator_words(rng: np.random.Generator) -> NDArray[np.uint64]:
    """Where a generator stands, as a state."""
    state = rng.bit_generator.state
    assert state["bit_generator"] == "PCG64"
    wide = b"".join(state["state"][name].to_bytes(16, "little") for name in ("state", "inc"))
    rest = [state["has_uint32"], state["uinteger"]]
    return np.concatenate([np.frombuffer(wide, "<u8"), np.array(rest, np.uint64)])


def generator_from(words: NDArray[np.uint64]) -> np.random.Generator:
    """A generator that goes on where `generator_words` saw one."""
    wide = np.asarray(words[:4], "<u8").tobytes()
    rng = np.random.default_rng(0)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {
            "state": int.from_bytes(wide[:16], "little"),
            "inc": int.from_bytes(wide[16:], "little"),
        },
        "has_uint32": int(words[4]),
        "uinteger": int(words[5]),
    }
    return rng


def _flat(state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(devices.replicate(state))[0]
    return {_key(path): leaf for path, leaf in leaves}


def _key(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _alike(known: Any, leaf: Any) -> bool:
    """Whether an array has the shape of a leaf, and its dtype if it is no plain number."""
    dtype = getattr(leaf, "dtype", np.asarray(known).dtype)
    return np.shape(known) == np.shape(leaf) and np.asarray(known).dtype == dtype


def _number(leaf: Any) -> Any:
    return leaf.item() if np.ndim(leaf) == 0 and hasattr(leaf, "item") else leaf


def _letters(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


def _digest(tensors: StateArrays, metadata: dict[str, str]) -> NDArray[np.uint8]:
    digest = blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {array.dtype.str} {tensors[name].shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return np.frombuffer(digest.digest(), np.uint8)
