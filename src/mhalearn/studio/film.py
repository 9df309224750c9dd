"""Which moments of a run have a picture, and which of them are kept."""

from collections.abc import Sequence

# Pictures taken before only every second moment has one, then every fourth, and so on.
_FEW = 64
# Seconds after which a moment has a picture in any case: somebody watches.
_PATIENCE = 1.0


class Film:
    """Chooses the moments that have a picture, evenly spread however many there will be."""

    def __init__(self) -> None:
        self._stride, self._since, self._taken = 1, 0, 0
        self._last = -float("inf")

    def takes(self, now: float) -> bool:
        """Whether a moment at `now` seconds has a picture."""
        self._since += 1
        if self._since < self._stride and now - self._last < _PATIENCE:
            return False
        self._since, self._last = 0, now
        self._taken += 1
        if self._taken >= _FEW:
            self._stride, self._taken = 2 * self._stride, _FEW // 2
        return True


def thin(places: Sequence[int]) -> int:
    """Which of some moments in a row is missed least, neither the first nor the last of them."""
    return min(range(1, len(places) - 1), key=lambda i: places[i + 1] - places[i - 1])
