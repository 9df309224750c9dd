"""The six phases of Chen & Li on a small layer, and how they end where they cannot work."""

import mhalearn as mha

HEADS, TOKENS, FEATURES = 2, 3, 8
truth = mha.random_layer(n_heads=HEADS, d=FEATURES, scale=4.0, seed=0)


def learn(layer, n):
    examples = mha.Examples.from_callable(layer, "boolean", n=n, k=TOKENS, d=FEATURES, seed=1)
    model = mha.AttentionRegressor(n_heads=HEADS, method="sculpt", polish=False, random_state=0)
    return model.fit(examples)


model = learn(truth, 50_000)
last = {event.stage: event for event in model.trace_ if event.stage.startswith("phase")}
for stage, event in last.items():
    numbers = {name: value for name, value in event.data.items() if isinstance(value, int | float)}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
    print(f"{stage}: {shown}")
error = mha.compare(model.layer_, truth).max_error
print(f"largest parameter error before polish: {error:.2g}\n")
assert {int(stage.split()[1].rstrip(":")) for stage in last} == {1, 2, 3, 4, 5, 6}
assert error < 0.1

# Attention that is nearly flat never agrees on a sparse pattern: no row can be certified.
flat = learn(mha.random_layer(n_heads=HEADS, d=FEATURES, scale=0.05, seed=0), 50_000)
print(f"flat attention, {flat.outcome_.name}: {flat.solution_.reason}")
assert flat.outcome_ is mha.Outcome.STUCK
assert "phase" in flat.solution_.reason

# Four examples hold fewer numbers than the layer has unknowns, whatever the method.
few = learn(truth, 4)
print(f"four examples, {few.outcome_.name}: {few.solution_.reason}")
assert few.outcome_ is mha.Outcome.TOO_FEW_EXAMPLES
