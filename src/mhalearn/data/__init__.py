"""Examples (X, F(X)), wherever they live."""

from mhalearn.data.examples import Examples
from mhalearn.data.loading import as_examples, load_examples
from mhalearn.data.survey import Survey, check_sizes

__all__ = ["Examples", "Survey", "as_examples", "check_sizes", "load_examples"]
