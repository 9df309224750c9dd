"""Whatever comes in, the answer is a ValueError of one line, and nothing is left behind."""

import io
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mhalearn._runtime import storage
from mhalearn.data import Examples, load_examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.layer import AttentionLayer, load_layer
from mhalearn.layer.random_layers import random_layer

LAYER = random_layer(2, 3, seed=1)
X = sample_inputs("boolean", 4, 3, 3)
Y = LAYER(X)

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def refuses(function, *arguments, **keywords):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        function(*arguments, **keywords)
    assert type(caught.value) is ValueError
    message = str(caught.value)
    assert message
    assert len(message.splitlines()) == 1
    return message


def refused_or_read(function, path):
    """A damaged file may by chance still be a good one; anything else is refused."""
    try:
        function(path)
    except ValueError:
        refuses(function, path)


def shapes(rank):
    return st.lists(st.integers(0, 4), min_size=rank, max_size=rank).map(tuple)


@quick
@given(st.sampled_from([0, 1, 2, 4, 5]).flatmap(shapes))
def test_wrong_ranks(shape):
    refuses(LAYER, np.ones(shape))
    refuses(Examples, np.ones(shape), Y)
    refuses(Examples, X, np.ones(shape))
    refuses(AttentionLayer, np.ones(shape), LAYER.w)
    refuses(AttentionLayer, LAYER.theta, np.ones(shape))


@quick
@given(shapes(3))
def test_mismatched_shapes(shape):
    if shape[0] == 0 or shape[1] < 2 or shape[2] != 3:
        refuses(LAYER, np.ones(shape))
    if shape[:2] != (4, 3) or shape[2] == 0:
        refuses(Examples, X, np.ones(shape))
    if shape != (4, 3, shape[2]) or shape[2] == 0:
        refuses(Examples, np.ones(shape), Y)
    if shape != (2, 3, 3):
        refuses(AttentionLayer, np.ones(shape), LAYER.w)


@quick
@given(
    arrays.arrays(np.float64, (4, 3, 3), elements=st.sampled_from([0.0, np.nan, np.inf, -np.inf]))
)
def test_values_that_are_not_finite(values):
    assume(not np.isfinite(values).all())
    refusals = [
        refuses(LAYER, values),
        refuses(Examples, values, Y),
        refuses(Examples, X, values),
        refuses(AttentionLayer, values[..., :3, :], LAYER.w),
        refuses(AttentionLayer, LAYER.theta, values),
        refuses(sample_inputs, lambda *_: values, 4, 3, 3),
        refuses(Examples.from_callable, lambda x: values, n=9, k=3, d=3),
    ]
    assert all("NaN or infinite" in message for message in refusals)


@quick
@given(
    st.one_of(
        st.text(max_size=5),
        st.binary(max_size=5),
        st.complex_numbers(),
        st.sampled_from(
            [
                [[[1, 2], [3]]],
                [[["a"]]],
                np.full((4, 3, 3), None),
                np.zeros((4, 3, 3), "M8[s]"),
                np.zeros((4, 3, 3), "f8,i4"),
                np.zeros((4, 3, 3), bool),
                np.zeros((4, 3, 3), complex),
                np.zeros((4, 3, 3), "U2"),
                np.full((4, 3, 3), 10**100),
            ]
        ),
    )
)
def test_what_is_not_numeric(value):
    refuses(LAYER, value)
    refuses(Examples, value, Y)
    refuses(Examples, X, value)
    refuses(Examples, X, Y, value)
    refuses(AttentionLayer, value, LAYER.w)
    refuses(AttentionLayer, LAYER.theta, LAYER.w, value)


@quick
@given(arrays.arrays(np.int64, shapes(1), elements=st.integers(-1, 4)))
def test_wrong_lengths(lengths):
    assume(lengths.shape != (4,) or lengths.min() < 1 or lengths.max() > 3)
    refuses(LAYER, X, lengths)
    refuses(Examples, X, Y, lengths)


@quick
@given(st.integers(-2, 3), st.integers(-2, 3), st.integers(-2, 3), st.integers(-2, 2))
def test_wrong_counts(n, k, d, seed):
    assume(n < 1 or k < 2 or d < 1 or seed < 0)
    refuses(sample_inputs, "boolean", n, k, d, seed)
    refuses(Examples.from_callable, lambda x: x, n=n, k=k, d=d, seed=seed)


# Files


def written(name):
    """The bytes of a good file of that name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        (LAYER if name.startswith("layer") else Examples(X, Y, [3, 3, 2, 1])).save(path)
        return path.read_bytes()


READERS = {
    "layer.safetensors": load_layer,
    "examples.safetensors": load_examples,
    "examples.npz": load_examples,
}
GOOD = {name: written(name) for name in READERS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def each_read(folder, name, data, check=refuses):
    """Read these bytes as that file, and see that reading leaves nothing behind."""
    path = folder / name
    path.write_bytes(data)
    check(READERS[name], path)
    assert os.listdir(folder) == [name]
    path.unlink()


@pytest.mark.parametrize("name", READERS)
def test_good_files_are_read(folder, name):
    (folder / name).write_bytes(GOOD[name])
    READERS[name](folder / name)
    (folder / name).unlink()


@pytest.mark.parametrize("name", READERS)
@quick
@given(data=st.binary(max_size=200))
def test_garbage_as_files(folder, name, data):
    each_read(folder, name, data)


@pytest.mark.parametrize("name", READERS)
def test_files_cut_at_any_byte(folder, name):
    for length in range(len(GOOD[name])):
        each_read(folder, name, GOOD[name][:length])


@pytest.mark.parametrize("name", READERS)
@settings(quick, max_examples=200)
@given(data=st.data())
def test_files_with_changed_bytes(folder, name, data):
    spoiled = bytearray(GOOD[name])
    for _ in range(data.draw(st.integers(1, 4))):
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    each_read(folder, name, bytes(spoiled), refused_or_read)


@pytest.mark.parametrize("name", READERS)
@quick
@given(
    value=st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
)
def test_pickles_as_files(folder, name, value, protocol):
    each_read(folder, name, pickle.dumps(value, protocol))
    each_read(folder, name, pickle.dumps({"X": X, "Y": Y}, protocol))


@pytest.mark.parametrize("name", READERS)
def test_arrays_of_objects_as_files(folder, name):
    buffer = io.BytesIO()
    np.savez(buffer, X=X.astype(object), Y=Y)
    each_read(folder, name, buffer.getvalue())


@pytest.mark.parametrize(
    "change",
    [
        {"theta": np.ones((2, 3, 4))},
        {"theta": np.full((2, 3, 3), np.nan)},
        {"w": np.ones((2, 3), np.int8)},
        {"key_vector": np.ones((3, 2))},
        {"out_bias": np.ones((3, 1))},
        {"seen": np.array([np.nan])},
        {"seen": np.zeros((2, 2), np.uint64)},
    ],
)
def test_good_files_of_bad_layers(tmp_path, change):
    path = tmp_path / "two\nlines.safetensors"
    tensors = {"theta": LAYER.theta, "w": LAYER.w} | change
    storage.write_tensors(path, tensors, {"kind": "layer"})
    assert refuses(load_layer, path).startswith(storage.show(path))


@pytest.mark.parametrize(
    "change",
    [
        {"X": np.ones((4, 3))},
        {"X": np.ones((4, 1, 3))},
        {"Y": np.full((4, 3, 1), np.inf)},
        {"Y": np.ones((4, 3, 1), bool)},
        {"lengths": np.array([3.0, np.nan, 1, 1])},
        {"lengths": np.array([3, 3, 3, 4])},
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_good_files_of_bad_examples(tmp_path, change, suffix):
    path = tmp_path / f"two\nlines{suffix}"
    tensors = {"X": X, "Y": Y} | change
    if suffix == ".npz":
        storage.write_npz(path, tensors)
    else:
        storage.write_tensors(path, tensors, {"kind": "examples"})
    assert refuses(load_examples, path).startswith(storage.show(path))


@pytest.mark.parametrize("metadata", ["", "{", "[1]", "5", "null", "[" * 100_000])
def test_good_files_with_bad_metadata(tmp_path, metadata):
    path = tmp_path / "x.safetensors"
    said = {"kind": "examples", "metadata": metadata}
    storage.write_tensors(path, {"X": X, "Y": Y}, said)
    assert "metadata" in refuses(load_examples, path)


@quick
@given(data=st.binary(max_size=100), cut=st.integers(0, 200))
def test_garbage_as_an_index_of_shards(data, cut):
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "shards"
        Examples(X, Y).save(shards, shard_size=3)
        before = sorted(os.listdir(shards))
        text = (shards / "index.json").read_bytes()
        for spoiled in (data, text[:cut]):
            (shards / "index.json").write_bytes(spoiled)
            refuses(load_examples, shards)
        assert sorted(os.listdir(shards)) == before


@quick
@given(st.text(max_size=300).filter(lambda text: "/" not in text))
def test_any_text_as_a_path(text):
    with tempfile.TemporaryDirectory() as folder:
        refuses(load_examples, f"{folder}/a{text}")
        refuses(load_layer, f"{folder}/a{text}")
        refuses(LAYER.save, f"{folder}/missing/a{text}")
        refuses(Examples(X, Y).save, f"{folder}/missing/a{text}.npz")
        refuses(Examples(X, Y).save, f"{folder}/missing/a{text}", shard_size=2)
        assert os.listdir(folder) == []


@quick
@given(st.text(max_size=60).filter(lambda text: "/" not in text and "\0" not in text))
def test_any_file_name_works(text):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/a{text}.safetensors"
        LAYER.save(path)
        np.testing.assert_array_equal(load_layer(path).theta, LAYER.theta)
        assert len(os.listdir(folder)) == 1
        message = refuses(load_examples, path)
        assert "holds 'layer'" in message
