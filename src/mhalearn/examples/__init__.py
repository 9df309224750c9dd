"""Examples (X, F(X)), wherever they live."""

from mhalearn.examples.examples import Examples, load_examples

__all__ = ["Examples", "load_examples"]
