"""Rows of datasets and tensors of torch files as examples."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch

import mhalearn as mha

RNG = np.random.default_rng(0)
LENGTHS = [4, 2, 5]
X = [RNG.standard_normal((k, 3)) for k in LENGTHS]
Y = [RNG.standard_normal((k, 2)) for k in LENGTHS]
ROWS = [{"input": x, "target": y, "name": "a"} for x, y in zip(X, Y, strict=True)]


def check(examples, dtype=np.float64):
    x, y, lengths = examples.arrays()
    assert x.shape == (3, 5, 3)
    assert x.dtype == y.dtype == dtype
    np.testing.assert_array_equal(lengths, LENGTHS)
    for row, k in enumerate(LENGTHS):
        np.testing.assert_array_equal(x[row, :k], X[row].astype(dtype))
        np.testing.assert_array_equal(y[row, :k], Y[row].astype(dtype))
        assert not x[row, k:].any()


def as_lists(rows):
    return [
        {name: getattr(v, "tolist", lambda v=v: v)() for name, v in row.items()} for row in rows
    ]


def narrow(rows, dtype):
    return [row | {name: row[name].astype(dtype) for name in ("input", "target")} for row in rows]


@pytest.mark.parametrize(
    "rows", [ROWS, iter(ROWS), as_lists(ROWS)], ids=["list", "stream", "lists"]
)
def test_rows_are_padded_to_the_longest(rows):
    check(mha.Examples.from_dataset(rows, inputs="input", outputs="target"))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_dtypes_of_rows_are_kept(dtype):
    check(mha.Examples.from_dataset(narrow(ROWS, dtype), "input", "target"), dtype)


def test_padding_on_either_side_is_left_out():
    def padded(row, before, after):
        more = {
            name: np.pad(row[name], ((before, after), (0, 0)), constant_values=np.nan)
            for name in ("input", "target")
        }
        mask = [0] * before + [1] * len(row["input"]) + [0] * after
        return more | {"mask": mask}

    rows = [padded(ROWS[0], 2, 0), padded(ROWS[1], 0, 4), padded(ROWS[2], 1, 1)]
    check(mha.Examples.from_dataset(rows, "input", "target", mask="mask"))


class Value:
    def __init__(self, dtype):
        self.dtype = dtype


class List:
    def __init__(self, feature):
        self.feature = feature


class Dataset:
    """What of a Hugging Face dataset matters here: its numpy format makes float32 of all floats,
    unless told."""

    def __init__(self, rows, features, dtype=None):
        self._rows, self.features, self._dtype = rows, features, dtype

    def with_format(self, kind, columns=None, **said):
        assert kind == "numpy"
        rows = [{name: row[name] for name in columns} for row in self._rows]
        return Dataset(rows, self.features, said.get("dtype", np.float32))

    def __getitem__(self, index):
        return {
            name: np.asarray(value, self._dtype) if self._dtype else np.asarray(value).tolist()
            for name, value in self._rows[index].items()
        }

    def __len__(self):
        return len(self._rows)

    def __iter__(self):
        return (self[index] for index in range(len(self)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_declared_dtypes_are_those_of_the_examples(dtype):
    features = {name: List(List(Value(dtype))) for name in ("input", "target")}
    features["name"] = Value("string")
    rows = narrow(ROWS, dtype)
    check(mha.Examples.from_dataset(Dataset(rows, features), "input", "target"), np.dtype(dtype))
    with pytest.raises(ValueError, match="no column 'x'; there are 'input', 'target', 'name'"):
        mha.Examples.from_dataset(Dataset(rows, features), "x", "target")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_hugging_face_datasets(dtype, tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra mhalearn[datasets]")
    kind = datasets.Sequence(datasets.Sequence(datasets.Value(dtype)))
    features = datasets.Features({"input": kind, "target": kind, "name": datasets.Value("string")})
    dataset = datasets.Dataset.from_list(as_lists(narrow(ROWS, dtype)), features=features)
    check(mha.Examples.from_dataset(dataset, "input", "target"), np.dtype(dtype))
    stream = dataset.to_iterable_dataset()
    check(mha.Examples.from_dataset(stream, "input", "target"), np.dtype(dtype))
    dataset.save_to_disk(tmp_path / "one")
    for folder in (tmp_path / "one", str(tmp_path / "one")):
        check(mha.Examples.from_dataset(folder, "input", "target"), np.dtype(dtype))
    check(mha.load_examples(tmp_path / "one", inputs="input", outputs="target"), np.dtype(dtype))
    splits = datasets.DatasetDict({"train": dataset, "test": dataset})
    with pytest.raises(ValueError, match="'train', 'test': pass one of them"):
        mha.Examples.from_dataset(splits, "input", "target")
    splits.save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match="holds the splits test, train: give the folder of one"):
        mha.Examples.from_dataset(tmp_path / "two", "input", "target")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ({"train": ROWS, "test": ROWS}, "'train', 'test': pass one of them"),
        (7, "is a int: pass rows"),
        ([ROWS[0], [1, 2]], "row 1: it is a list: pass rows that are dicts"),
        ([{"input": X[0]}], "row 0: there is no column 'target'; there are 'input'"),
        ([{"input": X[0], "target": Y[1]}], "row 0: input has 4 tokens, target has 2"),
        ([{"input": np.stack([X[0]] * 3), "target": Y[0]}], "hidden states of all layers"),
        ([{"input": X[0][0], "target": Y[0]}], "a row is (tokens, features)"),
        ([{"input": [[1.0], [2.0, 3.0]], "target": Y[1]}], "no rectangular array"),
        ([ROWS[0], {"input": X[1][:, :2], "target": Y[1]}], "row 1: its inputs have 2 features"),
        ([ROWS[0], narrow(ROWS, np.float32)[1]], "row 1: its inputs have 3 features of float32"),
        ([{"input": X[0] * np.nan, "target": Y[0]}], "row 0: X has 12 NaN"),
    ],
)
def test_rows_that_are_no_examples_are_refused(rows, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        mha.Examples.from_dataset(rows, "input", "target")


def test_masks_of_rows_are_checked():
    with pytest.raises(ValueError, match="row 0: there is no column 'mask'"):
        mha.Examples.from_dataset(ROWS, "input", "target", mask="mask")
    rows = [row | {"mask": [1, 0]} for row in ROWS]
    with pytest.raises(ValueError, match=r"row 0: mask has shape \(1, 2\)"):
        mha.Examples.from_dataset(rows, "input", "target", mask="mask")


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no folder of Dataset"):
        mha.Examples.from_dataset(tmp_path, "input", "target")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="is a dataset: name its columns"):
        mha.load_examples(tmp_path)


def tensors(left):
    """X, Y and a mask of the sequences, padded on one side, with NaN where they are."""
    shape = (3, 5)
    x, y = torch.full((*shape, 3), torch.nan), torch.full((*shape, 2), torch.nan)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, k in enumerate(LENGTHS):
        at = slice(5 - k, 5) if left else slice(0, k)
        x[row, at], y[row, at], mask[row, at] = torch.tensor(X[row]), torch.tensor(Y[row]), True
    return x, y, mask


@pytest.mark.parametrize("names", [("x", "y", "mask"), ("X", "Y", "attention_mask")])
@pytest.mark.parametrize("left", [False, True])
def test_files_of_torch(names, left, tmp_path):
    path = tmp_path / "examples.pt"
    torch.save(dict(zip(names, tensors(left), strict=True)), path)
    check(mha.load_examples(path), np.float32)


def test_names_of_any_file_may_be_given(tmp_path):
    x, y, mask = tensors(left=True)
    named = {"hidden_states": x, "attention": y, "keep": mask.long()}
    torch.save(named, tmp_path / "a.pth")
    np.savez(tmp_path / "a.npz", **{name: value.numpy() for name, value in named.items()})
    import safetensors.torch

    safetensors.torch.save_file(named, tmp_path / "a.safetensors")
    for name in ("a.pth", "a.npz", "a.safetensors"):
        names = {"inputs": "hidden_states", "outputs": "attention", "mask": "keep"}
        check(mha.load_examples(tmp_path / name, **names), np.float32)
        with pytest.raises(ValueError, match="no 'kept'"):
            mha.load_examples(tmp_path / name, **names | {"mask": "kept"})


def test_lengths_of_files_of_torch(tmp_path):
    x, y, _ = tensors(left=False)
    saved = {"x": x.nan_to_num(), "y": y.nan_to_num(), "lengths": torch.tensor(LENGTHS)}
    torch.save(saved, tmp_path / "a.pt")
    check(mha.load_examples(tmp_path / "a.pt"), np.float32)


class Exploit:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"x": torch.ones(2, 3, 4)}, "there are no tensors X and Y, but 'x'"),
        ({"x": torch.ones(2, 3, 4), "y": torch.ones(3, 2)}, "Y has shape (3, 2)"),
        ((torch.ones(2, 3, 4),) * 7, "hidden states of a whole model"),
        ({"hidden_states": [torch.ones(2, 3, 4)] * 7}, "with hidden_states"),
        (Exploit(), "not a readable PyTorch file"),
    ],
)
def test_files_of_torch_that_are_no_examples_are_refused(saved, words, tmp_path, capsys):
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=re.escape(words)):
        mha.load_examples(tmp_path / "a.pt")
    assert not capsys.readouterr().out


def test_half_of_the_names_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give the names of both"):
        mha.load_examples(tmp_path / "a.npz", inputs="x")
    mha.Examples(np.ones((2, 2, 2)), np.ones((2, 2, 2))).save(tmp_path / "s", shard_size=1)
    with pytest.raises(ValueError, match="shards have the names X and Y"):
        mha.load_examples(tmp_path / "s", inputs="x", outputs="y")
