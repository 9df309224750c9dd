"""Examples (X, F(X)), wherever they live."""

from mhalearn.examples.examples import Examples, load_examples
from mhalearn.examples.survey import Survey

__all__ = ["Examples", "Survey", "load_examples"]
