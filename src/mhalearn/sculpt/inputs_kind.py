"""Which distribution inputs come from: the phases know uniform +-1 and standard Gaussian."""

from typing import Literal

import numpy as np

from mhalearn.examples import Examples

Kind = Literal["boolean", "gaussian", "other"]
_EXAMPLES = 4096


def recognise_inputs(examples: Examples) -> tuple[Kind, str]:
    """The kind of the inputs, from a first chunk, and the number that speaks against it.

    +-1 inputs are known by their values, Gaussian ones by moments: mean 0, covariance I and
    fourth moment 3, each within six standard errors.
    """
    x, _, _ = next(examples.chunks(_EXAMPLES))
    rows = x.reshape(-1, examples.d).astype(np.float64)
    n = len(rows)
    mean = float(np.abs(rows.mean(axis=0)).max() * np.sqrt(n))
    if np.all(np.abs(rows) == 1.0):
        return (
            ("boolean", "") if mean < 6 else ("other", f"a mean {mean:.0f} standard errors off 0")
        )
    covariance = rows.T @ rows / n - np.eye(examples.d)
    spread = float(np.abs(covariance).max() * np.sqrt(n / 2))
    fourth = float(np.abs((rows**4).mean(axis=0) - 3).max() * np.sqrt(n / 96))
    for name, value in (("mean", mean), ("covariance", spread), ("fourth moment", fourth)):
        if value >= 6:
            return "other", f"a {name} {value:.0f} standard errors off a standard Gaussian's"
    return "gaussian", ""
