"""Examples (X, F(X)), wherever they live."""

from mhalearn.examples.examples import Examples, as_examples, load_examples
from mhalearn.examples.survey import Survey, check_sizes

__all__ = ["Examples", "Survey", "as_examples", "check_sizes", "load_examples"]
