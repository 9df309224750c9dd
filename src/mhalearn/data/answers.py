"""What a box has answered: held in memory while it is little, and in a file where one is named.

A question is a sequence by its number; its tokens are hashed, so that an answer is never given to
another question.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  names bfloat16 for NumPy
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import storage

# Bytes of answers that are held in memory.
HELD = 2**26
# Bytes that stand for a question.
DIGEST = 8
_COLUMNS = "first, count, questions, dtype, k, e, labels"
_TABLES = (
    "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE IF NOT EXISTS answers (first INTEGER PRIMARY KEY, count INTEGER, questions BLOB,"
    " dtype TEXT, k INTEGER, e INTEGER, labels BLOB)",
)


class Answers:
    """Answers by the number of the first sequence they answer.

    path: a file that keeps them as they come, so that a run that broke asks none of them again.
    about: what the questions are; a file of others is refused. hold: whether to hold any.
    """

    def __init__(
        self, path: str | Path | None, about: dict[str, Any], *, hold: bool = True
    ) -> None:
        self._held: dict[int, NDArray[Any]] = {}
        self._room = HELD if hold else 0
        self._path = None if path is None else Path(path)
        if self._path is not None:
            with self._open() as file:
                for table in _TABLES:
                    file.execute(table)
                known = dict(file.execute("SELECT name, value FROM about"))
                ours = {name: str(value) for name, value in about.items()}
                for name in ours if known else ():
                    if known.get(name) != ours[name]:
                        raise ValueError(
                            f"{storage.show(self._path)}: keeps answers to other questions "
                            f"({name} {known.get(name)}, not {ours[name]}): name another file"
                        )
                file.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", ours.items())

    def find(self, first: int, x: NDArray[Any]) -> NDArray[Any] | None:
        """The answer that begins with sequence `first`, to the beginning of x; None: not asked."""
        found = self._held.get(first)
        if found is None and self._path is not None:
            found = self._read(first, x)
        return None if found is None else found[: len(x)]

    def add(self, first: int, x: NDArray[Any], labels: NDArray[Any]) -> None:
        """Keep an answer, before anything is done with it."""
        if self._path is not None:
            _, k, e = labels.shape
            row = (first, len(x), digests(x), labels.dtype.name, k, e, labels.tobytes())
            with self._open() as file:
                file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        if labels.nbytes <= self._room:
            self._held[first] = labels
            self._room -= labels.nbytes

    def rows(self) -> list[tuple[int, bytes, NDArray[Any]]]:
        """All answers in the file, in order: the number of the first sequence, the digests of all
        that were asked about together, and their labels (count, k, e)."""
        if self._path is None:
            return []
        with self._open() as file:
            known = file.execute(f"SELECT {_COLUMNS} FROM answers ORDER BY first").fetchall()
        return [self._decode(row) for row in known]

    def _read(self, first: int, x: NDArray[Any]) -> NDArray[Any] | None:
        with self._open() as file:
            asked = f"SELECT {_COLUMNS} FROM answers WHERE first = ?"
            row = file.execute(asked, (first,)).fetchone()
        if row is None:
            return None
        _, questions, found = self._decode(row)
        ours = digests(x[: len(found)])
        if questions[: len(ours)] != ours:
            raise ValueError(
                f"{self._name}: sequence {first} was another question: the sampler must draw the "
                "same tokens for the same seed; or name another file"
            )
        return found

    def _decode(self, row: tuple[Any, ...]) -> tuple[int, bytes, NDArray[Any]]:
        first, count, questions, dtype, k, e, labels = row
        try:
            return first, questions, np.frombuffer(labels, np.dtype(dtype)).reshape(count, k, e)
        except (TypeError, ValueError):
            raise ValueError(f"{self._name}: damaged at sequence {first}") from None

    @property
    def remedy(self) -> str:
        """What to do where the box stopped answering."""
        if self._path is None:
            return "pass keep=FILE, and no answer will be lost"
        return f"its answers are in {self._name}: run again with it to go on from there"

    @property
    def _name(self) -> str:
        return "" if self._path is None else storage.show(self._path)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The file for one transaction. An answer is on disk, whole, or not in it."""
        assert self._path is not None
        try:
            with closing(sqlite3.connect(self._path, timeout=60)) as file, file:
                yield file
        except sqlite3.OperationalError as error:
            raise OSError(f"{self._name}: {error}") from None
        except sqlite3.DatabaseError:
            told = f"{self._name}: keeps no answers of a box: name another file"
            raise ValueError(told) from None


def digests(x: NDArray[Any]) -> bytes:
    """DIGEST bytes for each sequence, one after the other."""
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    return b"".join(blake2b(row.tobytes(), digest_size=DIGEST).digest() for row in rows)
