"""L-BFGS of PyTorch on the same residuals, in double precision."""

import math
import time
from typing import Any

import numpy as np

from benchmarks.cases import GOAL, End, Start, ended

HISTORY, STEPS = 30, 20  # steps between two looks at the clock


def torch_lbfgs(start: Start, deadline: float) -> End:
    """With its strong Wolfe line search; ends at the goal, where nothing improves, or in time."""
    import torch

    torch.set_num_threads(1)
    data = start.data
    tokens, queries, labels, weight, allowed = (
        torch.tensor(np.asarray(leaf))
        for leaf in (data.tokens, data.queries, data.labels, data.weight, data.allowed)
    )
    d, e, energy = tokens.shape[-1], labels.shape[-1], float(start.energy)
    flat = torch.tensor(start.flat, requires_grad=True)
    m = len(start.flat) // (d * (d + e))
    masked = not bool(allowed.all())
    fewer = torch.optim.LBFGS(
        [flat],
        max_iter=STEPS,
        max_eval=10 * STEPS,
        history_size=HISTORY,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Any:
        fewer.zero_grad()
        theta, w = flat[: m * d * d].view(m, d, d), flat[m * d * d :].view(m, d, e)
        keyed = torch.einsum("brq,mqd->bmrd", queries, theta)
        scores = keyed @ tokens[:, None].mT
        if masked:
            scores = scores.masked_fill(~allowed[:, None], -torch.inf)
        means = torch.softmax(scores, dim=-1) @ tokens[:, None]
        wrong = (torch.einsum("bmrd,mde->bre", means, w) - labels) * weight[..., None]
        loss = (wrong**2).sum() / energy
        loss.backward()
        return loss

    best = math.inf
    for _ in range(500):
        fewer.step(closure)
        loss = float(closure().detach())
        stalled = not loss < best
        best = min(loss, best) if math.isfinite(loss) else best
        if best <= GOAL or stalled or time.perf_counter() > deadline:
            break
    return ended(best, flat.detach().numpy())
