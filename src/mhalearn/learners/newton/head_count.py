"""The number of heads, from the examples: double it until held-out examples are explained."""

from collections.abc import Callable

from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run

# A fit with more heads must lower the held-out error by this factor to count as better.
_WORTH = 0.8
# Doubling goes on while it lowers the error by this factor: of many equal heads each explains
# little, and stopping early would take a layer of sixteen for one of one.
_PROMISING = 0.95


def choose_heads(
    fit: Callable[[int, bool], tuple[Candidate, float]], most: int, exact: float, run: Run
) -> Candidate:
    """Search for the smallest head count whose held-out error is as low as any.

    fit(m, patient) returns a solution with m heads and its held-out error. A count that explains
    the held-out examples exactly ends the doubling: surplus heads in it are merged later by the
    canonical form. Where none does, a brief fit may have been stuck, so smaller counts are tried
    again with patience; then, with noise, those between the last two doublings are bisected.
    Trust: a heuristic; `most` bounds it by the counting limit.
    """
    found: dict[int, tuple[Candidate, float]] = {}

    def attempt(m: int, patient: bool) -> None:
        tried = fit(m, patient)
        if m not in found or tried[1] < found[m][1]:
            found[m] = tried
        run.emit("head count", m, found[m][1], detail=f"{m} head{'s' * (m != 1)} tried")

    def error(m: int) -> float:
        if m not in found:
            attempt(m, False)
        return found[m][1]

    m = 1
    while error(m) > exact and m < most and not run.is_over():
        larger = min(2 * m, most)
        bar = _PROMISING * error(m)
        if error(larger) > bar and error(min(2 * larger, most)) > bar:
            break
        m = larger
    best = min(found, key=lambda count: found[count][1])
    for count in sorted(count for count in found if count < best):
        if found[best][1] <= exact or run.is_over():
            break
        attempt(count, True)
        best = min(best, count, key=lambda count: found[count][1])
    if found[best][1] <= exact:
        return found[best][0]
    bar = found[best][1] / _WORTH
    enough = min(count for count in found if found[count][1] <= bar)
    too_few = max((count for count in found if count < enough), default=0)
    while enough - too_few > 1 and not run.is_over():
        middle = (enough + too_few) // 2
        if error(middle) <= bar:
            enough = middle
        else:
            too_few = middle
    return found[enough][0]
