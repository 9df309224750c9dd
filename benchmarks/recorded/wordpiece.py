"""BERT's uncased tokenizer from its vocabulary: words and punctuation, then the longest pieces."""

import re
import unicodedata
from functools import lru_cache
from pathlib import Path

_LONGEST = 100


class WordPiece:
    """Token numbers of a sentence, between [CLS] and [SEP]."""

    def __init__(self, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").split("\n")
        self._numbers = {word: number for number, word in enumerate(words) if word}
        self.pieces = lru_cache(maxsize=None)(self._pieces)

    def __call__(self, sentence: str) -> list[int]:
        plain = unicodedata.normalize("NFD", sentence.lower())
        plain = "".join(char for char in plain if unicodedata.category(char) != "Mn")
        words = re.findall(r"\w+|[^\w\s]", plain.replace("_", " _ "))
        middle = [piece for word in words for piece in self.pieces(word)]
        return [self._numbers["[CLS]"], *middle, self._numbers["[SEP]"]]

    def _pieces(self, word: str) -> tuple[int, ...]:
        found, begin = [], 0
        while begin < len(word):
            mark = "##" if begin else ""
            ends = (e for e in range(len(word), begin, -1) if mark + word[begin:e] in self._numbers)
            end = next(ends, None)
            if end is None or len(word) > _LONGEST:
                return (self._numbers["[UNK]"],)
            found.append(self._numbers[mark + word[begin:end]])
            begin = end
        return tuple(found)
