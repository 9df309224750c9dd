import hashlib
import json
import math
import os
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import safetensors.numpy
from damage import count_silent_changes

from mhalearn._runtime import storage
from mhalearn.data import Examples, box, inputs, load_examples, shards
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.random_layers import random_layer

LAYER = random_layer(2, 3, out_dim=2, seed=1)


def limit_of(examples, n_heads, **options):
    return examples.counting_limit(examples.architecture(n_heads, **options))


def some(n=10, k=4, dtype=np.float64, lengths=False, **keywords):
    x = sample_inputs("boolean", n, k, 3, seed=2).astype(dtype)
    sizes = np.random.default_rng(3).integers(1, k + 1, n) if lengths else None
    return Examples(x, LAYER(x, sizes).astype(np.float32), sizes, **keywords)


def assert_same(found, expected):
    for one, other in zip(found.arrays(), expected.arrays(), strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    assert found.has_lengths == expected.has_lengths
    assert found.metadata == expected.metadata


def test_what_is_given_is_kept():
    x, y = np.ones((5, 4, 3), np.int8), np.ones((5, 4, 2), np.float32)
    examples = Examples(x, y, metadata={"who": "me"})
    assert (examples.n, examples.k, examples.d, examples.out_dim) == (5, 4, 3, 2)
    assert len(examples) == 5
    assert examples.y_dtype == np.float32
    assert examples.metadata == {"who": "me"}
    assert not examples.has_lengths
    assert repr(examples) == "Examples(n=5, k=4, d=3, out_dim=2)"
    found_x, found_y, lengths = examples.arrays()
    assert found_x.dtype == np.int8
    assert found_y.dtype == np.float32
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [4] * 5
    assert x.flags.writeable  # the caller's array is the caller's
    assert not found_x.flags.writeable
    assert np.shares_memory(found_x, x)


def test_jax_arrays_and_lists_are_arrays_too():
    examples = Examples(jnp.ones((2, 2, 3), jnp.bfloat16), [[[1], [2]], [[3], [4]]], [1, 2])
    x, y, lengths = examples.arrays()
    assert x.dtype == jnp.bfloat16
    assert y.tolist() == [[[1], [2]], [[3], [4]]]
    assert lengths.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("x", "y", "lengths", "words"),
    [
        (np.ones((5, 4)), np.ones((5, 4, 2)), None, "X has shape"),
        (np.ones((5, 1, 3)), np.ones((5, 1, 2)), None, "k >= 2"),
        (np.ones((5, 4, 3)), np.ones((5, 4)), None, "Y has shape"),
        (np.ones((5, 4, 3)), np.ones((5, 3, 2)), None, r"expected \(5, 4, e\)"),
        (np.ones((5, 4, 3)), np.ones((4, 4, 2)), None, r"expected \(5, 4, e\)"),
        (np.ones((5, 4, 3)), np.ones((5, 4, 0)), None, r"expected \(5, 4, e\)"),
        (np.ones((5, 4, 3)), np.full((5, 4, 2), np.nan), None, "Y has 40 NaN"),
        (np.ones((5, 4, 3)), np.full((5, 4, 2), None), None, "object"),
        (np.ones((5, 4, 3)), np.ones((5, 4, 2)), [4, 4], "5 integers"),
        (np.ones((5, 4, 3)), np.ones((5, 4, 2)), [4, 4, 4, 4, 5], "between 1 and k"),
    ],
)
def test_wrong_examples_are_refused(x, y, lengths, words):
    with pytest.raises(ValueError, match=words):
        Examples(x, y, lengths)


@pytest.mark.parametrize("metadata", [{"a": {1, 2}}, {"a": float("nan")}, {"a": object()}])
def test_metadata_that_json_cannot_hold_is_refused(metadata):
    with pytest.raises(ValueError, match="metadata"):
        some(metadata=metadata)


# The three sources behave alike


def in_memory(folder, lengths):
    return some(50, lengths=lengths)


def sharded(folder, lengths):
    some(50, lengths=lengths).save(folder / "shards", shard_size=7)
    return load_examples(folder / "shards")


def drawn(folder, lengths):
    return Examples.from_callable(LAYER, n=50, k=4, d=3, seed=2)


@pytest.fixture(params=[in_memory, sharded, drawn])
def source(request, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_BLOCK_EXAMPLES", 16)
    return request.param(tmp_path, lengths=request.param is not drawn)


@pytest.mark.parametrize("size", [1, 3, 7, 16, 49, 50, 1000])
def test_chunks_are_the_examples_in_order(source, size):
    chunks = list(source.chunks(size))
    assert [len(chunk[0]) for chunk in chunks[:-1]] == [size] * (50 // size - (50 % size == 0))
    assert sum(len(chunk[0]) for chunk in chunks) == 50
    for parts, whole in zip(zip(*chunks, strict=True), source.arrays(), strict=True):
        joined = np.concatenate(parts)
        assert joined.dtype == whole.dtype
        np.testing.assert_array_equal(joined, whole)
    with pytest.raises(ValueError, match="size=0"):
        source.chunks(0)


@pytest.mark.parametrize(
    "indices",
    [slice(5, 40, 3), slice(None, None, -1), [49, 0, 17, 17, -1], np.arange(50) % 7 == 2, [3]],
)
def test_subsets_are_the_examples_asked_for(source, indices):
    subset = source.subset(indices)
    for found, whole in zip(subset.arrays(), source.arrays(), strict=True):
        assert found.dtype == whole.dtype
        np.testing.assert_array_equal(found, whole[indices])
    assert subset.has_lengths == source.has_lengths
    assert subset.metadata == source.metadata


@pytest.mark.parametrize(
    "indices", [[50], [-51], [], slice(3, 3), np.array(4), [0.5], [True, False], [[0]]]
)
def test_subsets_that_do_not_exist_are_refused(source, indices):
    with pytest.raises(ValueError, match="subset: choose at least one"):
        source.subset(indices)


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz"])
def test_every_source_can_be_saved(source, tmp_path, name):
    source.save(tmp_path / name)
    assert_same(load_examples(tmp_path / name), source)
    source.save(tmp_path / "folder", shard_size=20)
    assert_same(load_examples(tmp_path / "folder"), source)
    assert len(os.listdir(tmp_path / "folder")) == 4


def test_hashes_are_those_of_the_arrays(source):
    np.testing.assert_array_equal(source.hashes(), source.subset(slice(None)).hashes())


# Files


@pytest.mark.parametrize("x_dtype", [np.int8, np.float32, np.float64, np.int64, np.float16])
@pytest.mark.parametrize("y_dtype", [np.float32, np.float64, np.int8])
@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "folder"])
def test_files_keep_values_and_dtypes(tmp_path, x_dtype, y_dtype, name):
    rng = np.random.default_rng(0)
    x = (5 * rng.standard_normal((6, 4, 3))).astype(x_dtype)
    y = (5 * rng.standard_normal((6, 4, 2))).astype(y_dtype)
    examples = Examples(x, y, metadata={"seed": 3, "nested": [1, {"a": None}], "ü": "\n"})
    examples.save(tmp_path / name, shard_size=4 if name == "folder" else None)
    loaded = load_examples(str(tmp_path / name))
    assert_same(loaded, examples)
    assert loaded.y_dtype == y_dtype


def test_a_plain_npz_is_enough(tmp_path):
    x, y = np.ones((3, 2, 2)), np.ones((3, 2, 1))
    np.savez(tmp_path / "x.npz", X=x, Y=y, lengths=[1, 2, 2])
    examples = load_examples(tmp_path / "x.npz")
    assert examples.arrays()[2].tolist() == [1, 2, 2]
    assert examples.metadata == {}
    np.savez(tmp_path / "x.npz", X=x, Y=y[:2])
    with pytest.raises(ValueError, match=r"x\.npz: Y has shape \(2, 2, 1\)"):
        load_examples(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("name", "shard_size", "words"),
    [
        ("x.pt", None, "name a .safetensors or .npz file"),
        ("x", None, "or pass shard_size"),
        ("x.safetensors", 3, "name a folder, without .safetensors"),
        ("x", 0, "shard_size=0"),
        ("missing/x", 3, "does not exist; create it first"),
        ("file", 3, "is a file"),
        ("full", 3, "is not empty"),
    ],
)
def test_wrong_places_are_refused(tmp_path, name, shard_size, words):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_bytes(b"")
    with pytest.raises(ValueError, match=words):
        some().save(tmp_path / name, shard_size=shard_size)
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["precious"]


@pytest.mark.parametrize("name", ["missing", "missing.npz", "missing.safetensors", "file.txt"])
def test_what_is_no_examples_file_is_refused(tmp_path, name):
    (tmp_path / "file.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"does not exist|give a \.safetensors, "):
        load_examples(tmp_path / name)


def test_a_layer_is_not_examples(tmp_path):
    LAYER.save(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match=r"holds 'layer': give a file .* saved as 'examples'"):
        load_examples(tmp_path / "layer.safetensors")


# Folders of shards


@pytest.fixture
def folder(tmp_path):
    some(20, lengths=True).save(tmp_path / "shards", shard_size=8)
    return tmp_path / "shards"


def test_shards_are_read_when_used(folder):
    examples = load_examples(folder)
    chunks = examples.chunks(8)
    next(chunks)
    (folder / "shard-00002.safetensors").unlink()
    next(chunks)
    with pytest.raises(OSError, match=r"lost a shard: .*shard-00002.* does not exist"):
        next(chunks)
    assert len(examples.subset([0, 15])) == 2


def test_a_shard_that_changes_under_way_is_noticed(folder):
    examples = load_examples(folder)
    some(3, lengths=True).save(folder / "shard-00001.safetensors")
    with pytest.raises(OSError, match="has changed since it was opened"):
        examples.arrays()
    LAYER.save(folder / "shard-00001.safetensors")
    with pytest.raises(OSError, match=r"lost a shard: .*holds 'layer'"):
        examples.arrays()


@pytest.mark.parametrize(
    "shard",
    [
        some(7, lengths=True),
        some(8),
        some(8, k=5, lengths=True),
        some(8, dtype=np.int8, lengths=True),
    ],
)
def test_a_shard_of_another_shape_is_refused_at_once(folder, shard):
    shard.save(folder / "shard-00001.safetensors")
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors differs") as caught:
        load_examples(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_refused_at_once(folder):
    (folder / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors does not exist"):
        load_examples(folder)


def test_bad_values_in_a_shard_are_bad_data(folder):
    path = folder / "shard-00001.safetensors"
    tensors, metadata = storage.read_tensors(path, kind="examples", required=())
    tensors["Y"] = np.full_like(tensors["Y"], np.nan)
    storage.write_tensors(path, tensors, metadata)
    examples = load_examples(folder)
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors: Y has 64 NaN"):
        examples.arrays()


def same(found, expected):
    return all(
        one.dtype == other.dtype and one.tobytes() == other.tobytes()
        for one, other in zip(found, expected, strict=True)
    )


def test_flipped_bytes_in_a_shard_are_told(folder):
    expected = load_examples(folder).arrays()
    for path in (folder / "shard-00001.safetensors", folder / "index.json"):
        count = count_silent_changes(
            path, lambda: load_examples(folder).arrays(), lambda found: same(found, expected)
        )
        assert count == 0, path


def test_a_shard_larger_than_a_block_is_checked_as_a_whole(folder, monkeypatch):
    monkeypatch.setattr(shards, "_BLOCK", 300)
    monkeypatch.setattr("mhalearn._runtime.storage.tensors._PIECE", 200)
    path = folder / "shard-00001.safetensors"
    expected = load_examples(folder).arrays()
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"shard-00001\.safetensors is damaged: .* checksum"):
        load_examples(folder).view([8]).arrays()
    # Files that carry no checksum are read as they are.
    bare = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(bare, path, {"kind": "examples", "metadata": "{}"})
    assert not same(load_examples(folder).arrays(), expected)


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz"])
def test_flipped_bytes_in_a_file_are_told(tmp_path, name):
    examples = some(9, lengths=True)
    examples.metadata["about"] = "these"
    path = tmp_path / name
    examples.save(path)

    def is_same(found):
        return same(found.arrays(), examples.arrays()) and found.metadata == examples.metadata

    assert count_silent_changes(path, lambda: load_examples(path), is_same) == 0


def test_no_flipped_byte_of_an_array_header_in_an_npz_file_is_read_as_other_data(tmp_path):
    """NumPy stops reading where the header says, which may be before the checksum."""
    path = tmp_path / "x.npz"
    examples = some(9)
    examples.save(path)
    whole = path.read_bytes()
    header = whole.index(b"\x93NUMPY")
    for place in range(header, header + 128):
        for bit in range(8):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            with pytest.raises(ValueError, match=r"x\.npz is not a readable"):
                load_examples(path)


def test_the_index_comes_last_and_a_failure_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(box, "WAITS", ())
    calls = 0

    def breaks(x):
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no more")
        return x

    examples = Examples.from_callable(breaks, n=9000, k=2, d=2)
    with pytest.raises(OSError, match="no more"):
        examples.save(tmp_path / "shards", shard_size=1000)
    assert calls == 4
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "layer"},
        {"shards": []},
        {"shards": [{"file": "../x.safetensors", "n": 8}]},
        {"shards": [{"file": "shard-00000.safetensors"}]},
        {"shards": 5},
        {"k": "many"},
        {"k": 1},
        {"k": None},
        {"metadata": None},
    ],
)
def test_a_damaged_index_is_refused(folder, change):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | change))
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        load_examples(folder)


def test_a_folder_without_index_is_refused(folder):
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match=r"index\.json does not exist.*save the examples again"):
        load_examples(folder)


# Examples drawn on demand


def test_drawn_examples_are_the_layer_on_the_inputs_of_that_seed():
    examples = Examples.from_callable(LAYER, n=5000, k=4, d=3, seed=2)
    x, y, lengths = examples.arrays()
    assert x.dtype == np.int8
    np.testing.assert_array_equal(x, sample_inputs("boolean", 5000, 4, 3, seed=2))
    np.testing.assert_allclose(y, LAYER(x), rtol=0, atol=1e-13)
    assert (lengths == 4).all()
    assert examples.metadata == {"inputs": "boolean", "seed": 2, "noise": 0.0}


def test_nothing_is_drawn_before_it_is_used():
    seen = []

    def f(x):
        seen.append(x.shape)
        return x

    examples = Examples.from_callable(f, "gaussian", n=10**9, k=4, d=3)
    assert seen == [(2, 4, 3), (1, 4, 3)]  # one of the two once more: does it answer the same?
    assert (examples.n, examples.out_dim, examples.y_dtype) == (10**9, 3, np.float64)
    assert limit_of(examples, 1) == 18 / 12
    next(examples.chunks(5))
    assert len(seen) == 3


def test_every_pass_sees_the_same_examples_whatever_the_chunks():
    examples = Examples.from_callable(LAYER, "gaussian", n=9000, k=4, d=3, noise=0.1)
    first = examples.arrays()
    for size in (100, 5000):
        passes = [np.concatenate(parts) for parts in zip(*examples.chunks(size), strict=True)]
        for one, other in zip(passes, first, strict=True):
            np.testing.assert_array_equal(one, other)
    # A later block alone, before the first was ever drawn, has the same noise.
    fresh = Examples.from_callable(LAYER, "gaussian", n=9000, k=4, d=3, noise=0.1)
    np.testing.assert_array_equal(fresh.subset([8999]).arrays()[1][0], first[1][8999])


@pytest.mark.parametrize("n", [300, 9000])
def test_noise_is_relative_to_the_labels(n):
    clean = Examples.from_callable(LAYER, n=n, k=4, d=3).arrays()[1]
    noisy = Examples.from_callable(LAYER, n=n, k=4, d=3, noise=0.2).arrays()[1]
    rms = np.sqrt(np.mean(clean**2))
    noise = noisy - clean
    assert np.std(noise) / rms == pytest.approx(0.2, rel=0.1)
    assert abs(np.corrcoef(noise.ravel(), clean.ravel())[0, 1]) < 5 / np.sqrt(noise.size)
    flat = noise.ravel()
    assert len(np.unique(flat)) == flat.size  # no block repeats another's noise


def test_noise_keeps_float_dtypes_and_makes_integers_float():
    for f, dtype in [(lambda x: x.astype(np.float32), np.float32), (lambda x: x, np.float64)]:
        examples = Examples.from_callable(f, n=5, k=2, d=2, noise=0.5)
        assert examples.y_dtype == dtype
        assert examples.arrays()[1].dtype == dtype


class Tensor:
    """What of a PyTorch tensor matters here; it refuses to be an array while on a graph."""

    def __init__(self, array, dtype="torch.float32", detached=False):
        self.array, self.dtype, self.detached = array, dtype, detached

    def detach(self):
        return Tensor(self.array, self.dtype, True)

    def cpu(self):
        return self

    def __array__(self, dtype=None, copy=None):
        assert self.detached
        assert self.dtype == "torch.float32"
        return self.array


@pytest.mark.parametrize("wrap", [jnp.asarray, Tensor, np.ndarray.tolist])
def test_outputs_may_be_arrays_of_other_libraries(wrap):
    def f(x):
        return wrap(x.astype(np.float32))

    x, y, _ = Examples.from_callable(f, n=5, k=2, d=2).arrays()
    np.testing.assert_array_equal(x, y)


def test_a_callable_that_works_in_place_spoils_nothing():
    def f(x):
        x *= 2
        return x

    x, y, _ = Examples.from_callable(f, n=5, k=2, d=2).arrays()
    np.testing.assert_array_equal(2 * x, y)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: x[0], r"f returned shape \(4, 3\) for X of shape \(2, 4, 3\)"),
        (lambda x: x[:, :1], r"f returned shape \(2, 1, 3\) for X of shape \(2, 4, 3\)"),
        (lambda x: x[..., :0], "f returned shape"),
        (lambda x: x * np.nan, "the output of f has 24 NaN"),
        (lambda x: "abc", "the output of f has dtype"),
        (lambda x: x.astype(complex), "complex"),
    ],
)
def test_wrong_outputs_are_refused(f, words):
    with pytest.raises(ValueError, match=words):
        Examples.from_callable(f, n=10, k=4, d=3)


def test_outputs_that_change_are_refused():
    later = Examples.from_callable(lambda x: x if len(x) < 5 else x[..., :2], n=10, k=4, d=3)
    with pytest.raises(ValueError, match="e = 2, int8, after e = 3, int8"):
        later.arrays()
    later = Examples.from_callable(lambda x: x if len(x) < 5 else x * np.nan, n=10, k=4, d=3)
    with pytest.raises(ValueError, match="96 NaN"):
        later.arrays()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0}, "n=0"),
        ({"k": 1}, "k=1"),
        ({"d": 0}, "d=0"),
        ({"seed": -1}, "seed=-1"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"noise": float("nan")}, "noise=nan"),
        ({"inputs": "bool"}, "'bool' are unknown"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Examples.from_callable(LAYER, **({"n": 5, "k": 4, "d": 3} | arguments))


# Hashes


def test_hashes_see_values_not_dtypes():
    x = sample_inputs("boolean", 6, 4, 3)
    y = np.round(LAYER(x), 3).astype(np.float32)
    hashes = Examples(x, y).hashes()
    assert hashes.dtype == np.uint64
    assert len(set(hashes.tolist())) == 6
    for dtype in (np.float64, np.float32, np.int64, ">f8"):
        np.testing.assert_array_equal(Examples(x.astype(dtype), y).hashes(), hashes)
    np.testing.assert_array_equal(Examples(x, y.astype(np.float64)).hashes(), hashes)
    np.testing.assert_array_equal(Examples(x[::-1], y[::-1]).hashes(), hashes[::-1])


def test_hashes_see_every_value_and_the_shape():
    x, y = np.zeros((1, 2, 6)), np.zeros((1, 2, 2))
    base = Examples(x, y).hashes()[0]
    seen = {int(base)}
    for array in (x, y):
        for place in np.ndindex(array.shape):
            array[place] = 1.0
            seen.add(int(Examples(x, y).hashes()[0]))
            array[place] = 0.0
    seen.add(int(Examples(np.zeros((1, 4, 3)), np.zeros((1, 4, 1))).hashes()[0]))
    seen.add(int(Examples(np.zeros((1, 2, 4)), np.zeros((1, 2, 4))).hashes()[0]))
    assert len(seen) == 1 + 12 + 4 + 2
    assert Examples(-x, -y).hashes()[0] == base  # zeros of either sign
    assert np.signbit(-x).all()


def test_hashes_do_not_see_padding():
    examples = some(20, lengths=True)
    x, y, lengths = (array.copy() for array in examples.arrays())
    padding = np.arange(4) >= lengths[:, None]
    assert padding.any()
    x[padding], y[padding] = 7, 7
    np.testing.assert_array_equal(Examples(x, y, lengths).hashes(), examples.hashes())
    short = examples.subset(lengths == 2)
    assert len(short)
    cut = Examples(short.arrays()[0][:, :2], short.arrays()[1][:, :2])
    np.testing.assert_array_equal(cut.hashes(), short.hashes())


def naive_hash(parts, length, d, e):
    digest = hashlib.blake2b(np.array([length, d, e], "<u8").tobytes(), digest_size=8)
    for part in parts:
        digest.update(part.tobytes())
    return int.from_bytes(digest.digest(), "little")


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "gaussian"])
def test_a_survey_equals_a_naive_loop(kind, lengths):
    x = sample_inputs(kind, 1500, 4, 3, seed=2)
    x[:, 1] *= x[:, 0] > 0  # zeros of both signs
    sizes = np.random.default_rng(3).integers(1, 5, 1500) if lengths else np.full(1500, 4)
    y = np.asfortranarray(LAYER(x, sizes).astype(np.float32))
    hashes, input_hashes = [], []
    for x_i, y_i, length in zip(x.astype("<f8") + 0.0, y.astype("<f8") + 0.0, sizes, strict=True):
        x_i, y_i = x_i[:length], y_i[:length]
        hashes.append(naive_hash([x_i, y_i], length, 3, 2))
        input_hashes.append(naive_hash(sorted(x_i, key=np.ndarray.tobytes), length, 3, 2))
    survey = Examples(x, y, sizes).survey()
    assert survey.hashes.tolist() == hashes
    assert survey.input_hashes.tolist() == input_hashes
    assert survey.largest_x == np.abs(x).max()
    assert survey.largest_y == np.abs(y).max()


def test_input_hashes_see_neither_labels_nor_the_order_of_tokens():
    x, y, lengths = (array.copy() for array in some(50, lengths=True).arrays())
    mixed = x.copy()
    for example, length in zip(mixed, lengths, strict=True):
        example[:length] = example[:length][::-1]
    one, other = Examples(x, y, lengths).survey(), Examples(mixed, y + 1, lengths).survey()
    np.testing.assert_array_equal(one.input_hashes, other.input_hashes)
    assert not np.intersect1d(one.hashes, other.hashes).size
    changed = Examples(x + 1, y, lengths).survey()
    assert not np.intersect1d(one.input_hashes, changed.input_hashes).size


# The counting limit


def of_shape(k, d, e, lengths=None):
    return Examples(np.ones((3, k, d)), np.ones((3, k, e)), lengths)


def test_counting_limits_by_hand():
    # 3 heads, d = e = 16, k = 8: 1536 unknowns, 128 scalars an example.
    assert limit_of(of_shape(8, 16, 16), 3) == 12.0
    # One head, k = 2, d = e = 4: Theta has 16 unknowns, an example 2 min(4, 1) scalars about it.
    assert limit_of(of_shape(2, 4, 4), 1) == 8.0
    # Rank 1: outputs are multiples of one vector. Theta 7, W 4 along it; 2 scalars an example.
    assert limit_of(of_shape(2, 4, 4), 1, head_dim=1) == 5.5
    # Biases: 32 + 4 for v + 4 for c, over 8 tokens of 4.
    assert limit_of(of_shape(8, 4, 4), 1, bias=True) == 40 / 32
    # Attention of one head, k = 2, with biases: 16 + 4, over 2 min(4, 1) scalars.
    assert limit_of(of_shape(2, 4, 4), 1, bias=True) == 10.0
    # Causal: the first of two tokens sees itself alone, so that only one row tells of attention.
    assert limit_of(of_shape(2, 4, 4), 1, causal=True) == 16.0


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head_dim", [None, 1, 3, 6])
@pytest.mark.parametrize("lengths", [None, [2, 3, 5]])
@pytest.mark.parametrize("e", [1, 2, 6, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_counting_limits_equal_a_count(heads, bias, head_dim, lengths, e, causal):
    options = {"bias": bias, "head_dim": head_dim, "causal": causal}
    expected = oracles.counting_limit(lengths or [5] * 3, 6, e, heads, **options)
    found = limit_of(of_shape(5, 6, e, lengths), heads, **options)
    assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("heads", "rank", "e"), [(2, 1, 6), (1, 2, 9), (3, 1, 2)])
def test_below_the_counting_limit_narrow_layers_have_neighbours(heads, rank, e):
    """The rank of the derivative in the factors: full at twice the limit, never below the limit."""
    rng = np.random.default_rng(heads)
    shapes = [(heads, 6, rank), (heads, rank, 6), (heads, 6, rank), (heads, rank, e)]
    factors = [rng.normal(size=shape) for shape in shapes]
    limit = limit_of(of_shape(4, 6, e), heads, head_dim=rank)

    def outputs(a, b, c, w, x):
        logits = jnp.einsum("nrq,mqh,mhd,njd->nmrj", x, a, b, x)
        return jnp.einsum("nmrj,njd,mdh,mhe->nre", jax.nn.softmax(logits), x, c, w)

    def seen(n):
        x = rng.normal(size=(n, 4, 6))
        with jax.enable_x64(True):
            blocks = jax.jacobian(outputs, argnums=(0, 1, 2, 3))(*map(jnp.asarray, factors), x)
        flat = np.hstack([np.asarray(block).reshape(n * 4 * e, -1) for block in blocks])
        return np.linalg.matrix_rank(flat, tol=1e-9 * np.linalg.norm(flat, 2))

    narrow = min(rank, e)
    unknowns = heads * (rank * (12 - rank) + narrow * (6 + e - narrow))
    assert seen(math.ceil(limit) - 1) < unknowns
    assert seen(math.ceil(2 * limit)) == unknowns


def test_full_rank_counts_as_dense():
    examples = of_shape(5, 6, 4)
    assert limit_of(examples, 3, bias=True, head_dim=6) == limit_of(examples, 3, bias=True)


def test_one_token_never_determines_attention():
    assert limit_of(of_shape(5, 6, 4, [1, 1, 1]), 2) == np.inf


def test_counting_limits_of_shards_read_lengths_only(folder):
    examples = load_examples(folder)
    limit = limit_of(examples.subset(slice(None)), 2)
    assert limit_of(examples, 2) == limit
    with pytest.raises(ValueError, match="n_heads=0"):
        examples.architecture(0)
    with pytest.raises(ValueError, match="head_dim=4"):
        examples.architecture(2, head_dim=4)
    with pytest.raises(ValueError, match="n_heads is open"):
        examples.counting_limit(examples.architecture())


# Memory


def test_walking_over_lazy_examples_holds_a_block_at_a_time(tmp_path):
    shape = {"n": 40_000, "k": 4, "d": 32}
    everything = 40_000 * 4 * 32 * 8 * 2
    examples = Examples.from_callable(lambda x: x, "gaussian", **shape)
    examples.save(tmp_path / "shards", shard_size=4000)
    for lazy in (examples, load_examples(tmp_path / "shards")):
        tracemalloc.start()
        for _ in lazy.chunks(1000):
            pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < everything / 3
