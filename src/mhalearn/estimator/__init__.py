"""The scikit-learn facade: settings (`regressor`), and the order of the steps (`fitting`)."""

from mhalearn.estimator.regressor import AttentionRegressor

__all__ = ["AttentionRegressor"]
