"""A layer from a box that can be asked: choose calls, learn, judge on calls not fitted."""

from mhalearn.extraction.entry import extract
from mhalearn.extraction.result import Extraction

__all__ = ["Extraction", "extract"]
