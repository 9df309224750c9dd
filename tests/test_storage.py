import errno
import io
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mhalearn._runtime import storage

TENSORS = {
    "a": np.arange(6, dtype=np.int8).reshape(2, 3),
    "b": np.linspace(0, 1, 7),
    "c": np.array([0, 2**64 - 1], np.uint64),
    "d": np.float32([[1.5], [-0.0]]),
    "e": np.zeros((0, 3)),
    "f": np.array(2.0),
}
META = {"kind": "test", "said": 'ü "quoted"\nline'}


def read(path, **changes):
    return storage.read_tensors(path, **({"kind": "test", "required": ("a",)} | changes))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "x.safetensors"
    storage.write_tensors(path, TENSORS, META)
    return path


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_tensors_and_metadata_come_back_bit_for_bit(saved):
    tensors, metadata = read(saved)
    assert_same(tensors, TENSORS)
    assert metadata.pop("mhalearn_version")
    assert metadata == META
    assert os.listdir(saved.parent) == ["x.safetensors"]


def test_the_file_is_what_the_safetensors_library_reads(saved):
    assert_same(safetensors.numpy.load_file(saved), TENSORS)
    assert_same(safetensors.numpy.load(saved.read_bytes()), TENSORS)


def test_what_the_safetensors_library_writes_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(TENSORS, path, {"kind": "test"})
    assert_same(read(path)[0], TENSORS)


def test_equal_contents_give_equal_bytes(saved, tmp_path):
    other = tmp_path / "y.safetensors"
    storage.write_tensors(other, dict(reversed(TENSORS.items())), dict(reversed(META.items())))
    assert other.read_bytes() == saved.read_bytes()


def test_layouts_in_memory_do_not_matter(tmp_path):
    path = tmp_path / "x.safetensors"
    array = np.arange(24.0).reshape(2, 3, 4)
    views = {"a": array.T, "b": array[:, ::2], "c": array.astype(">f8"), "d": array[..., 0]}
    storage.write_tensors(path, views, META)
    found, _ = read(path)
    for name, view in views.items():
        np.testing.assert_array_equal(found[name], view)
        assert found[name].dtype == np.float64


def test_a_version_already_there_is_kept(tmp_path):
    path = tmp_path / "x.safetensors"
    storage.write_tensors(path, TENSORS, META | {"mhalearn_version": "0.0.1"})
    assert read(path)[1]["mhalearn_version"] == "0.0.1"


def test_half_precision_is_read_sensibly(tmp_path):
    path = tmp_path / "x.safetensors"
    values = np.array([1.0, -2.5, 0.1], np.float32)
    tensors = {"a": values.astype(ml_dtypes.bfloat16), "h": values.astype(np.float16)}
    safetensors.numpy.save_file(tensors, path, {"kind": "test"})
    found, _ = read(path)
    assert found["a"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found["a"], tensors["a"])
    assert found["h"].dtype == np.float16
    header = storage.peek_tensors(path, kind="test", required=())
    assert header.dtypes == {"a": ml_dtypes.bfloat16, "h": np.float16}
    storage.write_tensors(path, tensors, META)
    np.testing.assert_array_equal(read(path)[0]["a"], found["a"])


def test_only_the_tensors_asked_for_are_read(saved):
    tensors, _ = read(saved, only=("b", "not there"))
    assert_same(tensors, {"b": TENSORS["b"]})


def test_files_of_other_libraries_may_say_anything(tmp_path):
    path = tmp_path / "foreign.safetensors"
    safetensors.numpy.save_file({"a": np.ones((2, 3), np.float16), "b": np.zeros(4)}, path)
    assert storage.peek_shapes(path) == ({"a": (2, 3), "b": (4,)}, {})
    tensors, metadata = storage.read_tensors(path, kind=None, required=("a",), only=("a",))
    assert (list(tensors), metadata) == (["a"], {})
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"not a readable .safetensors file .*; save it again"):
        storage.peek_shapes(path)


def test_peeking_reads_the_header(saved):
    header = storage.peek_tensors(saved, kind="test", required=("a",))
    assert header.shapes == {name: array.shape for name, array in TENSORS.items()}
    assert header.dtypes == {name: array.dtype for name, array in TENSORS.items()}
    assert header.metadata["kind"] == "test"


@pytest.mark.parametrize("dtype", ["U3", object, complex, np.longdouble, "M8[s]"])
def test_dtypes_that_cannot_be_stored_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match="cannot be stored; convert"):
        storage.write_tensors(tmp_path / "x", {"a": np.zeros(2, dtype)}, META)
    assert os.listdir(tmp_path) == []


def test_metadata_that_cannot_be_stored_is_refused(tmp_path):
    with pytest.raises(ValueError, match="metadata must be strings"):
        storage.write_tensors(tmp_path / "x", TENSORS, META | {"path": "\udcff"})
    assert os.listdir(tmp_path) == []


# Writing goes well or leaves everything as it was


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "disk full"), KeyboardInterrupt()])
def test_a_broken_write_leaves_the_old_file_and_nothing_else(saved, monkeypatch, broken, error):
    before = saved.read_bytes()

    def fail(*_):
        raise error

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(type(error)):
        storage.write_tensors(saved, {"a": np.ones(1000)}, META)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["x.safetensors"]


def test_data_reach_the_disk_before_the_name_does(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1]
        )
    storage.write_atomically(tmp_path / "x", b"bytes")
    assert calls == ["fsync", "replace", "fsync"]
    assert (tmp_path / "x").read_bytes() == b"bytes"


def test_files_get_the_permissions_of_ordinary_files(tmp_path):
    storage.write_atomically(tmp_path / "x", b"")
    (tmp_path / "y").write_bytes(b"")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "x"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    storage.write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert target.read_bytes() == b"new"


WRITERS = [
    storage.check_writable,
    lambda path: storage.write_atomically(path, b""),
    lambda path: storage.write_tensors(path, TENSORS, META),
    lambda path: storage.write_npz(path, TENSORS),
]


@pytest.mark.parametrize("write", WRITERS)
def test_places_that_cannot_be_written_are_refused(tmp_path, write):
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    for name, words in {
        "missing/x": "missing does not exist; create it first",
        "file/x": "not a",
        ".": "is a folder: give the name of a file",
        "pipe": "is not a regular file",
        "y" * 300: "not a usable path",
        "nul\0byte": "not a usable path",
    }.items():
        with pytest.raises(ValueError, match=words) as caught:
            write(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch, write):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    # Not chmod: an administrator may write anywhere.
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match=r"cannot write to folder .* \(Permission denied\)"):
        write(tmp_path / "x")


def test_a_full_disk_is_not_the_callers_mistake(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(OSError, match="No space left"):
        storage.write_atomically(tmp_path / "x", b"")


def test_check_writable_leaves_an_old_file_alone(saved):
    before = saved.read_bytes()
    storage.check_writable(saved)
    storage.check_writable(saved.parent / "new")
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["x.safetensors"]


def test_a_path_is_shown_on_one_line():
    assert storage.show("a/b c.txt") == "a/b c.txt"
    assert storage.show("a\nb") == r"'a\nb'"
    assert storage.show("a\udcff") == r"'a\udcff'"
    assert storage.show("") == "''"


# Reading refuses everything that is not what was asked for


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "layer"}, "holds 'test': give a file that mhalearn saved as 'layer'"),
        ({"required": ("a", "theta")}, "no array named theta .*'a', 'b'"),
    ],
)
def test_another_kind_of_file_is_refused(saved, changes, words):
    for reader in (read, storage.peek_tensors):
        with pytest.raises(ValueError, match=words):
            reader(saved, **({"kind": "test", "required": ("a",)} | changes))


def test_a_file_that_says_nothing_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    with pytest.raises(ValueError, match="does not say what it holds"):
        read(path)


def test_a_dtype_that_numpy_lacks_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"a": np.ones(4).astype(ml_dtypes.float8_e4m3fn)}
    safetensors.numpy.save_file(tensors, path, {"kind": "test"})
    with pytest.raises(ValueError, match=r"not a readable \.safetensors file"):
        read(path)
    with pytest.raises(ValueError, match="F8_E4M3"):
        storage.peek_tensors(path, kind="test", required=())


class Bomb:
    """An object whose unpickling is seen."""

    exploded = False

    def __reduce__(self):
        return (_explode, ())


def _explode():
    Bomb.exploded = True


def torch_like(payload):
    """What torch.save writes: a zip archive with a pickle inside."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
        archive.writestr("archive/data/0", b"\0" * 64)
    return buffer.getvalue()


def npz_of_objects():
    buffer = io.BytesIO()
    np.savez(buffer, X=np.array([Bomb(), 1], object), Y=np.ones(2))
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


FOREIGN = {
    "empty": (b"", "empty"),
    "text": (b"hello, this is no array at all", "another format"),
    "pickle": (pickle.dumps({"X": Bomb()}), "pickle"),
    "old pickle": (pickle.dumps({"X": Bomb()}, protocol=0), "another format"),
    "torch": (torch_like({"X": Bomb()}), "zip archive"),
    "objects": (npz_of_objects(), "zip archive"),
    "array": (npy(np.ones(3)), "single NumPy array"),
    "object array": (npy(np.array([Bomb()], object)), "single NumPy array"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_foreign_files_are_refused_and_never_run(tmp_path, name, suffix):
    data, words = FOREIGN[name]
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    reader = read if suffix == ".safetensors" else lambda path: storage.read_npz(path, ("X", "Y"))
    with pytest.raises(ValueError, match=words) as caught:
        reader(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert not Bomb.exploded


def test_the_bomb_would_explode():
    pickle.loads(pickle.dumps(Bomb()))
    assert Bomb.exploded
    Bomb.exploded = False


def test_npz_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "x.npz"
    storage.write_npz(path, TENSORS)
    assert_same(storage.read_npz(path, ("a", "b")), TENSORS)
    first = path.read_bytes()
    storage.write_npz(path, dict(reversed(TENSORS.items())))
    assert path.read_bytes() == first
    np.savez_compressed(path, **TENSORS)
    assert_same(storage.read_npz(path, ("a", "b")), TENSORS)
    with pytest.raises(ValueError, match="no array named X or Y"):
        storage.read_npz(path, ("X", "Y"))


@pytest.mark.parametrize(
    "reader",
    [
        read,
        lambda path: storage.peek_tensors(path, kind="test", required=()),
        lambda path: storage.read_npz(path, ()),
    ],
)
def test_what_is_no_file_is_refused(tmp_path, reader):
    os.mkfifo(tmp_path / "pipe")
    for name, words in {
        "missing": "does not exist: check the path",
        ".": "is a folder",
        "pipe": "not a regular file",
        "nul\0byte": "cannot be read",
        "y" * 300: "cannot be read",
    }.items():
        with pytest.raises(ValueError, match=words) as caught:
            reader(tmp_path / name)
        assert "\n" not in str(caught.value)
