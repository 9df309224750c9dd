"""A call that is given up after some seconds."""

from collections.abc import Callable
from queue import Empty, Queue
from threading import Thread
from typing import Any


def within(f: Callable[[Any], Any], seconds: float) -> Callable[[Any], Any]:
    """f, or a TimeoutError where it has not returned after so many seconds.

    What was begun cannot be ended from outside: it goes on in a thread of its own, and what it
    returns later is dropped.
    """

    def call(x: Any) -> Any:
        ended: Queue[tuple[Any, BaseException | None]] = Queue()

        def work() -> None:
            try:
                ended.put((f(x), None))
            except BaseException as error:  # raised where f was called
                ended.put((None, error))

        Thread(target=work, daemon=True).start()
        try:
            answer, error = ended.get(timeout=seconds)
        except Empty:
            raise TimeoutError(f"no answer in {seconds:g} seconds") from None
        if error is not None:
            raise error
        return answer

    return call
