"""Which distribution inputs come from: the phases know uniform +-1 and standard Gaussian."""

from typing import Literal

import numpy as np

from mhalearn.data import Examples

Kind = Literal["boolean", "gaussian", "other"]
_EXAMPLES = 4096


def recognise_inputs(examples: Examples) -> tuple[Kind, str]:
    """The kind of the inputs, from a first chunk, and the number that speaks against it.

    +-1 inputs are known by their values, Gaussian ones by their fourth moment, and both by mean 0
    and covariance I, over all tokens of an example; each within six standard errors.
    Trust: a test of moments; a distribution that shares them passes.
    """
    x, _, _ = examples.subset(slice(0, _EXAMPLES)).arrays()
    flat = x.reshape(len(x), -1).astype(np.float64)
    n = len(flat)
    boolean = bool(np.all(np.abs(flat) == 1.0))
    covariance = flat.T @ flat / n - np.eye(flat.shape[1])
    found = {
        "mean": np.abs(flat.mean(axis=0)).max() * np.sqrt(n),
        "covariance": np.abs(covariance).max() * np.sqrt(n / (1 if boolean else 2)),
    }
    if not boolean:
        fourth = (flat**4).reshape(-1, examples.d).mean(axis=0)
        found["fourth moment"] = np.abs(fourth - 3).max() * np.sqrt(n * examples.k / 96)
    named = "uniform +-1 inputs'" if boolean else "a standard Gaussian's"
    for name, value in found.items():
        if value >= 6:
            return "other", f"a {name} {value:.0f} standard errors off {named}"
    return ("boolean" if boolean else "gaussian"), ""
