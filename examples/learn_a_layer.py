"""Learn a random layer exactly, and certify it on fresh examples."""

import mhalearn as mha

truth = mha.random_layer(n_heads=2, d=12, scale=2.0, seed=0)
X = mha.sample_inputs("boolean", n=150, k=6, d=12, seed=1)
model = mha.AttentionRegressor(n_heads=2, random_state=0).fit(X, truth(X))

X_fresh = mha.sample_inputs("boolean", n=500, k=6, d=12, seed=2)
certificate = mha.certify(model.layer_, X_fresh, truth(X_fresh))
error = mha.compare(model.layer_, truth).max_error

print(f"{model.outcome_.name}: {model.n_heads_} heads, largest parameter error {error:.1e}")
print(f"at most {certificate.tail_bound:.2%} of inputs can be wrong, with confidence 95%")

assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
assert error < 1e-10
assert certificate.recovered
