"""The clock of a run, which many processes read alike."""

import time

from mhalearn._runtime.devices import any_process


class Clock:
    """Seconds since the run began, and whether its time is up."""

    def __init__(self, max_seconds: float | None = None) -> None:
        self._began = time.monotonic()
        self._max_seconds = max_seconds
        self._over = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Whether time is up. Processes of one run ask together, and all hear the same."""
        if self._max_seconds is not None and not self._over:
            self._over = any_process(self.seconds >= self._max_seconds)
        return self._over

    def extend(self, share: float, least: float) -> None:
        """From now on, or from the limit if that is later, so much longer: a share of the limit,
        and no fewer than `least` seconds. Without a limit there is nothing to extend."""
        if self._max_seconds is not None:
            more = max(least, share * self._max_seconds)
            self._max_seconds = max(self._max_seconds, self.seconds) + more
            self._over = False

    def is_due(self, since: float, every: float) -> bool:
        """Whether `every` seconds have passed since a reading, in any process; asked together."""
        return any_process(self.seconds - since > every)
