"""From a torch layer, asked as a black box, to its heads and back to a module.

Needs `pip install "mhalearn[torch]"`.
"""

import numpy as np
import torch

import mhalearn as mha

torch.manual_seed(0)
secret = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=torch.float64)

# The module is only called here; its weights are not looked at.
examples = mha.Examples.from_callable(secret, "gaussian", n=200, k=6, d=8, seed=0)
model = mha.AttentionRegressor(n_heads=2, head_dim=4, random_state=0).fit(examples)

for head, theta in enumerate(model.layer_.theta):
    values = np.linalg.svd(theta, compute_uv=False)
    print(f"head {head}: singular values of Theta", np.round(values[:4], 3))
    assert values[4] < 1e-10 * values[0]  # of rank four, as a head of torch's is

error = mha.compare(model.layer_, mha.from_torch(secret)).max_error
print(f"{model.outcome_.name}: largest parameter error {error:.1e}")
assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
assert error < 1e-10

copy = mha.to_torch(model.layer_)
x = torch.randn(10, 6, 8, dtype=torch.float64)
assert torch.allclose(copy(x, x, x)[0], secret(x, x, x)[0], atol=1e-10)
